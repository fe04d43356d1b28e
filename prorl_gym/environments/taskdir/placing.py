"""Making the starting state of a task in a sandbox, and placing files in one that an agent has had."""

from collections.abc import Sequence

from prorl_gym.environments.killed import must_have_ended
from prorl_gym.environments.taskdir.rows import TaskDirRow, TaskFile
from prorl_gym.errors import FailureKind, SandboxError, TaskError
from prorl_gym.sandbox.protocol import Sandbox, SandboxLimits, SandboxSpec

SETUP_SECONDS = 600.0
"""Longest time of one setup command; the stage's deadline is the tighter one."""

TOOL_OUTPUT = 16 << 10


def spec_of(task: TaskDirRow) -> SandboxSpec:
    """Return the sandbox of a task."""
    limits = SandboxLimits(output=TOOL_OUTPUT)
    if task.memory is not None:
        limits = SandboxLimits(output=TOOL_OUTPUT, total_memory=task.memory)
    return SandboxSpec(image=task.image, workdir=task.workdir, env=task.env, limits=limits)


async def prepare(sandbox: Sandbox, task: TaskDirRow) -> None:
    """Place the task's files and run its setup commands, in order.

    Raises:
        TaskError: ``BAD_ROW``: one of them fails. The row or its image is to blame.
        SandboxError: the sandbox is lost, or one of them is slow or killed.
    """
    for number, step in enumerate(task.setup, 1):
        if isinstance(step, TaskFile):
            try:
                await _place(sandbox, step)
            except OSError as error:
                raise _bad(task, f"'{step.path}' cannot be placed ({error.strerror})") from None
            continue
        ran = await sandbox.exec(["/bin/bash", "-c", step.command], timeout=SETUP_SECONDS, cwd=step.cwd)
        must_have_ended(ran, f"setup step {number}")
        if ran.timed_out:
            what = f"taskdir row {task.id or 'without id'}: setup step {number} took longer than {SETUP_SECONDS:g} s."
            raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, what, "Look at the load of the node, and at the step.")
        if ran.exit_code != 0:
            said = (ran.stderr or ran.stdout).decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
            raise _bad(task, f"setup step {number} ends with exit code {ran.exit_code}: {said[0][:200]}")


async def place_all(sandbox: Sandbox, files: Sequence[TaskFile]) -> None:
    """Place files in a sandbox that is no longer to be trusted.

    Raises:
        OSError: as the sandbox says: a full disk, a file where a directory should be.
        SandboxError: the sandbox is lost.
    """
    for file in files:
        await _place(sandbox, file)


async def _place(sandbox: Sandbox, file: TaskFile) -> None:
    await sandbox.write_file(file.path, file.data, mode=0o755 if file.executable else 0o644)


def _bad(task: TaskDirRow, why: str) -> TaskError:
    fix = "There is no network in a sandbox: put what needs one into an image, and import with --image-map."
    return TaskError(FailureKind.BAD_ROW, f"taskdir row {task.id or 'without id'}: {why}.", fix)
