"""One-shot commands, and the child on pipes that each of them is."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from errno import E2BIG, EACCES, EINVAL, ELIBBAD, ELOOP, ENOENT, ENOEXEC, ENOMEM, ENOTDIR, ETXTBSY

from prorl_gym.deadlines import Timeout
from prorl_gym.errors import Evidence, FailureKind, SandboxError, UnusableSandboxError
from prorl_gym.sandbox.cancellation import run_shielded
from prorl_gym.sandbox.guest.guest_messages import ChildStartError
from prorl_gym.sandbox.limit_breach import Breach, classify_breach
from prorl_gym.sandbox.protocol import ExecResult, SandboxLimits
from prorl_gym.sandbox.service.guest_channel import GuestChannel
from prorl_gym.sandbox.service.operations.fd_streams import FdReader, FdWriter, OutputCapture

_SIGKILL_EXIT_CODE = 128 + signal.SIGKILL
_KILLING = (signal.SIGKILL, signal.SIGTERM)
UNUSABLE_PROGRAM_ERRNOS = (ENOENT, ENOTDIR, EACCES, ENOEXEC, ELOOP, ETXTBSY, ELIBBAD)
"""Flaws of the file, not of the sandbox, when a program cannot be executed."""


class ChildProcess:
    """A running child. ``descriptors``: [stdin], stdout, [stderr], [channel], those that it was started with."""

    def __init__(self, channel: GuestChannel, pid: int, descriptors: list[int]) -> None:
        self._channel = channel
        self.pid = pid
        self.descriptors = descriptors
        self.exited = channel.exit_future(pid)

    @classmethod
    async def spawn(
        cls,
        channel: GuestChannel,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | None = None,
        limits: SandboxLimits | None = None,
        stdin: bool = True,
        merge_stderr: bool = False,
        side_socket: bool = False,
        template: socket.socket | None = None,
    ) -> "ChildProcess":
        """Start a program.

        ``env`` is added to the sandbox's environment. ``stdin``: a pipe, else /dev/null. ``merge_stderr``: stderr goes
        where stdout goes. ``side_socket``: a stream socket as the child's descriptor 3. ``template``: fork the template
        of python workers at the other end of this socket instead; ``argv`` is unused then. Raises ``ChildStartError``
        when it could not be started.
        """
        if flaw := invalid_command_reason(argv, env, cwd or ""):
            raise ChildStartError(EINVAL, "exec", flaw)
        reply = await channel.start_child(
            "spawn",
            argv=list(argv),
            env=dict(env),
            cwd=cwd,
            limits=None if limits is None else asdict(limits),
            stdin=stdin,
            merge=merge_stderr,
            channel=side_socket,
            descriptor=None if template is None else template.fileno(),
        )
        return cls(channel, reply.fields["pid"], reply.descriptors)

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL or SIGTERM ended the child itself."""
        return self.exited.done() and not self.exited.exception() and -self.exited.result() in _KILLING

    async def send_signal(self, number: int) -> None:
        """Send a signal to the child and the processes of its group, as C-c on a terminal would."""
        await self._channel.request("signal", pid=self.pid, signal=number)

    async def kill(self) -> None:
        """Kill it with everything below it and wait for its end; ``SandboxError`` when the tree did not die."""
        if self.exited.done():
            return
        reply = await self._channel.request("kill_tree", pid=self.pid)
        try:
            async with asyncio.timeout(self._channel.timeouts.kill):
                await asyncio.shield(self.exited)
        except TimeoutError:
            reply.fields["gone"] = False
        if not reply.fields["gone"]:
            # One that forks faster than it is killed reaches its limit of processes. Otherwise the host is slow to end
            # what was killed (large memory, a stuck disk), and the sandbox answers all the same.
            what = "a process tree in the sandbox could not be killed."
            if Breach.PROCESSES in self._channel.pop_breaches(self.pid):
                raise UnusableSandboxError(what)
            raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, what)


