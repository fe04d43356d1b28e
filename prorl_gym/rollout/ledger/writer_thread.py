"""The ledger's one writer thread, with group commit.

Every call becomes an operation in a queue. The writer dequeues all of them, runs them in one transaction and syncs
once; only then do the callers get their answers. A burst of calls therefore costs one disk sync, and what was answered
survives a SIGKILL and a power cut.

Queued operations of one kind run together: none of their callers has an answer yet, so their order does not matter.

Urgent operations (cancel, acknowledge, demand) go first, and are withdrawn when the disk does not respond in time: the
writer probes the disk before it commits one, and does not commit withdrawn ones. So the error that nothing was done is
true.
"""

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from prorl_gym.client.wire_models import LedgerStatus
from prorl_gym.errors import ShuttingDownError
from prorl_gym.rollout.ledger.ledger_config import (
    DamagedLedgerError,
    DiskFullError,
    LedgerConfig,
    StuckDiskError,
    translated_errors,
)
from prorl_gym.rollout.ledger.open_ledger import OpenLedger, open_ledger_file
from prorl_gym.rollout.ledger.retention import Retention, used_bytes
from prorl_gym.rollout.ledger.statements import LedgerCounters, LedgerStore

ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class WriterLimits:
    """Bounds of a ledger's writer."""

    batch: int = 512
    """Operations in one transaction: bounds how long the first of a batch waits for the last."""
    urgent_seconds: float = 10.0
    """Longest time of an urgent operation. A healthy disk never takes seconds for a transaction."""


@dataclass(slots=True, eq=False)
class _Operation:
    batch_call: Callable[[Any, list[Any]], Sequence[Any]]
    urgent: bool
    durable: bool
    argument: Any
    done: asyncio.Future[Any]
    state: Literal["open", "committing", "withdrawn"] = "open"


_Batch = list[_Operation]
"""Operations of one kind, which are run together: they have the same call, urgency and durability."""


class LedgerTables(LedgerStore):
    """The tables, and their counts as of the last transaction, which are cached in memory."""

    def __init__(self, opened: OpenLedger, config: LedgerConfig, clock: Callable[[], float]) -> None:
        db = opened.connection
        super().__init__(db, clock, lambda: config.budget_bytes - used_bytes(db))
        self.retention = Retention(db, self, config)
        self.usage = self.retention.usage()

    def snapshot(self) -> tuple[LedgerCounters, LedgerStatus]:
        """Return the counts, which a rollback has to restore."""
        return self.counters, self.usage


