"""Looking at a sandbox from the outside of a check."""

import asyncio
from secrets import randbelow

from prorl_gym.sandbox.protocol import Sandbox, Shell, ShellResult

SECONDS = 20.0
"""Timeout of what should end by itself at once; generous, since machines are busy."""


def marker() -> str:
    """Return a number of seconds to sleep that no other process uses: finds the process again by its arguments."""
    return f"{randbelow(10**9) + 10**9}"


async def running(box: Sandbox, needle: str) -> int:
    """Count processes whose arguments contain ``needle``. The needle travels on stdin, so the search is not found."""
    found = await box.exec(
        ["sh", "-c", "grep -lsaF -f - /proc/[0-9]*/cmdline"], stdin=needle.encode() + b"\n", timeout=SECONDS
    )
    return len(found.stdout.split())


async def until_running(box: Sandbox, needle: str, count: int) -> None:
    """Return when that many processes have ``needle`` in their arguments."""
    async with asyncio.timeout(SECONDS):
        while await running(box, needle) < count:  # noqa: ASYNC110 - no event reaches us from inside a sandbox
            await asyncio.sleep(0.02)


async def run(shell: Shell, command: str, timeout: float = SECONDS) -> ShellResult:
    """Run a command that is expected to end."""
    return await shell.run(command, timeout=timeout)


async def usable(shell: Shell) -> None:
    """Assert that the next command gets its own output, code and nothing else."""
    result = await run(shell, "printf 'still %s\\n' here; (exit 7)")
    assert result.output.endswith("still here\n"), result
    assert result.exit_code == 7, result
    assert not result.timed_out, result
