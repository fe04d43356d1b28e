"""Who pays for a sandbox that is gone: by evidence, once without any, and never for what struck from outside."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.environments.protocol import Episode, Leases, RunContext
from prorl_gym.errors import Evidence, FailureKind, UnfitImageError, UnusableSandboxError
from prorl_gym.records import Retry, Rollout, RolloutRequest, Score
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.protocol import Finished, Job
from prorl_gym.rollout.scheduling.attempt_settler import RetryConfig
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.rollout.scheduling.sandbox_leases import MemoryPressure
from prorl_gym.rollout.scheduling.stage_pools import SharedExclusiveLock
from prorl_gym.rollout.service import RolloutService
from prorl_gym.sandbox.protocol import SandboxBackend, SandboxSpec
from prorl_gym.settings import ResolvedSettings
from prorl_gym.testing.rollout.fake_rollout import (
    EmptyBackend,
    FakePolicySource,
    Script,
    ScriptedEnvironment,
    environment_lookup,
)
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger
from prorl_gym.testing.sandbox.fake_sandbox import FakeBackend, FakePythonSession, FakeSandbox

UNEXPLAINED, OUTSIDE = Evidence.SANDBOX_LOST_UNEXPLAINED, Evidence.SANDBOX_KILLED_OUTSIDE
LIMIT = Evidence.LIMIT_BREACHED
read_pressure = MemoryPressure.read
"""The real one: every test has ``host`` in its place."""


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A host with this many kills for want of memory, more with every item."""
    kills: list[int] = []
    monkeypatch.setattr(MemoryPressure, "read", lambda: MemoryPressure(len(kills), 0.0))
    return kills


class Losing(ScriptedEnvironment):
    """Loses its sandboxes as its list says, one attempt after the other: in which stage, and by which evidence."""

    def __init__(self, losses: Sequence[tuple[str, Evidence]]) -> None:
        super().__init__()
        self._losses = list(losses)

    async def init(self, task: Script, leases: Leases, settings: ResolvedSettings) -> Episode:
        await self.lose("init", await leases.get_agent_sandbox(SandboxSpec()))
        return await super().init(task, leases, settings)

    async def run(self, task: Script, episode: Episode, context: RunContext) -> None:
        await super().run(task, episode, context)
        await self.lose("run", await context.leases.get_agent_sandbox(SandboxSpec()))

    async def evaluate(self, task: Script, artifacts: Artifacts, leases: Leases, settings: ResolvedSettings) -> Score:
        await self.lose("eval", await leases.start_clean_sandbox(SandboxSpec()))
        return Score(reward=task.reward)

    async def lose(self, stage: str, sandbox: Any) -> None:
        if self._losses and self._losses[0][0] == stage:
            _, evidence = self._losses.pop(0)
            assert isinstance(sandbox, FakeSandbox)
            sandbox.evidence = evidence
            sandbox.mark_lost()
            await sandbox.exec(["true"], timeout=1)


def runner_of(environment: ScriptedEnvironment, backend: SandboxBackend | None = None) -> InProcessRunner:
    lookup, policies = environment_lookup(environment), FakePolicySource()
    return InProcessRunner(lookup, policies, backend or FakeBackend(), RunnerConfig(cleanup_seconds=1))


def service_of(runner: InProcessRunner, ledger: SqliteLedger | None = None) -> RolloutService:
    return RolloutService(ledger or MemoryLedger(), runner, RetryConfig(pause_seconds=0))


