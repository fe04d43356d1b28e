"""Running a task's verifier and reading its reward."""

import json
import re
from typing import Any, cast

from prorl_gym.environments.killed import run_settled
from prorl_gym.environments.taskdir.end_state import LOGS
from prorl_gym.environments.taskdir.placing import place_all
from prorl_gym.environments.taskdir.rows import TaskDirRow
from prorl_gym.sandbox.protocol import ExecResult, Sandbox

_OUTPUT = f"{LOGS}/output.txt"
_SUMMARY = re.compile(r"^(PASSED|FAILED|SKIPPED|XFAIL|XPASS|ERROR)\s+\S", re.MULTILINE)
_GOOD = {"PASSED", "XFAIL", "SKIPPED"}
_LARGEST = 4 << 20
_ROUNDED = 0.005


async def verify(sandbox: Sandbox, task: TaskDirRow, seconds: float) -> float | None:
    """Place the verifier's files, run it with a fresh shell, and return the reward.

    Args:
        sandbox: in the state to be verified, without processes of an agent.
        task: the task.
        seconds: longest time it may take.

    Returns:
        The reward, from 0 to 1, or ``None``: it gives none.

    Raises:
        OSError: its files cannot be placed.
        SandboxError: the sandbox is lost.
    """
    verifier = task.verifier

    async def run() -> ExecResult:
        await sandbox.write_file(_OUTPUT, b"")
        await place_all(sandbox, verifier.files)
        return await sandbox.exec(
            ["/bin/bash", "--noprofile", "--norc", "-c", f"{{ {verifier.command}\n}} > {_OUTPUT} 2>&1 < /dev/null"],
            timeout=min(seconds, verifier.seconds),
            cwd=task.workdir,
            env=verifier.env,
        )

    ran = await run_settled(run)
    if verifier.reward == "exit":
        return None if ran.timed_out or ran.exit_code in (126, 127) else float(ran.exit_code == 0)
    return await (_from_summary(sandbox) if verifier.reward == "pytest" else _from_file(sandbox))


async def _from_file(sandbox: Sandbox) -> float | None:
    """Read the files that there are; one may be the other rounded, but they must not contradict each other."""
    texts = [await _read(sandbox, f"{LOGS}/{name}") for name in ("reward.json", "reward.txt")]
    numbers = [_number(text) for text in texts if text is not None]
    found = [number for number in numbers if number is not None]
    if not found or len(found) < len(numbers) or max(found) - min(found) > _ROUNDED:
        return None
    return found[0]


async def _from_summary(sandbox: Sandbox) -> float | None:
    """Every test that the summary names must have passed, and one at least. Skipped ones neither help nor harm."""
    found = set(_SUMMARY.findall(await _read(sandbox, _OUTPUT) or ""))
    if not found:
        return None
    return float(found <= _GOOD and bool(found & {"PASSED", "XFAIL"}))


async def _read(sandbox: Sandbox, path: str) -> str | None:
    try:
        return (await sandbox.read_file(path, limit=_LARGEST)).decode("utf-8", "replace")
    except OSError:
        return None


def _number(text: str) -> float | None:
    """Return the reward of a file: a number from 0 to 1, ``{"reward": number}``, or an object with one number.

    The one that an agent could put in its place would otherwise be as large as it likes.
    """
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        values = cast(dict[str, Any], value)
        value = values.get("reward", next(iter(values.values())) if len(values) == 1 else None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if 0.0 <= number <= 1.0 else None
