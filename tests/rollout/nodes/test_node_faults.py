"""Nodes and heads that are killed, cut off and restarted: every rollout gets one record, and no work is done in vain.

On a virtual clock, with the real service, ledger statements, head and nodes.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_node import Faults, MemoryNode
from virtual_time import virtually

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.environments.protocol import Episode, RunContext
from prorl_gym.errors import CancelReason, FailureKind
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.ledger.ledger_config import LedgerError
from prorl_gym.rollout.nodes.node import LeaseExpiredError, Node
from prorl_gym.rollout.nodes.node_runners import NodeRunners, NodesConfig
from prorl_gym.rollout.nodes.wire import (
    AttemptFinished,
    ExchangeAnswer,
    ExchangeBody,
    JoinBody,
    JoinResponse,
    LeaveBody,
    Outbox,
)
from prorl_gym.rollout.scheduling.attempt_settler import RetryConfig
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.rollout.service import RolloutService
from prorl_gym.testing.rollout.fake_rollout import (
    EmptyBackend,
    FakePolicySource,
    Script,
    ScriptedEnvironment,
    environment_lookup,
)
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger

LEASE = 10.0
SIZES = RunnerConfig(queue=4, init=2, run=4, eval=2, cleanup_seconds=1)


class Slow(ScriptedEnvironment):
    """Works for ten seconds between two model calls."""

    def __init__(self, ends: list[tuple[str, str]], node: str) -> None:
        super().__init__()
        self._ends = ends
        self._node = node

    async def run(self, task: Script, episode: Episode, context: RunContext) -> None:
        await asyncio.sleep(10)
        await super().run(task, episode, context)

    async def evaluate(self, task: Script, artifacts: Artifacts, *rest: Any) -> Any:
        self._ends.append((task.id, self._node))
        return await super().evaluate(task, artifacts, *rest)


class _MortalLedger:
    """The ledger of one life of a head: after its end no call writes anything."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self.is_dead = False
        self._ledger = ledger

    async def close(self) -> None:
        """Leave the rest to the next life."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*arguments: Any, **named: Any) -> Any:
            if self.is_dead:
                raise LedgerError("the head was killed.")
            return await getattr(self._ledger, name)(*arguments, **named)

        return call


class Cluster:
    """A head that can be killed, and nodes that can be killed and cut off."""

    def __init__(self, *names: str, seed: int = 0) -> None:
        self._names = names
        self.dice = random.Random(seed)
        self.ledger = MemoryLedger()
        self.nodes: dict[str, MemoryNode] = {}
        self.faults: dict[str, Faults] = {}
        self.ends: list[tuple[str, str]] = []
        """Rollouts that were graded, and where."""
        self.backends: list[EmptyBackend] = []
        self.head: NodeRunners | None = None

    async def start_head(self) -> None:
        self._life: Any = _MortalLedger(self.ledger)
        head = NodeRunners(
            NodesConfig(lease_seconds=LEASE),
            {},
            lambda _: None,
            lambda rollout, attempt: self.service.claim_attempt(rollout, attempt),
        )
        self.service = RolloutService(self._life, head, RetryConfig(pause_seconds=0.1), claim_seconds=LEASE)
        self.service.settlement_observers.append(head.on_settled)
        await self.service.start()
        self.head = head

    async def kill_head(self) -> None:
        head, self.head = self.head, None
        assert head is not None
        self._life.is_dead = True
        cut = {name: faults.is_cut for name, faults in self.faults.items()}
        for faults in self.faults.values():
            faults.is_cut = True
        await self.service.stop(drain=False)  # which can neither tell a node nor write anything any more
        await head.release()
        for name, faults in self.faults.items():
            faults.is_cut = cut[name]

    def start_node(self, name: str, lease_seconds: float = LEASE, **shares: float) -> MemoryNode:
        environment = Slow(self.ends, name)
        backend = EmptyBackend()
        self.backends.append(backend)
        runner = InProcessRunner(environment_lookup(environment), FakePolicySource(), backend, SIZES)
        faults = self.faults[name] = Faults(random.Random(self.dice.random()), **shares)
        node = self.nodes[name] = MemoryNode(
            name,
            lambda: self.head,
            runner,
            lease_seconds=lease_seconds,
            slots=runner.pools.by_name["jobs"].size,
            init_slots=SIZES.init,
            faults=faults,
        )
        return node

    async def submit(self, count: int) -> list[str]:
        ids = [f"r{number}" for number in range(count)]
        await self.service.submit(
            [RolloutRequest(rollout_id=one, environment="scripted", task={"id": one, "sandboxes": True}) for one in ids]
        )
        return ids

    async def records(self, ids: list[str]) -> dict[str, Rollout]:
        found = {}
        async with asyncio.timeout(1000):
            for one in ids:
                while (rollout := await self.service.result(one, wait=1.0)) is None:
                    pass
                found[one] = rollout
        assert sorted(delivery.cursor for delivery in await self.ledger.read_records(None, 0, 10_000)) == list(
            range(1, len(ids) + 1)
        ), "each has one record"
        return found

    async def __aenter__(self) -> "Cluster":
        await self.start_head()
        for name in self._names:
            self.start_node(name)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.service.stop(drain=False)
        for node in self.nodes.values():
            await node.kill()
        assert [backend.sandbox_count for backend in self.backends] == [0] * len(self.backends)


def kinds(rollout: Rollout) -> list[FailureKind]:
    return [retry.kind for retry in rollout.retries]


@virtually
async def test_a_killed_nodes_rollouts_are_made_elsewhere_and_nothing_else_is() -> None:
    async with Cluster("a", "b") as cluster:
        ids = await cluster.submit(16)
        await asyncio.sleep(12)  # the first four of each are done, the next four at work
        before = dict(cluster.ends)
        assert Counter(before.values()) == {"a": 4, "b": 4}
        await cluster.nodes["a"].kill()
        records = await cluster.records(ids)
        assert all(rollout.outcome.status == "completed" for rollout in records.values())
        assert Counter(one for one, _ in cluster.ends).most_common(1)[0][1] == 1, "nothing that ended is made again"
        again = {one for one, rollout in records.items() if rollout.attempt == 1}
        assert again and not again & set(before)
        assert all(kinds(records[one]) == [FailureKind.NODE_LOST] for one in again)
        assert cluster.head is not None and cluster.head.status().lost == 1


@virtually
async def test_a_node_that_was_cut_off_for_its_lease_ends_itself_and_ends_no_rollout() -> None:
    async with Cluster("a") as cluster:
        ids = await cluster.submit(4)
        await asyncio.sleep(2)
        cluster.faults["a"].is_cut = True
        await asyncio.sleep(LEASE + 1)
        assert isinstance(cluster.nodes["a"].error, LeaseExpiredError)
        assert cluster.backends[0].sandbox_count == 0
        cluster.faults["a"].is_cut = False
        cluster.start_node("b")
        records = await cluster.records(ids)
        assert {(rollout.attempt, *kinds(rollout)) for rollout in records.values()} == {(1, FailureKind.NODE_LOST)}


@virtually
async def test_late_messages_of_a_lost_node_are_refused() -> None:
    """A node whose own clock stood still (SIGSTOP) may send before it notices that its lease is over."""
    async with Cluster() as cluster:
        cluster.start_node("a", lease_seconds=LEASE + 100)
        ids = await cluster.submit(2)
        await asyncio.sleep(1)
        cluster.faults["a"].is_cut = True
        await asyncio.sleep(LEASE + 5)  # it has finished both; the head has given it up
        assert len(cluster.ends) == 2 and cluster.head is not None and cluster.head.status().lost == 1
        cluster.faults["a"].is_cut = False
        records = await cluster.records(ids)  # made again by the same process, under a new session
        assert {rollout.attempt for rollout in records.values()} == {1}
        assert len(cluster.ends) == 4


@virtually
async def test_a_restarted_head_adopts_living_nodes() -> None:
    async with Cluster("a", "b") as cluster:
        ids = await cluster.submit(16)
        await asyncio.sleep(18)
        await cluster.kill_head()
        await asyncio.sleep(LEASE / 2)
        assert len(cluster.ends) == 16, "the second four of each end while there is no head"
        await cluster.start_head()
        records = await cluster.records(ids)
        assert {(rollout.attempt, rollout.outcome.status) for rollout in records.values()} == {(0, "completed")}
        assert len(cluster.ends) == 16


@virtually
async def test_what_no_node_claims_after_a_restart_is_made_again_after_the_lease() -> None:
    async with Cluster("a", "b") as cluster:
        ids = await cluster.submit(8)
        await asyncio.sleep(5)
        await cluster.kill_head()
        await cluster.nodes["a"].kill()
        await cluster.start_head()
        records = await cluster.records(ids)
        assert Counter((rollout.attempt, *kinds(rollout)) for rollout in records.values()) == {
            (0,): 4,
            (1, FailureKind.SERVICE_RESTARTED): 4,
        }


@virtually
async def test_a_draining_node_finishes_and_leaves() -> None:
    async with Cluster() as cluster:
        leaving = cluster.start_node("a")
        ids = await cluster.submit(4)
        await asyncio.sleep(1)
        leaving.node.drain()
        cluster.start_node("b")
        later = RolloutRequest(rollout_id="later", environment="scripted", task={"id": "later"})
        await cluster.service.submit([later])
        await leaving.task
        assert leaving.error is None
        records = await cluster.records([*ids, "later"])
        assert {rollout.attempt for rollout in records.values()} == {0}
        assert dict(cluster.ends) == {**dict.fromkeys(ids, "a"), "later": "b"}
        assert cluster.head is not None
        assert (cluster.head.status().lost, [node.name for node in cluster.head.status().nodes]) == (0, ["b"])


@virtually
async def test_a_cancelled_rollout_on_a_lost_node_ends_as_cancelled() -> None:
    async with Cluster("a") as cluster:
        ids = await cluster.submit(1)
        await asyncio.sleep(1)
        cluster.faults["a"].is_cut = True
        await cluster.service.cancel(ids)
        records = await cluster.records(ids)
        assert records["r0"].outcome.reason is CancelReason.CLIENT


@pytest.mark.parametrize("is_json", [True, False])
def test_a_record_that_cannot_be_used_ends_its_rollout(is_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = NodeRunners.exchange

    def damage(message: Any) -> Any:
        if not isinstance(message, AttemptFinished):
            return message
        record = message.record.replace('"r0"', '"r1"') if is_json else message.record[:-1]
        return message.model_copy(update={"record": record})

    async def damaged(self: NodeRunners, name: str, body: ExchangeBody) -> str:
        return await exchange(self, name, body.model_copy(update={"messages": tuple(map(damage, body.messages))}))

    monkeypatch.setattr(NodeRunners, "exchange", damaged)

    @virtually
    async def drive() -> None:
        async with Cluster("a") as cluster:
            rollout = (await cluster.records(await cluster.submit(1)))["r0"]
            assert (rollout.outcome.kind, rollout.reward) == (FailureKind.INTERNAL, None)

    drive()


@virtually
async def test_a_rollout_that_outlives_no_node_ends() -> None:
    """It may be what kills them: lost nodes count as restarts do, and not as failures."""
    async with Cluster() as cluster:
        ids = await cluster.submit(1)
        for number in range(9):
            node = cluster.start_node(f"n{number}")
            await asyncio.sleep(3)
            await node.kill()
            await asyncio.sleep(LEASE)
        rollout = (await cluster.records(ids))["r0"]
        assert (rollout.outcome.kind, rollout.attempt, rollout.reward) == (FailureKind.NODE_LOST, 8, None)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_every_rollout_gets_one_record_whatever_fails(seed: int) -> None:
    @virtually
    async def drive() -> None:
        names = [f"n{number}" for number in range(random.Random(seed).randint(1, 4))]
        async with Cluster(seed=seed) as cluster:
            dice = cluster.dice

            def start(name: str) -> None:
                shares = {fault: dice.choice([0.0, 0.1, 0.3]) for fault in ("lost", "unanswered", "repeated")}
                cluster.start_node(name, **shares)

            for name in names:
                start(name)
            ids = await cluster.submit(dice.randint(1, 30))
            for _ in range(dice.randrange(8)):
                await asyncio.sleep(dice.uniform(0, 12))
                name = dice.choice(names)
                match dice.randrange(4):
                    case 0:
                        await cluster.kill_head()
                        await asyncio.sleep(dice.uniform(0, 1.5 * LEASE))
                        await cluster.start_head()
                    case 1:
                        await cluster.nodes[name].kill()
                    case 2:
                        cluster.faults[name].is_cut = not cluster.faults[name].is_cut
                    case _:
                        await cluster.service.cancel([dice.choice(ids)])
            for name in names:
                cluster.faults[name].is_cut = False
                if cluster.nodes[name].task.done():
                    start(name)
            records = await cluster.records(ids)
            assert {rollout.outcome.status for rollout in records.values()} <= {"completed", "cancelled"}

    drive()


# --- a node's session with its head ---------------------------------------------------------------------------------


class ForgetfulHead:
    """Implements ``HeadClient``: once ``has_forgotten`` is set, it knows no node."""

    def __init__(self) -> None:
        self.joins = 0
        self.has_forgotten = asyncio.Event()

    async def join(self, body: JoinBody) -> JoinResponse:
        self.joins += 1
        await asyncio.sleep(1)
        return JoinResponse(epoch="e")

    async def exchange(self, body: str, seconds: float) -> ExchangeAnswer:
        await self.has_forgotten.wait()
        return ExchangeAnswer(must_join=True)

    async def leave(self, body: LeaveBody) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize("passes", range(8))
def test_a_node_that_is_stopped_as_it_has_to_join_again_ends(passes: int) -> None:
    """The stop may come in any pass of the loop: before Python 3.13, a task group that fails loses a cancel."""

    @virtually
    async def drive() -> None:
        head = ForgetfulHead()
        runner = InProcessRunner(environment_lookup(ScriptedEnvironment()), FakePolicySource(), EmptyBackend())
        node = Node(head, runner, Outbox(), {}, lease_seconds=30, slots=1, init_slots=1)
        working = asyncio.create_task(node.run())
        await asyncio.sleep(5)
        head.has_forgotten.set()
        for _ in range(passes):
            await asyncio.sleep(0)
        working.cancel()
        await asyncio.wait({working}, timeout=100)
        assert working.cancelled()
        joins = head.joins
        await asyncio.sleep(100)
        assert head.joins == joins
        await runner.close()

    drive()
