"""The ledger's one writer thread, with group commit.

Every call becomes an operation in a queue. The writer takes all that wait, runs them in one transaction and syncs
once; only then do the callers hear. A burst of calls therefore costs one disk sync, and what a caller has heard
survives a SIGKILL and a power cut.

Operations of one kind that wait together are run together. Nobody can tell the difference: none of their callers has
heard an answer yet, so they have no order among each other.

Urgent operations (cancel, acknowledge, demand) go first, and are withdrawn when the disk does not answer in time: the
writer tries the disk before it commits one, and commits none that was withdrawn until then. Its caller thus hears that
nothing was done, while that is still true.
"""

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

from prorl_gym.errors import ShuttingDownError
from prorl_gym.rollout.ledger_file import (
    DamagedLedgerError,
    DiskFullError,
    LedgerConfig,
    StuckDiskError,
    translated,
)
from prorl_gym.rollout.ledger_open import OpenLedger, open_ledger_file


class Counted(Protocol):
    """Tables with numbers that are known without asking the file, and have to be put back when it is rolled back."""

    def look(self) -> None:
        """Note what the tables hold, at the end of a transaction."""
        ...

    def remember(self) -> Any:
        """Return the numbers."""
        ...

    def put_back(self, numbers: Any) -> None:
        """Have them again."""
        ...


TablesT = TypeVar("TablesT", bound=Counted)
ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")

_BATCH = 512
"""Operations in one transaction: bounds how long the first of a batch waits for the last."""


_URGENT_SECONDS = 10.0
"""How long an urgent operation may take. Seconds are normal for no transaction."""


@dataclass(slots=True, eq=False)
class _Operation:
    kind: Callable[[Any, list[Any]], Sequence[Any]]
    urgent: bool
    argument: Any
    done: asyncio.Future[Any]
    state: Literal["open", "committing", "withdrawn"] = "open"


@dataclass(frozen=True, slots=True)
class _Calls:
    """Operations of one kind that are run together."""

    kind: Any
    urgent: bool
    operations: list[_Operation]

    @property
    def arguments(self) -> list[Any]:
        return [operation.argument for operation in self.operations]


