"""The model calls of nodes: placed by the head in its own pools (``RemoteCalls``), made by a node (``RemotePool``).

A call of a node is an ordinary call of an ``EnginePool``, with admission, gate, balancing, failover and versions as
always. Only the exchange with the engine is the node's, which reports how it ended. Until a call is placed, and while
the head decides about one that failed, its deadline is paused.

While the head cannot be reached, a call goes to the session's last engine, if that engine reports which weights sampled
which token: its labels then need no word of the head. All other calls wait for the head.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from uuid import uuid4

from pydantic import BaseModel

from prorl_gym.deadlines import Deadline, paused_deadline, use_deadline
from prorl_gym.errors import EngineError, LimitReached
from prorl_gym.inference.balance.call_gate import CallGate, InFlightCall
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.balance.members import ChangeSignal, PoolEngine, PoolMember
from prorl_gym.inference.engines.http_engine import HttpEngine
from prorl_gym.inference.protocol import ContextExceeded, GenerationRequest, GenerationResult
from prorl_gym.rollout.nodes import wire

ResultT = TypeVar("ResultT")

_Reply = wire.CallPlaced | wire.CallRefused


@dataclass(slots=True, eq=False)
class _Call:
    """A call of this node from its request until its end."""

    request: GenerationRequest
    reply: "asyncio.Future[_Reply]"
    """The head's next decision."""
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
    """Replaces an ``EnginePool`` on a node; ``make_engine`` takes an engine's name and base URL."""

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
        self._homes: dict[str, wire.CallPlaced] = {}
        """Engine of the last answered call of each session."""
        self._queries: dict[str, tuple[wire.RoomQuery | wire.SamplingQuery, asyncio.Future[bool]]] = {}
        """Those that the head has not answered, by id."""
        self._is_head_away = False

    async def wait_for_room(self, session_id: str) -> None:
        await self._ask(wire.RoomQuery(query=uuid4().hex, pool=self.name, session=session_id))

    def release_slot(self, session_id: str) -> None:
        self._send(wire.SessionFreed(pool=self.name, session=session_id, forget=False))

    def forget_session(self, session_id: str) -> None:
        self._homes.pop(session_id, None)
        self._send(wire.SessionFreed(pool=self.name, session=session_id, forget=True))

    def find_call(self, request_id: str) -> InFlightCall | None:
        return self._gate.find_call(request_id)

    async def cancel(self, request_id: str) -> bool:
        flight = self.find_call(request_id)
        if flight is not None:
            await flight.stop()
        return flight is not None

    async def may_have_sampled(self, member: PoolMember, max_tokens: int, seconds: float) -> bool:
        query = wire.SamplingQuery(
            query=uuid4().hex, pool=self.name, engine=member.name, max_tokens=max_tokens, seconds=seconds
        )
        return await self._ask(query)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        loop = asyncio.get_running_loop()
        call = self._calls[request.request_id] = _Call(request, loop.create_future())
        is_over = False
        try:
            self._request_placement(call)
            while True:
                with paused_deadline():
                    reply = await call.reply
                call.reply = loop.create_future()
                if call.last_flight is not None and (isinstance(reply, wire.CallPlaced) or reply.is_refunded):
                    call.last_flight.refund_deadline()
                if isinstance(reply, wire.CallRefused):
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
                self._send(wire.CallWithdrawn(call=request.request_id))

    # --- messages of the head -----------------------------------------------------------------------------------

    def handle(self, message: wire.CallReply) -> None:
        """Process a message of the head. What names an unknown call is ignored: it is over."""
        if isinstance(message, wire.QueryAnswered):
            if (waiting := self._queries.get(message.query)) is not None:
                _resolve(waiting[1], message.answer)
            return
        call = self._calls.get(message.call)
        if call is None:
            return
        match message:
            case wire.CallPlaced() | wire.CallRefused():
                _resolve(call.reply, message)
            case wire.CallStopped():
                call.stop(by_pause=message.by_pause)
            case wire.ClockPaused():
                call.set_clock(pause=message.pause)

    def on_joined(self, max_model_len: int | None) -> None:
        """Request everything that waits again: a head that knows none of the calls accepted this node.

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
        await asyncio.gather(*(member.engine.close() for member in self._members.values()))

    async def _ask(self, query: wire.RoomQuery | wire.SamplingQuery) -> bool:
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queries[query.query] = query, answer
        self._send(query)
        try:
            return await answer
        finally:
            del self._queries[query.query]
            if answer.cancelled():
                self._send(wire.CallWithdrawn(call=query.query))

    # --- one call -----------------------------------------------------------------------------------------------

    def _request_placement(self, call: _Call) -> None:
        request = call.request
        self._send(
            wire.CallRequest(
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

    async def _try_call(self, call: _Call, placed: wire.CallPlaced) -> GenerationResult | None:
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
                failure = wire.CallFailure.of(error)
                self._send(wire.CallEnded(call=request.request_id, attempt=placed.attempt, failure=failure))
                return None
            finally:
                call.set_clock(pause=False)
                call.flight = None
        self._homes[request.session_id] = placed
        member.reports_versions = result.versions_reported
        self._send(
            wire.CallEnded(
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

    def _member_of(self, placed: wire.CallPlaced) -> PoolMember:
        key = placed.engine, placed.url
        if key not in self._members:
            self._members[key] = PoolMember(self._make_engine(placed.engine, placed.url))
        return self._members[key]


def _resolve(future: "asyncio.Future[ResultT]", result: ResultT) -> None:
    if not future.done():
        future.set_result(result)


# --- the head's side ------------------------------------------------------------------------------------------------


class RemoteCalls:
    """Places the model calls of one node on ``pools``, by name."""

    def __init__(self, pools: Mapping[str, EnginePool], send: Callable[[BaseModel], None]) -> None:
        self._pools = pools
        self._send = send
        self._calls: dict[str, _RemoteCall] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """By id of the call or query."""
        self._sessions: dict[tuple[str, str], set[str]] = {}
        """Ids of their calls and waits for room; by name of the pool."""

    @property
    def count(self) -> int:
        """Calls that are placed or wait for it."""
        return len(self._calls)

    def handle(self, message: wire.CallMessage) -> None:
        """Process a message of the node. Unknown pools and calls are ignored: they belong to an earlier head."""
        match message:
            case wire.CallEnded():
                if (call := self._calls.get(message.call)) is not None:
                    call.on_ended(message)
            case wire.CallWithdrawn():
                if (task := self._tasks.get(message.call)) is not None:  # it may have come in the same page
                    task.cancel()
            case _ if (pool := self._pools.get(message.pool)) is None:
                pass
            case wire.CallRequest():
                self._spawn(message.call, self._place_call(pool, message), (pool.name, message.session))
            case wire.RoomQuery():
                self._spawn(message.query, self._wait_for_room(pool, message), (pool.name, message.session))
            case wire.SamplingQuery():
                self._spawn(message.query, self._answer_query(pool, message))
            case wire.SessionFreed(forget=False):
                pool.release_slot(message.session)
            case _:
                ids = self._sessions.pop((pool.name, message.session), ())
                ending = [task for task in map(self._tasks.get, ids) if task is not None]
                if ending:  # withdrawn, or about to end: the pool forgets a session after its last call
                    self._spawn(f"end of {message.session}", _forget_after(ending, pool, message.session))
                else:
                    pool.forget_session(message.session)

    async def close(self) -> None:
        """Withdraw every call, and forget the sessions: the node is lost or left."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pool, session in self._sessions:
            self._pools[pool].forget_session(session)
        self._sessions.clear()

    def _spawn(self, key: str, work: Coroutine[Any, Any, None], session: tuple[str, str] | None = None) -> None:
        def on_done(ended: asyncio.Task[None]) -> None:
            if self._tasks.get(key) is ended:  # a rollout's session may end twice, with two attempts
                del self._tasks[key]
            if session in self._sessions:
                self._sessions[session].discard(key)

        task = self._tasks[key] = asyncio.create_task(work)
        if session is not None:
            self._sessions.setdefault(session, set()).add(key)
        task.add_done_callback(on_done)

    async def _wait_for_room(self, pool: EnginePool, query: wire.RoomQuery) -> None:
        await pool.wait_for_room(query.session)
        self._send(wire.QueryAnswered(query=query.query))

    async def _answer_query(self, pool: EnginePool, query: wire.SamplingQuery) -> None:
        member = pool.members.get(query.engine)
        could = member is not None and await pool.may_have_sampled(member, query.max_tokens, query.seconds)
        self._send(wire.QueryAnswered(query=query.query, answer=could))

    async def _place_call(self, pool: EnginePool, wanted: wire.CallRequest) -> None:
        call = self._calls[wanted.call] = _RemoteCall(pool, wanted, self._send)
        request = GenerationRequest(
            request_id=wanted.call,
            session_id=wanted.session,
            prompt_ids=range(wanted.prompt_tokens),
            max_tokens=wanted.max_tokens,
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            stop_token_ids=(),
            cache_salt=wanted.cache_salt,
            priority=wanted.priority,
            group_id=wanted.group,
        )
        try:
            with use_deadline(call.clock):
                await pool.generate(request, call)
        except (EngineError, LimitReached) as error:
            refused = wire.CallRefused(
                call=wanted.call, failure=wire.CallFailure.of(error), is_refunded=call.clock.is_refunded
            )
            self._send(refused)
        finally:
            del self._calls[wanted.call]


