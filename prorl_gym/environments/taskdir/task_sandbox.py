"""The sandbox of a task: its starting state, the end state that an agent leaves, and the verifier.

The agent may have changed everything in the sandbox's file system, programs included. Only answers of the sandbox's
own server count, which the agent can neither signal nor change: the processes, the entries of a directory, a file's
content.
"""

import asyncio
import json
import re
from dataclasses import replace
from typing import Any, cast

from prorl_gym.environments.killed_program import raise_if_killed, run_with_kill_retry
from prorl_gym.environments.taskdir.task_dir_row import TaskDirRow, TaskFile
from prorl_gym.errors import FailureKind, SandboxError, TaskError
from prorl_gym.sandbox.protocol import ExecResult, Sandbox, SandboxLimits, SandboxSpec

_SETUP_SECONDS = 600.0
"""Longest time of one setup command; the stage's deadline is the tighter one."""

_TOOL_OUTPUT = 16 << 10

LOGS = "/logs/verifier"
_TESTS = "/tests"
_MAX_KEPT = 64 << 20
"""Largest archive from the agent's sandbox in bytes; the service holds it in memory while it is copied."""
MAX_ARCHIVES = 4
"""Archives that the service holds at one time."""

# Every command names its directory: the sandbox's own may be gone, and then nothing could be run.
_SECONDS = 120.0
_KEPT = "/.prorl-kept.tar"
_PAUSES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
"""Seconds between checks that killed processes are gone: the kernel takes a while to free much memory."""


_OUTPUT = f"{LOGS}/output.txt"
_SUMMARY = re.compile(r"^(PASSED|FAILED|SKIPPED|XFAIL|XPASS|ERROR)\s+\S", re.MULTILINE)
_GOOD = {"PASSED", "XFAIL", "SKIPPED"}
_LARGEST = 4 << 20
_ROUNDING = 0.005


class SpoiledStateError(Exception):
    """The agent left a state that cannot be verified; the message has the reason. The reward is 0."""


def sandbox_spec(task: TaskDirRow) -> SandboxSpec:
    """Return the sandbox of a task."""
    limits = SandboxLimits(output=_TOOL_OUTPUT)
    if task.memory is not None:
        limits = replace(limits, total_memory=task.memory)
    return SandboxSpec(image=task.image, workdir=task.workdir, env=task.env, limits=limits)


async def prepare_starting_state(sandbox: Sandbox, task: TaskDirRow) -> None:
    """Place the task's files and run its setup commands, in order.

    Raises:
        TaskError: ``BAD_ROW``: one of them fails. The row or its image is to blame.
        SandboxError: the sandbox is lost, or one of them is slow or killed.
    """
    for number, step in enumerate(task.setup, 1):
        if isinstance(step, TaskFile):
            try:
                await _place_file(sandbox, step)
            except OSError as error:
                raise _bad_row(task, f"'{step.path}' cannot be placed ({error.strerror})") from None
            continue
        ran = await sandbox.exec(["/bin/bash", "-c", step.command], timeout=_SETUP_SECONDS, cwd=step.cwd)
        raise_if_killed(ran, f"setup step {number}")
        if ran.timed_out:
            what = f"taskdir row {task.id or 'without id'}: setup step {number} took longer than {_SETUP_SECONDS:g} s."
            raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, what, "Look at the load of the node, and at the step.")
        if ran.exit_code != 0:
            said = (ran.stderr or ran.stdout).decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
            raise _bad_row(task, f"setup step {number} ends with exit code {ran.exit_code}: {said[0][:200]}")


async def _place_file(sandbox: Sandbox, file: TaskFile) -> None:
    await sandbox.write_file(file.path, file.data, mode=0o755 if file.executable else 0o644)


def _bad_row(task: TaskDirRow, why: str) -> TaskError:
    fix = "There is no network in a sandbox: put what needs one into an image, and import with --image-map."
    return TaskError(FailureKind.BAD_ROW, f"taskdir row {task.id or 'without id'}: {why}.", fix)


async def kill_agent_processes(sandbox: Sandbox) -> None:
    """End every process of the agent's: daemons, and what waits for the verifier.

    Raises:
        SpoiledStateError: some live on, because the sandbox's shell was tampered with.
        SandboxError: the sandbox is lost.
    """
    for pause in _PAUSES:
        await sandbox.exec(["/bin/sh", "-c", "kill -9 -1"], timeout=_SECONDS, cwd="/")
        if await _has_no_processes(sandbox):
            return
        await asyncio.sleep(pause)  # the sandbox does not report the end of processes that it did not start
    raise SpoiledStateError("processes of the agent cannot be ended")


async def remove_verifier_paths(sandbox: Sandbox) -> None:
    """Remove what is in the places of the verifier's files and logs.

    Raises:
        SpoiledStateError: it cannot be removed.
        SandboxError: the sandbox is lost.
    """
    await run_with_kill_retry(lambda: sandbox.exec(["/bin/rm", "-rf", "/logs", _TESTS], timeout=_SECONDS, cwd="/"))
    left = {entry.name for entry in await sandbox.list_dir("/")} & {"logs", _TESTS[1:]}
    if left:
        raise SpoiledStateError(f"/{min(left)} cannot be removed")


