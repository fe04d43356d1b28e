"""Settles each attempt that ended: writes the rollout's terminal record, or schedules another attempt.

A failure of the infrastructure is retried, a bounded number of times and after a pause that holds no slot. A ledger
that cannot write (full disk) stops everything until it can: no record is dropped. A defect that concerns one rollout
ends that rollout alone.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import Field

from prorl_gym.backoff import backoff_delay
from prorl_gym.config import ConfigModel
from prorl_gym.errors import CancelReason, Cause, FailureKind, ProrlError, ShuttingDownError
from prorl_gym.logs import log_context
from prorl_gym.records import Outcome, Retry, Rollout
from prorl_gym.rollout.ledger.ledger_config import CancelledRolloutError, LedgerError
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.protocol import AttemptMoved, Finished, Job, RunnerEvent, StageEntered, TurnEnded
from prorl_gym.rollout.scheduling.attempt import terminal_record
from prorl_gym.rollout.scheduling.pending import PendingIndex, PendingRollout

_LOG = logging.getLogger(__name__)

_BATCH = 64
"""Jobs read from the ledger at once."""

ResultT = TypeVar("ResultT")


class RetryConfig(ConfigModel):
    """How often infrastructure failures are retried inside the service."""

    attempts: int = Field(default=3, ge=1)
    """Most attempts at one rollout, including the first; those lost to restarts or with a node do not count."""
    restarts: int = Field(default=8, ge=0)
    """Most attempts that a rollout may lose to restarts and to lost nodes: it may be what crashes them."""
    pause_seconds: float = Field(default=1.0, ge=0)
    """Pause before the second attempt, without a slot; doubles with each further one."""
    longest_pause_seconds: float = Field(default=60.0, gt=0)
    """Longest pause between attempts."""
    ledger_pause_seconds: float = Field(default=2.0, gt=0)
    """Pause before a failed write to the ledger (full disk) is retried. No rollout starts during it."""


class LedgerRetry:
    """Retries calls to a ledger that fails for a while (full disk), until they work or the service stops."""

    def __init__(self, retry_seconds: float) -> None:
        self.problem = ""
        """Why the ledger fails at the moment; empty while it works."""
        self._retry_seconds = retry_seconds
        self.stopping = asyncio.Event()
        """Set to make the next failure of each call final."""

    async def __call__(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Call the ledger until it works. Raises ``LedgerError`` when the service stops while it still fails."""
        while True:
            try:
                result = await call()
            except LedgerError as error:
                if self.problem != str(error):
                    _LOG.error("the ledger fails: %s", error)
                self.problem = str(error)
                if self.stopping.is_set():
                    raise
            else:
                self.problem = ""
                return result
            with suppress(TimeoutError):
                async with asyncio.timeout(self._retry_seconds):
                    await self.stopping.wait()


