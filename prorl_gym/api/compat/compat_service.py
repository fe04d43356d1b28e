"""What the published routes do, without HTTP.

``/start`` and ``/stop`` bracket a training step in trainers written for the published server. There they start and kill
processes; here ``/stop`` cancels the calls of this port and refuses more, and the service goes on.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from prorl_gym.api.compat.config import CompatConfig
from prorl_gym.api.compat.process_result import to_process_result
from prorl_gym.api.compat.requests import IgnoredKeyWarnings, ProcessRequest, parse_request
from prorl_gym.api.http.error_responses import ApiError
from prorl_gym.api.policy_control import EngineRegistry
from prorl_gym.errors import CancelReason, ConflictError, NotFoundError, ProrlError, ShuttingDownError
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.scheduling.attempt import EnvironmentLookup
from prorl_gym.rollout.service import RolloutService

_LOG = logging.getLogger(__name__)

_NO_TIMEOUT_SECONDS = 1e9
"""Seconds: the wait for a record ends with the record, or with the service."""


class CompatService:
    """The published server, as its clients see it. ``cancel_leftover_jobs`` before use.

    Args:
        service: does the work.
        config: of the routes.
        environments: finds an environment by name.
        pool: of the policy.
        registry: the same pool's engines, by address.
        max_pending: rollouts without a record; beyond it calls are refused for a while (429).
        max_ended: ids of ended jobs that are remembered: other ids are unknown.
    """

    def __init__(
        self,
        service: RolloutService,
        config: CompatConfig,
        environments: EnvironmentLookup,
        pool: EnginePool,
        registry: EngineRegistry,
        *,
        max_pending: int = 100_000,
        max_ended: int = 4096,
    ) -> None:
        self.config = config
        self._service = service
        self._environments = environments
        self._pool = pool
        self._registry = registry
        self._max_pending = max_pending
        self._jobs = ProcessJobs(service, config.run_id, max_ended, keep_records=config.keep_records)
        self._ignored_keys = IgnoredKeyWarnings()
        self._is_accepting = True

    async def cancel_leftover_jobs(self) -> None:
        """Cancel what an earlier process left in the run."""
        await self._jobs.cancel_leftovers()

    async def process(self, body: ProcessRequest) -> dict[str, Any]:
        """Make a rollout and return its result, however it ended. A call that is cancelled cancels it.

        Raises:
            ApiError: 503, the port is stopped or no engine was added; 429, too much is pending; see ``parse_request``.
            ConflictError: the job is under way with another body.
        """
        if not self._is_accepting:
            raise ApiError(503, "The server is not running: it was stopped.", "POST /start first.")
        if not set(self._pool.engines) - set(self._registry.draining):
            raise ApiError(503, "There is no LLM server: all were cleared.", "POST /add_llm_server first.")
        parsed = parse_request(body, self.config, self._environments)
        self._ignored_keys.warn_new(body.sampling_params)
        if self._service.pending >= self._max_pending:
            raise ApiError(429, f"{self._service.pending} rollouts are pending already.", "Send it again later.", 5)
        rollout = await self._jobs.run_job(body.job_id, parsed.request)
        return to_process_result(
            rollout,
            instance_id=parsed.instance_id,
            trajectory_id=parsed.trajectory_id,
            include_tokens=parsed.include_tokens,
            include_input_ids=self.config.input_ids,
        )

    async def cancel(self, job_id: str) -> dict[str, Any]:
        """Cancel a call of ``process``, which then returns a cancelled result.

        Raises:
            NotFoundError: there is no such job.
        """
        live = await self._jobs.cancel(job_id)
        return {"status": "cancelled" if live else "ended already"}

    async def start_accepting(self) -> dict[str, Any]:
        """Accept calls. Harmless when it does already."""
        status, self._is_accepting = "already running" if self._is_accepting else "started", True
        return {"status": status}

    async def stop_accepting(self) -> dict[str, Any]:
        """Accept no more calls and cancel the running ones; when this returns, each has its record."""
        status, self._is_accepting = "stopped" if self._is_accepting else "already stopped", False
        return {"status": status, "cancelled": await self._jobs.cancel_all()}

    def add_llm_server(self, address: str) -> dict[str, Any]:
        """Let an engine serve.

        Raises:
            ApiError: see ``EngineRegistry.register``.
        """
        name = self._registry.register(address if "://" in address else f"http://{address}")
        return {"status": "added", "engine": name}

    def clear_llm_servers(self) -> dict[str, Any]:
        """Let no engine serve: each finishes its calls and leaves."""
        before = len(set(self._pool.engines) - set(self._registry.draining))
        self._registry.set_engines(())
        return {"status": "cleared", "cleared": before}

    async def status(self) -> dict[str, Any]:
        """Return both published forms in one.

        Jobs are those of this port, stages those of the whole service. It has one queue for all stages: what waits is
        counted in ``init_queue``.
        """
        status = await self._service.status()
        capacity = status.capacity
        waiting = status.queued + capacity.queued
        stages = {"init": capacity.init, "run": capacity.run, "eval": capacity.eval}
        return {
            "status": "running" if self._is_accepting else "stopped",
            "running": self._is_accepting,
            "pending_jobs": len(self._jobs),
            "jobs": len(self._jobs),
            **stages,
            "init_queue": waiting,
            "run_queue": 0,
            "eval_queue": 0,
            **{f"active_{stage}": count for stage, count in stages.items()},
            "total": waiting + sum(stages.values()),
            "ready": status.ready,
            "llm_servers": len(set(self._pool.engines) - set(self._registry.draining)),
        }


@dataclass(slots=True, eq=False)
class _Job:
    request: RolloutRequest
    task: "asyncio.Task[Rollout | ProrlError]" = field(init=False)
    callers: int = 0
    cancel_reason: CancelReason | None = None
    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it can be cancelled, or need not be."""


