"""A model API that plays a script to an agent program, whatever its tools are called, on all three wires.

Calls with tools get the steps in order, an equal body the same one again; calls without tools (titles, summaries) get a
word. No model and no tokens: what is tested with it is the program and what starts it.
"""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from socket import socket
from typing import Any

from aiohttp import web

from prorl_gym.errors import Limit, LimitReached
from prorl_gym.records import Message, ToolCall

_SHELL_TOOLS = ("bash", "Bash", "exec_command", "shell", "run_shell_command", "terminal")
"""What agent programs call the tool that runs commands."""
_COMMAND_ARGUMENTS = ("command", "cmd")
_REQUIRED = {"description": "Run a command.", "is_background": False, "security_risk": "LOW", "summary": "Run"}
"""Values of further arguments that such tools require."""
_RESULT = re.compile(r"RESULT=([^\s\"\\]+)")


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """A turn. ``{result}`` in both stands for what the last output said after ``RESULT=``."""

    text: str = ""
    command: str | None = None
    """Run by the program's own shell tool."""


@dataclass(frozen=True, slots=True)
class GatewayCall:
    """A request of the program."""

    path: str
    token: str
    body: Mapping[str, Any]


class ScriptedGateway:
    """Implements ``ModelGateway``.

    Args:
        turns: the script; after the last, an empty answer.
        max_calls: raises ``LimitReached(TURNS)`` instead of a further turn.
        token: opens it.
    """

    def __init__(
        self, turns: Sequence[ScriptedTurn], *, max_calls: int | None = None, token: str = "scripted-token"
    ) -> None:
        self.token = token
        self.calls: list[GatewayCall] = []
        """Every request with the right token, in order."""
        self.called = asyncio.Event()
        """Set by the first one."""
        self.refused = 0
        """Requests without it."""
        self.is_serving = False
        self.turns = list(turns)
        self._max_calls = max_calls
        self._played: dict[str, ScriptedTurn] = {}
        self._messages: list[Message] = []
        self._stopped: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    @asynccontextmanager
    async def serving(self, listener: socket) -> AsyncGenerator[None]:
        """See ``ModelGateway.serving``."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        self.is_serving = True
        try:
            await web.SockSite(runner, listener).start()
            yield
        finally:
            self.is_serving = False
            await runner.cleanup()

    async def wait_stopped(self) -> Exception:
        """See ``ModelGateway.wait_stopped``."""
        return await asyncio.shield(self._stopped)

    def stop(self, why: Exception) -> None:
        """Answer no more calls."""
        if not self._stopped.done():
            self._stopped.set_result(why)

    def conversation(self) -> tuple[Sequence[Message], int]:
        """See ``ModelGateway.conversation``."""
        return list(self._messages), min(1, len(self._messages))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.method == "HEAD":
            return web.Response()
        token = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token != self.token:
            self.refused += 1
            return web.json_response({"error": {"message": "wrong token"}}, status=401)
        body: dict[str, Any] = await request.json() if request.can_read_body else {}
        self.calls.append(GatewayCall(request.path, token, body))
        self.called.set()
        wire = _WIRES.get(request.path)
        if wire is None:
            return web.json_response({"data": [{"id": "policy", "object": "model"}], "input_tokens": 10})
        try:
            turn = self._turn_for(body)
        except LimitReached as reached:
            self.stop(reached)
            return web.json_response({"error": {"message": "the limit of turns was reached"}}, status=503)
        answer = wire(turn, _shell_call(turn, body))
        if not body.get("stream"):
            return web.json_response(answer.whole)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in answer.events:
            await response.write(event.encode())
        await response.write_eof()
        return response

    def _turn_for(self, body: Mapping[str, Any]) -> ScriptedTurn:
        if not body.get("tools"):
            return ScriptedTurn("Work")
        key = json.dumps(body, sort_keys=True)
        if key not in self._played:
            number = len(self._played)
            if number == self._max_calls:
                raise LimitReached(Limit.TURNS)
            turn = self.turns[number] if number < len(self.turns) else ScriptedTurn()
            seen = _RESULT.findall(key)
            result = seen[-1] if seen else ""
            command = None if turn.command is None else turn.command.replace("{result}", result)
            self._played[key] = ScriptedTurn(turn.text.replace("{result}", result), command)
            self._note(body, self._played[key])
        return self._played[key]

    def _note(self, body: Mapping[str, Any], turn: ScriptedTurn) -> None:
        if not self._messages:
            self._messages.append(Message(role="user", content=json.dumps(body.get("messages", body.get("input")))))
        calls = () if turn.command is None else (ToolCall(id="call", name="shell", arguments=turn.command),)
        self._messages.append(Message(role="assistant", content=turn.text, tool_calls=calls))


@dataclass(frozen=True, slots=True)
class _ShellCall:
    id: str
    name: str
    arguments: str


def _shell_call(turn: ScriptedTurn, body: Mapping[str, Any]) -> _ShellCall | None:
    """Return the call of the program's shell tool that runs the turn's command."""
    if turn.command is None:
        return None
    for tool in body["tools"]:
        function = tool.get("function", tool)
        if function.get("name") in _SHELL_TOOLS:
            schema: Mapping[str, Any] = function.get("parameters") or function.get("input_schema") or {}
            return _ShellCall(
                f"call_{abs(hash(turn)) % 10**9}", function["name"], json.dumps(_arguments(schema, turn.command))
            )
    names = [tool.get("function", tool).get("name") for tool in body["tools"]]
    raise AssertionError(f"no shell tool among {names}")


def _arguments(schema: Mapping[str, Any], command: str) -> dict[str, Any]:
    properties: Mapping[str, Any] = schema["properties"]
    name = next(name for name in _COMMAND_ARGUMENTS if name in properties)
    is_list = properties[name].get("type") == "array"
    filled: dict[str, Any] = {name: ["bash", "-c", command] if is_list else command}
    for required in schema.get("required", ()):
        if required not in filled:
            values = properties[required].get("enum")
            filled[required] = values[0] if values else _REQUIRED[required]
    return filled


@dataclass(frozen=True, slots=True)
class _WireAnswer:
    whole: Mapping[str, Any]
    events: Sequence[str]


def _chat(turn: ScriptedTurn, call: _ShellCall | None) -> _WireAnswer:
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    message: dict[str, Any] = {"role": "assistant", "content": turn.text}
    if call is not None:
        function = {"name": call.name, "arguments": call.arguments}
        message["tool_calls"] = [{"id": call.id, "type": "function", "function": function}]
    reason = "stop" if call is None else "tool_calls"
    base = {"id": "chat-1", "created": 1, "model": "policy"}
    whole = {
        **base,
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": usage,
    }
    delta = {**message, "tool_calls": [{"index": 0, **one} for one in message.get("tool_calls", [])]}
    if call is None:
        del delta["tool_calls"]
    chunk = {**base, "object": "chat.completion.chunk"}
    chunks: list[dict[str, Any]] = [
        {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
        {**chunk, "choices": [], "usage": usage},
    ]
    return _WireAnswer(whole, [*(f"data: {json.dumps(one)}\n\n" for one in chunks), "data: [DONE]\n\n"])


def _responses(turn: ScriptedTurn, call: _ShellCall | None) -> _WireAnswer:
    items: list[dict[str, Any]] = []
    if turn.text or call is None:
        content: list[dict[str, Any]] = [{"type": "output_text", "text": turn.text, "annotations": []}]
        items.append({"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content})
    if call is not None:
        function = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        items.append({"type": "function_call", "id": "fc_1", "status": "completed", **function})
    usage = {
        **{"input_tokens": 10, "output_tokens": 5, "total_tokens": 15},
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    base = {"id": "resp_1", "object": "response", "created_at": 1, "model": "policy"}
    whole = {**base, "status": "completed", "output": items, "usage": usage}

    def events() -> Iterator[tuple[str, dict[str, Any]]]:
        yield "response.created", {"response": {**base, "status": "in_progress", "output": []}}
        for index, item in enumerate(items):
            yield "response.output_item.added", {"output_index": index, "item": {**item, "status": "in_progress"}}
            yield "response.output_item.done", {"output_index": index, "item": item}
        yield "response.completed", {"response": whole}

    numbered = enumerate(events())
    return _WireAnswer(
        whole, [_event(name, {"type": name, "sequence_number": number, **data}) for number, (name, data) in numbered]
    )


def _messages(turn: ScriptedTurn, call: _ShellCall | None) -> _WireAnswer:
    blocks: list[dict[str, Any]] = []
    if turn.text or call is None:
        blocks.append({"type": "text", "text": turn.text})
    if call is not None:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)})
    reason = "end_turn" if call is None else "tool_use"
    base = {"id": "msg_1", "type": "message", "role": "assistant", "model": "policy", "stop_sequence": None}
    usage = {"input_tokens": 10, "output_tokens": 5}

    def events() -> Iterator[tuple[str, dict[str, Any]]]:
        yield "message_start", {"message": {**base, "content": [], "stop_reason": None, "usage": usage}}
        for index, block in enumerate(blocks):
            start: dict[str, Any]
            if block["type"] == "text":
                start, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
            else:
                start = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield "content_block_start", {"index": index, "content_block": start}
            yield "content_block_delta", {"index": index, "delta": delta}
            yield "content_block_stop", {"index": index}
        yield "message_delta", {"delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage}
        yield "message_stop", {}

    return _WireAnswer(
        {**base, "content": blocks, "stop_reason": reason, "usage": usage},
        [_event(name, {"type": name, **data}) for name, data in events()],
    )


def _event(name: str, data: Mapping[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


_WIRES = {"/v1/chat/completions": _chat, "/v1/responses": _responses, "/v1/messages": _messages}
