"""Fakes of everything a runner needs: an environment scripted by its rows, an instant policy, empty sandboxes.

They count what they hand out, so that a test can check that all of it is returned. Nothing here measures a model.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prorl_gym.agents.protocol import Artifacts, AssistantTurn, ToolSpec
from prorl_gym.environments.protocol import Episode, Leases, RunContext, ScriptedStep
from prorl_gym.errors import FailureKind, Limit, LimitReached, RolloutError, TaskError
from prorl_gym.inference.tokens.turn_log import TurnLog
from prorl_gym.records import NOT_SAMPLED, Generation, Message, Score, Segment
from prorl_gym.rollout.protocol import Job
from prorl_gym.sandbox.protocol import ExecResult, ProbeResult, Sandbox, SandboxSpec
from prorl_gym.settings import ResolvedSettings, RolloutSettings
from prorl_gym.testing.sandbox.fake_sandbox import FakeSandbox, SandboxScript


@dataclass(frozen=True, slots=True)
class Script:
    """Script of a row. An action is ``ok``, ``hang``, ``crash``, ``limit:<limit>`` or the name of a failure."""

    init: str = "ok"
    run: str = "ok"
    eval: str = "ok"
    reward: float = 1.0
    turns: int = 1
    """Model calls before the action of ``run``."""
    sandboxes: bool = False
    """Start the agent's sandbox in INIT and a clean one in EVAL."""
    flaky: int = 0
    """Number of attempts that follow the actions; later ones succeed. 0: all. Counted by ``id``."""
    id: str = ""


class ScriptedEnvironment:
    """Implements ``Environment``: plays the script that is its row."""

    def __init__(self, name: str = "scripted", settings: RolloutSettings | None = None) -> None:
        self.name = name
        self.settings = settings or RolloutSettings()
        self._attempts: dict[str, int] = {}

    def parse_row(self, row: Mapping[str, Any]) -> Script:
        try:
            return Script(**row)
        except TypeError as error:
            raise TaskError(FailureKind.BAD_ROW, f"The row of '{self.name}' is wrong: {error}.") from None

    async def init(self, task: Script, leases: Leases, settings: ResolvedSettings) -> Episode:
        self._attempts[task.id] = self._attempts.get(task.id, 0) + 1
        if task.sandboxes:
            await leases.get_agent_sandbox(SandboxSpec())
        await self._act(task, task.init)
        return Episode((Message(role="user", content="go"),), ())

    async def run(self, task: Script, episode: Episode, context: RunContext) -> None:
        context.artifacts.messages.extend(episode.messages)
        for turn in range(task.turns):
            answer = await (
                context.policy.respond(()) if turn else context.policy.start_conversation(episode.messages, ())
            )
            context.artifacts.messages.append(Message(role="assistant", content=answer.text))
            context.artifacts.answer = answer.text
        await self._act(task, task.run)

    async def evaluate(self, task: Script, artifacts: Artifacts, leases: Leases, settings: ResolvedSettings) -> Score:
        if task.sandboxes:
            await leases.start_clean_sandbox(SandboxSpec())
        await self._act(task, task.eval)
        return Score(reward=task.reward)

    def gold_steps(self, row: Mapping[str, Any]) -> Sequence[ScriptedStep]:
        return [ScriptedStep(text="go")]

    async def _act(self, task: Script, action: str) -> None:
        if task.flaky and self._attempts[task.id] > task.flaky:
            action = "ok"
        if action == "hang":
            await asyncio.get_running_loop().create_future()
        elif action == "crash":
            raise RuntimeError("a defect")
        elif action.startswith("limit:"):
            raise LimitReached(Limit(action.removeprefix("limit:")))
        elif action != "ok":
            raise RolloutError(FailureKind(action), f"scripted {action}.", "Nothing to do: this is a test.")


