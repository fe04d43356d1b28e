"""Groups on a whole service: what the book decides happens to rollouts, and survives a restart."""

import asyncio
import gc
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.client.wire_models import GroupState, RolloutSummary
from prorl_gym.demand import Demand, RedundantHandling
from prorl_gym.environments.protocol import Episode, Leases, RunContext
from prorl_gym.errors import CancelReason
from prorl_gym.records import Rollout, RolloutRequest, Score
from prorl_gym.rollout.groups.group import Replica
from prorl_gym.rollout.groups.group_scheduler import GroupScheduler
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.protocol import Stage, StageEntered
from prorl_gym.rollout.scheduling.attempt_settler import RetryConfig
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.rollout.service import RolloutService
from prorl_gym.settings import ResolvedSettings
from prorl_gym.testing.rollout.fake_rollout import (
    EmptyBackend,
    FakePolicySource,
    Script,
    ScriptedEnvironment,
    environment_lookup,
)
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger

KILL = RedundantHandling(init="kill", run="kill")


class GatedEnvironment(ScriptedEnvironment):
    """Waits in the middle of RUN, and in EVAL, for the gates of its row to be opened."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def open(self, *ids: str) -> None:
        for name in ids:
            self.gates[name].set()

    def count(self, *ids: str) -> None:
        """Have seen one attempt of each."""
        self._attempts.update(dict.fromkeys(ids, 1))

    async def run(self, task: Script, episode: Episode, context: RunContext) -> None:
        await context.policy.start_conversation(episode.messages, ())
        if task.run == "gate":
            await self.gates[task.id].wait()
            await context.policy.respond(())
        else:
            await self._act(task, task.run)

    async def evaluate(self, task: Script, artifacts: Artifacts, leases: Leases, settings: ResolvedSettings) -> Score:
        if task.eval == "gate":
            await self.gates[task.id].wait()
        return Score(reward=task.reward)


class Stand:
    """A service, its environment's gates, and where its rollouts are."""

    def __init__(self, ledger: SqliteLedger | None = None, slots: int = 8, attempts: int = 1) -> None:
        self.environment = GatedEnvironment()
        self.backend = EmptyBackend()
        self.ledger = ledger or MemoryLedger()
        self.policies = FakePolicySource()
        self.runner = InProcessRunner(
            environment_lookup(self.environment),
            self.policies,
            self.backend,
            RunnerConfig(queue=64, init=slots, run=slots, eval=slots, cleanup_seconds=1),
        )
        config = RetryConfig(attempts=attempts, pause_seconds=0.001, ledger_pause_seconds=0.01)
        self.service = RolloutService(self.ledger, self.runner, config)
        self.stages: dict[str, Stage] = {}
        self.parked: set[str] = set()
        self._news = asyncio.Event()
        self.service.stage_observers.append(self._seen)
        self.service.record_observers.append(lambda _: self._tell())

    def _seen(self, event: Any) -> None:
        if isinstance(event, StageEntered):
            self.stages[event.rollout_id] = event.stage
        else:
            (self.parked.add if event.is_parked else self.parked.discard)(event.rollout_id)
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await self._news.wait()

    async def __aenter__(self) -> "Stand":
        await self.service.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.wait_for(self.service.stop(drain=False), 10)
        assert (self.backend.sandbox_count, self.policies.open_sessions) == (0, 0)

    async def submit(self, group_id: str, rewards: Sequence[float], **task: Any) -> list[str]:
        """Submit a group; ``task`` is its script."""
        ids = [f"{group_id}.{index}" for index in range(len(rewards))]
        await self.service.submit(
            [
                RolloutRequest(
                    rollout_id=name,
                    run_id="run",
                    group_id=group_id,
                    group_size=len(rewards),
                    replica=index,
                    environment="scripted",
                    task={"id": name, "reward": reward, **task},
                )
                for index, (name, reward) in enumerate(zip(ids, rewards, strict=True))
            ]
        )
        return ids

    async def begin(self, group_id: str, rewards: Sequence[float]) -> list[str]:
        """Submit a group, and wait until all of it are in RUN before their gates."""
        ids = await self.submit(group_id, rewards, run="gate")
        await self.until(lambda: [self.stages.get(name) for name in ids] == ["run"] * len(ids))
        return ids

    async def verdict(self, group_id: str) -> GroupState:
        """The state in which a group is settled."""
        results = self.service.groups.schedulers["run"].results.settled
        async with asyncio.timeout(10):
            while (settled := results.get(group_id)) is None:  # noqa: ASYNC110 - not every verdict has an event
                await asyncio.sleep(0.001)
        return settled.state

    async def end(self, rollout_id: str) -> Rollout:
        rollout = await self.service.result(rollout_id, wait=10)
        assert rollout is not None
        return rollout


