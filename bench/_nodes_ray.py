"""The real part of ``bench nodes``: ``prorl-gym serve --nodes ray`` over Ray nodes that share this machine.

A rollout of throughput is four model calls of a fixed second each, three commands in a real sandbox, and a program that
is graded by hidden tests in a clean one. Each node runs ``SLOTS`` rollouts at a time, so that one node is limited by
its slots and not by this machine; the machine's own limit shows in the share of its processors that is in use.

The rollouts of the killed node have nine calls, which is nine seconds or more of work that a kill can lose. When half
of all records are there, and half a rollout's time later, the processes of one of eight Ray nodes are killed, and no
node takes its place. (All rollouts take the same time: at the half itself, all have just begun. The first published
figures were of a kill at that moment.) Its rollouts are made again when its lease is over. Makespan is from the
submission to the last record. A service without nodes that has the slots of all of them shows what this machine allows.

The rest of the workload was fixed before the first measurement; what is measured does not choose it.
"""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from _paced_engine import MODEL
from _ray_cluster import HEAD, RayCluster, ray_directory
from _report import SHORT
from _rollout_systems import BENCH, READY_SECONDS, BenchRefusedError, read_line, running, wait_answering

from prorl_gym.cli.demo.stack import free_ports
from prorl_gym.client import Client, read_token
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.settings import RolloutSettings

NODES = (1, 2) if SHORT else (1, 2, 4, 8)
SLOTS = 4
WAVES = 3 if SHORT else 10
"""Rollouts of each slot, for throughput."""
KILLED_WAVES = 2 if SHORT else 8
"""The same, beside a node that is killed."""
CALLS, KILLED_CALLS = 4, 9
CALL_SECONDS = 1.0
LEASE_SECONDS = 6.0

Arm = Literal["undisturbed", "killed", "resumed"]


@dataclass(slots=True)
class Measured:
    """What was measured."""

    throughput: dict[int, float] = field(default_factory=dict[int, float])
    """Rollouts per second by nodes, between the ends of the first and the last quarter."""
    busy: dict[int, float] = field(default_factory=dict[int, float])
    """Share of the machine's processors in use meanwhile, in percent, by nodes."""
    without_nodes: float = 0.0
    """Rollouts per second of a service without nodes that has the slots of all of them."""
    makespans: dict[Arm, float] = field(default_factory=dict[Arm, float])
    """In seconds, of ``max(NODES)`` nodes."""
    resumed_turns: float = 0.0
    """Turns that the rollouts which were made again went on from, on average."""


def row(calls: int) -> dict[str, Any]:
    """Return a task of so many model calls, of which all but the last run a command."""
    step = {
        "text": "I take a step, and look at what all the steps before it have left behind in this sandbox.",
        "tool": "bash",
        "arguments": {"command": "echo done >> steps; wc -l < steps"},
    }
    program = "print(sum(map(int, input().split())))"
    finish = {"text": "", "tool": "finish", "arguments": {"answer": program}}
    return {
        "id": f"calls-{calls}",
        "question": f"Read integers from one line and print their sum. Take {calls} turns.",
        "solution": program,
        "tests": {"kind": "stdio", "cases": [{"stdin": "1 2 3", "stdout": "6"}]},
        "gold_steps": [*[step] * (calls - 1), finish],
    }


async def measure() -> Measured:
    """Measure throughput, then makespans."""
    measured = Measured()
    async with _service() as (cluster, client):
        nodes = list[Any]()
        for count in NODES:
            nodes += [cluster.add_node() for _ in range(count - len(nodes))]
            await wait_for_nodes(client, count)
            await _submit(client, count * SLOTS, CALLS)  # brings pages in, and starts what is started once
            busy = _BusyShare()
            rollouts, _ = await _submit(client, count * SLOTS * WAVES, CALLS)
            measured.busy[count], measured.throughput[count] = busy.read(), _throughput(rollouts)
            _say(f"{count} nodes: {measured.throughput[count]:.2f}/s, {measured.busy[count]:.0f} % in use")
        count = len(nodes)
        for arm in get_args(Arm):
            await wait_for_nodes(client, count)
            victim = None if arm == "undisturbed" else nodes.pop()
            rollouts, measured.makespans[arm] = await _submit(
                client,
                count * SLOTS * KILLED_WAVES,
                KILLED_CALLS,
                resume=arm == "resumed",
                at_half=None if victim is None else lambda node=victim: cluster.remove_node(node),
            )
            _say(f"{arm}: {measured.makespans[arm]:.1f} s")
            if victim is None:
                continue
            again = [one for one in rollouts if one.retries]
            if not again:
                raise BenchRefusedError("The killed node had nothing in hand.")
            measured.resumed_turns = sum(one.resumed_turns for one in again) / len(again)
            nodes.append(cluster.add_node())
    measured.without_nodes = await _throughput_without_nodes(max(NODES) * SLOTS)
    _say(f"without nodes: {measured.without_nodes:.2f}/s")
    return measured


async def _throughput_without_nodes(slots: int) -> float:
    """Return rollouts per second of one service without nodes: what this machine allows."""
    async with _engine() as (directory, engine):
        async with _serving(directory, _config(engine, directory, slots)) as client:
            await _submit(client, slots, CALLS)
            rollouts, _ = await _submit(client, slots * WAVES, CALLS)
            return _throughput(rollouts)


