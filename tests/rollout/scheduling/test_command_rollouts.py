"""Rollouts whose settings name an agent program: their session, context and sandbox, and what their record has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_gateway import FakeGateway

from prorl_gym.agents.command_config import CommandConfig
from prorl_gym.agents.protocol import Agent, Artifacts, Tool
from prorl_gym.environments.protocol import Episode, Leases, RunContext
from prorl_gym.errors import FailureKind, Limit, LimitReached, TaskError
from prorl_gym.harness.command import CommandAgent
from prorl_gym.records import Message, Rollout, RolloutRequest, Score
from prorl_gym.rollout.protocol import AttemptSession, Finished, Job
from prorl_gym.rollout.scheduling.runner import InProcessRunner
from prorl_gym.sandbox.protocol import ExecResult, Mount, SandboxSpec
from prorl_gym.settings import ResolvedSettings, RolloutSettings
from prorl_gym.testing.rollout.fake_rollout import FakePolicySource, FakeSession
from prorl_gym.testing.sandbox.fake_sandbox import FakeBackend, SandboxScript

COMMAND = CommandConfig(argv=("agent", "$task"), mounts={"/.prorl/agent": "/srv/agent"})
SAID = [Message(role="user", content="prompt"), Message(role="assistant", content="2")]


@dataclass
class Programs:
    """Implements ``AgentPrograms`` with one program, ``mine``; its session counts as ``FakePolicySource``'s do."""

    said: list[Message] = field(default_factory=lambda: list(SAID))
    why: Exception | None = None
    source: FakePolicySource = field(default_factory=FakePolicySource)

    def mounts_of(self, name: str) -> Sequence[Mount]:
        if name != "mine":
            raise TaskError(FailureKind.BAD_ROW, f"There is no agent '{name}'.")
        return COMMAND.sandbox_mounts()

    def open_agent(self, job: Job, settings: ResolvedSettings) -> tuple[AttemptSession, Agent]:
        return FakeSession(self.source), CommandAgent(COMMAND, FakeGateway(self.said, self.why))


class Sums:
    """An environment that hands its answer on; ``own_loop``: it takes no agent."""

    name = "sums"
    settings = RolloutSettings()

    def __init__(self, *, own_loop: bool = False) -> None:
        self._own_loop = own_loop

    def parse_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return row

    async def init(self, task: Any, leases: Leases, settings: ResolvedSettings) -> Episode:
        spec = SandboxSpec(env={"A": "1"})
        tools: tuple[Tool, ...] = ()
        return Episode((Message(role="user", content="1+1"),), tools, lambda: leases.get_agent_sandbox(spec))

    async def run(self, task: Any, episode: Episode, context: RunContext) -> None:
        if self._own_loop:
            await context.policy.start_conversation(episode.messages, ())
        else:
            await context.run_agent(episode)

    async def evaluate(self, task: Any, artifacts: Artifacts, leases: Leases, settings: ResolvedSettings) -> Score:
        await leases.start_clean_sandbox(SandboxSpec())
        return Score(reward=float(artifacts.answer == "2"))

    def gold_steps(self, row: Mapping[str, Any]) -> list[Any]:
        return []


@dataclass
class World:
    """A runner of one attempt."""

    programs: Programs | None = field(default_factory=Programs)
    environment: Sums = field(default_factory=Sums)
    policies: FakePolicySource = field(default_factory=FakePolicySource)

    def __post_init__(self) -> None:
        script = SandboxScript(on_exec=lambda argv, _: ExecResult(0, b"log" if argv[0] == "tail" else b"", b""))
        self.backend = FakeBackend(script)

    async def roll_out(self, agent: str, **more: Any) -> Rollout:
        runner = InProcessRunner(lambda _: self.environment, self.policies, self.backend, programs=self.programs)
        request = RolloutRequest(environment="sums", task={}, settings=RolloutSettings(agent=agent, **more))
        await runner.accept(Job(request=request, accepted_at=0.0))
        await runner.drain()
        (record,) = [event.rollout async for event in runner.events() if isinstance(event, Finished)]
        await runner.close()
        return record


async def test_the_program_is_run_and_its_work_is_the_record():
    world = World()
    record = await world.roll_out("mine")
    assert (record.outcome.status, record.reward) == ("completed", 1.0)
    assert record.messages == SAID
    assert record.prompt_messages == 1
    assert record.tools == []
    assert record.agent_log == "log\n[The program ended with exit code 0.]"
    assert record.settings is not None and record.settings.agent == "mine"
    assert world.policies.opened == 0
    assert world.programs.source.open_sessions == 0


async def test_only_the_agents_sandbox_has_the_programs_mounts():
    world = World()
    await world.roll_out("mine")
    agents, clean = world.backend.started
    assert [(mount.source, mount.target) for mount in agents.spec.mounts] == [("/srv/agent", "/.prorl/agent")]
    assert agents.spec.env == {"A": "1"}
    assert clean.spec.mounts == ()


async def test_without_the_setting_nothing_of_it_is_used():
    world = World()
    record = await world.roll_out("")
    assert record.outcome.status == "completed"
    assert (world.policies.opened, world.programs.source.opened) == (1, 0)
    assert [sandbox.spec.mounts for sandbox in world.backend.started] == [()]
    assert record.agent_log == ""


async def test_a_limit_that_the_gateway_reached_truncates_and_is_graded():
    record = await World(Programs(why=LimitReached(Limit.TURNS))).roll_out("mine")
    assert (record.outcome.status, record.outcome.limit) == ("truncated", Limit.TURNS)
    assert record.reward == 1.0


async def test_a_program_without_a_call_is_never_a_reward():
    record = await World(Programs(said=[])).roll_out("mine")
    assert record.outcome.kind is FailureKind.SANDBOX_UNAVAILABLE
    assert record.score is None


@pytest.mark.parametrize(
    ("agent", "changed", "said"),
    [
        ("yours", {}, "no agent 'yours'"),
        ("mine", {"programs": None}, "runs none"),
        ("mine", {"environment": Sums(own_loop=True)}, "context.run_agent"),
    ],
    ids=["unknown", "a runner without programs", "an environment with a loop of its own"],
)
async def test_a_program_that_cannot_run_is_the_rows_fault(agent: str, changed: dict[str, Any], said: str):
    record = await World(**changed).roll_out(agent)
    assert record.outcome.kind is FailureKind.BAD_ROW
    assert said in record.outcome.message


async def test_resume_does_not_concern_a_program():
    record = await World().roll_out("mine", resume=True)
    assert (record.outcome.status, record.resumed_turns) == ("completed", 0)
