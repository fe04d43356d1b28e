"""What the routes answer when the ledger's disk fails, and what a damaged record does to the stream."""

import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from api_stack import TOKEN, ask, serving

from prorl_gym.client import Client
from prorl_gym.errors import CancelReason
from prorl_gym.rollout.ledger import SqliteLedger
from prorl_gym.rollout.ledger_file import DiskFullError, LedgerConfig
from prorl_gym.rollout.memory_ledger import MemoryLedger


class Full(MemoryLedger):
    async def cancel(self, rollout_ids: Sequence[str], reason: CancelReason) -> list[str]:
        raise DiskFullError("the disk is full.")


async def test_a_cancel_that_cannot_be_remembered_is_answered_503() -> None:
    async with serving(Full()) as served:
        await served.ask("POST", "/v1/rollouts", [ask("a", run="hang")])
        url = f"{served.url}/v1/cancel"
        async with served.http.post(url, data=b'{"rollouts": ["a"]}') as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "5")
        assert served.service.pending == 1


async def test_the_status_and_the_metrics_need_no_disk(tmp_path: Path) -> None:
    ledger = await SqliteLedger.open(LedgerConfig(path=tmp_path / "l.db"))
    async with serving(ledger) as served:
        await served.ask("POST", "/v1/rollouts", [ask("a")])
        await served.service.result("a", 10)
        release = asyncio.Event()
        loop = asyncio.get_running_loop()
        thread = ledger._writer._thread  # pyright: ignore[reportPrivateUsage]
        hanging = loop.run_in_executor(thread, lambda: asyncio.run_coroutine_threadsafe(release.wait(), loop).result())
        status, answer = await asyncio.wait_for(served.ask("GET", "/v1/status"), 5)
        assert (status, answer["ledger"]["kept"]) == (200, 1)
        async with served.http.get(f"{served.url}/metrics") as response:
            assert "prorl_ledger_bytes" in await asyncio.wait_for(response.text(), 5)
        release.set()
        await hanging


async def test_a_damaged_record_stops_neither_the_stream_nor_the_client(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    ledger = await SqliteLedger.open(LedgerConfig(path=path))
    async with serving(ledger) as served:
        await served.ask("POST", "/v1/rollouts", [ask(f"r{number}") for number in range(6)])
        for number in range(6):
            await served.service.result(f"r{number}", 10)
    with sqlite3.connect(path) as db:
        ((broken,),) = db.execute("SELECT rollout_id FROM rollouts WHERE cursor = 3").fetchall()
        db.execute("UPDATE records SET record = '{\"rollout_id\": ' WHERE cursor = 3")
    db.close()
    ledger = await SqliteLedger.open(LedgerConfig(path=path))
    async with serving(ledger) as served, Client(served.url, token=TOKEN) as client:
        stream = client.stream(follow=False)
        assert [one.cursor async for one in stream] == [1, 2, 4, 5, 6]
        assert [(one.cursor, one.rollout_id) for one in stream.damaged] == [(3, broken)]
        assert len([group async for group in client.groups_of("default", follow=False)]) == 5
        assert await client.acknowledge(None, 6) == 6
