"""Shared by the checks: commands, and the processes of a sandbox."""

import asyncio
from collections.abc import Coroutine
from secrets import randbelow
from typing import Any

from prorl_gym.sandbox.protocol import Sandbox, Shell, ShellResult

TIMEOUT_SECONDS = 20.0
"""Timeout of what should end by itself at once; generous, since machines are busy."""


def unique_sleep_seconds() -> str:
    """Return a number of seconds to sleep that no other process uses: finds the process again by its arguments."""
    return f"{randbelow(10**9) + 10**9}"


async def count_processes(box: Sandbox, needle: str) -> int:
    """Count processes whose arguments contain ``needle``. The needle travels on stdin, so the search is not found."""
    found = await box.exec(
        ["sh", "-c", "grep -lsaF -f - /proc/[0-9]*/cmdline"], stdin=needle.encode() + b"\n", timeout=TIMEOUT_SECONDS
    )
    return len(found.stdout.split())


async def run_command(shell: Shell, command: str, timeout: float = TIMEOUT_SECONDS) -> ShellResult:
    return await shell.run_command(command, timeout=timeout)


async def assert_usable(shell: Shell) -> None:
    """Assert that the next command gets its own output, code and nothing else."""
    result = await run_command(shell, "printf 'still %s\\n' here; (exit 7)")
    assert result.output.endswith("still here\n"), result
    assert result.exit_code == 7, result
    assert not result.timed_out, result


async def assert_cancel_kills(box: Sandbox, call: Coroutine[Any, Any, object], needle: str, count: int) -> None:
    """Cancel a call once it has that many processes with ``needle`` in their arguments; assert that none is left."""
    task = asyncio.create_task(call)
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while await count_processes(box, needle) < count:  # noqa: ASYNC110 - no event reaches us from inside a sandbox
            await asyncio.sleep(0.02)
    task.cancel()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(outcome, asyncio.CancelledError), outcome
    assert await count_processes(box, needle) == 0
