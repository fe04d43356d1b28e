"""The tests of parking, with a head and a node between the service's side and the runner."""

import pytest
import test_parking
from node_bench import NodeBench
from test_parking import *  # noqa: F403
from test_parking import ONE, Stepping, Yard

from prorl_gym.rollout.nodes import node
from prorl_gym.rollout.scheduling.runner import RunnerConfig

# They look into the runner of this process, or park by a call that strikes at once, where a message takes its time.
del test_who_goes_on_is_served_before_who_has_not_begun, test_no_more_are_parked_than_may_be  # noqa: F821


class NodeYard(NodeBench):
    """As ``Yard``, over one node."""

    begin, turn, go, parked = Yard.begin, Yard.turn, Yard.go, Yard.parked  # type: ignore[assignment]

    def __init__(self, config: RunnerConfig = ONE, environment: Stepping | None = None) -> None:
        self.environment = environment or Stepping()
        super().__init__(config, environment=self.environment)


async def park(yard: NodeYard, name: str) -> None:
    """As ``park`` of the tests, once the message has arrived: the agent would make its next call before."""
    await yard.runner.park([name])
    attempts = yard.inner._attempts  # pyright: ignore[reportPrivateUsage]
    await yard.turn(lambda: attempts[name].slots.is_park_requested)
    yard.go(name)
    await yard.turn(lambda: (name, True) in yard.parked)


@pytest.fixture(autouse=True)
def _over_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "_PACE_SECONDS", 0.0)  # these tests count passes of the loop
    monkeypatch.setattr(test_parking, "Yard", NodeYard)
    monkeypatch.setattr(test_parking, "park", park)
