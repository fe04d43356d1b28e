"""From a submission to the dispatch queue: commits rollouts to the ledger, and recovers those of earlier starts."""

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager

from prorl_gym.client.wire_models import AcceptedRollout, Capacity
from prorl_gym.errors import CancelReason, ConflictError, ShuttingDownError, TaskError
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.groups.group_controller import GroupController
from prorl_gym.rollout.protocol import Job, Ledger, RecoveredRollout, RunnerEvent
from prorl_gym.rollout.scheduling.dispatcher import Dispatcher
from prorl_gym.rollout.scheduling.pending import PendingRollout

_SLICE = 2048
"""Rollouts that are put into memory without a pause for other tasks."""


class Intake:
    """Accepts rollouts, and recovers those that the ledger has from earlier starts. Only the service uses it.

    Args:
        ledger: gets the requests.
        dispatcher: has the queue.
        max_restarts: a rollout that was lost with the service more often is ended.
        keeps_attempts: attempts that a killed service left open are kept for ``claim_attempt``.
    """

    def __init__(
        self, ledger: Ledger, dispatcher: Dispatcher, max_restarts: int, *, keeps_attempts: bool = False
    ) -> None:
        self.groups = GroupController(ledger, dispatcher, self.accept_batch)
        self.is_closed = False
        """Nothing more is accepted: the service stops."""
        self.unread_count = 0
        """Pending rollouts that are in the ledger only, before ``recover`` has read them."""
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._pending = dispatcher.pending
        self._max_restarts = max_restarts
        self._keeps_attempts = keeps_attempts
        self._open_attempts: dict[str, PendingRollout] = {}
        """Rollouts whose attempt may still be in hand on a node."""
        self.claims_settled = asyncio.Event()
        """Set while there are none."""
        self.claims_settled.set()
        self._is_recovered = False
        self._accepted_early: list[RolloutRequest] = []
        """Requests accepted before ``recover`` finished."""

    async def accept_batch(
        self, requests: Sequence[RolloutRequest]
    ) -> list[AcceptedRollout] | ConflictError | TaskError:
        """Commit a batch to the ledger and enqueue what is new of it.

        The caller's mistake is returned, not raised: it is no failure of a task of the service.

        Raises:
            LedgerError: nothing can be remembered now.
            ShuttingDownError: the service stops.
        """
        if self.is_closed:
            raise ShuttingDownError("The service takes no more work.", "Submit again when it is back.")
        async with self.reserve_slots(len(requests)) as may_begin:
            begun: Sequence[Job] = ()
            try:
                if may_begin and not self.groups.has_demand_for(requests):
                    answers, begun = await self._ledger.add_and_begin(requests)
                else:
                    answers = await self._ledger.add_rollouts(requests)
            except (ConflictError, TaskError) as error:
                return error
        fresh = [request for request, answer in zip(requests, answers, strict=True) if not answer.duplicate]
        if self._is_recovered:
            self._enqueue(fresh, {job.request.rollout_id: job for job in begun})
        else:  # older rollouts, which are not in memory yet, go first
            self._accepted_early += fresh
            self.unread_count += len(fresh)
        return answers

    @asynccontextmanager
    async def reserve_slots(self, count: int) -> AsyncGenerator[bool]:
        """Reserve job slots of the runner for the block; yield whether there were enough.

        With them, first attempts begin in the commit that accepts their rollouts. It saves a commit, which is most of
        what a short rollout waits for. An attempt that began and that the runner does not have yet would count, should
        the service die, as a crash that the rollout may have caused.
        """
        reserved = count if count <= await self._dispatcher.unclaimed_slots() else 0
        self._pending.reserved += reserved
        try:
            yield reserved == count
        finally:
            self._pending.reserved -= reserved

    def _enqueue(self, accepted: Sequence[RolloutRequest], begun: Mapping[str, Job]) -> None:
        """Enqueue what was accepted, except for what ``recover`` has read already."""
        fresh = [PendingRollout.from_source(one) for one in accepted if one.rollout_id not in self._pending]
        for entry in fresh:
            entry.begun_job = begun.get(entry.rollout_id)
            self._pending.reserved += entry.begun_job is not None
            self._pending.add(entry)
            self._pending.enqueue(entry)
        self.groups.on_accepted(fresh)  # at once: what it holds must not be dispatched before

    async def recover(self) -> None:
        """Read what is pending in the ledger, and enqueue it before what was accepted since the start.

        Raises:
            LedgerError: the file cannot be read.
        """
        with _gc_paused():
            recovered = await self._ledger.recover(keep_open=self._keeps_attempts)
            await self.groups.recover(recovered)
            entries: list[PendingRollout] = []
            for start in range(0, len(recovered), _SLICE):
                entries += map(PendingRollout.from_source, recovered[start : start + _SLICE])
                await asyncio.sleep(0)  # other tasks run between two slices
            self._keep_open_attempts(recovered, entries)
            self._enqueue_recovered(entries)
            self.groups.on_recovered(entries)
        self._is_recovered = True
        self.unread_count = 0
        early, self._accepted_early = self._accepted_early, []
        self._enqueue(early, {})

    def claim_attempt(self, rollout_id: str, attempt: int) -> bool:
        """Whether an attempt that a node has in hand is the one that was left open; then the node makes it, once."""
        entry = self._open_attempts.get(rollout_id)
        if entry is None or entry.position.attempt != attempt or entry.cancel_reason is not None:
            return False
        del self._open_attempts[rollout_id]
        if not self._open_attempts:
            self.claims_settled.set()
        return True

    def requeue_unclaimed(self) -> None:
        """Give up the open attempts that no node has claimed: their rollouts begin again."""
        unclaimed, self._open_attempts = list(self._open_attempts.values()), {}
        for entry in unclaimed:
            entry.restarts += 1  # the ledger counts it when the next attempt begins
            entry.position.state = "queued"
        self._enqueue_recovered(unclaimed)
        self.claims_settled.set()

    def _keep_open_attempts(self, recovered: Sequence[RecoveredRollout], entries: Sequence[PendingRollout]) -> None:
        for source, entry in zip(recovered, entries, strict=True):
            if source.open_attempt is not None and entry.cancel_reason is None:
                entry.position.attempt, entry.position.state = source.open_attempt, "running"
                self._open_attempts[entry.rollout_id] = entry
                self.claims_settled.clear()

    def _enqueue_recovered(self, entries: Sequence[PendingRollout]) -> None:
        """Enqueue these; end what was cancelled, or lost with the service too often."""
        cancelled: dict[CancelReason, list[PendingRollout]] = {}
        for entry in entries:
            self._pending.add(entry)
            if entry.cancel_reason is not None:
                cancelled.setdefault(entry.cancel_reason, []).append(entry)
            elif entry.restarts > self._max_restarts:
                self._dispatcher.settler.end_lost(entry)
            elif entry.rollout_id not in self._open_attempts:
                self._pending.enqueue(entry)
        for reason, ended in cancelled.items():
            self._dispatcher.settler.end_cancelled(ended, reason)


