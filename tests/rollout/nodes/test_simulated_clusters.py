"""Whole clusters on a virtual clock: what clients do and which faults occur is drawn from a seed.

A seed that fails is in the failing test's message and replays exactly: ``play(seed)``.
"""

import asyncio
import json
import logging
import random
import sqlite3
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from simulation.cluster import LEASE_SECONDS, Cluster, ClusterConfig
from simulation.planned_rollouts import Shape, draw_plan
from simulation.virtual_clock import SimulatedProcess, run_deterministically

from prorl_gym.client.wire_models import GroupsStatus
from prorl_gym.demand import Demand, RedundantHandling
from prorl_gym.errors import ShuttingDownError
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.ledger.ledger_config import LedgerError
from prorl_gym.rollout.protocol import Delivery
from prorl_gym.rollout.scheduling.runner import RunnerConfig
from prorl_gym.rollout.service import RolloutService

BATCH = 25


def check_seeds(seeds: range) -> None:
    results = [play(seed) for seed in seeds]
    failed = {result.seed: result.complaints[:3] for result in results if result.complaints}
    assert not failed, f"seeds with violations: {failed}"
    assert all(result.rollouts for result in results)


@pytest.mark.slow
def test_invariants_hold_under_faults() -> None:
    check_seeds(range(6))


@pytest.mark.slow
def test_a_seed_replays_exactly() -> None:
    first, second = play(11), play(11)
    assert first.faults
    assert first == second
    assert play(10).trace_hash != first.trace_hash


@pytest.mark.release
@pytest.mark.parametrize("first", range(0, 1000, BATCH))
def test_invariants_hold_for_many_seeds(first: int) -> None:
    check_seeds(range(first, first + BATCH))


ResultT = TypeVar("ResultT")

RUNS = ("a", "b")
_PATIENCE = 7 * 86400.0
"""Virtual seconds after which a story that has not come to its end never will."""


@dataclass(frozen=True, slots=True)
class StoryResult:
    """How a story ended."""

    seed: int
    rollouts: int
    trace_hash: str
    faults: dict[str, int]
    complaints: tuple[str, ...]
    """Violated promises; empty: all held."""


