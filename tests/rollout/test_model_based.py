"""Thousands of random operations on a real service over many lives: the answers keep every promise.

The seed chooses the operations; threads and timers choose how they meet, so that a failure names its seed and may need
several runs to come again.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from reliability_model import EVERYTHING, Model, Reader
from reliability_world import PARKED, WRITES, World

from prorl_gym.demand import Demand, RedundantHandling
from prorl_gym.errors import ConflictError, GoneError, ShuttingDownError
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.records import Outcome, Rollout, RolloutRequest, Score
from prorl_gym.rollout.ledger.ledger_config import LedgerError
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger

RUNS = ("a", "b", "c")
CROWD = 120
"""Nothing more is submitted while so many are pending."""
INFRASTRUCTURE = ("sandbox_lost", "sandbox_unavailable", "engine_timeout", "grader_failed", "crash", "hang")
BEGIN = SqliteLedger.begin_attempt.__name__
STORY = {
    "submit": 14,
    "submit_group": 14,
    "submit_and_leave": 4,
    "duplicate": 4,
    "conflict": 2,
    "cancel_ids": 6,
    "cancel_group": 3,
    "cancel_run": 1,
    "demand": 5,
    "want_nothing": 4,
    "no_demand": 1,
    "pause": 1,
    "resume": 4,
    "new_version": 3,
    "engine_dies": 3,
    "engines_return": 4,
    "sandboxes_fail": 2,
    "sandboxes_return": 4,
    "disk_full": 1,
    "disk_breaks": 1,
    "disk_breaks_before_an_attempt": 1,
    "disk_works": 4,
    "read": 8,
    "acknowledge": 3,
    "acknowledge_rollouts": 3,
    "collect": 1,
    "ask": 5,
    "look_at_verdicts": 6,
    "second_record": 3,
    "look": 4,
    "let_work": 20,
    "crash": 1,
    "restart": 1,
    "restart_on_a_broken_disk": 1,
}
"""How often what happens, in relation."""


@cache
def codec() -> ChatCodec:
    return load_codec("small")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """What fails here fails on purpose, thousands of times."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Story:
    """What happens to one ledger's file.

    Args:
        path: of the ledger.
        seed: of everything that is drawn.
    """

    def __init__(self, path: Path, seed: int) -> None:
        self.model = Model()
        self.dice = random.Random(seed)
        self._order = random.Random(seed)  # how often the dice are thrown depends on timing, the order does not
        self.done: Counter[str] = Counter()
        self._path = path
        self._count = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def tell(self, operations: int) -> None:
        """Let so many things happen, then everything come to its end, and look at all of it."""
        await self._begin()
        for number in range(operations):
            name = self._order.choices(tuple(STORY), tuple(STORY.values()))[0]
            operation: Callable[[], Awaitable[None]] = getattr(self, name)
            async with asyncio.timeout(60):
                try:
                    await operation()
                except LedgerError:
                    assert self.world.ledger.full or self.world.ledger.broken
            self.done[name] += 1
            assert self.model.complaints == [], name
            jobs = self.world.runner.pools.by_name["jobs"]
            assert jobs.busy <= jobs.size + PARKED  # an agent that was parked goes on beside those that are there
            for _ in range(self.dice.randrange(6)):
                await asyncio.sleep(0)
            if number % 500 == 499:
                await self.settle()
        await self.settle()
        await self.world.stop(drain=True)
        await self._until(lambda: not self._tasks)
        assert self.world.held() == {}
        assert asyncio.all_tasks() == {asyncio.current_task()}
        self.model.settled()

    async def _begin(self) -> None:
        self.world = await World.open(self._path, codec(), self.model)
        inner = self.world.ledger.inner
        doubtful = [request.rollout_id for batch in self.model.in_doubt for request in batch]
        known = {request.rollout_id for request in await inner.requests(doubtful)}
        pending = {job.request.rollout_id for job in await inner.pending_jobs()}
        self.model.survived(pending, known)  # before anything begins
        await self.world.begin()
        self._spawn(self._follow())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.model.complaints.append(repr(error))

    async def _follow(self) -> None:
        """The reader of everything, for this life."""
        async for delivery in self.world.service.stream(None, self.model.readers[EVERYTHING].cursor):
            self.model.delivered(EVERYTHING, delivery)

    async def settle(self) -> None:
        """Everything works and everything is wanted: then everything ends, and nothing is held any more."""
        self.world.repair()
        for run in RUNS:
            await self.world.service.set_demand(run, None)
        await self._until(lambda: not self.world.service.pending)
        await self._until(lambda: not self.world.held())
        assert await self.world.ledger.inner.pending_jobs() == []
        for run in RUNS:
            await self._read(run)
        await self._until(lambda: not set(self.model.written) - self.model.readers[EVERYTHING].seen)
        await self._until(lambda: len(self._tasks) == 1)  # only the stream's follower waits
        self.model.settled()

    async def _until(self, fact: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(30):
                while not fact() and not self.model.complaints:  # noqa: ASYNC110 - the condition raises no event
                    await asyncio.sleep(0.001)
        except TimeoutError:
            raise AssertionError(f"it does not come to rest: {self.world.held()}") from None
        assert self.model.complaints == []

    # --- rows -----------------------------------------------------------------------------------------------------

    def request(self, **fields: Any) -> RolloutRequest:
        self._count += 1
        dice = self.dice
        task: dict[str, Any] = {"id": f"r{self._count}", "reward": dice.choice([0.0, 0.0, 0.5, 1.0])}
        task["turns"] = dice.choice([1, 1, 2, 8])
        task["sandboxes"] = dice.random() < 0.5
        luck = dice.random()
        if luck < 0.2:
            task[dice.choice(["init", "run", "eval"])] = dice.choice(INFRASTRUCTURE)
            task["flaky"] = dice.choice([0, 1, 1, 2])
        elif luck < 0.26:
            task["run"] = dice.choice(["sandbox_limit", "limit:turns", "bad_row"])
        body: dict[str, Any] = {
            "rollout_id": f"r{self._count}",
            "run_id": dice.choice(RUNS),
            "environment": dice.choice(["one", "one", "two"]),
            "task": task,
            "evaluation": dice.random() < 0.1,
        }
        return RolloutRequest.model_validate(body | fields)

    def group(self) -> list[RolloutRequest]:
        self._count += 1
        size, run = self.dice.choice([2, 3, 4]), self.dice.choice(RUNS)
        shared = {"run_id": run, "group_id": f"g{self._count}", "group_size": size, "evaluation": False}
        return [self.request(**shared, replica=replica) for replica in range(size)]

    def known(self) -> RolloutRequest | None:
        names = [name for name, request in self.model.promised.items() if request.stands_in_for is None]
        return self.model.promised[self.dice.choice(names)] if names else None

    # --- operations -----------------------------------------------------------------------------------------------

    async def _submit(self, requests: list[RolloutRequest]) -> None:
        if self.world.service.pending < CROWD:
            self.model.in_doubt.append(requests)
            answers = await self.world.service.submit(requests)
            self.model.in_doubt.remove(requests)
            self.model.accepted(requests, answers)

    async def submit(self) -> None:
        await self._submit([self.request() for _ in range(self.dice.choice([1, 1, 3, 8]))])

    async def submit_group(self) -> None:
        members = self.group()
        cut = self.dice.choice([0, 0, 1])
        await self._submit(members[cut:])
        if cut:
            await self._submit(members[:cut])

    async def submit_and_leave(self) -> None:
        """The caller is gone before the answer, or the service is."""

        async def submit() -> None:
            try:
                await self._submit(self.group())
            except (LedgerError, ShuttingDownError):
                pass  # it stays in doubt until the next life

        self._spawn(submit())

    async def duplicate(self) -> None:
        if (request := self.known()) is not None:
            answers = await self.world.service.submit([request, self.dice.choice([request, self.known() or request])])
            assert all(answer.duplicate for answer in answers)

    async def conflict(self) -> None:
        if (request := self.known()) is not None:
            other, fresh = request.model_copy(update={"task": {"reward": 9.0}}), self.request()
            try:
                await self.world.service.submit([fresh, other])
                raise AssertionError("another body was taken")
            except ConflictError:
                assert await self.world.ledger.requests([fresh.rollout_id]) == []

    async def _cancel(self, **named: list[str]) -> None:
        over = set(self.model.records)
        stopped = await self.world.service.cancel(named.pop("ids", []), **named)  # type: ignore[arg-type]
        assert not over & set(stopped)
        self.model.cancelled.update(stopped)

    async def cancel_ids(self) -> None:
        pending = [name for name in self.model.promised if name not in self.model.written]
        few = self.dice.sample(pending, min(len(pending), 2))
        await self._cancel(ids=[*few, "stranger", *(one.rollout_id for one in [self.known()] if one)])

    async def cancel_group(self) -> None:
        request = self.known()
        if request is not None and request.group_id is not None:
            await self._cancel(groups=[request.group_id], runs=[request.run_id])

    async def cancel_run(self) -> None:
        await self._cancel(runs=[self.dice.choice(RUNS)])

    async def demand(self) -> None:
        dice = self.dice
        run = dice.choice(RUNS)
        await self.world.service.set_demand(
            run,
            Demand(
                groups=dice.choice([0, 0, 1, 9]),
                after=self.model.readers.get(run, Reader()).cursor if dice.random() < 0.5 else 0,
                spare=dice.randrange(2),
                max_staleness=dice.choice([None, None, 0, 2]),
                redundant=RedundantHandling(
                    init=dice.choice(["finish", "kill"]),
                    run=dice.choice(["finish", "park", "park", "park", "kill"]),
                    park_seconds=dice.choice([0.02, 5.0]),
                ),
                replace=dice.choice([0, 2]),
                extra=dice.choice([0, 1]),
                straggler_seconds=0.01,
                straggler_factor=1.5,
            ),
        )

    async def want_nothing(self) -> None:
        """While agents of groups are at work, which are parked."""
        running = [
            request
            for name in self.world.at_work
            if (request := self.model.promised.get(name)) and request.group_id is not None and not request.evaluation
        ]
        if running:
            run = self.dice.choice(running).run_id
            await self.world.service.set_demand(
                run, Demand(groups=0, redundant=RedundantHandling(park_seconds=self.dice.choice([0.1, 5.0])))
            )

    async def no_demand(self) -> None:
        await self.world.service.set_demand(self.dice.choice(RUNS), None)

    async def pause(self) -> None:
        self.world.service.hold_dispatch()

    async def resume(self) -> None:
        self.world.service.release_dispatch()

    async def new_version(self) -> None:
        version = self.world.pool.version + 1
        self.world.pool.set_version(version)
        await self.world.service.set_policy_version(version)

    async def engine_dies(self) -> None:
        self.world.kill_engine(self.dice.randrange(2))

    async def engines_return(self) -> None:
        for engine in self.world.engines:
            engine.down_error = None

    async def sandboxes_fail(self) -> None:
        self.world.backend.down = True

    async def sandboxes_return(self) -> None:
        self.world.backend.down = False

    async def disk_full(self) -> None:
        self.world.ledger.full = True

    async def disk_breaks(self) -> None:
        self.world.ledger.broken = True

    async def disk_breaks_before_an_attempt(self) -> None:
        """An accepted rollout waits for its first attempt, and the attempt for the disk."""
        await self.disk_works()
        if self.world.service.pending >= CROWD:
            return
        self.world.service.hold_dispatch()
        await self._submit([self.request()])
        await self.disk_breaks()
        self.model.refused_writes.discard(BEGIN)
        self.world.service.release_dispatch()
        await self._until(lambda: BEGIN in self.model.refused_writes)

    async def disk_works(self) -> None:
        self.world.ledger.full = self.world.ledger.broken = False

    async def _read(self, run: str) -> None:
        cursor = self.model.readers.get(run, Reader()).cursor
        async for delivery in self.world.service.stream(run, cursor, follow=False):
            self.model.delivered(run, delivery)

    async def read(self) -> None:
        await self._read(self.dice.choice(RUNS))

    async def acknowledge(self) -> None:
        run = self.dice.choice(RUNS)
        upto = min(self.model.readers.get(run, Reader()).cursor, self.model.readers[EVERYTHING].cursor)
        await self.world.service.ledger.acknowledge(run, upto)
        self.model.released[run] = max(upto, self.model.released.get(run, 0))

    async def acknowledge_rollouts(self) -> None:
        received = self.model.readers.get(self.dice.choice(RUNS), Reader()).seen & self.model.readers[EVERYTHING].seen
        few = self.dice.sample(sorted(received), min(len(received), 2))
        await self.world.service.ledger.acknowledge_rollouts([*few, "stranger"])
        self.model.released_ids.update(few)

    async def collect(self) -> None:
        await self.world.ledger.inner.collect_garbage()

    async def ask(self) -> None:
        if (request := self.known()) is None:
            return
        name = request.rollout_id
        before = self.model.rollouts.get(name)
        try:
            rollout = await self.world.service.result(name, wait=self.dice.choice([0.0, 0.0, 0.002]))
        except GoneError:
            assert request.run_id in self.model.released or name in self.model.released_ids
            return
        assert before is None or rollout == before

    async def look_at_verdicts(self) -> None:
        for run_id, scheduler in self.world.service.groups.schedulers.items():
            asked = [one for one in self.model.promised.values() if one.group_id is not None and one.run_id == run_id]
            for group_id in {str(one.group_id) for one in asked}:
                if (settled := scheduler.results.settled.get(group_id)) is not None:
                    self.model.judged(run_id, group_id, settled.state)

    async def second_record(self) -> None:
        """A finished rollout is finished again: the first record stays."""
        if self.model.rollouts:
            first: Rollout = self.dice.choice(tuple(self.model.rollouts.values()))
            forged = first.model_copy(update={"outcome": Outcome(status="completed"), "score": Score(reward=7.0)})
            assert await self.world.ledger.finish(forged) is None

    async def look(self) -> None:
        status = await self.world.service.status()
        assert status.queued + status.running == self.world.service.pending
        assert status.ready or self.world.ledger.broken or status.problem
        for run in RUNS:
            self.world.service.groups.status(run)

    async def let_work(self) -> None:
        await asyncio.sleep(self.dice.choice([0.0, 0.001, 0.004]))

    async def crash(self) -> None:
        await self.world.die()
        self._tasks.clear()
        await self._begin()

    async def restart(self) -> None:
        if self.dice.random() < 0.5:
            self.world.repair()
        await self._restart(drain=self.dice.random() < 0.5)

    async def restart_on_a_broken_disk(self) -> None:
        """What the stop cuts off counts as lost with the service: it cannot be withdrawn."""
        await self.disk_breaks()
        await self._restart(drain=False)

    async def _restart(self, *, drain: bool) -> None:
        await self.world.stop(drain=drain)
        await self._until(lambda: not self._tasks)  # every waiter got its answer
        assert set(self.world.held()) <= {"entries"}  # which the next life has to end
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await self._begin()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
async def test_thousands_of_random_operations_over_many_lives(tmp_path: Path, seed: int) -> None:
    story = Story(tmp_path / "ledger.db", seed)
    await story.tell(1500)
    assert set(story.done) == set(STORY), "everything happened"
    while story.model.refused_writes != WRITES:  # the broken disk has to fail every write
        await story.tell(100)


@pytest.mark.release
@pytest.mark.timeout(1500)
async def test_twenty_thousand_random_operations_over_hundreds_of_lives(tmp_path: Path) -> None:
    story = Story(tmp_path / "ledger.db", 77)
    await story.tell(20_000)
    assert story.done["crash"] > 100
