"""The runner's own tests, with a head and a node between the service's side and the runner."""

import asyncio
from collections.abc import Iterable

import node_bench
import pytest
import test_runner
from test_runner import *  # noqa: F403

from prorl_gym.errors import CancelReason, ShuttingDownError
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.nodes import node, node_runners
from prorl_gym.rollout.nodes.placement import NodeView, choose_node
from prorl_gym.rollout.scheduling.runner import RunnerConfig


@pytest.fixture(autouse=True)
def _over_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "PACE_SECONDS", 0.0)  # these tests count passes of the loop
    monkeypatch.setattr(test_runner, "Bench", node_bench.NodeBench)


async def test_accept_waits_while_the_runner_is_full_and_refuses_when_it_drains() -> None:
    """As the test of that name; the slots are known once the node has joined."""
    bench = node_bench.NodeBench(RunnerConfig(queue=1, init=1, run=1, eval=1))
    early = asyncio.create_task(bench.runner.accept(test_runner.job("r0", init="hang")))
    assert (await bench.runner.capacity()).free == 0
    await early
    room = (await bench.runner.capacity()).free
    for number in range(1, room + 1):
        await bench.runner.accept(test_runner.job(f"r{number}", init="hang"))
    waiting = asyncio.create_task(bench.runner.accept(test_runner.job("one-more")))
    await bench.until("init")
    assert not waiting.done()
    await bench.runner.cancel(["r0"], CancelReason.CLIENT)
    await asyncio.wait_for(waiting, 1)
    late = asyncio.create_task(bench.runner.accept(test_runner.job("late")))
    await asyncio.sleep(0)
    await bench.runner.close()
    with pytest.raises(ShuttingDownError):
        await late
    assert len(await bench.finish()) == room + 2


async def test_nodes_are_ranked_once_an_attempt_and_not_at_every_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """At hundreds of nodes most events come while one attempt waits for a slot."""
    ranked: list[str] = []

    def choose(nodes: Iterable[NodeView], request: RolloutRequest) -> str | None:
        ranked.append(str(request.rollout_id))
        return choose_node(nodes, request)

    monkeypatch.setattr(node_runners, "choose_node", choose)
    bench = node_bench.NodeBench(RunnerConfig(queue=1, init=1, run=1, eval=1))
    names = [f"r{number}" for number in range(12)]
    for name in names:
        await bench.runner.accept(test_runner.job(name))
    assert len(await bench.finish()) == len(names)
    assert ranked == names
