"""From the dispatch queue to the runner. Also stops rollouts, wherever they are, and runs the service's tasks."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from prorl_gym.errors import CancelReason, ProrlError, ShuttingDownError
from prorl_gym.records import Rollout
from prorl_gym.rollout.ledger.ledger_config import LedgerError
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.protocol import Job, Runner
from prorl_gym.rollout.scheduling.attempt_settler import AttemptSettler, LedgerRetry, RetryConfig
from prorl_gym.rollout.scheduling.eager_task import start_eagerly
from prorl_gym.rollout.scheduling.pending import PendingIndex, PendingRollout

_LOG = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

RESTART_ADVICE = "See the service's log, then restart it: what was accepted is safe."

_BATCH = 64
"""Attempts that begin at once."""

_SLICE = 2048
"""Rollouts that are cancelled without a pause for other tasks."""


class Dispatcher:
    """Begins attempts at queued rollouts and hands them to the runner. For ``on_finished`` see ``AttemptSettler``."""

    def __init__(
        self,
        ledger: SqliteLedger,
        runner: Runner,
        config: RetryConfig,
        on_finished: Callable[[int, Rollout], None],
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.pending = PendingIndex(weights)
        self.broken_reason = ""
        """Why no pending rollout ends before a restart: a loop died. Empty while both run."""
        self._ledger = ledger
        self.runner = runner
        self._call_ledger = LedgerRetry(config.ledger_pause_seconds)
        self.settler = AttemptSettler(ledger, self.pending, config, self._call_ledger, self.spawn, on_finished)
        self.may_begin = asyncio.Event()
        """Cleared to begin no attempts, for maintenance; running ones go on."""
        self.may_begin.set()
        self.tasks: set[asyncio.Task[Any]] = set()
        """Tasks of the service that have not ended. Two run as long as it dispatches; ``stop`` waits for all."""
        self._loops: list[asyncio.Task[None]] = []

    @property
    def problem(self) -> str:
        """Why it does not work at the moment; empty while it does."""
        return self.broken_reason or self._call_ledger.problem

    def start(self) -> None:
        self._loops = [self.spawn(self.settler.consume(self.runner.events())), self.spawn(self.dispatch())]

    # --- to the runner ------------------------------------------------------------------------------------------

    async def dispatch(self) -> None:
        """Hand queued rollouts to the runner, as many as it has room for, until cancelled."""
        while True:
            await self.pending.queue_not_empty.wait()
            if not self.may_begin.is_set():
                await self.may_begin.wait()
                continue  # the queue may be empty by now
            free = (await self.runner.capacity()).free
            batch = {entry.rollout_id: entry for entry in self.pending.dequeue(min(max(free, 1), _BATCH))}
            if all(entry.begun_job is not None for entry in batch.values()):
                jobs = [await self._begin_attempt(entry) for entry in batch.values()]
            else:  # those that wait for the ledger share a commit
                jobs = await asyncio.gather(*map(self._begin_attempt, batch.values()))
            for job in filter(None, jobs):
                await self._submit_to_runner(batch[job.request.rollout_id], job)

    async def _begin_attempt(self, entry: PendingRollout) -> Job | None:
        """Begin an attempt; ``None``: it cannot begin, and its rollout is being ended."""
        try:
            job = self.pending.pop_begun_job(entry) or await self._call_ledger(
                lambda: self._ledger.begin_attempt(entry.rollout_id)
            )
            entry.position.attempt = job.attempt
            if job.unreadable_reason:
                raise ProrlError(job.unreadable_reason)
        except (LedgerError, ShuttingDownError):
            raise
        except Exception as error:
            self.settler.fail_internal(entry, error)
            return None
        return job

    async def _submit_to_runner(self, entry: PendingRollout, job: Job) -> None:
        """Wait until the runner accepts the job. A cancel ends the wait."""
        if entry.cancel_reason is not None:
            self.settler.end_cancelled([entry], entry.cancel_reason)
            return
        accepting = entry.accept_task = start_eagerly(self.runner.accept(job))
        # Marks the exception as retrieved: a stop may cancel the wait for it.
        accepting.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        if not accepting.done():
            await asyncio.wait({accepting})
        entry.accept_task = None
        if accepting.cancelled() and entry.cancel_reason is not None:
            self.settler.end_cancelled([entry], entry.cancel_reason)
            return
        try:
            accepting.result()
        except ShuttingDownError:
            raise
        except Exception as error:
            self.settler.fail_refused(entry, job, error)
            return
        if entry.position.state == "handing":  # otherwise it has ended already
            entry.position.state = "running"
        if entry.cancel_reason is not None:
            await self.runner.cancel([entry.rollout_id], entry.cancel_reason)

    # --- stopping rollouts --------------------------------------------------------------------------------------

    async def cancel(self, chosen: Sequence[PendingRollout], reason: CancelReason) -> list[PendingRollout]:
        """Store that these are cancelled, then stop them, wherever they are; return those that this cancelled.

        The ledger then accepts only a cancelled record for them. Raises ``LedgerError``: nothing is stopped.
        """
        noted = set(await self._ledger.cancel([entry.rollout_id for entry in chosen], reason))
        stopped = [entry for entry in chosen if entry.rollout_id in noted and entry.cancel_reason is None]
        for entry in stopped:
            entry.cancel_reason = reason
        await self._stop_attempts(stopped, reason)
        return stopped

    async def cancel_unneeded(self, chosen: Sequence[PendingRollout], reason: CancelReason) -> None:
        """Stop what no group needs, also where the ledger cannot store that: a restart judges the groups again."""
        try:
            await self._ledger.cancel([entry.rollout_id for entry in chosen], reason)
        except LedgerError as error:
            _LOG.error("a cancel could not be remembered: %s", error)
        await self._stop_attempts(chosen, reason)

    async def _stop_attempts(self, chosen: Sequence[PendingRollout], reason: CancelReason) -> None:
        await self.runner.cancel(
            [entry.rollout_id for entry in chosen if entry.position.state in ("running", "handing")], reason
        )
        for start in range(0, len(chosen), _SLICE):
            part = chosen[start : start + _SLICE]
            for entry in part:
                if entry.position.state == "handing" and entry.accept_task is not None:
                    entry.accept_task.cancel()
            self.settler.end_cancelled([one for one in part if one.position.state in ("queued", "waiting")], reason)
            await asyncio.sleep(0)  # other tasks run between two slices

    # --- the service's tasks ------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        """Run something that ``stop`` waits for; what it raises is logged."""
        task = start_eagerly(work)
        self.tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if task in self._loops and error is not None and not self._call_ledger.stopping.is_set():
            self.broken_reason = f"The service is broken ({type(error).__name__})."
            for entry in self.pending.by_id.values():
                entry.fail_waiters(ShuttingDownError(self.broken_reason, RESTART_ADVICE))
        if error is not None and not isinstance(error, ShuttingDownError | LedgerError):
            _LOG.error("a part of the service failed", exc_info=error)

    async def stop(self, *, drain: bool) -> None:
        """Finish what the runner has (``drain``), or leave it to the next start; then end."""
        self._call_ledger.stopping.set()
        if self._loops:
            self._loops[1].cancel()
        await (self.runner.drain() if drain else self.abort_attempts())
        for entry in self.pending.by_id.values():
            if entry.retry_timer is not None:
                entry.retry_timer.cancel()
        while self.tasks:
            await asyncio.wait(tuple(self.tasks))
        await self.settler.withdraw_aborted()
        for entry in self.pending.by_id.values():
            entry.resolve_waiters(None)

    async def abort_attempts(self) -> None:
        """Leave what the runner has to the next start; also while ``stop`` is draining."""
        self.settler.is_aborting = True
        await self.runner.close()
