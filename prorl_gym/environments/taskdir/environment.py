"""The ``taskdir`` environment: work in a container with bash; hidden tests judge the state that is left.

Grading ends the agent's processes first. The tests then run in the agent's own sandbox, for which these layouts are
made, or, where the row names the directories that count (``keep``), in a clean sandbox with copies of these.
"""

import asyncio
import base64
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.agents.tools import BashTool, FinishTool
from prorl_gym.deadlines import hold_uncharged
from prorl_gym.environments.protocol import Episode, Leases, ScriptedStep
from prorl_gym.environments.simple import SimpleEnvironment
from prorl_gym.environments.task_row import to_scripted_steps
from prorl_gym.environments.taskdir.task_dir_row import Solution, TaskDirRow
from prorl_gym.environments.taskdir.task_sandbox import (
    MAX_ARCHIVES,
    SpoiledStateError,
    copy_kept_paths,
    kill_agent_processes,
    prepare_starting_state,
    read_verifier_output,
    remove_verifier_paths,
    run_verifier,
    sandbox_spec,
)
from prorl_gym.errors import Cause, GraderError, SandboxError
from prorl_gym.records import GradedSubmission, Score
from prorl_gym.sandbox.protocol import Sandbox
from prorl_gym.settings import ResolvedSettings, RolloutSettings

EVAL_SHARE = 0.8
"""Share of the stage's deadline that the verifier may use; the rest is for starting and copying."""


class TaskDirEnvironment(SimpleEnvironment[TaskDirRow]):
    """Implements ``Environment[TaskDirRow]``."""

    name = "taskdir"
    row_model = TaskDirRow
    prompt = (
        "You work in a container with the bash tool; there is no network. Do the task that you are given: hidden tests "
        "then look at the state that you leave. Programs that you leave running are ended first. When you are done, "
        "call finish and say in a sentence what you did."
    )
    settings = RolloutSettings(max_turns=50, init_seconds=600.0, eval_seconds=900.0, action_seconds=120.0)
    gold_field = "solution"

    def __init__(self) -> None:
        self._archive_permits = asyncio.Semaphore(MAX_ARCHIVES)

    async def init(self, task: TaskDirRow, leases: Leases, settings: ResolvedSettings) -> Episode:
        """Start the agent's sandbox, place the task's files and run its setup.

        Raises:
            TaskError: the setup fails.
            SandboxError: the sandbox cannot be started.
        """
        await prepare_starting_state(await leases.get_agent_sandbox(sandbox_spec(task)), task)
        return self.plan_episode(task, leases, settings)

    def plan_episode(self, task: TaskDirRow, leases: Leases, settings: ResolvedSettings) -> Episode:
        """Return prompt and tools of a sandbox that is ready."""
        source = partial(leases.get_agent_sandbox, sandbox_spec(task))
        bash = BashTool(source, settings.action_seconds)
        return Episode(self.messages(task), (bash, FinishTool("Say what you did, and end.")), source)

    async def evaluate(
        self, task: TaskDirRow, artifacts: Artifacts, leases: Leases, settings: ResolvedSettings
    ) -> Score:
        """Let the verifier judge the end state.

        A verifier that gives no reward also runs on the starting state. If it gives one there, the agent's state is to
        blame, and the reward is 0. Otherwise the verifier is broken.

        Raises:
            GraderError: the verifier gives no reward on the starting state either.
            SandboxError: a sandbox is lost or cannot be started.
        """
        artifacts.submission = GradedSubmission(kind="files", text=artifacts.answer or "")
        seconds = settings.eval_seconds * EVAL_SHARE
        try:
            reward, output = await self._verify_end_state(task, leases, seconds)
        except SpoiledStateError as spoiled:
            return Score(reward=0.0, detail={"why": str(spoiled)})
        except SandboxError as error:
            if error.cause is not Cause.POLICY:
                raise
            return Score(reward=0.0, detail={"why": error.kind.value})
        if reward is not None:
            if reward == 1.0:
                return Score(reward=reward, report=output)
            return Score(reward=reward, detail={"why": f"the verifier's reward is {reward:g}"}, report=output)
        fresh = await leases.start_clean_sandbox(sandbox_spec(task))
        await prepare_starting_state(fresh, task)
        if await run_verifier(fresh, task, seconds) is None:
            raise GraderError(
                f"taskdir row {task.id or 'without id'}: the verifier gives no reward, not even on the starting state.",
                "Run it by hand there: it may need the network, or a program that the image lacks.",
            )
        return Score(reward=0.0, detail={"why": "the verifier gives no reward on what the agent left"}, report=output)

    async def _verify_end_state(self, task: TaskDirRow, leases: Leases, seconds: float) -> tuple[float | None, str]:
        """Return the verifier's reward and its output."""
        agents = await leases.get_agent_sandbox(sandbox_spec(task))
        await kill_agent_processes(agents)
        place = agents
        if task.keep:
            place = await self._copy_to_clean_sandbox(task, agents, leases)
        else:
            await remove_verifier_paths(agents)
        try:
            return await run_verifier(place, task, seconds), await read_verifier_output(place)
        except OSError as error:
            raise SpoiledStateError(f"the verifier's files cannot be placed ({error.strerror})") from None

    async def _copy_to_clean_sandbox(self, task: TaskDirRow, agents: Sandbox, leases: Leases) -> Sandbox:
        clean = await leases.start_clean_sandbox(sandbox_spec(task))
        await prepare_starting_state(clean, task)
        async with hold_uncharged(self._archive_permits):
            await copy_kept_paths(agents, clean, task.keep)
        return clean

    def gold_steps(self, row: Mapping[str, Any]) -> Sequence[ScriptedStep]:
        """Return the row's own trajectory, or its solution, placed and run by one command.

        Raises:
            TaskError: the row has neither.
        """
        task = self.parse_row(row)
        if task.gold_steps or task.solution is None:
            return super().gold_steps(row)
        done = ScriptedStep(tool="finish", arguments={"answer": "The reference solution was run."})
        return [ScriptedStep(tool="bash", arguments={"command": _solution_command(task.solution)}), done]

    def wrong_steps(self, row: Mapping[str, Any], seed: int) -> Sequence[ScriptedStep]:
        """Return turns that do not solve the row: its own, or `ls` and a claim."""
        claim = ScriptedStep(tool="finish", arguments={"answer": f"I believe that it is done (attempt {seed})."})
        return to_scripted_steps(self.parse_row(row).wrong_steps) or [
            ScriptedStep(tool="bash", arguments={"command": "ls"}),
            claim,
        ]


def _solution_command(solution: Solution) -> str:
    """Return one command line that places a solution's files and runs it."""
    lines: list[str] = []
    for file in solution.files:
        path = shlex.quote(file.path)
        lines.append(f'mkdir -p "$(dirname {path})"')
        lines.append(f"base64 -d > {path} <<'PRORL_END'\n{base64.encodebytes(file.data).decode()}PRORL_END")
        if file.executable:
            lines.append(f"chmod +x {path}")
    return "\n".join([*lines, solution.command])
