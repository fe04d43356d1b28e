"""The durable ledger: SQLite behind one writer thread, with group commit; see ``writer_thread`` for its durability."""

import asyncio
import functools
import logging
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import quote

from prorl_gym.client.wire_models import (
    AcceptedRollout,
    AnalysisResponse,
    LedgerStatus,
    ProblemsResponse,
    RolloutListResponse,
)
from prorl_gym.errors import ProrlError
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.ledger.analysis import LedgerAnalysis
from prorl_gym.rollout.ledger.encoding import encode_rollout
from prorl_gym.rollout.ledger.lease import HEARTBEATS_PER_LEASE, Lease
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig, translated_errors
from prorl_gym.rollout.ledger.open_ledger import decode_text
from prorl_gym.rollout.ledger.retention import RELEASE_SLICE
from prorl_gym.rollout.ledger.statements import encode_batch
from prorl_gym.rollout.ledger.writer_thread import LedgerTables, LedgerWriter
from prorl_gym.rollout.protocol import (
    Delivery,
    Job,
    ListPage,
    ProblemOrder,
    RolloutFilter,
    RolloutState,
    TurnEnded,
)

_LOG = logging.getLogger(__name__)

_COLLECT_SECONDS = 3600.0
_AcceptAnswer = tuple[list[AcceptedRollout], list[Job]]

Params = ParamSpec("Params")
ResultT = TypeVar("ResultT")

_CHEAP_SECONDS = 0.05
"""An answer that took less is not kept."""

_REUSE = 10.0
"""An expensive answer is reused for so many times its own time: open pages take at most a tenth of a core."""

_KEPT_ANSWERS = 64


class LedgerReader:
    def __init__(self, writer: LedgerWriter) -> None:
        self._writer = writer
        self._thread: ThreadPoolExecutor | None = None
        self._connection: sqlite3.Connection | None = None
        self._kept: OrderedDict[Hashable, tuple[Any, float]] = OrderedDict()
        """Answers, and until when they are good."""

    async def ask(self, question: Hashable, call: Callable[[LedgerAnalysis], ResultT]) -> ResultT:
        """Return the answer of a call, or a recent one to the same (equal) question if that took long."""
        tables = self._writer.tables
        if self._writer.open_ledger.mark is None:
            return await self._writer.run(lambda _: call(tables.analysis))
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger-reader")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, question, call)

    async def close(self) -> None:
        """Finish the running question, then close the connection. Idempotent; nothing is asked after it."""
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
            self._thread.shutdown(wait=False)
            self._thread = None

    # --- in the reader thread -----------------------------------------------------------------------------------

    def _answer(self, question: Hashable, call: Callable[[LedgerAnalysis], ResultT]) -> ResultT:
        began = time.monotonic()
        kept = self._kept.get(question)
        if kept is not None and began < kept[1]:
            return kept[0]
        with translated_errors(self._writer.path):
            if self._connection is None:
                address = f"file:{quote(str(self._writer.path.resolve()))}?mode=ro"
                self._connection = sqlite3.connect(address, uri=True, isolation_level=None)
                self._connection.text_factory = decode_text
                self._connection.execute("PRAGMA temp_store = MEMORY")
            self._connection.execute("BEGIN")  # one snapshot for all statements of the call
            try:
                answer = call(LedgerAnalysis(self._connection))
            finally:
                self._connection.execute("ROLLBACK")
        took = time.monotonic() - began
        self._kept.pop(question, None)
        if took > _CHEAP_SECONDS:
            self._kept[question] = answer, time.monotonic() + _REUSE * took
            if len(self._kept) > _KEPT_ANSWERS:
                self._kept.popitem(last=False)
        return answer

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()