class AttemptSettler:
    """Settles attempts that ended, and ends rollouts that no runner has: one terminal record for each rollout.

    ``spawn`` runs a coroutine that the service's stop waits for; ``on_finished`` is called with the cursor and the
    record of every rollout, after it is on the disk.
    """

    def __init__(
        self,
        ledger: SqliteLedger,
        pending: PendingIndex,
        config: RetryConfig,
        call_ledger: LedgerRetry,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_finished: Callable[[int, Rollout], None],
    ) -> None:
        self.is_aborting = False
        """Attempts end because the service stops without a drain: the next start retries them."""
        self.stage_observers: list[Callable[[AttemptMoved], None]] = []
        """Called with every stage that is entered, and when agents are parked."""
        self.settlement_observers: list[Callable[[Rollout], None]] = []
        """Called once the end of an attempt is in the ledger, as the record or as the reason for another attempt."""
        self._ledger = ledger
        self._pending = pending
        self._config = config
        self._call_ledger = call_ledger
        self._spawn = spawn
        self._on_finished = on_finished
        self._aborted: list[str] = []

    async def consume(self, events: AsyncIterator[RunnerEvent]) -> None:
        """Follow the runner's events: update positions, and settle each attempt that ended. Ends with the events."""
        async for event in events:
            named = event.rollout if isinstance(event, Finished) else event
            entry = self._pending.by_id.get(named.rollout_id)
            if entry is not None and named.attempt != entry.position.attempt:
                _LOG.warning("rollout %s: attempt %d is over; ignored %s", named.rollout_id, named.attempt, event.type)
            elif isinstance(event, TurnEnded):
                self._spawn(self._log_turn(event))
            elif not isinstance(event, Finished):
                self._move(entry, event)
            elif entry is not None:
                self._spawn(self.settle_attempt(entry, event.rollout))

    async def _log_turn(self, event: TurnEnded) -> None:
        try:
            await self._ledger.log_turn(event)
        except LedgerError as error:  # it only saves work, and ``LedgerRetry`` names a disk that fails
            _LOG.debug("rollout %s: turn %d is not logged: %s", event.rollout_id, event.number, error)
        except ValueError as error:
            _LOG.warning("rollout %s: turn %d is not logged: %s", event.rollout_id, event.number, error)

    def _move(self, entry: PendingRollout | None, event: AttemptMoved) -> None:
        if entry is not None:
            self._pending.move(entry, event)
        for observer in self.stage_observers:
            observer(event)

    async def settle_attempt(self, entry: PendingRollout, rollout: Rollout) -> None:
        """Write the record of an attempt that ended, schedule another attempt, or leave it to the next start."""
        try:
            with log_context(rollout_id=rollout.rollout_id, group_id=rollout.group_id, run_id=rollout.run_id):
                await self._settle(entry, rollout)
                for observer in self.settlement_observers:
                    observer(rollout)
        except (LedgerError, ShuttingDownError):
            raise
        except Exception as error:
            self.fail_internal(entry, error)

    async def _settle(self, entry: PendingRollout, rollout: Rollout) -> None:
        outcome = rollout.outcome
        self._pending.settle_charge(entry, rollout.worked_seconds)
        if self.is_aborting and outcome.reason is CancelReason.SHUTDOWN:
            entry.position.state = "running"
            self._aborted.append(entry.rollout_id)
            return
        entry.position.state = "ending"
        broken = outcome.status == "failed" and outcome.cause is Cause.INFRASTRUCTURE
        if outcome.kind is FailureKind.NODE_LOST:
            may_retry = entry.restarts < self._config.restarts
        else:
            may_retry = entry.failures + 1 < self._config.attempts
        if entry.cancel_reason is not None and outcome.status != "cancelled":  # the attempt ended as it was cancelled
            await self._write_record(entry, _cancelled_record(rollout, entry.cancel_reason))
        elif broken and may_retry:
            await self._schedule_retry(entry, rollout)
        else:
            await self._write_record(entry, rollout)

    async def _schedule_retry(self, entry: PendingRollout, rollout: Rollout) -> None:
        """Store why the attempt failed and what it cost; enqueue the rollout again after a pause.

        Its tokens are not kept: the next attempt has a fresh sandbox, which saw none of what they did.
        """
        outcome = rollout.outcome
        assert outcome.kind is not None
        retry = Retry(
            attempt=rollout.attempt,
            kind=outcome.kind,
            stage=outcome.stage or "queue",
            message=outcome.message,
            sampled_tokens=rollout.sampled_tokens,
            seconds=rollout.worked_seconds,
            evidence=outcome.evidence,
        )
        await self._call_ledger(lambda: self._ledger.fail_attempt(rollout.rollout_id, retry))
        is_node_lost = outcome.kind is FailureKind.NODE_LOST
        entry.restarts += is_node_lost
        entry.failures += not is_node_lost
        if entry.cancel_reason is not None:  # it was cancelled during that write
            self.end_cancelled([entry], entry.cancel_reason)
            return
        first, longest = self._config.pause_seconds, self._config.longest_pause_seconds
        pause = 0.0 if is_node_lost else backoff_delay(entry.failures - 1, first=first, longest=longest)
        _LOG.warning("attempt %d failed (%s), again in %g s", rollout.attempt, outcome.kind.value, pause)
        entry.position.state = "waiting"
        entry.retry_timer = asyncio.get_running_loop().call_later(pause, self._pending.enqueue, entry)
        # Now, not when the runner takes the next attempt: until then it neither works nor holds any token.
        self._move(
            entry, StageEntered(rollout_id=rollout.rollout_id, attempt=rollout.attempt, stage="queue", at=time.time())
        )

    # --- rollouts that no runner has ----------------------------------------------------------------------------

    def end_cancelled(self, ended: Sequence[PendingRollout], reason: CancelReason) -> None:
        self._end_unstarted(ended, Outcome(status="cancelled", reason=reason, stage="queue"))

    def end_lost(self, entry: PendingRollout) -> None:
        """End a rollout that was lost with the service too often."""
        message = f"Lost {entry.restarts} times with the service; it may be what brings the service down."
        lost = Outcome(status="failed", kind=FailureKind.SERVICE_RESTARTED, stage="queue", message=message)
        self._end_unstarted([entry], lost)

    def fail_internal(self, entry: PendingRollout, error: Exception) -> None:
        """End a rollout that cannot go on because of a defect in this service or in the ledger's file."""
        with log_context(rollout_id=entry.rollout_id, group_id=entry.group_id, run_id=entry.run_id):
            _LOG.error("the rollout cannot go on", exc_info=error)
        self._end_unstarted([entry], _internal_outcome(error))

    def fail_refused(self, entry: PendingRollout, job: Job, error: Exception) -> None:
        _LOG.error("the runner refused a job", exc_info=error)
        self._spawn(self.settle_attempt(entry, terminal_record(job, _internal_outcome(error))))

    def _end_unstarted(self, ended: Sequence[PendingRollout], outcome: Outcome) -> None:
        for entry in ended:
            if entry.retry_timer is not None:
                entry.retry_timer.cancel()
            self._pending.remove_from_queue(entry)
            self._pending.settle_charge(entry, 0.0)
            entry.position.state = "ending"
        if ended:
            self._spawn(self._write_unstarted(ended, outcome))

    async def _write_unstarted(self, ended: Sequence[PendingRollout], outcome: Outcome) -> None:
        for start in range(0, len(ended), _BATCH):
            if start and self._call_ledger.stopping.is_set():
                return  # the next start ends the rest: that it was cancelled is on the disk
            jobs = await self._next_jobs(ended[start : start + _BATCH])
            await asyncio.gather(*(self._write_end(entry, job, outcome) for entry, job in jobs))

    async def _next_jobs(self, batch: Sequence[PendingRollout]) -> list[tuple[PendingRollout, Job | Exception | None]]:
        """Return the next attempt of each; ``None``: it has a record. An exception: it cannot be read."""
        begun = {entry.rollout_id: job for entry in batch if (job := self._pending.pop_begun_job(entry)) is not None}
        ids = [entry.rollout_id for entry in batch if entry.rollout_id not in begun]
        try:
            found = await self._call_ledger(lambda: self._ledger.next_jobs(ids)) if ids else []
        except (LedgerError, ShuttingDownError):
            raise
        except Exception as error:
            return [(entry, begun.get(entry.rollout_id, error)) for entry in batch]
        jobs = begun | {job.request.rollout_id: job for job in found}
        return [(entry, jobs.get(entry.rollout_id)) for entry in batch]

    async def _write_end(self, entry: PendingRollout, job: Job | Exception | None, outcome: Outcome) -> None:
        try:
            if isinstance(job, Exception):
                raise job
            if job is None:
                await self._answer_existing_record(entry)
            else:
                await self._write_record(entry, terminal_record(job, outcome))
        except (LedgerError, ShuttingDownError):
            raise
        except Exception as error:  # not even its end can be written: it stays pending, for the next start
            _LOG.error("rollout %s has no record", entry.rollout_id, exc_info=error)
            self._pending.remove(entry)
            entry.fail_waiters(error)

    # --- the record ---------------------------------------------------------------------------------------------

    async def _write_record(self, entry: PendingRollout, rollout: Rollout) -> None:
        try:
            cursor = await self._call_ledger(lambda: self._ledger.finish(rollout))
        except CancelledRolloutError as cancelled:  # the ledger had the cancel first
            await self._write_record(entry, _cancelled_record(rollout, cancelled.reason))
            return
        if cursor is None:
            await self._answer_existing_record(entry)
            return
        self._pending.remove(entry)
        entry.resolve_waiters(rollout)
        self._on_finished(cursor, rollout)

    async def _answer_existing_record(self, entry: PendingRollout) -> None:
        """Answer with the record that the ledger has already: the first one stands."""
        found = await self._call_ledger(lambda: self._ledger.get(entry.rollout_id))
        self._pending.remove(entry)
        entry.resolve_waiters(found if isinstance(found, Rollout) else None)

    async def withdraw_aborted(self) -> None:
        """Withdraw attempts that the service's stop ended: only a death of the service counts against a rollout."""
        not_handed = [
            entry.rollout_id
            for entry in self._pending.by_id.values()
            if entry.position.state == "handing" or entry.begun_job is not None
        ]
        try:
            await self._ledger.withdraw_attempts([*self._aborted, *not_handed])
        except LedgerError as error:
            _LOG.error("attempts that the stop ended count as lost: %s", error)


def _cancelled_record(rollout: Rollout, reason: CancelReason) -> Rollout:
    """Return the record of an attempt that ended as it was cancelled: its tokens, and no reward."""
    outcome = Outcome(status="cancelled", reason=reason, stage=rollout.outcome.stage or "eval")
    return rollout.model_copy(update={"outcome": outcome, "score": None})


def _internal_outcome(error: Exception) -> Outcome:
    """Return the outcome of a defect. Text that may quote a row is left to the log."""
    said = error.what if isinstance(error, ProrlError) else f"{type(error).__name__}; the service's log has it."
    return Outcome(status="failed", kind=FailureKind.INTERNAL, stage="queue", message=said[:500])
