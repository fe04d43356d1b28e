"""A program whose streams are read and written as they come, on a terminal or on pipes.

For people, and for protocols that bring their own framing. The persistent shell is built differently: its commands do
not travel over the terminal.
"""

import asyncio
import fcntl
import os
import secrets
import shlex
import struct
import termios
from collections.abc import Mapping, Sequence
from contextlib import suppress
from errno import EINVAL, ETIMEDOUT

from prorl_gym.errors import SandboxError
from prorl_gym.sandbox.cancellation import run_shielded
from prorl_gym.sandbox.guest.guest_messages import ChildStartError
from prorl_gym.sandbox.service.guest_channel import GuestChannel
from prorl_gym.sandbox.service.operations.execute import ChildProcess, invalid_command_reason, to_exit_code
from prorl_gym.sandbox.service.operations.fd_streams import FdWriter, write_in_thread

_CHUNK = 1 << 16
_TEXT_SECONDS = 10.0
"""How long writing the command of a terminal may take."""


class OutputStream:
    """One direction of output, read on demand: unread output stays in the kernel and holds the writer back."""

    def __init__(self, fd: int, exited: "asyncio.Future[int]") -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._exited = exited

    async def read(self) -> bytes:
        """Return the next bytes; ``b""`` when the program has ended and everything it wrote was read."""
        while True:
            ended = self._exited.done()  # read first: what it wrote before its end is then seen by this read
            try:
                return os.read(self._fd, _CHUNK)
            except BlockingIOError:
                if ended:
                    return b""
            except OSError:  # a terminal whose other side is closed gives EIO
                return b""
            loop = asyncio.get_running_loop()
            readable = asyncio.Event()
            loop.add_reader(self._fd, readable.set)
            waiting = asyncio.ensure_future(readable.wait())
            try:
                await asyncio.wait([waiting, self._exited], return_when=asyncio.FIRST_COMPLETED)
            finally:
                loop.remove_reader(self._fd)
                waiting.cancel()


class InteractiveProcess:
    """A running program. ``errors`` is ``None`` on a terminal, where both outputs are one."""

    def __init__(self, channel: GuestChannel, child: ChildProcess, feed: int, output: int, errors: int | None) -> None:
        self._channel = channel
        self._child = child
        self._input_fd = feed
        self._owned_fds = [*{feed, output}, *([] if errors is None else [errors]), *child.descriptors]
        self._writer = FdWriter(feed, owns_fd=False)
        self._closed = False
        self.stdout = OutputStream(output, child.exited)
        self.stderr = None if errors is None else OutputStream(errors, child.exited)

    @classmethod
    async def start_on_pipes(
        cls, channel: GuestChannel, argv: Sequence[str], *, env: Mapping[str, str], cwd: str
    ) -> "InteractiveProcess":
        """Start a program on three pipes."""
        child = await ChildProcess.spawn(channel, argv, env=env, cwd=cwd)
        (feed, output, errors), child.descriptors = child.descriptors, []
        return cls(channel, child, feed, output, errors)

    @classmethod
    async def start_on_terminal(
        cls, channel: GuestChannel, argv: Sequence[str], *, env: Mapping[str, str], cwd: str, rows: int, columns: int
    ) -> "InteractiveProcess":
        """Start a program on a terminal: the guest's bash becomes it. Exit code 126: no such directory."""
        if flaw := invalid_command_reason(argv, env, cwd):
            raise ChildStartError(EINVAL, "exec", flaw)
        reply = await channel.start_child("shell", env=dict(env), cwd=cwd)
        master, nonces, reports, text = reply.descriptors
        child = ChildProcess(channel, reply.fields["pid"], [nonces, reports, text])
        live = cls(channel, child, master, master, None)
        live.resize(rows, columns)
        modes = termios.tcgetattr(master)  # those that programs expect; the guest's own are for the persistent shell
        modes[1] |= termios.OPOST | termios.ONLCR
        modes[3] |= termios.ECHO | termios.ECHOE | termios.ECHOK
        termios.tcsetattr(master, termios.TCSANOW, modes)
        enter = f"cd -- {shlex.quote(cwd)} || exit 126"
        script = f"unset PROMPT_COMMAND PS1 PS2; {enter}; exec {shlex.join(argv)}"
        os.set_blocking(nonces, False)
        try:
            async with asyncio.timeout(_TEXT_SECONDS):
                await write_in_thread(text, script.encode("utf-8", "replace") + b"\0")
            with suppress(OSError):  # bash is gone, or the payload filled the pipe: bash's exit reports it
                os.write(nonces, secrets.token_hex(8).encode() + b"\0")
        except BaseException as error:
            await live.close()
            if isinstance(error, TimeoutError):  # a payload keeps the file's lock
                raise ChildStartError(ETIMEDOUT, "exec") from None
            raise
        return live

    @property
    def is_running(self) -> bool:
        return not self._closed and not self._child.exited.done()

    def write(self, data: bytes) -> None:
        """Give it input. Never blocks: input that it does not read yet is kept."""
        self._writer.write(data)

    def resize(self, rows: int, columns: int) -> None:
        """Set the terminal's size; the foreground job gets SIGWINCH."""
        fcntl.ioctl(self._input_fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    async def send_signal(self, number: int) -> None:
        """Send a signal to its process group; nothing happens when it has ended."""
        if self.is_running:
            await self._child.send_signal(number)

    async def wait(self) -> int:
        """Wait for its end and return the exit code, as a shell reports it."""
        return to_exit_code(await asyncio.shield(self._child.exited))

    async def close(self) -> None:
        """Kill it with everything below it and release the descriptors. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            if not self._channel.is_closed:
                with suppress(SandboxError):  # the sandbox is gone, and the program with it
                    await run_shielded(self._child.kill())
        finally:
            self._writer.close()
            for fd in self._owned_fds:
                os.close(fd)