async def test_enough_groups_stop_the_rest_of_their_run() -> None:
    async with Stand() as stand:
        await stand.service.set_demand("run", Demand(groups=1, redundant=KILL))
        slow = await stand.submit("slow", [0.0, 1.0], run="gate")
        other = RolloutRequest(rollout_id="alone", run_id="run", environment="scripted", task={"id": "alone"})
        await stand.service.submit([other.model_copy(update={"task": {"id": "alone", "run": "gate"}})])
        await stand.until(lambda: [stand.stages.get(name) for name in [*slow, "alone"]] == ["run"] * 3)
        await stand.submit("fast", [0.0, 1.0])
        assert [(await stand.end(name)).outcome.reason for name in slow] == [CancelReason.REDUNDANT] * 2
        assert (await stand.verdict("slow"), await stand.verdict("fast")) == ("redundant", "ready")
        stand.environment.open("alone")
        assert (await stand.end("alone")).outcome.status == "completed"
        status = stand.service.groups.status("run")
        assert (status.satisfied, status.ready, status.states) == (True, 1, {"ready": 1, "redundant": 1})
        assert status.wasted_tokens == sum([(await stand.end(name)).sampled_tokens for name in slow]) > 0


async def test_parked_agents_go_on_with_the_next_demand() -> None:
    async with Stand() as stand:
        await stand.service.set_demand("run", Demand(groups=1))
        slow = await stand.begin("slow", [0.0, 1.0])
        for name in await stand.submit("fast", [0.0, 1.0]):
            await stand.end(name)
        stand.environment.open(*slow)
        await stand.until(lambda: stand.parked == set(slow))
        assert stand.service.groups.status("run").parked == 2
        cursor = stand.service.groups.status("run").ready_groups[0].cursor
        await stand.service.set_demand("run", Demand(groups=1, after=cursor))
        assert [(await stand.end(name)).outcome.status for name in slow] == ["completed"] * 2
        assert await stand.verdict("slow") == "ready"


async def test_a_drain_does_not_wait_for_parked_agents() -> None:
    stand = Stand()
    await stand.service.start()
    await stand.service.set_demand("run", Demand(groups=1))
    slow = await stand.begin("slow", [0.0, 1.0])
    await stand.submit("fast", [0.0, 1.0])
    assert await stand.verdict("fast") == "ready"
    stand.environment.open(*slow)
    await stand.until(lambda: stand.parked == set(slow))
    await asyncio.wait_for(stand.service.stop(drain=True), 10)


async def test_a_failed_member_is_made_again_under_another_name() -> None:
    async with Stand() as stand:
        await stand.service.set_demand("run", Demand(groups=1))
        ids = await stand.submit("g", [0.0, 1.0], run="sandbox_lost", flaky=1)
        for name in ids:
            assert (await stand.end(name)).outcome.status == "failed"
        assert await stand.verdict("g") == "ready"
        again = await stand.end(f"{ids[1]}:r1")
        assert (again.stands_in_for, again.replica, again.reward) == (ids[1], 1, 1.0)


async def test_a_new_version_cancels_what_is_hopeless() -> None:
    async with Stand() as stand:
        await stand.service.set_demand("run", Demand(groups=9, max_staleness=0))
        ids = await stand.begin("g", [0.0, 1.0])
        await stand.service.set_policy_version(1)
        assert {(await stand.end(name)).outcome.reason for name in ids} == {CancelReason.STALE}
        assert await stand.verdict("g") == "stale"


