"""Ledgers of tests that look into the file, let the disk hang, or kill the process that writes."""

import asyncio
import sqlite3
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import sample_records

from prorl_gym.records import Rollout, RolloutRequest, Score
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.ledger.writer_thread import LedgerWriter, WriterLimits

DAY = 86400.0
_CHILD = """
import asyncio, json, os, resource, signal, subprocess, sys
from pathlib import Path
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.ledger import open_ledger, writer_thread
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig, LedgerError, LedgerFullError
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger

def ask(name, size=0):
    return RolloutRequest(rollout_id=name, run_id="run", environment="noop", task={"text": "x" * size})

"""


def child(program: str, path: Path, *arguments: str) -> list[str]:
    """Return the command that runs ``main`` of a program, which opens the ledger in ``sys.argv[1]``."""
    return [sys.executable, "-c", f"{_CHILD}{program}\nasyncio.run(main())", str(path), *arguments]


def ask(rollout_id: str, size: int = 0, run_id: str = "run") -> RolloutRequest:
    return RolloutRequest(rollout_id=rollout_id, run_id=run_id, environment="noop", task={"text": "x" * size})


def record(rollout_id: str, size: int = 0) -> Rollout:
    score = Score(reward=1.0, detail={"text": "x" * size})
    return sample_records.record(rollout_id, run_id="run", environment="noop", score=score)


async def open_with_writer(
    config: LedgerConfig, limits: WriterLimits | None = None
) -> tuple[SqliteLedger, LedgerWriter]:
    writer = await LedgerWriter.open(config, limits=limits)
    return SqliteLedger(writer), writer


@asynccontextmanager
async def opened(config: LedgerConfig | Path, clock: Callable[[], float] | None = None) -> AsyncGenerator[SqliteLedger]:
    config = LedgerConfig(path=config) if isinstance(config, Path) else config
    ledger = await SqliteLedger.open(config, clock)
    try:
        yield ledger
    finally:
        await ledger.close()


@asynccontextmanager
async def ledger_and_writer(config: LedgerConfig) -> AsyncGenerator[tuple[SqliteLedger, LedgerWriter]]:
    ledger, writer = await open_with_writer(config)
    try:
        yield ledger, writer
    finally:
        await ledger.close()


def change(path: Path, *statements: str) -> None:
    """Change the file of a closed ledger."""
    with sqlite3.connect(path) as file:
        for statement in statements:
            file.execute(statement)
    file.close()


async def query(writer: LedgerWriter, statement: str) -> Any:
    """Return the first value that a statement yields on the writer's own connection."""
    execute = writer.open_ledger.connection.execute
    return await writer.run(lambda _: (execute(statement).fetchone() or [None])[0])


async def traced(writer: LedgerWriter) -> list[str]:
    """Return a list to which the writer's connection adds every statement from now on."""
    asked: list[str] = []
    await writer.run(lambda _: writer.open_ledger.connection.set_trace_callback(asked.append))
    return asked


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
