"""A pool of engines as a node sees it: the head places each call, the node makes it.

Until a call is placed, and while the head decides about one that failed, its deadline is paused. While the head cannot
be reached, a call goes to the session's last engine, if that engine reports which weights sampled which token: its
labels then need no word of the head. All other calls wait for the head.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar
from uuid import uuid4

from pydantic import BaseModel

from prorl_gym.deadlines import paused_deadline
from prorl_gym.errors import EngineError
from prorl_gym.inference.balance.call_gate import CallGate, InFlightCall
from prorl_gym.inference.balance.members import ChangeSignal, PoolEngine, PoolMember
from prorl_gym.inference.engine_errors import ContextExceeded
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult
from prorl_gym.rollout.nodes.wire import (
    CallEnded,
    CallFailure,
    CallPlaced,
    CallRefused,
    CallReply,
    CallRequest,
    CallStopped,
    CallWithdrawn,
    ClockPaused,
    QueryAnswered,
    RoomQuery,
    SamplingQuery,
    SessionFreed,
)

ResultT = TypeVar("ResultT")

_Reply = CallPlaced | CallRefused


@dataclass(slots=True, eq=False)
class _Call:
    """A call of this node from its request until its end."""

    request: GenerationRequest
    reply: "asyncio.Future[_Reply]"
    """What the head decides next."""
    flight: InFlightCall | None = None
    """The try that an engine works on."""
    last_flight: InFlightCall | None = None
    is_direct: bool = False
    """The last try was not placed by the head."""
    is_unknown_to_head: bool = False
    """The head was started again during the try: should it fail, nothing follows unless it is requested again."""
    is_paused: bool = False
    """The head paused the deadline."""
    stopping: asyncio.Task[None] | None = None

    def stop(self, *, by_pause: bool) -> None:
        """Stop the try at its engine, which keeps what it sampled. The head repeats a stop that comes too early."""
        if self.flight is not None:
            self.flight.is_cut_short |= by_pause
            self.stopping = asyncio.create_task(self.flight.stop())

    def set_clock(self, *, pause: bool) -> None:
        """Pause or resume the deadline during a try. Idempotent."""
        deadline = None if self.flight is None else self.flight.deadline
        if deadline is not None and pause != self.is_paused:
            self.is_paused = pause
            (deadline.pause if pause else deadline.resume)()


class RemotePool:
    """Stands in for an ``EnginePool`` on a node.

    Args:
        name: of the pool.
        make_engine: makes an engine of a name and a base URL.
        send: sends a message to the head.
    """

    def __init__(
        self, name: str, make_engine: Callable[[str, str], PoolEngine], send: Callable[[BaseModel], None]
    ) -> None:
        self.name = name
        self.max_model_len: int | None = None
        self._make_engine = make_engine
        self._send = send
        self._members: dict[tuple[str, str], PoolMember] = {}
        self._calls: dict[str, _Call] = {}
        self._gate = CallGate(ChangeSignal())
        """Tracks the tries; the head decides when one begins."""
        self._homes: dict[str, CallPlaced] = {}
        """Where the last call of each session was answered."""
        self._queries: dict[str, tuple[RoomQuery | SamplingQuery, asyncio.Future[bool]]] = {}
        """Those that the head has not answered, by id."""
        self._is_head_away = False

    async def wait_for_room(self, session_id: str) -> None:
        """See ``EnginePool.wait_for_room``."""
        await self._ask(RoomQuery(query=uuid4().hex, pool=self.name, session=session_id))

    def release_slot(self, session_id: str) -> None:
        """See ``EnginePool.release_slot``."""
        self._send(SessionFreed(pool=self.name, session=session_id, forget=False))

    def forget_session(self, session_id: str) -> None:
        """See ``EnginePool.forget_session``."""
        self._homes.pop(session_id, None)
        self._send(SessionFreed(pool=self.name, session=session_id, forget=True))

    def find_call(self, request_id: str) -> InFlightCall | None:
        """See ``EnginePool.find_call``."""
        return self._gate.find_call(request_id)

    async def cancel(self, request_id: str) -> bool:
        """See ``EnginePool.cancel``."""
        flight = self.find_call(request_id)
        if flight is not None:
            await flight.stop()
        return flight is not None

    async def may_have_sampled(self, member: PoolMember, max_tokens: int, seconds: float) -> bool:
        """See ``EnginePool.may_have_sampled``."""
        query = SamplingQuery(
            query=uuid4().hex, pool=self.name, engine=member.name, max_tokens=max_tokens, seconds=seconds
        )
        return await self._ask(query)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See ``EnginePool.generate``.

        Raises:
            EngineError, ContextExceeded: as there.
        """
        loop = asyncio.get_running_loop()
        call = self._calls[request.request_id] = _Call(request, loop.create_future())
        is_over = False
        try:
            self._request_placement(call)
            while True:
                with paused_deadline():
                    reply = await call.reply
                call.reply = loop.create_future()
                if call.last_flight is not None and (isinstance(reply, CallPlaced) or reply.is_refunded):
                    call.last_flight.refund_deadline()
                if isinstance(reply, CallRefused):
                    is_over = True
                    raise reply.failure.to_error()
                result = await self._try_call(call, reply)
                if result is not None:
                    is_over = not call.is_direct
                    return result
                if call.is_unknown_to_head:
                    call.is_unknown_to_head = False
                    self._request_placement(call)
        finally:
            del self._calls[request.request_id]
            if not is_over:
                self._send(CallWithdrawn(call=request.request_id))

    # --- messages of the head -----------------------------------------------------------------------------------

    def handle(self, message: CallReply) -> None:
        """Process a message of the head. What names an unknown call is ignored: it is over."""
        match message:
            case QueryAnswered():
                if (waiting := self._queries.get(message.query)) is not None:
                    _resolve(waiting[1], message.answer)
            case _ if (call := self._calls.get(message.call)) is not None:
                self._handle_call_message(call, message)
            case _:
                pass

    def _handle_call_message(self, call: _Call, message: CallPlaced | CallRefused | CallStopped | ClockPaused) -> None:
        match message:
            case CallPlaced() | CallRefused():
                _resolve(call.reply, message)
            case CallStopped():
                call.stop(by_pause=message.by_pause)
            case ClockPaused():
                call.set_clock(pause=message.pause)

    def on_joined(self, max_model_len: int | None) -> None:
        """A head that knows none of the calls accepted this node: request everything again that waits.

        A try on an engine that does not report versions is stopped: the new head would not wait for it before weights
        change. What it sampled is kept, and the call continues where the head places it.
        """
        self.max_model_len = max_model_len or self.max_model_len
        self._is_head_away = False
        for query, _ in self._queries.values():
            self._send(query)
        for call in self._calls.values():
            if call.flight is None and not call.reply.done():
                self._request_placement(call)
                continue
            call.is_unknown_to_head = True
            if call.flight is not None and not call.flight.member.reports_versions:
                call.stop(by_pause=True)

    def set_head_away(self, *, is_away: bool) -> None:
        """Place calls here from now on where that is safe, or leave them to the head again."""
        self._is_head_away = is_away
        if is_away:
            for call in self._calls.values():
                self._place_directly(call)

    async def close(self) -> None:
        """Close the engines' connections."""
        await asyncio.gather(*(member.engine.close() for member in self._members.values()))

    async def _ask(self, query: RoomQuery | SamplingQuery) -> bool:
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queries[query.query] = query, answer
        self._send(query)
        try:
            return await answer
        finally:
            del self._queries[query.query]
            if answer.cancelled():
                self._send(CallWithdrawn(call=query.query))

    # --- one call -----------------------------------------------------------------------------------------------

    def _request_placement(self, call: _Call) -> None:
        request = call.request
        self._send(
            CallRequest(
                call=request.request_id,
                pool=self.name,
                session=request.session_id,
                group=request.group_id,
                prompt_tokens=len(request.prompt_ids),
                max_tokens=request.max_tokens,
                priority=request.priority,
                cache_salt=request.cache_salt,
            )
        )
        if self._is_head_away:
            self._place_directly(call)

    def _place_directly(self, call: _Call) -> None:
        """Place a call on its session's last engine, if that is safe; a call that failed there waits for the head."""
        home = self._homes.get(call.request.session_id)
        if home is None or call.flight is not None or call.reply.done() or not self._member_of(home).reports_versions:
            return
        call.is_direct = True
        call.reply.set_result(home.model_copy(update={"call": call.request.request_id, "attempt": uuid4().hex}))

    async def _try_call(self, call: _Call, placed: CallPlaced) -> GenerationResult | None:
        """Make one try and report its end; ``None``: it failed, and the head decides what follows."""
        request, member = call.request, self._member_of(placed)
        member.engine.version = placed.version
        self.max_model_len = placed.max_model_len or self.max_model_len
        sent = replace(request, request_id=placed.attempt, cache_salt=placed.cache_salt)
        with self._gate.track_call(request.request_id, placed.attempt, member) as flight:
            call.flight = call.last_flight = flight
            try:
                result = await member.engine.generate(sent)
            except (EngineError, ContextExceeded) as error:
                self._homes.pop(request.session_id, None)
                failure = CallFailure.of(error)
                self._send(CallEnded(call=request.request_id, attempt=placed.attempt, failure=failure))
                return None
            finally:
                call.set_clock(pause=False)
                call.flight = None
        self._homes[request.session_id] = placed
        member.reports_versions = result.versions_reported
        self._send(
            CallEnded(
                call=request.request_id,
                attempt=placed.attempt,
                sampled_tokens=len(result.token_ids),
                cached_tokens=result.cached_tokens,
                seconds=result.seconds,
                finish_reason=result.finish_reason,
                versions_reported=result.versions_reported,
            )
        )
        return replace(result, aborted_by_pause=flight.is_cut_short and result.finish_reason == "abort")

    def _member_of(self, placed: CallPlaced) -> PoolMember:
        key = placed.engine, placed.url
        if key not in self._members:
            self._members[key] = PoolMember(self._make_engine(placed.engine, placed.url))
        return self._members[key]


def _resolve(future: "asyncio.Future[ResultT]", result: ResultT) -> None:
    if not future.done():
        future.set_result(result)
