"""Programs that SIGKILL ended within their limits: by the host, or by themselves?

What runs no payload was killed from outside. What does is run once more, and a second such end is its own, unless the
sandbox heard of no SIGKILL that a program in it sent (``ExecResult.sigkill``).
"""

from collections.abc import Awaitable, Callable
from signal import SIGKILL

from prorl_gym.errors import Evidence, SandboxError
from prorl_gym.sandbox.protocol import ExecResult


def killed_outside(what: str) -> SandboxError:
    """Return the error of a program that was killed from outside its sandbox."""
    return SandboxError.from_evidence(
        Evidence.PROGRAM_KILLED_OUTSIDE,
        f"{what} was killed, and no limit of its sandbox explains that.",
        "Look for the OOM killer in the log of the node.",
    )


def killed_unseen(what: str, evidence: Evidence) -> SandboxError:
    """Return the error of a program that was killed twice, with what is known about who did that."""
    return SandboxError.from_evidence(
        evidence,
        f"{what} was killed, and no program or limit of its sandbox did that.",
        "Look for the OOM killer in the log of the node.",
    )


def was_killed(result: ExecResult) -> bool:
    """Whether SIGKILL ended a program, or a part of it that its shell reports, and no limit explains that."""
    return result.exit_code == 128 + SIGKILL and not result.timed_out and result.breach is None


def must_have_ended(result: ExecResult, what: str) -> ExecResult:
    """Return the result of a program of ours.

    Raises:
        SandboxError: it was killed from outside.
    """
    if was_killed(result):
        raise killed_outside(what)
    return result


async def run_settled(run: Callable[[], Awaitable[ExecResult]]) -> ExecResult:
    """Run a program that can be repeated and may run a payload: once more, if it was killed.

    Raises:
        SandboxError: it was killed both times, and nothing in the sandbox did that.
    """
    result = await run()
    if not was_killed(result):
        return result
    result = await run()
    if was_killed(result) and result.sigkill is not None:
        raise killed_unseen("a program", result.sigkill)
    return result
