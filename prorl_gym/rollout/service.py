"""The service: accepts rollouts durably, and returns their terminal records.

The facade over scheduling and groups that HTTP routes and NeMo Gym call, next to the ledger for reads and
acknowledgements. ``docs/architecture.md`` shows the path of a rollout.
"""

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

from prorl_gym.client.wire_models import (
    AcceptedRollout,
    DispatchStatus,
    GroupsStatus,
    PendingPlace,
    PendingSummary,
    RolloutListResponse,
)
from prorl_gym.demand import Demand
from prorl_gym.errors import CancelReason, ConflictError, NotFoundError, ProrlError, ShuttingDownError, TaskError
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.groups.group_controller import GroupController
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.protocol import Delivery, Job, ListPage, RolloutFilter, RolloutState, Runner
from prorl_gym.rollout.scheduling.attempt_settler import RetryConfig
from prorl_gym.rollout.scheduling.dispatcher import RESTART_ADVICE, Dispatcher
from prorl_gym.rollout.scheduling.pending import PendingRollout

_OUTSIDE_THE_RUNNER: tuple[PendingPlace, ...] = ("held", "queue", "retry")
_PAGE = 32
"""Records read for a stream at once: they may be large."""
_SLICE = 2048
"""Rollouts that are put into memory without a pause for other tasks."""


