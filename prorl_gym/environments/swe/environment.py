"""The ``swe`` environment: repair a repository in a sandbox; the change is judged by hidden tests in another one."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from prorl_gym.agents.loop import run_agent
from prorl_gym.agents.protocol import Artifacts
from prorl_gym.agents.tools import BashTool, EditorTool, FinishTool, ThinkTool
from prorl_gym.environments.protocol import Episode, GoldStep, Leases, RunContext
from prorl_gym.environments.rows import as_gold_steps
from prorl_gym.environments.swe.activate import activate
from prorl_gym.environments.swe.extract import NoPatchError, Placed, extract
from prorl_gym.environments.swe.grading import grade, passing_unrepaired
from prorl_gym.environments.swe.patches import CleanPatch, clean_patch
from prorl_gym.environments.swe.prepare import place_for_agent, read_index
from prorl_gym.environments.swe.prompt import first_messages
from prorl_gym.environments.swe.rows import read_task
from prorl_gym.environments.swe.spec import sandbox_spec
from prorl_gym.environments.swe.task import SweTask
from prorl_gym.errors import Cause, FailureKind, GraderError, LimitReached, SandboxError, TaskError
from prorl_gym.records import Score
from prorl_gym.sandbox.protocol import Sandbox
from prorl_gym.settings import ResolvedSettings, RolloutSettings, resolve

PATCH = "patch"
"""The agent's change in ``Artifacts.files``, as it came out of its sandbox."""
NO_PATCH = "no_patch"
"""There instead: why none could be taken."""

_GOLD_PATH = "/tmp/gold.patch"


