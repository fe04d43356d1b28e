"""The model API of one rollout, for a program that is no part of this package and is not changed for it.

It serves a listening socket inside the rollout's sandbox, so the program needs no network. What connects there is
hostile: bodies, connections and calls are bounded, and the bearer opens this rollout only. A failure of ours is an
HTTP 503, never 400 or 429, on which some programs end; what a program cannot have meant is a 4xx.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from socket import socket
from typing import Any, cast

from aiohttp import web

from prorl_gym.concurrency import Slot
from prorl_gym.errors import ConfigError, EngineError, FailureKind, LimitReached, RolloutError, TaskError
from prorl_gym.gateway.answer import AnswerFormat, AnswerHead, CompletedTurn, error_body
from prorl_gym.gateway.model_call import ModelCall, SamplingParams
from prorl_gym.harness.body_reader import BodyReader, ReadBody
from prorl_gym.harness.messages import MESSAGES
from prorl_gym.harness.wires import CHAT, RESPONSES, Wire, kind_of, lineage_of
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.harness_call import HarnessCall
from prorl_gym.inference.tokens.harness_session import TOKENS_PER_MESSAGE, HarnessSession
from prorl_gym.left_out import count_left_out
from prorl_gym.logs import redact
from prorl_gym.records import Message
from prorl_gym.settings import ResolvedSettings

log = logging.getLogger(__name__)

WIRES = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/messages": MESSAGES}
"""By the path of their calls."""
MODEL = "policy"
"""Name of the model in answers. Requests may name any."""
BODY_BYTES = 4 << 20
"""Of a body, beside those of what the context holds."""
_BYTES_PER_TOKEN = 32
"""Of a body as JSON."""
MAX_CONNECTIONS = 64
"""And at most ``_BACKLOG`` more, which have come at the same time."""
_BACKLOG = 16
MAX_CALLS = 32
"""Calls at the same time."""
MAX_HELD_BYTES = 64 << 20
"""Of the bodies whose calls run, and of their new messages."""
_MESSAGE_BYTES = 1 << 10
"""That a message takes beside its text."""
MAX_UNDELIVERED = 32
"""Answers kept that no request has received; the oldest is dropped."""
MAX_FAILURES = 3
"""Calls in a row that fail by our fault; then the rollout does."""

_LONG_BODY = 64 << 10
"""Bytes beyond which what is new in a body is not read on the event loop (some milliseconds)."""
_BODY_SECONDS = 60.0
KEEP_ALIVE_SECONDS = 10.0
_IDLE_SECONDS = 600.0
"""A connection without a request is closed after that: programs keep theirs while tools run."""
_STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
_RETRY_HEADERS = {"Retry-After": "1", "x-should-retry": "true"}


# Calls that several requests may wait for. Programs repeat a call when a connection breaks or when they lose patience.
# Sampling again would give another turn, and the one that was sampled first would be in no history. So an equal body
# joins the call while it runs, and gets its answer until one request has received it. When the last request that waits
# has gone, the call is stopped.


@dataclass(slots=True, eq=False)
class SharedCall:
    """One call, and its answer once it is sampled."""

    head: AnswerHead = field(default_factory=AnswerHead)
    is_delivered: bool = False
    """A request has received the whole answer."""
    waiting: int = 0
    """Requests that wait for it."""
    task: "asyncio.Task[CompletedTurn]" = field(init=False)


class SharedCalls:
    """The calls of one rollout, by what was sent. They run in its context, since deadlines are part of it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._calls: dict[bytes, SharedCall] = {}
        self._tasks: set[asyncio.Task[CompletedTurn]] = set()
        """All that are not over, those among them that were stopped and keep their tokens yet."""

    @property
    def running(self) -> int:
        return len(self._tasks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._calls

    @asynccontextmanager
    async def join(
        self, key: bytes, make: Callable[[SharedCall], Coroutine[Any, Any, CompletedTurn]]
    ) -> AsyncGenerator[SharedCall]:
        """Wait, for the block, for the running call of this digest, or for a new one that ``make`` makes."""
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = SharedCall()
            call.task = asyncio.get_running_loop().create_task(make(call), context=self._context)
            self._tasks.add(call.task)
            call.task.add_done_callback(self._tasks.discard)
        call.waiting += 1
        try:
            yield call
        finally:
            call.waiting -= 1
            await self._leave(key, call)

    async def close(self) -> None:
        self._calls.clear()
        await self._stop(*self._tasks)

    async def _leave(self, key: bytes, call: SharedCall) -> None:
        """Forget a call that is delivered or has failed, and stop one that no request waits for."""
        task = call.task
        if call.is_delivered or (task.done() and (task.cancelled() or task.exception() is not None)):
            self._forget(key, call)
        elif not call.waiting and not task.done():
            self._forget(key, call)
            await self._stop(task)
        elif task.done():
            undelivered = [key for key, one in self._calls.items() if one.task.done() and not one.waiting]
            for old in undelivered[:-MAX_UNDELIVERED]:
                del self._calls[old]

    async def _stop(self, *tasks: "asyncio.Task[CompletedTurn]") -> None:
        """Stop calls, and wait until their tokens are kept: a second cancel would end that wait of theirs."""
        for task in tasks:
            if not task.cancelling():
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, key: bytes, call: SharedCall) -> None:
        if self._calls.get(key) is call:
            del self._calls[key]


