"""The slots of a runner, and one attempt's passage through them: waits, holds, deadlines, parking.

Time that an attempt waits is charged to no deadline: before a stage it stands outside of it, and inside of it whoever
lets it wait says so (``prorl_gym.deadlines``).
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Literal

from prorl_gym.agents.protocol import Policy
from prorl_gym.deadlines import Deadline
from prorl_gym.logs import bind
from prorl_gym.records import StageTime
from prorl_gym.rollout.parking import Berth, StoppingPolicy
from prorl_gym.rollout.policy_source import PolicySession
from prorl_gym.rollout.protocol import Job, Parked, Stage, StageEntered
from prorl_gym.rollout.stages import Company, Slot, StagePool

WorkStage = Literal["init", "run", "eval"]


class Pools:
    """The slots of one runner.

    Args:
        queue: how many may wait for INIT.
        init: slots of INIT.
        ready: how many may be prepared and wait for RUN, which bounds idle sandboxes.
        run: slots of RUN.
        evaluate: slots of EVAL.
        shares: weights of environments. See ``fair``.
    """

    def __init__(
        self,
        *,
        queue: int,
        init: int,
        ready: int,
        run: int,
        evaluate: int,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        self.hand = StagePool(queue + init + ready + run + evaluate, shares)
        self.ahead = StagePool(init + ready, shares)
        self.company = Company()
        self.stages: dict[WorkStage, StagePool] = {
            "init": StagePool(init, shares),
            "run": StagePool(run, shares),
            "eval": StagePool(evaluate, shares),
        }


class StageExpired(Exception):
    """A stage was over its own deadline (not one inside it)."""

    def __init__(self, stage: WorkStage, seconds: float) -> None:
        super().__init__(f"{stage.upper()} took longer than {seconds:g} s")
        self.stage: WorkStage = stage


async def _always() -> None:
    """There is room."""


class Passage:
    """What one attempt holds of the pools.

    Args:
        job: the attempt.
        pools: the runner's slots.
        hand: its place among the jobs in hand, which is given back here.
        tell: told about every stage that is entered, and when it is parked.
    """

    def __init__(self, job: Job, pools: Pools, hand: Slot, tell: Callable[[StageEntered | Parked], None]) -> None:
        self.stage: Stage = "queue"
        """The last one that was entered."""
        self.times: dict[WorkStage, StageTime] = {}
        self.berth: Berth | None = None
        """Where the agent can be parked; ``None`` while none is at work."""
        self.unwanted = False
        """It was cancelled: it enters no stage and makes no model call any more, even if the cancel was swallowed."""
        self._job = job
        self._pools = pools
        self._hand: Slot | None = hand
        self._slot: Slot | None = None
        """That of the stage it is in."""
        self._leave: Callable[[], None] | None = None
        """Ends its stay among the attempts that run payloads."""
        self._tell = tell

    def ahead(self) -> AbstractAsyncContextManager[Slot]:
        """Wait until one more may be prepared, and be counted among the prepared ones for the block."""
        request = self._job.request
        return self._pools.ahead.slot(request.environment, urgent=request.evaluation)

    @asynccontextmanager
    async def beside_others(self) -> AsyncGenerator[None, None]:
        """Wait until this attempt may run payloads, beside those of others or alone, and count as one for the block."""
        await self._enter_company()
        try:
            yield
        finally:
            self._leave_company()

    @asynccontextmanager
    async def through(
        self, stage: WorkStage, seconds: float, asked: float, room: Callable[[], Awaitable[None]] = _always
    ) -> AsyncGenerator[None, None]:
        """Wait for room and for a slot, then hold it for the block under the stage's deadline.

        Args:
            stage: which.
            seconds: its deadline.
            asked: when the wait for it began, on the monotonic clock.
            room: waits until it makes sense to take a slot.

        Raises:
            StageExpired: the block took longer than that.
        """
        await room()
        request = self._job.request
        self._slot = await self._pools.stages[stage].take(request.environment, urgent=request.evaluation)
        try:
            self._must_be_wanted()
            began = time.monotonic()
            self.stage = stage
            self._tell(
                StageEntered(rollout_id=request.rollout_id, attempt=self._job.attempt, stage=stage, at=time.time())
            )
            deadline = Deadline(seconds)
            try:
                with bind(stage=stage):
                    async with deadline:
                        yield
            except TimeoutError as error:
                if deadline.expired():
                    raise StageExpired(stage, seconds) from error
                raise
            finally:
                queued = began - asked + deadline.held
                self.times[stage] = StageTime(queued=queued, seconds=time.monotonic() - began - deadline.held)
        finally:
            self._give_slot_back()

    @contextmanager
    def parkable(self, session: PolicySession) -> Generator[Policy, None, None]:
        """Let the agent be parked during the block; give it a policy that stops when it is."""

        def leave() -> None:
            session.rest()
            self._give_slot_back()
            self._leave_company()
            self.give_hand_back()
            self._tell_parked(parked=True)

        async def come_back() -> None:
            # What is in hand is bounded for the sake of what waits; this one was in hand before.
            self._hand = self._pools.hand.take_over(request.environment)
            await self._enter_company()
            run = self._pools.stages["run"]
            self._slot = await run.take(request.environment, urgent=request.evaluation, returning=True)
            self._tell_parked(parked=False)

        async def before_call() -> None:
            self._must_be_wanted()
            await berth.pass_by()

        request = self._job.request
        berth = self.berth = Berth(leave, come_back)
        try:
            yield StoppingPolicy(session.policy, before_call)
        finally:
            self.berth = None

    def give_hand_back(self) -> None:
        """Give back its place among the jobs in hand. Idempotent."""
        hand, self._hand = self._hand, None
        if hand is not None:
            hand.give_back()

    def _must_be_wanted(self) -> None:
        if self.unwanted:
            raise asyncio.CancelledError

    async def _enter_company(self) -> None:
        self._leave = await self._pools.company.enter(alone=self._job.alone)

    def _leave_company(self) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def _give_slot_back(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.give_back()

    def _tell_parked(self, *, parked: bool) -> None:
        rollout_id, attempt = self._job.request.rollout_id, self._job.attempt
        self._tell(Parked(rollout_id=rollout_id, attempt=attempt, parked=parked, at=time.time()))
