"""Pools of slots: how many attempts a runner has in each stage at once, in which order, and what each attempt holds.

A pool counts slots on one event loop. A free slot goes to agents that were parked first, then to evaluation, then to
training; within the last two, environments get fair shares of the time for which they hold slots (``FairQueue``).
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Literal

from prorl_gym.agents.protocol import AssistantTurn, Policy, ToolSpec
from prorl_gym.deadlines import Deadline, paused_deadline
from prorl_gym.logs import log_context
from prorl_gym.records import Message, StageTime
from prorl_gym.rollout.protocol import AttemptPosition, Job, ParkingChanged, PolicySession, RunnerEvent, StageEntered
from prorl_gym.rollout.scheduling.fair_queue import Charge, FairQueue

WorkStage = Literal["init", "run", "eval"]
HeldSlot = Literal["job", "stage", "payload"]

Waiter = asyncio.Future[Charge]
"""Resolved with the charge of the slot that was granted."""


class Slot:
    """A slot of a pool, held by one attempt until its one ``release``; ``charge`` counts it for its environment."""

    def __init__(self, pool: "StagePool", charge: Charge) -> None:
        self._pool = pool
        self._charge = charge
        charge.resume()

    def release(self) -> None:
        """Return the slot; the next in the queue gets it. Raises ``RuntimeError`` the second time."""
        if self._charge.is_over:
            raise RuntimeError("a slot was returned twice")
        self._charge.end()
        self._pool.on_slot_released()


class StagePool:
    """The slots of one stage. For ``weights`` see ``FairQueue``."""

    def __init__(self, size: int, weights: Mapping[str, float] | None = None) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one slot, not {size}")
        self.size = size
        self.busy = 0
        """More than ``size`` while an agent that was parked goes on beyond it."""
        self._resuming: OrderedDict[Waiter, str] = OrderedDict()
        self._urgent_queue: FairQueue[Waiter] = FairQueue(weights)
        self._queue: FairQueue[Waiter] = FairQueue(weights)

    @property
    def free(self) -> int:
        return max(0, self.size - self.busy)

    @property
    def waiting(self) -> int:
        return len(self._resuming) + len(self._urgent_queue) + len(self._queue)

    @asynccontextmanager
    async def slot(self, environment: str = "", *, urgent: bool = False) -> AsyncGenerator[Slot, None]:
        slot = await self.acquire_slot(environment, urgent=urgent)
        try:
            yield slot
        finally:
            slot.release()

    async def acquire_slot(self, environment: str = "", *, urgent: bool = False, resuming: bool = False) -> Slot:
        """Wait for a slot, which counts towards the environment's share. A cancelled wait needs no ``release``.

        ``urgent`` ones (evaluation) are served before training, and ``resuming`` ones (parked agents) before both.
        """
        queue = self._urgent_queue if urgent else self._queue
        if self.free:  # then the queue is empty
            self.busy += 1
            return Slot(self, queue.charge_immediately(environment))
        waiter: Waiter = asyncio.get_running_loop().create_future()
        if resuming:
            self._resuming[waiter] = environment
        else:
            queue.push(environment, waiter)
        try:
            return Slot(self, await waiter)
        except asyncio.CancelledError:
            self._resuming.pop(waiter, None)
            queue.remove(environment, waiter)
            if waiter.done() and not waiter.cancelled():
                # The slot was granted as the wait was cancelled: nothing else returns it.
                waiter.result().cancel()
                self.on_slot_released()
            raise

    def force_acquire_slot(self, environment: str = "") -> Slot:
        """Take a slot at once, beyond the size if none is free: for an attempt that began before."""
        self.busy += 1
        return Slot(self, self._queue.charge_immediately(environment))

    def on_slot_released(self) -> None:
        """Count a slot as free again, and grant what is free. Only ``Slot`` calls this."""
        self.busy -= 1
        while self.free:
            if self._resuming:
                waiter, environment = self._resuming.popitem(last=False)
                charge = self._queue.charge_immediately(environment)
            elif self._urgent_queue:
                waiter, charge = self._urgent_queue.pop()
            elif self._queue:
                waiter, charge = self._queue.pop()
            else:
                return
            if waiter.done():  # cancelled, and its task has not run yet to leave the queue
                charge.cancel()
                continue
            self.busy += 1
            waiter.set_result(charge)


class SharedExclusiveLock:
    """A readers-writer lock: most attempts run payloads in parallel, single ones alone, which block later ones."""

    def __init__(self) -> None:
        self._shared_holders = 0
        self._exclusive = asyncio.Lock()
        self._no_shared_holders = asyncio.Event()
        self._no_shared_holders.set()

    async def acquire(self, *, exclusive: bool) -> Callable[[], None]:
        """Wait for the lock; return the function that releases it."""

        def release_shared() -> None:
            self._shared_holders -= 1
            if self._shared_holders == 0:
                self._no_shared_holders.set()

        await self._exclusive.acquire()
        try:
            if exclusive:
                await self._no_shared_holders.wait()
                return self._exclusive.release
        except BaseException:
            self._exclusive.release()
            raise
        self._exclusive.release()
        self._shared_holders += 1
        self._no_shared_holders.clear()
        return release_shared


class StagePools:
    """The slots of one runner. ``prepared`` bounds idle sandboxes that wait for RUN; ``weights``: ``FairQueue``."""

    def __init__(
        self, queue: int, prepared: int, stages: Mapping[WorkStage, int], weights: Mapping[str, float]
    ) -> None:
        self.jobs = StagePool(queue + prepared + sum(stages.values()), weights)
        self.prepared = StagePool(stages["init"] + prepared, weights)
        self.payload_lock = SharedExclusiveLock()
        self.stages = {stage: StagePool(size, weights) for stage, size in stages.items()}
        self.by_name = {"jobs": self.jobs, "prepared": self.prepared, **self.stages}


class StageTimeout(Exception):
    """A stage was over its own deadline (not one inside it)."""


class AttemptSlots:
    """The slots that one attempt holds, stage by stage; deadlines of stages, and parking.

    It holds a job slot for its life, a prepared slot from INIT until it enters RUN, the slot of the stage it is in, and
    the payload lock while programs may run in its sandboxes. A parked agent holds none of them, and acquires them again
    when it goes on. Waiting is charged to no deadline: a stage's deadline starts when the attempt has the slot, and
    ``paused_deadline`` (``prorl_gym.deadlines``) stops it for waits inside the stage.

    ``on_event`` is called for every stage that is entered, and when the agent is parked or goes on.
    """

    def __init__(self, job: Job, pools: StagePools, job_slot: Slot, on_event: Callable[[RunnerEvent], None]) -> None:
        self.position = AttemptPosition(job.attempt)
        self.stage_times: dict[WorkStage, StageTime] = {}
        self._may_call: asyncio.Event | None = None
        """Cleared to park the agent before its next model call; ``None`` while no agent is at work."""
        self.is_cancelled = False
        """It enters no further stage and makes no further model call, even if its code swallowed the cancel."""
        self._job = job
        self._pools = pools
        self._held: dict[HeldSlot, Callable[[], None]] = {"job": job_slot.release}
        """What it holds; each is released by a call."""
        self.on_event = on_event

    def hold_prepared_slot(self) -> AbstractAsyncContextManager[Slot]:
        """Wait for a slot among the attempts that are prepared for RUN; hold it for the block."""
        request = self._job.request
        return self._pools.prepared.slot(request.environment, urgent=request.evaluation)

    @asynccontextmanager
    async def hold_payload_lock(self) -> AsyncGenerator[None, None]:
        """Wait until this attempt may run payloads, together with others or alone; hold the lock for the block."""
        self._held["payload"] = await self._pools.payload_lock.acquire(exclusive=self._job.must_run_alone)
        try:
            yield
        finally:
            self.release("payload")

    @asynccontextmanager
    async def hold_stage(
        self,
        stage: WorkStage,
        seconds: float,
        wait_began: float,
        wait_for_room: Callable[[], Awaitable[None]] | None = None,
    ) -> AsyncGenerator[None, None]:
        """Wait for room and for a slot, then hold the slot for the block under the stage's deadline.

        The wait for the stage began at ``wait_began`` (monotonic); ``wait_for_room`` waits until it makes sense to take
        a slot. Raises ``StageTimeout``: the block took longer than ``seconds``.
        """
        if wait_for_room is not None:
            await wait_for_room()
        request = self._job.request
        slot = await self._pools.stages[stage].acquire_slot(request.environment, urgent=request.evaluation)
        self._held["stage"] = slot.release
        try:
            self._raise_if_cancelled()
            began = time.monotonic()
            self.position.enter_stage(stage, time.time())
            self.on_event(
                StageEntered(
                    rollout_id=request.rollout_id, attempt=self._job.attempt, stage=stage, at=self.position.since
                )
            )
            deadline = Deadline(seconds)
            try:
                with log_context(stage=stage):
                    async with deadline:
                        yield
            except TimeoutError as error:
                if deadline.expired():
                    raise StageTimeout(f"{stage.upper()} took longer than {seconds:g} s") from error
                raise
            finally:
                queued = began - wait_began + deadline.paused_seconds
                self.stage_times[stage] = StageTime(
                    queued=queued, seconds=time.monotonic() - began - deadline.paused_seconds
                )
        finally:
            self.release("stage")

    @contextmanager
    def parkable(self, session: PolicySession) -> Generator[Policy, None, None]:
        """Let the agent be parked during the block; yield its policy, which waits before a model call while parked."""

        async def before_call() -> None:
            self._raise_if_cancelled()
            while not may_call.is_set():
                try:
                    with paused_deadline():
                        session.release_engine_slot()
                        self.release("stage", "payload", "job")
                        self._report_parked(parked=True)
                        await may_call.wait()
                        # Job slots bound how many attempts begin; this one began before.
                        self._held["job"] = pools.jobs.force_acquire_slot(environment).release
                        self._held["payload"] = await pools.payload_lock.acquire(exclusive=self._job.must_run_alone)
                        slot = await pools.stages["run"].acquire_slot(environment, urgent=urgent, resuming=True)
                        self._held["stage"] = slot.release
                        self._report_parked(parked=False)
                finally:
                    self.position.is_parked = False

        pools, environment, urgent = self._pools, self._job.request.environment, self._job.request.evaluation
        may_call = self._may_call = asyncio.Event()
        may_call.set()
        try:
            yield PausablePolicy(session.policy, before_call)
        finally:
            self._may_call = None

    @property
    def is_park_requested(self) -> bool:
        """Whether the agent is parked, or will be before its next model call."""
        return self._may_call is not None and not self._may_call.is_set()

    def park(self) -> bool:
        """Park the agent before its next model call; return whether one is at work that was not to be parked yet."""
        if self._may_call is None or not self._may_call.is_set():
            return False
        self._may_call.clear()
        return True

    def unpark(self) -> None:
        """Idempotent."""
        if self._may_call is not None:
            self._may_call.set()

    def release(self, *names: HeldSlot) -> None:
        """Idempotent."""
        for name in names:
            if (release := self._held.pop(name, None)) is not None:
                release()

    def _raise_if_cancelled(self) -> None:
        if self.is_cancelled:
            raise asyncio.CancelledError

    def _report_parked(self, *, parked: bool) -> None:
        self.position.is_parked = parked
        rollout_id, attempt = self._job.request.rollout_id, self._job.attempt
        self.on_event(ParkingChanged(rollout_id=rollout_id, attempt=attempt, is_parked=parked, at=time.time()))


class PausablePolicy:
    """Implements ``Policy``: awaits ``before_call`` before every model call; it raises when there is to be none."""

    def __init__(self, policy: Policy, before_call: Callable[[], Awaitable[None]]) -> None:
        self._policy = policy
        self._before_call = before_call

    async def start_conversation(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> AssistantTurn:
        await self._before_call()
        return await self._policy.start_conversation(messages, tools)

    async def respond(self, messages: Sequence[Message]) -> AssistantTurn:
        await self._before_call()
        return await self._policy.respond(messages)
