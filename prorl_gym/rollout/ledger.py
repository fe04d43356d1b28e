"""The durable ledger: SQLite behind one writer thread, with group commit; ``ledger_writer`` says how it is durable."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from prorl_gym.demand import Demand
from prorl_gym.errors import CancelReason, ProrlError
from prorl_gym.records import Retry, Rollout, RolloutRequest
from prorl_gym.rollout.encoding import encode_rollout
from prorl_gym.rollout.ledger_file import LedgerConfig
from prorl_gym.rollout.ledger_lease import BEATS, Lease
from prorl_gym.rollout.ledger_open import OpenLedger
from prorl_gym.rollout.ledger_retention import Retention, Slice, used_bytes
from prorl_gym.rollout.ledger_store import Batch, LedgerStore, Numbers
from prorl_gym.rollout.ledger_writer import LedgerWriter
from prorl_gym.rollout.protocol import Accepted, Delivery, Job, LedgerUsage, Member, Pending

_LOG = logging.getLogger(__name__)

_COLLECT_SECONDS = 3600.0
_Answer = tuple[list[Accepted], list[Job]]


class _Tables:
    def __init__(self, store: LedgerStore, retention: Retention) -> None:
        self.store = store
        self.retention = retention
        self.usage = retention.usage()
        """As of the last transaction: a disk that does not answer must not keep anybody from asking."""

    def look(self) -> None:
        """See ``Counted``."""
        self.usage = self.retention.usage()

    def remember(self) -> tuple[Numbers, LedgerUsage]:
        """See ``Counted``."""
        return self.store.numbers, self.usage

    def put_back(self, numbers: tuple[Numbers, LedgerUsage]) -> None:
        """See ``Counted``."""
        self.store.numbers, self.usage = numbers


class SqliteLedger:
    """``Ledger`` in a file. Open it with ``SqliteLedger.open``.

    It looks after itself: it collects when it is opened and every hour, and on a network file system it renews its
    lease.
    """

    def __init__(self, writer: LedgerWriter[_Tables], clock: Callable[[], float]) -> None:
        self._writer = writer
        self._clock = clock
        self._released: dict[str | None, int] = {}
        """Up to which cursor all records of a run were acknowledged since the start: they need not be looked at."""
        self._timers = [asyncio.create_task(_every(_COLLECT_SECONDS, self.collect, "collecting"))]
        self._heart: ThreadPoolExecutor | None = None
        lease = writer.opened.lease
        if lease is not None:
            self._heart = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger-lease")
            self._timers.append(asyncio.create_task(self._beat(lease)))

    @classmethod
    async def open(cls, config: LedgerConfig, clock: Callable[[], float] | None = None) -> "SqliteLedger":
        """Open the file, or make it.

        Args:
            config: where, and how long it keeps what.
            clock: seconds by which ages are measured; the ledger's own (``ledger_clock``) by default.

        Raises:
            LedgerError: directory missing or not writable, file damaged, of a newer schema, or in use by another
                process, network file system.
        """

        def tables(opened: OpenLedger) -> _Tables:
            db = opened.connection
            store = LedgerStore(db, clock or opened.clock, lambda: config.budget_bytes - used_bytes(db))
            return _Tables(store, Retention(db, store, config))

        writer = await LedgerWriter[_Tables].open(config, tables)
        return cls(writer, clock or writer.opened.clock)

    async def accept(self, requests: Sequence[RolloutRequest]) -> list[Accepted]:
        """See ``Ledger.accept``."""
        answer: _Answer = await self._writer.together(_accept, Batch.of(requests, begin=False))
        return answer[0]

    async def accept_and_begin(self, requests: Sequence[RolloutRequest]) -> tuple[list[Accepted], list[Job]]:
        """See ``Ledger.accept_and_begin``."""
        answer: _Answer = await self._writer.together(_accept, Batch.of(requests, begin=True))
        return answer

    async def pending(self) -> list[Job]:
        """See ``Ledger.pending``."""
        return await self._writer.one(lambda tables: tables.store.reads.pending())

    async def recover(self) -> list[Pending]:
        """See ``Ledger.recover``."""
        return await self._writer.one(lambda tables: tables.store.recover())

    async def jobs(self, rollout_ids: Sequence[str]) -> list[Job]:
        """See ``Ledger.jobs``."""
        return await self._writer.one(lambda tables: tables.store.reads.jobs(rollout_ids))

    async def begin(self, rollout_id: str) -> Job:
        """See ``Ledger.begin``."""
        return await self._writer.together(_begin, rollout_id)

    async def withdraw(self, rollout_ids: Sequence[str]) -> None:
        """See ``Ledger.withdraw``."""
        await self._writer.one(lambda tables: tables.store.withdraw(rollout_ids))

    async def fail_attempt(self, rollout_id: str, retry: Retry) -> None:
        """See ``Ledger.fail_attempt``."""
        await self._writer.one(lambda tables: tables.store.fail_attempt(rollout_id, retry))

    async def finish(self, rollout: Rollout) -> int | None:
        """See ``Ledger.finish``."""
        return await self._writer.together(_finish, (rollout, encode_rollout(rollout)))

    async def get(self, rollout_id: str) -> Rollout | RolloutRequest:
        """See ``Ledger.get``."""
        return await self._writer.one(lambda tables: tables.store.reads.get(rollout_id))

    async def requests(self, rollout_ids: Sequence[str]) -> list[RolloutRequest]:
        """See ``Ledger.requests``."""
        return await self._writer.one(lambda tables: tables.store.reads.requests(rollout_ids))

    async def finished(self, run_id: str | None, after: int, limit: int) -> list[Delivery]:
        """See ``Ledger.finished``."""
        after = max(after, self._all_released(run_id))
        return await self._writer.one(lambda tables: tables.store.reads.finished(run_id, after, limit))

    async def members(
        self,
        run_id: str | None = None,
        *,
        groups: Sequence[str] | None = None,
        after: int = 0,
        limit: int = 1000,
        newest_first: bool = False,
    ) -> list[Member]:
        """See ``Ledger.members``."""
        return await self._writer.one(
            lambda tables: tables.store.reads.members(run_id, groups, after, limit, newest_first)
        )

    async def acknowledge(self, run_id: str | None, cursor: int) -> int:
        """See ``Ledger.acknowledge``."""
        last = self._writer.tables.store.numbers.cursor
        cursor = min(cursor, last)  # what ends later was not received yet
        after = self._all_released(run_id)

        def release(tables: _Tables) -> Slice:
            return tables.retention.acknowledge(run_id, after, cursor, self._clock())

        released = 0
        more = cursor > after
        while more:
            part = await self._writer.one(release, urgent=True)
            released, after, more = released + part.count, part.last, part.more
        self._released[run_id] = max(cursor, self._released.get(run_id, 0))
        return released

    def _all_released(self, run_id: str | None) -> int:
        return max(self._released.get(run_id, 0), self._released.get(None, 0))

    async def set_demand(self, run_id: str, demand: Demand | None) -> None:
        """See ``Ledger.set_demand``."""
        await self._writer.one(lambda tables: tables.retention.set_demand(run_id, demand, self._clock()), urgent=True)

    async def demands(self) -> Mapping[str, Demand]:
        """See ``Ledger.demands``. One of a later release that this one cannot read is left out, and logged."""
        readable: dict[str, Demand] = {}
        for run_id, found in (await self._writer.one(lambda tables: tables.store.reads.demands())).items():
            if isinstance(found, Demand):
                readable[run_id] = found
            else:
                _LOG.error("the demand of run %s cannot be read: its rollouts are all made", run_id)
        return readable

    async def set_version(self, pool: str, version: int) -> None:
        """See ``Ledger.set_version``."""
        await self._writer.one(lambda tables: tables.retention.set_version(pool, version), urgent=True)

    async def versions(self) -> Mapping[str, int]:
        """See ``Ledger.versions``."""
        return await self._writer.one(lambda tables: tables.store.reads.versions())

    async def usage(self) -> LedgerUsage:
        """See ``Ledger.usage``."""
        await asyncio.sleep(0)  # who asks again and again leaves others their turn
        return self._writer.tables.usage

    async def collect(self) -> int:
        """See ``Ledger.collect``."""
        now = self._clock()
        released = 0
        more = True
        while more:
            part = await self._writer.one(lambda tables: tables.retention.collect(now), urgent=True)
            released, more = released + part.records, part.more
        opened = self._writer.opened
        await self._writer.one(lambda _: opened.clock.note(opened.connection))
        return released

    async def cancel(self, rollout_ids: Sequence[str], reason: CancelReason) -> list[str]:
        """See ``Ledger.cancel``."""
        return await self._writer.one(lambda tables: tables.store.cancel(rollout_ids, reason), urgent=True)

    async def close(self) -> None:
        """Write what waits, then close the file and free it for another process. Idempotent."""
        for timer in self._timers:
            timer.cancel()
        await asyncio.gather(*self._timers, return_exceptions=True)
        if self._heart is not None:
            self._heart.shutdown(wait=False)
        await self._writer.close()

    async def _beat(self, lease: Lease) -> None:
        async def renew() -> None:
            await asyncio.get_running_loop().run_in_executor(self._heart, lease.renew)

        await asyncio.sleep(lease.seconds / BEATS)  # taking it was the first
        await _every(lease.seconds / BEATS, renew, "renewing the lease")


def _accept(tables: _Tables, batches: list[Batch]) -> list[_Answer | ProrlError]:
    return tables.store.accept(batches)


def _begin(tables: _Tables, rollout_ids: list[str]) -> list[Job | ProrlError]:
    return tables.store.begin(rollout_ids)


def _finish(tables: _Tables, records: list[tuple[Rollout, str]]) -> list[int | ProrlError | None]:
    return tables.store.finish(records)


async def _every(seconds: float, act: Callable[[], Awaitable[object]], what: str) -> None:
    """Do it now and again and again; what it raises is logged, since the next time may be better."""
    while True:
        try:
            await act()
        except (ProrlError, OSError) as error:
            _LOG.warning("%s failed: %s", what, error)
        except Exception:  # a defect must not end the heartbeat
            _LOG.exception("%s failed", what)
        await asyncio.sleep(seconds)