@asynccontextmanager
async def _service() -> AsyncGenerator[tuple[RayCluster, Client]]:
    """Run a head over a new Ray cluster, and the engine."""
    with ray_directory():
        async with _engine() as (directory, engine):
            (ray_port,) = free_ports(1)
            cluster = RayCluster(ray_port)  # not in a thread: Ray sets signal handlers
            try:
                config = _config(engine, directory, SLOTS) | {"nodes": {"lease_seconds": LEASE_SECONDS}}
                launching = ["--nodes", "ray", "--address", f"{HEAD}:{ray_port}"]
                async with _serving(directory, config, *launching) as client:
                    yield cluster, client
            finally:
                cluster.close()


@asynccontextmanager
async def _engine() -> AsyncGenerator[tuple[Path, str]]:
    """Run the engine; yield a directory for the block, and the engine's address."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="prorl-bench-", ignore_cleanup_errors=True) as name:
        os.chmod(name, 0o711)  # sandboxes have another uid when this is root
        directory = Path(name)
        rows, log = directory / "rows.jsonl", directory / "engine.log"
        rows.write_text("".join(gym_row(calls) for calls in (CALLS, KILLED_CALLS)))
        command = [sys.executable, str(BENCH / "_paced_engine.py"), str(rows), "--call-seconds", str(CALL_SECONDS)]
        async with running(command, log) as child:
            yield directory, await read_line(child, log, READY_SECONDS)


@asynccontextmanager
async def _serving(directory: Path, config: dict[str, Any], *arguments: str) -> AsyncGenerator[Client]:
    """Run the service; yield a client of it."""
    (port,) = free_ports(1)
    path, log = directory / "service.yaml", directory / "service.log"
    path.write_text(yaml.safe_dump(config | {"http": {"port": port, "stop_seconds": 10}}))
    argv = [sys.executable, "-m", "prorl_gym", "serve", "--config", str(path), *arguments]
    async with running(argv, log) as service:
        url = f"http://127.0.0.1:{port}"
        await wait_answering(f"{url}/readyz", service, log)
        async with Client(url, token=read_token(directory / "state" / "token")) as client:
            yield client
        service.terminate()


def _config(engine: str, directory: Path, slots: int) -> dict[str, Any]:
    return {
        "inference": {"engines": [engine], "model": MODEL, "tokenizer": "small"},
        "sandbox": {"backend": "userns", "scratch": str(directory / "sandboxes")},
        "runner": {"queue": slots, "init": slots, "run": slots, "eval": slots},
        "state": str(directory / "state"),
    }


def gym_row(calls: int) -> str:
    """Return the line of an engine's file of rows for such a task."""
    task = row(calls)
    prompt = [{"role": "user", "content": task["question"]}]
    return json.dumps({"responses_create_params": {"input": prompt}, "environment": "code", "task": task}) + "\n"


async def wait_for_nodes(client: Client, count: int) -> None:
    """Wait until so many nodes have joined."""
    async with asyncio.timeout(READY_SECONDS):
        while (status := (await client.status()).nodes) is None or len(status.nodes) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.2)  # polled: the service has no event for it


async def _submit(
    client: Client, count: int, calls: int, *, resume: bool = False, at_half: Callable[[], None] | None = None
) -> tuple[Sequence[Rollout], float]:
    """Make rollouts; return them and the seconds until the last record.

    Args:
        client: of the service.
        count: how many.
        calls: of each.
        resume: the setting.
        at_half: called, in a thread, when half of the records are there.
    """
    loop, ended, half = asyncio.get_running_loop(), 0, asyncio.Event()
    settings = RolloutSettings(resume=resume)
    requests = [RolloutRequest(environment="code", task=row(calls), settings=settings) for _ in range(count)]

    async def result(request: RolloutRequest) -> Rollout:
        nonlocal ended
        rollout = await client.result(request.rollout_id)
        ended += 1
        if 2 * ended >= count:
            half.set()
        return rollout

    async def disturb() -> None:
        if at_half is not None:
            await half.wait()
            await asyncio.sleep(calls * CALL_SECONDS / 2)
            await asyncio.to_thread(at_half)

    began = loop.time()
    await client.submit(requests)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(disturb())
        waiting = [tasks.create_task(result(request)) for request in requests]
    rollouts = [task.result() for task in waiting]
    if any(one.reward != 1.0 for one in rollouts):
        raise BenchRefusedError("Not all rollouts were solved.", str([one.outcome for one in rollouts][:3]))
    return rollouts, loop.time() - began


def _throughput(rollouts: Sequence[Rollout]) -> float:
    ends = sorted(one.finished_at for one in rollouts)
    return len(ends) / 2 / (ends[3 * len(ends) // 4] - ends[len(ends) // 4])


class _BusyShare:
    """The share of the processors in use since it was made, but for what other work used at a lower priority."""

    def __init__(self) -> None:
        self._before = self._times()

    def read(self) -> float:
        """Return the share until now, in percent."""
        idle, total = (after - before for after, before in zip(self._times(), self._before, strict=True))
        return 100 * (1 - idle / total)

    @staticmethod
    def _times() -> tuple[int, int]:
        first, _, _ = Path("/proc/stat").read_text().partition("\n")
        user, niced, system, idle, waiting, *interrupts = (int(field) for field in first.split()[1:9])
        return idle + waiting + niced, user + niced + system + idle + waiting + sum(interrupts)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
