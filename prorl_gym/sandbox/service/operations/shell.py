"""The persistent shell of a sandbox: runs commands in one bash, and replaces a bash that a command breaks."""

import asyncio
import fcntl
import os
import re
import secrets
import shlex
import signal
import termios
import time
from contextlib import suppress
from dataclasses import dataclass

from prorl_gym.deadlines import Timeout
from prorl_gym.errors import Evidence, FailureKind, SandboxError, UnfitImageError
from prorl_gym.sandbox.cancellation import run_shielded
from prorl_gym.sandbox.guest.guest_messages import ChildStartError
from prorl_gym.sandbox.guest.terminal import MAX_COMMAND, TRAPS_MARK
from prorl_gym.sandbox.limit_breach import classify_breach
from prorl_gym.sandbox.protocol import SandboxSpec, ShellResult
from prorl_gym.sandbox.service.guest_channel import GuestChannel
from prorl_gym.sandbox.service.operations.execute import (
    UNUSABLE_PROGRAM_ERRNOS,
    ChildProcess,
    start_failure_error,
    to_exit_code,
)
from prorl_gym.sandbox.service.operations.fd_streams import FdReader, FdWriter, OutputCapture, write_in_thread

_ENV = {"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "LESS": "-FRX", "DEBIAN_FRONTEND": "noninteractive"}

_INTERRUPT_SECONDS = 0.5
"""Grace period of a command after SIGINT."""

_SETTLE_SECONDS = 1.0
"""Longest wait for bash's report after the processes of its command were killed."""

_EXIT_SECONDS = 1.0
"""Longest wait for the end of a bash that does not read: the kernel closes descriptors before it reports the end."""

_RESTORE_SECONDS = 5.0

_KEY = re.compile(r"(?i:c-|(?:ctrl|control)[-+ ])(?P<named>[A-Za-z\\\[\]])|\^(?P<caret>[A-Zcdz\\\[\]])")

_TIOCSIG = 0x40045436
"""ioctl that signals the terminal's foreground job, in any mode of the terminal."""

_TEXT_SECONDS = 10.0
"""Longest time for writing a command's text. It takes microseconds unless a payload holds the file's lock."""

_TICKS = os.sysconf("SC_CLK_TCK")

_MAX_FIELD = 16 << 10

_MAX_ENVIRONMENT = 256 << 10

_END = b"end"


class TamperedReportError(Exception):
    """Bytes on the report pipe that the driver did not write."""


@dataclass(frozen=True, slots=True)
class Completion:
    exit_code: int
    cwd: str
    state_kept: bool = True
    """Whether directory and exported variables at its end are known."""


class ReportParser:
    """Incremental parser of the driver's reports: call ``expect_nonce`` for each command, then ``feed`` bytes."""

    def __init__(self) -> None:
        self._nonce: bytes | None = None
        self._fields: list[bytes] = []
        self._partial = bytearray()
        self._too_long = False
        self.environment = b""
        """Bash code that sets the exported variables as they were after the last command that reported them."""
        self.traps = b""
        """Bash code that sets the user's ERR and DEBUG traps."""
        self.exit_cwd: str | None = None
        """Directory of bash when it reported its own end during the running command; ``None``: no such report."""

    def expect_nonce(self, nonce: str) -> None:
        self._nonce = nonce.encode()
        self.exit_cwd = None

    def feed(self, data: bytes) -> Completion | None:
        """Parse bytes; return the completion once it is complete."""
        completion = None
        pieces = data.split(b"\0")
        for index, piece in enumerate(pieces):
            self._append(piece)
            if index < len(pieces) - 1:
                completion = self._end_field() or completion
        if len(self._fields) < 3 and self._partial and self._nonce is None:
            raise TamperedReportError("bytes while no command runs")
        return completion

    def _append(self, piece: bytes) -> None:
        in_environment = len(self._fields) == 3
        if len(self._partial) + len(piece) <= (_MAX_ENVIRONMENT if in_environment else _MAX_FIELD):
            self._partial += piece
        elif in_environment:
            self._too_long = True  # a giant environment is merely not restored
        else:
            raise TamperedReportError("endless field")

    def _end_field(self) -> Completion | None:
        field = bytes(self._partial)
        self._partial.clear()
        if len(self._fields) == 3:
            if not self._too_long:
                self.environment = field
                if self._fields[1] == _END:
                    self.exit_cwd = os.fsdecode(self._fields[2])
            self._too_long = False
            self._fields.clear()
            return None
        self._fields.append(field)
        if len(self._fields) < 3:
            return None
        traps_and_nonce, code, cwd = self._fields
        traps, newline, nonce = traps_and_nonce.rpartition(b"\n")
        if self._nonce is None or nonce != self._nonce:
            raise TamperedReportError("wrong nonce")
        if code == _END:
            return None
        if not (code.isdigit() and len(code) <= 3 and int(code) <= 255):
            raise TamperedReportError("not an exit code")
        self._nonce = None
        self.traps = traps + newline
        return Completion(int(code), os.fsdecode(cwd))


class _BashProcess:
    """A started bash. Each command has a future of its own.

    ``pid`` is that of bash in the guest's pid namespace. ``descriptors``: terminal master, nonces (write), reports
    (read), traps and command text (memory file). ``capture`` gets the output of the terminal.
    """

    def __init__(self, channel: GuestChannel, pid: int, descriptors: list[int], capture: OutputCapture) -> None:
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._master, self._nonce_pipe, reports, self._command_file = descriptors
        os.set_blocking(self._nonce_pipe, False)  # a payload that reaches the pipe through /proc can fill it
        self.child = ChildProcess(channel, pid, [])
        self.terminal = FdReader(self._master, capture.feed)
        self.input = FdWriter(self._master, owns_fd=False)
        self.reports = ReportParser()
        self._report_pipe = FdReader(reports, self._on_report)
        self._command: asyncio.Future[Completion] | None = None
        self._command_start_ticks = 0
        self._terminal_modes = termios.tcgetattr(self._master)
        # No \n -> \r\n: this terminal is never displayed, and bulk output is faster.
        self._terminal_modes[1] &= ~termios.OPOST
        self.is_tampered = False
        self.is_dead = False
        self.child.exited.add_done_callback(self._on_exit)

    def begin_command(self, command: bytes) -> "asyncio.Future[Completion]":
        """Start a command (at most ``MAX_COMMAND`` bytes, no NUL); the future is done when it or bash has ended."""
        traps = self.reports.traps
        nonce = secrets.token_hex(8) + (TRAPS_MARK if traps else "")
        # Never TCSAFLUSH or TCSADRAIN: while a background job is blocked writing, they spin in the kernel for ever.
        # The driver drops input that was typed for an earlier command.
        termios.tcsetattr(self._master, termios.TCSANOW, self._terminal_modes)
        self._command_start_ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS)
        self._command = running = self._loop.create_future()
        self.reports.expect_nonce(nonce)
        text = (traps + b"\0" if traps else b"") + command + b"\0"
        written = write_in_thread(self._command_file, text)  # bash shares the position
        overdue = self._loop.call_later(_TEXT_SECONDS, written.cancel)
        written.add_done_callback(lambda _: overdue.cancel())
        written.add_done_callback(lambda done: self._send_nonce(running, nonce, not done.cancelled() and done.result()))
        return running

    def _send_nonce(self, command: "asyncio.Future[Completion]", nonce: str, is_written: bool) -> None:
        if command.done() or self._nonce_pipe < 0:
            return
        try:
            if not is_written:
                raise TimeoutError
            os.write(self._nonce_pipe, nonce.encode() + b"\0")
        except OSError:  # bash is gone or closed its end, or a payload filled the pipe or holds the text's lock
            self.is_tampered = True
            self._resolve(Completion(1, "", state_kept=False))

    def interrupt(self) -> None:
        """Send SIGINT to the foreground job (which is bash itself while it runs a builtin loop)."""
        with suppress(OSError):  # the other side is closed: there is nothing to interrupt
            fcntl.ioctl(self._master, _TIOCSIG, signal.SIGINT)

    async def kill_command(self) -> None:
        """Send SIGKILL to every process below bash that started since the command began, not to older jobs."""
        await self._channel.request("kill_tree", pid=self.child.pid, since=self._command_start_ticks)

    async def kill(self) -> None:
        """Send SIGKILL to bash and everything below it, and release the descriptors."""
        try:
            if not self._channel.is_closed:
                await self.child.kill()
        finally:
            self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close our descriptors. Idempotent."""
        self.is_dead = True
        self.input.close()
        self.terminal.close()
        self._report_pipe.close()
        if self._nonce_pipe >= 0:
            os.close(self._nonce_pipe)
            os.close(self._command_file)
            self._nonce_pipe = self._command_file = -1

    def _on_report(self, data: bytes) -> None:
        try:
            completion = self.reports.feed(data)
        except TamperedReportError:
            self.is_tampered = True
            completion = Completion(1, "", state_kept=False)
        if completion is not None:
            self._resolve(completion)

    def _on_exit(self, exited: "asyncio.Future[int]") -> None:
        self._report_pipe.drain()  # a command may have ended just before bash did
        self.is_dead = True
        if exited.cancelled():
            return
        error = exited.exception()
        if error is None:
            cwd = self.reports.exit_cwd
            self._resolve(Completion(to_exit_code(exited.result()), cwd or "", state_kept=cwd is not None))
        elif self._command is not None and not self._command.done():
            self._command.set_exception(error)
            self._command.exception()  # a command that was left running has no caller

    def _resolve(self, completion: Completion) -> None:
        if self._command is None or self._command.done():
            return
        # Everything that the command wrote is in the terminal by now: before a read returns EAGAIN, n_tty flushes
        # its buffer work.
        self.terminal.drain()
        self.input.discard_pending()
        self._command.set_result(completion)


class PersistentShell:
    """Implements ``Shell``: one bash at a time, started when it is needed."""

    def __init__(self, channel: GuestChannel, spec: SandboxSpec) -> None:
        self._channel = channel
        self._image = spec.image
        self._capture = OutputCapture(spec.limits.output)
        self._workdir = self._cwd = spec.workdir
        self._environment = b""
        self._bash: _BashProcess | None = None
        self._running: asyncio.Future[Completion] | None = None
        self._last_code = 0
        self._was_started = False
        self._was_restarted = False

    async def run_command(self, command: str, *, timeout: float) -> ShellResult:
        """While an earlier command is running, does nothing; the result has a note."""
        return await self._begin_command(command, timeout, keep_running=False)

    async def start_command(self, command: str, *, wait: float) -> ShellResult:
        """While an earlier command is running, does nothing; the result has a note."""
        return await self._begin_command(command, wait, keep_running=True)

    async def send_input(self, text: str, *, wait: float) -> ShellResult:
        """Without a running command, does nothing; the result has a note."""
        if self._running is None:
            note = "[no command is running: nothing was typed]\n" if text else ""
            if self._bash is not None and not self._bash.is_dead:
                self._bash.terminal.drain()
            return ShellResult(self._capture.pop_text() + note, self._last_code, self._cwd)
        bash = self._require_bash()
        if text:
            bash.input.write(control_key(text) or text.encode("utf-8", "replace"))
        return await self._poll(self._running, wait)

    async def restart(self) -> ShellResult:
        self._running = None
        bash = self._bash
        if bash is not None:
            bash.terminal.drain()
            await self._discard_bash(bash)
        await self.ensure_started()
        self._was_restarted = False
        return ShellResult(self._capture.pop_text(), 0, self._cwd, restarted=True)

    async def close(self) -> None:
        bash, self._bash, self._running = self._bash, None, None
        if bash is not None:
            with suppress(SandboxError):  # the sandbox is gone, and the shell with it
                await run_shielded(bash.kill())

    async def ensure_started(self) -> None:
        """Start bash unless it is running.

        Raises ``SandboxError``: ``IMAGE_BROKEN`` if there never was one, ``SANDBOX_BROKEN_BY_AGENT`` when it is gone.
        """
        if self._bash is not None and not self._bash.is_dead and not self._bash.is_tampered:
            return
        if self._bash is not None:
            await self._raise_if_killed_unexplained(self._bash)
            self._was_restarted = True  # it ended between commands; the next result is marked
            await self._discard_bash(self._bash)
        try:
            reply = await self._channel.start_child("shell", env=_ENV, cwd=self._workdir)
        except ChildStartError as failure:
            raise self._start_error(failure) from None
        self._bash = _BashProcess(self._channel, reply.fields["pid"], reply.descriptors, self._capture)
        if self._was_started:
            await self._restore(self._bash)
        self._was_started = True

    async def _begin_command(self, command: str, seconds: float, *, keep_running: bool) -> ShellResult:
        if self._running is not None:
            note = "[the previous command is still running: answer it, send C-c, or restart the shell]\n"
            return ShellResult(self._capture.pop_text(final=False) + note, None, self._cwd)
        encoded = command.encode("utf-8", "replace")
        if b"\0" in encoded or len(encoded) > MAX_COMMAND:
            too_long = f"is longer than {MAX_COMMAND} bytes; write it to a file"
            flaw = "contains a NUL byte" if b"\0" in encoded else too_long
            return ShellResult(f"bash: the command {flaw}\n", 126, self._cwd)
        await self.ensure_started()
        self._running = running = self._require_bash().begin_command(encoded)
        if keep_running:
            return await self._poll(running, seconds)
        await self._wait(running, seconds)
        timed_out = not running.done()
        if timed_out:
            await run_shielded(self._stop(running))
        return await self._result(running, timed_out=timed_out)

    async def _poll(self, running: "asyncio.Future[Completion]", wait: float) -> ShellResult:
        await self._wait(running, wait)
        if running.done():
            return await self._result(running, timed_out=False)
        self._require_bash().terminal.drain()
        return ShellResult(self._capture.pop_text(final=False), None, self._cwd, restarted=self._pop_was_restarted())

    async def _wait(self, running: "asyncio.Future[Completion]", seconds: float) -> None:
        try:
            with suppress(TimeoutError):
                async with Timeout(seconds):
                    await asyncio.wait([running])
        except asyncio.CancelledError:
            await run_shielded(self._abandon(running))
            raise

    async def _stop(self, running: "asyncio.Future[Completion]") -> None:
        """End a command: SIGINT, then SIGKILL of its processes, then of bash and everything below."""
        bash = self._require_bash()
        if self._channel.is_closed:
            return
        bash.interrupt()
        await asyncio.wait([running], timeout=_INTERRUPT_SECONDS)
        if self._channel.is_closed:
            return
        await bash.kill_command()  # even if bash answered: processes of the command may have survived the interrupt
        if not running.done():
            await asyncio.wait([running], timeout=_SETTLE_SECONDS)
        if not running.done():
            await bash.kill()

    async def _abandon(self, running: "asyncio.Future[Completion]") -> None:
        """End a command whose caller is gone; its output must not show up in the next one's.

        Bash is killed too, and started again in the same directory when it is next needed: the interrupt may have
        arrived before bash had begun the command, and a bash that handles it late loses the command that follows.
        """
        await self._stop(running)
        self._running = None
        bash = self._bash
        if bash is not None and not self._channel.is_closed:
            await self._discard_bash(bash)
            self._was_restarted = True
        self._capture.pop_bytes()

    async def _result(self, running: "asyncio.Future[Completion]", *, timed_out: bool) -> ShellResult:
        self._running = None
        completion = running.result()
        bash = self._require_bash()
        if bash.is_dead and self._channel.is_lost():  # a dying sandbox takes its processes first
            raise SandboxError(FailureKind.SANDBOX_LOST, "the sandbox was lost during a command.")
        if not timed_out:
            await self._raise_if_killed_unexplained(bash)
        if completion.cwd.startswith("/"):
            self._cwd = completion.cwd
        self._last_code = completion.exit_code
        truncated = self._capture.dropped_bytes > 0
        output = self._capture.pop_text()
        breach = classify_breach(
            exit_code=completion.exit_code,
            observed=self._channel.pop_breaches(bash.child.pid),
            output=output,
            timed_out=timed_out,
            truncated=truncated,
        )
        restarted = self._pop_was_restarted()
        if bash.is_dead or bash.is_tampered:
            restarted = True
            await self._discard_bash(bash)
        kept = restarted and completion.state_kept
        return ShellResult(output, completion.exit_code, self._cwd, timed_out, restarted, breach, state_kept=kept)

    def _pop_was_restarted(self) -> bool:
        revived, self._was_restarted = self._was_restarted, False
        return revived

    async def _discard_bash(self, bash: _BashProcess) -> None:
        self._environment = bash.reports.environment or self._environment
        self._bash = None
        if bash.is_dead:
            bash.close_descriptors()
        else:
            await run_shielded(bash.kill())

    async def _restore(self, bash: _BashProcess) -> None:
        """Restore the last known directory and environment in a new bash; without success, start with none."""
        # The text comes from the sandbox and goes back into it; the service does not parse it.
        text = self._environment + f"\nbuiltin cd -- {shlex.quote(self._cwd)}\n".encode("utf-8", "surrogateescape")
        running = bash.begin_command(b"{ " + text + b"} >/dev/null 2>&1\n")
        await asyncio.wait([running], timeout=_RESTORE_SECONDS)
        if running.done() and not running.exception() and running.result().cwd.startswith("/"):
            self._cwd = running.result().cwd
            return
        await run_shielded(bash.kill())
        self._environment, self._cwd = b"", self._workdir
        self._was_started = False
        await self.ensure_started()

    async def _raise_if_killed_unexplained(self, bash: _BashProcess) -> None:
        """Raise if SIGKILL ended bash, and neither a limit nor a program inside explains that."""
        if bash.is_tampered:
            await asyncio.wait([bash.child.exited], timeout=_EXIT_SECONDS)
            if self._channel.is_lost():
                raise SandboxError(FailureKind.SANDBOX_LOST, "the sandbox was lost before a command.")
        child = bash.child
        if child.was_killed and (evidence := await self._channel.kill_evidence(child.pid)) is not None:
            await self._discard_bash(bash)
            what = "the shell was killed, and nothing in its sandbox explains that."
            raise SandboxError.from_evidence(evidence, what)

    def _require_bash(self) -> _BashProcess:
        if self._bash is None:
            raise SandboxError(FailureKind.SANDBOX_LOST, "the shell of this sandbox was closed.")
        return self._bash

    def _start_error(self, failure: ChildStartError) -> SandboxError:
        if self._channel.is_lost():
            return SandboxError(FailureKind.SANDBOX_LOST, f"bash could not be started: {failure.strerror}.")
        if failure.errno not in UNUSABLE_PROGRAM_ERRNOS:
            return start_failure_error(failure, "bash")
        if self._was_started:
            return SandboxError.from_evidence(Evidence.PAYLOAD_BROKE_SANDBOX, "bash is gone from the sandbox.")
        what = f"image {self._image!r} has no bash."
        return UnfitImageError("shell", what, "Install bash in the image.")


def control_key(text: str) -> bytes | None:
    """Return the byte of a control key if ``text`` is exactly its name or that byte; else ``None``."""
    name = text.strip(" \t\r\n")
    if len(name) == 1 and "\x01" <= name < "\x20":
        return name.encode()
    key = _KEY.fullmatch(name.removeprefix("<").removesuffix(">"))
    return None if key is None else bytes([ord((key["named"] or key["caret"]).upper()) & 0x1F])
