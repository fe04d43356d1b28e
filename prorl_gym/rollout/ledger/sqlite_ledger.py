"""The durable ledger: SQLite behind one writer thread, with group commit; see ``writer_thread`` for its durability."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from prorl_gym.client.wire_models import (
    AcceptedRollout,
    AnalysisResponse,
    LedgerStatus,
    ProblemsResponse,
    RolloutListResponse,
    RolloutSummary,
    Unacknowledged,
)
from prorl_gym.demand import Demand
from prorl_gym.errors import CancelReason, ProrlError
from prorl_gym.records import Retry, Rollout, RolloutRequest
from prorl_gym.rollout.ledger.encoding import encode_rollout
from prorl_gym.rollout.ledger.lease import HEARTBEATS_PER_LEASE, Lease
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.ledger.reader_thread import LedgerReader
from prorl_gym.rollout.ledger.retention import RELEASE_SLICE, ReleaseSlice
from prorl_gym.rollout.ledger.statements import Batch
from prorl_gym.rollout.ledger.writer_thread import LedgerTables, LedgerWriter
from prorl_gym.rollout.protocol import (
    Delivery,
    Job,
    ListPage,
    ProblemOrder,
    RecoveredRollout,
    RolloutFilter,
    RolloutState,
    TurnEnded,
)

_LOG = logging.getLogger(__name__)

_COLLECT_SECONDS = 3600.0
_AcceptAnswer = tuple[list[AcceptedRollout], list[Job]]


class SqliteLedger:
    """``Ledger`` in a file. Open it with ``SqliteLedger.open``, or give it an open writer.

    It collects garbage when it is opened and every hour, and on a network file system it renews its lease.

    Args:
        writer: runs the statements; closed with the ledger.
        clock: seconds by which ages are measured; the file's own (``LedgerClock``) by default.
        has_periodic_tasks: whether it collects garbage and renews its lease by itself.
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
            self._start_periodic_tasks()

    @classmethod
    async def open(cls, config: LedgerConfig, clock: Callable[[], float] | None = None) -> "SqliteLedger":
        """Open the file, or make it.

        Args:
            config: where, and how long it keeps what.
            clock: seconds by which ages are measured; the file's own (``LedgerClock``) by default.

        Raises:
            LedgerError: directory missing or not writable, file damaged, of another schema, or in use by another
                process, network file system.
        """
        return cls(await LedgerWriter.open(config, clock), clock)

    def _start_periodic_tasks(self) -> None:
        self._periodic_tasks.append(
            asyncio.create_task(_run_every(_COLLECT_SECONDS, self.collect_garbage, "collecting"))
        )
        lease = self._writer.open_ledger.lease
        if lease is not None:
            self._lease_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger-lease")
            self._periodic_tasks.append(asyncio.create_task(self._renew_lease(lease)))

    async def add_rollouts(self, requests: Sequence[RolloutRequest]) -> list[AcceptedRollout]:
        """See ``Ledger.add_rollouts``."""
        answer: _AcceptAnswer = await self._writer.run_batched(_accept, Batch.from_requests(requests, begin_new=False))
        return answer[0]

    async def add_and_begin(self, requests: Sequence[RolloutRequest]) -> tuple[list[AcceptedRollout], list[Job]]:
        """See ``Ledger.add_and_begin``."""
        answer: _AcceptAnswer = await self._writer.run_batched(_accept, Batch.from_requests(requests, begin_new=True))
        return answer

    async def pending_jobs(self) -> list[Job]:
        """See ``Ledger.pending_jobs``."""
        return await self._writer.run(lambda tables: tables.store.queries.pending_jobs())

    async def recover(self, *, keep_open: bool = False) -> list[RecoveredRollout]:
        """See ``Ledger.recover``."""
        return await self._writer.run(lambda tables: tables.store.recover(keep_open=keep_open))

    async def next_jobs(self, rollout_ids: Sequence[str]) -> list[Job]:
        """See ``Ledger.next_jobs``."""
        return await self._writer.run(lambda tables: tables.store.queries.next_jobs(rollout_ids))

    async def begin_attempt(self, rollout_id: str) -> Job:
        """See ``Ledger.begin_attempt``."""
        return await self._writer.run_batched(_begin, rollout_id)

    async def withdraw_attempts(self, rollout_ids: Sequence[str]) -> None:
        """See ``Ledger.withdraw_attempts``."""
        await self._writer.run(lambda tables: tables.store.withdraw_attempts(rollout_ids))

    async def log_turn(self, ended: TurnEnded) -> None:
        """See ``Ledger.log_turn``."""
        await self._writer.run_batched(_log_turns, ended, durable=False)

    async def fail_attempt(self, rollout_id: str, retry: Retry) -> None:
        """See ``Ledger.fail_attempt``."""
        await self._writer.run(lambda tables: tables.store.fail_attempt(rollout_id, retry))

    async def finish(self, rollout: Rollout) -> int | None:
        """See ``Ledger.finish``."""
        return await self._writer.run_batched(_finish, (rollout, encode_rollout(rollout)))

    async def get(self, rollout_id: str) -> Rollout | RolloutRequest:
        """See ``Ledger.get``."""
        return await self._writer.run(lambda tables: tables.store.queries.get(rollout_id))

    async def requests(self, rollout_ids: Sequence[str]) -> list[RolloutRequest]:
        """See ``Ledger.requests``."""
        return await self._writer.run(lambda tables: tables.store.queries.requests(rollout_ids))

    async def read_records(self, run_id: str | None, after: int, limit: int) -> list[Delivery]:
        """See ``Ledger.read_records``."""
        after = max(after, self._acknowledged_up_to(run_id))
        return await self._writer.run(lambda tables: tables.store.queries.read_records(run_id, after, limit))

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
        return await self._writer.run(
            lambda tables: tables.store.queries.summaries(run_id, groups, prefix, after, limit, newest_first)
        )

    async def list_rollouts(
        self, wanted: RolloutFilter, state: RolloutState, page: ListPage, running: Sequence[str] = ()
    ) -> RolloutListResponse:
        """See ``Ledger.list_rollouts``."""
        question = ("list", wanted, state, page, tuple(running))
        return await self._reader.ask(question, lambda found: found.list_rollouts(wanted, state, page, running))

    async def analyze(self, wanted: RolloutFilter) -> AnalysisResponse:
        """See ``Ledger.analyze``."""
        return await self._reader.ask(("analyze", wanted), lambda found: found.analyze(wanted))

    async def list_problems(
        self, wanted: RolloutFilter, order: ProblemOrder, offset: int, limit: int
    ) -> ProblemsResponse:
        """See ``Ledger.list_problems``."""
        question = ("problems", wanted, order, offset, limit)
        return await self._reader.ask(question, lambda found: found.list_problems(wanted, order, offset, limit))

    async def acknowledge(self, run_id: str | None, cursor: int) -> int:
        """See ``Ledger.acknowledge``."""
        last = self._writer.tables.store.counters.cursor
        cursor = min(cursor, last)  # what ends later was not received yet
        after = self._acknowledged_up_to(run_id)

        def release(tables: LedgerTables) -> ReleaseSlice:
            return tables.retention.acknowledge(run_id, after, cursor, self._clock())

        released = 0
        more = cursor > after
        while more:
            part = await self._writer.run(release, urgent=True)
            released, after, more = released + part.count, part.last, part.more
        self._acknowledged[run_id] = max(cursor, self._acknowledged.get(run_id, 0))
        return released

    async def acknowledge_rollouts(self, rollout_ids: Sequence[str]) -> int:
        """See ``Ledger.acknowledge_rollouts``."""
        released = 0
        for start in range(0, len(rollout_ids), RELEASE_SLICE):
            names = rollout_ids[start : start + RELEASE_SLICE]
            now = self._clock()
            part = await self._writer.run(
                lambda tables, names=names, now=now: tables.retention.acknowledge_rollouts(names, now), urgent=True
            )
            released += part.count
        return released

    async def unacknowledged(self, run_id: str | None) -> Unacknowledged:
        """See ``Ledger.unacknowledged``."""

        def read(tables: LedgerTables) -> Unacknowledged:
            found = tables.store.queries.unacknowledged(run_id)
            return Unacknowledged(cursor=tables.store.counters.cursor, rollouts=tuple(found))

        return await self._writer.run(read)

    def _acknowledged_up_to(self, run_id: str | None) -> int:
        return max(self._acknowledged.get(run_id, 0), self._acknowledged.get(None, 0))

    async def set_demand(self, run_id: str, demand: Demand | None) -> None:
        """See ``Ledger.set_demand``."""
        await self._writer.run(lambda tables: tables.retention.set_demand(run_id, demand, self._clock()), urgent=True)

    async def demands(self) -> Mapping[str, Demand]:
        """See ``Ledger.demands``. One of a later release that this one cannot read is left out, and logged."""
        readable: dict[str, Demand] = {}
        for run_id, found in (await self._writer.run(lambda tables: tables.store.queries.demands())).items():
            if isinstance(found, Demand):
                readable[run_id] = found
            else:
                _LOG.error("the demand of run %s cannot be read: its rollouts are all made", run_id)
        return readable

    async def set_policy_version(self, pool: str, version: int) -> None:
        """See ``Ledger.set_policy_version``."""
        await self._writer.run(lambda tables: tables.retention.set_policy_version(pool, version), urgent=True)

    async def policy_versions(self) -> Mapping[str, int]:
        """See ``Ledger.policy_versions``."""
        return await self._writer.run(lambda tables: tables.store.queries.policy_versions())

    async def usage(self) -> LedgerStatus:
        """See ``Ledger.usage``."""
        await asyncio.sleep(0)  # other tasks run between two calls
        return self._writer.tables.usage

    async def collect_garbage(self) -> int:
        """See ``Ledger.collect_garbage``."""
        now = self._clock()
        released = 0
        more = True
        while more:
            part = await self._writer.run(lambda tables: tables.retention.collect_garbage(now), urgent=True)
            released, more = released + part.records, part.more
        opened = self._writer.open_ledger
        await self._writer.run(lambda _: opened.clock.save(opened.connection))
        return released

    async def cancel(self, rollout_ids: Sequence[str], reason: CancelReason) -> list[str]:
        """See ``Ledger.cancel``."""
        return await self._writer.run(lambda tables: tables.store.cancel(rollout_ids, reason), urgent=True)

    async def close(self) -> None:
        """Write what waits, then close the file and free it for another process. Idempotent."""
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


def _accept(tables: LedgerTables, batches: list[Batch]) -> list[_AcceptAnswer | ProrlError]:
    return tables.store.add_batches(batches)


def _begin(tables: LedgerTables, rollout_ids: list[str]) -> list[Job | ProrlError]:
    return tables.store.begin_attempts(rollout_ids)


def _log_turns(tables: LedgerTables, entries: list[TurnEnded]) -> list[None]:
    return tables.store.log_turns(entries)


def _finish(tables: LedgerTables, records: list[tuple[Rollout, str]]) -> list[int | ProrlError | None]:
    return tables.store.finish(records)


async def _run_every(seconds: float, act: Callable[[], Awaitable[object]], what: str) -> None:
    """Do it now and again and again; what it raises is logged, since the next time may be better."""
    while True:
        try:
            await act()
        except (ProrlError, OSError) as error:
            _LOG.warning("%s failed: %s", what, error)
        except Exception:  # a defect must not end the heartbeat
            _LOG.exception("%s failed", what)
        await asyncio.sleep(seconds)
