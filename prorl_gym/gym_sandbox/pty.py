"""Gym's PTY protocol over a live program in one of our sandboxes."""

import asyncio
import secrets
import signal
from collections.abc import AsyncIterator
from typing import Any

from prorl_gym.errors import SandboxError
from prorl_gym.gym_sandbox._gym import SandboxPtyError
from prorl_gym.sandbox.live import LiveProcess, Stream

_DETACHED_OUTPUT = 1 << 20
"""Bytes that ``run_detached`` returns at most; Gym wants an error beyond its window, never a cut result."""


class ProrlPtySession:
    """A ``SandboxPtySession``. It lives in this process: reads come straight from the terminal, there is no transport.

    Args:
        session_id: unique in its sandbox.
        live: the program.
    """

    def __init__(self, session_id: str, live: LiveProcess) -> None:
        self.session_id = session_id
        self.mode: str | None = "pty" if live.errors is None else "pipe"
        self._live = live
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether it can no longer run commands."""
        return self._closed or not self._live.running

    async def read(self, *, timeout_s: float | None = None) -> bytes:
        """See Gym's protocol. What is not read holds the program back: nothing is lost or buffered."""
        return await self._read(self._live.output, timeout_s)

    async def read_stderr(self, *, timeout_s: float | None = None) -> bytes:
        """See Gym's protocol. On a terminal this stream is empty, which is said at once."""
        if self._live.errors is None:
            return b""
        return await self._read(self._live.errors, timeout_s)

    async def _read(self, stream: Stream, timeout_s: float | None) -> bytes:
        if self._closed:
            return b""
        async with asyncio.timeout(timeout_s):
            chunk = await stream.read()
        if not chunk:
            await self.wait_exit()  # an end that came from a lost sandbox is an error
        return chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield output until its end."""
        while chunk := await self.read():
            yield chunk

    async def write(self, data: bytes) -> None:
        """Send bytes to the program's input."""
        if self.closed:
            raise SandboxPtyError(f"PTY session {self.session_id} has ended: nothing takes its input.")
        self._live.write(data)

    async def resize(self, rows: int, cols: int) -> None:
        """Resize the terminal; nothing happens in pipe mode."""
        if self.mode == "pty" and not self.closed:
            self._live.resize(rows, cols)

    async def send_signal(self, signal: str) -> None:
        """Send a signal by name to the program's process group."""
        await self._live.signal(_number(signal))

    async def wait_exit(self, *, timeout_s: float | None = None) -> int:
        """Wait for the program's end."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._live.wait()
        except SandboxError as error:
            raise SandboxPtyError(str(error)) from error

    async def run_detached(self, command: str, *, poll_interval_s: float = 15.0) -> tuple[bytes, int | None]:
        """Run a command in the session's shell to its end. Nothing is held meanwhile, so nothing is polled.

        Raises:
            SandboxPtyError: the shell ended, or the output exceeds the window.
        """
        token = secrets.token_hex(8)
        begin, end = f"{token}B\n".encode(), f"{token}E:".encode()
        # In halves: the terminal's echo of these lines must not look like the marks.
        mark = f"printf '%s%s' '{token[:4]}'"
        await self.write(
            f"{{ {mark} '{token[4:]}B\n'\n{command}\n{mark} '{token[4:]}E:'$?' '\n}} </dev/null\n".encode()
        )
        seen = b""
        while not (end in seen and b" " in seen.partition(end)[2]):
            chunk = await self.read()
            if not chunk:
                raise SandboxPtyError(f"PTY session {self.session_id} ended before its command did.")
            seen += chunk
            if len(seen) > _DETACHED_OUTPUT:
                raise SandboxPtyError(f"A detached command wrote more than {_DETACHED_OUTPUT} bytes; use exec().")
        output, _, rest = seen.replace(b"\r\n", b"\n").partition(begin)[2].partition(end)
        code = rest.partition(b" ")[0]
        return output, int(code) if code.isdigit() else None

    async def detach(self) -> None:
        """Nothing: there is no transport to let go of."""

    async def reattach(self) -> None:
        """Nothing: see ``detach``."""

    async def close(self) -> None:
        """Kill the program with everything below it. Idempotent."""
        self._closed = True
        await self._live.close()

    async def __aenter__(self) -> "ProrlPtySession":
        """Return itself."""
        return self

    async def __aexit__(self, *_: Any) -> None:
        """Close."""
        await self.close()


def _number(name: str) -> int:
    try:
        return signal.Signals[name]
    except KeyError:
        raise ValueError(f"No signal {name!r}. Use a name such as 'SIGTERM'.") from None