class LedgerWriter:
    """Runs calls in the thread that opened the file. Open one with ``LedgerWriter.open``."""

    def __init__(
        self, path: Path, thread: Executor, opened: OpenLedger, tables: LedgerTables, limits: WriterLimits | None = None
    ) -> None:
        self.open_ledger = opened
        self.path = path
        self._thread = thread
        self._tables = tables
        self._limits = limits or WriterLimits()
        self._queue: list[_Operation] = []
        self._transaction_began: float | None = None
        """When the running transaction was passed to the thread."""
        self._state_lock = threading.Lock()
        self._is_idle = asyncio.Event()
        """Cleared from the first operation that is queued until none is left and no transaction runs."""
        self._is_idle.set()
        self._closed = False

    @classmethod
    async def open(
        cls, config: LedgerConfig, clock: Callable[[], float] | None = None, limits: WriterLimits | None = None
    ) -> "LedgerWriter":
        """Open the file in a new thread; ``clock`` is the file's own by default. Raises ``LedgerError``."""

        def begin() -> tuple[OpenLedger, LedgerTables]:
            opened = open_ledger_file(config)
            try:
                with translated_errors(config.path):
                    return opened, LedgerTables(opened, config, clock or opened.clock)
            except BaseException:
                opened.close()
                raise

        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        try:
            opened, tables = await asyncio.get_running_loop().run_in_executor(thread, begin)
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(config.path, thread, opened, tables, limits)

    @property
    def tables(self) -> LedgerTables:
        """The tables, for values that they cache in memory. Raises ``ShuttingDownError`` once closed."""
        self._require_open()
        return self._tables

    async def run(self, call: Callable[[LedgerTables], ResultT], *, urgent: bool = False) -> ResultT:
        """Queue a call; return its result or raise its error once it is on the disk. See ``run_batched``."""
        return await self.run_batched(_call_each, call, urgent=urgent)

    async def run_batched(
        self,
        batch_call: Callable[[LedgerTables, list[ArgumentT]], Sequence[ResultT | Exception]],
        argument: ArgumentT,
        *,
        urgent: bool = False,
        durable: bool = True,
    ) -> ResultT:
        """Queue an argument of a batch call; return or raise the answer to it. Raises ``LedgerError``.

        ``batch_call`` answers a list of queued arguments at once. For an argument whose answer is an exception, it must
        not have changed anything. ``urgent`` is set for calls that free space or cancel work: on a full disk they may
        use the reserve, and a disk that does not respond is an error after ``WriterLimits.urgent_seconds``. ``durable``
        is cleared for what a power cut may lose, but no SIGKILL: a transaction of nothing else is not synced, on a
        local disk.
        """
        self._require_open()
        loop = asyncio.get_running_loop()
        limit = self._limits.urgent_seconds
        if urgent and self._transaction_began is not None and loop.time() - self._transaction_began > limit:
            raise self._stuck_disk_error()
        operation = _Operation(batch_call, urgent, durable, argument, loop.create_future())
        self._queue.append(operation)
        if self._is_idle.is_set():
            self._is_idle.clear()
            loop.call_soon(self._start_transaction)  # not at once: what is queued with it shares the commit
        if not urgent:
            return await operation.done
        await asyncio.wait([operation.done], timeout=limit)
        return operation.done.result() if operation.done.done() else self._withdraw(operation)

    def _withdraw(self, operation: _Operation) -> Any:
        """Withdraw an operation, unless its commit is under way; raise ``StuckDiskError`` in any case."""
        with self._state_lock:
            is_committing = operation.state == "committing"
            if not is_committing:
                operation.state = "withdrawn"
        if operation in self._queue:
            self._queue.remove(operation)
        raise self._stuck_disk_error("It may be done all the same. " if is_committing else "Nothing was done. ")

    def _stuck_disk_error(self, outcome: str = "Nothing was done. ") -> StuckDiskError:
        what = f"{self.path}: the disk does not answer."
        return StuckDiskError(what, f"{outcome}Look at the disk, and send it again.")

    async def close(self) -> None:
        """Finish the queued operations, then close the file and release it for another process. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._is_idle.wait()
        await asyncio.get_running_loop().run_in_executor(self._thread, self.open_ledger.close)
        self._thread.shutdown(wait=False)

    def _require_open(self) -> None:
        if self._closed:
            raise ShuttingDownError(f"{self.path}: the ledger is closed.")

    def _start_transaction(self) -> None:
        if not self._queue:  # it was withdrawn
            self._is_idle.set()
            return
        loop = asyncio.get_running_loop()
        self._queue.sort(key=lambda operation: not operation.urgent)
        batch, self._queue = self._queue[: self._limits.batch], self._queue[self._limits.batch :]
        kinds: dict[Any, _Batch] = {}
        for operation in batch:
            kinds.setdefault((operation.batch_call, operation.urgent, operation.durable), []).append(operation)
        calls = list(kinds.values())
        self._transaction_began = loop.time()
        # Callbacks, not a task that waits: a rollout waits for two commits, and each task that is woken costs time.
        running = loop.run_in_executor(self._thread, self._run_transaction, calls)
        running.add_done_callback(lambda done: self._end_transaction(calls, done))

    def _end_transaction(self, calls: list[_Batch], done: asyncio.Future[list[Sequence[Any]]]) -> None:
        self._transaction_began = None
        if done.cancelled():  # the event loop is torn down
            return
        error = done.exception()  # then not even a rollback was possible
        results = done.result() if error is None else [[error] * len(one) for one in calls]
        for one, answers in zip(calls, results, strict=True):
            for operation, answer in zip(one, answers, strict=True):
                if operation.done.done():  # its caller was cancelled
                    continue
                if isinstance(answer, Exception):
                    operation.done.set_exception(answer)
                    operation.done.exception()  # marks it as retrieved, for callers that are gone
                else:
                    operation.done.set_result(answer)
        self._start_transaction()

    # --- in the writer thread -----------------------------------------------------------------------------------

    def _run_transaction(self, calls: list[_Batch]) -> list[Sequence[Any]]:
        """Run the calls in one commit. Failures are among the results."""
        try:
            return self._commit(calls)
        except DiskFullError as full:
            urgent = [one for one in calls if one[0].urgent]
            answers = iter(self._from_reserve(urgent, full))
            return [next(answers) if one[0].urgent else [full] * len(one) for one in calls]
        except DamagedLedgerError as error:
            if sum(map(len, calls)) == 1:
                return [[error]]
            # After reading a damaged page SQLite refuses every write of its transaction: give each call its own.
            return [[self._run_transaction([[each]])[0][0] for each in one] for one in calls]
        except Exception as error:  # the commit failed: nothing was stored
            return [[error] * len(one) for one in calls]

    def _from_reserve(self, calls: list[_Batch], full: DiskFullError) -> list[Sequence[Any]]:
        """Run calls again, in the reserved space."""
        reserve = self.open_ledger.reserve
        if reserve is None or not calls:
            return [[full] * len(one) for one in calls]
        try:
            with reserve.lend() as lent, translated_errors(self.path):
                if not lent:
                    raise full
                # The log can then be rewritten from its beginning, in blocks that it already has.
                self.open_ledger.connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                return self._commit(calls)
        except Exception as error:
            return [[error] * len(one) for one in calls]

    def _commit(self, calls: list[_Batch]) -> list[Sequence[Any]]:
        try:
            return self._try_commit(calls, isolated=False)
        except _CallFailedError:
            return self._try_commit(calls, isolated=True)

    def _try_commit(self, calls: list[_Batch], *, isolated: bool) -> list[Sequence[Any]]:
        """Run the calls in one transaction; nothing is written if it raises.

        Raises ``LedgerError`` (the file failed), or ``_CallFailedError`` for a call that failed and is not
        ``isolated``. Isolated ones run in a savepoint each, which copies every page that is changed in it, into a file
        when they are many.
        """
        database = self.open_ledger.connection
        numbers = self._tables.snapshot()
        try:
            with translated_errors(self.path):
                self.open_ledger.begin(durable=any(one[0].durable for one in calls))
                run = self._run_isolated if isolated else self._run_batch
                results = [run(one[0].batch_call, [each.argument for each in one]) for one in calls]
                self._tables.usage = self._tables.retention.usage()
                self._enter_commit([each for one in calls if one[0].urgent for each in one])
                self.open_ledger.commit()
                return results
        except Exception:
            self._tables.counters, self._tables.usage = numbers
            if database.in_transaction:
                with translated_errors(self.path):
                    database.execute("ROLLBACK")
            raise

    def _enter_commit(self, urgent: list[_Operation]) -> None:
        """Mark these as committing, not to be withdrawn any more. Raises ``StuckDiskError`` if one was withdrawn."""
        if not urgent:
            return
        if self.open_ledger.mark is not None:
            self.open_ledger.mark.sync()  # waits until the disk responds, so that the commit does not hang
        with self._state_lock:
            if any(operation.state == "withdrawn" for operation in urgent):
                raise self._stuck_disk_error()
            for operation in urgent:
                operation.state = "committing"

    def _run_batch(self, kind: Any, arguments: list[Any]) -> Sequence[Any]:
        try:
            return kind(self._tables, arguments)
        except sqlite3.Error:
            raise  # the file failed, not the call: the whole batch fails
        except Exception as error:
            raise _CallFailedError from error

    def _run_isolated(self, kind: Any, arguments: list[Any]) -> Sequence[Any]:
        """Run all arguments of a kind in one call, or, if that fails, each in its own."""
        database = self.open_ledger.connection
        numbers = self._tables.snapshot()
        database.execute("SAVEPOINT operation")
        try:
            answers = kind(self._tables, arguments)
        except sqlite3.Error:
            raise  # the file failed, not the call: the whole batch fails
        except Exception as error:
            database.execute("ROLLBACK TO operation")
            database.execute("RELEASE operation")
            self._tables.counters, self._tables.usage = numbers
            if len(arguments) == 1:
                return [error]
            return [answer for argument in arguments for answer in self._run_isolated(kind, [argument])]
        database.execute("RELEASE operation")
        return answers


class _CallFailedError(Exception):
    """A call raised: what its transaction has changed by then has to be rolled back."""


def _call_each(tables: LedgerTables, calls: list[Callable[[LedgerTables], ResultT]]) -> list[ResultT | Exception]:
    """Answer each call; one that fails must have changed nothing, as a read does."""
    answers: list[ResultT | Exception] = []
    for call in calls:
        before = tables.total_changes, tables.snapshot()
        try:
            answers.append(call(tables))
        except sqlite3.Error:
            raise
        except Exception as error:
            if (tables.total_changes, tables.snapshot()) != before:
                raise
            answers.append(error)
    return answers