async def execute(
    channel: GuestChannel,
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
        child = await ChildProcess.spawn(channel, argv, env=env or {}, cwd=cwd, limits=limits)
    except ChildStartError as failure:
        return _start_failure_result(failure, argv[0], cwd)
    except OSError as error:
        if error.errno != E2BIG:
            raise
        return ExecResult(126, b"", _error_line(argv[0], error))
    captures = OutputCapture(output), OutputCapture(output)
    feeder = FdWriter(child.descriptors[0], stdin, owns_fd=True)
    readers = [FdReader(fd, capture.feed) for fd, capture in zip(child.descriptors[1:], captures, strict=True)]
    timed_out = False
    try:
        async with Timeout(timeout):
            await asyncio.shield(child.exited)
    except TimeoutError:
        timed_out = True
    finally:
        try:
            if not child.exited.done():
                await run_shielded(child.kill())
        finally:
            for reader in readers:  # what it wrote is in the pipes by now; background jobs may hold them open for ever
                reader.drain()
                reader.close()
            feeder.close()
    truncated = any(capture.dropped_bytes for capture in captures)
    stdout, stderr = (capture.pop_bytes() for capture in captures)
    code = to_exit_code(child.exited.result())
    if code == _SIGKILL_EXIT_CODE and channel.is_lost():  # a dying sandbox takes its processes first
        raise SandboxError(FailureKind.SANDBOX_LOST, f"the sandbox was lost while it ran {argv[0]}.")
    if code == _SIGKILL_EXIT_CODE and not timed_out:
        await channel.kill_evidence(child.pid)  # which names a limit, if that was one
    breach = classify_breach(
        exit_code=code,
        observed=channel.pop_breaches(child.pid),
        output=stderr.decode("utf-8", "replace"),
        timed_out=timed_out,
        truncated=truncated,
    )
    seconds = time.monotonic() - started
    unseen = not timed_out and breach is None and not channel.may_involve_inside_kill(child.pid)
    evidence = Evidence.PROGRAM_KILLED_OUTSIDE if unseen else None
    return ExecResult(code, stdout, stderr, timed_out, truncated, seconds, breach, evidence)


def to_exit_code(status: int) -> int:
    """Turn the guest's status (minus the signal) into a shell's exit code (128 + signal)."""
    return status if status >= 0 else 128 - status


def _start_failure_result(failure: ChildStartError, program: str, cwd: str | None) -> ExecResult:
    code = failure.errno or EINVAL
    if failure.stage == "exec":
        missing = code in (ENOENT, ENOTDIR)
        return ExecResult(127 if missing else 126, b"", _error_line(program, failure))
    if failure.stage == "cwd" and code in (ENOENT, ENOTDIR, EACCES, EINVAL):
        return ExecResult(126, b"", _error_line(cwd or "working directory", failure))
    raise start_failure_error(failure, "a child")


def start_failure_error(failure: ChildStartError, what: str) -> SandboxError:
    """Return the error of a program of the sandbox that is there and could not be started."""
    what = f"{what} could not be started in the sandbox: {failure.strerror}."
    if failure.errno == ENOMEM:
        return SandboxError(FailureKind.SANDBOX_UNAVAILABLE, what, "See `prorl-gym doctor`.")
    return UnusableSandboxError(what, "See `prorl-gym doctor`.")


def _error_line(subject: str, failure: OSError) -> bytes:
    return f"{subject}: {failure.strerror}\n".encode(errors="backslashreplace")


def invalid_command_reason(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> str:
    """Return what keeps a program from being started so, or ""."""
    for argument in argv:
        if flaw := invalid_reason(argument):
            return f"an argument {flaw}"
    if flaw := invalid_reason(cwd):
        return f"the working directory {flaw}"
    return invalid_env_reason(env)


def invalid_env_reason(env: Mapping[str, str]) -> str:
    """Return what keeps some variable from being one, with its name, or ""."""
    for name, value in env.items():
        if not name or "=" in name:
            return f"{name!a} cannot be a variable: its name is empty or has '='"
        if flaw := invalid_reason(name) or invalid_reason(value):
            return f"{name!a} cannot be a variable: it {flaw}"
    return ""


def invalid_reason(text: str) -> str:
    """Return what keeps a text from being a path or an argument, or ""."""
    if "\0" in text:
        return "contains a NUL byte"
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        return f"contains U+{ord(text[error.start]):04X}, which has no encoding"
    return ""
