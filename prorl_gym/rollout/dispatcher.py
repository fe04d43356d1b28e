"""Sees every accepted rollout through: hands it to the runner, judges how its attempt ended, writes its one record.

Failures of the infrastructure are made again, a bounded number of times and after a pause that holds no slot. A ledger
that cannot write (full disk) stops everything until it can; nothing that was accepted or finished is dropped. What goes
wrong with one rollout ends that one alone; should a loop die all the same, everybody who waits is told.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from prorl_gym.errors import CancelReason, Cause, FailureKind, ProrlError, ShuttingDownError
from prorl_gym.logs import bind
from prorl_gym.records import Outcome, Retry, Rollout
from prorl_gym.rollout.attempt import terminal_record
from prorl_gym.rollout.entries import Entries, Entry
from prorl_gym.rollout.insistence import Insistence
from prorl_gym.rollout.ledger_file import CancelledRolloutError, LedgerError
from prorl_gym.rollout.protocol import Finished, Job, Ledger, Parked, Runner, StageEntered
from prorl_gym.rollout.retry import RetryConfig

_LOG = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

AFTER_BREAKING = "See the service's log, then restart it: what was accepted is safe."

_BATCH = 64
"""Jobs read from the ledger at once."""

_SLICE = 2048
"""Rollouts that are taken out of the line without a pause for others."""


class Dispatcher:
    """Between ledger and runner. Only the service talks to it.

    Args:
        ledger: remembers.
        runner: works.
        config: retries.
        told: called with the cursor and the record of every rollout that ends, after it is on the disk.
        shares: weights of environments. See ``fair``.
    """

    def __init__(
        self,
        ledger: Ledger,
        runner: Runner,
        config: RetryConfig,
        told: Callable[[int, Rollout], None],
        shares: Mapping[str, float] | None = None,
    ) -> None:
        self.entries = Entries(shares)
        self.broken = ""
        """Why nothing that is pending here will end before a restart: a loop died. Empty as long as none did."""
        self._ledger = ledger
        self._runner = runner
        self._config = config
        self._told = told
        self._insist = Insistence(config.ledger_pause_seconds)
        self._abandon = False
        self._open = asyncio.Event()
        self._open.set()
        self._observers: list[Callable[[StageEntered | Parked], None]] = []
        self._cut_off: list[str] = []
        self._ahead = 0
        """Rollouts that are being accepted, or were, with their first attempt begun, and are not handed over yet."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loops: list[asyncio.Task[None]] = []

    @property
    def problem(self) -> str:
        """What keeps it from working at the moment; empty when nothing does."""
        return self.broken or self._insist.problem

    @property
    def paused(self) -> bool:
        """Whether nothing new is handed out."""
        return not self._open.is_set()

    def pause(self) -> None:
        """Hand out nothing new from now on; what is in hand goes on. For maintenance. Idempotent."""
        self._open.clear()

    def resume(self) -> None:
        """Hand out again. Idempotent."""
        self._open.set()

    def watch(self, observer: Callable[[StageEntered | Parked], None]) -> None:
        """Call this with every stage that is entered, and when agents are parked. It must be quick and not raise."""
        self._observers.append(observer)

    async def park(self, entries: Sequence[Entry]) -> None:
        """Let the agents of these stop before their next model call. See ``Runner.park``."""
        await self._runner.park([entry.rollout_id for entry in entries])

    async def unpark(self, entries: Sequence[Entry]) -> None:
        """Let these go on. See ``Runner.unpark``."""
        await self._runner.unpark([entry.rollout_id for entry in entries])

    def use(self, runner: Runner) -> None:
        """Work with this runner. Before ``start``."""
        self._runner = runner

    def start(self) -> None:
        """Begin to hand out and to listen."""
        self._loops = [self.spawn(self._listen()), self.spawn(self._dispatch())]

    @asynccontextmanager
    async def begin_ahead(self, count: int) -> AsyncGenerator[bool]:
        """Say whether the first attempts at this many may begin in the commit that accepts them.

        They may when the runner has room for all of them and nobody stands in line. It saves a commit, which is most
        of what a short rollout waits for; an attempt that began and is not at work would count, should the service
        die, as one that the rollout may have killed it by.
        """
        free = 0 if self.paused or self.entries.ready.is_set() else (await self._runner.capacity()).free
        may = self._ahead + count <= free
        self._ahead += count if may else 0
        try:
            yield may
        finally:
            self._ahead -= count if may else 0

    def take_up(self, entry: Entry, begun: Job | None = None) -> None:
        """Track this rollout until its record is written.

        Args:
            entry: the rollout.
            begun: its first attempt, if that began when it was accepted.
        """
        if begun is not None:
            entry.begun = begun
            self._ahead += 1
        self.entries.add(entry)
        self.entries.line_up(entry)

    def recover(self, entries: Sequence[Entry]) -> None:
        """Track what the ledger remembers; end what was cancelled, or lost with the service too often."""
        cancelled: dict[CancelReason, list[Entry]] = {}
        for entry in entries:
            self.entries.add(entry)
            if entry.cancel is not None:
                cancelled.setdefault(entry.cancel, []).append(entry)
            elif entry.restarts > self._config.restarts:
                message = f"Lost {entry.restarts} times with the service; it may be what brings the service down."
                lost = Outcome(status="failed", kind=FailureKind.SERVICE_RESTARTED, stage="queue", message=message)
                self._end_unstarted([entry], lost)
            else:
                self.entries.line_up(entry)
        for reason, ended in cancelled.items():
            self._end_unstarted(ended, _cancelled(reason))

    async def cancel(self, chosen: Sequence[Entry], reason: CancelReason) -> list[Entry]:
        """Remember that these are cancelled, then stop them, wherever they are.

        Returns:
            Those that this cancelled. From now on the ledger takes no other record of them than a cancelled one, also
            where one was about to be written.

        Raises:
            LedgerError: it cannot be remembered; nothing is stopped.
        """
        noted = set(await self._ledger.cancel([entry.rollout_id for entry in chosen], reason))
        stopped = [entry for entry in chosen if entry.rollout_id in noted and entry.cancel is None]
        for entry in stopped:
            entry.cancel = reason
        await self._halt(stopped, reason)
        return stopped

    async def drop(self, chosen: Sequence[Entry], reason: CancelReason) -> None:
        """Stop what is not wanted any more. ``entry.cancel`` is set already, so that no new attempt begins.

        Where it cannot be remembered they are stopped all the same: a restart judges their groups again.
        """
        try:
            await self._ledger.cancel([entry.rollout_id for entry in chosen], reason)
        except LedgerError as error:
            _LOG.error("a cancel could not be remembered: %s", error)
        await self._halt(chosen, reason)

    async def _halt(self, chosen: Sequence[Entry], reason: CancelReason) -> None:
        await self._runner.cancel(
            [entry.rollout_id for entry in chosen if entry.state in ("running", "handing")], reason
        )
        for start in range(0, len(chosen), _SLICE):
            part = chosen[start : start + _SLICE]
            for entry in part:
                if entry.state == "handing" and entry.handing is not None:
                    entry.handing.cancel()
            self._end_unstarted([one for one in part if one.state in ("queued", "waiting")], _cancelled(reason))
            await asyncio.sleep(0)  # others have their turn between two slices

    async def stop(self, *, drain: bool) -> None:
        """Finish what the runner has (``drain``), or leave it to the next start; then end."""
        self._insist.stop()
        if self._loops:
            self._loops[1].cancel()
        await (self._runner.drain() if drain else self.cut_off())
        for entry in self.entries.all():
            if entry.timer is not None:
                entry.timer.cancel()
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))
        await self._withdraw()
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
        if task in self._loops and error is not None and not self._insist.stopping:
            self.broken = f"The service is broken ({type(error).__name__})."
            for entry in self.entries.all():
                entry.fail(ShuttingDownError(self.broken, AFTER_BREAKING))
        if error is not None and not isinstance(error, ShuttingDownError | LedgerError):
            _LOG.error("a part of the service failed", exc_info=error)

    # --- towards the runner -------------------------------------------------------------------------------------

    async def _dispatch(self) -> None:
        while True:
            await self.entries.ready.wait()
            if self.paused:
                await self._open.wait()
                continue  # who stood in line may have left it meanwhile
            free = (await self._runner.capacity()).free
            batch = {entry.rollout_id: entry for entry in self.entries.next(min(max(free, 1), _BATCH))}
            for job in filter(None, await asyncio.gather(*map(self._begin, batch.values()))):
                await self._hand_over(batch[job.request.rollout_id], job)

    async def _begin(self, entry: Entry) -> Job | None:
        """Begin an attempt; ``None``: it cannot, and this rollout is being ended."""
        try:
            job = self._begun(entry) or await self._insist(lambda: self._ledger.begin(entry.rollout_id))
            entry.attempt = job.attempt
            if job.unreadable:
                raise ProrlError(job.unreadable)
        except (LedgerError, ShuttingDownError):
            raise
        except Exception as error:
            self._give_up(entry, error)
            return None
        return job

    def _begun(self, entry: Entry) -> Job | None:
        """Take over the attempt that began when it was accepted, if it did and if that stands."""
        begun, entry.begun = entry.begun, None
        self._ahead -= begun is not None
        return begun

    async def _hand_over(self, entry: Entry, job: Job) -> None:
        """Offer a job to the runner and wait until it has room. A cancel meanwhile takes the offer back."""
        if entry.cancel is not None:
            self._end_unstarted([entry], _cancelled(entry.cancel))
            return
        entry.handing = asyncio.ensure_future(self._runner.accept(job))
        entry.handing.add_done_callback(_seen)
        await asyncio.wait({entry.handing})
        handing, entry.handing = entry.handing, None
        if handing.cancelled() and entry.cancel is not None:
            self._end_unstarted([entry], _cancelled(entry.cancel))
            return
        try:
            handing.result()
        except ShuttingDownError:
            raise
        except Exception as error:
            _LOG.exception("the runner refused a job")
            self.spawn(self._settled(entry, terminal_record(job, _internal(error))))
            return
        if entry.state == "handing":  # otherwise it has ended already
            entry.state = "running"
        if entry.cancel is not None:
            await self._runner.cancel([entry.rollout_id], entry.cancel)

    # --- from the runner ----------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        async for event in self._runner.events():
            named = event.rollout if isinstance(event, Finished) else event
            entry = self.entries.get(named.rollout_id)
            if entry is not None and named.attempt != entry.attempt:
                _LOG.warning("rollout %s: attempt %d is over; ignored %s", named.rollout_id, named.attempt, event.type)
            elif not isinstance(event, Finished):
                self._reckon(event)
                self._tell(event)
            elif entry is not None:
                self.spawn(self._settled(entry, event.rollout))

    def _tell(self, event: StageEntered | Parked) -> None:
        for observer in self._observers:
            observer(event)

    def _reckon(self, event: StageEntered | Parked) -> None:
        """Charge the environment for the time that its work takes, not for what it waits."""
        if isinstance(event, StageEntered):
            if event.stage != "queue":
                self.entries.began(event.rollout_id)
        elif event.parked:
            self.entries.stands(event.rollout_id)
        else:
            self.entries.began(event.rollout_id)

    async def _settled(self, entry: Entry, rollout: Rollout) -> None:
        try:
            await self._settle(entry, rollout)
        except (LedgerError, ShuttingDownError):
            raise
        except Exception as error:
            self._give_up(entry, error)

    async def _settle(self, entry: Entry, rollout: Rollout) -> None:
        """An attempt ended: write the record, make another attempt, or leave it to the next start."""
        with bind(rollout_id=rollout.rollout_id, group_id=rollout.group_id, run_id=rollout.run_id):
            outcome = rollout.outcome
            self.entries.worked(entry, rollout.worked_seconds)
            if self._abandon and outcome.reason is CancelReason.SHUTDOWN:
                entry.state = "running"
                self._cut_off.append(entry.rollout_id)
                return
            entry.state = "ending"
            broken = outcome.status == "failed" and outcome.cause is Cause.INFRASTRUCTURE
            if entry.cancel is not None and outcome.status != "cancelled":  # it ended, or failed, in that very moment
                await self._write(entry, _as_cancelled(rollout, entry.cancel))
            elif broken and entry.failures + 1 < self._config.attempts:
                await self._again(entry, rollout)
            else:
                await self._write(entry, rollout)

    async def _again(self, entry: Entry, rollout: Rollout) -> None:
        """Remember why the attempt failed and what it cost, line up again after a pause.

        Its tokens are counted and not kept: the next attempt has a fresh sandbox, which saw none of what they did.
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
        await self._insist(lambda: self._ledger.fail_attempt(rollout.rollout_id, retry))
        entry.failures += 1
        if entry.cancel is not None:  # it came while that was written
            self._end_unstarted([entry], _cancelled(entry.cancel))
            return
        pause = min(self._config.pause_seconds * 2 ** (entry.failures - 1), self._config.longest_pause_seconds)
        _LOG.warning("attempt %d failed (%s), again in %g s", rollout.attempt, outcome.kind.value, pause)
        entry.state = "waiting"
        entry.timer = asyncio.get_running_loop().call_later(pause, self.entries.line_up, entry)
        # Now, not when the runner takes the next attempt: until then it neither works nor holds any token.
        self._tell(StageEntered(rollout_id=rollout.rollout_id, attempt=rollout.attempt, stage="queue", at=time.time()))

    async def _withdraw(self) -> None:
        """Forget attempts that a stop cut off: only a death of the service counts as one that a rollout may cause."""
        handing = [one.rollout_id for one in self.entries.all() if one.state == "handing" or one.begun is not None]
        try:
            await self._ledger.withdraw([*self._cut_off, *handing])
        except LedgerError as error:
            _LOG.error("attempts that were cut off count as lost: %s", error)

    def _give_up(self, entry: Entry, error: Exception) -> None:
        """End a rollout that cannot go on, which is a defect: of ours, or of the ledger's file."""
        with bind(rollout_id=entry.rollout_id, group_id=entry.group_id, run_id=entry.run_id):
            _LOG.error("the rollout cannot go on", exc_info=error)
        self._end_unstarted([entry], _internal(error))

    def _end_unstarted(self, ended: Sequence[Entry], outcome: Outcome) -> None:
        """End rollouts that no runner has."""
        for entry in ended:
            if entry.timer is not None:
                entry.timer.cancel()
            self.entries.leave_line(entry)
            self.entries.worked(entry, 0.0)
            entry.state = "ending"
        if ended:
            self.spawn(self._write_unstarted(ended, outcome))

    async def _write_unstarted(self, ended: Sequence[Entry], outcome: Outcome) -> None:
        for start in range(0, len(ended), _BATCH):
            if start and self._insist.stopping:
                return  # the next start ends the rest: that it was cancelled is on the disk
            batch = ended[start : start + _BATCH]
            await asyncio.gather(*(self._end(entry, job, outcome) for entry, job in await self._jobs(batch)))

    async def _jobs(self, batch: Sequence[Entry]) -> list[tuple[Entry, Job | Exception | None]]:
        """Return the next attempt of each; ``None``: it has a record. An exception: it cannot be read."""
        begun = {entry.rollout_id: job for entry in batch if (job := self._begun(entry)) is not None}
        ids = [entry.rollout_id for entry in batch if entry.rollout_id not in begun]
        try:
            found = await self._insist(lambda: self._ledger.jobs(ids)) if ids else []
        except (LedgerError, ShuttingDownError):
            raise
        except Exception as error:
            return [(entry, begun.get(entry.rollout_id, error)) for entry in batch]
        jobs = begun | {job.request.rollout_id: job for job in found}
        return [(entry, jobs.get(entry.rollout_id)) for entry in batch]

    async def _end(self, entry: Entry, job: Job | Exception | None, outcome: Outcome) -> None:
        try:
            if isinstance(job, Exception):
                raise job
            await (self._answer_standing(entry) if job is None else self._write(entry, terminal_record(job, outcome)))
        except (LedgerError, ShuttingDownError):
            raise
        except Exception as error:  # not even its end can be written: it stays pending, for the next start
            _LOG.error("rollout %s has no record", entry.rollout_id, exc_info=error)
            self.entries.remove(entry)
            entry.fail(error)

    async def _write(self, entry: Entry, rollout: Rollout) -> None:
        try:
            cursor = await self._insist(lambda: self._ledger.finish(rollout))
        except CancelledRolloutError as cancelled:  # it came first
            await self._write(entry, _as_cancelled(rollout, cancelled.reason))
            return
        if cursor is None:
            await self._answer_standing(entry)
            return
        self.entries.remove(entry)
        entry.answer(rollout)
        self._told(cursor, rollout)

    async def _answer_standing(self, entry: Entry) -> None:
        """Answer with the record that the ledger has already: the first one stands."""
        found = await self._insist(lambda: self._ledger.get(entry.rollout_id))
        self.entries.remove(entry)
        entry.answer(found if isinstance(found, Rollout) else None)


def _cancelled(reason: CancelReason) -> Outcome:
    return Outcome(status="cancelled", reason=reason, stage="queue")


def _as_cancelled(rollout: Rollout, reason: CancelReason) -> Rollout:
    """Return the record of an attempt that ended when it was cancelled: its tokens, and no reward."""
    outcome = Outcome(status="cancelled", reason=reason, stage=rollout.outcome.stage or "eval")
    return rollout.model_copy(update={"outcome": outcome, "score": None})


def _internal(error: Exception) -> Outcome:
    """A defect, told without its text where that may quote a row: the log has it."""
    said = error.what if isinstance(error, ProrlError) else f"{type(error).__name__}; the service's log has it."
    return Outcome(status="failed", kind=FailureKind.INTERNAL, stage="queue", message=said[:500])


def _seen(task: asyncio.Task[None]) -> None:
    """Whoever waited may be gone: its exception is no news."""
    if not task.cancelled():
        task.exception()