class RolloutService:
    """On one event loop. Call ``start`` once, ``stop`` at the end; it closes ledger and runner.

    For ``environment_weights`` see ``FairQueue``. ``claim_seconds`` is how long nodes may claim the attempts that a
    killed service left open; ``None``: there are no nodes, and these attempts are lost.
    """

    def __init__(
        self,
        ledger: SqliteLedger,
        runner: Runner,
        config: RetryConfig | None = None,
        environment_weights: Mapping[str, float] | None = None,
        *,
        claim_seconds: float | None = None,
    ) -> None:
        self.ledger = ledger
        self._runner = runner
        config = config or RetryConfig()
        self._dispatcher = Dispatcher(ledger, runner, config, self._on_finished, environment_weights)
        self._pending = self._dispatcher.pending
        self.groups = GroupController(ledger, self._dispatcher, self.accept_batch)
        self._max_restarts = config.restarts
        self._claim_seconds = claim_seconds
        self._claim_timer: asyncio.TimerHandle | None = None
        self._open_attempts: dict[str, PendingRollout] = {}
        """Rollouts whose attempt may still run on a node."""
        self._claims_settled = asyncio.Event()
        """Set while there are none."""
        self._claims_settled.set()
        self._record_written = asyncio.Event()
        self._is_started = False
        self._is_stopped = False
        self.is_shutting_down = False
        """It accepts nothing more, and streams end."""
        self._finished_count = 0
        # Observers must be quick and not raise.
        self.record_observers: list[Callable[[Rollout], None]] = []
        """Called with every terminal record after it is written (metrics)."""
        self.stage_observers = self._dispatcher.settler.stage_observers
        self.settlement_observers = self._dispatcher.settler.settlement_observers
        self.tasks = self._dispatcher.tasks

    async def start(self) -> None:
        """Enqueue what is pending, dispatch it, and accept rollouts from now on. Raises ``LedgerError``."""
        await self._recover()
        self._dispatcher.start()
        self._is_started = True
        if self._claim_seconds is not None:
            loop = asyncio.get_running_loop()
            self._claim_timer = loop.call_later(self._claim_seconds, self._requeue_unclaimed)

    async def stop(self, *, drain: bool = True) -> None:
        """Stop; ``drain`` finishes the running attempts. Pending rollouts stay for the next start. Idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._claim_timer is not None:
            self._claim_timer.cancel()
        self.begin_shutdown()
        self.groups.stop()
        await self._dispatcher.stop(drain=drain)
        await self.ledger.close()

    def claim_attempt(self, rollout_id: str, attempt: int) -> bool:
        """Whether the attempt that a node runs is the one that was left open; then the node continues it, once."""
        entry = self._open_attempts.get(rollout_id)
        if entry is None or entry.position.attempt != attempt or entry.cancel_reason is not None:
            return False
        del self._open_attempts[rollout_id]
        if not self._open_attempts:
            self._claims_settled.set()
        return True

    async def wait_until_claimed(self) -> None:
        """Wait until no node can run an attempt that this service does not know: its model calls count."""
        await self._claims_settled.wait()

    async def abort_drain(self) -> None:
        """Turn a ``stop`` that is draining into one that is not."""
        await self._dispatcher.abort_attempts()

    def hold_dispatch(self) -> None:
        """Begin no attempts, for maintenance; accept and finish rollouts. A restart ends it. Idempotent."""
        self._dispatcher.may_begin.clear()

    def release_dispatch(self) -> None:
        self._dispatcher.may_begin.set()

    def begin_shutdown(self) -> None:
        """Accept nothing more, answer waiting calls, end the streams: the first step of ``stop``, or long before it."""
        self.is_shutting_down = True
        self._claims_settled.set()
        for entry in self._pending.by_id.values():
            entry.resolve_waiters(None)
        self._wake_readers()

    async def submit(self, requests: Sequence[RolloutRequest]) -> list[AcceptedRollout]:
        """Accept a batch, all or nothing. When this returns, a crash cannot lose it.

        Raises ``ConflictError`` (an id with another body), ``TaskError`` (a task is not JSON, or an unknown
        environment), ``LedgerError`` (nothing can be stored now) or ``ShuttingDownError`` (stopping, not started, or
        broken).
        """
        if not self._is_started or self.is_shutting_down:
            raise ShuttingDownError("The service takes no more work.", "Submit again when it is back.")
        self._raise_if_broken()
        await self._require_environments(requests)
        # Shielded: a caller that goes away after the commit must not leave a rollout that is never dispatched.
        answer = await asyncio.shield(self._dispatcher.spawn(self.accept_batch(requests)))
        if isinstance(answer, ProrlError):
            raise answer
        return answer

    async def accept_batch(
        self, requests: Sequence[RolloutRequest]
    ) -> list[AcceptedRollout] | ConflictError | TaskError:
        """Commit a batch and enqueue what is new. The caller's mistake is returned: it is no failure of a task."""
        if self.is_shutting_down:
            raise ShuttingDownError("The service takes no more work.", "Submit again when it is back.")
        async with self.reserve_slots(len(requests)) as may_begin:
            begun: Sequence[Job] = ()
            try:
                if may_begin and not self.groups.has_demand_for(requests):
                    answers, begun = await self.ledger.add_and_begin(requests)
                else:
                    answers = await self.ledger.add_rollouts(requests)
            except (ConflictError, TaskError) as error:
                return error
        fresh = [request for request, answer in zip(requests, answers, strict=True) if not answer.duplicate]
        jobs = {job.request.rollout_id: job for job in begun}
        entries = [PendingRollout.from_source(one) for one in fresh]
        for entry in entries:
            entry.begun_job = jobs.get(entry.rollout_id)
            self._pending.reserved += entry.begun_job is not None
            self._pending.by_id[entry.rollout_id] = entry
            self._pending.enqueue(entry)
        self.groups.on_accepted(entries)  # at once: what it holds must not be dispatched before
        return answers

    @asynccontextmanager
    async def reserve_slots(self, count: int) -> AsyncGenerator[bool]:
        """Reserve job slots of the runner for the block; yield whether there were enough.

        With them, first attempts begin in the commit that accepts their rollouts. It saves a commit, which is most of
        what a short rollout waits for. An attempt that began and that the runner does not have yet would count, should
        the service die, as a crash that the rollout may have caused.
        """
        free = 0
        if self._dispatcher.may_begin.is_set() and not self._pending.queue_not_empty.is_set():
            free = (await self._runner.capacity()).free - self._pending.reserved
        reserved = count if count <= free else 0
        self._pending.reserved += reserved
        try:
            yield reserved == count
        finally:
            self._pending.reserved -= reserved

    async def result(self, rollout_id: str, wait: float = 0.0) -> Rollout | None:
        """Return the record; ``None``: none in ``wait`` seconds. Raises ``NotFoundError``, ``ShuttingDownError``."""
        entry = self._pending.by_id.get(rollout_id)
        if entry is None:
            found = await self.ledger.get(rollout_id)
            entry = self._pending.by_id.get(rollout_id)
            if not isinstance(found, Rollout) and entry is None:
                found = await self.ledger.get(rollout_id)  # it may have been written between the two looks
            if isinstance(found, Rollout) or entry is None:
                return found if isinstance(found, Rollout) else None
        if wait <= 0 or self.is_shutting_down:
            return None
        self._raise_if_broken()
        entry.waiter = entry.waiter or asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(wait):
                return await asyncio.shield(entry.waiter)
        except TimeoutError:
            return None

    async def cancel(
        self,
        rollout_ids: Sequence[str] = (),
        *,
        groups: Sequence[str] = (),
        runs: Sequence[str] = (),
        reason: CancelReason = CancelReason.CLIENT,
    ) -> list[str]:
        """Cancel what is named by id, group or run and has no record yet; return the ids that this stops.

        Groups and runs together mean these groups of these runs: runs may name their groups alike. Each gets a
        cancelled record, also over a restart. Others are ignored. Raises ``LedgerError``: nothing was cancelled.
        """
        chosen = [entry for entry in self._pending.select(rollout_ids, groups, runs) if entry.cancel_reason is None]
        if not chosen:
            return []
        stopped = await asyncio.shield(self._dispatcher.spawn(self._dispatcher.cancel(chosen, reason)))
        return [entry.rollout_id for entry in stopped]

    async def stream(
        self, run_id: str | None = None, cursor: int = 0, *, follow: bool = True
    ) -> AsyncGenerator[Delivery, None]:
        """Yield records past ``cursor`` in the order of their writing, each once; ``follow`` waits for more."""
        while True:
            page = await self.read_page(run_id, cursor, None if follow else 0.0)
            if not page:
                return
            for delivery in page:
                yield delivery
            cursor = page[-1].cursor

    async def read_page(self, run_id: str | None = None, cursor: int = 0, wait: float | None = None) -> list[Delivery]:
        """Return the next records past ``cursor``, a bounded number of them: one step of ``stream``.

        Waits up to ``wait`` seconds for the first (``None``: until there is one). The list is empty when there was none
        in time, and when the service stops.
        """
        deadline = None if wait is None else asyncio.get_running_loop().time() + wait
        while not self.is_shutting_down:
            news = self._record_written  # before the read, so that a record written during it is noticed
            page = await self.ledger.read_records(run_id, cursor, _PAGE)
            if page or wait == 0.0:
                return page
            try:
                async with asyncio.timeout_at(deadline):
                    await news.wait()
            except TimeoutError:
                return []
        return []

    async def get_request(self, rollout_id: str) -> RolloutRequest:
        """Return what was accepted, also after its end. Raises as ``SqliteLedger.get``."""
        found = await self.ledger.requests([rollout_id])
        if not found:
            await self.ledger.get(rollout_id)  # raises the reason
            raise NotFoundError(f"rollout {rollout_id} was never accepted, or its request is not kept any more.")
        return found[0]

    async def list_rollouts(self, wanted: RolloutFilter, state: RolloutState, page: ListPage) -> RolloutListResponse:
        """Return rollouts that match, sorted, with the places of pending ones. See ``SqliteLedger.list_rollouts``."""
        found = await self.ledger.list_rollouts(wanted, state, page, self._pending.running_ids())
        placed: list[PendingSummary] = []
        for summary in found.pending:
            if (entry := self._pending.by_id.get(summary.rollout_id)) is not None:
                begun = entry.position.state in ("running", "waiting", "ending")
                summary = replace(summary, place=entry.place, since=entry.position.since if begun else None)
            placed.append(summary)
        return found.model_copy(update={"pending": tuple(placed)})

    async def status(self) -> DispatchStatus:
        places = Counter[PendingPlace](entry.place for entry in self._pending.by_id.values())
        queued = sum(places[place] for place in _OUTSIDE_THE_RUNNER)
        return DispatchStatus(
            ready=not self.problem,
            problem=self.problem,
            queued=queued,
            running=places.total() - queued,
            finished=self._finished_count,
            places=dict(places),
            paused=not self._dispatcher.may_begin.is_set(),
            capacity=await self._runner.capacity(),
        )

    @property
    def problem(self) -> str:
        """Why it takes no work; empty while it does. Costs nothing, however much is pending."""
        if self.is_shutting_down or not self._is_started:
            return "The service is stopping." if self.is_shutting_down else "The service was not started."
        return self._dispatcher.problem

    @property
    def pending(self) -> int:
        return len(self._pending.by_id)

    # --- groups: see ``prorl_gym.demand`` -------------------------------------------------------------------------

    async def set_demand(self, run_id: str, demand: Demand | None) -> GroupsStatus:
        """Set a run's demand; ``None`` ends it. Raises ``ConflictError``, ``LedgerError``, ``ShuttingDownError``."""
        if not self._is_started or self.is_shutting_down:
            raise ShuttingDownError("The service takes no more demands.", "Send it again when it is back.")
        self._raise_if_broken()
        await self.groups.set_demand(run_id, demand)
        return self.groups.status(run_id)

    async def set_policy_version(self, version: int, pool: str = "policy") -> None:
        """Set the version that a pool's engines serve; stored, since they outlive the service.

        Raises ``LedgerError``.
        """
        await self.ledger.set_policy_version(pool, version)
        self.groups.raise_policy_version(version, pool)

    # --- recovery -------------------------------------------------------------------------------------------------

    async def _recover(self) -> None:
        """Enqueue what is pending in the ledger, before anything is submitted. Raises ``LedgerError``."""
        with _gc_paused():
            recovered = await self.ledger.recover(keep_open=self._claim_seconds is not None)
            await self.groups.recover(recovered)
            entries: list[PendingRollout] = []
            for start in range(0, len(recovered), _SLICE):
                entries += map(PendingRollout.from_source, recovered[start : start + _SLICE])
                await asyncio.sleep(0)  # other tasks run between two slices
            for source, entry in zip(recovered, entries, strict=True):
                if source.open_attempt is not None and entry.cancel_reason is None:
                    entry.position.attempt, entry.position.state = source.open_attempt, "running"
                    self._open_attempts[entry.rollout_id] = entry
                    self._claims_settled.clear()
            self._enqueue_recovered(entries)
            self.groups.on_recovered(entries)

    def _requeue_unclaimed(self) -> None:
        """Give up the open attempts that no node has claimed: their rollouts begin again."""
        unclaimed, self._open_attempts = list(self._open_attempts.values()), {}
        for entry in unclaimed:
            entry.restarts += 1  # the ledger counts it when the next attempt begins
            entry.position.state = "queued"
        self._enqueue_recovered(unclaimed)
        self._claims_settled.set()

    def _enqueue_recovered(self, entries: Sequence[PendingRollout]) -> None:
        """Enqueue these; end what was cancelled, or lost with the service too often."""
        cancelled: dict[CancelReason, list[PendingRollout]] = {}
        for entry in entries:
            self._pending.by_id[entry.rollout_id] = entry
            if entry.cancel_reason is not None:
                cancelled.setdefault(entry.cancel_reason, []).append(entry)
            elif entry.restarts > self._max_restarts:
                self._dispatcher.settler.end_lost(entry)
            elif entry.rollout_id not in self._open_attempts:
                self._pending.enqueue(entry)
        for reason, ended in cancelled.items():
            self._dispatcher.settler.end_cancelled(ended, reason)

    # --- helpers --------------------------------------------------------------------------------------------------

    async def _require_environments(self, requests: Sequence[RolloutRequest]) -> None:
        """Refuse environments that this service does not have, unless the rollout was accepted when it had them."""
        unknown: dict[str, TaskError] = {}
        for name in {request.environment for request in requests}:
            try:
                self._runner.require_environment(name)
            except TaskError as error:
                unknown[name] = error
        strange = {request.rollout_id: request for request in requests if request.environment in unknown}
        if not strange:
            return
        for request in await self.ledger.requests(list(strange)):
            del strange[request.rollout_id]
        for rollout_id, request in strange.items():
            error = unknown[request.environment]
            raise TaskError(error.kind, f"rollout {rollout_id}: {error.what}", error.fix)

    def _raise_if_broken(self) -> None:
        if self._dispatcher.broken_reason:
            raise ShuttingDownError(self._dispatcher.broken_reason, RESTART_ADVICE)

    def _on_finished(self, cursor: int, rollout: Rollout) -> None:
        self._finished_count += 1
        self.groups.on_finished(cursor, rollout)
        for observer in self.record_observers:
            observer(rollout)
        self._wake_readers()

    def _wake_readers(self) -> None:
        """Wake the readers that wait for a record; a reader that waits again waits for the next one."""
        self._record_written.set()
        self._record_written = asyncio.Event()


@contextmanager
def _gc_paused() -> Generator[None, None, None]:
    """Pause the garbage collector while a hundred thousand rollouts are made that all stay, and freeze them."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was:
            gc.enable()