class LedgerWriter(Generic[TablesT]):
    """Runs calls in its thread. Open one with ``LedgerWriter.open``.

    Args:
        path: for messages.
        thread: with one worker, the one that opened the file.
        opened: the file.
        tables: what the calls get.
    """

    def __init__(
        self,
        path: Path,
        thread: ThreadPoolExecutor,
        opened: OpenLedger,
        tables: TablesT,
    ) -> None:
        self.opened = opened
        self._path = path
        self._thread = thread
        self._tables = tables
        self._waiting: list[_Operation] = []
        self._began: float | None = None
        """When the transaction that is under way was handed to the thread."""
        self._states = threading.Lock()
        self._writer: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    async def open(
        cls,
        config: LedgerConfig,
        tables: Callable[[OpenLedger], TablesT],
    ) -> "LedgerWriter[TablesT]":
        """Open the file in a new thread.

        Raises:
            LedgerError: it cannot be used.
        """

        def begin() -> tuple[OpenLedger, TablesT]:
            opened = open_ledger_file(config)
            try:
                with translated(config.path):
                    return opened, tables(opened)
            except BaseException:
                opened.close()
                raise

        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        try:
            opened, made = await asyncio.get_running_loop().run_in_executor(thread, begin)
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(config.path, thread, opened, made)

    @property
    def tables(self) -> TablesT:
        """The tables, for what they know without asking the file.

        Raises:
            ShuttingDownError: the ledger is closed.
        """
        self._must_be_open()
        return self._tables

    async def one(self, call: Callable[[TablesT], ResultT], *, urgent: bool = False) -> ResultT:
        """Queue a call; return or raise what it did, once that is on the disk. See ``together``."""
        return await self.together(_each, call, urgent=urgent)

    async def together(
        self,
        kind: Callable[[TablesT, list[ArgumentT]], Sequence[ResultT | Exception]],
        argument: ArgumentT,
        *,
        urgent: bool = False,
    ) -> ResultT:
        """Queue a call that is made for all that wait at once; return or raise what it answers to this one.

        Args:
            kind: answers a list of arguments. An argument that is answered by an exception must have changed nothing.
            argument: this caller's.
            urgent: it makes room, or says what is not wanted any more. On a full disk it may use the reserve, and a
                disk that does not answer is an error after ``_URGENT_SECONDS``.

        Raises:
            ShuttingDownError: the ledger is closed.
            LedgerError: nothing could be written.
        """
        self._must_be_open()
        loop = asyncio.get_running_loop()
        if urgent and self._began is not None and loop.time() - self._began > _URGENT_SECONDS:
            raise self._stuck()
        operation = _Operation(kind, urgent, argument, loop.create_future())
        self._waiting.append(operation)
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all(), name="ledger-writer")
        # Neither cancels the future: a caller that goes away must not make the writer trip over it.
        if not urgent:
            return await asyncio.shield(operation.done)
        await asyncio.wait([operation.done], timeout=_URGENT_SECONDS)
        return operation.done.result() if operation.done.done() else self._withdraw(operation)

    def _withdraw(self, operation: _Operation) -> Any:
        """Take an operation back, unless its commit is under way.

        Raises:
            StuckDiskError: in any case.
        """
        with self._states:
            is_committing = operation.state == "committing"
            if not is_committing:
                operation.state = "withdrawn"
        if operation in self._waiting:
            self._waiting.remove(operation)
        raise self._stuck("It may be done all the same. " if is_committing else "Nothing was done. ")

    def _stuck(self, outcome: str = "Nothing was done. ") -> StuckDiskError:
        what = f"{self._path}: the disk does not answer."
        return StuckDiskError(what, f"{outcome}Look at the disk, and send it again.")

    async def close(self) -> None:
        """Write what waits, then close the file and free it for another process. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._writer is not None:
            await asyncio.wait({self._writer})
        await asyncio.get_running_loop().run_in_executor(self._thread, self.opened.close)
        self._thread.shutdown(wait=False)

    def _must_be_open(self) -> None:
        if self._closed:
            raise ShuttingDownError(f"{self._path}: the ledger is closed.")

    async def _write_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            self._waiting.sort(key=lambda operation: not operation.urgent)
            batch, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
            kinds: dict[Any, list[_Operation]] = {}
            for operation in batch:
                kinds.setdefault((operation.kind, operation.urgent), []).append(operation)
            calls = [_Calls(kind, urgent, same) for (kind, urgent), same in kinds.items()]
            self._began = loop.time()
            try:
                results = await loop.run_in_executor(self._thread, self._transaction, calls)
            except Exception as error:  # not even a rollback was possible
                results = [[error] * len(same) for same in kinds.values()]
            self._began = None
            for same, answers in zip(kinds.values(), results, strict=True):
                for operation, answer in zip(same, answers, strict=True):
                    _deliver(operation.done, answer)
        self._writer = None

    # --- in the writer thread -----------------------------------------------------------------------------------

    def _transaction(self, calls: list[_Calls]) -> list[Sequence[Any]]:
        """Run the calls in one commit. Failures are among the results."""
        try:
            return self._commit(calls)
        except DiskFullError as full:
            urgent = [one for one in calls if one.urgent]
            answers = iter(self._from_reserve(urgent, full))
            return [next(answers) if one.urgent else [full] * len(one.operations) for one in calls]
        except DamagedLedgerError as error:
            if sum(len(one.operations) for one in calls) == 1:
                return [[error]]
            # After a look at a damaged page SQLite refuses every write of its transaction: give each call its own.
            alone = [[_Calls(one.kind, one.urgent, [each]) for each in one.operations] for one in calls]
            return [[self._transaction([single])[0][0] for single in same] for same in alone]
        except Exception as error:  # the commit failed: no caller may take anything for kept
            return [[error] * len(one.operations) for one in calls]

    def _from_reserve(self, calls: list[_Calls], full: DiskFullError) -> list[Sequence[Any]]:
        """Run calls once more, in the space that is held for them."""
        guard = self.opened.guard
        if guard is None or not calls:
            return [[full] * len(one.operations) for one in calls]
        try:
            with guard.reserve.lent() as lent, translated(self._path):
                if not lent:
                    raise full
                # The log can then be written from its beginning, in blocks that it has already.
                self.opened.connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                return self._commit(calls)
        except Exception as error:
            return [[error] * len(one.operations) for one in calls]

    def _commit(self, calls: list[_Calls]) -> list[Sequence[Any]]:
        database = self.opened.connection
        numbers = self._tables.remember()
        try:
            with translated(self._path):
                self.opened.begin()
                results = [self._together(one.kind, one.arguments) for one in calls]
                self._tables.look()
                self._enter_commit([each for one in calls if one.urgent for each in one.operations])
                self.opened.commit()
                return results
        except Exception:
            self._tables.put_back(numbers)
            if database.in_transaction:
                with translated(self._path):
                    database.execute("ROLLBACK")
            raise

    def _enter_commit(self, urgent: list[_Operation]) -> None:
        """Pass the point after which none of these can be withdrawn.

        Raises:
            StuckDiskError: one was. What is in the same transaction is not kept either.
        """
        if not urgent:
            return
        self.opened.probe()
        with self._states:
            if any(operation.state == "withdrawn" for operation in urgent):
                raise self._stuck()
            for operation in urgent:
                operation.state = "committing"

    def _together(self, kind: Any, arguments: list[Any]) -> Sequence[Any]:
        """Answer all of a kind. Should that fail by one of them, each is answered alone."""
        try:
            return self._undone_by_failure(lambda: kind(self._tables, arguments))
        except sqlite3.Error:
            raise  # the file is at fault, not the call: the whole batch must be told
        except Exception as error:
            if len(arguments) == 1:
                return [error]
            return [answer for argument in arguments for answer in self._together(kind, [argument])]

    def _undone_by_failure(self, call: Callable[[], ResultT]) -> ResultT:
        database = self.opened.connection
        numbers = self._tables.remember()
        database.execute("SAVEPOINT operation")
        try:
            result = call()
        except sqlite3.Error:
            raise
        except Exception:
            database.execute("ROLLBACK TO operation")
            database.execute("RELEASE operation")
            self._tables.put_back(numbers)
            raise
        database.execute("RELEASE operation")
        return result


def _each(tables: TablesT, calls: list[Callable[[TablesT], ResultT]]) -> list[ResultT]:
    return [call(tables) for call in calls]


def _deliver(future: asyncio.Future[Any], result: Any) -> None:
    if isinstance(result, Exception):
        future.set_exception(result)
        future.exception()  # seen: a caller that went away is no reason for a warning
    else:
        future.set_result(result)