async def copy_kept_paths(agents: Sandbox, clean: Sandbox, paths: tuple[str, ...]) -> None:
    """Copy files and directories from the agent's sandbox into a clean one, in place of what is there.

    The archive is made by the agent's sandbox and is not to be trusted; it is unpacked by the clean one, below its own
    root, and never read by the service.

    Raises:
        SpoiledStateError: it cannot be made, is too large, or cannot be unpacked.
        SandboxError: a sandbox is lost.
    """
    packing = ["tar", "-C", "/", "-cf", _KEPT, "--", *(path.lstrip("/") for path in paths)]
    packed = await run_with_kill_retry(lambda: agents.exec(packing, timeout=_SECONDS, cwd="/"))
    if packed.exit_code != 0:
        raise SpoiledStateError(f"{', '.join(paths)} cannot be read")
    try:
        archive = await agents.read_file(_KEPT, limit=_MAX_KEPT)
    except OSError as error:
        raise SpoiledStateError(f"{', '.join(paths)} cannot be taken ({error.strerror})") from None
    await clean.exec(["/bin/rm", "-rf", "--", *paths], timeout=_SECONDS, cwd="/")
    try:
        await clean.write_file(_KEPT, archive)
    except OSError as error:  # what the agent left does not fit
        raise SpoiledStateError(f"{', '.join(paths)} cannot be placed ({error.strerror})") from None
    wanted = [path.lstrip("/") for path in paths]
    unpacking = ["tar", "-C", "/", "-xf", _KEPT, "--no-same-owner", "--", *wanted]
    unpacked = raise_if_killed(await clean.exec(unpacking, timeout=_SECONDS, cwd="/"), "tar")
    await clean.exec(["/bin/rm", "-f", _KEPT], timeout=_SECONDS, cwd="/")
    if unpacked.exit_code != 0:
        raise SpoiledStateError(f"{', '.join(paths)} cannot be unpacked")


async def _has_no_processes(sandbox: Sandbox) -> bool:
    return not any(entry.name.isdigit() and entry.name != "1" for entry in await sandbox.list_dir("/proc"))


async def run_verifier(sandbox: Sandbox, task: TaskDirRow, seconds: float) -> float | None:
    """Place the verifier's files, run it with a fresh shell, and return the reward.

    Args:
        sandbox: in the state to be verified, without processes of an agent.
        task: the task.
        seconds: longest time it may take.

    Returns:
        The reward, from 0 to 1, or ``None`` when the verifier gives none.

    Raises:
        OSError: its files cannot be placed: a full disk, a file where a directory should be.
        SandboxError: the sandbox is lost.
    """
    verifier = task.verifier

    async def run() -> ExecResult:
        await sandbox.write_file(_OUTPUT, b"")
        for file in verifier.files:
            await _place_file(sandbox, file)
        return await sandbox.exec(
            ["/bin/bash", "--noprofile", "--norc", "-c", f"{{ {verifier.command}\n}} > {_OUTPUT} 2>&1 < /dev/null"],
            timeout=min(seconds, verifier.seconds),
            cwd=task.workdir,
            env=verifier.env,
        )

    ran = await run_with_kill_retry(run)
    if verifier.reward == "exit":
        return None if ran.timed_out or ran.exit_code in (126, 127) else float(ran.exit_code == 0)
    return await (_reward_from_summary(sandbox) if verifier.reward == "pytest" else _reward_from_file(sandbox))


async def read_verifier_output(sandbox: Sandbox) -> str:
    """Return what the verifier printed; empty where it cannot be read any more: the verdict stands without it."""
    try:
        return await _read(sandbox, _OUTPUT) or ""
    except SandboxError:
        return ""


async def _reward_from_file(sandbox: Sandbox) -> float | None:
    """Read the files that exist; both must agree, rounding aside."""
    texts = [await _read(sandbox, f"{LOGS}/{name}") for name in ("reward.json", "reward.txt")]
    numbers = [_parse_reward(text) for text in texts if text is not None]
    found = [number for number in numbers if number is not None]
    if not found or len(found) < len(numbers) or max(found) - min(found) > _ROUNDING:
        return None
    return found[0]


async def _reward_from_summary(sandbox: Sandbox) -> float | None:
    """Return 1.0 when at least one test passed and none failed; skipped tests do not count."""
    found = set(_SUMMARY.findall(await _read(sandbox, _OUTPUT) or ""))
    if not found:
        return None
    return float(found <= _GOOD and bool(found & {"PASSED", "XFAIL"}))


async def _read(sandbox: Sandbox, path: str) -> str | None:
    try:
        return (await sandbox.read_file(path, limit=_LARGEST)).decode("utf-8", "replace")
    except OSError:
        return None


def _parse_reward(text: str) -> float | None:
    """Return the reward of a file: a number from 0 to 1, ``{"reward": number}``, or an object with one number.

    The bounds matter where an agent can forge the file.
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
