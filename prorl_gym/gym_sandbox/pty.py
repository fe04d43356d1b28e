# SPDX-FileCopyrightText: Copyright (c) 2026 the prorl-gym authors
# SPDX-License-Identifier: Apache-2.0

"""Gym's PTY protocol over a live program in one of our sandboxes."""

import asyncio
import secrets
import signal
from collections.abc import AsyncIterator
from typing import Any

from prorl_gym._gym_compat import SandboxPtyError
from prorl_gym.errors import SandboxError
from prorl_gym.sandbox.service.operations.interactive_process import InteractiveProcess, OutputStream

_MAX_DETACHED_OUTPUT = 1 << 20
"""Maximum bytes of ``run_detached``'s result; beyond it Gym requires an error, never a cut result."""


class ProrlPtySession:
    """A ``SandboxPtySession``. It reads straight from the terminal in this process: there is no transport.

    Args:
        session_id: unique in its sandbox.
        live: the program.
    """

    def __init__(self, session_id: str, live: InteractiveProcess) -> None:
        self.session_id = session_id
        self.mode: str | None = "pty" if live.stderr is None else "pipe"
        self._process = live
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether it can no longer run commands."""
        return self._closed or not self._process.is_running

    async def read(self, *, timeout_s: float | None = None) -> bytes:
        """See Gym's protocol. Unread output blocks the program: nothing is lost or buffered."""
        return await self._read(self._process.stdout, timeout_s)

    async def read_stderr(self, *, timeout_s: float | None = None) -> bytes:
        """See Gym's protocol. On a terminal this stream is empty; returns at once."""
        if self._process.stderr is None:
            return b""
        return await self._read(self._process.stderr, timeout_s)

    async def _read(self, stream: OutputStream, timeout_s: float | None) -> bytes:
        if self._closed:
            return b""
        async with asyncio.timeout(timeout_s):
            chunk = await stream.read()
        if not chunk:
            await self.wait_exit()  # raises if the sandbox was lost
        return chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield output until its end."""
        while chunk := await self.read():
            yield chunk

    async def write(self, data: bytes) -> None:
        """Send bytes to the program's input."""
        if self.closed:
            raise SandboxPtyError(f"PTY session {self.session_id} has ended: nothing reads its input.")
        self._process.write(data)

    async def resize(self, rows: int, cols: int) -> None:
        """Resize the terminal; nothing happens in pipe mode."""
        if self.mode == "pty" and not self.closed:
            self._process.resize(rows, cols)

    async def send_signal(self, signal: str) -> None:
        """Send a signal by name to the program's process group."""
        await self._process.send_signal(_signal_number(signal))

    async def wait_exit(self, *, timeout_s: float | None = None) -> int:
        """Wait for the program's end."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._process.wait()
        except SandboxError as error:
            raise SandboxPtyError(str(error)) from error

    async def run_detached(self, command: str, *, poll_interval_s: float = 15.0) -> tuple[bytes, int | None]:
        """Run a command in the session's shell to its end. There is no connection to hold, so nothing is polled.

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
            if len(seen) > _MAX_DETACHED_OUTPUT:
                raise SandboxPtyError(f"A detached command wrote more than {_MAX_DETACHED_OUTPUT} bytes; use exec().")
        output, _, rest = seen.replace(b"\r\n", b"\n").partition(begin)[2].partition(end)
        code = rest.partition(b" ")[0]
        return output, int(code) if code.isdigit() else None

    async def detach(self) -> None:
        """Do nothing: there is no transport to release."""

    async def reattach(self) -> None:
        """Do nothing: see ``detach``."""

    async def close(self) -> None:
        """Kill the program with everything below it. Idempotent."""
        self._closed = True
        await self._process.close()

    async def __aenter__(self) -> "ProrlPtySession":
        """Return itself."""
        return self

    async def __aexit__(self, *_: Any) -> None:
        """Close."""
        await self.close()


def _signal_number(name: str) -> int:
    try:
        return signal.Signals[name]
    except KeyError:
        raise ValueError(f"No signal {name!r}. Use a name such as 'SIGTERM'.") from None