class SweEnvironment:
    """Implements ``Environment[SweTask]``."""

    name = "swe"
    settings = RolloutSettings(
        max_turns=50,
        max_tokens=65536,
        init_seconds=600.0,
        run_seconds=3600.0,
        eval_seconds=2400.0,
        action_seconds=60.0,
    )

    def __init__(self) -> None:
        # What was read in a sandbox before its agent began. It lives as long as the rollout's leases.
        self._placed: WeakKeyDictionary[Leases, Placed] = WeakKeyDictionary()

    def parse(self, row: Mapping[str, Any]) -> SweTask:
        """See ``Environment.parse``."""
        return read_task(row)

    def episode(self, task: SweTask, leases: Leases, settings: ResolvedSettings) -> Episode:
        """Return the prompt and the tools without preparing anything; see ``PlansEpisode``."""

        async def source() -> Sandbox:
            return await leases.agent(await sandbox_spec(task))

        return Episode(
            messages=first_messages(task),
            tools=(
                BashTool(source, settings.action_seconds),
                EditorTool(source),
                ThinkTool(),
                FinishTool("Hand in the repository as it is now and end. The answer says in short what you changed."),
            ),
        )

    async def init(self, task: SweTask, leases: Leases, settings: ResolvedSettings) -> Episode:
        """Start the agent's sandbox and put the repository in place."""
        sandbox = await leases.agent(await sandbox_spec(task))
        base = await place_for_agent(task, sandbox)
        self._placed[leases] = Placed(base, await read_index(task, sandbox))
        await activate(task, sandbox)
        return self.episode(task, leases, settings)

    async def run(self, task: SweTask, episode: Episode, context: RunContext) -> None:
        """Run the usual agent loop, then take the patch, also when a limit of turns or tokens ended it.

        When time is up there is none left for that: ``evaluate`` takes the patch then.
        """
        try:
            await run_agent(episode.messages, episode.tools, context.policy, context.artifacts)
        except LimitReached:
            await self._collect(task, context.artifacts, context.leases)
            raise
        await self._collect(task, context.artifacts, context.leases)

    async def evaluate(self, task: SweTask, artifacts: Artifacts, leases: Leases, settings: ResolvedSettings) -> Score:
        """Judge the part of the patch that counts by the hidden tests. An empty one costs no sandbox.

        Raises:
            SandboxError, GraderError: grading itself could not be done.
            TaskError: the row's own tests cannot be run.
        """
        await self._collect(task, artifacts, leases)
        if NO_PATCH in artifacts.files:
            return Score(reward=0.0, detail={"why": artifacts.files[NO_PATCH].decode(errors="replace")})
        placed = self._placed.get(leases)
        dirty = placed.base.dirty if placed else ()
        # In a thread: one of millions of lines takes seconds to read.
        patch = await asyncio.to_thread(clean_patch, artifacts.files[PATCH], task, dirty)
        if not patch.patch:
            return Score(reward=0.0, detail={"why": patch.why_empty, **_counts(patch)})
        score = await grade(task, patch.patch, leases, settings)
        return score.model_copy(update={"detail": {**score.detail, **_counts(patch)}})

    def gold(self, row: Mapping[str, Any]) -> Sequence[GoldStep]:
        """Return the row's own trajectory, or one that applies the gold patch.

        Raises:
            TaskError: the row has neither.
        """
        task = self.parse(row)
        if task.gold_steps:
            return as_gold_steps(task.gold_steps)
        if not task.gold_patch:
            what = f"swe row {task.id or 'without id'}: no gold answer."
            raise TaskError(FailureKind.BAD_ROW, what, "Add 'gold_steps' or 'patch'.")
        # By the editor: a terminal would complete tabs in it.
        create = {"command": "create", "path": _GOLD_PATH, "file_text": task.gold_patch}
        apply = f"git -C {task.workdir} apply --whitespace=nowarn {_GOLD_PATH} && rm {_GOLD_PATH}"
        return [
            GoldStep("I write down the repair.", "editor", create),
            GoldStep("I apply it.", "bash", {"command": apply}),
            GoldStep("", "finish", {"answer": "Applied the repair."}),
        ]

    def wrong(self, row: Mapping[str, Any], seed: int) -> Sequence[GoldStep]:
        """Return plausible turns that do not solve the row: its own, or a file that repairs nothing."""
        task = self.parse(row)
        note = {"command": "create", "path": f"notes_{seed}.txt", "file_text": "The cause is still unknown.\n"}
        steps = [GoldStep("I take notes.", "editor", note), GoldStep("", "finish", {"answer": "I found nothing."})]
        return as_gold_steps(task.wrong_steps) or steps

    async def check_row(self, row: Mapping[str, Any], leases: Leases) -> str:
        """Return which tests of ``fail_to_pass`` pass without the repair; see ``ChecksRow``."""
        task = self.parse(row)
        passing = await passing_unrepaired(task, leases, resolve(self.settings))
        return f"tests of fail_to_pass pass without the repair: {passing}" if passing else ""

    async def _collect(self, task: SweTask, artifacts: Artifacts, leases: Leases) -> None:
        """Take the patch out of the agent's sandbox, once."""
        if PATCH in artifacts.files or NO_PATCH in artifacts.files:
            return
        placed = self._placed.get(leases)
        if placed is None:
            what = f"swe row {task.id or 'without id'}: there is no patch, and no sandbox was prepared to take it from."
            raise GraderError(what, "Call init, or put the patch into the artifacts' files.")
        try:
            sandbox = await leases.agent(await sandbox_spec(task))
            artifacts.files[PATCH] = await extract(task, placed, sandbox, leases)
        except NoPatchError as why:
            artifacts.files[NO_PATCH] = str(why).encode()
        except SandboxError as error:
            if error.cause is not Cause.POLICY:
                raise
            artifacts.files[NO_PATCH] = f"the agent broke its sandbox: {error.what}".encode()


def _counts(patch: CleanPatch) -> dict[str, int]:
    """Small facts of a patch for ``Score.detail``."""
    return {"files": len(patch.files), **{f"dropped: {why}": count for why, count in sorted(patch.dropped.items())}}
