"""The model API of one rollout, for a program that is no part of this package and is not changed for it.

It serves a listening socket inside the rollout's sandbox, so the program needs no network. Whoever connects there is
hostile: bodies, connections and calls are bounded, and the bearer opens this rollout only. A failure of ours is an
HTTP 503, never 400 or 429, on which some programs end; what a program cannot have meant is a 4xx.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from socket import socket
from typing import Any, Protocol, cast

from aiohttp import web

from prorl_gym.errors import ConfigError, EngineError, FailureKind, LimitReached, RolloutError, TaskError
from prorl_gym.gateway import chat_completions, messages, responses
from prorl_gym.gateway.answer import AnswerFormat, AnswerHead, CompletedTurn
from prorl_gym.gateway.body_reader import BodyReader, ReadBody
from prorl_gym.gateway.events import EventWriter, error_body
from prorl_gym.gateway.model_call import ModelCall, SamplingParams
from prorl_gym.gateway.shared_calls import SharedCall, SharedCalls
from prorl_gym.gateway.side_calls import kind_of, lineage_of
from prorl_gym.gateway.turn_stream import TurnStream
from prorl_gym.inference.tokens.chat_codec import ChatCodec, encode_off_loop
from prorl_gym.inference.tokens.harness_call import HarnessCall
from prorl_gym.inference.tokens.harness_session import HarnessSession
from prorl_gym.logs import redact
from prorl_gym.records import Message
from prorl_gym.settings import ResolvedSettings

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
MAX_CONNECTIONS = 128
MAX_CALLS = 32
"""Calls at the same time."""
MAX_FAILURES = 3
"""Calls in a row that fail by our fault; then the rollout does."""

_LONG_BODY = 1 << 20
"""Bytes beyond which what is new in a body is not read on the event loop (some milliseconds)."""
_BODY_SECONDS = 60.0
KEEP_ALIVE_SECONDS = 10.0
_IDLE_SECONDS = 600.0
"""A connection without a request is closed after that: programs keep theirs while tools run."""
_STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
_RETRY_HEADERS = {"Retry-After": "1", "x-should-retry": "true"}


class HarnessWire(Protocol):
    """How one API spells calls and answers; its module implements it."""

    @property
    def HISTORY_KEY(self) -> str:  # a constant of the module
        """Key of the conversation in a body."""
        ...

    def read_lenient(self, body: ReadBody, sampling: SamplingParams, omitted: Counter[str]) -> ModelCall:
        """Read a call. Raises ``ConfigError`` for what is no conversation."""
        ...

    def write_answer(self, turn: CompletedTurn, params: Mapping[str, Any], form: AnswerFormat) -> dict[str, Any]:
        """Return the body of the answer."""
        ...

    def open_events(self, head: AnswerHead, form: AnswerFormat, body: Mapping[str, Any]) -> EventWriter:
        """Return what writes the answer as events."""
        ...


@dataclass(frozen=True, slots=True)
class _ReadCall:
    """A call as it was sent."""

    body: Mapping[str, Any]
    call: ModelCall
    key: bytes
    """Equal calls have the same."""

    @property
    def is_streamed(self) -> bool:
        return self.body.get("stream") is True


class RolloutGateway:
    """Answers the model calls of one rollout's program, on every wire.

    Args:
        session: samples and records.
        codec: tokenizer and chat template of the session.
        settings: of the rollout: its sampling and limits hold, whatever the program asks for.
        model: name of the model in answers; requests may name any.
    """

    def __init__(
        self, session: HarnessSession, codec: ChatCodec, settings: ResolvedSettings, model: str = "policy"
    ) -> None:
        self.token = secrets.token_urlsafe(32)
        """Bearer token, which opens this rollout only."""
        self.omitted: Counter[str] = Counter()
        """What was left out of calls, by name: hosted tools, parts that are no text."""
        self._session = session
        self._codec = codec
        self._form = AnswerFormat(model, codec, with_tokens=False, with_reasoning=True)
        self._sampling = SamplingParams(
            settings.temperature, settings.top_p, settings.max_turn_tokens, settings.top_k, settings.seed
        )
        self._bodies = BodyReader()
        self._calls = SharedCalls(copy_context())
        self._failure: RolloutError | None = None
        """Of the last call, if it failed by our fault."""
        self._failures = 0
        """In a row."""
        self._stop_reason: asyncio.Future[Exception] | None = None

    @asynccontextmanager
    async def serving(self, listener: socket) -> AsyncGenerator[None]:
        """Serve what connects to a listening socket, which it owns, for the block; cut all connections at its end.

        Calls are made in the context of the caller, so that they charge its deadline.

        Raises:
            RolloutError: at the end of a block that ended well: the program's last call failed by our fault, so what it
                did after that is no measurement of the policy.
        """
        loop = asyncio.get_running_loop()
        self._calls = SharedCalls(copy_context())
        self._stop_reason = loop.create_future()
        runner = web.AppRunner(
            self._application(), handler_cancellation=True, access_log=None, keepalive_timeout=_IDLE_SECONDS
        )
        await runner.setup()
        accept = partial(_bounded_protocol, cast("web.Server", runner.server))
        server = await loop.create_server(accept, sock=listener)
        try:
            yield
        finally:
            server.close()
            await self._calls.close()
            await runner.cleanup()
        if self._failure is not None:
            raise self._failure

    async def wait_stopped(self) -> Exception:
        """Wait until no call is answered any more, and return why: ``LimitReached`` or ``RolloutError``."""
        assert self._stop_reason is not None, "it does not serve"
        return await asyncio.shield(self._stop_reason)

    def conversation(self) -> tuple[Sequence[Message], int]:
        """Return the main conversation so far, and how many of its messages came before the first sampled turn."""
        return self._session.main_conversation()

    # --- routes -------------------------------------------------------------------------------------------------

    def _application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        wires: dict[str, HarnessWire] = {
            "/v1/chat/completions": chat_completions,
            "/v1/responses": responses,
            "/v1/messages": messages,
        }
        for path, wire in wires.items():
            app.router.add_post(path, partial(self._answer, wire))
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_get("/", self._root)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Let in who has the bearer, and write every failure as the wires' clients read it."""
        if request.path != "/" and not self._has_token(request):
            return _error(401, "this token does not open the rollout.\nSend the one that the program was given.")
        try:
            return await handler(request)
        except web.HTTPException as refused:
            return _error(refused.status, refused.reason)
        except ConfigError as error:
            return _error(400, str(error))
        except TimeoutError:
            return _error(408, f"the body did not come within {_BODY_SECONDS:g} s.")
        except (LimitReached, RolloutError) as error:
            return _error(503, redact(str(error)))
        except ConnectionError:  # the program has gone
            return web.Response()

    def _has_token(self, request: web.Request) -> bool:
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        return secrets.compare_digest(given.encode(errors="replace"), self.token.encode())

    async def _root(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _list_models(self, request: web.Request) -> web.Response:
        name = self._form.model
        model = {"id": name, "object": "model", "type": "model", "display_name": name, "created": 0, "owned_by": name}
        page = {"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name}
        return web.json_response(page)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        call = (await self._read(messages, request)).call
        shown = [entry.message for entry in call.entries]
        characters = sum(len(message.content) for message in shown)
        ids = await encode_off_loop(characters, partial(self._codec.encode_prompt, shown, call.tools))
        return web.json_response({"input_tokens": len(ids)})

    async def _answer(self, wire: HarnessWire, request: web.Request) -> web.StreamResponse:
        read = await self._read(wire, request)
        assert self._stop_reason is not None
        if self._stop_reason.done():
            raise self._stop_reason.result()
        if read.key not in self._calls and self._calls.running >= MAX_CALLS:
            return _error(503, f"more than {MAX_CALLS} calls at the same time.\nWait for an answer.")
        make = partial(self._make_call, read, request.headers)
        async with self._calls.join(read.key, make) as call:
            if read.is_streamed:
                return await self._stream(wire, read, call, request)
            await asyncio.wait({call.task})
            answer = wire.write_answer(self._finished_turn(call), read.body, self._form)
            response = web.json_response(answer)
            await response.prepare(request)
            await response.write_eof()
            call.is_delivered = True
            return response

    async def _read(self, wire: HarnessWire, request: web.Request) -> _ReadCall:
        async with asyncio.timeout(_BODY_SECONDS):
            raw = await request.read()
        read = partial(self._read_body, wire, request.path, raw)
        return read() if self._bodies.count_new(request.path, raw) < _LONG_BODY else await asyncio.to_thread(read)

    def _read_body(self, wire: HarnessWire, path: str, raw: bytes) -> _ReadCall:
        """Read a body. Raises ``ConfigError`` for what is no call."""
        omitted = Counter[str]()
        try:
            body = self._bodies.read(path, wire.HISTORY_KEY, raw)
            call = wire.read_lenient(body, self._sampling, omitted)
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"the body is no call that can be read ({str(error)[:200]}).", "Send JSON.") from None
        for name in omitted.keys() - self.omitted.keys():
            log.info("left out of calls of an agent program: %s", name)
        self.omitted += omitted
        return _ReadCall(body.fields, call, body.digest)

    # --- one call -----------------------------------------------------------------------------------------------

    async def _make_call(self, read: _ReadCall, headers: Mapping[str, str], shared: SharedCall) -> CompletedTurn:
        """Make a call, and count whose fault it is if it fails.

        Raises:
            LimitReached, RolloutError: it has no answer.
        """
        call = read.call
        stream = TurnStream(self._codec, may_call_tools=call.may_call_tools)
        asked = HarnessCall(
            call.entries,
            call.tools,
            max_tokens=call.sampling.max_tokens,
            may_call_tools=call.may_call_tools,
            single_tool_call=call.single_tool_call,
            lineage=lineage_of(headers),
            kind=kind_of(call.entries, has_tools=bool(call.tools)),
        )
        try:
            turn = await self._session.answer(
                asked, (lambda ids: shared.add_pieces(stream.add(ids))) if read.is_streamed else None
            )
            done = CompletedTurn(call, turn.prompt, turn.sampled, turn.parsed, shared.head)
            shared.add_pieces(stream.finish(turn.parsed.thinking, self._form.text_of(turn.parsed)))
        except (LimitReached, TaskError) as reason:
            self._stop(reason)
            raise
        except Exception as error:
            failure = error if isinstance(error, RolloutError) else _internal_error(error)
            self._count_failure(failure)
            raise failure from None
        self._failure, self._failures = None, 0
        return done

    def _count_failure(self, failure: RolloutError) -> None:
        log.warning("a call of an agent program failed: %s", failure)
        self._failure = failure
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            self._stop(failure)

    def _stop(self, reason: Exception) -> None:
        if self._stop_reason is not None and not self._stop_reason.done():
            self._stop_reason.set_result(reason)

    def _finished_turn(self, call: SharedCall) -> CompletedTurn:
        """Return the turn of a call that is over, or raise why there is none."""
        if call.task.cancelled():
            raise EngineError(FailureKind.INTERNAL, "the gateway is closing.")
        return call.task.result()

    async def _stream(
        self, wire: HarnessWire, read: _ReadCall, call: SharedCall, request: web.Request
    ) -> web.StreamResponse:
        """Send the answer as events, each as soon as it is certain."""
        writer, sent = wire.open_events(call.head, self._form, read.body), 0
        has_news = await call.wait_for_pieces(sent, KEEP_ALIVE_SECONDS)
        if call.task.done():
            self._finished_turn(call)  # before anything is sent, a failure has a status of its own
        response = _EventResponse(headers=_STREAM_HEADERS)
        await response.prepare(request)
        events = writer.begin()
        while not call.task.done():
            events += b"".join(map(writer.write_piece, call.pieces[sent:])) if has_news else writer.keep_alive
            sent = len(call.pieces)
            await response.write(events)
            has_news, events = await call.wait_for_pieces(sent, KEEP_ALIVE_SECONDS), b""
        try:
            answer = wire.write_answer(self._finished_turn(call), read.body, self._form)
        except (LimitReached, RolloutError) as error:
            await response.write(writer.fail(redact(str(error))))
            response.force_close()
            return response
        events += b"".join(map(writer.write_piece, call.pieces[sent:]))
        await response.write_eof(events + writer.end(answer))
        call.is_delivered = True
        return response


class _EventResponse(web.StreamResponse):
    """Sends its headers with the first events: each packet wakes the program."""

    _send_headers_immediately = False


def _bounded_protocol(server: "web.Server") -> asyncio.Protocol:
    """Return what serves a new connection; one too many is dropped."""
    return server() if len(server.connections) < MAX_CONNECTIONS else _Dropped()


class _Dropped(asyncio.Protocol):
    """Drops a connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).abort()


def _error(status: int, message: str) -> web.Response:
    return web.json_response(error_body(message), status=status, headers=_RETRY_HEADERS if status >= 500 else None)


def _internal_error(error: Exception) -> RolloutError:
    log.error("the gateway of a rollout failed", exc_info=error)
    return RolloutError(FailureKind.INTERNAL, f"the gateway failed ({type(error).__name__}).")
