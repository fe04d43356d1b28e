"""Readers of the stream that do not read, or vanish: they delay no other, and little is held for them."""

import asyncio
import gc
import json

from api_stack import TOKEN, Served, ask, serving

from prorl_gym.demand import Demand
from prorl_gym.rollout.protocol import Delivery
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger

COUNT = 10_000
NAMES = ("r0", "r1", "r2", "r3")


class Endless(MemoryLedger):
    """Hands out records that are not stored anywhere, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0
        self.record = json.dumps({"pad": "x" * 20_000})

    async def read_records(self, run_id: str | None, after: int, limit: int) -> list[Delivery]:
        last = min(after + limit, COUNT)
        self.read = max(self.read, last)
        return [Delivery(number, self.record) for number in range(after + 1, last + 1)]


async def open_stream(served: Served, query: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 14)
    writer.write(f"GET /v1/stream{query} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
    await reader.readline()
    return reader, writer


async def test_a_reader_that_never_reads_holds_one_page_and_delays_no_other() -> None:
    endless = Endless()
    async with serving(endless) as served:
        stalled = [await open_stream(served) for _ in range(3)]
        before = -1
        while endless.read != before:  # it goes on until the sockets' buffers are full, then no more
            before = endless.read
            await asyncio.gather(*(served.ask("GET", "/v1/status") for _ in range(20)))
        assert endless.read < COUNT / 5
        held = sum(1 for one in gc.get_objects() if isinstance(one, Delivery))
        assert held <= 3 * 64
        await served.ask("POST", "/v1/rollouts", ask("a"))
        status, answer = await served.ask("GET", "/v1/rollouts/a?wait=10")
        assert (status, answer["rollout"]["outcome"]["status"]) == (200, "completed")
        async with served.http.get(served.url + "/v1/stream?follow=false") as response:
            lines = 0
            async for chunk in response.content.iter_any():
                lines += chunk.count(b"\n")
        assert lines == COUNT, "another reader gets all of them meanwhile"
        for _, writer in stalled:
            writer.transport.abort()


async def test_a_reader_that_vanishes_leaves_nothing_behind() -> None:
    async with serving() as served:
        tasks = len(asyncio.all_tasks())
        _, writer = await open_stream(served)
        assert len(asyncio.all_tasks()) > tasks
        writer.transport.abort()
        async with asyncio.timeout(10):
            while len(asyncio.all_tasks()) > tasks:
                await served.ask("GET", "/livez")


async def test_reading_on_acknowledges_when_asked_to() -> None:
    async with serving() as served:
        await served.ask("POST", "/v1/rollouts", [ask(name) for name in NAMES])
        for name in NAMES:
            await served.ask("GET", f"/v1/rollouts/{name}?wait=10")
        async with served.http.get(served.url + "/v1/stream?cursor=3&follow=false&ack=true") as response:
            assert len((await response.read()).splitlines()) == 1
        _, answer = await served.ask("GET", "/v1/status")
        assert (answer["ledger"]["kept"], answer["ledger"]["released"]) == (1, 3)
        for part in ("", "/request", "/page"):
            asked = [await served.http.get(f"{served.url}/v1/rollouts/{name}{part}") for name in (*NAMES, "stranger")]
            assert sorted(one.status for one in asked) == [200, 404, 410, 410, 410]
        (page,) = (one for one in asked if one.status == 200)
        assert page.headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert await served.ask("POST", "/v1/ack", {"cursor": 4}) == (200, {"released": 1})
        _, answer = await served.ask("GET", "/v1/rollouts?limit=3")
        assert [one["released"] for one in answer["rollouts"]] == [True] * 3
        _, rest = await served.ask("GET", f"/v1/rollouts?limit=3&before={answer['before']}")
        assert (len(rest["rollouts"]), rest["before"]) == (1, None)


async def test_what_is_too_old_is_marked() -> None:
    async with serving() as served:
        demand = Demand(groups=1, max_staleness=1, version=1)
        assert (await served.ask("PUT", "/v1/runs/default/demand", demand.model_dump()))[0] == 200
        rows = [ask(f"r{i}", reward=float(i)) | {"group_id": "g", "group_size": 2, "replica": i} for i in range(2)]
        await served.ask("POST", "/v1/rollouts", rows)
        for i in range(2):
            await served.ask("GET", f"/v1/rollouts/r{i}?wait=10")

        async def stale() -> list[bool]:
            async with served.http.get(served.url + "/v1/stream?follow=false") as response:
                return [json.loads(line)["stale"] for line in (await response.read()).splitlines()]

        assert await stale() == [False, False]
        await served.service.set_policy_version(5)
        assert await stale() == [True, True]
        _, groups = await served.ask("GET", "/v1/runs/default/groups")
        assert groups["version"] == 5
        assert (await served.ask("GET", "/v1/runs/default/demand"))[1]["max_staleness"] == 1
        assert (await served.ask("DELETE", "/v1/runs/default/demand"))[0] == 200
        assert (await served.ask("GET", "/v1/runs/default/demand"))[0] == 404
        assert await stale() == [False, False]
