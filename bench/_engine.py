r"""The engine of ``bench peers`` and ``bench nodes``: a fixed time a call, whatever is asked. It plays its rows' gold.

``_engine.py ROWS CALL_SECONDS`` prints its address and serves until its input ends; ``running_engine`` runs it.

``/v1/completions`` answers prompts of token ids, as the oracle engine does; answers are kept by prompt, so that the
engine's own work is small. ``/v1/chat/completions`` answers messages, plain or as a stream: a call of the one tool that
is offered, then, with the tool's output, ``\boxed{}`` around the number in it. ``/calls`` says how many it answered.
"""

import asyncio
import json
import re
import sys
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from _programs import BENCH, read_line, running
from _rollout_work import CODE
from aiohttp import web
from aiohttp.typedefs import Handler

from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.oracle.oracle_policy import OraclePolicy, load_rows
from prorl_gym.oracle.oracle_server import OracleOptions, OracleServer, serve_oracle

MODEL = "m"
_ANSWER = re.compile(r"\d{6,}")


class RememberingPolicy(OraclePolicy):
    """Computes the answer to a prompt once."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._turns: dict[tuple[int, ...], list[int]] = {}
        self._logprobs: dict[tuple[int, ...], list[float]] = {}

    def complete_turn(self, prompt_ids: Sequence[int], *, seed: int | None, session: str) -> list[int]:
        key = tuple(prompt_ids)  # every row is solved, so the answer depends on the prompt alone
        if key not in self._turns:
            self._turns[key] = super().complete_turn(prompt_ids, seed=seed, session=session)
        return self._turns[key]

    def synthetic_logprobs(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[float]:
        key = (*prompt_ids[-2:], *ids)
        if key not in self._logprobs:
            self._logprobs[key] = super().synthetic_logprobs(prompt_ids, ids)
        return self._logprobs[key]


class BenchEngine(OracleServer):
    """The oracle's routes and chat, with a delay and a count."""

    call_seconds = 0.0

    def build_app(self) -> web.Application:
        calls = 0

        @web.middleware
        async def count_and_wait(request: web.Request, handler: Handler) -> web.StreamResponse:
            nonlocal calls
            if request.path.endswith("/completions"):
                calls += 1
                await asyncio.sleep(self.call_seconds)
            return await handler(request)

        async def counted(request: web.Request) -> web.Response:
            return web.json_response({"calls": calls})

        app = super().build_app()
        app.middlewares.append(count_and_wait)
        app.router.add_post("/v1/chat/completions", answer_chat)
        app.router.add_get("/calls", counted)
        return app


async def answer_chat(request: web.Request) -> web.StreamResponse:
    body = json.loads(await request.read())
    message, finish = next_message(body["messages"], body.get("tools") or [])
    head = {"id": "chatcmpl-bench", "created": 0, "model": MODEL}
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
    for index, call in enumerate(message.get("tool_calls", [])):
        call["index"] = index
    chunks: tuple[dict[str, Any], ...] = (
        {"choices": [{"index": 0, "delta": message, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
        {"choices": [], "usage": usage},
    )
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for chunk in chunks:
        text = json.dumps({**head, "object": "chat.completion.chunk", **chunk})
        await response.write(f"data: {text}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


def next_message(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    last = messages[-1]
    if last["role"] == "tool":
        found = _ANSWER.findall(json.dumps(last["content"]))
        return {"role": "assistant", "content": f"The product is \\boxed{{{found[-1] if found else '?'}}}."}, "stop"
    tool = tools[0]["function"]["name"]
    arguments = {"command": f"python3 -c '{CODE}'"} if tool == "bash" else {"code": CODE}
    call = {"id": "call_1", "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "content": "I compute it.", "tool_calls": [call]}, "tool_calls"


async def _serve(rows: Path, call_seconds: float) -> None:
    codec = load_codec("small")
    engine = BenchEngine(codec, RememberingPolicy(codec, load_rows([rows])), OracleOptions(MODEL))
    engine.call_seconds = call_seconds
    async with serve_oracle(engine, "127.0.0.1", 0) as url:
        print(url, flush=True)
        await asyncio.to_thread(sys.stdin.read)  # until the bench closes it


def gym_row(environment: str, task: dict[str, Any]) -> dict[str, Any]:
    prompt = [{"role": "user", "content": task["question"]}]
    return {"responses_create_params": {"input": prompt}, "environment": environment, "task": task}


@asynccontextmanager
async def running_engine(
    directory: Path, rows: Iterable[dict[str, Any]], call_seconds: float
) -> AsyncGenerator[tuple[str, int]]:
    path, log = directory / "rows.jsonl", directory / "engine.log"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with running([sys.executable, str(BENCH / "_engine.py"), str(path), str(call_seconds)], log) as child:
        yield await read_line(child, log), child.pid


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), float(sys.argv[2])))