class ProcessJobs:
    """The calls of ``/process`` that have no answer yet, by job id. ``cancel_leftovers`` before use.

    A job id belongs to a call, not to a rollout: it is free again once the call has its answer, so that a trainer may
    use it for another one. Each call gets a rollout with an id of its own.

    Args:
        service: makes the rollouts.
        run_id: run that they belong to; nothing else belongs to it.
        max_ended: ids of ended jobs that are remembered: other ids are unknown.
        keep_records: do not acknowledge records once they are answered with.
    """

    def __init__(self, service: RolloutService, run_id: str, max_ended: int, *, keep_records: bool = False) -> None:
        self._max_ended = max_ended
        self._service = service
        self._run_id = run_id
        self._keep_records = keep_records
        self._live: dict[str, _Job] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._live)

    async def cancel_leftovers(self) -> None:
        """Cancel what an earlier process left in the run: its callers are gone."""
        left = await self._service.cancel(runs=[self._run_id], reason=CancelReason.DISCONNECTED)
        if left:
            _LOG.info("cancelled %d rollouts of run %s whose callers are gone", len(left), self._run_id)

    async def run_job(self, job_id: str | None, request: RolloutRequest) -> Rollout:
        """Make a rollout, or join the call that makes it. When the last caller is cancelled, so is the rollout.

        Args:
            job_id: of the call; a fresh one by default.
            request: rollout to run; its id, which is arbitrary, is not compared.

        Raises:
            ConflictError: this job is under way with another body.
            ProrlError: see ``RolloutService.submit`` and ``RolloutService.result``.
        """
        job_id = job_id or uuid4().hex
        job = self._live.get(job_id)
        if job is None:
            # Registered before it is submitted: neither an end nor a cancel can come too early to be noticed.
            job = self._live[job_id] = _Job(request)
            job.task = self._spawn(self._run(job_id, job))
        elif job.request.model_copy(update={"rollout_id": request.rollout_id}) != request:
            raise ConflictError(f"job {job_id[:80]} is under way with another body.", "Use a fresh job_id.")
        job.callers += 1
        try:
            ended = await asyncio.shield(job.task)
        finally:
            job.callers -= 1
            if not job.callers and not job.task.done():
                self._spawn(self._cancel(job, CancelReason.DISCONNECTED))
        if isinstance(ended, ProrlError):
            raise ended
        return ended

    async def cancel(self, job_id: str) -> bool:
        """Cancel a call, which is then answered with what there is; ``False`` when it has ended already.

        Raises:
            NotFoundError: there was no such job (or it ended long ago).
        """
        job = self._live.get(job_id)
        if job is not None:
            await self._cancel(job, CancelReason.CLIENT)
            return True
        if job_id not in self._ended:
            raise NotFoundError(f"There is no job '{job_id[:80]}'.", "Send the job_id of a /process that is under way.")
        return False

    async def cancel_all(self) -> int:
        """Cancel every call and wait until each has its record; return how many there were."""
        jobs = list(self._live.values())
        await asyncio.gather(*(self._cancel(job, CancelReason.CLIENT) for job in jobs))
        if jobs:
            await asyncio.wait([job.task for job in jobs])
        return len(jobs)

    async def _run(self, job_id: str, job: _Job) -> Rollout | ProrlError:
        """Submit and wait for the record; errors are returned, since all callers may be gone by then."""
        try:
            await self._service.submit([job.request])
            job.submitted.set()
            rollout = await self._service.result(job.request.rollout_id, _NO_TIMEOUT_SECONDS)
        except ProrlError as error:
            return error
        finally:
            job.submitted.set()
            self._end(job_id)
        return rollout or ShuttingDownError("The service is stopping.", "Send it again when it is back.")

    async def _cancel(self, job: _Job, reason: CancelReason) -> None:
        if job.cancel_reason is None:
            job.cancel_reason = reason
            await job.submitted.wait()
            await self._service.cancel([job.request.rollout_id], reason=reason)

    def _end(self, job_id: str) -> None:
        del self._live[job_id]
        self._ended[job_id] = None
        while len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)
        if not self._live and not self._keep_records:
            self._spawn(self._acknowledge())

    async def _acknowledge(self) -> None:
        """Acknowledge the records of the run: every caller has its answer."""
        try:
            newest = await self._service.summaries(self._run_id, newest_first=True, limit=1)
            if newest:
                await self._service.acknowledge(self._run_id, newest[0].cursor)
        except ProrlError as error:  # they expire in time
            _LOG.warning("records of run %s stay until they expire: %s", self._run_id, error)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
