r"""The engine of ``bench failures``: it plays the rows of ``bench peers`` on two routes, and fails on purpose.

``/v1/completions`` takes token ids, as vLLM does; ``/v1/chat/completions`` takes messages, plain or as a stream, and
answers with ids and log-probs where they are asked for. ``/fault`` sets what goes wrong, and drops calls that still
hang; ``/reached`` answers when so many calls have come; ``/weights`` loads others; ``/log`` says what was sampled.
"""

import asyncio
import json
import re
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _failures_plan import BY_KIND, HEALTHY, OUTAGE_CALL, OUTAGE_SECONDS, Fault, Kind
from _rollout_engine import MODEL, RememberingPolicy
from _rollout_work import CODE, CODE_WORK, COMMANDS, SHELL_WORK
from aiohttp import web
from aiohttp.typedefs import Handler

from prorl_gym.environments.protocol import ScriptedStep
from prorl_gym.gateway import chat_completions
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.oracle.oracle_server import OracleOptions, OracleServer
from prorl_gym.oracle.row_index import load_rows

TOKENS_PER_SECOND = 400.0
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_ANSWER = re.compile(r"\d{6,}")
_FOREIGN: dict[str, Any] = {"object": "list", "data": []}
_CONTROL = frozenset({"/fault", "/reached", "/weights", "/log"})
_SAMPLED = web.ResponseKey("sampled", dict[str, Any])
"""Prompt, ids and log-probs of a chat answer, whose body need not hold them."""


