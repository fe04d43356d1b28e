"""Model calls of a node: placed by the head's pool, made by the node, with the promises of a pool in one process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest
from pydantic import BaseModel, TypeAdapter

from prorl_gym.deadlines import Deadline
from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.balance.cost_policy import CostPolicy
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.balance.health_monitor import FailoverOptions
from prorl_gym.inference.protocol import (
    CallTimedOut,
    ContextExceeded,
    EngineOverloaded,
    GenerationRequest,
    GenerationResult,
    ModelMissing,
)
from prorl_gym.inference.weights.weight_updater import WeightUpdater
from prorl_gym.rollout.nodes.remote_pool import RemoteCalls, RemotePool
from prorl_gym.rollout.nodes.wire import CallFailure, CallRequest, CallWithdrawn, DownMessage, SessionFreed, UpMessage
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply

_UP: TypeAdapter[Any] = TypeAdapter(UpMessage)
_DOWN: TypeAdapter[Any] = TypeAdapter(DownMessage)

TOKENS = (5, 6, 7, 8)


def request(session: str = "r0", **fields: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=uuid4().hex,
        session_id=session,
        prompt_ids=(1, 2, 3),
        max_tokens=16,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        stop_token_ids=(),
        **fields,
    )


class Link:
    """A head's pool and a node's, and the messages between them, one pass of the loop later each."""

    def __init__(self, *engines: FakeEngine) -> None:
        self.engines = {engine.name: engine for engine in engines}
        failover = FailoverOptions(recovery_seconds=0.2)
        self.pool = EnginePool("policy", failover=failover, max_model_len=64)
        for engine in engines:
            self.pool.add_engine(engine)
        self.is_cut = False
        self.sent: list[str] = []
        self.calls = self.new_head()
        self.node = RemotePool("policy", lambda name, url: self.engines[name], self._up)

    def new_head(self) -> RemoteCalls:
        self.calls = RemoteCalls({"policy": self.pool}, self._down)
        return self.calls

    def _up(self, message: BaseModel) -> None:
        self._carry(message, lambda text: self.calls.handle(_UP.validate_json(text)))

    def _down(self, message: BaseModel) -> None:
        self._carry(message, lambda text: self.node.handle(_DOWN.validate_json(text)))

    def _carry(self, message: BaseModel, deliver: Any) -> None:
        text = message.model_dump_json()
        self.sent.append(text)
        if not self.is_cut:
            asyncio.get_running_loop().call_soon(deliver, text)

    def check_returned(self) -> None:
        assert (self.calls.count, self.pool.gate.calls) == (0, [])
        assert all(member.in_flight == 0 for member in self.pool.members.all)
        sessions = self.pool.snapshot().admission
        assert (sessions.sessions, sessions.arriving, sessions.waiting) == (0, 0, 0)


@asynccontextmanager
async def linked(*engines: FakeEngine) -> AsyncIterator[Link]:
    link = Link(*engines)
    try:
        yield link
    finally:
        await link.calls.close()
        await link.pool.close()


def engine(name: str = "a", hold: asyncio.Event | None = None, **fields: Any) -> FakeEngine:
    return FakeEngine(name, lambda _: Reply(TOKENS, hold=hold), **fields)


async def held_call(link: Link, wanted: GenerationRequest | None = None) -> "asyncio.Task[GenerationResult]":
    """Make a call on the node, until its engine holds it."""
    call = asyncio.create_task(link.node.generate(wanted or request()))
    await link.engines["a"].call_held.wait()
    return call


async def settled(link: Link) -> None:
    link.node.forget_session("r0")
    for _ in range(20):
        await asyncio.sleep(0)
    link.check_returned()


async def test_the_node_makes_the_call_and_the_head_counts_it() -> None:
    async with linked(engine()) as link:
        link.pool.set_version(3)
        result = await link.node.generate(request())
        assert (result.token_ids, result.engine, result.versions) == (list(TOKENS), "a", [3] * 4)
        assert link.engines["a"].requests[0].prompt_ids == (1, 2, 3)
        await settled(link)
        (member,) = link.pool.members.all
        assert (member.calls, member.sampled_tokens) == (1, 4)
        assert link.node.max_model_len == 64


async def test_a_call_that_fails_goes_to_another_engine_and_costs_no_deadline() -> None:
    async with linked(engine("a"), engine("b")) as link:
        first = EngineError(FailureKind.ENGINE_UNREACHABLE, "gone.")
        link.engines["a"].down_error = first
        async with Deadline(10) as deadline:
            results = [await link.node.generate(request(f"r{number}")) for number in range(4)]
            assert deadline.charged_seconds < 0.5
        assert {result.engine for result in results} == {"b"}
        for number in range(4):
            link.node.forget_session(f"r{number}")
        await settled(link)


async def test_the_heads_verdict_is_raised_where_no_engine_is_well() -> None:
    async with linked(engine()) as link:
        link.engines["a"].down_error = EngineError(FailureKind.ENGINE_UNREACHABLE, "gone.")
        with pytest.raises(EngineError) as raised:
            await link.node.generate(request())
        assert raised.value.kind is FailureKind.ENGINE_UNREACHABLE
        await settled(link)


async def test_a_pause_cuts_calls_on_nodes_short_and_the_next_waits_for_the_new_weights() -> None:
    hold = asyncio.Event()
    async with linked(engine(hold=hold)) as link:
        updater = WeightUpdater(link.pool, 100)
        call = await held_call(link)
        await updater.pause("abort")
        result = await call
        assert (result.finish_reason, result.token_ids, result.aborted_by_pause) == ("abort", [5, 6], True)
        hold.set()
        following = asyncio.create_task(link.node.generate(request()))
        async with Deadline(0.1) as deadline:
            waiting = asyncio.create_task(link.node.generate(request()))
            await asyncio.sleep(0.15)
            assert deadline.charged_seconds < 0.2
            await updater.update(1)
            await updater.resume()
            assert (await waiting).versions == [1] * 4
        assert (await following).versions == [1] * 4
        await updater.close()
        await settled(link)


async def test_a_pause_that_keeps_calls_stops_their_deadlines() -> None:
    hold = asyncio.Event()
    async with linked(engine(hold=hold)) as link:
        async with Deadline(10) as deadline:
            call = await held_call(link)
            link.pool.gate.close()
            link.pool.gate.pause_deadlines()
            await asyncio.sleep(0)
            await asyncio.sleep(0.05)
            before = deadline.charged_seconds
            await asyncio.sleep(0.05)
            assert deadline.charged_seconds == before
            link.pool.gate.open()
            await asyncio.sleep(0.02)
            assert deadline.charged_seconds > before
            hold.set()
            await call
        await settled(link)


async def test_a_stopped_rollout_keeps_what_its_call_sampled() -> None:
    hold = asyncio.Event()
    async with linked(engine(hold=hold)) as link:
        wanted = request()
        call = await held_call(link, wanted)
        flight = link.node.find_call(wanted.request_id)
        assert flight is not None and flight.member.name == "a"
        assert await link.node.cancel(wanted.request_id)
        assert (await call).token_ids == [5, 6]
        assert not await link.node.cancel(wanted.request_id)
        await settled(link)


@pytest.mark.parametrize("is_placed", [True, False])
async def test_a_withdrawn_call_leaves_nothing_at_the_head(is_placed: bool) -> None:
    async with linked(engine(hold=asyncio.Event())) as link:
        if not is_placed:
            link.pool.gate.close()
        call = asyncio.create_task(link.node.generate(request()))
        await (link.engines["a"].call_held.wait() if is_placed else asyncio.sleep(0.01))
        assert link.calls.count == 1
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await settled(link)


async def test_waits_for_room_end_with_their_session() -> None:
    async with linked(engine()) as link:
        await link.node.wait_for_room("r0")
        waiting = asyncio.create_task(link.node.wait_for_room("r1"))
        await asyncio.sleep(0)
        waiting.cancel()
        link.node.forget_session("r1")
        await settled(link)


async def test_a_lost_node_leaves_no_call_and_no_session() -> None:
    async with linked(engine(hold=asyncio.Event())) as link:
        call = await held_call(link)
        await link.calls.close()
        link.check_returned()
        call.cancel()


async def test_whether_an_engine_samples_is_the_heads_judgement() -> None:
    held = asyncio.Event()
    async with linked(engine(hold=held)) as link:
        asked = request()
        call = await held_call(link, asked)
        flight = link.node.find_call(asked.request_id)
        assert flight is not None
        member = flight.member
        held.set()
        await call
        assert await link.node.may_have_sampled(member, 16, 0.0)
        link.engines["a"].down_error = EngineError(FailureKind.ENGINE_UNREACHABLE, "gone.")
        assert not await link.node.may_have_sampled(member, 16, 1.0)


# --- without the head -----------------------------------------------------------------------------------------------


async def test_while_the_head_is_away_a_call_goes_to_its_last_engine_if_that_reports_versions() -> None:
    sampling = engine()
    sampling.reports_versions = True
    async with linked(sampling) as link:
        await link.node.generate(request())
        link.is_cut = True
        link.node.set_head_away(is_away=True)
        assert (await link.node.generate(request())).token_ids == list(TOKENS)
        fresh = asyncio.create_task(link.node.generate(request("r1")))  # it has no last engine
        await asyncio.sleep(0.01)
        assert not fresh.done()
        link.is_cut = False
        link.new_head()
        link.node.on_joined(None)
        assert (await fresh).token_ids == list(TOKENS)
        link.node.forget_session("r1")
        await settled(link)


async def test_without_reported_versions_calls_wait_for_the_head_and_a_new_head_cuts_what_it_does_not_know() -> None:
    hold = asyncio.Event()
    async with linked(engine(hold=hold)) as link:
        call = await held_call(link)
        link.is_cut = True
        link.node.set_head_away(is_away=True)
        waiting = asyncio.create_task(link.node.generate(request("r1")))
        await asyncio.sleep(0.01)
        assert not waiting.done() and not call.done()
        await link.calls.close()
        link.is_cut = False
        link.new_head()
        hold_again, link.engines["a"].version = hold, 0
        link.node.on_joined(None)
        cut = await call
        assert (cut.finish_reason, cut.aborted_by_pause) == ("abort", True)
        hold_again.set()
        assert (await waiting).token_ids == list(TOKENS)
        link.node.forget_session("r1")
        await settled(link)


@pytest.mark.parametrize(
    "error",
    [
        ContextExceeded(7),
        CallTimedOut("http://a", 3.0),
        CallTimedOut("http://a", 3.0, 40, 9.5),
        ModelMissing("http://a", "no such model"),
        EngineOverloaded("http://a", 429, 2.5),
        EngineError(FailureKind.ENGINE_CONTRACT, "ids out of range.", "Fix it."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_failures_arrive_as_what_they_were(error: Any) -> None:
    back: Any = CallFailure.model_validate_json(CallFailure.of(error).model_dump_json()).to_error()
    assert type(back) is type(error)
    assert (str(back), vars(back)) == (str(error), vars(error))


# --- calls that meet their own end, or a new head, on the way -------------------------------------------------------


async def test_a_call_that_is_withdrawn_in_the_page_that_requests_it_holds_nothing() -> None:
    """The simulation's seed 233: the node was cut off, and all three messages came at once."""
    policy = CostPolicy()
    pool = EnginePool("policy", balance_policy=policy)
    pool.add_engine(FakeEngine("e0", lambda request: Reply((5,))))
    sent: list[BaseModel] = []
    calls = RemoteCalls({"policy": pool}, sent.append)
    calls.handle(CallRequest(call="c", pool="policy", session="s", group="g", prompt_tokens=3, max_tokens=4))
    calls.handle(CallWithdrawn(call="c"))
    calls.handle(SessionFreed(pool="policy", session="s", forget=True))
    for _ in range(10):
        await asyncio.sleep(0)
    admission = pool.snapshot().admission
    assert (sent, calls.count, policy.tracked, policy.in_flight("e0")) == ([], 0, 0, 0)
    assert (admission.live, admission.sessions) == (0, 0)
    await pool.close()


