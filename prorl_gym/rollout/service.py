"""The service: accepts rollouts durably, and returns their terminal records.

The facade over ledger, scheduling and groups that HTTP routes and NeMo Gym call. ``docs/architecture.md`` shows the
path of a rollout.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace

from prorl_gym.client.wire_models import (
    AcceptedRollout,
    AnalysisResponse,
    DispatchStatus,
    GroupsStatus,
    LedgerStatus,
    PendingPlace,
    PendingSummary,
    ProblemsResponse,
    RolloutListResponse,
    RolloutSummary,
    Unacknowledged,
)
from prorl_gym.demand import Demand
from prorl_gym.errors import CancelReason, NotFoundError, ProrlError, ShuttingDownError, TaskError
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.groups.group import GroupVerdict
from prorl_gym.rollout.intake import Intake
from prorl_gym.rollout.protocol import (
    AttemptMoved,
    Delivery,
    Ledger,
    ListPage,
    ProblemOrder,
    RolloutFilter,
    RolloutState,
    Runner,
)
from prorl_gym.rollout.scheduling.attempt_settler import RetryConfig
from prorl_gym.rollout.scheduling.dispatcher import RESTART_ADVICE, Dispatcher

_OUTSIDE_THE_RUNNER: tuple[PendingPlace, ...] = ("held", "queue", "retry")
_PAGE = 32
"""Records read for a stream at once: they may be large."""


class RolloutService:
    """On one event loop. Call ``start`` once, ``stop`` at the end.

    Args:
        ledger: durable memory; the service closes it.
        runner: executes attempts; the service closes it.
        config: retries.
        environment_weights: weights of environments for their shares of worker-seconds. See ``FairQueue``.
        claim_seconds: how long nodes may claim the attempts that a killed service left open; ``None``: there are no
            nodes, and these attempts are lost.
    """

    def __init__(
        self,
        ledger: Ledger,
        runner: Runner,
        config: RetryConfig | None = None,
        environment_weights: Mapping[str, float] | None = None,
        *,
        claim_seconds: float | None = None,
    ) -> None:
        self._ledger = ledger
        self._runner = runner
        config = config or RetryConfig()
        self._dispatcher = Dispatcher(ledger, runner, config, self._on_finished, environment_weights)
        self._pending = self._dispatcher.pending
        self._intake = Intake(ledger, self._dispatcher, config.restarts, keeps_attempts=claim_seconds is not None)
        self._group_controller = self._intake.groups
        self._claim_seconds = claim_seconds
        self._claim_timer: asyncio.TimerHandle | None = None
        self._record_written = asyncio.Event()
        self._is_started = False
        self._is_stopped = False
        self._finished_count = 0
        self._observers: list[Callable[[Rollout], None]] = []

    async def start(self) -> None:
        """Enqueue what is pending in the ledger, dispatch it, and accept rollouts from now on.

        Raises:
            LedgerError: the file cannot be used.
        """
        await self._intake.recover()
        self._dispatcher.start()
        self._is_started = True
        if self._claim_seconds is not None:
            loop = asyncio.get_running_loop()
            self._claim_timer = loop.call_later(self._claim_seconds, self._intake.requeue_unclaimed)

    async def stop(self, *, drain: bool = True) -> None:
        """Stop. Pending rollouts stay in the ledger for the next start. Idempotent.

        Args:
            drain: finish what the runner has in hand; otherwise its attempts are cancelled and made again by the next
                start.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._claim_timer is not None:
            self._claim_timer.cancel()
        self.begin_shutdown()
        self._group_controller.stop()
        await self._dispatcher.stop(drain=drain)
        await self._ledger.close()

    def claim_attempt(self, rollout_id: str, attempt: int) -> bool:
        """Let a node that joins go on with an attempt that a killed service left open; whether it may."""
        return self._intake.claim_attempt(rollout_id, attempt)

    async def wait_until_claimed(self) -> None:
        """Wait until no node can have an attempt in hand that this service does not know: its model calls count."""
        await self._intake.claims_settled.wait()

    async def abort_drain(self) -> None:
        """Turn a ``stop`` that is draining into one that is not."""
        await self._dispatcher.abort_attempts()

    def hold_dispatch(self) -> None:
        """Begin no attempts, for maintenance; accept and finish rollouts. A restart ends it. Idempotent."""
        self._dispatcher.hold()

    def release_dispatch(self) -> None:
        """End ``hold_dispatch``. Idempotent."""
        self._dispatcher.release()

    def begin_shutdown(self) -> None:
        """Accept nothing more, answer waiting calls, end the streams: the first step of ``stop``, or long before it."""
        self._intake.is_closed = True
        self._intake.claims_settled.set()
        for entry in self._pending.all():
            entry.resolve_waiters(None)
        self._group_controller.reject_waiters()
        self._wake_readers()

    async def submit(self, requests: Sequence[RolloutRequest]) -> list[AcceptedRollout]:
        """Accept a batch, all or nothing. When this returns, a crash cannot lose it.

        Raises:
            ConflictError: an id was submitted before with another body.
            TaskError: a task is not JSON, or an environment is not known here.
            LedgerError: nothing can be remembered now.
            ShuttingDownError: the service is stopping, was not started, or is broken.
        """
        if not self._is_started or self.is_shutting_down:
            raise ShuttingDownError("The service takes no more work.", "Submit again when it is back.")
        self._raise_if_broken()
        await self._require_environments(requests)
        # Shielded: a caller that goes away after the commit must not leave a rollout that is never dispatched.
        answer = await asyncio.shield(self._dispatcher.spawn(self._intake.accept_batch(requests)))
        if isinstance(answer, ProrlError):
            raise answer
        return answer

    async def result(self, rollout_id: str, wait: float = 0.0) -> Rollout | None:
        """Return the terminal record, or ``None`` when there is none after ``wait`` seconds.

        Raises:
            NotFoundError: never accepted.
            ShuttingDownError: the service broke; the rollout will end after a restart.
        """
        entry = self._pending.get(rollout_id)
        if entry is None:
            found = await self._ledger.get(rollout_id)
            entry = self._pending.get(rollout_id)
            if not isinstance(found, Rollout) and entry is None:
                found = await self._ledger.get(rollout_id)  # it may have been written between the two looks
            if isinstance(found, Rollout) or entry is None:
                return found if isinstance(found, Rollout) else None
        if wait <= 0 or self.is_shutting_down:
            return None
        self._raise_if_broken()
        waiter: asyncio.Future[Rollout | None] = asyncio.get_running_loop().create_future()
        entry.waiters.append(waiter)
        try:
            async with asyncio.timeout(wait):
                return await waiter
        except TimeoutError:
            return None
        finally:
            if waiter in entry.waiters:
                entry.waiters.remove(waiter)

    async def cancel(
        self,
        rollout_ids: Sequence[str] = (),
        *,
        groups: Sequence[str] = (),
        runs: Sequence[str] = (),
        reason: CancelReason = CancelReason.CLIENT,
    ) -> list[str]:
        """Cancel what is named by id, group or run and has no record yet; return the ids that this stops.

        Groups and runs together mean these groups of these runs: runs may name their groups alike.

        Each gets a cancelled record, without a reward, also over a restart. Unknown and finished ids are ignored.

        Raises:
            LedgerError: it cannot be remembered now; nothing was cancelled.
        """
        chosen = [entry for entry in self._pending.select(rollout_ids, groups, runs) if entry.cancel_reason is None]
        if not chosen:
            return []
        stopped = await asyncio.shield(self._dispatcher.spawn(self._dispatcher.cancel(chosen, reason)))
        return [entry.rollout_id for entry in stopped]

    async def stream(
        self, run_id: str | None = None, cursor: int = 0, *, follow: bool = True
    ) -> AsyncGenerator[Delivery, None]:
        """Yield terminal records past ``cursor`` in the order in which they were written, each once.

        Args:
            run_id: only of this run.
            cursor: that of the last record the reader has seen.
            follow: wait for more instead of ending; ends when the service stops.
        """
        while True:
            page = await self.read_page(run_id, cursor, None if follow else 0.0)
            if not page:
                return
            for delivery in page:
                yield delivery
            cursor = page[-1].cursor

    async def read_page(self, run_id: str | None = None, cursor: int = 0, wait: float | None = None) -> list[Delivery]:
        """Return the next records past ``cursor``, a bounded number of them: one step of ``stream``.

        Args:
            run_id: only of this run.
            cursor: that of the last record the reader has seen.
            wait: seconds to wait for the first; ``None``: until there is one. The list is empty when there was none in
                time, and when the service stops.
        """
        deadline = None if wait is None else asyncio.get_running_loop().time() + wait
        while not self.is_shutting_down:
            news = self._record_written  # before the read, so that a record written during it is noticed
            page = await self._ledger.read_records(run_id, cursor, _PAGE)
            if page or wait == 0.0:
                return page
            try:
                async with asyncio.timeout_at(deadline):
                    await news.wait()
            except TimeoutError:
                return []
        return []

    @property
    def is_shutting_down(self) -> bool:
        """Whether it stops: it accepts nothing, and streams end."""
        return self._intake.is_closed

    async def get_request(self, rollout_id: str) -> RolloutRequest:
        """Return what was accepted under this id, also after it is finished.

        Raises:
            NotFoundError: never accepted; ``GoneError``: not kept any more.
            UnreadableRecordError: this release cannot read it.
        """
        found = await self._ledger.requests([rollout_id])
        if not found:
            await self._ledger.get(rollout_id)  # raises the reason
            raise NotFoundError(f"rollout {rollout_id} was never accepted, or its request is not kept any more.")
        return found[0]

    async def summaries(
        self,
        run_id: str | None = None,
        *,
        groups: Sequence[str] | None = None,
        prefix: str | None = None,
        after: int = 0,
        limit: int = 1000,
        newest_first: bool = False,
    ) -> list[RolloutSummary]:
        """See ``Ledger.summaries``."""
        return await self._ledger.summaries(
            run_id, groups=groups, prefix=prefix, after=after, limit=limit, newest_first=newest_first
        )

    async def list_rollouts(self, wanted: RolloutFilter, state: RolloutState, page: ListPage) -> RolloutListResponse:
        """Return rollouts that match, sorted, with the places of pending ones. See ``Ledger.list_rollouts``."""
        found = await self._ledger.list_rollouts(wanted, state, page, self._pending.running_ids())
        placed = [self._add_place(summary) for summary in found.pending]
        return found.model_copy(update={"pending": tuple(placed)})

    def _add_place(self, summary: PendingSummary) -> PendingSummary:
        entry = self._pending.get(summary.rollout_id)
        if entry is None:
            return summary
        begun = entry.position.state in ("running", "waiting", "ending")
        return replace(summary, place=entry.place, since=entry.position.since if begun else None)

    async def analyze(self, wanted: RolloutFilter) -> AnalysisResponse:
        """See ``Ledger.analyze``."""
        return await self._ledger.analyze(wanted)

    async def list_problems(
        self, wanted: RolloutFilter, order: ProblemOrder, offset: int, limit: int
    ) -> ProblemsResponse:
        """See ``Ledger.list_problems``."""
        return await self._ledger.list_problems(wanted, order, offset, limit)

    async def acknowledge(self, run_id: str | None, cursor: int) -> int:
        """See ``Ledger.acknowledge``."""
        return await self._ledger.acknowledge(run_id, cursor)

    async def acknowledge_rollouts(self, rollout_ids: Sequence[str]) -> int:
        """See ``Ledger.acknowledge_rollouts``."""
        return await self._ledger.acknowledge_rollouts(rollout_ids)

    async def unacknowledged(self, run_id: str | None = None) -> Unacknowledged:
        """See ``Ledger.unacknowledged``."""
        return await self._ledger.unacknowledged(run_id)

    async def usage(self) -> LedgerStatus:
        """See ``Ledger.usage``."""
        return await self._ledger.usage()

    async def status(self) -> DispatchStatus:
        """Report what is going on."""
        places = Counter[PendingPlace](entry.place for entry in self._pending.all())
        queued = sum(places[place] for place in _OUTSIDE_THE_RUNNER)
        return DispatchStatus(
            ready=not self.problem,
            problem=self.problem,
            queued=queued,
            running=places.total() - queued,
            finished=self._finished_count,
            places=dict(places),
            paused=self._dispatcher.is_held,
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
        """How many rollouts have no terminal record yet."""
        return len(self._pending)

    @property
    def task_count(self) -> int:
        """Tasks that have not ended: none after ``stop``. Two run as long as it dispatches."""
        return self._dispatcher.task_count

    def add_record_observer(self, observer: Callable[[Rollout], None]) -> None:
        """Call this with every terminal record after it is written (metrics). It must be quick and not raise."""
        self._observers.append(observer)

    def add_stage_observer(self, observer: Callable[[AttemptMoved], None]) -> None:
        """Call this with every stage that is entered, and when agents are parked. It must be quick and not raise."""
        self._dispatcher.add_stage_observer(observer)

    def add_settlement_observer(self, observer: Callable[[Rollout], None]) -> None:
        """Call this once the end of an attempt is in the ledger. It must be quick and not raise."""
        self._dispatcher.settler.settlement_observers.append(observer)

    # --- groups: see ``prorl_gym.demand`` -------------------------------------------------------------------------

    async def set_demand(self, run_id: str, demand: Demand | None) -> GroupsStatus:
        """Set the demand of a run; ``None``: withdraw it, cancel what it parked, make the rest. Survives a restart.

        Raises:
            ConflictError: it is for a version older than its pool's.
            LedgerError: it cannot be remembered; what held before holds.
            ShuttingDownError: the service is stopping, was not started, or is broken.
        """
        if not self._is_started or self.is_shutting_down:
            raise ShuttingDownError("The service takes no more demands.", "Send it again when it is back.")
        self._raise_if_broken()
        await self._group_controller.set_demand(run_id, demand)
        return self._group_controller.status(run_id)

    def demands(self) -> Mapping[str, Demand]:
        """Return the demands that hold, by run."""
        return self._group_controller.demands()

    def groups_status(self, run_id: str) -> GroupsStatus:
        """Report on the groups of a run; one without a demand has none."""
        return self._group_controller.status(run_id)

    async def set_policy_version(self, version: int, pool: str = "policy") -> None:
        """Set the version that a pool's engines serve, and cancel groups that are too old by it.

        The ledger keeps it: engines outlive this service, and what they sample after its restart has that version too.

        Raises:
            LedgerError: it cannot be remembered now; set it again.
        """
        await self._ledger.set_policy_version(pool, version)
        self._group_controller.raise_policy_version(version, pool)

    def is_stale(self, member: RolloutSummary) -> bool:
        """Whether a rollout's group is further behind the policy than its run's demand allows."""
        return self._group_controller.is_stale(member)

    async def wait_for_verdict(self, rollout_id: str) -> GroupVerdict:
        """Wait until the group of a rollout is judged for good, and return how.

        ``ungrouped`` is the answer, at once, for evaluation, for a rollout without a group, and in a run without a
        demand; also when the demand is withdrawn during the wait.

        Raises:
            NotFoundError: never accepted, or not kept any more.
            ShuttingDownError: the service stops before the verdict; wait for it again after the restart.
        """
        asked = self._pending.get(rollout_id) or await self.get_request(rollout_id)
        return await self._group_controller.wait_for_verdict(asked.run_id, asked.group_id, evaluation=asked.evaluation)

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
        for request in await self._ledger.requests(list(strange)):
            del strange[request.rollout_id]
        for rollout_id, request in strange.items():
            error = unknown[request.environment]
            raise TaskError(error.kind, f"rollout {rollout_id}: {error.what}", error.fix)

    def _raise_if_broken(self) -> None:
        if self._dispatcher.broken_reason:
            raise ShuttingDownError(self._dispatcher.broken_reason, RESTART_ADVICE)

    def _on_finished(self, cursor: int, rollout: Rollout) -> None:
        self._finished_count += 1
        self._group_controller.on_finished(cursor, rollout)
        for observer in self._observers:
            observer(rollout)
        self._wake_readers()

    def _wake_readers(self) -> None:
        """Wake the readers that wait for a record; a reader that waits again waits for the next one."""
        self._record_written.set()
        self._record_written = asyncio.Event()
