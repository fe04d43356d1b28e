"""A rollout whose node died goes on elsewhere after its last whole turn."""

import asyncio

from memory_node import MemoryNode
from test_resume import CODEC, RESUME, Place, ReplayableAdder, assert_same_work, undisturbed

from prorl_gym.errors import FailureKind
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.nodes.node_runners import NodeRunners, NodesConfig
from prorl_gym.rollout.scheduling.attempt_settler import RetryConfig
from prorl_gym.rollout.scheduling.model_source import ModelPolicySource
from prorl_gym.rollout.scheduling.runner import InProcessRunner
from prorl_gym.rollout.service import RolloutService
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend


async def test_a_rollout_goes_on_where_its_lost_node_stopped() -> None:
    wanted = await undisturbed(4)
    place = Place(4, ReplayableAdder(), RESUME)
    place.engine.trouble[2] = [asyncio.Event()]
    head = NodeRunners(NodesConfig(lease_seconds=0.5), {}, lambda _: None, lambda *_: False)
    service = RolloutService(place.ledger, head, RetryConfig(pause_seconds=0))
    service.settlement_observers.append(head.on_settled)
    async with EnginePool("policy") as pool:
        pool.add_engine(place.engine)

        def start_node(name: str) -> MemoryNode:
            source, runs = ModelPolicySource(pool, CODEC), {"default": RESUME}
            runner = InProcessRunner(lambda _: place.environment, source, EmptyBackend(), run_settings=runs)
            return MemoryNode(name, lambda: head, runner, lease_seconds=0.5, slots=1, init_slots=1)

        await service.start()
        first = start_node("first")
        task = {"question": "?", "turns": 4}
        await service.submit([RolloutRequest(rollout_id="r", environment="adder", task=task)])
        await place.engine.call_held.wait()
        async with asyncio.timeout(20):
            while place.ledger.logged < 2:  # noqa: ASYNC110 - nothing reports it
                await asyncio.sleep(0.005)
        await first.kill()
        second = start_node("second")
        rollout = await service.result("r", wait=30)
        await service.stop()
        await second.kill()
        await head.release()
    assert rollout is not None
    assert_same_work(rollout, wanted)
    assert ([retry.kind for retry in rollout.retries], rollout.resumed_turns) == ([FailureKind.NODE_LOST], 2)
    assert place.engine.asked[2, 0] == 2 and place.engine.asked[0, 0] == 1