async def test_what_waits_for_another_attempt_holds_no_old_token() -> None:
    async with Stand(attempts=2) as stand:
        seen: list[tuple[str, Stage]] = []

        def look(event: Any) -> None:
            seen.append((event.rollout_id, event.stage))
            if event.stage == "run":
                stand.service.hold_dispatch()  # no second attempt begins before the new version

        stand.service.stage_observers.append(look)
        await stand.service.set_demand("run", Demand(groups=9, max_staleness=0))
        ids = await stand.submit("g", [0.0, 1.0], run="sandbox_lost", flaky=1)
        await stand.until(lambda: all((name, "run") in seen and stand.stages[name] == "queue" for name in ids))
        await stand.service.set_policy_version(1)
        assert stand.service.groups.status("run").states == {"open": 1}, "nothing of it is too old"
        assert all(stand.stages[name] == "queue" for name in ids)


async def test_another_pools_version_makes_nothing_stale(tmp_path: Path) -> None:
    config = LedgerConfig(path=tmp_path / "ledger.sqlite")
    async with Stand(await SqliteLedger.open(config)) as stand:
        await stand.service.set_demand("run", Demand(groups=9, max_staleness=0))
        await stand.service.set_demand("other", Demand(groups=9, max_staleness=0, pool="named-0", version=5))
        ids = await stand.begin("g", [0.0, 1.0])
        await stand.service.set_policy_version(7, "named-0")
        assert [stand.service.groups.status(run).version for run in ("run", "other")] == [0, 7]
        stand.environment.open(*ids)
        assert await stand.verdict("g") == "ready"
    async with Stand(await SqliteLedger.open(config)) as stand:
        assert [stand.service.groups.status(run).version for run in ("run", "other")] == [0, 7]
        await stand.service.set_demand("other", Demand(groups=9, max_staleness=0))
        assert stand.service.groups.status("other").version == 0


async def test_a_demand_reaches_what_is_under_way() -> None:
    async with Stand() as stand:
        done = await stand.submit("done", [0.0, 1.0])
        working = await stand.submit("working", [0.0, 1.0], run="gate")
        for name in done:
            await stand.end(name)
        await stand.until(lambda: [stand.stages.get(name) for name in working] == ["run"] * 2)
        status = await stand.service.set_demand("run", Demand(groups=1, redundant=KILL))
        assert status.states == {"ready": 1, "redundant": 1}
        assert (await stand.end(working[0])).outcome.reason is CancelReason.REDUNDANT


async def test_the_end_of_a_demand_cancels_what_it_had_parked() -> None:
    async with Stand() as stand:
        await stand.service.set_demand("run", Demand(groups=1))
        slow = await stand.begin("slow", [0.0, 1.0, 1.0])
        for name in await stand.submit("fast", [0.0, 1.0]):
            await stand.end(name)
        stand.environment.open(*slow[:2])  # the third is in the middle of a model call
        await stand.until(lambda: stand.parked == set(slow[:2]))
        fresh = await stand.submit("fresh", [0.0, 1.0])
        assert stand.service.groups.status("run").held == 2
        await stand.service.set_demand("run", None)
        assert [(await stand.end(name)).outcome.reason for name in slow] == [CancelReason.REDUNDANT] * 3
        assert [(await stand.end(name)).outcome.status for name in fresh] == ["completed"] * 2
        assert (await stand.runner.capacity()).parked == 0


async def test_demands_of_one_run_take_effect_in_their_order() -> None:
    async with Stand() as stand:
        wishes = [Demand(groups=number) for number in range(20)]
        await asyncio.gather(*(stand.service.set_demand("run", wish) for wish in (*wishes, None, wishes[7])))
        assert stand.service.groups.demands() == {"run": wishes[7]}
        assert await stand.ledger.demands() == {"run": wishes[7]}


