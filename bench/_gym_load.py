"""The collector's side of ``bench gym``: posts rows to ``/run`` with Gym's own client. Run as a program.

``_gym_load.py latency URL PID...`` posts rows at random moments to every arm in turn, round after round, and prints the
milliseconds of each, and the CPU time of the processes; ``URL`` is a service of the same environment that is called
directly. ``_gym_load.py rate`` prints rows per second, ``_gym_load.py crowd COUNT`` how long so many take that are
posted at once.
"""

import asyncio
import gc
import json
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import _service_work as work
from _gym_servers import AGENT, EMPTY, EMPTY_RELAY, RELAY
from _processes import cpu_seconds
from _service_load import poisson_arrivals, submit_and_wait
from _service_server import TOKEN

from prorl_gym.client import Client

DIRECT = "direct"
RATE = 100.0
"""Rows per second of the open loop."""
ROUNDS, ROUND_SECONDS = (2, 1.5) if work.SHORT else (10, 4.0)
CALLERS = 64
CLOSED_LOOP = 200 if work.SHORT else 2000

PostRow = Callable[[], Awaitable[object]]


def row(index: int) -> dict[str, Any]:
    """Return a row as Gym's collector posts it."""
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "q" * 200}]},
        "agent_ref": {"type": "responses_api_agents", "name": AGENT},
        "environment": work.ENVIRONMENT,
        "task": {"id": index},
        "_ng_task_index": index,
        "_ng_rollout_index": 0,
    }


class Collector:
    """Posts rows, each with an index of its own."""

    def __init__(self) -> None:
        from nemo_gym.server_utils import ServerClient  # pyright: ignore[reportMissingTypeStubs]

        self._gym: Any = ServerClient.load_from_global_config()
        self._posted = 0

    async def post(self, server: str) -> dict[str, Any]:
        """Post a row to the ``/run`` of a server; return the result.

        Raises:
            RuntimeError: the answer is not that of a row with reward 1.
        """
        from nemo_gym.server_utils import get_response_json  # pyright: ignore[reportMissingTypeStubs]

        self._posted += 1
        answer = await self._gym.post(server_name=server, url_path="/run", json=row(self._posted))
        result = await get_response_json(answer)
        if answer.status != 200 or result["reward"] != 1.0:
            raise RuntimeError(f"{server} answers {answer.status}: {str(result)[:500]}")
        return result


async def latency(url: str, servers: Sequence[int]) -> dict[str, dict[str, list[float]]]:
    """Return milliseconds by arm: of each row, and of the servers' CPU for a row, by round.

    The arms take turns, and see the same arrivals.
    """
    collector = Collector()
    async with Client(url, token=TOKEN, retry_seconds=0.0) as client:
        arms: dict[str, PostRow] = {DIRECT: lambda: submit_and_wait(client, work.request("direct"))}
        arms |= {name: lambda name=name: collector.post(name) for name in (AGENT, RELAY, EMPTY, EMPTY_RELAY)}
        rows: dict[str, list[float]] = {name: [] for name in arms}
        cpu: dict[str, list[float]] = {name: [] for name in arms}

        async def measure(name: str, seconds: float) -> list[float]:
            async def act(due: float) -> list[float]:
                await arms[name]()
                return [(time.perf_counter() - due) * 1000]

            return await poisson_arrivals(RATE, act, seconds)

        for name in arms:
            await measure(name, 1.0)  # opens connections
        for first in range(ROUNDS):
            order = [*arms][first % len(arms) :] + [*arms][: first % len(arms)]
            for name in order:
                before = cpu_seconds(servers)
                measured = await measure(name, ROUND_SECONDS)
                rows[name] += measured
                cpu[name].append((cpu_seconds(servers) - before) * 1000 / len(measured))
    return {"rows": rows, "cpu": cpu}


async def rate() -> dict[str, list[float]]:
    """Return rows per second of callers that each post one row after the other, by arm; the arms take turns."""
    collector = Collector()

    async def closed_loop(name: str) -> float:
        async def caller(first: int) -> None:
            for _ in range(first, CLOSED_LOOP, CALLERS):
                await collector.post(name)

        began = time.perf_counter()
        async with asyncio.TaskGroup() as callers:
            for first in range(CALLERS):
                callers.create_task(caller(first))
        return CLOSED_LOOP / (time.perf_counter() - began)

    found: dict[str, list[float]] = {name: [] for name in (AGENT, RELAY, EMPTY, EMPTY_RELAY)}
    for _ in range(work.RUNS):
        for name, rates in found.items():
            rates.append(await closed_loop(name))
    return found


async def crowd(count: int) -> dict[str, Any]:
    """Return the seconds in which rows are answered that are posted at once, by arm; and how many rollouts there were.

    Raises:
        RuntimeError: a row was not answered, or not with reward 1.
    """
    collector = Collector()
    seconds: dict[str, float] = {}
    rollouts: set[str] = set()
    for name in (EMPTY_RELAY, RELAY):
        began = time.perf_counter()
        results = await asyncio.gather(*(collector.post(name) for _ in range(count)))
        seconds[name] = time.perf_counter() - began
        rollouts = {str(result.get("prorl_rollout_id")) for result in results}
    return {"seconds": seconds, "answered": len(rollouts)}


def _main() -> Any:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    import nemo_gym.server_utils  # noqa: F401  # pyright: ignore[reportMissingTypeStubs, reportUnusedImport]

    gc.freeze()  # a collection over what Gym imports would count as latency of the servers
    match sys.argv[1:]:
        case ["latency", url, *servers]:
            return asyncio.run(latency(url, [*map(int, servers)]))
        case ["rate"]:
            return asyncio.run(rate())
        case [_, count]:
            return asyncio.run(crowd(int(count)))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    print(json.dumps(_main()))
