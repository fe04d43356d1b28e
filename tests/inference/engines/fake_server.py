"""What the contract fakes of all engines share: answering right, or wrong in a way that can be told."""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Mutate = Callable[[dict[str, Any]], object]
Make = Callable[[str | None], dict[str, Any]]
"""Makes an answer, with the finish reason that was forced on it."""


@dataclass
class FakeServer:
    """``mode``: ok, hang, drop, garbage, huge, half, or an HTTP status.

    ``mutate`` breaks a right answer.
    """

    mode: str | int = "ok"
    ids: list[int] = field(default_factory=lambda: [10, 11, 2])
    mutate: Mutate | None = None
    retry_after: str | None = None
    error: str = "it broke"
    can_abort: bool = True
    metrics: str = ""
    """The metrics page; empty: there is none."""
    busy: bool = False
    """Blocks of the prefix cache are held."""
    models: object = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: set[object] = field(default_factory=set)
    """From which calls came."""
    running: int = 0
    _stops: dict[str, asyncio.Event] = field(default_factory=dict)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def routes(self, app: web.Application):
        raise NotImplementedError

    async def __aenter__(self):
        app = web.Application(client_max_size=1 << 24)
        self.routes(app)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()

    async def running_is(self, count: int):
        async with asyncio.timeout(5), self._changed:
            await self._changed.wait_for(lambda: self.running == count)

    async def remember(self, request: web.Request) -> dict[str, Any]:
        body = await request.json()
        self.bodies.append(body)
        self.connections.add(request.transport.get_extra_info("peername"))
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        return body

    async def respond(self, request: web.Request, key: str, make: Make):
        """Answer a call as ``mode`` says; ``key``: by which it can be aborted."""
        if isinstance(self.mode, int):
            return self.refuse(self.mode)
        if self.mode == "drop":
            request.transport.close()
            return web.Response()
        if self.mode == "garbage":
            return web.Response(body=b"<html>hello</html>")
        if self.mode in ("huge", "half"):
            return await self._unusual_stream(request)
        finish = None
        if self.mode == "hang":
            await self._hold(key)
            finish = "abort"
        answer = self._mutated(make(finish))
        return web.Response(body=json.dumps(answer).encode(), content_type="application/json")

    def _mutated(self, answer: dict[str, Any]) -> dict[str, Any]:
        replaced = None if self.mutate is None else self.mutate(answer)
        return answer if replaced is None else replaced

    def refuse(self, status: int):
        headers = {"Retry-After": self.retry_after} if self.retry_after else {}
        if 300 <= status < 400:
            headers["Location"] = "http://127.0.0.1:1/v1"
        error = {"error": {"message": self.error, "type": "BadRequestError", "param": None, "code": status}}
        return web.json_response(error, status=status, headers=headers)

    def stop(self, key: str):
        if key in self._stops:
            self._stops[key].set()

    async def model_list(self, request: web.Request):
        models = {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 4096}]}
        return web.json_response(models if self.models is None else self.models)

    async def _metrics(self, request: web.Request):
        return web.Response(text=self.metrics) if self.metrics else web.Response(status=404)

    async def _unusual_stream(self, request: web.Request):
        response = web.StreamResponse()
        response.content_length = 1 << 40
        await response.prepare(request)
        with suppress(ConnectionError, asyncio.CancelledError):
            for _ in range(1 if self.mode == "half" else 64):
                await response.write(b" " * (1 << 16))
        if request.transport is not None:
            request.transport.close()
        return response

    async def _hold(self, key: str):
        stop = self._stops[key] = asyncio.Event()
        await self._count(+1)
        try:
            await stop.wait()
        finally:
            await asyncio.shield(asyncio.ensure_future(self._count(-1)))

    async def _count(self, change: int):
        async with self._changed:
            self.running += change
            self._changed.notify_all()


def sampled(ids: list[int], most: int, stops: list[int], finish: str | None) -> tuple[list[int], str]:
    """What a server samples of ``ids``: cut by length, by half when it is aborted."""
    kept = ids[:most]
    if finish == "abort":
        return kept[: len(kept) // 2], "abort"
    return kept, "stop" if kept and kept[-1] in stops else "length"


def falling(count: int) -> list[float]:
    """Log-probs that tell positions apart."""
    return [-0.25 * (position + 1) for position in range(count)]
