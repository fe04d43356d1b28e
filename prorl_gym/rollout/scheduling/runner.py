"""The runner of this process: starts an attempt for each job and reports its events; prewarms sandboxes."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Protocol, runtime_checkable

from pydantic import Field

from prorl_gym.client.wire_models import Capacity
from prorl_gym.config import ConfigModel
from prorl_gym.environments.judge import Judge
from prorl_gym.errors import CancelReason, ConflictError, ShuttingDownError
from prorl_gym.logs import log_context
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.protocol import AgentPrograms, Finished, Job, PolicySource, RunnerEvent, StageEntered, group_key
from prorl_gym.rollout.scheduling.attempt import Attempt, EnvironmentLookup
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.rollout.scheduling.stage_pools import AttemptSlots, StagePools, WorkStage
from prorl_gym.sandbox.protocol import SandboxBackend, SandboxSpec
from prorl_gym.settings import RolloutSettings

_LOG = logging.getLogger(__name__)

Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]

_MAX_WORKLOADS = 512
"""Kinds of work that are remembered."""


class RunnerConfig(ConfigModel):
    """Slots of the three stages. RUN mostly waits for engines, INIT and EVAL mostly use the processor."""

    queue: int = Field(default=64, ge=1)
    """Jobs queued for INIT in the runner; all others wait in the ledger."""
    init: int = Field(default=8, ge=1)
    """Most rollouts in INIT."""
    ready: int | None = Field(default=None, ge=0)
    """Most rollouts that have finished INIT and wait for RUN, each with its sandbox. ``init`` by default."""
    run: int | None = Field(default=None, ge=1)
    """Most running agents, each with its sandbox. 64 by default; 256 where ``inference.admission`` follows the caches
    of ``vllm`` or ``sglang``, which then bound how many begin."""
    eval: int = Field(default=16, ge=1)
    """Most rollouts in EVAL."""
    parked: int | None = Field(default=None, ge=0)
    """Most parked agents, each with its sandbox; further ones run on. ``run`` by default."""
    shares: dict[str, Weight] = Field(default_factory=dict[str, Weight])
    """Weights of environments, 1 for those not named: while several have work queued, each gets worker-seconds in
    proportion to its weight."""
    cleanup_seconds: float = Field(default=30.0, gt=0)
    """How long a rollout waits for its engine call and its sandboxes to close before its record is written."""


class InProcessRunner:
    """Implements ``Runner`` on the running event loop.

    ``settings`` are the service's sampling and limits, ``run_settings`` those of single runs by id, which go before
    them. The ``backend`` stays open, its owner closes it. With ``has_kv_admission``, the slots of RUN bound only
    sandboxes, else the engines' load too.
    """

    def __init__(
        self,
        environments: EnvironmentLookup,
        policies: PolicySource,
        backend: SandboxBackend,
        config: RunnerConfig | None = None,
        settings: RolloutSettings | None = None,
        run_settings: Mapping[str, RolloutSettings] | None = None,
        *,
        judge: Judge | None = None,
        has_kv_admission: bool = False,
        programs: AgentPrograms | None = None,
    ) -> None:
        self._programs = programs
        self._environments = environments
        self._policies = policies
        self._backend = backend
        self._config = config or RunnerConfig()
        self._settings = settings or RolloutSettings()
        self._run_settings = run_settings or {}
        self._judge = judge
        run = self._config.run or (256 if has_kv_admission else 64)
        ready = self._config.init if self._config.ready is None else self._config.ready
        stages: dict[WorkStage, int] = {"init": self._config.init, "run": run, "eval": self._config.eval}
        self.pools = StagePools(self._config.queue, ready, stages, self._config.shares)
        self._max_parked = run if self._config.parked is None else self._config.parked
        self.prewarmer = Prewarmer(backend, self._config.init + ready)
        self.attempts: dict[str, Attempt] = {}
        self.supervisors: set[asyncio.Task[None]] = set()
        self._events: asyncio.Queue[RunnerEvent | None] = asyncio.Queue()
        self._draining = False
        self._events_ended = False

    def require_environment(self, environment: str) -> None:
        self._environments(environment)

    async def accept(self, job: Job) -> None:
        """See ``Runner.accept``. Raises ``ConflictError``: another attempt at this rollout is running."""
        self._require_accepting()
        request = job.request
        job_slot = await self.pools.jobs.acquire_slot(request.environment, urgent=request.evaluation)
        try:
            self._require_accepting()
            if request.rollout_id in self.attempts:
                raise ConflictError(f"rollout {request.rollout_id} is already running.")
        except BaseException:
            job_slot.release()
            raise
        with log_context(
            rollout_id=request.rollout_id, group_id=request.group_id, run_id=request.run_id, attempt=job.attempt
        ):
            slots = AttemptSlots(job, self.pools, job_slot, self._on_event)
            leases = SandboxLeases(self._backend, partial(self.prewarmer.record_spec, request), self._judge)
            attempt = Attempt(job, slots, leases, self._policies, self._programs)
            levels = self._run_settings.get(request.run_id, RolloutSettings()), self._settings
            attempt.start(self._environments, levels)
            self.attempts[request.rollout_id] = attempt
            self.prewarmer.add_waiting(request)
            self._events.put_nowait(
                StageEntered(rollout_id=request.rollout_id, attempt=job.attempt, stage="queue", at=time.time())
            )
            supervisor = asyncio.create_task(self._supervise(attempt))
        self.supervisors.add(supervisor)
        supervisor.add_done_callback(self.supervisors.discard)

    async def events(self) -> AsyncIterator[RunnerEvent]:
        while (event := await self._events.get()) is not None:
            yield event

    async def cancel(self, rollout_ids: Sequence[str], reason: CancelReason) -> None:
        for rollout_id in rollout_ids:
            if (attempt := self.attempts.get(rollout_id)) is not None:
                attempt.cancel(reason)

    async def park(self, rollout_ids: Sequence[str]) -> None:
        """See ``Runner.park``. While it drains it parks none, and never more than ``RunnerConfig.parked``."""
        free = 0 if self._draining else self._max_parked - self.count_park_requests()
        for slots in self._slots_of(rollout_ids):
            if free > 0:
                free -= slots.park()

    async def unpark(self, rollout_ids: Sequence[str]) -> None:
        for slots in self._slots_of(rollout_ids):
            slots.unpark()

    async def capacity(self) -> Capacity:
        busy = {stage: pool.busy for stage, pool in self.pools.stages.items()}
        parked = sum(slots.position.is_parked for slots in self._slots_of(self.attempts))
        return Capacity(
            queued=max(0, len(self.attempts) - sum(busy.values()) - parked),
            init=busy["init"],
            run=busy["run"],
            eval=busy["eval"],
            parked=parked,
            free=0 if self._draining else self.pools.jobs.free,
        )

    async def drain(self) -> None:
        self._draining = True
        await self.unpark(tuple(self.attempts))
        while self.supervisors:
            await asyncio.wait(tuple(self.supervisors))
        if not self._events_ended:
            self._events_ended = True
            self._events.put_nowait(None)

    async def close(self) -> None:
        self._draining = True
        await self.cancel(tuple(self.attempts), CancelReason.SHUTDOWN)
        await self.drain()

    def count_park_requests(self) -> int:
        return sum(slots.is_park_requested for slots in self._slots_of(self.attempts))

    def _require_accepting(self) -> None:
        if self._draining:
            raise ShuttingDownError("The runner is draining and takes no more work.", "Submit to another service.")

    def _slots_of(self, rollout_ids: Iterable[str]) -> list[AttemptSlots]:
        found = (self.attempts.get(rollout_id) for rollout_id in rollout_ids)
        return [attempt.slots for attempt in found if attempt is not None]

    async def _supervise(self, attempt: Attempt) -> None:
        """Wait for the attempt's record, free what it held, report its end. Nothing cancels this task."""
        try:
            rollout = await attempt.finalize(self._config.cleanup_seconds)
        finally:
            del self.attempts[attempt.job.request.rollout_id]
            if attempt.slots.position.stage == "queue":
                self.prewarmer.remove_waiting(attempt.job.request)
            attempt.slots.release("job")
        self._events.put_nowait(Finished(rollout=rollout))

    def _on_event(self, event: RunnerEvent) -> None:
        if isinstance(event, StageEntered) and event.stage == "init":
            attempt = self.attempts[event.rollout_id]
            if attempt.slots.position.stage_before == "queue":  # it may start over, from RUN
                self.prewarmer.remove_waiting(attempt.job.request)
        self._events.put_nowait(event)


