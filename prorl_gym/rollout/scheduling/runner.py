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
from prorl_gym.rollout.protocol import AgentPrograms, Finished, Job, PolicySource, RunnerEvent, StageEntered
from prorl_gym.rollout.scheduling.attempt import Attempt, EnvironmentLookup
from prorl_gym.rollout.scheduling.attempt_slots import AttemptSlots
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.rollout.scheduling.stage_pools import PoolUsage, Slot, StagePools
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

    def effective_run_slots(self, *, has_kv_admission: bool) -> int:
        """Return the slots of RUN.

        Args:
            has_kv_admission: whether admission follows the engines' caches. The slots then only bound the sandboxes on
                this machine; otherwise nothing else bounds the load of the engines.
        """
        return self.run or (256 if has_kv_admission else 64)


@dataclass(frozen=True, slots=True)
class RunnerSnapshot:
    """What a runner holds at one moment: more detail than ``Capacity``, for diagnosis."""

    pools: Mapping[str, PoolUsage]
    """Of ``jobs``, ``prepared`` and each stage."""
    attempts: int
    tasks: int
    """Tasks that wait for an attempt's end."""
    park_requests: int
    """Attempts that are parked, or will be before their next model call."""
    prewarm_waiting: Mapping[str, int]
    """How many attempts wait for INIT, by the kind of work that ``Prewarmer`` remembers."""


