"""The programs of ``bench gateway``, a process of their own: each sends its whole history, streamed, in every call.

The job comes as one line of JSON on standard input: ``urls`` (one program for each), ``tokens`` (one for each),
``prompt``, ``outputs`` (texts that tools give, one after each call) and ``unmeasured`` (calls before the first that
counts). The result is one line of JSON: the seconds of each call that counts, for each program, and those of them all.
"""

import asyncio
import json
import sys
import time
from typing import Any

import aiohttp

_TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


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


async def main() -> None:
    """Play all programs at once."""
    job = json.loads(sys.stdin.readline())
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        began = time.perf_counter()
        pairs = zip(job["urls"], job["tokens"], strict=True)
        each = await asyncio.gather(*(converse(client, url, token, job) for url, token in pairs))
        print(json.dumps({"each": each, "all": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
