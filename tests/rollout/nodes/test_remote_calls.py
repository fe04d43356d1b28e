"""Model calls of a node that meet their own end, or a new head, on the way."""

import asyncio

from pydantic import BaseModel

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.balance.cost_policy import CostPolicy
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult
from prorl_gym.rollout.nodes.remote_calls import RemoteCalls
from prorl_gym.rollout.nodes.remote_pool import RemotePool
from prorl_gym.rollout.nodes.wire import CallRequest, CallWithdrawn, SessionFreed
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply


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
