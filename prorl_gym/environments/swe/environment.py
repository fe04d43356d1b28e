"""The ``swe`` environment: repair a repository in a sandbox; the change is judged by hidden tests in another one."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.agents.tools import BashTool, EditorTool, FinishTool, ThinkTool
from prorl_gym.environments.protocol import Episode, Leases, RunContext, ScriptedStep
from prorl_gym.environments.row_format import to_scripted_steps
from prorl_gym.environments.swe.grading import grade, passing_without_repair
from prorl_gym.environments.swe.patch_filter import filter_patch
from prorl_gym.environments.swe.repository import (
    NoPatchError,
    PlacedRepository,
    extract_patch,
    place_repository_for_agent,
    sandbox_spec,
)
from prorl_gym.environments.swe.swe_row import SweTask, parse_swe_row
from prorl_gym.errors import Cause, FailureKind, GraderError, LimitReached, SandboxError, TaskError
from prorl_gym.records import GradedSubmission, Message, Score
from prorl_gym.sandbox.protocol import Sandbox
from prorl_gym.settings import ResolvedSettings, RolloutSettings, resolve_settings

PATCH = "patch"
"""Key of ``Artifacts.files``: the agent's change as taken from its sandbox."""
NO_PATCH = "no_patch"
"""Key of ``Artifacts.files``: why no patch could be taken."""

_DURATION = re.compile(r"\b(?:\d+m)?\d+\.\d+ ?s(?:econds)?\b")
"""As pytest, unittest and the shell's ``time`` write it."""

_GOLD_PATH = "/tmp/gold.patch"

_CONDA = (
    "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate && conda activate testbed; fi "
    ">/dev/null 2>&1; true"
)
_COMMANDS = {
    "swebench": _CONDA,
    "swegym": _CONDA,
    "r2egym": 'if [ -d .venv/bin ]; then export VIRTUAL_ENV="$PWD/.venv" PATH="$PWD/.venv/bin:$PATH"; fi; true',
}
_SECONDS = 60.0

SYSTEM_PROMPT = (
    "You repair software. You have a sandbox with a git repository, a bash shell, an editor for files and a tool to "
    "write down thoughts. Find out how the code works before you change it, reproduce the problem, repair its cause "
    "in the source code with as small a change as it takes, and run the tests that are there. When you are done, call "
    "finish. Your change is then taken as a patch and judged by hidden tests in a fresh sandbox: changes to tests, "
    "binary files and what you install are not part of it. There is no network."
)

