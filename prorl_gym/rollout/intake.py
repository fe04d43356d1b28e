"""From a submission to the dispatch queue: commits rollouts to the ledger, and recovers those of earlier starts."""

import asyncio
import gc
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager

from prorl_gym.client.wire_models import AcceptedRollout
from prorl_gym.errors import CancelReason, ConflictError, ShuttingDownError, TaskError
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.groups.group_controller import GroupController
from prorl_gym.rollout.protocol import Job, Ledger, RecoveredRollout
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
        self._enqueue(fresh, {job.request.rollout_id: job for job in begun})
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
        """Enqueue what was accepted."""
        fresh = [PendingRollout.from_source(one) for one in accepted]
        for entry in fresh:
            entry.begun_job = begun.get(entry.rollout_id)
            self._pending.reserved += entry.begun_job is not None
            self._pending.add(entry)
            self._pending.enqueue(entry)
        self.groups.on_accepted(fresh)  # at once: what it holds must not be dispatched before

    async def recover(self) -> None:
        """Read what is pending in the ledger, and enqueue it. Before anything is submitted.

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
