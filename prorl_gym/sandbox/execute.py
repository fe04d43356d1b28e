"""One-shot commands and, beneath them, one child on pipes."""

import asyncio
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from errno import E2BIG, EACCES, EINVAL, ELIBBAD, ELOOP, ENOENT, ENOEXEC, ENOMEM, ENOTDIR, ETXTBSY

from prorl_gym.errors import Evidence, FailureKind, SandboxError, UnusableSandboxError
from prorl_gym.sandbox.breach import Breach, name_breach
from prorl_gym.sandbox.channel import Channel, StartFailure
from prorl_gym.sandbox.native_text import flaw_of_command
from prorl_gym.sandbox.output import Capture
from prorl_gym.sandbox.protocol import ExecResult, SandboxLimits
from prorl_gym.sandbox.shielding import finish
from prorl_gym.sandbox.streams import Reader, Writer

_KILLED = 128 + signal.SIGKILL
NO_PROGRAM = (ENOENT, ENOTDIR, EACCES, ENOEXEC, ELOOP, ETXTBSY, ELIBBAD)
"""What is wrong with the file, not with the sandbox, when a program cannot be executed."""
_KILL_SECONDS = 10.0
"""How long the guest may take to report a child that it killed; then it is the sandbox that is broken."""


class Child:
    """A running child. ``descriptors``: [stdin], stdout, [stderr], [channel], as they were asked for."""

    def __init__(self, channel: Channel, pid: int, descriptors: list[int]) -> None:
        self._channel = channel
        self.pid = pid
        self.descriptors = descriptors
        self.exited = channel.exit_of(pid)

    @classmethod
    async def start(
        cls,
        channel: Channel,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | None = None,
        limits: SandboxLimits | None = None,
        stdin: bool,
        merge: bool,
        pipe: bool,
    ) -> "Child":
        """Start a program.

        Args:
            channel: the guest.
            argv: program and arguments.
            env: added to the sandbox's environment.
            cwd: working directory.
            limits: narrower limits.
            stdin: a pipe for stdin; /dev/null otherwise.
            merge: stderr goes where stdout goes.
            pipe: a stream socket as the child's descriptor 3.

        Raises:
            StartFailure: it could not be started.
            OSError: ``E2BIG``.
            SandboxError: the sandbox is lost.
        """
        if flaw := flaw_of_command(argv, env, cwd or ""):
            raise StartFailure(EINVAL, "exec", flaw)
        reply = await channel.start(
            "spawn",
            argv=list(argv),
            env=dict(env),
            cwd=cwd,
            limits=None if limits is None else asdict(limits),
            stdin=stdin,
            merge=merge,
            channel=pipe,
        )
        return cls(channel, reply.fields["pid"], reply.descriptors)

    async def signal(self, number: int) -> None:
        """Send a signal to the child and the processes of its group, as C-c on a terminal would."""
        await self._channel.request("signal", pid=self.pid, signal=number)

    async def kill(self) -> None:
        """Kill it with everything below it and wait for its end.

        Raises:
            SandboxError: the sandbox is lost, or the tree did not die.
        """
        if self.exited.done():
            return
        reply = await self._channel.request("kill_tree", pid=self.pid)
        try:
            async with asyncio.timeout(_KILL_SECONDS):
                await asyncio.shield(self.exited)
        except TimeoutError:
            reply.fields["gone"] = False
        if not reply.fields["gone"]:
            # One that forks faster than it is killed reaches its limit of processes. Otherwise the host is slow to end
            # what was killed (large memory, a stuck disk), and the sandbox answers all the same.
            what = "a process tree in the sandbox could not be killed."
            if Breach.PROCESSES in self._channel.take_breaches(self.pid):
                raise UnusableSandboxError(what)
            raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, what)


async def execute(
    channel: Channel,
    argv: Sequence[str],
    *,
    timeout: float,
    output: int,
    stdin: bytes = b"",
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    limits: SandboxLimits | None = None,
) -> ExecResult:
    """Run one program to its end; see ``Sandbox.exec``. ``output``: bytes kept of stdout and of stderr, each."""
    if not argv:
        raise ValueError("exec needs a program")
    started = time.monotonic()
    try:
        child = await Child.start(
            channel, argv, env=env or {}, cwd=cwd, limits=limits, stdin=True, merge=False, pipe=False
        )
    except StartFailure as failure:
        return _not_started(failure, argv[0], cwd)
    except OSError as error:
        if error.errno != E2BIG:
            raise
        return ExecResult(126, b"", _words(argv[0], error))
    captures = Capture(output), Capture(output)
    feeder = Writer(child.descriptors[0], stdin, own=True)
    readers = [Reader(fd, capture.feed) for fd, capture in zip(child.descriptors[1:], captures, strict=True)]
    timed_out = False
    try:
        async with asyncio.timeout(timeout):
            await asyncio.shield(child.exited)
    except TimeoutError:
        timed_out = True
    finally:
        try:
            if not child.exited.done():
                await finish(child.kill())
        finally:
            for reader in readers:  # what it wrote is in the pipes by now; background jobs may hold them open for ever
                reader.drain()
                reader.close()
            feeder.close()
    truncated = any(capture.left_out for capture in captures)
    stdout, stderr = (capture.take() for capture in captures)
    code = exit_code(child.exited.result())
    if code == _KILLED and channel.lost():  # a dying sandbox takes its processes first
        raise SandboxError(FailureKind.SANDBOX_LOST, f"the sandbox was lost while it ran {argv[0]}.")
    if code == _KILLED and not timed_out:
        await channel.evidence_of_kill(child.pid)  # which names a limit, if that was one
    breach = name_breach(
        exit_code=code,
        observed=channel.take_breaches(child.pid),
        words=stderr.decode("utf-8", "replace"),
        timed_out=timed_out,
        truncated=truncated,
    )
    seconds = time.monotonic() - started
    unseen = not timed_out and breach is None and not channel.sent_kill(child.pid)
    sigkill = Evidence.SANDBOX_LOST_UNEXPLAINED if unseen else None
    return ExecResult(code, stdout, stderr, timed_out, truncated, seconds, breach, sigkill)


def exit_code(status: int) -> int:
    """Turn the guest's status (minus the signal) into a shell's exit code (128 + signal)."""
    return status if status >= 0 else 128 - status


def _not_started(failure: StartFailure, program: str, cwd: str | None) -> ExecResult:
    code = failure.errno or EINVAL
    if failure.stage == "exec":
        missing = code in (ENOENT, ENOTDIR)
        return ExecResult(127 if missing else 126, b"", _words(program, failure))
    if failure.stage == "cwd" and code in (ENOENT, ENOTDIR, EACCES, EINVAL):
        return ExecResult(126, b"", _words(cwd or "working directory", failure))
    raise not_confined(failure, "a child")


def not_confined(failure: StartFailure, what: str) -> SandboxError:
    """Return the error of a program of the sandbox that is there and could not be started."""
    what = f"{what} could not be started in the sandbox: {failure.strerror}."
    if failure.errno == ENOMEM:
        return SandboxError(FailureKind.SANDBOX_UNAVAILABLE, what, "See `prorl-gym doctor`.")
    return UnusableSandboxError(what, "See `prorl-gym doctor`.")


def _words(subject: str, failure: OSError) -> bytes:
    return f"{subject}: {failure.strerror}\n".encode(errors="backslashreplace")