_USER = """\
The repository is in {workdir}. Repair this:

{question}"""


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
        # State of each repository before its agent began, kept as long as the rollout's leases.
        self._repositories: WeakKeyDictionary[Leases, PlacedRepository] = WeakKeyDictionary()

    def parse_row(self, row: Mapping[str, Any]) -> SweTask:
        return parse_swe_row(row)

    def plan_episode(self, task: SweTask, leases: Leases, settings: ResolvedSettings) -> Episode:

        async def source() -> Sandbox:
            return await leases.get_agent_sandbox(await sandbox_spec(task))

        return Episode(
            messages=(
                Message(role="system", content=SYSTEM_PROMPT),
                Message(role="user", content=_USER.format(workdir=task.workdir, question=task.question)),
            ),
            tools=(
                BashTool(source, settings.action_seconds),
                EditorTool(source),
                ThinkTool(),
                FinishTool("Hand in the repository as it is now and end. The answer says in short what you changed."),
            ),
            sandbox=source,
            setup=_COMMANDS.get(task.source, ""),
        )

    async def init(self, task: SweTask, leases: Leases, settings: ResolvedSettings) -> Episode:
        sandbox = await leases.get_agent_sandbox(await sandbox_spec(task))
        self._repositories[leases] = await place_repository_for_agent(task, sandbox)
        await activate_interpreter(task, sandbox)
        return self.plan_episode(task, leases, settings)

    async def run(self, task: SweTask, episode: Episode, context: RunContext) -> None:
        """Run the agent, then take the patch, also when a limit of turns or tokens ended it.

        When the time is up, ``evaluate`` takes the patch.
        """
        try:
            await context.run_agent(episode)
        except LimitReached:
            await self._collect_patch(task, context.artifacts, context.leases)
            raise
        await self._collect_patch(task, context.artifacts, context.leases)

    async def evaluate(self, task: SweTask, artifacts: Artifacts, leases: Leases, settings: ResolvedSettings) -> Score:
        """Judge the part of the patch that counts by the hidden tests. An empty one costs no sandbox."""
        artifacts.submission = GradedSubmission(kind="patch", text="")
        await self._collect_patch(task, artifacts, leases)
        if NO_PATCH in artifacts.files:
            return Score(reward=0.0, detail={"why": artifacts.files[NO_PATCH].decode(errors="replace")})
        placed = self._repositories.get(leases)
        dirty = placed.base.dirty if placed else ()
        # In a thread: one of millions of lines takes seconds to read.
        patch = await asyncio.to_thread(filter_patch, artifacts.files[PATCH], task, dirty)
        artifacts.submission = GradedSubmission(kind="patch", text=patch.patch.decode(errors="replace"))
        counts = {"files": len(patch.files)}
        counts |= {f"dropped: {why}": count for why, count in sorted(patch.dropped.items())}
        if not patch.patch:
            return Score(reward=0.0, detail={"why": patch.empty_reason, **counts})
        score = await grade(task, patch.patch, leases, settings)
        return score.model_copy(update={"detail": {**score.detail, **counts}})

    def normalize_answer(self, text: str) -> str:
        return _DURATION.sub("0s", text)

    def gold_steps(self, row: Mapping[str, Any]) -> Sequence[ScriptedStep]:
        """Return the row's own trajectory, or one that applies the gold patch."""
        task = self.parse_row(row)
        if task.gold_steps:
            return to_scripted_steps(task.gold_steps)
        if not task.gold_patch:
            what = f"swe row {task.id or 'without id'}: no gold answer."
            raise TaskError(FailureKind.BAD_ROW, what, "Add 'gold_steps' or 'patch'.")
        # By the editor: a terminal would complete tabs in it.
        create = {"command": "create", "path": _GOLD_PATH, "file_text": task.gold_patch}
        apply = f"git -C {task.workdir} apply --whitespace=nowarn {_GOLD_PATH} && rm {_GOLD_PATH}"
        return [
            ScriptedStep("I write down the repair.", "editor", create),
            ScriptedStep("I apply it.", "bash", {"command": apply}),
            ScriptedStep("", "finish", {"answer": "Applied the repair."}),
        ]

    def wrong_steps(self, row: Mapping[str, Any], seed: int) -> Sequence[ScriptedStep]:
        task = self.parse_row(row)
        note = {"command": "create", "path": f"notes_{seed}.txt", "file_text": "The cause is still unknown.\n"}
        steps = [
            ScriptedStep("I take notes.", "editor", note),
            ScriptedStep("", "finish", {"answer": "I found nothing."}),
        ]
        return to_scripted_steps(task.wrong_steps) or steps

    async def check_row(self, row: Mapping[str, Any], leases: Leases) -> str:
        task = self.parse_row(row)
        passing = await passing_without_repair(task, leases, resolve_settings(self.settings))
        return f"tests of fail_to_pass pass without the repair: {passing}" if passing else ""

    async def _collect_patch(self, task: SweTask, artifacts: Artifacts, leases: Leases) -> None:
        """Take the patch from the agent's sandbox, once."""
        if PATCH in artifacts.files or NO_PATCH in artifacts.files:
            return
        placed = self._repositories.get(leases)
        if placed is None:
            what = f"swe row {task.id or 'without id'}: there is no patch, and no sandbox was prepared to take it from."
            raise GraderError(what, "Call init, or put the patch into the artifacts' files.")
        try:
            sandbox = await leases.get_agent_sandbox(await sandbox_spec(task))
            artifacts.files[PATCH] = await extract_patch(task, placed, sandbox, leases)
        except NoPatchError as why:
            artifacts.files[NO_PATCH] = str(why).encode()
        except SandboxError as error:
            if error.cause is not Cause.POLICY:
                raise
            artifacts.files[NO_PATCH] = f"the agent broke its sandbox: {error.what}".encode()


async def activate_interpreter(task: SweTask, sandbox: Sandbox) -> None:
    """Put the project's interpreter first in the agent's shell; nothing to do for rows of our own.

    Raises ``SandboxError``: it is too slow, and the agent would work without the project's interpreter.
    """
    command = _COMMANDS.get(task.source)
    if command is not None:
        shell = await sandbox.shell()
        ran = await shell.run_command(command, timeout=_SECONDS)
        if ran.timed_out or ran.restarted:
            what = f"swe row {task.id}: the project's environment could not be activated within {_SECONDS:g} s."
            raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, what, "Look at the load of the node.")
