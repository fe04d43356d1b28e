"""Engines over HTTP that hang, each in its own way, and one that is well and slow."""

import asyncio
import socket
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web
from fake_vllm import FakeVllm, completion

Hang = Literal["", "silent", "drips", "half"]


@dataclass
class HangingVllm(FakeVllm):
    """Answers with ``ids``, and from some call on with nothing that is of use; its other routes answer all the time."""

    hang: Hang = ""
    healthy_calls: int = 0
    """Calls that it answers before it hangs."""
    lost: int = 0
    """Calls after these that get no answer, though the engine samples."""
    can_abort: bool = False
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        await super().__aexit__()

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        number = len(self.bodies)
        if self.hang and number >= self.healthy_calls:
            return await self._hang(request, await self.remember(request))
        if self.healthy_calls <= number < self.healthy_calls + self.lost:
            await self.remember(request)
            await self._over.wait()
        return await super()._completions(request)

    async def _hang(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse()
        if self.hang != "silent":
            await response.prepare(request)
        if self.hang == "half":
            await response.write(web.json_response(completion(body, self.ids, "r")).body[:40])  # type: ignore[index]
        while self.hang == "drips" and not self._over.is_set():
            await response.write(b" ")
            await asyncio.wait([asyncio.ensure_future(self._over.wait())], timeout=0.05)
        await self._over.wait()
        return response


@dataclass
class SlowVllm(FakeVllm):
    """Samples a token of every call in each ``step`` seconds, and never ends a turn by itself."""

    step: float = 0.01
    quick_calls: int = 0
    """Calls that it answers with ``ids`` at its pace, before the policy babbles."""
    counts: bool = True
    """Its metrics page tells how much it sampled."""
    stalls_trials: bool = False
    """A trial waits behind what is being sampled."""
    sampled: int = 0

    def routes(self, app: web.Application) -> None:
        super().routes(app)
        self._served = 0

    async def _completions(self, request: web.Request) -> web.Response:
        body = await self.remember(request)
        is_trial = body["max_tokens"] <= 16
        self._served += not is_trial
        wanted = body["max_tokens"] if is_trial or self._served > self.quick_calls else len(self.ids)
        stop = self._stops[f"cmpl-{request.headers['X-Request-Id']}-0"] = asyncio.Event()
        if is_trial and self.stalls_trials:
            await stop.wait()
        count = 0
        while count < wanted and not stop.is_set():
            await asyncio.sleep(self.step)
            count += 1
            self.sampled += 1
        ids = self.ids if wanted == len(self.ids) else [10] * count
        answer = completion(body, ids, "r")
        if stop.is_set():
            answer["choices"][0]["finish_reason"] = "abort"
        return web.json_response(answer)

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self.counts:
            return web.Response(status=404)
        return web.Response(text=f"vllm:num_requests_running 1\nvllm:generation_tokens_total {self.sampled}\n")


class Deaf:
    """A process that was stopped: connections are made by the kernel, and nothing is ever read."""

    def __enter__(self) -> str:
        self._listener = socket.create_server(("127.0.0.1", 0))
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"

    def __exit__(self, *_: object) -> None:
        self._listener.close()