class SqliteLedger:
    """Durable memory in a file: when ``add_rollouts`` returns, a SIGKILL cannot lose the rollout.

    Open it with ``SqliteLedger.open``, or give it an open writer, which is closed with it. It collects garbage when it
    is opened and every hour, and on a network file system it renews its lease. Ages are measured by the file's own
    ``LedgerClock`` unless another ``clock`` (seconds) is given. Every method raises ``ShuttingDownError`` once it is
    closed, and ``LedgerError`` where the file fails.
    """

    def __init__(
        self, writer: LedgerWriter, clock: Callable[[], float] | None = None, *, has_periodic_tasks: bool = True
    ) -> None:
        self._writer = writer
        self._reader = LedgerReader(writer)
        self._clock = clock or writer.open_ledger.clock
        self._acknowledged: dict[str | None, int] = {}
        """Up to which cursor all records of a run were acknowledged since the start: reads begin after it."""
        self._periodic_tasks: list[asyncio.Task[None]] = []
        self._lease_thread: ThreadPoolExecutor | None = None
        if has_periodic_tasks:
            collecting = _run_every(_COLLECT_SECONDS, self.collect_garbage, "collecting")
            self._periodic_tasks.append(asyncio.create_task(collecting))
            if (lease := writer.open_ledger.lease) is not None:
                self._lease_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger-lease")
                self._periodic_tasks.append(asyncio.create_task(self._renew_lease(lease)))

    @classmethod
    async def open(cls, config: LedgerConfig, clock: Callable[[], float] | None = None) -> "SqliteLedger":
        """Open or create the file. Raises ``LedgerError``: no directory, damaged, of another schema, or in use."""
        return cls(await LedgerWriter.open(config, clock), clock)

    async def add_rollouts(self, requests: Sequence[RolloutRequest]) -> list[AcceptedRollout]:
        """Write a batch, all or nothing. Raises ``ConflictError`` (another body) or ``LedgerFullError``."""
        answer: _AcceptAnswer = await self._writer.run_batched(
            LedgerTables.add_batches, encode_batch(requests, begin_new=False)
        )
        return answer[0]

    async def add_and_begin(self, requests: Sequence[RolloutRequest]) -> tuple[list[AcceptedRollout], list[Job]]:
        """As ``add_rollouts``; the first attempts at what is new begin in the same commit and are returned too."""
        answer: _AcceptAnswer = await self._writer.run_batched(
            LedgerTables.add_batches, encode_batch(requests, begin_new=True)
        )
        return answer

    async def begin_attempt(self, rollout_id: str) -> Job:
        """Begin the next attempt and return it, once it is stored: a restart uses a fresh number.

        An open attempt is closed as lost. What cannot be read (``Job.unreadable_reason``) does not begin. Raises
        ``ConflictError`` (finished) or ``NotFoundError`` (never accepted).
        """
        return await self._writer.run_batched(LedgerTables.begin_attempts, rollout_id)

    async def log_turn(self, ended: TurnEnded) -> None:
        """Keep a whole turn, in place of this and all later ones of earlier attempts, for ``begin_attempt``.

        A SIGKILL loses none that was kept; a power cut may. They are kept until the terminal record is written, or an
        attempt fails that has added none. Not kept: one of an attempt that is over, one after a gap, what goes beyond a
        rollout's share of the disk, anything once the disk budget is used up.
        """
        await self._writer.run_batched(LedgerTables.log_turns, ended, durable=False)

    async def finish(self, rollout: Rollout) -> int | None:
        """Write the terminal record; return its cursor, or ``None`` when the id has one already: the first stands.

        Raises ``ConflictError`` (the attempt failed before, or a later one has begun), ``CancelledRolloutError`` (it
        was cancelled: only a cancelled record may be written) or ``NotFoundError``.
        """
        return await self._writer.run_batched(LedgerTables.finish, (rollout, encode_rollout(rollout)))

    async def read_records(self, run_id: str | None, after: int, limit: int) -> list[Delivery]:
        """Return terminal records of a run (``None``: of all) past the cursor ``after``, in order.

        Up to ``limit``, and no more once they are ``PAGE_CHARS`` together: readers may be slow, and hold them.
        """
        after = max(after, self._acknowledged_up_to(run_id))
        return await self._writer.run(lambda tables: tables.read_records(run_id, after, limit))

    async def list_rollouts(
        self, wanted: RolloutFilter, state: RolloutState, page: ListPage, running: Sequence[str] = ()
    ) -> RolloutListResponse:
        """Return rollouts that match, sorted, and how many match in each state.

        ``running`` names the pending ones that run; the ``place`` of pending ones is not known here. Finished ones are
        sorted and counted among the newest 100,000 of the run; in the order by ``finished`` all are listed.
        """
        question = ("list", wanted, state, page, tuple(running))
        return await self._reader.ask(question, lambda found: found.list_rollouts(wanted, state, page, running))

    async def analyze(self, wanted: RolloutFilter) -> AnalysisResponse:
        """Aggregate the newest 100,000 finished rollouts of the run, of those that match."""
        return await self._reader.ask(("analyze", wanted), lambda found: found.analyze(wanted))

    async def list_problems(
        self, wanted: RolloutFilter, order: ProblemOrder, offset: int, limit: int
    ) -> ProblemsResponse:
        """Return the finished rollouts that match by problem, of the newest 100,000 of the run."""
        question = ("problems", wanted, order, offset, limit)
        return await self._reader.ask(question, lambda found: found.list_problems(wanted, order, offset, limit))

    async def acknowledge(self, run_id: str | None, cursor: int) -> int:
        """Release the records of a run (``None``: of all) up to this cursor; return how many that were."""
        last = self._writer.tables.counters.cursor
        cursor = min(cursor, last)  # what ends later was not received yet
        after = self._acknowledged_up_to(run_id)

        def release(tables: LedgerTables) -> list[int]:
            return tables.retention.acknowledge(run_id, after, cursor, self._clock())

        released = 0
        more = cursor > after
        while more:
            part = await self._writer.run(release, urgent=True)
            released += len(part)
            more = len(part) == RELEASE_SLICE
            after = part[-1] if part else after
        self._acknowledged[run_id] = max(cursor, self._acknowledged.get(run_id, 0))
        return released

    async def acknowledge_rollouts(self, rollout_ids: Sequence[str]) -> int:
        """Release the records of these; unknown and unfinished ids are ignored. Return how many that were."""
        released = 0
        for start in range(0, len(rollout_ids), RELEASE_SLICE):
            names = rollout_ids[start : start + RELEASE_SLICE]
            now = self._clock()
            part = await self._writer.run(
                lambda tables, names=names, now=now: tables.retention.acknowledge_rollouts(names, now), urgent=True
            )
            released += len(part)
        return released

    def _acknowledged_up_to(self, run_id: str | None) -> int:
        return max(self._acknowledged.get(run_id, 0), self._acknowledged.get(None, 0))

    async def usage(self) -> LedgerStatus:
        await asyncio.sleep(0)  # other tasks run between two calls
        return self._writer.tables.usage

    async def collect_garbage(self) -> int:
        """Release expired records and delete old tombstones; return how many records this released."""
        now = self._clock()
        released = 0
        more = True
        while more:
            part = await self._writer.run(lambda tables: tables.retention.collect_garbage(now), urgent=True)
            released, more = released + part.records, part.more
        opened = self._writer.open_ledger
        await self._writer.run(lambda _: opened.clock.save(opened.connection))
        return released

    @staticmethod
    def _in_writer(
        method: Callable[Concatenate[LedgerTables, Params], ResultT], *, urgent: bool = False
    ) -> "Callable[Concatenate[SqliteLedger, Params], Coroutine[Any, Any, ResultT]]":
        """Return a call of the tables, with its parameters and docstring, that the writer thread runs."""

        @functools.wraps(method)
        async def call(self: "SqliteLedger", *args: Params.args, **kwargs: Params.kwargs) -> ResultT:
            return await self._writer.run(lambda tables: method(tables, *args, **kwargs), urgent=urgent)

        return call

    recover = _in_writer(LedgerTables.recover)
    pending_jobs = _in_writer(LedgerTables.pending_jobs)
    next_jobs = _in_writer(LedgerTables.next_jobs)
    withdraw_attempts = _in_writer(LedgerTables.withdraw_attempts)
    fail_attempt = _in_writer(LedgerTables.fail_attempt)
    cancel = _in_writer(LedgerTables.cancel, urgent=True)
    get = _in_writer(LedgerTables.get)
    requests = _in_writer(LedgerTables.requests)
    summaries = _in_writer(LedgerTables.summaries)
    unacknowledged = _in_writer(LedgerTables.unacknowledged)
    set_demand = _in_writer(LedgerTables.set_demand, urgent=True)
    demands = _in_writer(LedgerTables.demands)
    set_policy_version = _in_writer(LedgerTables.set_policy_version, urgent=True)
    policy_versions = _in_writer(LedgerTables.policy_versions)

    async def close(self) -> None:
        """Write what is queued, then close the file and free it for another process. Idempotent."""
        for timer in self._periodic_tasks:
            timer.cancel()
        await asyncio.gather(*self._periodic_tasks, return_exceptions=True)
        if self._lease_thread is not None:
            self._lease_thread.shutdown(wait=False)
        await self._reader.close()  # before the writer frees the file for another process
        await self._writer.close()

    async def _renew_lease(self, lease: Lease) -> None:
        async def renew() -> None:
            await asyncio.get_running_loop().run_in_executor(self._lease_thread, lease.renew)

        await asyncio.sleep(lease.seconds / HEARTBEATS_PER_LEASE)  # taking it was the first
        await _run_every(lease.seconds / HEARTBEATS_PER_LEASE, renew, "renewing the lease")


async def _run_every(seconds: float, act: Callable[[], Awaitable[object]], what: str) -> None:
    """Repeat an action; what it raises is logged, since the next time may be better."""
    while True:
        try:
            await act()
        except (ProrlError, OSError) as error:
            _LOG.warning("%s failed: %s", what, error)
        except Exception:  # a defect must not end the heartbeat
            _LOG.exception("%s failed", what)
        await asyncio.sleep(seconds)
