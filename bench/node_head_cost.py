"""CPU of the head per model call and per rollout of nodes: ``python bench/node_head_cost.py [--profile FILE]``.

The head is ``prorl-gym serve`` in a process of its own, with a ledger on the disk. Nodes share one process: their
rollouts wait in place of working. CPU is user plus system time of the head's process alone, between the submission and
the last record; the cost of a call is the difference between rollouts with many calls and with none.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _node_head import run_nodes

from prorl_gym.client import Client
from prorl_gym.records import RolloutRequest

PORT = 18791
ENGINE = 18792
"""An engine that is only asked whether it is well."""
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def measure(head: int, url: str, token: str, options: argparse.Namespace, calls: int) -> dict[str, float]:
    """Run rollouts with so many calls; return seconds and the head's CPU."""
    nodes = asyncio.create_task(
        run_nodes(url, token, options.nodes, options.rollouts // options.nodes + 1, calls, options.call_seconds)
    )
    prefix = f"c{calls}-{time.time_ns()}"
    async with Client(url, token=token) as client:
        while (status := (await client.status()).nodes) is None or len(status.nodes) < options.nodes:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        requests = [
            RolloutRequest(rollout_id=f"{prefix}-{number}", environment="math", task={"question": "x" * 500})
            for number in range(options.rollouts)
        ]
        before, began = cpu_seconds(head), time.monotonic()
        finished = (await client.status()).finished
        for start in range(0, len(requests), 1000):
            await client.submit(requests[start : start + 1000])
        while (await client.status()).finished - finished < options.rollouts:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        seconds, cpu = time.monotonic() - began, cpu_seconds(head) - before
    nodes.cancel()
    await asyncio.gather(nodes, return_exceptions=True)
    return {"calls": calls, "seconds": seconds, "cpu_seconds": cpu, "cpu_ms_per_rollout": 1000 * cpu / options.rollouts}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--call-seconds", type=float, default=1.0)
    parser.add_argument("--profile", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as ground:
        config = Path(ground) / "service.json"
        config.write_text(
            json.dumps(
                {
                    "inference": {
                        "engines": [f"http://127.0.0.1:{ENGINE}/v1"],
                        "model": "oracle",
                        "tokenizer": "small",
                        "admission": "fixed",
                    },
                    "state": f"{ground}/state",
                    "nodes": {},
                    "http": {"port": PORT},
                    "log": {"level": "error"},
                }
            )
        )
        profile = ["-m", "cProfile", "-o", str(options.profile)] if options.profile else []
        command = [sys.executable, *profile, "-m", "prorl_gym", "serve", "--config", str(config)]
        oracle = [sys.executable, "-m", "prorl_gym", "engine", "oracle", "--port", str(ENGINE)]
        with (
            subprocess.Popen(oracle, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as engine,
            subprocess.Popen(command, stdin=subprocess.DEVNULL) as head,
        ):
            try:
                assert engine.stdout is not None
                engine.stdout.readline()
                url, token = f"http://127.0.0.1:{PORT}", Path(ground) / "state" / "token"
                deadline = time.monotonic() + 60
                while not token.exists() and time.monotonic() < deadline:
                    time.sleep(0.2)
                found = [
                    asyncio.run(measure(head.pid, url, token.read_text().strip(), options, calls))
                    for calls in (0, options.calls)
                ]
            finally:
                head.terminate()
                engine.terminate()
    none, many = found
    print(json.dumps(found, indent=1))
    per_call = (many["cpu_seconds"] - none["cpu_seconds"]) / (options.rollouts * options.calls)
    print(
        f"load {os.getloadavg()[0]:.1f}; {1000 * per_call:.3f} ms of the head's CPU a call; "
        f"{none['cpu_ms_per_rollout']:.2f} ms a rollout without calls"
    )


if __name__ == "__main__":
    main()