class InProcessRunner:
    """Implements ``Runner`` on the running event loop.

    Args:
        environments: finds an environment by name.
        policies: makes the policy of each attempt.
        backend: starts sandboxes; stays open, its owner closes it.
        config: sizes of the pools.
        settings: the service's sampling and limits; only the built-in ones are weaker.
        run_settings: sampling and limits of single runs, by run id.
        judge: engines for the graders.
        has_kv_admission: see ``RunnerConfig.effective_run_slots``.
        programs: agents that settings may name in place of the built-in loop.
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
        run = self._config.effective_run_slots(has_kv_admission=has_kv_admission)
        ready = self._config.init if self._config.ready is None else self._config.ready
        self._pools = StagePools(
            queue=self._config.queue,
            init=self._config.init,
            prepared=ready,
            run=run,
            evaluate=self._config.eval,
            weights=self._config.shares,
        )
        self._max_parked = run if self._config.parked is None else self._config.parked
        self._prewarmer = Prewarmer(backend, self._config.init + ready)
        self._attempts: dict[str, Attempt] = {}
        self._supervisors: set[asyncio.Task[None]] = set()
        self._events: asyncio.Queue[RunnerEvent | None] = asyncio.Queue()
        self._draining = False
        self._events_ended = False

    def require_environment(self, environment: str) -> None:
        """See ``Runner.require_environment``."""
        self._environments(environment)

    async def accept(self, job: Job) -> None:
        """See ``Runner.accept``.

        Raises:
            ShuttingDownError: it is draining.
            ConflictError: another attempt at this rollout is in hand.
        """
        self._require_accepting()
        hand = await self._pools.jobs.acquire_slot(job.request.environment, urgent=job.request.evaluation)
        try:
            self._require_accepting()
            if job.request.rollout_id in self._attempts:
                raise ConflictError(f"rollout {job.request.rollout_id} is in hand already.")
        except BaseException:
            hand.release()
            raise
        self._start_attempt(job, hand)

    async def events(self) -> AsyncIterator[RunnerEvent]:
        """See ``Runner.events``."""
        while (event := await self._events.get()) is not None:
            yield event

    async def cancel(self, rollout_ids: Sequence[str], reason: CancelReason) -> None:
        """See ``Runner.cancel``."""
        for rollout_id in rollout_ids:
            if (attempt := self._attempts.get(rollout_id)) is not None:
                attempt.cancel(reason)

    async def park(self, rollout_ids: Sequence[str]) -> None:
        """See ``Runner.park``. While it drains it parks none, and never more than ``RunnerConfig.parked``."""
        free = 0 if self._draining else self._max_parked - self._count_park_requests()
        for slots in self._slots_of(rollout_ids):
            if free > 0 and slots.is_parkable:
                slots.park()
                free -= 1

    async def unpark(self, rollout_ids: Sequence[str]) -> None:
        """See ``Runner.unpark``."""
        for slots in self._slots_of(rollout_ids):
            slots.unpark()

    async def capacity(self) -> Capacity:
        """See ``Runner.capacity``."""
        busy = {stage: pool.busy for stage, pool in self._pools.stages.items()}
        parked = sum(slots.position.is_parked for slots in self._slots_of(self._attempts))
        return Capacity(
            queued=max(0, len(self._attempts) - sum(busy.values()) - parked),
            init=busy["init"],
            run=busy["run"],
            eval=busy["eval"],
            parked=parked,
            free=0 if self._draining else self._pools.jobs.free,
        )

    def snapshot(self) -> RunnerSnapshot:
        """Return what it holds now."""
        return RunnerSnapshot(
            self._pools.usage(),
            len(self._attempts),
            len(self._supervisors),
            self._count_park_requests(),
            self._prewarmer.waiting_by_kind(),
        )

    async def drain(self) -> None:
        """See ``Runner.drain``."""
        self._draining = True
        await self.unpark(tuple(self._attempts))
        while self._supervisors:
            await asyncio.wait(tuple(self._supervisors))
        if not self._events_ended:
            self._events_ended = True
            self._events.put_nowait(None)

    async def close(self) -> None:
        """See ``Runner.close``."""
        self._draining = True
        await self.cancel(tuple(self._attempts), CancelReason.SHUTDOWN)
        await self.drain()

    def _count_park_requests(self) -> int:
        return sum(slots.is_park_requested for slots in self._slots_of(self._attempts))

    def _require_accepting(self) -> None:
        if self._draining:
            raise ShuttingDownError("The runner is draining and takes no more work.", "Submit to another service.")

    def _slots_of(self, rollout_ids: Iterable[str]) -> list[AttemptSlots]:
        found = (self._attempts.get(rollout_id) for rollout_id in rollout_ids)
        return [attempt.slots for attempt in found if attempt is not None]

    def _start_attempt(self, job: Job, job_slot: Slot) -> None:
        request = job.request
        with log_context(
            rollout_id=request.rollout_id, group_id=request.group_id, run_id=request.run_id, attempt=job.attempt
        ):
            slots = AttemptSlots(job, self._pools, job_slot, self._on_event)
            leases = SandboxLeases(self._backend, partial(self._prewarmer.record_spec, request), self._judge)
            attempt = Attempt(job, slots, leases, self._policies, self._programs)
            attempt.start(self._environments, self._settings_levels)
            self._attempts[request.rollout_id] = attempt
            self._prewarmer.add_waiting(request)
            self._events.put_nowait(
                StageEntered(rollout_id=request.rollout_id, attempt=job.attempt, stage="queue", at=time.time())
            )
            supervisor = asyncio.create_task(self._supervise(attempt))
        self._supervisors.add(supervisor)
        supervisor.add_done_callback(self._supervisors.discard)

    async def _supervise(self, attempt: Attempt) -> None:
        """Wait for the attempt's record, free what it held, report its end. Nothing cancels this task."""
        try:
            rollout = await attempt.finalize(self._config.cleanup_seconds)
        finally:
            del self._attempts[attempt.job.request.rollout_id]
            if attempt.slots.position.stage == "queue":
                self._prewarmer.remove_waiting(attempt.job.request)
            attempt.slots.release_job_slot()
        self._events.put_nowait(Finished(rollout=rollout))

    def _on_event(self, event: RunnerEvent) -> None:
        if isinstance(event, StageEntered) and event.stage == "init":
            attempt = self._attempts[event.rollout_id]
            if attempt.slots.position.stage_before == "queue":  # it may start over, from RUN
                self._prewarmer.remove_waiting(attempt.job.request)
        self._events.put_nowait(event)

    def _settings_levels(self, job: Job) -> tuple[RolloutSettings, ...]:
        return self._run_settings.get(job.request.run_id, RolloutSettings()), self._settings


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
    """Prewarms the sandboxes that attempts which wait for INIT will start.

    Replicas of a group have the same task and so the same image; rollouts outside of groups are expected to start the
    same sandbox as the last one of their environment.

    Args:
        backend: starts sandboxes; without ``prewarm``, nothing is prewarmed.
        max_prewarmed: the most sandboxes of one kind: as many as may begin INIT.
    """

    def __init__(self, backend: object, max_prewarmed: int) -> None:
        self._pool = backend if isinstance(backend, PrewarmingBackend) else None
        self._max_prewarmed = max_prewarmed
        self._workloads: OrderedDict[str, _Workload] = OrderedDict()

    def add_waiting(self, request: RolloutRequest) -> None:
        """This one waits for INIT from now on."""
        kind = self._workload_of(request)
        kind.waiting += 1
        self._prewarm(kind)

    def remove_waiting(self, request: RolloutRequest) -> None:
        """It waits no more: it began, or is over."""
        kind = self._workload_of(request)
        kind.waiting = max(0, kind.waiting - 1)

    def record_spec(self, request: RolloutRequest, spec: SandboxSpec) -> None:
        """It began with a sandbox of this spec."""
        kind = self._workload_of(request)
        kind.spec = spec
        self._prewarm(kind)

    def waiting_by_kind(self) -> dict[str, int]:
        """Return how many wait for INIT, by kind of work; kinds that none waits for are remembered for a while."""
        return {key: kind.waiting for key, kind in self._workloads.items()}

    def _workload_of(self, request: RolloutRequest) -> _Workload:
        group = f"{request.run_id}/{request.group_id}" if request.group_id else ""
        key = f"{request.environment}/{group}"
        kind = self._workloads.setdefault(key, _Workload())
        self._workloads.move_to_end(key)
        if len(self._workloads) > _MAX_WORKLOADS:
            self._workloads.popitem(last=False)
        return kind

    def _prewarm(self, kind: _Workload) -> None:
        if self._pool is not None and kind.spec is not None and kind.waiting:
            self._pool.prewarm(kind.spec, min(kind.waiting, self._max_prewarmed))
