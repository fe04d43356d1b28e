"""Runs lists and aggregates beside the ledger's writer, so that a long one delays no commit.

On a local disk they have a connection of their own, which the write-ahead log gives a snapshot. A rollback journal (on
a network file system) has no snapshots, and a ledger in memory has one connection: there they run in the writer thread.
"""

import asyncio
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

from prorl_gym.rollout.ledger.analysis import LedgerAnalysis
from prorl_gym.rollout.ledger.ledger_config import translated_errors
from prorl_gym.rollout.ledger.open_ledger import decode_text
from prorl_gym.rollout.ledger.writer_thread import LedgerWriter

ResultT = TypeVar("ResultT")

_CHEAP_SECONDS = 0.05
"""An answer that took less is made again at every call."""

_REUSE = 10.0
"""A dear answer is reused for so many times the time that it took: open pages keep a tenth of a core busy at most."""

_KEPT_ANSWERS = 64


@dataclass(frozen=True, slots=True)
class _KeptAnswer:
    answer: Any
    good_until: float


class LedgerReader:
    """Answers questions about the ledger, one at a time.

    Args:
        writer: of the open file. The reader is closed before it.
    """

    def __init__(self, writer: LedgerWriter) -> None:
        self._writer = writer
        self._thread: ThreadPoolExecutor | None = None
        self._connection: sqlite3.Connection | None = None
        self._kept: OrderedDict[Hashable, _KeptAnswer] = OrderedDict()

    async def ask(self, question: Hashable, call: Callable[[LedgerAnalysis], ResultT]) -> ResultT:
        """Return the answer of a call, or a recent one to the same question if that took long.

        Args:
            question: equal for calls with equal answers.
            call: reads.

        Raises:
            ShuttingDownError: the ledger is closed.
            LedgerError: the file cannot be read.
        """
        tables = self._writer.tables
        if self._writer.open_ledger.sidecars is None:
            return await self._writer.run(lambda _: call(tables.store.analysis))
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger-reader")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, question, call)

    async def close(self) -> None:
        """Finish the question in hand, then close the connection. Idempotent; nothing is asked after it."""
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
            self._thread.shutdown(wait=False)
            self._thread = None

    # --- in the reader thread -----------------------------------------------------------------------------------

    def _answer(self, question: Hashable, call: Callable[[LedgerAnalysis], ResultT]) -> ResultT:
        began = time.monotonic()
        kept = self._kept.get(question)
        if kept is not None and began < kept.good_until:
            return kept.answer
        with translated_errors(self._writer.path):
            self._connection = self._connection or self._connect()
            self._connection.execute("BEGIN")  # one snapshot for all statements of the call
            try:
                answer = call(LedgerAnalysis(self._connection))
            finally:
                self._connection.execute("ROLLBACK")
        took = time.monotonic() - began
        self._kept.pop(question, None)
        if took > _CHEAP_SECONDS:
            self._kept[question] = _KeptAnswer(answer, time.monotonic() + _REUSE * took)
            if len(self._kept) > _KEPT_ANSWERS:
                self._kept.popitem(last=False)
        return answer

    def _connect(self) -> sqlite3.Connection:
        address = f"file:{quote(str(self._writer.path.resolve()))}?mode=ro"
        connection = sqlite3.connect(address, uri=True, isolation_level=None)
        connection.text_factory = decode_text
        connection.execute("PRAGMA temp_store = MEMORY")
        return connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