async def test_nothing_is_remembered_of_what_has_ended() -> None:
    async with Stand() as stand:
        for number in range(5):
            for name in await stand.submit(f"kept{number}", [0.0, 1.0]):
                await stand.end(name)
        gc.collect()
        replicas = [one for one in gc.get_objects() if isinstance(one, Replica)]
        assert [one for one in replicas if one.group_id.startswith("kept")] == []
        assert stand.service.groups.demands() == {}


async def test_a_restart_on_the_same_file_goes_on_as_before(tmp_path: Path) -> None:
    config = LedgerConfig(path=tmp_path / "l.db")
    demand = Demand(groups=1)
    async with Stand(await SqliteLedger.open(config)) as stand:
        await stand.service.set_demand("run", demand)
        slow = await stand.begin("slow", [0.0, 1.0])
        await stand.submit("fast", [0.0, 1.0])
        assert await stand.verdict("fast") == "ready"
        before = stand.service.groups.status("run")
    async with Stand(await SqliteLedger.open(config)) as stand:
        after = stand.service.groups.status("run")
        assert (stand.service.groups.demands(), after.ready_groups) == ({"run": demand}, before.ready_groups)
        assert (after.held, stand.stages) == (2, {})
        assert await stand.verdict("fast") == "ready"
        stand.environment.open(*slow)
        await stand.service.set_demand("run", demand.model_copy(update={"after": after.ready_groups[0].cursor}))
        assert await stand.verdict("slow") == "ready"


async def test_a_replacement_that_a_crash_prevented_is_made_after_it(tmp_path: Path) -> None:
    config = LedgerConfig(path=tmp_path / "l.db")
    async with Stand(await SqliteLedger.open(config)) as stand:
        ids = await stand.submit("g", [0.0, 1.0], run="sandbox_lost", flaky=1)  # there is no demand yet
        for name in ids:
            await stand.end(name)
        await stand.ledger.set_demand("run", Demand(groups=1))
    async with Stand(await SqliteLedger.open(config)) as stand:
        stand.environment.count(*ids)  # what it had counted died with the process
        assert await stand.verdict("g") == "ready"
        assert (await stand.end(f"{ids[0]}:r1")).stands_in_for == ids[0]
    async with Stand(await SqliteLedger.open(config)) as stand:
        assert await stand.verdict("g") == "ready"
        assert stand.service.pending == 0


async def test_a_replacement_whose_name_is_taken_leaves_the_group_short(caplog: pytest.LogCaptureFixture) -> None:
    async with Stand() as stand:
        await stand.service.set_demand("run", Demand(groups=1))
        taken = RolloutRequest(rollout_id="g.0:r1", run_id="other", environment="scripted", task={"id": "taken"})
        await stand.service.submit([taken])
        await stand.submit("g", [1.0], run="sandbox_lost")
        assert await stand.verdict("g") == "short"
        assert "no replacement for rollout g.0" in caplog.text


async def test_a_defect_of_the_book_does_not_stop_the_service(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    async with Stand() as stand:
        await stand.service.set_demand("run", Demand(groups=0))
        ids = await stand.submit("g", [0.0, 1.0])
        assert stand.service.groups.status("run").held == 2
        monkeypatch.setattr(GroupScheduler, "decide", broken)
        await stand.service.set_policy_version(1)
        assert [(await stand.end(name)).outcome.status for name in ids] == ["completed"] * 2
        assert "its groups are not looked after any more" in caplog.text
        assert stand.service.groups.demands() == {}


async def test_what_ends_while_a_book_is_opened_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Stand() as stand:
        ids = await stand.submit("g", [0.0, 1.0], eval="gate")
        await stand.until(lambda: [stand.stages.get(name) for name in ids] == ["eval"] * 2)
        members = stand.ledger.summaries

        async def slow(*args: Any, **options: Any) -> list[RolloutSummary]:
            found = await members(*args, **options)
            stand.environment.open(*ids)
            for name in ids:
                await stand.end(name)
            return found

        monkeypatch.setattr(stand.ledger, "summaries", slow)
        status = await stand.service.set_demand("run", Demand(groups=1))
        assert (status.ready, status.states) == (1, {"ready": 1})
