"""What the routes answer when the ledger's disk fails, and what a damaged record does to the stream."""

import asyncio
import sqlite3
from pathlib import Path

from api_stack import TOKEN, ask, serving
from ledger_writer import hanging_disk, open_with_writer

from prorl_gym.client import Client
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.ledger.writer_thread import WriterLimits


async def test_the_status_and_the_metrics_need_no_disk(tmp_path: Path) -> None:
    ledger, writer = await open_with_writer(LedgerConfig(path=tmp_path / "l.db"))
    async with serving(ledger) as served:
        await served.ask("POST", "/v1/rollouts", [ask("a")])
        await served.service.result("a", 10)
        async with hanging_disk(writer):
            status, answer = await asyncio.wait_for(served.ask("GET", "/v1/status"), 5)
            assert (status, answer["ledger"]["kept"]) == (200, 1)
            async with served.http.get(f"{served.url}/metrics") as response:
                assert "prorl_ledger_bytes" in await asyncio.wait_for(response.text(), 5)


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
        assert len([group async for group in client.stream_groups("default", follow=False)]) == 5
        assert await client.acknowledge(None, 6) == 6


async def test_what_a_frozen_disk_cannot_note_is_answered_503_and_not_done(tmp_path: Path) -> None:
    ledger, writer = await open_with_writer(LedgerConfig(path=tmp_path / "l.db"), WriterLimits(urgent_seconds=0.2))
    async with serving(ledger) as served:
        await served.ask("POST", "/v1/rollouts", [ask("done"), ask("hanging", run="hang")])
        await served.service.result("done", 10)
        demand = {"groups": 3}
        async with hanging_disk(writer):
            for method, route, body in (
                ("POST", "/v1/cancel", {"rollouts": ["hanging"]}),
                ("POST", "/v1/ack", {"run": "default", "cursor": 1}),
                ("PUT", "/v1/runs/hang/demand", demand),
                ("PUT", "/v1/runs/hang/demand", demand),
            ):
                async with asyncio.timeout(5), served.http.request(method, f"{served.url}{route}", json=body) as reply:
                    assert (reply.status, reply.headers["Retry-After"]) == (503, "5"), route
                    assert "Nothing was done" in (await reply.json())["error"]["fix"]
        assert (await ledger.usage()).kept == 1
        assert dict(await ledger.demands()) == {}
        assert served.service.pending == 1
        status, answer = await served.ask("POST", "/v1/cancel", {"rollouts": ["hanging"]})
        assert (status, answer) == (200, {"cancelled": ["hanging"]})
