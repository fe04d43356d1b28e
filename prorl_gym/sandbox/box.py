"""A started sandbox, whatever backend started it: everything goes through its guest."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from prorl_gym.errors import Evidence
from prorl_gym.sandbox import files
from prorl_gym.sandbox.channel import Channel
from prorl_gym.sandbox.egress_proxy import EgressProxy
from prorl_gym.sandbox.execute import execute
from prorl_gym.sandbox.live import LiveProcess
from prorl_gym.sandbox.loss import End
from prorl_gym.sandbox.protocol import ExecResult, FileEntry, SandboxLimits, SandboxSpec
from prorl_gym.sandbox.python_session import IsolatedPython
from prorl_gym.sandbox.shell import PersistentShell
from prorl_gym.sandbox.shielding import finish

_PING_SECONDS = 10.0
_END_SECONDS = 10.0
"""How long the kernel may take to end the processes of a sandbox whose guest is gone."""


class Box:
    """A ``Sandbox``.

    Args:
        id: unique on this host.
        spec: what it was started from.
        channel: the connection to its guest, ready.
        on_close: releases what the backend holds; called once.
        ended: how the processes around its guest ended, once they have; ``None``: all of them were killed from outside.
        egress: its way out, if it has one; closed with it.
        python: interpreter of the python session.
    """

    def __init__(
        self,
        id: str,
        spec: SandboxSpec,
        channel: Channel,
        on_close: Callable[[], Awaitable[None]],
        ended: "asyncio.Future[End | None] | None" = None,
        *,
        egress: EgressProxy | None = None,
        python: str = "python3",
    ) -> None:
        self._id = id
        self._spec = spec
        self._channel = channel
        self._on_close = on_close
        self._ended = ended
        self._egress = egress
        self._shell = PersistentShell(channel, spec)
        self._python = IsolatedPython(channel, spec, python)
        self._closing: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        """Unique on this host."""
        return self._id

    @property
    def spec(self) -> SandboxSpec:
        """What it was started from."""
        return self._spec

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
        """See ``Sandbox.exec``. Arguments and environment beyond ~100 kB give exit code 126."""
        self._used()
        output = (limits or self._spec.limits).output
        return await execute(
            self._channel, argv, timeout=timeout, output=output, stdin=stdin, cwd=cwd, env=env, limits=limits
        )

    async def shell(self) -> PersistentShell:
        """Return the persistent shell, started at the first call.

        Raises:
            SandboxError: ``IMAGE_BROKEN`` when the image has no bash.
        """
        self._used()
        await self._shell.open()
        return self._shell

    async def python(self) -> IsolatedPython:
        """Return the python session, started at the first call.

        Raises:
            SandboxError: ``IMAGE_BROKEN`` when the image has no working python3.
        """
        self._used()
        await self._python.open()
        return self._python

    async def open_terminal(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str, rows: int, columns: int
    ) -> LiveProcess:
        """Start a program on a terminal of its own; see ``LiveProcess``. The caller closes it."""
        self._used()
        return await LiveProcess.on_terminal(self._channel, argv, env=env, cwd=cwd, rows=rows, columns=columns)

    async def open_pipes(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str) -> LiveProcess:
        """Start a program on pipes that the caller reads and writes; see ``LiveProcess``. The caller closes it."""
        self._used()
        return await LiveProcess.on_pipes(self._channel, argv, env=env, cwd=cwd)

    def _used(self) -> None:
        if self._egress is not None:
            self._egress.log.used()

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See ``Sandbox.write_file``. An existing file keeps its permissions and gains those of ``mode``."""
        await files.write_file(self._channel, path, data, mode)

    async def read_file(self, path: str, *, limit: int = 16 << 20) -> bytes:
        """See ``Sandbox.read_file``. Files of /proc are not regular files here."""
        return await files.read_file(self._channel, path, limit)

    async def list_dir(self, path: str) -> list[FileEntry]:
        """See ``Sandbox.list_dir``."""
        return await files.list_dir(self._channel, path)

    async def alive(self) -> bool:
        """Whether the guest still answers."""
        # Not under a timeout: that would cancel the request, and a cancelled request waits for its answer.
        answer = asyncio.ensure_future(self._channel.request("ping"))
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([answer], timeout=_PING_SECONDS)
        return answer.done() and not answer.cancelled() and answer.exception() is None

    @property
    def gone(self) -> bool:
        """Whether it was closed, or its guest's end of the connection is."""
        return self._channel.lost()

    async def loss(self) -> Evidence | None:
        """Return what is known about why it is gone; ``None`` when it lives, or was closed by this side."""
        if not self._channel.lost() or self._channel.end == "closed":
            return None
        if self._channel.end == "starved":
            return Evidence.SANDBOX_KILLED_OUTSIDE
        if self._channel.end == "died" and self._ended is not None:
            await asyncio.wait([self._ended], timeout=_END_SECONDS)
            if self._ended.done():
                end = self._ended.result()
                return Evidence.SANDBOX_KILLED_OUTSIDE if end is None else end.evidence
        return Evidence.SANDBOX_LOST_UNEXPLAINED

    async def close(self) -> None:
        """Kill everything inside and release it. Idempotent; every caller returns when it is done."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await finish(self._closed(self._closing))

    @staticmethod
    async def _closed(closing: "asyncio.Task[None]") -> None:
        await asyncio.shield(closing)

    async def _close(self) -> None:
        self._channel.close()  # the guest ends at once, and everything inside with it
        await self._shell.close()
        await self._python.close()
        if self._egress is not None:
            await self._egress.close()
        await self._on_close()
