"""What one attempt holds of the runner's pools, stage by stage; deadlines of stages, and parking.

An attempt holds a job slot for its life, a prepared slot from INIT until it enters RUN, the slot of the stage it is in,
and the payload lock while programs may run in its sandboxes. A parked agent holds none of them, and takes them again
when it goes on. Waiting is charged to no deadline: a stage's deadline starts when the attempt has the slot, and
``paused_deadline`` (``prorl_gym.deadlines``) stops it for waits inside the stage.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from prorl_gym.agents.protocol import AssistantTurn, Policy, ToolSpec
from prorl_gym.deadlines import Deadline, paused_deadline
from prorl_gym.logs import log_context
from prorl_gym.records import Message, StageTime
from prorl_gym.rollout.protocol import AttemptPosition, Job, ParkingChanged, PolicySession, RunnerEvent, StageEntered
from prorl_gym.rollout.scheduling.stage_pools import Slot, StagePools, WorkStage


class StageTimeout(Exception):
    """A stage was over its own deadline (not one inside it)."""

    def __init__(self, stage: WorkStage, seconds: float) -> None:
        super().__init__(f"{stage.upper()} took longer than {seconds:g} s")
        self.stage: WorkStage = stage


async def _no_wait() -> None:
    """Wait for nothing."""


class AttemptSlots:
    """The slots of one attempt, and whether it is parked or cancelled.

    Args:
        job: the attempt.
        pools: the runner's slots.
        job_slot: of the attempt; released here.
        on_event: called for every stage that is entered, and when the agent is parked or goes on.
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
        self._job_slot: Slot | None = job_slot
        self._stage_slot: Slot | None = None
        """Of the stage that the attempt is in."""
        self._payload_release: Callable[[], None] | None = None
        """Releases the payload lock; ``None`` while it is not held."""
        self.on_event = on_event
        """Reports to the service."""

    def hold_prepared_slot(self) -> AbstractAsyncContextManager[Slot]:
        """Wait for a slot among the attempts that are prepared for RUN; hold it for the block."""
        request = self._job.request
        return self._pools.prepared.slot(request.environment, urgent=request.evaluation)

    @asynccontextmanager
    async def hold_payload_lock(self) -> AsyncGenerator[None, None]:
        """Wait until this attempt may run payloads, together with others or alone; hold the lock for the block."""
        await self._acquire_payload_lock()
        try:
            yield
        finally:
            self._release_payload_lock()

    @asynccontextmanager
    async def hold_stage(
        self,
        stage: WorkStage,
        seconds: float,
        wait_began: float,
        wait_for_room: Callable[[], Awaitable[None]] = _no_wait,
    ) -> AsyncGenerator[None, None]:
        """Wait for room and for a slot, then hold the slot for the block under the stage's deadline.

        Args:
            stage: to enter.
            seconds: the stage's deadline.
            wait_began: when the wait for the stage began, on the monotonic clock.
            wait_for_room: waits until it makes sense to take a slot.

        Raises:
            StageTimeout: the block took longer than ``seconds``.
        """
        await wait_for_room()
        request = self._job.request
        self._stage_slot = await self._pools.stages[stage].acquire_slot(request.environment, urgent=request.evaluation)
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
                    raise StageTimeout(stage, seconds) from error
                raise
            finally:
                queued = began - wait_began + deadline.paused_seconds
                self.stage_times[stage] = StageTime(
                    queued=queued, seconds=time.monotonic() - began - deadline.paused_seconds
                )
        finally:
            self._release_stage_slot()

    @contextmanager
    def parkable(self, session: PolicySession) -> Generator[Policy, None, None]:
        """Let the agent be parked during the block; yield its policy, which waits before a model call while parked."""

        async def before_call() -> None:
            self._raise_if_cancelled()
            while not may_call.is_set():
                try:
                    with paused_deadline():
                        self._release_for_parking(session)
                        await may_call.wait()
                        await self._reacquire_after_parking()
                finally:
                    self.position.is_parked = False

        may_call = self._may_call = asyncio.Event()
        may_call.set()
        try:
            yield PausablePolicy(session.policy, before_call)
        finally:
            self._may_call = None

    @property
    def is_parkable(self) -> bool:
        """Whether an agent is at work that is not to be parked yet."""
        return self._may_call is not None and self._may_call.is_set()

    @property
    def is_park_requested(self) -> bool:
        """Whether the agent is parked, or will be before its next model call."""
        return self._may_call is not None and not self._may_call.is_set()

    def park(self) -> None:
        """Park the agent before its next model call. Idempotent."""
        if self._may_call is not None:
            self._may_call.clear()

    def unpark(self) -> None:
        """Let the agent go on. Idempotent."""
        if self._may_call is not None:
            self._may_call.set()

    def release_job_slot(self) -> None:
        """Release the job slot. Idempotent."""
        slot, self._job_slot = self._job_slot, None
        if slot is not None:
            slot.release()

    def _release_for_parking(self, session: PolicySession) -> None:
        session.release_engine_slot()
        self._release_stage_slot()
        self._release_payload_lock()
        self.release_job_slot()
        self._report_parked(parked=True)

    async def _reacquire_after_parking(self) -> None:
        request = self._job.request
        # Job slots bound how many attempts begin; this one began before.
        self._job_slot = self._pools.jobs.force_acquire_slot(request.environment)
        await self._acquire_payload_lock()
        run = self._pools.stages["run"]
        self._stage_slot = await run.acquire_slot(request.environment, urgent=request.evaluation, resuming=True)
        self._report_parked(parked=False)

    def _raise_if_cancelled(self) -> None:
        if self.is_cancelled:
            raise asyncio.CancelledError

    async def _acquire_payload_lock(self) -> None:
        self._payload_release = await self._pools.payload_lock.acquire(exclusive=self._job.must_run_alone)

    def _release_payload_lock(self) -> None:
        release, self._payload_release = self._payload_release, None
        if release is not None:
            release()

    def _release_stage_slot(self) -> None:
        slot, self._stage_slot = self._stage_slot, None
        if slot is not None:
            slot.release()

    def _report_parked(self, *, parked: bool) -> None:
        self.position.is_parked = parked
        rollout_id, attempt = self._job.request.rollout_id, self._job.attempt
        self.on_event(ParkingChanged(rollout_id=rollout_id, attempt=attempt, is_parked=parked, at=time.time()))


class PausablePolicy:
    """Implements ``Policy``: waits before every model call until it may be made.

    Args:
        policy: makes the calls.
        before_call: waits until the next may be made; raises when there is to be none.
    """

    def __init__(self, policy: Policy, before_call: Callable[[], Awaitable[None]]) -> None:
        self._policy = policy
        self._before_call = before_call

    async def start_conversation(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> AssistantTurn:
        """See ``Policy.start_conversation``."""
        await self._before_call()
        return await self._policy.start_conversation(messages, tools)

    async def respond(self, messages: Sequence[Message]) -> AssistantTurn:
        """See ``Policy.respond``."""
        await self._before_call()
        return await self._policy.respond(messages)