def play(seed: int) -> StoryResult:
    """Play the story of a seed; another play of it is the same story, with the same trace hash."""
    delays = random.Random(f"{seed}/threads")
    memory = Path("/dev/shm")  # a disk that syncs at once, where there is one
    logging.disable(logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:

            async def tell() -> StoryResult:
                return await _Story(seed, Path(folder) / "ledger.db").tell()

            return run_deterministically(tell, seed, lambda: 0.0005 * (1 + delays.random()))
    finally:
        logging.disable(logging.NOTSET)


async def _count_pending(service: RolloutService) -> int:
    await asyncio.sleep(10.0)  # a replacement of the last one may be on its way
    return service.pending


@dataclass(slots=True)
class _Client:
    """What clients know."""

    promised: dict[str, RolloutRequest] = field(default_factory=dict[str, RolloutRequest])
    """Accepted, by the service's answer."""
    cancelled: set[str] = field(default_factory=set[str])
    """Cancelled, by the service's answer."""
    records: dict[str, str] = field(default_factory=dict[str, str])
    """As they were delivered."""
    cursor: int = 0
    group_cursors: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    """Cursors of groups that were reported as ready."""
    verdicts: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    """Of groups that were judged informative or not."""


class _Story:
    def __init__(self, seed: int, ledger: Path) -> None:
        dice = self._dice = random.Random(f"{seed}/story")
        shape = Shape(turns=dice.choice([1.5, 3.0, 5.0]), failure_chance=dice.choice([0.0, 0.1, 0.2]))
        run = dice.choice([2, 4, 16])
        config = ClusterConfig(
            nodes=dice.choice([1, 2, 3, 5]),
            engines=dice.choice([1, 2, 4]),
            runner=RunnerConfig(queue=dice.choice([1, 8]), init=dice.choice([1, 4]), run=run, eval=dice.choice([1, 4])),
            kv_tokens=dice.choice([30_000, 200_000]),
            shape=shape,
        )
        self._seed, self._ledger = seed, ledger
        self._cluster = Cluster(config, ledger, seed)
        self._client = _Client()
        self._user = SimulatedProcess("user")
        self._total = min(500, max(2, round(30 * dice.lognormvariate(0.0, 1.0))))
        self._faults: dict[str, int] = {}
        self._is_over = False
        """Nothing more befalls the cluster, and what was accepted has to end."""
        self._is_quiet = False
        """Clients want nothing more."""

    async def tell(self) -> StoryResult:
        cluster = self._cluster
        await cluster.start_head()
        trouble, launcher = asyncio.create_task(self._befall()), asyncio.create_task(self._launch())
        users = [self._user.spawn(work) for work in (self._submit(), self._meddle(), self._read())]
        try:
            async with asyncio.timeout(_PATIENCE):
                await users[0]
                await trouble
                self._is_over = True
                await users[1]
                self._is_quiet = True
                await users[2]
            await cluster.stop_head()
            launcher.cancel()
        except TimeoutError:
            cluster.complaints.append(f"{self._missing()} have no record after {_PATIENCE:.0f} s")
        else:
            self._check_end()
        return StoryResult(
            self._seed,
            len(self._client.promised),
            cluster.trace_hash,
            self._faults,
            tuple(cluster.complaints),
        )

    # --- clients ----------------------------------------------------------------------------------------------------

    async def _ask(self, call: Callable[[RolloutService], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """Send a request until it is answered."""
        while True:
            try:
                if (life := self._cluster.life) is not None:
                    return await self._cluster.network.request(self._user, life.process, partial(call, life.service))
            except (ConnectionError, LedgerError, ShuttingDownError):
                pass
            await asyncio.sleep(self._dice.uniform(0.5, 5.0))

    async def _submit(self) -> None:
        dice, count = self._dice, 0
        while count < self._total:
            size = min(dice.choice([1, 2, 4, 8]), self._total - count)
            group, run = (f"g{count}" if size > 1 else None), dice.choice(RUNS)
            evaluation = group is None and dice.random() < 0.3
            batch = [
                RolloutRequest(
                    rollout_id=f"r{count + n}",
                    run_id=run,
                    group_id=group,
                    group_size=size,
                    replica=n,
                    environment="planned",
                    task={"seed": dice.randrange(2**40)},
                    evaluation=evaluation,
                )
                for n in range(size)
            ]
            count += size
            await self._ask(lambda service, batch=batch: service.submit(batch))
            self._client.promised.update({one.rollout_id: one for one in batch})
            if dice.random() < 0.3:
                await asyncio.sleep(dice.expovariate(1 / 20.0))

    async def _meddle(self) -> None:
        """Set demands, cancel, and raise the policy's version; in the end want everything."""
        dice, version = self._dice, 0
        while not self._is_over:
            await asyncio.sleep(dice.expovariate(1 / 60.0))
            act = dice.choice(["demand", "demand", "no demand", "cancel", "version", "groups", "verdict"])
            if act == "demand":
                await self._ask(lambda service: service.set_demand(dice.choice(RUNS), self._demand()))
            elif act == "no demand":
                await self._ask(lambda service: service.set_demand(dice.choice(RUNS), None))
            elif act == "cancel" and self._client.promised:
                await self._cancel([dice.choice(tuple(self._client.promised))])
            elif act == "version":
                version += 1
                await self._ask(lambda service, version=version: self._raise_version(service, version))
            elif act == "groups":
                await self._look_at_groups(dice.choice(RUNS))
            elif act == "verdict":
                await self._look_at_verdicts(dice.choice(RUNS))
        for run in RUNS:
            await self._ask(lambda service, run=run: service.set_demand(run, None))

    async def _look_at_groups(self, run: str) -> None:
        async def read(service: RolloutService) -> GroupsStatus:
            return service.groups.status(run)

        for group in (await self._ask(read)).ready_groups:
            cursor = self._client.group_cursors.setdefault((run, group.group_id), group.cursor)
            if cursor != group.cursor:
                self._cluster.complaints.append(f"group {group.group_id}: ready at {cursor}, later at {group.cursor}")

    async def _look_at_verdicts(self, run: str) -> None:
        async def read(service: RolloutService) -> dict[str, str]:
            scheduler = service.groups.schedulers.get(run)
            groups = {str(member.group_id) for member in self._client.promised.values() if member.run_id == run}
            found = {} if scheduler is None else {group: scheduler.results.settled.get(group) for group in groups}
            return {group: settled.state for group, settled in found.items() if settled is not None}

        for group, verdict in (await self._ask(read)).items():
            if verdict in ("ready", "uninformative"):
                known = self._client.verdicts.setdefault((run, group), verdict)
                if known != verdict:
                    self._cluster.complaints.append(f"group {group}: {known}, and later {verdict}")

    async def _raise_version(self, service: RolloutService, version: int) -> None:
        """As an update of the weights does: stop the calls in flight, count one version up, go on."""
        life = self._cluster.life
        assert life is not None
        life.pool.gate.close()
        try:
            for flight in life.pool.gate.calls:
                flight.is_cut_short = True
                await life.pool.cancel(flight.request_id)
            life.pool.set_version(version)
            await service.set_policy_version(version)
        finally:
            life.pool.gate.open()

    def _demand(self) -> Demand:
        dice = self._dice
        return Demand(
            groups=dice.choice([0, 1, 3, 9]),
            after=self._client.cursor if dice.random() < 0.5 else 0,
            max_staleness=dice.choice([None, None, 0, 2]),
            redundant=RedundantHandling(
                init=dice.choice(["finish", "kill"]),
                run=dice.choice(["finish", "park", "park", "kill"]),
                park_seconds=dice.choice([5.0, 600.0]),
            ),
            extra=dice.choice([0, 1]),
        )

    async def _cancel(self, ids: list[str]) -> None:
        over = set(self._client.records)
        stopped = await self._ask(lambda service: service.cancel(ids))
        if over & set(stopped):
            self._cluster.complaints.append(f"{over & set(stopped)}: cancelled after the record was delivered")
        self._client.cancelled.update(stopped)

    async def _read(self) -> None:
        """Follow the stream of records until every rollout has one, also those that the service added."""
        while not self._is_quiet or self._missing() or await self._ask(_count_pending):
            page = await self._ask(lambda service: service.read_page(None, self._client.cursor, 10.0))
            for delivery in page:
                self._take(delivery)
            if page and self._dice.random() < 0.1:
                await self._ask(lambda service: service.ledger.acknowledge(None, self._client.cursor))

    def _take(self, delivery: Delivery) -> None:
        complain = self._cluster.complaints.append
        record = json.loads(delivery.record)
        name = record["rollout_id"]
        if delivery.cursor <= self._client.cursor:
            complain(f"cursor {delivery.cursor} after {self._client.cursor}")
        if name in self._client.records:
            complain(f"{name}: delivered twice")
        self._client.cursor = delivery.cursor
        self._client.records[name] = delivery.record
        outcome, tried = record["outcome"], [retry["attempt"] for retry in record["retries"]]
        if tried != sorted(set(tried)) or any(record["attempt"] <= one for one in tried):
            complain(f"{name}: attempts {tried}, then {record['attempt']}")
        failures = [(retry["kind"], retry["message"]) for retry in record["retries"]]
        for kind, message in [*failures, (outcome["kind"], outcome["message"])]:
            if kind == "internal":
                complain(f"{name}: {message}")
        request = self._client.promised.get(record["stands_in_for"] or name)
        if request is not None and record["score"] is not None:  # otherwise its answer is still on its way
            plan = draw_plan(self._cluster.config.shape, request.task["seed"])
            if plan.ending == "hopeless" or record["score"]["reward"] != plan.reward:
                complain(f"{name}: reward {record['score']['reward']}; by its plan {plan.ending}, {plan.reward}")
        if name in self._client.cancelled and outcome["status"] != "cancelled":
            complain(f"{name}: {outcome['status']} after its cancel was answered")

    def _missing(self) -> list[str]:
        return [name for name in self._client.promised if name not in self._client.records]

    def _check_end(self) -> None:
        complain, client = self._cluster.complaints.append, self._client
        kept = check_file(self._ledger, complain)
        if lost := [name for name in client.promised if name not in kept]:
            complain(f"accepted and not in the file: {lost[:5]}")
        for name, text in client.records.items():
            record = json.loads(text)
            reward = None if record["score"] is None else record["score"]["reward"]
            if kept.get(name) != (record["outcome"]["status"], reward):
                complain(f"{name}: delivered as {record['outcome']['status']}, {reward}, and kept as {kept.get(name)}")
        rewards: dict[tuple[str, str], set[float]] = {}
        for text in client.records.values():
            if (record := json.loads(text))["group_id"] is not None and record["score"] is not None:
                rewards.setdefault((record["run_id"], record["group_id"]), set()).add(record["score"]["reward"])
        for group, verdict in client.verdicts.items():
            if (len(rewards.get(group, ())) > 1) != (verdict == "ready"):
                complain(f"group {group}: {verdict} by rewards {rewards.get(group)}")

    # --- faults -----------------------------------------------------------------------------------------------------

    async def _befall(self) -> None:
        """Let things fail, for a while."""
        dice = self._dice
        faults = (
            *(self._node_dies, self._node_stops, self._node_drains, self._is_cut_off, self._messages_are_lost),
            *(self._engine_dies, self._disk_breaks, self._head_dies),
        )
        pause, open_faults = dice.choice([20.0, 60.0, 200.0]), dict[str, asyncio.Task[None]]()
        for _ in range(dice.choice([0, 2, 5, 10])):
            await asyncio.sleep(dice.expovariate(1 / pause))
            fault: Callable[[], Coroutine[Any, Any, None]] = dice.choice(faults)
            name = fault.__name__.strip("_")
            self._faults[name] = self._faults.get(name, 0) + 1
            if name in open_faults and not open_faults[name].done():
                await open_faults[name]
            open_faults[name] = asyncio.create_task(fault())
            if dice.random() < 0.7:  # otherwise the next one joins it
                await open_faults[name]
        await asyncio.gather(*open_faults.values())

    async def _node_dies(self) -> None:
        if names := list(self._cluster.nodes):
            name = self._dice.choice(names)
            self._cluster.kill_node(name)
            await self._replace_node(name)

    async def _node_stops(self) -> None:
        """It does nothing for a while, perhaps for longer than its lease."""
        if names := list(self._cluster.nodes):
            name = self._dice.choice(names)
            process = self._cluster.nodes[name].process
            self._cluster.trace("node paused", name)
            process.pause()
            await asyncio.sleep(self._dice.uniform(0.0, 2 * LEASE_SECONDS))
            process.resume()

    async def _node_drains(self) -> None:
        if names := list(self._cluster.nodes):
            name = self._dice.choice(names)
            node = self._cluster.nodes[name]
            self._cluster.trace("node drains", name)
            node.process.call(node.node.drain)

    async def _is_cut_off(self) -> None:
        """Nothing reaches a node or the head, and it reaches nothing."""
        name = self._dice.choice([*self._cluster.nodes, "head"])
        if name == "head" and self._cluster.life is not None:
            name = self._cluster.life.process.name
        self._cluster.trace("cut off", name)
        self._cluster.network.cut.add(name)
        await asyncio.sleep(self._dice.uniform(0.0, 2 * LEASE_SECONDS))
        self._cluster.network.cut.discard(name)

    async def _messages_are_lost(self) -> None:
        network = self._cluster.network
        network.loss, network.repeats = self._dice.choice([0.01, 0.1, 0.4]), self._dice.choice([0.0, 0.2])
        await asyncio.sleep(self._dice.uniform(1.0, 60.0))
        network.loss = network.repeats = 0.0

    async def _replace_node(self, name: str) -> None:
        """A launcher starts it again, under its name, perhaps before the head knows of its end."""
        await asyncio.sleep(self._dice.uniform(0.0, 40.0))
        if name not in self._cluster.nodes:
            self._cluster.start_node(name)

    async def _launch(self) -> None:
        """Start nodes again that have ended."""
        while True:
            await asyncio.sleep(20.0)
            for number in range(self._cluster.config.nodes):
                if f"node-{number}" not in self._cluster.nodes:
                    self._cluster.start_node(f"node-{number}")

    async def _engine_dies(self) -> None:
        engine = self._dice.choice(tuple(self._cluster.engines.values()))
        self._cluster.trace("engine dies", engine.name)
        engine.fail()
        await asyncio.sleep(self._dice.uniform(1.0, 100.0))
        engine.restart()

    async def _disk_breaks(self) -> None:
        self._cluster.break_ledger(broken=True)
        await asyncio.sleep(self._dice.uniform(0.1, 20.0))
        self._cluster.break_ledger(broken=False)

    async def _head_dies(self) -> None:
        self._cluster.kill_head()
        await asyncio.sleep(self._dice.uniform(0.0, 60.0))
        await self._cluster.start_head()


def check_file(path: Path, complain: Callable[[str], object]) -> dict[str, tuple[str, float | None]]:
    """Read the closed file as another program would; return status and reward of each finished rollout."""
    connection = sqlite3.connect(path)
    try:
        for (name,) in connection.execute("SELECT rollout_id FROM rollouts WHERE cursor IS NULL"):
            complain(f"{name}: accepted and without a record")
        ((ends, rollouts),) = connection.execute(
            "SELECT (SELECT count(*) FROM outcomes), (SELECT count(*) FROM rollouts)"
        )
        if ends != rollouts:
            complain(f"{rollouts} rollouts and {ends} outcomes")
        query = "SELECT rollout_id, status, reward FROM rollouts JOIN outcomes USING (cursor)"
        return {name: (status, reward) for name, status, reward in connection.execute(query)}
    finally:
        connection.close()