class VersionedPolicy(RememberingPolicy):
    """Its log-probs depend on the version of the weights."""

    version = 0

    def synthetic_logprobs(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[float]:
        """See ``OraclePolicy``."""
        return [value - self.version / 64 for value in super().synthetic_logprobs(prompt_ids, ids)]

    def encode_turn(self, step: ScriptedStep) -> list[int]:
        """Return a turn's ids without its terminator."""
        return self._encode_step(step)


class FailingEngine(OracleServer):
    """The oracle's routes and chat, with a fault.

    Args:
        policy: what it plays.
        port: where it listens, and again after an outage.
        control: port of the bench's own routes, which no outage reaches.
    """

    def __init__(self, policy: VersionedPolicy, port: int, control: int) -> None:
        codec = load_codec("small")
        super().__init__(codec, policy, OracleOptions(MODEL, tokens_per_second=TOKENS_PER_SECOND))
        self._turns = policy
        self._port = port
        self._control = control
        self._fault: Fault = HEALTHY
        self._calls = 0
        self._outage: asyncio.Task[None] | None = None
        self._released = asyncio.Event()
        self._called = asyncio.Condition()
        self._log: list[dict[str, Any]] = []
        self._runner = web.AppRunner(self.build_app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        self._site: web.TCPSite | None = None

    def build_app(self) -> web.Application:
        """Return the routes."""
        app = super().build_app()
        app.middlewares.append(self._fail)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/fault", self._set_fault)
        app.router.add_get("/reached", self._reached)
        app.router.add_post("/weights", self._load_weights)
        app.router.add_get("/log", self._logged)
        return app

    async def listen(self) -> None:
        """Accept connections."""
        if self._site is None:
            await self._runner.setup()
            await web.TCPSite(self._runner, "127.0.0.1", self._control).start()
        self._site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await self._site.start()

    async def close(self) -> None:
        """Stop listening, and drop every call."""
        await self._runner.cleanup()

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    @web.middleware
    async def _fail(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        is_call = request.path.endswith("/completions")
        kind = Kind.NONE
        if is_call:
            kind = await self._next_kind()
        elif request.path not in _CONTROL:
            kind = self._outage_kind()
        match kind:
            case Kind.REFUSED | Kind.RESET:
                return _drop(request)
            case Kind.UNAVAILABLE:
                return _error(503)
            case Kind.ERROR:
                return _error(500)
            case Kind.HANG:
                await self._released.wait()
                return _drop(request)
            case _:
                answer = await handler(request)
        return await self._written(request, answer, kind) if is_call else answer

    async def _next_kind(self) -> Kind:
        number = self._calls
        async with self._called:
            self._calls += 1
            self._called.notify_all()
        if self._fault.is_outage and number == OUTAGE_CALL:
            self._outage = asyncio.create_task(self._be_out())
        return self._fault.kind if self._fault.hits(number) else self._outage_kind()

    def _outage_kind(self) -> Kind:
        return self._fault.kind if self._outage is not None and not self._outage.done() else Kind.NONE

    async def _be_out(self) -> None:
        if self._fault.kind is Kind.REFUSED and self._site is not None:
            await self._site.stop()
        await asyncio.sleep(OUTAGE_SECONDS)
        if self._fault.kind is Kind.REFUSED:
            await self.listen()

    async def _written(self, request: web.Request, answer: web.StreamResponse, kind: Kind) -> web.StreamResponse:
        """Write an answer, spoilt or not, as JSON or as a stream, and note what it says."""
        if answer.status != 200 or not isinstance(answer, web.Response):
            return answer
        asked: dict[str, Any] = json.loads(await request.read())
        body: dict[str, Any] = json.loads(answer.text or "")
        sampled: dict[str, Any] = answer.get(_SAMPLED) or _completion(body)
        if kind is Kind.FOREIGN:
            body = _FOREIGN
        elif kind is not Kind.TRUNCATED:
            if kind is Kind.ABORT:
                self._abort_half(body["choices"][0], sampled)
            spoil_logprobs(body["choices"][0], kind)
            self._log.append({**sampled, "version": self._turns.version})
        if asked.get("stream"):
            return await _stream(request, body, is_cut=kind is Kind.TRUNCATED)
        text = json.dumps(body)
        return web.Response(
            text=text[: len(text) // 2 if kind is Kind.TRUNCATED else None], content_type="application/json"
        )

    def _abort_half(self, choice: dict[str, Any], sampled: dict[str, Any]) -> None:
        """Leave half of the sampled tokens, as an engine does whose calls are aborted."""
        half = max(1, len(sampled["ids"]) // 2)
        sampled["ids"], sampled["logprobs"] = sampled["ids"][:half], sampled["logprobs"][:half]
        choice["finish_reason"] = "abort"
        text = self._codec.decode(sampled["ids"])
        if "message" in choice:
            choice["message"] = {"role": "assistant", "content": text.partition("<tool_call>")[0]}
        else:
            choice["text"] = text
        if choice.get("token_ids"):
            choice["token_ids"] = sampled["ids"]
        for values in _logprob_lists(choice):
            del values[half:]

    # --- chat ---------------------------------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = json.loads(await request.read())
        prompt = self._encode(body)
        step = next_step(body["messages"], body.get("tools") or [])
        ids = [*self._turns.encode_turn(step), self._codec.terminator_id]
        logprobs = self._turns.synthetic_logprobs(prompt, ids)
        await asyncio.sleep(len(ids) / TOKENS_PER_SECOND)
        message: dict[str, Any] = {"role": "assistant", "content": step.text}
        if step.tool is not None:
            function = {"name": step.tool, "arguments": json.dumps(step.arguments)}
            message["tool_calls"] = [{"id": f"call_{self._calls}", "type": "function", "function": function}]
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if step.tool else "stop",
        }
        if body.get("logprobs"):
            entries = zip(ids, logprobs, strict=True)
            choice["logprobs"] = {
                "content": [
                    {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
                    for token, value in entries
                ]
            }
        answer = web.json_response(
            {
                "id": f"chatcmpl-{self._calls}",
                "object": "chat.completion",
                "created": 0,
                "model": MODEL,
                "choices": [choice],
                "usage": {
                    "prompt_tokens": len(prompt),
                    "completion_tokens": len(ids),
                    "total_tokens": len(prompt) + len(ids),
                },
            }
        )
        answer[_SAMPLED] = {"prompt": prompt, "ids": ids, "logprobs": logprobs}
        return answer

    def _encode(self, body: dict[str, Any]) -> list[int]:
        """Return the prompt's ids; messages in any form that chat clients send."""
        history = chat_completions.read_messages(chat_completions.normalize_body(body)["messages"])
        return self._codec.encode_prompt([entry.message for entry in history], body.get("tools") or [])

    # --- for the bench ------------------------------------------------------------------------------------------------

    async def _set_fault(self, request: web.Request) -> web.Response:
        if self._outage is not None:
            await self._outage  # it listens again
        self._fault, self._outage, self._calls, self._log = BY_KIND[Kind((await request.json())["kind"])], None, 0, []
        self._released.set()
        self._released = asyncio.Event()
        return web.json_response({})

    async def _reached(self, request: web.Request) -> web.Response:
        wanted = int(request.query["calls"])
        async with self._called:
            await self._called.wait_for(lambda: self._calls >= wanted)
        return web.json_response({})

    async def _load_weights(self, request: web.Request) -> web.Response:
        self._turns.version = (await request.json())["version"]
        return web.json_response({})

    async def _logged(self, request: web.Request) -> web.Response:
        return web.json_response({"calls": self._calls, "sampled": self._log})


def next_step(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> ScriptedStep:
    """Return the assistant's next turn in one of the rows; which row it is, the messages of the user say."""
    asked = json.dumps([message["content"] for message in messages if message["role"] == "user"])
    if SHELL_WORK.row["question"] in asked:
        played = sum(bool(message.get("tool_calls")) for message in messages)
        return ScriptedStep("Next.", "bash", {"command": (*COMMANDS, SUBMIT)[played]})
    if "run-length encoding" in asked:
        return ScriptedStep(f"```python\n{program()}\n```")
    if messages[-1]["role"] == "tool":
        found = _ANSWER.findall(json.dumps(messages[-1]["content"]))
        return ScriptedStep(f"The product is \\boxed{{{found[-1] if found else '?'}}}.")
    tool = tools[0]["function"]["name"]
    arguments = {"command": f"python3 -c '{CODE}'"} if tool == "bash" else {"code": CODE}
    return ScriptedStep("I compute it.", tool, arguments)


def program() -> str:
    """Return the gold program, out of the command that writes it."""
    command: str = CODE_WORK.row["gold_steps"][0]["arguments"]["command"]
    return command.partition("'EOF'\n")[2].partition("\nEOF\n")[0]


def spoil_logprobs(choice: dict[str, Any], kind: Kind) -> None:
    """Drop the last log-prob, or replace the first by NaN, where there are any."""
    for values in _logprob_lists(choice):
        if kind is Kind.SHORT_LOGPROBS:
            values.pop()
        elif kind is Kind.NAN_LOGPROBS:
            if isinstance(values[0], dict):
                values[0]["logprob"] = float("nan")
            else:
                values[0] = float("nan")


def _logprob_lists(choice: Mapping[str, Any]) -> list[list[Any]]:
    """Return the lists with one entry for each sampled token: of a chat, or of a completion (values alone)."""
    given: Mapping[str, Any] = choice.get("logprobs") or {}
    return [given[name] for name in ("content", "token_logprobs") if given.get(name)]


def _completion(body: Mapping[str, Any]) -> dict[str, Any]:
    choice = body["choices"][0]
    logprobs: Mapping[str, Any] = choice.get("logprobs") or {}
    return {
        "prompt": choice["prompt_token_ids"] or [],
        "ids": choice["token_ids"] or [],
        "logprobs": list(logprobs.get("token_logprobs") or []),
    }


def _drop(request: web.Request) -> web.Response:
    """Reset the connection."""
    transport = request.transport
    if transport is not None:
        connection: socket.socket = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    return web.Response()


def _error(status: int) -> web.Response:
    kind = "ServiceUnavailable" if status == 503 else "InternalServerError"
    return web.json_response({"error": {"message": "The engine fails.", "type": kind, "code": status}}, status=status)


async def _stream(request: web.Request, body: Mapping[str, Any], *, is_cut: bool) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for chunk in _chunks(body):
        text = f"data: {json.dumps(chunk)}\n\n"
        if is_cut:
            await response.write(text[: len(text) // 2].encode())
            return response
        await response.write(text.encode())
    await response.write(b"data: [DONE]\n\n")
    return response


def _chunks(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "choices" not in body:
        return [dict(body)]
    (choice,) = body["choices"]
    delta = json.loads(json.dumps(choice["message"]))
    for index, call in enumerate(delta.get("tool_calls", [])):
        call["index"] = index
    head = {"id": body["id"], "created": 0, "model": MODEL, "object": "chat.completion.chunk"}
    ended: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    return [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [ended]},
        {**head, "choices": [], "usage": body["usage"]},
    ]


async def _serve(rows: Path, port: int, control: int) -> None:
    engine = FailingEngine(VersionedPolicy(load_codec("small"), load_rows([rows])), port, control)
    await engine.listen()
    print(f"http://127.0.0.1:{port}/v1", flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the bench closes it


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
