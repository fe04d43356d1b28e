"""The persistent shell of a sandbox: what a command does to it, and how it survives commands that break it."""

import asyncio
import shlex

from prorl_gym.errors import Evidence, FailureKind, SandboxError, UnfitImageError
from prorl_gym.sandbox.bash import Bash
from prorl_gym.sandbox.breach import name_breach
from prorl_gym.sandbox.channel import Channel, StartFailure
from prorl_gym.sandbox.execute import NO_PROGRAM, not_confined
from prorl_gym.sandbox.guest.driver import MAX_COMMAND
from prorl_gym.sandbox.output import Capture
from prorl_gym.sandbox.protocol import SandboxSpec, ShellResult
from prorl_gym.sandbox.reports import Completion
from prorl_gym.sandbox.shielding import finish

_ENV = {"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "LESS": "-FRX", "DEBIAN_FRONTEND": "noninteractive"}
_KEYS = {"C-c": b"\x03", "C-d": b"\x04", "C-z": b"\x1a"}
_INTERRUPT_SECONDS = 0.5
"""How long a command has to end itself after SIGINT."""
_SETTLE_SECONDS = 1.0
"""How long bash has to report after the processes of its command were killed."""
_RESTORE_SECONDS = 5.0


class PersistentShell:
    """A ``Shell``: one bash at a time, started when it is needed.

    Args:
        channel: the guest.
        spec: working directory and output limit.
    """

    def __init__(self, channel: Channel, spec: SandboxSpec) -> None:
        self._channel = channel
        self._image = spec.image
        self._capture = Capture(spec.limits.output)
        self._workdir = self._cwd = spec.workdir
        self._environment = b""
        self._bash: Bash | None = None
        self._running: asyncio.Future[Completion] | None = None
        self._last_code = 0
        self._was_started = False
        self._revived = False

    async def run(self, command: str, *, timeout: float) -> ShellResult:
        """See ``Shell.run``. While a started command runs, nothing is run and the result says so."""
        return await self._command(command, timeout, keep=False)

    async def start(self, command: str, *, wait: float) -> ShellResult:
        """See ``Shell.start``. While a started command runs, nothing is started and the result says so."""
        return await self._command(command, wait, keep=True)

    async def send(self, text: str, *, wait: float) -> ShellResult:
        """See ``Shell.send``. With no command running, nothing is typed and the result says so."""
        if self._running is None:
            note = "[no command is running: nothing was typed]\n" if text else ""
            if self._bash is not None and not self._bash.dead:
                self._bash.drain()
            return ShellResult(self._capture.take_text() + note, self._last_code, self._cwd)
        bash = self._current()
        if text:
            bash.type(_KEYS.get(text) or text.encode("utf-8", "replace"))
        return await self._look(self._running, wait)

    async def close(self) -> None:
        """Kill the shell and everything it started. Idempotent."""
        bash, self._bash, self._running = self._bash, None, None
        if bash is not None:
            try:
                await finish(bash.kill())
            except SandboxError:  # the sandbox is gone, and the shell with it
                return

    async def open(self) -> None:
        """Start bash unless one lives.

        Raises:
            SandboxError: ``IMAGE_BROKEN`` when there never was a bash, ``SANDBOX_BROKEN_BY_AGENT`` when it is gone.
        """
        if self._bash is not None and not self._bash.dead and not self._bash.tampered:
            return
        if self._bash is not None:
            await self._must_be_explained(self._bash)
            self._revived = True  # it ended while nobody looked; the next result says so
            await self._put_away(self._bash)
        try:
            reply = await self._channel.start("shell", env=_ENV, cwd=self._workdir)
        except StartFailure as failure:
            raise self._no_bash(failure) from None
        self._bash = Bash(self._channel, reply.fields["pid"], reply.descriptors, self._capture)
        if self._was_started:
            await self._restore(self._bash)
        self._was_started = True

    async def _command(self, command: str, seconds: float, *, keep: bool) -> ShellResult:
        if self._running is not None:
            note = "[the previous command is still running: answer it, or send C-c, before the next one]\n"
            return ShellResult(self._capture.take_text(final=False) + note, None, self._cwd)
        encoded = command.encode("utf-8", "replace")
        if b"\0" in encoded or len(encoded) > MAX_COMMAND:
            what = (
                "contains a NUL byte" if b"\0" in encoded else f"is longer than {MAX_COMMAND} bytes; write it to a file"
            )
            return ShellResult(f"bash: the command {what}\n", 126, self._cwd)
        await self.open()
        self._running = running = self._current().begin(encoded)
        if keep:
            return await self._look(running, seconds)
        await self._wait(running, seconds)
        timed_out = not running.done()
        if timed_out:
            await finish(self._stop(running))
        return await self._result(running, timed_out=timed_out)

    async def _look(self, running: "asyncio.Future[Completion]", wait: float) -> ShellResult:
        """Wait for the end of a command, but not for long."""
        await self._wait(running, wait)
        if running.done():
            return await self._result(running, timed_out=False)
        self._current().drain()
        return ShellResult(self._capture.take_text(final=False), None, self._cwd, restarted=self._take_revived())

    async def _wait(self, running: "asyncio.Future[Completion]", seconds: float) -> None:
        try:
            await asyncio.wait([running], timeout=seconds)
        except asyncio.CancelledError:
            await finish(self._abandon(running))
            raise

    async def _stop(self, running: "asyncio.Future[Completion]") -> None:
        """End a command: SIGINT, then SIGKILL of what it started, then of bash with everything."""
        bash = self._current()
        if self._channel.closed:
            return
        bash.interrupt()
        await asyncio.wait([running], timeout=_INTERRUPT_SECONDS)
        if self._channel.closed:
            return
        await bash.kill_command()  # also when bash answered: what it started may have survived the interrupt
        if not running.done():
            await asyncio.wait([running], timeout=_SETTLE_SECONDS)
        if not running.done():
            await bash.kill()

    async def _abandon(self, running: "asyncio.Future[Completion]") -> None:
        """End a command whose result nobody waits for; its output must not show up in the next one's.

        Bash goes with it and is started again in the same directory when it is next needed. The interrupt may have
        struck before bash had begun the command, and a bash that handles it late loses the command that follows.
        """
        await self._stop(running)
        self._running = None
        bash = self._bash
        if bash is not None and not self._channel.closed:
            await self._put_away(bash)
            self._revived = True
        self._capture.take()

    async def _result(self, running: "asyncio.Future[Completion]", *, timed_out: bool) -> ShellResult:
        self._running = None
        completion = running.result()
        bash = self._current()
        if bash.dead and self._channel.lost():  # a dying sandbox takes its processes first
            raise SandboxError(FailureKind.SANDBOX_LOST, "the sandbox was lost during a command.")
        if not timed_out:
            await self._must_be_explained(bash)
        if completion.cwd.startswith("/"):
            self._cwd = completion.cwd
        self._last_code = completion.exit_code
        truncated = self._capture.left_out > 0
        output = self._capture.take_text()
        breach = name_breach(
            exit_code=completion.exit_code,
            observed=bash.take_breaches(),
            words=output,
            timed_out=timed_out,
            truncated=truncated,
        )
        restarted = self._take_revived()
        if bash.dead or bash.tampered:
            restarted = True
            await self._put_away(bash)
        return ShellResult(output, completion.exit_code, self._cwd, timed_out, restarted, breach)

    def _take_revived(self) -> bool:
        revived, self._revived = self._revived, False
        return revived

    async def _put_away(self, bash: Bash) -> None:
        self._environment = bash.environment or self._environment
        self._bash = None
        if bash.dead:
            bash.release()
        else:
            await finish(bash.kill())

    async def _restore(self, bash: Bash) -> None:
        """Bring a new bash to the last known directory and environment; what cannot be restored is let go."""
        # The text comes from the sandbox and goes back into it; nothing on our side reads it.
        text = self._environment + f"\nbuiltin cd -- {shlex.quote(self._cwd)}\n".encode("utf-8", "surrogateescape")
        running = bash.begin(b"{ " + text + b"} >/dev/null 2>&1\n")
        await asyncio.wait([running], timeout=_RESTORE_SECONDS)
        if running.done() and not running.exception() and running.result().cwd.startswith("/"):
            self._cwd = running.result().cwd
            return
        await finish(bash.kill())
        self._environment, self._cwd = b"", self._workdir
        self._was_started = False
        await self.open()

    async def _must_be_explained(self, bash: Bash) -> None:
        """Let the end of bash pass for its payload's doing only if that may be so: what it held is gone with it.

        Raises:
            SandboxError: SIGKILL ended it, and neither a limit nor a program inside explains that.
        """
        if bash.tampered and not bash.was_killed:  # it may have ended just now: its end is told before the next answer
            await self._channel.request("ping")
        if bash.was_killed and (evidence := await self._channel.evidence_of_kill(bash.pid)) is not None:
            await self._put_away(bash)
            what = "the shell was killed, and nothing in its sandbox explains that."
            raise SandboxError.from_evidence(evidence, what)

    def _current(self) -> Bash:
        if self._bash is None:
            raise SandboxError(FailureKind.SANDBOX_LOST, "the shell of this sandbox was closed.")
        return self._bash

    def _no_bash(self, failure: StartFailure) -> SandboxError:
        if self._channel.lost():
            return SandboxError(FailureKind.SANDBOX_LOST, f"bash could not be started: {failure.strerror}.")
        if failure.errno not in NO_PROGRAM:
            return not_confined(failure, "bash")
        if self._was_started:
            return SandboxError.from_evidence(Evidence.PAYLOAD_BROKE_SANDBOX, "bash is gone from the sandbox.")
        what = f"image {self._image!r} has no bash."
        return UnfitImageError("shell", what, "Install bash in the image.")
