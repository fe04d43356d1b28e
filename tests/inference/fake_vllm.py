"""A server that speaks vLLM's completions route, right or wrong as told. Shapes as received from vLLM 0.32."""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Mutate = Callable[[dict[str, Any]], object]


@dataclass
class FakeVllm:
    """``mode``: ok, hang, drop, garbage, huge, half, or a number: an HTTP status. ``mutate`` breaks a right answer."""

    mode: str | int = "ok"
    ids: list[int] = field(default_factory=lambda: [10, 11, 2])
    mutate: Mutate | None = None
    retry_after: str | None = None
    error: str = "it broke"
    can_abort: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    models: object = None
    running: int = 0
    _stops: dict[str, asyncio.Event] = field(default_factory=dict)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def __aenter__(self):
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        if self.can_abort:
            app.router.add_post("/abort_requests", self._abort)
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

    async def _models(self, request: web.Request):
        models = {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 4096}]}
        return web.json_response(models if self.models is None else self.models)

    async def _abort(self, request: web.Request):
        wanted = (await request.json())["request_ids"]
        self.aborts += wanted
        for name in wanted:
            if name in self._stops:
                self._stops[name].set()
        return web.json_response({"status": "aborted", "aborted": len(wanted)})

    async def _completions(self, request: web.Request):
        body = await request.json()
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        request_id = request.headers["X-Request-Id"]
        if isinstance(self.mode, int):
            headers = {"Retry-After": self.retry_after} if self.retry_after else {}
            error = {"error": {"message": self.error, "type": "BadRequestError", "param": None, "code": self.mode}}
            return web.json_response(error, status=self.mode, headers=headers)
        if self.mode == "drop":
            request.transport.close()
            return web.Response()
        if self.mode == "garbage":
            return web.Response(body=b"<html>hello</html>")
        if self.mode in ("huge", "half"):
            return await self._unusual_stream(request)
        finish = None
        if self.mode == "hang":
            await self._hold(request_id)
            finish = "abort"
        answer = completion(body, self.ids, request_id, finish)
        if self.mutate is not None:
            replaced = self.mutate(answer)
            answer = answer if replaced is None else replaced
        return web.Response(body=json.dumps(answer).encode(), content_type="application/json")

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

    async def _hold(self, request_id: str):
        stop = self._stops[f"cmpl-{request_id}-0"] = asyncio.Event()
        await self._count(+1)
        try:
            await stop.wait()
        finally:
            await asyncio.shield(asyncio.ensure_future(self._count(-1)))

    async def _count(self, change: int):
        async with self._changed:
            self.running += change
            self._changed.notify_all()


def completion(body: dict[str, Any], ids: list[int], request_id: str, finish: str | None = None) -> dict[str, Any]:
    sampled = ids[: body["max_tokens"]]
    if finish == "abort":
        sampled = sampled[: len(sampled) // 2]
    stopped = bool(sampled) and sampled[-1] in body["stop_token_ids"]
    names = [f"token_id:{token}" for token in sampled]
    logprobs = [-0.25 * (position + 1) for position in range(len(sampled))]
    return {
        "id": f"cmpl-{request_id}",
        "object": "text_completion",
        "created": 1,
        "model": body["model"],
        "choices": [
            {
                "index": 0,
                "text": "text",
                "finish_reason": finish or ("stop" if stopped else "length"),
                "stop_reason": sampled[-1] if stopped else None,
                "token_ids": sampled,
                "prompt_token_ids": body["prompt"],
                "prompt_logprobs": None,
                "logprobs": {
                    "tokens": names,
                    "token_logprobs": logprobs,
                    "top_logprobs": [{name: value} for name, value in zip(names, logprobs, strict=True)],
                    "text_offset": list(range(len(sampled))),
                },
            }
        ],
        "usage": {
            "prompt_tokens": len(body["prompt"]),
            "completion_tokens": len(sampled),
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }
