"""A started sandbox, whatever backend started it: everything goes through its guest."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence

from prorl_gym.errors import Evidence
from prorl_gym.sandbox.cancellation import run_shielded
from prorl_gym.sandbox.protocol import ExecResult, FileEntry, SandboxLimits, SandboxSpec
from prorl_gym.sandbox.service.egress_proxy import EgressProxy
from prorl_gym.sandbox.service.guest_channel import GuestChannel
from prorl_gym.sandbox.service.operations import files as file_operations
from prorl_gym.sandbox.service.operations.execute import execute
from prorl_gym.sandbox.service.operations.interactive_process import InteractiveProcess
from prorl_gym.sandbox.service.operations.python_session import PersistentPython
from prorl_gym.sandbox.service.operations.shell import PersistentShell
from prorl_gym.sandbox.service.spawner_client import SandboxExit

_END_SECONDS = 10.0
"""How long the kernel may take to end the processes of a sandbox whose guest is gone."""


class RunningSandbox:
    """A ``Sandbox``.

    ``on_close`` releases what the backend holds, and is called once. ``exit_future``: how the processes around the
    guest ended, once they have; ``None``: all of them were killed from outside. ``python`` is the interpreter of the
    python session; for ``open_template`` see ``PersistentPython``. ``egress`` is closed with the sandbox.
    """

    def __init__(
        self,
        id: str,
        spec: SandboxSpec,
        channel: GuestChannel,
        on_close: Callable[[], Awaitable[None]],
        exit_future: "asyncio.Future[SandboxExit | None] | None" = None,
        *,
        egress: EgressProxy | None = None,
        python: str = "python3",
        open_template: Callable[[], socket.socket | None] | None = None,
    ) -> None:
        self.id = id
        self.spec = spec
        self._channel = channel
        self._on_close = on_close
        self._exit_future = exit_future
        self._egress = egress
        self._shell = PersistentShell(channel, spec)
        self._python = PersistentPython(channel, spec, python, open_template)
        self._closing: asyncio.Task[None] | None = None

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
        """Arguments and environment beyond ~100 kB give exit code 126."""
        self._bind_log_context()
        output = (limits or self.spec.limits).output
        return await execute(
            self._channel, argv, timeout=timeout, output=output, stdin=stdin, cwd=cwd, env=env, limits=limits
        )

    async def shell(self) -> PersistentShell:
        """Return the persistent shell, started at the first call; ``IMAGE_BROKEN`` when the image has no bash."""
        self._bind_log_context()
        await self._shell.ensure_started()
        return self._shell

    async def python(self) -> PersistentPython:
        """Return the python session, started at the first call; ``IMAGE_BROKEN`` without a working python3."""
        self._bind_log_context()
        await self._python.ensure_started()
        return self._python

    async def open_terminal(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str, rows: int, columns: int
    ) -> InteractiveProcess:
        """Start a program on a terminal of its own; see ``InteractiveProcess``. The caller closes it."""
        self._bind_log_context()
        return await InteractiveProcess.start_on_terminal(
            self._channel, argv, env=env, cwd=cwd, rows=rows, columns=columns
        )

    async def open_pipes(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str) -> InteractiveProcess:
        """Start a program on pipes that the caller reads and writes; see ``InteractiveProcess``."""
        self._bind_log_context()
        return await InteractiveProcess.start_on_pipes(self._channel, argv, env=env, cwd=cwd)

    def _bind_log_context(self) -> None:
        if self._egress is not None:
            self._egress.bind_log_context()

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        await file_operations.write_file(self._channel, path, data, mode)

    async def read_file(self, path: str, *, limit: int = 16 << 20) -> bytes:
        """Files of /proc are not regular files here."""
        return await file_operations.read_file(self._channel, path, limit)

    async def list_dir(self, path: str) -> list[FileEntry]:
        return await file_operations.list_dir(self._channel, path)

    async def listen(self, port: int) -> socket.socket:
        """A ``local`` sandbox has the host's loopback, which everything here reaches."""
        reply = await self._channel.request("listen", port=port)
        return socket.socket(fileno=reply.descriptors[0])

    async def is_alive(self) -> bool:
        # Not under a timeout: that would cancel the request, and a cancelled request waits for its answer.
        answer = asyncio.ensure_future(self._channel.request("ping"))
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([answer], timeout=self._channel.timeouts.ping)
        return answer.done() and not answer.cancelled() and answer.exception() is None

    @property
    def is_gone(self) -> bool:
        return self._channel.is_lost()

    async def loss_evidence(self) -> Evidence | None:
        if not self._channel.is_lost() or self._channel.end_reason == "closed":
            return None
        if self._channel.end_reason == "starved":
            return Evidence.SANDBOX_KILLED_OUTSIDE
        if self._channel.end_reason == "died" and self._exit_future is not None:
            await asyncio.wait([self._exit_future], timeout=_END_SECONDS)
            if self._exit_future.done():
                end = self._exit_future.result()
                return Evidence.SANDBOX_KILLED_OUTSIDE if end is None else end.evidence
        return Evidence.SANDBOX_LOST_UNEXPLAINED

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await run_shielded(asyncio.wait([self._closing]))
        self._closing.result()

    async def _close(self) -> None:
        self._channel.close()  # the guest ends at once, and everything inside with it
        await self._shell.close()
        await self._python.close()
        if self._egress is not None:
            await self._egress.close()
        await self._on_close()