@runtime_checkable
class PrewarmingBackend(Protocol):
    """A backend that can have sandboxes ready. ``prorl_gym.sandbox.service.warm_pool.WarmPool`` is one."""

    def prewarm(self, spec: SandboxSpec, count: int = 1) -> None:
        """Warm up so many, within its bounds; returns at once."""
        ...


@dataclass(slots=True)
class _Workload:
    waiting: int = 0
    spec: SandboxSpec | None = None


class Prewarmer:
    """Prewarms the sandboxes that attempts which wait for INIT will start, at most ``max_prewarmed`` of one kind.

    Replicas of a group have the same task and so the same image; rollouts outside of groups are expected to start the
    same sandbox as the last one of their environment. Without a ``backend.prewarm``, nothing is prewarmed.
    """

    def __init__(self, backend: object, max_prewarmed: int) -> None:
        self._pool = backend if isinstance(backend, PrewarmingBackend) else None
        self._max_prewarmed = max_prewarmed
        self.workloads: OrderedDict[str, _Workload] = OrderedDict()
        """Kinds of work; those that no attempt waits with are remembered for a while."""

    def add_waiting(self, request: RolloutRequest) -> None:
        """Count an attempt that waits for INIT from now on."""
        kind = self._workload_of(request)
        kind.waiting += 1
        self._prewarm(kind)

    def remove_waiting(self, request: RolloutRequest) -> None:
        """Uncount one: it began, or is over."""
        kind = self._workload_of(request)
        kind.waiting = max(0, kind.waiting - 1)

    def record_spec(self, request: RolloutRequest, spec: SandboxSpec) -> None:
        """It began with a sandbox of this spec."""
        kind = self._workload_of(request)
        kind.spec = spec
        self._prewarm(kind)

    def _workload_of(self, request: RolloutRequest) -> _Workload:
        key = f"{request.environment}/{group_key(request)}"
        kind = self.workloads.setdefault(key, _Workload())
        self.workloads.move_to_end(key)
        if len(self.workloads) > _MAX_WORKLOADS:
            self.workloads.popitem(last=False)
        return kind

    def _prewarm(self, kind: _Workload) -> None:
        if self._pool is not None and kind.spec is not None and kind.waiting:
            self._pool.prewarm(kind.spec, min(kind.waiting, self._max_prewarmed))
