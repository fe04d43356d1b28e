"""The head's side of the model calls of one node: placed by the head's own pools, made by the node.

A call of a node is an ordinary call of an ``EnginePool``, with admission, gate, balancing, failover and versions as
always. Only the exchange with the engine is the node's: it is told where, and reports how it ended.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from prorl_gym.deadlines import Deadline, use_deadline
from prorl_gym.errors import EngineError, LimitReached
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.balance.members import PoolMember
from prorl_gym.inference.engines.http_engine import HttpEngine
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult
from prorl_gym.rollout.nodes.wire import (
    CallEnded,
    CallFailure,
    CallMessage,
    CallPlaced,
    CallRefused,
    CallRequest,
    CallStopped,
    CallWithdrawn,
    ClockPaused,
    PoolMessage,
    QueryAnswered,
    RoomQuery,
    SamplingQuery,
    SessionFreed,
)


class RemoteCalls:
    """Places the model calls of one node.

    Args:
        pools: by name.
        send: sends a message to the node.
    """

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

    def handle(self, message: CallMessage) -> None:
        """Process a message of the node. Unknown pools and calls are ignored: they belong to an earlier head."""
        match message:
            case CallEnded():
                if (call := self._calls.get(message.call)) is not None:
                    call.on_ended(message)
            case CallWithdrawn():
                if (task := self._tasks.get(message.call)) is not None:  # it may have come in the same page
                    task.cancel()
            case _ if (pool := self._pools.get(message.pool)) is not None:
                self._handle_pool_message(pool, message)
            case _:
                pass

    def _handle_pool_message(self, pool: EnginePool, message: PoolMessage) -> None:
        match message:
            case CallRequest():
                self._spawn(message.call, self._place_call(pool, message), (pool.name, message.session))
            case RoomQuery():
                self._spawn(message.query, self._wait_for_room(pool, message), (pool.name, message.session))
            case SamplingQuery():
                self._spawn(message.query, self._answer_query(pool, message))
            case SessionFreed(forget=False):
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
        task = self._tasks[key] = asyncio.create_task(work)
        if session is not None:
            self._sessions.setdefault(session, set()).add(key)
        task.add_done_callback(lambda ended: self._on_task_done(key, session, ended))

    def _on_task_done(self, key: str, session: tuple[str, str] | None, task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:  # a rollout's session may end twice, with two attempts
            del self._tasks[key]
        if session in self._sessions:
            self._sessions[session].discard(key)

    async def _wait_for_room(self, pool: EnginePool, query: RoomQuery) -> None:
        await pool.wait_for_room(query.session)
        self._send(QueryAnswered(query=query.query))

    async def _answer_query(self, pool: EnginePool, query: SamplingQuery) -> None:
        member = pool.members.get(query.engine)
        could = member is not None and await pool.may_have_sampled(member, query.max_tokens, query.seconds)
        self._send(QueryAnswered(query=query.query, answer=could))

    async def _place_call(self, pool: EnginePool, wanted: CallRequest) -> None:
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
            refused = CallRefused(call=wanted.call, failure=CallFailure.of(error), is_refunded=call.clock.is_refunded)
            self._send(refused)
        finally:
            del self._calls[wanted.call]


class _RemoteCall:
    """Implements ``CallExecutor`` for one call: the node makes its tries."""

    def __init__(self, pool: EnginePool, wanted: CallRequest, send: Callable[[BaseModel], None]) -> None:
        self.clock = _RemoteClock(wanted.call, send)
        self._pool = pool
        self._wanted = wanted
        self._send = send
        self._attempt_id = ""
        self._ended: asyncio.Future[CallEnded] | None = None

    async def generate(self, member: PoolMember, request: GenerationRequest) -> GenerationResult:
        """See ``CallExecutor.generate``. Of the sampled tokens, the result holds only their number."""
        ended = self._ended = asyncio.get_running_loop().create_future()
        self._attempt_id = request.request_id
        engine = member.engine
        self.clock.is_refunded = False
        self.clock.is_running = True
        self._send(
            CallPlaced(
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
        """See ``CallExecutor.cancel``."""
        self._send(CallStopped(call=self._wanted.call, by_pause=by_pause))

    def on_ended(self, message: CallEnded) -> None:
        """The node reports the end of a try."""
        if self._ended is not None and not self._ended.done() and message.attempt == self._attempt_id:
            self._ended.set_result(message)


class _RemoteClock(Deadline):
    """The deadline of a call on a node, as the pool sees it: changes during a try are sent there.

    While no try runs, the node has its deadline paused.
    """

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
        """Unknown here."""
        return 0.0

    def pause(self) -> None:
        """Pause the node's deadline."""
        if self.is_running:
            self._send(ClockPaused(call=self._call, pause=True))

    def resume(self) -> None:
        """Resume the node's deadline."""
        if self.is_running:
            self._send(ClockPaused(call=self._call, pause=False))

    def refund(self, charged_before: float) -> None:
        """Charge nothing for the try that failed."""
        self.is_refunded = True


async def _forget_after(calls: Sequence[asyncio.Task[None]], pool: EnginePool, session: str) -> None:
    await asyncio.wait(calls)
    pool.forget_session(session)
