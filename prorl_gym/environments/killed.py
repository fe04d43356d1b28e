"""Programs that SIGKILL ended within their limits: by the host, or by themselves?

Nothing outside a sandbox can tell a signal of the host's OOM killer from one that a payload sent. What runs no payload
was killed from outside. What does is run once more, and a second such end is its own.
"""

from collections.abc import Awaitable, Callable

from prorl_gym.errors import Evidence, SandboxError
from prorl_gym.sandbox.protocol import ExecResult


def killed_outside(what: str) -> SandboxError:
    """Return the error of a program that was killed from outside its sandbox."""
    return SandboxError.from_evidence(
        Evidence.PROGRAM_KILLED_OUTSIDE,
        f"{what} was killed, and no limit of its sandbox explains that.",
        "Look for the OOM killer in the log of the node.",
    )


def must_have_ended(result: ExecResult, what: str) -> ExecResult:
    """Return the result of a program of ours.

    Raises:
        SandboxError: it was killed from outside.
    """
    if result.killed:
        raise killed_outside(what)
    return result


async def run_settled(run: Callable[[], Awaitable[ExecResult]]) -> ExecResult:
    """Run a program that can be repeated and may run a payload: once more, if it was killed."""
    result = await run()
    return await run() if result.killed else result
