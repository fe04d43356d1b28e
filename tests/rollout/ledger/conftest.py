"""A ledger in a file, and its writer; both are closed after the test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.ledger.writer_thread import LedgerWriter


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "l.db"


@pytest.fixture
async def writer(path: Path) -> LedgerWriter:
    return await LedgerWriter.open(LedgerConfig(path=path))


@pytest.fixture
async def ledger(writer: LedgerWriter) -> AsyncIterator[SqliteLedger]:
    ledger = SqliteLedger(writer)
    yield ledger
    await ledger.close()
