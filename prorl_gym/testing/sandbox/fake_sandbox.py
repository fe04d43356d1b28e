"""Sandboxes that run nothing, for tests of the packages that use them. Files are in memory, answers are scripted."""

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from errno import EFBIG, EISDIR, ENOENT, ENOTDIR
from posixpath import basename, dirname, join, normpath
from typing import Any, TypeVar

from prorl_gym.errors import Evidence, FailureKind, SandboxError
from prorl_gym.sandbox.protocol import (
    CellResult,
    ExecResult,
    FileEntry,
    ProbeResult,
    SandboxLimits,
    SandboxSpec,
    ShellResult,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SandboxCall:
    """One call of a method, as tests look at it: ``SandboxCall("exec", (["true"],), {"timeout": 5})``."""

    method: str
    args: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class SandboxScript:
    """Answers of fake sandboxes. Each function gets the input; an exception that it raises is raised to the caller.

    ``delay`` is waited for before every answer, so that tests can cancel or time out: an ``asyncio.Event`` to set.
    """

    on_exec: Callable[[Sequence[str], bytes], ExecResult] = lambda argv, stdin: ExecResult(0, b"", b"")
    on_shell_input: Callable[[str], ShellResult] = lambda command: ShellResult("", 0, "/workspace")
    on_cell: Callable[[str], CellResult] = lambda code: CellResult("", True)
    on_start: Callable[[SandboxSpec], None] = lambda spec: None
    """May raise ``SandboxError`` to make ``FakeBackend.start_sandbox`` fail."""
    delay: asyncio.Event | None = None


class FakeSandbox:
    """A ``Sandbox`` in memory."""

    def __init__(self, spec: SandboxSpec | None = None, script: SandboxScript | None = None, id: str = "fake") -> None:
        self.spec = spec or SandboxSpec()
        self.id = id
        self.script = script or SandboxScript()
        self.files: dict[str, bytes] = {}
        """Absolute path -> content."""
        self.modes: dict[str, int] = {}
        self.calls: list[SandboxCall] = []
        """Everything that was called, in order."""
        self.cancelled: list[SandboxCall] = []
        """Calls whose await was cancelled."""
        self.closed = False
        self.evidence = Evidence.SANDBOX_KILLED_OUTSIDE
        """Why it is gone, once it is lost."""
        self.lost_error: SandboxError | None = None
        """Set it (or call ``mark_lost``) and every method raises it from then on."""
        self._ended = asyncio.Event()

    def mark_lost(self, what: str = "the fake sandbox was lost.") -> None:
        """Behave as if the sandbox had died: calls in flight and later ones raise ``SANDBOX_LOST``."""
        self.lost_error = SandboxError(FailureKind.SANDBOX_LOST, what)
        self._ended.set()

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        options = {"timeout": timeout, "stdin": stdin, "cwd": cwd, "env": env, "limits": limits}
        return await self.record_call(
            SandboxCall("exec", (list(argv),), options), lambda: self.script.on_exec(argv, stdin)
        )

    async def shell(self) -> "FakeShell":
        self._check()
        return FakeShell(self)

    async def python(self) -> "FakePythonSession":
        self._check()
        return FakePythonSession(self)

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        path = self._absolute(path)

        def write() -> None:
            if path in self._directories():
                raise IsADirectoryError(EISDIR, "Is a directory", path)
            self.files[path] = data
            self.modes[path] = self.modes.get(path, 0o644) if mode is None else mode

        await self.record_call(SandboxCall("write_file", (path, data), {"mode": mode}), write)

    async def read_file(self, path: str, *, limit: int = 16 << 20) -> bytes:
        path = self._absolute(path)

        def read() -> bytes:
            if path in self._directories():
                raise IsADirectoryError(EISDIR, "Is a directory", path)
            if path not in self.files:
                raise FileNotFoundError(ENOENT, "No such file or directory", path)
            if len(self.files[path]) > limit:
                raise OSError(EFBIG, f"larger than {limit} bytes", path)
            return self.files[path]

        return await self.record_call(SandboxCall("read_file", (path,), {"limit": limit}), read)

    async def list_dir(self, path: str) -> list[FileEntry]:
        path = self._absolute(path)

        def entries() -> list[FileEntry]:
            directories = self._directories()
            if path in self.files:
                raise NotADirectoryError(ENOTDIR, "Not a directory", path)
            if path not in directories:
                raise FileNotFoundError(ENOENT, "No such file or directory", path)
            below = [name for name in directories if name != path and dirname(name) == path]
            found = [FileEntry(basename(name), "directory", 0, 0o755) for name in below]
            for name, data in self.files.items():
                if dirname(name) == path:
                    found.append(FileEntry(basename(name), "file", len(data), self.modes.get(name, 0o644)))
            return sorted(found, key=lambda entry: entry.name)

        return await self.record_call(SandboxCall("list_dir", (path,)), entries)

    async def listen(self, port: int) -> socket.socket:
        """Listen on this host's loopback, always at a free port: fakes share it. ``getsockname`` names it."""
        return await self.record_call(SandboxCall("listen", (port,)), lambda: socket.create_server(("127.0.0.1", 0)))

    async def is_alive(self) -> bool:
        return self.lost_error is None and not self.closed

    async def loss_evidence(self) -> Evidence | None:
        return None if self.lost_error is None else self.evidence

    @property
    def is_gone(self) -> bool:
        return self.lost_error is not None or self.closed

    async def close(self) -> None:
        self.closed = True
        self._ended.set()

    async def record_call(self, call: SandboxCall, answer: Callable[[], T]) -> T:
        """Record a call, wait for ``script.delay``, answer."""
        self._check()
        self.calls.append(call)
        try:
            if self.script.delay is not None:
                await self._wait(self.script.delay)
        except asyncio.CancelledError:
            self.cancelled.append(call)
            raise
        self._check()
        return answer()

    async def _wait(self, delay: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (delay, self._ended)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _check(self) -> None:
        if self.lost_error is not None:
            raise self.lost_error
        if self.closed:
            raise SandboxError(FailureKind.SANDBOX_LOST, "the sandbox was closed.")

    def _absolute(self, path: str) -> str:
        return normpath(join(self.spec.workdir, path))

    def _directories(self) -> set[str]:
        found = {"/", normpath(self.spec.workdir)}
        for name in self.files:
            while (name := dirname(name)) not in found:
                found.add(name)
        return found


class FakeShell:
    """A ``Shell`` that answers from the script; commands always end at once."""

    def __init__(self, sandbox: FakeSandbox) -> None:
        self._sandbox = sandbox

    async def run_command(self, command: str, *, timeout: float) -> ShellResult:
        return await self._answer("shell.run", command, timeout=timeout)

    async def start_command(self, command: str, *, wait: float) -> ShellResult:
        return await self._answer("shell.start", command, wait=wait)

    async def send_input(self, text: str, *, wait: float) -> ShellResult:
        return await self._answer("shell.send", text, wait=wait)

    async def _answer(self, method: str, text: str, **options: float) -> ShellResult:
        call = SandboxCall(method, (text,), options)
        return await self._sandbox.record_call(call, lambda: self._sandbox.script.on_shell_input(text))

    async def restart(self) -> ShellResult:
        answer = ShellResult("", 0, self._sandbox.spec.workdir, restarted=True)
        return await self._sandbox.record_call(SandboxCall("shell.restart", ()), lambda: answer)

    async def close(self) -> None:
        self._sandbox.calls.append(SandboxCall("shell.close", ()))


class FakePythonSession:
    """A ``PythonSession`` that answers from the script."""

    def __init__(self, sandbox: FakeSandbox) -> None:
        self._sandbox = sandbox

    async def run_cell(self, code: str, *, timeout: float) -> CellResult:
        call = SandboxCall("python.run", (code,), {"timeout": timeout})
        return await self._sandbox.record_call(call, lambda: self._sandbox.script.on_cell(code))

    async def close(self) -> None:
        self._sandbox.calls.append(SandboxCall("python.close", ()))


class FakeBackend:
    """A ``SandboxBackend`` that makes ``FakeSandbox``es and remembers them."""

    name = "fake"

    def __init__(self, script: SandboxScript | None = None) -> None:
        self.script = script or SandboxScript()
        self.started: list[FakeSandbox] = []
        """Every sandbox that was ever started; ``closed`` is set on those that are gone."""
        self.closed = False

    async def probe(self) -> ProbeResult:
        return ProbeResult(self.name, True, "in memory")

    async def start_sandbox(self, spec: SandboxSpec) -> FakeSandbox:
        self.script.on_start(spec)
        sandbox = FakeSandbox(spec, self.script, f"fake-{len(self.started)}")
        self.started.append(sandbox)
        return sandbox

    async def close(self) -> None:
        self.closed = True
        for sandbox in self.started:
            await sandbox.close()
