"""One bash process on its pty, as the service holds it: plain descriptors on the event loop."""

import asyncio
import fcntl
import os
import secrets
import signal
import termios
import time

from prorl_gym.sandbox.breach import Breach
from prorl_gym.sandbox.channel import Channel
from prorl_gym.sandbox.execute import Child, exit_code
from prorl_gym.sandbox.output import Capture
from prorl_gym.sandbox.reports import Completion, Reports, TamperedError
from prorl_gym.sandbox.streams import Reader, Writer, write_aside

_TIOCSIG = 0x40045436
"""Sends a signal to the terminal's foreground job, whatever mode it put the terminal in."""
_TEXT_SECONDS = 10.0
"""How long writing a command's text may take. It takes microseconds unless a payload keeps the file's lock."""
_TICKS = os.sysconf("SC_CLK_TCK")


class Bash:
    """A started bash. ``ended`` is its own end; each command has a future of its own.

    Args:
        channel: the guest.
        pid: of bash, as the guest knows it.
        descriptors: terminal master, nonces (write), reports (read), command text (memory file).
        capture: gets what appears on the terminal.
    """

    def __init__(self, channel: Channel, pid: int, descriptors: list[int], capture: Capture) -> None:
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._master, self._nonces, reports, self._text = descriptors
        os.set_blocking(self._nonces, False)  # a payload that reaches the pipe through /proc can fill it
        self._child = Child(channel, pid, [])
        self._terminal = Reader(self._master, capture.feed)
        self._typed = Writer(self._master, own=False)
        self._reports = Reports()
        self._report_pipe = Reader(reports, self._on_report)
        self._command: asyncio.Future[Completion] | None = None
        self._since = 0
        self._sane = termios.tcgetattr(self._master)
        self._sane[1] &= ~termios.OPOST  # no \n -> \r\n: nobody looks at this terminal, and bulk output is faster
        self.tampered = False
        self.dead = False
        self._child.exited.add_done_callback(self._on_exit)

    @property
    def environment(self) -> bytes:
        """Bash code that restores the exported variables."""
        return self._reports.environment

    @property
    def pid(self) -> int:
        """Of bash, as the guest knows it."""
        return self._child.pid

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended bash itself."""
        exited = self._child.exited
        return exited.done() and not exited.exception() and exited.result() == -signal.SIGKILL

    def take_breaches(self) -> list[Breach]:
        """Return the limits that something below this bash was seen to run into since the last call."""
        return self._channel.take_breaches(self._child.pid)

    def begin(self, command: bytes) -> "asyncio.Future[Completion]":
        """Give bash a command; the future is done when the command or bash itself has ended.

        Args:
            command: at most ``MAX_COMMAND`` bytes, without NUL.
        """
        nonce = secrets.token_hex(8)
        # Never TCSAFLUSH or TCSADRAIN: while a background job is blocked writing, they spin in the kernel for ever.
        # What was typed for an earlier command is dropped by the driver.
        termios.tcsetattr(self._master, termios.TCSANOW, self._sane)
        self._since = int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS)
        self._command = running = self._loop.create_future()
        self._reports.expect(nonce)
        written = write_aside(self._text, command + b"\0")  # bash shares the position
        overdue = self._loop.call_later(_TEXT_SECONDS, written.cancel)
        written.add_done_callback(lambda _: overdue.cancel())
        written.add_done_callback(lambda done: self._start(running, nonce, not done.cancelled() and done.result()))
        return running

    def _start(self, command: "asyncio.Future[Completion]", nonce: str, is_written: bool) -> None:
        """Let bash begin the command that was written."""
        if command.done() or self._nonces < 0:
            return
        try:
            if not is_written:
                raise TimeoutError
            os.write(self._nonces, nonce.encode() + b"\0")
        except OSError:  # bash is gone, or closed its end; or somebody filled the pipe, or keeps the text's lock
            self.tampered = True
            self._resolve(Completion(1, ""))

    def type(self, data: bytes) -> None:
        """Type into the running command."""
        self._typed.write(data)

    def interrupt(self) -> None:
        """SIGINT to the foreground job (which is bash itself while it runs a builtin loop)."""
        try:
            fcntl.ioctl(self._master, _TIOCSIG, signal.SIGINT)
        except OSError:  # the other side is closed: there is nobody to interrupt
            return

    async def kill_command(self) -> None:
        """SIGKILL every process below bash that started since the command began. Older jobs live on."""
        await self._channel.request("kill_tree", pid=self._child.pid, since=self._since)

    async def kill(self) -> None:
        """SIGKILL bash and everything below it, and release the descriptors."""
        try:
            if not self._channel.closed:
                await self._child.kill()
        finally:
            self.release()

    def drain(self) -> None:
        """Read what is on the terminal now."""
        self._terminal.drain()

    def release(self) -> None:
        """Close our descriptors. Idempotent."""
        self.dead = True
        self._typed.close()
        self._terminal.close()
        self._report_pipe.close()
        if self._nonces >= 0:
            os.close(self._nonces)
            os.close(self._text)
            self._nonces = self._text = -1

    def _on_report(self, data: bytes) -> None:
        try:
            completion = self._reports.feed(data)
        except TamperedError:
            self.tampered = True
            completion = Completion(1, "")
        if completion is not None:
            self._resolve(completion)

    def _on_exit(self, exited: "asyncio.Future[int]") -> None:
        self._report_pipe.drain()  # a command may have ended just before bash did
        self.dead = True
        if exited.cancelled():
            return
        error = exited.exception()
        if error is None:
            self._resolve(Completion(exit_code(exited.result()), ""))
        elif self._command is not None and not self._command.done():
            self._command.set_exception(error)
            self._command.exception()  # a command that was left running has nobody who asks

    def _resolve(self, completion: Completion) -> None:
        if self._command is None or self._command.done():
            return
        # Everything that the command wrote is in the terminal by now: a read that finds it empty has first pushed
        # what the kernel still had queued (n_tty flushes its buffer work before it says EAGAIN).
        self._terminal.drain()
        self._typed.drop()
        self._command.set_result(completion)
