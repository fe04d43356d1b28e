"""The engine of ``bench gateway``, a process of its own: it samples the same tokens in every call, at once.

It speaks vLLM's completions route, for the gateway, and chat completions, for the proxy that it is compared with. Its
first line of output is its port; its standard input is the job, as one line of JSON.
"""

import asyncio
import json
import sys
import time
from typing import Any

from aiohttp import web

_MODEL = "policy"


class Engine:
    """Answers calls.

    Args:
        ids: sampled in every call.
        text: what they say.
    """

    def __init__(self, ids: list[int], text: str) -> None:
        self._ids = ids
        self._text = text
        self._seconds: list[float] = []
        """Of each call, in the order in which they came."""

    def application(self) -> web.Application:
        """Return its routes."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/seconds", self._take_seconds)
        return app

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        began = time.perf_counter()
        body = json.loads(raw)
        prompt, logprob = body["prompt"], {"tokens": ["token_id:0"], "token_logprobs": [-0.5]}
        events: list[dict[str, Any]] = []
        for place, token in enumerate(self._ids):
            logprobs = logprob | {"tokens": [f"token_id:{token}"]}
            finish = "stop" if place == len(self._ids) - 1 else None
            events.append({"index": 0, "text": "", "token_ids": [token], "logprobs": logprobs, "finish_reason": finish})
        events[0]["prompt_token_ids"] = prompt
        parts = [{"id": "c", "object": "text_completion", "model": _MODEL, "choices": [event]} for event in events]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(self._ids)}
        return await self._stream(request, [*parts, {"model": _MODEL, "choices": [], "usage": usage}], began)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        began = time.perf_counter()
        json.loads(raw)
        words = self._text.split(" ")
        deltas: list[dict[str, Any]] = [
            {"index": 0, "delta": {"content": f"{word} "}, "finish_reason": None} for word in words
        ]
        deltas.append({"index": 0, "delta": {}, "finish_reason": "stop"})
        parts = [{"id": "c", "object": "chat.completion.chunk", "choices": [delta]} for delta in deltas]
        return await self._stream(request, parts, began)

    async def _stream(self, request: web.Request, parts: list[dict[str, Any]], began: float) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(
            b"".join(b"data: %b\n\n" % json.dumps(part, separators=(",", ":")).encode() for part in parts)
        )
        await response.write(b"data: [DONE]\n\n")
        self._seconds.append(time.perf_counter() - began)
        return response

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": _MODEL, "max_model_len": 1 << 20}]})

    async def _take_seconds(self, request: web.Request) -> web.Response:
        """Return the time of each call since the last question."""
        seconds, self._seconds = self._seconds, []
        return web.json_response(seconds)


async def main() -> None:
    """Serve until the process is ended."""
    job = json.loads(sys.stdin.readline())
    runner = web.AppRunner(Engine(job["ids"], job["text"]).application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