async def made(service: RolloutService, **task: Any) -> Rollout:
    await service.start()
    await service.submit([RolloutRequest(rollout_id="r", environment="scripted", task={"reward": 0.7, **task})])
    rollout = await service.result("r", wait=20)
    await service.stop()
    assert isinstance(rollout, Rollout)
    return rollout


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        pytest.param([("run", UNEXPLAINED)], ("completed", None, 0.7, 1), id="once"),
        pytest.param([("run", UNEXPLAINED)] * 2, ("failed", "sandbox_broken_by_agent", 0.7, 1), id="twice: its score"),
        pytest.param([("eval", UNEXPLAINED)] * 2, ("failed", "sandbox_broken_by_agent", 0.0, 1), id="twice in EVAL: 0"),
        pytest.param(
            [("run", UNEXPLAINED), ("eval", UNEXPLAINED)], ("failed", "sandbox_broken_by_agent", 0.0, 1), id="both: 0"
        ),
        pytest.param([("run", OUTSIDE)] * 3, ("failed", "sandbox_lost", None, 2), id="from outside"),
        pytest.param([("eval", OUTSIDE)] * 3, ("failed", "sandbox_lost", None, 2), id="from outside in EVAL"),
        pytest.param(
            [("run", OUTSIDE), ("run", UNEXPLAINED)], ("completed", None, 0.7, 2), id="from outside does not count"
        ),
        pytest.param(
            [("run", UNEXPLAINED), ("run", OUTSIDE)], ("completed", None, 0.7, 2), id="from outside is not the second"
        ),
        pytest.param([("init", UNEXPLAINED)] * 2, ("completed", None, 0.7, 2), id="before any payload"),
        pytest.param([("run", LIMIT)], ("failed", "sandbox_limit", 0.7, 0), id="its limit of memory"),
        pytest.param([("eval", LIMIT)], ("failed", "sandbox_limit", 0.0, 0), id="its limit of memory in EVAL"),
    ],
)
async def test_who_pays(losses: list[tuple[str, Evidence]], expected: tuple[Any, ...]) -> None:
    rollout = await made(service_of(runner_of(Losing(losses))))
    kind = rollout.outcome.kind
    found = (rollout.outcome.status, None if kind is None else kind.value, rollout.reward, len(rollout.retries))
    assert found == expected


async def test_a_host_that_is_short_of_memory_takes_the_blame(host: list[int]) -> None:
    environment = Losing([("run", UNEXPLAINED)] * 3)
    lose = environment.lose

    async def lose_by_the_host(stage: str, sandbox: Any) -> None:
        host.append(1)
        await lose(stage, sandbox)

    environment.lose = lose_by_the_host
    rollout = await made(service_of(runner_of(environment)))
    assert (rollout.outcome.kind, rollout.reward, len(rollout.retries)) == (FailureKind.SANDBOX_LOST, None, 2)


@pytest.mark.parametrize(
    ("now", "short"), [(MemoryPressure(7, 0.0), False), (MemoryPressure(8, 0.0), True), (MemoryPressure(7, 50.0), True)]
)
def test_when_a_host_was_short_of_memory(now: MemoryPressure, short: bool) -> None:
    assert now.was_short_since(MemoryPressure(7, 0.0)) is short
    assert read_pressure().oom_kills >= 0


async def test_a_restart_neither_forgets_nor_spends_a_loss(tmp_path: Path) -> None:
    ledger = await SqliteLedger.open(LedgerConfig(path=tmp_path / "l.db"))
    await ledger.add_rollouts([RolloutRequest(rollout_id="r", environment="scripted", task={"reward": 0.7})])
    job = await ledger.begin_attempt("r")
    lost = Retry(attempt=0, kind=FailureKind.SANDBOX_LOST, stage="run", message="gone", evidence=UNEXPLAINED)
    await ledger.fail_attempt("r", lost)
    assert not job.must_run_alone and (await ledger.begin_attempt("r")).must_run_alone
    await ledger.close()  # with the second attempt under way

    ledger = await SqliteLedger.open(LedgerConfig(path=tmp_path / "l.db"))
    service = service_of(runner_of(Losing([("run", UNEXPLAINED)])), ledger)
    await service.start()
    rollout = await service.result("r", wait=20)
    await service.stop()
    assert isinstance(rollout, Rollout)
    assert [retry.kind for retry in rollout.retries] == [FailureKind.SANDBOX_LOST, FailureKind.SERVICE_RESTARTED]
    assert (rollout.outcome.kind, rollout.reward) == (FailureKind.SANDBOX_BROKEN_BY_AGENT, 0.7)


class Unusable(ScriptedEnvironment):
    """Its sandbox lives, and nothing can be started in it any more."""

    async def evaluate(self, task: Script, artifacts: Artifacts, leases: Leases, settings: ResolvedSettings) -> Score:
        raise UnusableSandboxError("the sandbox can start nothing any more.")


async def test_a_program_that_leaves_its_grading_sandbox_unusable_is_worth_nothing() -> None:
    rollout = await made(service_of(runner_of(Unusable())))
    assert (rollout.outcome.kind, rollout.reward) == (FailureKind.SANDBOX_BROKEN_BY_AGENT, 0.0)


@pytest.mark.parametrize(("works", "expected"), [(True, ("policy", 0.7)), (False, ("task", None))])
async def test_what_works_in_a_clean_sandbox_was_removed_by_the_payload(
    works: bool, expected: tuple[str, float | None]
) -> None:
    missing = UnfitImageError("python", "image 'x' has no python3.")

    class Without(FakeSandbox):
        async def python(self) -> FakePythonSession:
            raise missing

    class Backend(FakeBackend):
        async def start_sandbox(self, spec: SandboxSpec) -> FakeSandbox:
            first = Without(spec)
            if works and self.started:
                return await super().start_sandbox(spec)
            self.started.append(first)
            return first

    class Environment(ScriptedEnvironment):
        async def run(self, task: Script, episode: Episode, context: RunContext) -> None:
            await context.leases.get_agent_sandbox(SandboxSpec())
            raise missing

    rollout = await made(service_of(runner_of(Environment(), Backend())))
    assert (rollout.outcome.cause, rollout.reward) == expected


class Gated(ScriptedEnvironment):
    """Counts the agents at work; each waits until it may end."""

    def __init__(self) -> None:
        super().__init__()
        self.at_work: set[str] = set()
        self.most_beside: dict[str, int] = {}
        self.may_end = asyncio.Event()

    async def run(self, task: Script, episode: Episode, context: RunContext) -> None:
        self.at_work.add(task.id)
        for one in self.at_work:
            self.most_beside[one] = max(self.most_beside.get(one, 0), len(self.at_work) - 1)
        await self.may_end.wait()
        self.at_work.remove(task.id)


def job(name: str, *, lost: bool = False) -> Job:
    request = RolloutRequest(rollout_id=name, environment="scripted", task={"id": name})
    retry = Retry(attempt=0, kind=FailureKind.SANDBOX_LOST, stage="run", message="gone", evidence=UNEXPLAINED)
    return Job(request=request, attempt=int(lost), accepted_at=time.time(), retries=(retry,) if lost else ())


async def test_the_attempt_after_an_unexplained_loss_runs_alone() -> None:
    environment = Gated()
    runner = runner_of(environment, EmptyBackend())
    for one in (job("a"), job("b"), job("lost", lost=True), job("c")):
        await runner.accept(one)
    seen = runner.events()
    while environment.at_work != {"a", "b"}:
        await anext(seen)
    environment.may_end.set()
    ended = 0
    while ended < 4:
        ended += isinstance(await asyncio.wait_for(anext(seen), 10), Finished)
    await runner.drain()
    assert environment.most_beside["lost"] == 0
    assert environment.most_beside["a"] == 1


async def test_company_is_left_by_who_is_cancelled_while_it_waits() -> None:
    company = SharedExclusiveLock()
    leave = await company.acquire(exclusive=False)
    alone = asyncio.create_task(company.acquire(exclusive=True))
    later = asyncio.create_task(company.acquire(exclusive=False))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not alone.done() and not later.done()
    alone.cancel()
    (await asyncio.wait_for(later, 5))()
    leave()
    (await asyncio.wait_for(company.acquire(exclusive=True), 5))()
