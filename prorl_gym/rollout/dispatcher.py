"""Sees every accepted rollout through: hands it to the runner, judges how its attempt ended, writes its one record.

Failures of the infrastructure are made again, a bounded number of times and after a pause that holds no slot. A ledger
that cannot write (full disk) stops everything until it can; nothing that was accepted or finished is dropped.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from pydantic import Field

from prorl_gym.config import ConfigModel
from prorl_gym.errors import CancelReason, Cause, FailureKind, ShuttingDownError
from prorl_gym.logs import bind
from prorl_gym.records import Outcome, Retry, Rollout
from prorl_gym.rollout.attempt import terminal_record
from prorl_gym.rollout.entries import Entries, Entry
from prorl_gym.rollout.ledger_file import LedgerError
from prorl_gym.rollout.protocol import Finished, Job, Ledger, Runner

_LOG = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_BATCH = 64
"""Jobs read from the ledger at once."""


class RetryConfig(ConfigModel):
    """How often infrastructure failures are tried again inside the service."""

    attempts: int = Field(default=3, ge=1)
    """Attempts at one rollout, the first one counted, lost ones (restarts) not."""
    restarts: int = Field(default=8, ge=0)
    """How often a rollout may be lost with the service: bounds one that brings the service down."""
    pause_seconds: float = Field(default=1.0, ge=0)
    """Before the second attempt; doubles with each further one. No slot is held meanwhile."""
    longest_pause_seconds: float = Field(default=60.0, gt=0)
    """Bound of that doubling."""
    ledger_pause_seconds: float = Field(default=2.0, gt=0)
    """Before a write to a ledger that failed (full disk) is tried again. Nothing is started meanwhile."""


class Dispatcher:
    """Between ledger and runner. Only the service talks to it.

    Args:
        ledger: remembers.
        runner: works.
        config: retries.
        told: called with every terminal record, after it is on the disk.
    """

    def __init__(self, ledger: Ledger, runner: Runner, config: RetryConfig, told: Callable[[Rollout], None]) -> None:
        self.entries = Entries()
        self.problem = ""
        """What keeps it from working at the moment; empty when nothing does."""
        self._ledger = ledger
        self._runner = runner
        self._config = config
        self._told = told
        self._stopping = asyncio.Event()
        self._abandon = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loops: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to hand out and to listen."""
        self._loops = [self.spawn(self._listen()), self.spawn(self._dispatch())]

    def take_up(self, entry: Entry) -> None:
        """Owe this rollout a record from now on."""
        self.entries.add(entry)
        if entry.cancel is not None:
            self._end_unstarted(entry, _cancelled(entry.cancel))
        elif entry.restarts > self._config.restarts:
            message = f"Lost {entry.restarts} times with the service; it may be what brings the service down."
            self._end_unstarted(
                entry,
                Outcome(status="failed", kind=FailureKind.SERVICE_RESTARTED, stage="queue", message=message),
            )
        else:
            self.entries.line_up(entry)

    async def cancel(self, chosen: Sequence[Entry], reason: CancelReason) -> None:
        """Stop these, wherever they are. ``entry.cancel`` is set already, so that no new attempt begins."""
        ids = [entry.rollout_id for entry in chosen]
        try:
            await self._ledger.cancel(ids, reason)
        except LedgerError as error:  # they are stopped all the same; only a restart would not know
            _LOG.error("a cancel could not be remembered: %s", error)
        running = [entry.rollout_id for entry in chosen if entry.state in ("running", "handing")]
        for entry in chosen:
            if entry.state in ("queued", "waiting"):
                self._end_unstarted(entry, _cancelled(reason))
            elif entry.state == "handing" and entry.handing is not None:
                entry.handing.cancel()
        await self._runner.cancel(running, reason)

    async def stop(self, *, drain: bool) -> None:
        """Finish what the runner has (``drain``), or leave it to the next start; then end."""
        self._stopping.set()
        if self._loops:
            self._loops[1].cancel()
        await (self._runner.drain() if drain else self.cut_off())
        for entry in self.entries.all():
            if entry.timer is not None:
                entry.timer.cancel()
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))
        for entry in self.entries.all():
            entry.answer(None)

    async def cut_off(self) -> None:
        """Leave what the runner has to the next start; also while ``stop`` is draining."""
        self._abandon = True
        await self._runner.close()

    def spawn(self, work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        """Run something that ``stop`` waits for; what it raises is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if task in self._loops and error is not None:
            self.problem = f"The service is broken ({type(error).__name__}); see its log, then restart it."
        if error is not None and not isinstance(error, ShuttingDownError | LedgerError):
            _LOG.error("a part of the service failed", exc_info=error)

    # --- towards the runner -------------------------------------------------------------------------------------

    async def _dispatch(self) -> None:
        while True:
            await self.entries.ready.wait()
            free = (await self._runner.capacity()).free
            batch = {entry.rollout_id: entry for entry in self.entries.next(min(max(free, 1), _BATCH))}
            jobs = await self.insist(lambda ids=tuple(batch): self._ledger.jobs(ids))
            async with asyncio.TaskGroup() as group:
                for job in jobs:
                    group.create_task(self._begin(job))
            for job in jobs:
                await self._hand_over(batch[job.request.rollout_id], job)

    async def _begin(self, job: Job) -> None:
        await self.insist(lambda: self._ledger.begin_attempt(job.request.rollout_id, job.attempt))

    async def _hand_over(self, entry: Entry, job: Job) -> None:
        """Offer a job to the runner and wait until it has room. A cancel meanwhile takes the offer back."""
        if entry.cancel is not None:
            self._end_unstarted(entry, _cancelled(entry.cancel))
            return
        entry.handing = asyncio.ensure_future(self._runner.accept(job))
        entry.handing.add_done_callback(_seen)
        await asyncio.wait({entry.handing})
        handing, entry.handing = entry.handing, None
        if handing.cancelled() and entry.cancel is not None:
            self._end_unstarted(entry, _cancelled(entry.cancel))
            return
        try:
            handing.result()
        except ShuttingDownError:
            raise
        except Exception as error:
            _LOG.exception("the runner refused a job")
            broken = Outcome(status="failed", kind=FailureKind.INTERNAL, stage="queue", message=str(error)[:500])
            self.spawn(self._settle(entry, terminal_record(job, broken)))
            return
        if entry.state == "handing":  # otherwise it has ended already
            entry.state = "running"
        if entry.cancel is not None:
            await self._runner.cancel([entry.rollout_id], entry.cancel)

    # --- from the runner ----------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        async for event in self._runner.events():
            if isinstance(event, Finished):
                entry = self.entries.get(event.rollout.rollout_id)
                if entry is not None:
                    self.spawn(self._settle(entry, event.rollout))

    async def _settle(self, entry: Entry, rollout: Rollout) -> None:
        """An attempt ended: write the record, make another attempt, or leave it to the next start."""
        with bind(rollout_id=rollout.rollout_id, group_id=rollout.group_id, run_id=rollout.run_id):
            outcome = rollout.outcome
            if self._abandon and outcome.reason is CancelReason.SHUTDOWN:
                return
            entry.state = "ending"
            broken = outcome.status == "failed" and outcome.cause is Cause.INFRASTRUCTURE
            if broken and entry.cancel is None and entry.failures + 1 < self._config.attempts:
                await self._again(entry, rollout)
            elif broken and entry.cancel is not None:  # nobody wants it any more: it failed because it was stopped
                stopped = Outcome(status="cancelled", reason=entry.cancel, stage=outcome.stage)
                await self._write(entry, rollout.model_copy(update={"outcome": stopped}))
            else:
                await self._write(entry, rollout)

    async def _again(self, entry: Entry, rollout: Rollout) -> None:
        """Remember why the attempt failed, drop what it sampled, line up again after a pause."""
        outcome = rollout.outcome
        assert outcome.kind is not None
        retry = Retry(
            attempt=rollout.attempt, kind=outcome.kind, stage=outcome.stage or "queue", message=outcome.message
        )
        await self.insist(lambda: self._ledger.fail_attempt(rollout.rollout_id, retry))
        entry.failures += 1
        if entry.cancel is not None:  # it came while that was written
            self._end_unstarted(entry, _cancelled(entry.cancel))
            return
        pause = min(self._config.pause_seconds * 2 ** (entry.failures - 1), self._config.longest_pause_seconds)
        _LOG.warning("attempt %d failed (%s), again in %g s", rollout.attempt, outcome.kind.value, pause)
        entry.state = "waiting"
        entry.timer = asyncio.get_running_loop().call_later(pause, self.entries.line_up, entry)

    def _end_unstarted(self, entry: Entry, outcome: Outcome) -> None:
        """End a rollout that no runner has."""
        if entry.timer is not None:
            entry.timer.cancel()
        entry.state = "ending"
        self.spawn(self._write_unstarted(entry, outcome))

    async def _write_unstarted(self, entry: Entry, outcome: Outcome) -> None:
        for job in await self.insist(lambda: self._ledger.jobs([entry.rollout_id])):
            await self._write(entry, terminal_record(job, outcome))

    async def _write(self, entry: Entry, rollout: Rollout) -> None:
        await self.insist(lambda: self._ledger.finish(rollout))
        self.entries.remove(entry)
        entry.answer(rollout)
        self._told(rollout)

    async def insist(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Call the ledger until it works, with a pause after each failure.

        Raises:
            LedgerError: the service stops while the ledger still fails.
        """
        while True:
            try:
                result = await call()
            except LedgerError as error:
                self.problem = str(error)
                _LOG.error("the ledger fails: %s", error)
                if self._stopping.is_set():
                    raise
            else:
                self.problem = ""
                return result
            await _pause(self._stopping, self._config.ledger_pause_seconds)


def _cancelled(reason: CancelReason) -> Outcome:
    return Outcome(status="cancelled", reason=reason, stage="queue")


def _seen(task: asyncio.Task[None]) -> None:
    """Whoever waited may be gone: its exception is no news."""
    if not task.cancelled():
        task.exception()


async def _pause(unless: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await unless.wait()
    except TimeoutError:
        return
