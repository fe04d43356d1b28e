"""The runner of this process: takes jobs, walks each through its stages, tells what happened."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from pydantic import Field

from prorl_gym.config import ConfigModel
from prorl_gym.environments.judge import Judge
from prorl_gym.errors import CancelReason, ConflictError, ShuttingDownError
from prorl_gym.logs import bind
from prorl_gym.records import Outcome, Score
from prorl_gym.rollout.attempt import Environments, Walk
from prorl_gym.rollout.forecast import Forecast
from prorl_gym.rollout.leases import SandboxLeases
from prorl_gym.rollout.parking import Berth
from prorl_gym.rollout.passage import Passage, Pools
from prorl_gym.rollout.policy_source import PolicySource
from prorl_gym.rollout.protocol import Capacity, Finished, Job, Parked, StageEntered
from prorl_gym.rollout.stages import Slot
from prorl_gym.sandbox.protocol import SandboxBackend
from prorl_gym.settings import RolloutSettings

_LOG = logging.getLogger(__name__)

Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RunnerConfig(ConfigModel):
    """Slots of the three pools. RUN waits mostly for engines, INIT and EVAL mostly use the processor."""

    queue: int = Field(default=64, ge=1)
    """Jobs that wait for INIT inside the runner; all others wait in the ledger."""
    init: int = Field(default=8, ge=1)
    """Rollouts being prepared at once."""
    ready: int | None = Field(default=None, ge=0)
    """Rollouts that may be prepared ahead and wait for RUN, each with its sandbox. By default as many as ``init``."""
    run: int | None = Field(default=None, ge=1)
    """The most agents at work at once, each with its sandbox. By default 64; 256 where ``inference.admission`` follows
    the caches of ``vllm`` or ``sglang``: no more begin than these have room for."""
    eval: int = Field(default=16, ge=1)
    """Rollouts being graded at once."""
    parked: int | None = Field(default=None, ge=0)
    """The most agents that are parked at once, each with its sandbox; any further ones go on. By default as many as
    ``run``."""
    shares: dict[str, Weight] = Field(default_factory=dict[str, Weight])
    """Weights of environments, 1 for those not named: while several have work waiting, each gets worker-seconds in
    proportion to its weight."""
    cleanup_seconds: float = Field(default=30.0, gt=0)
    """How long a rollout waits for its engine call and its sandboxes to be gone before its record is written."""

    def slots(self, *, follows: bool) -> int:
        """Return the slots of RUN.

        Args:
            follows: how many agents begin follows what fits into the engines' caches. The slots then only bound what
                sandboxes may take of this machine; otherwise nothing else bounds what engines get.
        """
        return self.run or (256 if follows else 64)


@dataclass(slots=True)
class _InHand:
    walk: Walk
    work: asyncio.Task[tuple[Outcome, Score]]


class InProcessRunner:
    """Implements ``Runner`` on the running event loop.

    Args:
        environments: finds an environment by name.
        policies: makes the policy of each attempt.
        backend: starts sandboxes; stays open, its owner closes it.
        config: sizes of the pools.
        settings: the service's sampling and limits, weakest but for the built-in ones.
        run_settings: sampling and limits of single runs, by run id.
        judge: lent to the graders of every rollout.
        follows: see ``RunnerConfig.slots``.
    """

    def __init__(
        self,
        environments: Environments,
        policies: PolicySource,
        backend: SandboxBackend,
        config: RunnerConfig | None = None,
        settings: RolloutSettings | None = None,
        run_settings: Mapping[str, RolloutSettings] | None = None,
        *,
        judge: Judge | None = None,
        follows: bool = False,
    ) -> None:
        self._environments = environments
        self._policies = policies
        self._backend = backend
        self._config = config or RunnerConfig()
        self._settings = settings or RolloutSettings()
        self._run_settings = run_settings or {}
        self._judge = judge
        run = self._config.slots(follows=follows)
        ready = self._config.init if self._config.ready is None else self._config.ready
        self._pools = Pools(
            queue=self._config.queue,
            init=self._config.init,
            ready=ready,
            run=run,
            evaluate=self._config.eval,
            shares=self._config.shares,
        )
        self._berths = run if self._config.parked is None else self._config.parked
        self._forecast = Forecast(backend, self._config.init + ready)
        self._in_hand: dict[str, _InHand] = {}
        self._supervisors: set[asyncio.Task[None]] = set()
        self._events: asyncio.Queue[StageEntered | Parked | Finished | None] = asyncio.Queue()
        self._draining = False
        self._ended = False

    def must_offer(self, environment: str) -> None:
        """See ``Runner.must_offer``."""
        self._environments(environment)

    async def accept(self, job: Job) -> None:
        """See ``Runner.accept``.

        Raises:
            ShuttingDownError: it is draining.
            ConflictError: another attempt at this rollout is in hand.
        """
        self._must_accept()
        hand = await self._pools.hand.take(job.request.environment, urgent=job.request.evaluation)
        try:
            self._must_accept()
            if job.request.rollout_id in self._in_hand:
                raise ConflictError(f"rollout {job.request.rollout_id} is in hand already.")
        except BaseException:
            hand.give_back()
            raise
        self._start(job, hand)

    async def events(self) -> AsyncIterator[StageEntered | Parked | Finished]:
        """See ``Runner.events``."""
        while (event := await self._events.get()) is not None:
            yield event

    async def cancel(self, rollout_ids: Sequence[str], reason: CancelReason) -> None:
        """See ``Runner.cancel``."""
        for rollout_id in rollout_ids:
            held = self._in_hand.get(rollout_id)
            if held is not None and held.walk.cancelled is None and not held.work.done():
                held.walk.cancel(reason)
                held.work.cancel()

    async def park(self, rollout_ids: Sequence[str]) -> None:
        """See ``Runner.park``. While it drains nobody is parked, and never more than ``RunnerConfig.parked``."""
        free = 0 if self._draining else self._berths - sum(berth.asked for berth in self._berths_of(self._in_hand))
        for berth in self._berths_of(rollout_ids):
            if free > 0 and not berth.asked:
                berth.park()
                free -= 1

    async def unpark(self, rollout_ids: Sequence[str]) -> None:
        """See ``Runner.unpark``."""
        for berth in self._berths_of(rollout_ids):
            berth.unpark()

    async def capacity(self) -> Capacity:
        """See ``Runner.capacity``."""
        busy = {stage: pool.busy for stage, pool in self._pools.stages.items()}
        parked = sum(berth.parked for berth in self._berths_of(self._in_hand))
        return Capacity(
            queued=max(0, len(self._in_hand) - sum(busy.values()) - parked),
            init=busy["init"],
            run=busy["run"],
            eval=busy["eval"],
            parked=parked,
            free=0 if self._draining else self._pools.hand.free,
        )

    async def drain(self) -> None:
        """See ``Runner.drain``."""
        self._draining = True
        await self.unpark(tuple(self._in_hand))
        while self._supervisors:
            await asyncio.wait(tuple(self._supervisors))
        if not self._ended:
            self._ended = True
            self._events.put_nowait(None)

    async def close(self) -> None:
        """See ``Runner.close``."""
        self._draining = True
        await self.cancel(tuple(self._in_hand), CancelReason.SHUTDOWN)
        await self.drain()

    def _must_accept(self) -> None:
        if self._draining:
            raise ShuttingDownError("The runner is draining and takes no more work.", "Submit to another service.")

    def _berths_of(self, rollout_ids: Iterable[str]) -> list[Berth]:
        found = (self._in_hand.get(rollout_id) for rollout_id in rollout_ids)
        berths = (held.walk.passage.berth for held in found if held is not None)
        return [berth for berth in berths if berth is not None]

    def _start(self, job: Job, hand: Slot) -> None:
        request = job.request
        with bind(rollout_id=request.rollout_id, group_id=request.group_id, run_id=request.run_id, attempt=job.attempt):
            passage = Passage(job, self._pools, hand, self._tell)
            leases = SandboxLeases(self._backend, partial(self._forecast.asked, request), self._judge)
            walk = Walk(job, passage, leases, self._policies)
            work = asyncio.create_task(walk.go(self._environments, self._levels), name=f"rollout-{request.rollout_id}")
            self._in_hand[request.rollout_id] = _InHand(walk, work)
            self._forecast.waits(request)
            self._events.put_nowait(
                StageEntered(rollout_id=request.rollout_id, attempt=job.attempt, stage="queue", at=time.time())
            )
            supervisor = asyncio.create_task(self._supervise(walk, work))
        self._supervisors.add(supervisor)
        supervisor.add_done_callback(self._supervisors.discard)

    async def _supervise(self, walk: Walk, work: asyncio.Task[tuple[Outcome, Score]]) -> None:
        """Wait for the work, release what it held, tell the end. Nothing cancels this task, only ``work``."""
        try:
            await asyncio.wait({work})
            rollout = await walk.conclude(work, self._config.cleanup_seconds)
        finally:
            work.cancel()  # only when the loop itself is torn down; otherwise it is done
            del self._in_hand[walk.job.request.rollout_id]
            if walk.passage.stage == "queue":
                self._forecast.goes(walk.job.request)
            walk.passage.give_hand_back()
        self._events.put_nowait(Finished(rollout=rollout))

    def _tell(self, event: StageEntered | Parked) -> None:
        if isinstance(event, StageEntered) and event.stage == "init":
            self._forecast.goes(self._in_hand[event.rollout_id].walk.job.request)
        self._events.put_nowait(event)

    def _levels(self, job: Job) -> tuple[RolloutSettings, ...]:
        return self._run_settings.get(job.request.run_id, RolloutSettings()), self._settings
