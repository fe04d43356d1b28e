"""The programs of ``bench gateway``, each a process of its own. The job is one line of JSON on standard input.

``_gateway_programs.py engine`` samples the same tokens in every call, at once. It speaks vLLM's completions route, for
the gateway, and chat completions, for the proxy that it is compared with. It prints its port. Job: ``ids``, ``text``.

``_gateway_programs.py load`` plays agent programs: each sends its whole history, streamed, in every call. Job: ``urls``
(one program for each), ``tokens`` (one for each), ``prompt``, ``outputs`` (texts that tools give, one after each call)
and ``unmeasured`` (calls before the first that counts). It prints the seconds of each call that counts, for each
program, and those of them all.
"""

import asyncio
import json
import sys
import time
from typing import Any

import aiohttp
from aiohttp import web

_MODEL = "policy"
_PROMPT = b'"prompt": ['
_ECHO = b"0.0"
"""Stands for the ids of the prompt."""


class Engine:
    """Answers calls. What it answers is written beforehand, so that its own work is small beside what is measured."""

    def __init__(self, ids: list[int], text: str) -> None:
        self._events = _encode_events(_completion_parts(ids))
        self._chat_events = _encode_events(_chat_parts(text))
        self._usage = {"completion_tokens": len(ids)}
        self._seconds: list[float] = []
        """Of each call, in the order in which they came."""

    def application(self) -> web.Application:
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
        seconds, self._seconds = self._seconds, []
        return web.json_response(seconds)


def _completion_parts(ids: list[int]) -> list[dict[str, Any]]:
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


async def serve(job: dict[str, Any]) -> None:
    runner = web.AppRunner(Engine(job["ids"], job["text"]).application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the bench closes it


_SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
_TOOL = {"type": "function", "function": {"name": "bash", "description": "Run a command.", "parameters": _SCHEMA}}


async def converse(client: aiohttp.ClientSession, url: str, token: str, job: dict[str, Any]) -> list[float]:
    """Play one program; return the seconds of each call."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Work."},
        {"role": "user", "content": job["prompt"]},
    ]
    seconds: list[float] = []
    for output in job["outputs"]:
        body = json.dumps({"model": "policy", "messages": messages, "tools": [_TOOL], "stream": True}).encode()
        began = time.perf_counter()
        async with client.post(url, data=body, headers={"Authorization": f"Bearer {token}"}) as answer:
            stream = await answer.read()
        seconds.append(time.perf_counter() - began)
        if answer.status != 200:
            raise RuntimeError(f"HTTP {answer.status}: {stream[:200]!r}")
        turn = _join(stream)
        messages.append(turn)
        calls = turn.get("tool_calls") or [{"id": "c"}]
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": output} for call in calls]
    return seconds[job["unmeasured"] :]


def _join(stream: bytes) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for line in stream.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        for choice in json.loads(line[6:]).get("choices", ()):
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            if delta.get("reasoning_content"):
                message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
            if delta.get("tool_calls"):
                message["tool_calls"] = [
                    {k: v for k, v in call.items() if k != "index"} for call in delta["tool_calls"]
                ]
    return message


async def play(job: dict[str, Any]) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        began = time.perf_counter()
        pairs = zip(job["urls"], job["tokens"], strict=True)
        each = await asyncio.gather(*(converse(client, url, token, job) for url, token in pairs))
        print(json.dumps({"each": each, "all": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    job = json.loads(sys.stdin.readline())
    asyncio.run(serve(job) if sys.argv[1] == "engine" else play(job))