class RolloutGateway:
    """Answers the model calls of one rollout's program, on every wire.

    The sampling and limits of ``settings`` hold, whatever the program asks for.
    """

    def __init__(
        self,
        session: HarnessSession,
        codec: ChatCodec,
        settings: ResolvedSettings,
        side_calls: Sequence[str] = (),
        *,
        program: str,
    ) -> None:
        self.token = secrets.token_urlsafe(32)
        """Bearer token, which opens this rollout only."""
        self._session = session
        self._program = program
        self._side_calls = side_calls
        self._form = AnswerFormat(MODEL, codec, with_tokens=False, with_reasoning=True)
        self._sampling = SamplingParams(
            settings.temperature, settings.top_p, settings.max_turn_tokens, settings.top_k, settings.seed
        )
        self._bodies = BodyReader(session.context_limit // TOKENS_PER_MESSAGE)
        self._reading = Slot()
        self._held_bytes = 0
        self._calls = SharedCalls(copy_context())
        self._unanswered: dict[bytes, RolloutError] = {}
        """Calls that failed by our fault and were not answered since, by the digest of their bodies."""
        self._abandoned: set[bytes] = set()
        """Calls that the program gave up, or left open at its end, and that were not answered since."""
        self._failures = 0
        """Calls in a row that failed by our fault."""
        self._stop_reason: asyncio.Future[Exception] | None = None

    @asynccontextmanager
    async def serving(self, listener: socket) -> AsyncGenerator[None]:
        """Serve what connects to a listening socket, which it owns, for the block; cut all connections at its end.

        Calls are made in the context of the caller, so that they charge its deadline. Raises ``RolloutError`` at the
        end of a block that ended well if a call of the program failed by our fault, or an engine hung until the program
        gave it up, and it was not answered when it was made again: whatever the program did then measures no policy.
        """
        loop = asyncio.get_running_loop()
        self._calls = SharedCalls(copy_context())
        self._stop_reason = loop.create_future()
        longest = BODY_BYTES + _BYTES_PER_TOKEN * self._session.context_limit
        app = web.Application(client_max_size=longest, middlewares=[self._guard])
        for path, wire in WIRES.items():
            app.router.add_post(path, partial(self._answer, wire))
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_get("/", self._answer_root)
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, keepalive_timeout=_IDLE_SECONDS, auto_decompress=False
        )
        await runner.setup()
        http = cast("web.Server", runner.server)
        server = await loop.create_server(
            lambda: http() if len(http.connections) < MAX_CONNECTIONS else _Dropped(), sock=listener, backlog=_BACKLOG
        )
        try:
            yield
        finally:
            server.close()
            await self._calls.close()
            await runner.cleanup()
        for failure in self._unanswered.values():
            raise failure
        if self._abandoned and (hung := await self._session.failure_at_deadline()) is not None:
            raise hung

    async def wait_stopped(self) -> Exception:
        """Wait until no call is answered any more, and return why: ``LimitReached`` or ``RolloutError``."""
        assert self._stop_reason is not None, "it does not serve"
        return await asyncio.shield(self._stop_reason)

    def conversation(self) -> tuple[Sequence[Message], int]:
        """Return the main conversation so far, and how many of its messages came before the first sampled turn."""
        return self._session.main_conversation()

    # --- routes -------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Check the bearer token, and write every failure as the wires' clients read it."""
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        may_enter = secrets.compare_digest(given.encode(errors="replace"), self.token.encode())
        await asyncio.sleep(0)  # requests that wait for nothing, sent in one piece, would keep the loop
        if request.path != "/" and not may_enter:
            return _error(401, "this token does not open the rollout.\nSend the one that the program was given.")
        if "Content-Encoding" in request.headers:  # a megabyte of it may be a gigabyte
            return _error(415, "the body is compressed.\nSend it as it is.")
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

    async def _answer_root(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _list_models(self, request: web.Request) -> web.Response:
        names = {"id": MODEL, "display_name": MODEL, "owned_by": MODEL}
        model = {"object": "model", "type": "model", "created": 0, **names}
        page = {"object": "list", "data": [model], "has_more": False, "first_id": MODEL, "last_id": MODEL}
        return web.json_response(page)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        _, call = await self._read(MESSAGES, request)
        count = await self._session.count_tokens(HarnessCall(call.entries, call.tools))
        return web.json_response({"input_tokens": count})

    async def _answer(self, wire: Wire, request: web.Request) -> web.StreamResponse:
        body, asked = await self._read(wire, request)
        assert self._stop_reason is not None
        if self._stop_reason.done():
            raise self._stop_reason.result()
        is_full = body.digest not in self._calls and self._calls.running >= MAX_CALLS
        size = body.size + _MESSAGE_BYTES * (len(asked.entries) - len(body.known))
        if is_full or self._held_bytes + size > MAX_HELD_BYTES:
            return _error(503, "too many calls at the same time.\nWait for an answer.")
        make = partial(self._make_call, body.digest, asked, request.headers)
        async with self._held(size), self._calls.join(body.digest, make) as call:
            if body.fields.get("stream") is True:
                return await self._stream(wire, body.fields, call, request)
            await asyncio.wait({call.task})
            answer = wire.write_answer(self._finished_turn(call), body.fields, self._form)
            response = web.json_response(answer)
            await response.prepare(request)
            await response.write_eof()
            call.is_delivered = True
            return response

    @asynccontextmanager
    async def _held(self, size: int) -> AsyncGenerator[None]:
        """Count what a body takes while a request has it."""
        self._held_bytes += size
        try:
            yield
        finally:
            self._held_bytes -= size

    async def _read(self, wire: Wire, request: web.Request) -> tuple[ReadBody, ModelCall]:
        """Read a body, one at a time: the others wait in their sockets."""
        return await self._reading.run(partial(self._read_now, wire, request))

    async def _read_now(self, wire: Wire, request: web.Request) -> tuple[ReadBody, ModelCall]:
        async with asyncio.timeout(_BODY_SECONDS):
            raw = await request.read()
        read = partial(self._read_body, wire, request.path, raw)
        return read() if self._bodies.count_new(request.path, raw) < _LONG_BODY else await asyncio.to_thread(read)

    def _read_body(self, wire: Wire, path: str, raw: bytes) -> tuple[ReadBody, ModelCall]:
        omitted = Counter[str]()
        try:
            body = self._bodies.read(path, wire.history_key, raw)
            call = wire.read(body, self._sampling, omitted)
        except ConfigError:  # it names what is wrong, and the fix
            raise
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"the body is no call that can be read ({str(error)[:200]}).", "Send JSON.") from None
        count_left_out("agent_program", self._program, omitted.elements())
        return body, call

    # --- one call -----------------------------------------------------------------------------------------------

    async def _make_call(
        self, digest: bytes, call: ModelCall, headers: Mapping[str, str], shared: SharedCall
    ) -> CompletedTurn:
        asked = HarnessCall(
            call.entries,
            call.tools,
            max_tokens=call.sampling.max_tokens,
            may_call_tools=call.may_call_tools,
            single_tool_call=call.single_tool_call,
            lineage=lineage_of(headers),
            kind=kind_of(call.entries, self._side_calls, has_tools=bool(call.tools)),
        )
        try:
            turn = await self._session.answer(asked)
        except asyncio.CancelledError:  # the program has given up, or ended
            self._abandoned.add(digest)
            raise
        except (LimitReached, TaskError) as reason:
            self._stop(reason)
            raise
        except Exception as error:
            failure = error
            if not isinstance(failure, RolloutError):
                log.error("the gateway of a rollout failed", exc_info=error)
                failure = RolloutError(FailureKind.INTERNAL, f"the gateway failed ({type(error).__name__}).")
            log.warning("a call of an agent program failed: %s", failure)
            self._unanswered[digest] = failure
            self._failures += 1
            if self._failures >= MAX_FAILURES:
                self._stop(failure)
            raise failure from None
        self._unanswered.pop(digest, None)
        self._abandoned.discard(digest)
        self._failures = 0
        return CompletedTurn(call, turn.prompt, turn.sampled, turn.parsed, shared.head)

    def _stop(self, reason: Exception) -> None:
        if self._stop_reason is not None and not self._stop_reason.done():
            self._stop_reason.set_result(reason)

    def _finished_turn(self, call: SharedCall) -> CompletedTurn:
        """Return the turn of a call that is over, or raise why there is none."""
        if call.task.cancelled():
            raise EngineError(FailureKind.INTERNAL, "the gateway is closing.")
        return call.task.result()

    async def _stream(
        self, wire: Wire, body: Mapping[str, Any], call: SharedCall, request: web.Request
    ) -> web.StreamResponse:
        """Send the answer as events: all of it once it is there and checked, and before that what keeps a stream alive.

        Of an answer that fails the program gets no part, and of one that is sampled again no other beginning.
        """
        writer = wire.open_events(call.head, self._form, body)
        await asyncio.wait({call.task}, timeout=KEEP_ALIVE_SECONDS)
        if call.task.done():
            self._finished_turn(call)  # before anything is sent, a failure has a status of its own
        response = _EventResponse(headers=_STREAM_HEADERS)
        await response.prepare(request)
        events = writer.begin()
        while not call.task.done():
            await response.write(events + writer.keep_alive())
            events = b""
            await asyncio.wait({call.task}, timeout=KEEP_ALIVE_SECONDS)
        try:
            answer = wire.write_answer(self._finished_turn(call), body, self._form)
        except (LimitReached, RolloutError) as error:
            await response.write(writer.fail(redact(str(error))))
            response.force_close()
            return response
        await response.write_eof(events + writer.end(answer))
        call.is_delivered = True
        return response


class _EventResponse(web.StreamResponse):
    """Sends its headers with the first events: each packet wakes the program."""

    _send_headers_immediately = False


class _Dropped(asyncio.Protocol):
    """Drops a connection, which is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).abort()


def _error(status: int, message: str) -> web.Response:
    return web.json_response(error_body(message), status=status, headers=_RETRY_HEADERS if status >= 500 else None)