class _RemoteCall:
    """Implements ``CallExecutor`` for one call: the node makes its tries."""

    def __init__(self, pool: EnginePool, wanted: wire.CallRequest, send: Callable[[BaseModel], None]) -> None:
        self.clock = _RemoteClock(wanted.call, send)
        self._pool = pool
        self._wanted = wanted
        self._send = send
        self._attempt_id = ""
        self._ended: asyncio.Future[wire.CallEnded] | None = None

    async def generate(self, member: PoolMember, request: GenerationRequest) -> GenerationResult:
        """See ``CallExecutor.generate``. Of the sampled tokens, the result holds only their number."""
        ended = self._ended = asyncio.get_running_loop().create_future()
        self._attempt_id = request.request_id
        engine = member.engine
        self.clock.is_refunded = False
        self.clock.is_running = True
        self._send(
            wire.CallPlaced(
                call=self._wanted.call,
                attempt=request.request_id,
                engine=member.name,
                url=engine.url if isinstance(engine, HttpEngine) else "",
                version=member.version,
                cache_salt=request.cache_salt,
                max_model_len=self._pool.max_model_len,
            )
        )
        try:
            outcome = await ended
        finally:
            self.clock.is_running = False
        if outcome.failure is not None:
            raise outcome.failure.to_error()
        return GenerationResult(
            token_ids=[0] * outcome.sampled_tokens,
            logprobs=[],
            finish_reason=outcome.finish_reason,
            logprob_kind="raw",
            engine=member.name,
            versions=[],
            seconds=outcome.seconds,
            cached_tokens=outcome.cached_tokens,
            versions_reported=outcome.versions_reported,
        )

    async def cancel(self, request_id: str, *, by_pause: bool) -> None:
        self._send(wire.CallStopped(call=self._wanted.call, by_pause=by_pause))

    def on_ended(self, message: wire.CallEnded) -> None:
        if self._ended is not None and not self._ended.done() and message.attempt == self._attempt_id:
            self._ended.set_result(message)


class _RemoteClock(Deadline):
    """The deadline of a call on a node: changes during a try are sent there; between tries the node pauses it."""

    def __init__(self, call: str, send: Callable[[BaseModel], None]) -> None:
        super().__init__(0.0)
        self.is_running = False
        """A try runs."""
        self.is_refunded = False
        """The last try is charged to no deadline."""
        self._call = call
        self._send = send

    @property
    def charged_seconds(self) -> float:
        return 0.0  # unknown here

    def pause(self) -> None:
        if self.is_running:
            self._send(wire.ClockPaused(call=self._call, pause=True))

    def resume(self) -> None:
        if self.is_running:
            self._send(wire.ClockPaused(call=self._call, pause=False))

    def refund(self, charged_before: float) -> None:
        self.is_refunded = True


async def _forget_after(calls: Sequence[asyncio.Task[None]], pool: EnginePool, session: str) -> None:
    await asyncio.wait(calls)
    pool.forget_session(session)
