"""CPU of the head per rollout and per model call of nodes, for ``bench nodes``.

The head is ``prorl-gym serve`` in a process of its own, with a ledger on the disk. Nodes share the bench's process:
their rollouts wait in place of working (``_node_head_load``). All rollouts are in flight at once. CPU is user plus
system time of the head's process alone, between the submission and the last record; the cost of a call is the
difference between rollouts with calls and with none.
"""

import asyncio
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import yaml
from _node_head_load import run_nodes
from _nodes_ray import gym_row, wait_for_nodes
from _paced_engine import MODEL
from _report import SHORT
from _rollout_systems import BENCH, READY_SECONDS, read_line, running, wait_answering

from prorl_gym.cli.demo.stack import free_ports
from prorl_gym.client import Client, read_token
from prorl_gym.records import RolloutRequest

IN_FLIGHT = 1_000 if SHORT else 10_000
NODES = 8
CALLS = 4
CALL_SECONDS = 30.0
"""Of each call: with all rollouts in flight, a third of a thousand calls end each second."""
REQUESTS = 500 if SHORT else 5_000
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class HeadCost:
    """Milliseconds of the head's CPU."""

    per_rollout: float
    """Without calls."""
    per_call: float
    per_request: float
    """Of an HTTP request that asks for next to nothing: the floor of a call, which needs a decision."""


async def measure() -> HeadCost:
    """Run rollouts without calls, then with."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="prorl-bench-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        log = directory / "service.log"
        rows = directory / "rows.jsonl"
        rows.write_text(gym_row(1))
        engine_command = [sys.executable, str(BENCH / "_paced_engine.py"), str(rows)]
        async with running(engine_command, directory / "engine.log") as child:
            engine = await read_line(child, directory / "engine.log", READY_SECONDS)
            (port,) = free_ports(1)
            config = {
                # Only asked whether it is well: the nodes' calls go nowhere.
                "inference": {"engines": [engine], "model": MODEL, "tokenizer": "small", "admission": "fixed"},
                "state": str(directory / "state"),
                "nodes": {},
                "http": {"port": port},
                "log": {"level": "error"},
            }
            (directory / "service.yaml").write_text(yaml.safe_dump(config))
            argv = [sys.executable, "-m", "prorl_gym", "serve", "--config", str(directory / "service.yaml")]
            async with running(argv, log) as head:
                url = f"http://127.0.0.1:{port}"
                await wait_answering(f"{url}/readyz", head, log)
                token = read_token(directory / "state" / "token")
                without = await _cpu_seconds(head.pid, url, token, calls=0)
                with_calls = await _cpu_seconds(head.pid, url, token, calls=CALLS)
                requests = await _request_seconds(head.pid, f"{url}/livez")
                head.terminate()
    return HeadCost(
        1000 * without / IN_FLIGHT, 1000 * (with_calls - without) / (IN_FLIGHT * CALLS), 1000 * requests / REQUESTS
    )


async def _request_seconds(head: int, url: str) -> float:
    """Send requests one after the other; return what they cost the head."""
    before = _process_seconds(head)
    async with aiohttp.ClientSession() as client:
        for _ in range(REQUESTS):
            async with client.get(url) as answer:
                await answer.read()
                answer.raise_for_status()
    return _process_seconds(head) - before


async def _cpu_seconds(head: int, url: str, token: str, calls: int) -> float:
    """Run the rollouts with so many calls each; return what they cost the head."""
    nodes = asyncio.create_task(run_nodes(url, token, NODES, IN_FLIGHT // NODES + 1, calls, CALL_SECONDS))
    async with Client(url, token=token) as client:
        await wait_for_nodes(client, NODES)
        prefix = f"c{calls}-{time.time_ns()}"
        requests = [
            RolloutRequest(rollout_id=f"{prefix}-{number}", environment="math", task={"question": "x" * 500})
            for number in range(IN_FLIGHT)
        ]
        before, finished = _process_seconds(head), (await client.status()).finished
        for start in range(0, len(requests), 1000):
            await client.submit(requests[start : start + 1000])
        while (await client.status()).finished - finished < IN_FLIGHT:  # noqa: ASYNC110
            await asyncio.sleep(0.5)  # polled: a stream would add the cost of reading records
        cpu = _process_seconds(head) - before
    nodes.cancel()
    await asyncio.gather(nodes, return_exceptions=True)
    return cpu


def _process_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
