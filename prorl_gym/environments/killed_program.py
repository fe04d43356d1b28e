"""Programs that SIGKILL or SIGTERM ended within their limits: who sent it, the host or the program itself?

A program that runs no payload was killed from outside. Any other runs once more; a second kill counts as its own,
unless the sandbox has no record of such a signal sent inside it (``ExecResult.kill_evidence``).
"""

from collections.abc import Awaitable, Callable
from signal import SIGKILL, SIGTERM

from prorl_gym.errors import Evidence, SandboxError
from prorl_gym.sandbox.protocol import ExecResult


def unexplained_kill_error(what: str, evidence: Evidence) -> SandboxError:
    """Return the error of a program that was killed twice, with the evidence about the sender."""
    return SandboxError.from_evidence(
        evidence,
        f"{what} was killed, and no program or limit of its sandbox did that.",
        "Look for the OOM killer in the log of the node.",
    )


def was_killed(result: ExecResult) -> bool:
    """Whether one of them ended a program, or a part of it that its shell reports, and no limit explains that."""
    return result.exit_code in (128 + SIGKILL, 128 + SIGTERM) and not result.timed_out and result.breach is None


def raise_if_killed(result: ExecResult, what: str) -> ExecResult:
    """Return the result of a program of ours. Raises ``SandboxError``: it was killed from outside its sandbox."""
    if was_killed(result):
        raise SandboxError.from_evidence(
            Evidence.PROGRAM_KILLED_OUTSIDE,
            f"{what} was killed, and no limit of its sandbox explains that.",
            "Look for the OOM killer in the log of the node.",
        )
    return result


async def run_with_kill_retry(run: Callable[[], Awaitable[ExecResult]]) -> ExecResult:
    """Run a repeatable program that may run a payload; once more if it was killed.

    Raises ``SandboxError``: it was killed both times, and not from inside the sandbox.
    """
    result = await run()
    if not was_killed(result):
        return result
    result = await run()
    if was_killed(result) and result.kill_evidence is not None:
        raise unexplained_kill_error("a program", result.kill_evidence)
    return result
