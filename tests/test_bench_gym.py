"""``bench gym``: what it subtracts and what stands beside it. Speed is not tested here."""

import asyncio
from types import SimpleNamespace
from typing import Any

import gym


class Servers:
    """Says what the client would have seen."""

    pids = (2, 3)

    def __init__(self, found: Any) -> None:
        self.found = found

    async def collect(self, *arguments: str) -> Any:
        return self.found


def by_name(figures: list[Any]) -> dict[str, Any]:
    return {row["name"]: row for row in figures}


def test_added_is_the_difference_of_percentiles_beside_what_gym_takes() -> None:
    found: dict[str, list[float]] = {
        "direct": [2.0] * 90 + [10.0] * 10,
        "bench_agent": [6.0] * 90 + [30.0] * 10,
        "bench_environment_server": [9.0] * 100,
        "bench_empty_agent": [1.0] * 100,
        "bench_empty_environment_server": [3.0] * 100,
    }
    cpu = {name: [float(place)] for place, name in enumerate(found)}
    direct = SimpleNamespace(url="http://service", pid=1)
    rows = by_name(asyncio.run(gym.latency(Servers({"rows": found, "cpu": cpu}), direct)))
    agent = rows["added by the agent's `/run`, 100/s, p50"]
    assert (agent["value"], agent["target"]) == (4.0, 5.0)
    assert [peer["value"] for peer in agent["peers"]] == [1.0]
    assert rows["added by the agent's `/run`, 100/s, p99"]["value"] == 20.0
    relay = rows["added by the environment server's `/run`, 100/s, p50"]
    assert (relay["value"], [peer["value"] for peer in relay["peers"]]) == (7.0, [3.0])
    cost = rows["agent's `/run`, 100/s: CPU of all servers per row"]
    assert (cost["value"], [peer["value"] for peer in cost["peers"]]) == (1.0, [3.0, 0.0])
