"""The tests of the runner and of parking, with a head and a node between the service's side and the runner."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
import test_parking
import test_runner
from memory_node import MemoryNode
from test_parking import *  # noqa: F403
from test_parking import ONE, Stepping, Yard
from test_runner import *  # noqa: F403
from test_runner import Bench, job

from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.nodes import node, node_runners
from prorl_gym.rollout.nodes.node_runners import NodeRunners, NodesConfig, NodeView, choose_node
from prorl_gym.rollout.protocol import Finished
from prorl_gym.rollout.scheduling.attempt import EnvironmentLookup
from prorl_gym.rollout.scheduling.runner import RunnerConfig

# They look into the runner of this process, or park by a call that strikes at once, where a message takes its time.
del (
    test_who_goes_on_is_served_before_who_has_not_begun,  # noqa: F821
    test_no_more_are_parked_than_may_be,  # noqa: F821
)


class NodeBench(Bench):
    """As ``Bench``, over one node: a head's runner and one node in this process."""

    def connect(self, environments: EnvironmentLookup) -> Any:
        self.heads = NodeRunners(NodesConfig(lease_seconds=30), {}, environments, lambda *_: False)
        slots, init_slots = self.inner.pools.by_name["jobs"].size, self.inner.pools.stages["init"].size
        self.member = MemoryNode(
            "n0", lambda: self.heads, self.inner, lease_seconds=30, slots=slots, init_slots=init_slots
        )
        return self.heads

    async def _read(self) -> None:
        async for event in self.runner.events():
            self.events.append(event)
            if isinstance(event, Finished):
                self.heads.on_settled(event.rollout)

    async def finish(self) -> Any:
        await asyncio.wait_for(self.runner.drain(), 10)
        self.member.node.drain()
        await asyncio.wait_for(self.member.task, 10)
        assert self.member.error is None
        finished = await super().finish()
        assert self.heads.status().nodes == ()
        return finished


class NodeYard(NodeBench):
    """As ``Yard``, over one node."""

    begin, turn, go, parked = Yard.begin, Yard.turn, Yard.go, Yard.parked  # type: ignore[assignment]

    def __init__(self, config: RunnerConfig = ONE, environment: Stepping | None = None) -> None:
        self.environment = environment or Stepping()
        super().__init__(config, environment=self.environment)


async def park(yard: NodeYard, name: str) -> None:
    """As ``park`` of the tests, once the message has arrived: the agent would make its next call before."""
    before = yard.inner.count_park_requests()
    await yard.runner.park([name])
    await yard.turn(lambda: yard.inner.count_park_requests() > before)
    yard.go(name)
    await yard.turn(lambda: (name, True) in yard.parked)


@pytest.fixture(autouse=True)
def _over_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "PACE_SECONDS", 0.0)  # these tests count passes of the loop
    monkeypatch.setattr(test_runner, "Bench", NodeBench)
    monkeypatch.setattr(test_parking, "Yard", NodeYard)
    monkeypatch.setattr(test_parking, "park", park)


async def test_nodes_are_ranked_once_an_attempt_and_not_at_every_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """At hundreds of nodes most events come while one attempt waits for a slot."""
    ranked: list[str] = []

    def choose(nodes: Iterable[NodeView], request: RolloutRequest) -> str | None:
        ranked.append(str(request.rollout_id))
        return choose_node(nodes, request)

    monkeypatch.setattr(node_runners, "choose_node", choose)
    bench = NodeBench(RunnerConfig(queue=1, init=1, run=1, eval=1))
    names = [f"r{number}" for number in range(12)]
    for name in names:
        await bench.runner.accept(job(name))
    assert len(await bench.finish()) == len(names)
    assert ranked == names
