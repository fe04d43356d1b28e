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
_PROMPT = b'"prompt": ['
_ECHO = b"0.0"
"""Stands for the ids of the prompt."""


class Engine:
    """Answers calls. What it answers is written beforehand, so that its own work is small beside what is measured.

    Args:
        ids: sampled in every call.
        text: what they say.
    """

    def __init__(self, ids: list[int], text: str) -> None:
        self._events = _encode_events(_completion_parts(ids))
        self._chat_events = _encode_events(_chat_parts(text))
        self._usage = {"completion_tokens": len(ids)}
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
        start = raw.index(_PROMPT) + len(_PROMPT)
        prompt = raw[start : raw.index(b"]", start)]
        usage = self._usage | {"prompt_tokens": prompt.count(b",") + 1}
        last = _encode_events([{"model": _MODEL, "choices": [], "usage": usage}])
        return await self._stream(request, self._events.replace(_ECHO, prompt, 1) + last, began)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        return await self._stream(request, self._chat_events, time.perf_counter())

    async def _stream(self, request: web.Request, events: bytes, began: float) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(events)
        await response.write(b"data: [DONE]\n\n")
        self._seconds.append(time.perf_counter() - began)
        return response

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": _MODEL, "max_model_len": 1 << 20}]})

    async def _take_seconds(self, request: web.Request) -> web.Response:
        """Return the time of each call since the last question."""
        seconds, self._seconds = self._seconds, []
        return web.json_response(seconds)


def _completion_parts(ids: list[int]) -> list[dict[str, Any]]:
    """Return the parts of an answer of the completions route, with the mark of the prompt's ids in the first."""
    choices: list[dict[str, Any]] = []
    for place, token in enumerate(ids):
        logprobs = {"tokens": [f"token_id:{token}"], "token_logprobs": [-0.5]}
        finish = "stop" if place == len(ids) - 1 else None
        choices.append({"index": 0, "text": "", "token_ids": [token], "logprobs": logprobs, "finish_reason": finish})
    choices[0] = {"prompt_token_ids": [float(_ECHO)]} | choices[0]
    return [{"id": "c", "object": "text_completion", "model": _MODEL, "choices": [choice]} for choice in choices]


def _chat_parts(text: str) -> list[dict[str, Any]]:
    words = [{"index": 0, "delta": {"content": f"{word} "}, "finish_reason": None} for word in text.split(" ")]
    choices = [*words, {"index": 0, "delta": dict[str, Any](), "finish_reason": "stop"}]
    return [{"id": "c", "object": "chat.completion.chunk", "choices": [choice]} for choice in choices]


def _encode_events(parts: list[dict[str, Any]]) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(part, separators=(",", ":")).encode() for part in parts)


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
