"""A ledger in memory, for tests: ``SqliteLedger`` over SQLite's ``:memory:``."""

import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import ParamSpec, TypeVar

from prorl_gym.client.wire_models import AcceptedRollout
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.ledger.open_ledger import LedgerClock, OpenLedger
from prorl_gym.rollout.ledger.sql_schema import create_tables
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.ledger.writer_thread import LedgerTables, LedgerWriter
from prorl_gym.rollout.protocol import Job

_P = ParamSpec("_P")
_R = TypeVar("_R")


class MemoryLedger(SqliteLedger):
    """``SqliteLedger`` in memory. Its statements run on the event loop; it does not collect garbage by itself."""

    def __init__(self) -> None:
        config = LedgerConfig(path=Path(":memory:"))
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        create_tables(connection)
        opened = OpenLedger(connection, LedgerClock.resume(connection))
        tables = LedgerTables(opened, config, time.monotonic)
        self._memory_writer = _MemoryWriter(config.path, _Inline(), opened, tables)
        super().__init__(self._memory_writer, time.monotonic, has_periodic_tasks=False)

    async def add_and_begin(self, requests: Sequence[RolloutRequest]) -> tuple[list[AcceptedRollout], list[Job]]:
        """Call ``add_rollouts``, so that a test has to replace only that."""
        answers = await self.add_rollouts(requests)
        fresh = dict.fromkeys(answer.rollout_id for answer in answers if not answer.duplicate)
        return answers, [await SqliteLedger.begin_attempt(self, rollout_id) for rollout_id in fresh]

    def reopen(self) -> None:
        """Work again after ``close``, as a file does at the next start of a service."""
        self._memory_writer.reopen()


class _MemoryWriter(LedgerWriter):
    """Keeps the connection when it is closed: with it the content would be lost."""

    async def close(self) -> None:
        self._closed = True

    def reopen(self) -> None:
        self._closed = False


class _Inline(Executor):
    """Runs each call at once, in the caller's thread."""

    def submit(self, fn: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        done: Future[_R] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done
