"""A ledger with its writer, for tests that look into its file or let its disk hang."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.ledger.writer_thread import LedgerWriter, WriterLimits


async def open_with_writer(
    config: LedgerConfig, limits: WriterLimits | None = None
) -> tuple[SqliteLedger, LedgerWriter]:
    writer = await LedgerWriter.open(config, limits=limits)
    return SqliteLedger(writer), writer


@asynccontextmanager
async def ledger_and_writer(config: LedgerConfig) -> AsyncGenerator[tuple[SqliteLedger, LedgerWriter]]:
    ledger, writer = await open_with_writer(config)
    try:
        yield ledger, writer
    finally:
        await ledger.close()


async def query(writer: LedgerWriter, statement: str) -> Any:
    """Return the first value that a statement yields on the writer's own connection."""
    execute = writer.open_ledger.connection.execute
    return await writer.run(lambda _: (execute(statement).fetchone() or [None])[0])


async def limit_pages(writer: LedgerWriter, more: int) -> None:
    """Let the file grow by so many pages, then be full."""
    pages = await query(writer, "PRAGMA page_count")
    await query(writer, f"PRAGMA max_page_count = {pages + more}")


async def lift_page_limit(writer: LedgerWriter) -> None:
    await query(writer, "PRAGMA max_page_count = 1000000")


@asynccontextmanager
async def hanging_disk(writer: LedgerWriter) -> AsyncGenerator[None]:
    """Let the disk answer nothing during the block: a transaction hangs in the writer's thread."""
    hangs, thaw = threading.Event(), threading.Event()

    def hang(_: object) -> None:
        hangs.set()
        thaw.wait()

    hanging = asyncio.create_task(writer.run(hang))
    await asyncio.to_thread(hangs.wait)
    try:
        yield
    finally:
        thaw.set()
        await hanging