async def test_a_call_of_an_earlier_head_that_fails_is_placed_by_the_new_one() -> None:
    """The simulation's seed 828: an engine that could not be reached, while the head was started again."""
    began, broken = asyncio.Event(), asyncio.Event()

    class Breaking(FakeEngine):
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            if not broken.is_set():
                began.set()
                await broken.wait()
                raise EngineError(FailureKind.ENGINE_UNREACHABLE, "the connection broke.")
            return await super().generate(request)

    engine = Breaking("e0", lambda request: Reply((5,)))
    pool = EnginePool("policy")
    pool.add_engine(engine)
    loop = asyncio.get_running_loop()
    node = RemotePool("policy", lambda name, url: engine, lambda message: loop.call_soon(heads[-1].handle, message))
    heads = [RemoteCalls({"policy": pool}, lambda message: loop.call_soon(node.handle, message))]
    request = GenerationRequest("c", "s", (1, 2), 4, 1.0, 1.0, -1, ())
    call = asyncio.create_task(node.generate(request))
    await began.wait()
    heads.append(RemoteCalls({"policy": pool}, lambda message: loop.call_soon(node.handle, message)))
    node.on_joined(None)
    broken.set()
    async with asyncio.timeout(5):
        assert (await call).token_ids == [5]
    await heads[0].close()
    await pool.close()