class LoadingRunner:
    """Implements ``Runner`` while the real runner loads its tokenizer and sandboxes: it has no room and no jobs.

    ``RolloutService.start_dispatching`` replaces it.

    Args:
        require_environment: raises a ``TaskError`` for an environment that the real one will not have.
    """

    def __init__(self, require_environment: Callable[[str], None]) -> None:
        self._require_environment = require_environment

    def require_environment(self, environment: str) -> None:
        """See ``Runner.require_environment``."""
        self._require_environment(environment)

    async def accept(self, job: Job) -> None:
        """See ``Runner.accept``.

        Raises:
            ShuttingDownError: always.
        """
        raise ShuttingDownError("The runner is not loaded yet.", "Call RolloutService.start_dispatching first.")

    async def events(self) -> AsyncIterator[RunnerEvent]:
        """See ``Runner.events``."""
        for event in ():
            yield event

    async def cancel(self, rollout_ids: Sequence[str], reason: CancelReason) -> None:
        """See ``Runner.cancel``."""

    async def park(self, rollout_ids: Sequence[str]) -> None:
        """See ``Runner.park``."""

    async def unpark(self, rollout_ids: Sequence[str]) -> None:
        """See ``Runner.unpark``."""

    async def capacity(self) -> Capacity:
        """See ``Runner.capacity``."""
        return Capacity(queued=0, init=0, run=0, eval=0, free=0)

    async def drain(self) -> None:
        """See ``Runner.drain``."""

    async def close(self) -> None:
        """See ``Runner.close``."""


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
