"""A node's session with its head: it ends with the node, also while the head asks to join again."""

import asyncio

import pytest
from virtual_time import virtually

from prorl_gym.rollout.nodes.exchange import Outbox
from prorl_gym.rollout.nodes.node import Node
from prorl_gym.rollout.nodes.wire import ExchangeAnswer, JoinBody, JoinResponse, LeaveBody
from prorl_gym.rollout.scheduling.runner import InProcessRunner
from prorl_gym.testing.rollout.fake_rollout import (
    EmptyBackend,
    FakePolicySource,
    ScriptedEnvironment,
    environment_lookup,
)


class ForgetfulHead:
    """Implements ``HeadClient``: once ``has_forgotten`` is set, it knows no node."""

    def __init__(self) -> None:
        self.joins = 0
        self.has_forgotten = asyncio.Event()

    async def join(self, body: JoinBody) -> JoinResponse:
        self.joins += 1
        await asyncio.sleep(1)
        return JoinResponse(epoch="e")

    async def exchange(self, body: str, seconds: float) -> ExchangeAnswer:
        await self.has_forgotten.wait()
        return ExchangeAnswer(must_join=True)

    async def leave(self, body: LeaveBody) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize("passes", range(8))
def test_a_node_that_is_stopped_as_it_has_to_join_again_ends(passes: int) -> None:
    """The stop may come in any pass of the loop: before Python 3.13, a task group that fails loses a cancel."""

    @virtually
    async def drive() -> None:
        head = ForgetfulHead()
        runner = InProcessRunner(environment_lookup(ScriptedEnvironment()), FakePolicySource(), EmptyBackend())
        node = Node(head, runner, Outbox(), {}, lease_seconds=30, slots=1, init_slots=1)
        working = asyncio.create_task(node.run())
        await asyncio.sleep(5)
        head.has_forgotten.set()
        for _ in range(passes):
            await asyncio.sleep(0)
        working.cancel()
        await asyncio.wait({working}, timeout=100)
        assert working.cancelled()
        joins = head.joins
        await asyncio.sleep(100)
        assert head.joins == joins
        await runner.close()

    drive()