class FakeSession:
    """Implements ``PolicySession`` and ``Policy``: each turn samples three tokens at once."""

    def __init__(self, source: "FakePolicySource", *, evaluation: bool = False) -> None:
        self.policy = self
        self._source = source
        self._evaluation = evaluation
        self._turns = 0
        self._closed = False
        source.open_sessions += 1

    async def start_conversation(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> AssistantTurn:
        return await self.respond(messages)

    async def respond(self, messages: Sequence[Message]) -> AssistantTurn:
        self._turns += 1
        return AssistantTurn("done")

    async def failure_at_deadline(self) -> RolloutError | None:
        return None

    async def wait_for_room(self) -> None:
        if not self._evaluation:
            await self._source.has_room.wait()

    def release_engine_slot(self) -> None:
        self._source.releases += 1

    def mark_cancelled(self) -> None:
        pass

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._source.open_sessions -= 1

    def segments(self) -> list[Segment]:
        if not self._turns:
            return []
        count = self._turns
        generations = [
            Generation(start=4 * i + 1, end=4 * i + 4, turn=i, finish_reason="stop", engine="fake", seconds=0.0)
            for i in range(count)
        ]
        return [
            Segment(
                token_ids=[1, 2, 3, 4] * count,
                mask=[0, 1, 1, 1] * count,
                logprobs=[0.0, -0.5, -0.5, -0.5] * count,
                policy_versions=[NOT_SAMPLED, 0, 0, 0] * count,
                generations=generations,
                temperature=1.0,
                top_p=1.0,
                top_k=-1,
                logprob_kind="raw",
            )
        ]


class FakePolicySource:
    """Implements ``PolicySource``; ``open_sessions`` is 0 when every session was closed."""

    def __init__(self) -> None:
        self.open_sessions = 0
        self.opened = 0
        self.releases = 0
        """How often an agent was parked."""
        self.has_room = asyncio.Event()
        """Set at first; clear it to keep agents from beginning."""
        self.has_room.set()

    def open_session(self, job: Job, settings: ResolvedSettings, turn_log: TurnLog | None = None) -> FakeSession:
        self.opened += 1
        return FakeSession(self, evaluation=job.request.evaluation)


_NO_PROGRAMS = SandboxScript(on_exec=lambda argv, stdin: ExecResult(127, b"", b"no such program\n"))


class EmptySandbox(FakeSandbox):
    """A sandbox in memory without a program, which its backend counts until it is closed."""

    def __init__(self, backend: "EmptyBackend", spec: SandboxSpec) -> None:
        backend.started += 1
        backend.sandbox_count += 1
        super().__init__(spec, _NO_PROGRAMS, f"empty-{backend.started}")
        self._backend = backend

    async def close(self) -> None:
        if not self.closed:
            self._backend.sandbox_count -= 1
        await super().close()


class EmptyBackend:
    """Implements ``SandboxBackend``; ``sandbox_count`` is 0 when every sandbox was closed.

    A start takes ``start_ticks`` passes of the event loop, so that a cancel can strike inside it.
    """

    name = "empty"

    def __init__(self, start_ticks: int = 0) -> None:
        self.started = 0
        self.sandbox_count = 0
        self._start_ticks = start_ticks

    async def probe(self) -> ProbeResult:
        return ProbeResult(self.name, True, "no process at all")

    async def start_sandbox(self, spec: SandboxSpec) -> Sandbox:
        for _ in range(self._start_ticks):
            await asyncio.sleep(0)
        return EmptySandbox(self, spec)

    async def close(self) -> None:
        pass


def environment_lookup(*environments: ScriptedEnvironment) -> Any:
    """Return a finder of these by name, in the form that a runner takes."""
    by_name = {environment.name: environment for environment in environments}

    def find(name: str) -> ScriptedEnvironment:
        if name not in by_name:
            raise TaskError(
                FailureKind.UNKNOWN_ENVIRONMENT, f"There is no environment '{name}'.", f"Known: {', '.join(by_name)}."
            )
        return by_name[name]

    return find
