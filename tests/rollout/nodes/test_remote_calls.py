"""The head's side of a node's model calls, where one page of messages brings a call and its end."""

import asyncio

from pydantic import BaseModel

from prorl_gym.inference.balance.cost_policy import CostPolicy
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.rollout.nodes.remote_calls import RemoteCalls
from prorl_gym.rollout.nodes.wire import CallRequest, CallWithdrawn, SessionEnd
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
    calls.handle(SessionEnd(pool="policy", session="s"))
    for _ in range(10):
        await asyncio.sleep(0)
    admission = pool.snapshot().admission
    assert (sent, calls.count, policy.tracked, policy.in_flight("e0")) == ([], 0, 0, 0)
    assert (admission.live, admission.sessions) == (0, 0)
    await pool.close()
