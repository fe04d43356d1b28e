"""The real parts of ``bench nodes``: Ray nodes that share this machine, and the head's CPU.

A rollout of throughput is four model calls of a fixed second each, three commands in a real sandbox, and a program that
is graded by hidden tests in a clean one. Each node runs ``SLOTS`` at a time, so that one node is limited by its slots
and not by this machine. When half of all records are there, and half a rollout's time later (at the half itself, all
have just begun), the processes of one Ray node are killed, and none takes its place.

The head's CPU is that of ``prorl-gym serve`` with a ledger on the disk, between the submission and the last record. Its
nodes share the bench's process: their rollouts wait and call in place of working, all are in flight at once. The cost
of a call is the difference between rollouts with calls and with none.
"""

import asyncio
import random
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import aiohttp
from _engine import MODEL, gym_row, running_engine
from _processes import cpu_seconds
from _programs import READY_SECONDS, BenchRefusedError, RunningService, bench_directory, running_service
from _ray_cluster import HEAD, RayCluster, ray_directory
from _report import SHORT
from simulation.planned_rollouts import Plan, PlannedEnvironment, PlannedPolicySource, Shape, Turn

from prorl_gym.api.node_process import HttpHead
from prorl_gym.client import Client
from prorl_gym.client.transport import Transport
from prorl_gym.free_ports import free_ports
from prorl_gym.inference.protocol import GenerationRequest
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.nodes.node import Node
from prorl_gym.rollout.nodes.remote_pool import RemotePool
from prorl_gym.rollout.nodes.wire import Outbox
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.settings import RolloutSettings
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend

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
    throughput: dict[int, float] = field(default_factory=dict[int, float])
    """Rollouts per second by nodes, between the ends of the first and the last quarter."""
    without_nodes: float = 0.0
    """Rollouts per second of a service without nodes that has the slots of all of them."""
    makespans: dict[Arm, float] = field(default_factory=dict[Arm, float])
    """In seconds, of ``max(NODES)`` nodes."""


def row(calls: int) -> dict[str, Any]:
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


async def measure_nodes() -> Measured:
    measured = Measured()
    async with _service() as (cluster, client):
        nodes = list[Any]()
        for count in NODES:
            nodes += [cluster.add_node() for _ in range(count - len(nodes))]
            await wait_for_nodes(client, count)
            await _submit(client, count * SLOTS, CALLS)  # brings pages in, and starts what is started once
            rollouts, _ = await _submit(client, count * SLOTS * WAVES, CALLS)
            measured.throughput[count] = _throughput(rollouts)
            print(f"{count} nodes: {measured.throughput[count]:.2f}/s", file=sys.stderr)
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
            print(f"{arm}: {measured.makespans[arm]:.1f} s", file=sys.stderr)
            if victim is None:
                continue
            if not any(one.retries for one in rollouts):
                raise BenchRefusedError("The killed node ran nothing.")
            nodes.append(cluster.add_node())
    measured.without_nodes = await _throughput_without_nodes(max(NODES) * SLOTS)
    print(f"without nodes: {measured.without_nodes:.2f}/s", file=sys.stderr)
    return measured


async def _throughput_without_nodes(slots: int) -> float:
    """Return rollouts per second of one service without nodes: what this machine allows."""
    async with _engine() as (directory, engine):
        async with running_service(directory, _config(engine, directory, slots)) as service, service.client() as client:
            await _submit(client, slots, CALLS)
            rollouts, _ = await _submit(client, slots * WAVES, CALLS)
            return _throughput(rollouts)


@asynccontextmanager
async def _service() -> AsyncGenerator[tuple[RayCluster, Client]]:
    with ray_directory():
        async with _engine() as (directory, engine):
            (ray_port,) = free_ports(1)
            cluster = RayCluster(ray_port)  # not in a thread: Ray sets signal handlers
            try:
                config = _config(engine, directory, SLOTS) | {"nodes": {"lease_seconds": LEASE_SECONDS}}
                launching = ["--nodes", "ray", "--address", f"{HEAD}:{ray_port}"]
                async with running_service(directory, config, *launching) as service, service.client() as client:
                    yield cluster, client
            finally:
                cluster.close()


@asynccontextmanager
async def _engine() -> AsyncGenerator[tuple[Path, str]]:
    with bench_directory() as directory:
        rows = [gym_row("code", row(calls)) for calls in (CALLS, KILLED_CALLS)]
        async with running_engine(directory, rows, CALL_SECONDS) as (url, _):
            yield directory, url


def _config(engine: str, directory: Path, slots: int) -> dict[str, Any]:
    return {
        "inference": {"engines": [engine], "model": MODEL, "tokenizer": "small"},
        "sandbox": {"backend": "userns", "scratch": str(directory / "sandboxes")},
        "runner": {"queue": slots, "init": slots, "run": slots, "eval": slots},
    }


async def wait_for_nodes(client: Client, count: int) -> None:
    async with asyncio.timeout(READY_SECONDS):
        while (status := (await client.status()).nodes) is None or len(status.nodes) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.2)  # polled: the service has no event for it


async def _submit(
    client: Client, count: int, calls: int, *, resume: bool = False, at_half: Callable[[], None] | None = None
) -> tuple[Sequence[Rollout], float]:
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


IN_FLIGHT = 1_000 if SHORT else 10_000
HEAD_NODES = 8
HEAD_CALLS = 4
TOKENS = 100
"""That a call samples."""
HEAD_CALL_SECONDS = 30.0
"""Of each call: with all rollouts in flight, a third of a thousand calls end each second."""
REQUESTS = 500 if SHORT else 5_000


@dataclass(frozen=True, slots=True)
class HeadCost:
    """Milliseconds of the head's CPU."""

    per_rollout: float
    """Without calls."""
    per_call: float
    per_request: float
    """Of an HTTP request that asks for next to nothing: the floor of a call, which needs a decision."""


async def measure_head() -> HeadCost:
    with bench_directory() as directory:
        async with running_engine(directory, [gym_row("code", row(1))], 0.0) as (engine, _):
            config = {
                # Only asked whether it is well: the nodes' calls go nowhere.
                "inference": {"engines": [engine], "model": MODEL, "tokenizer": "small", "admission": "fixed"},
                "nodes": {},
                "log": {"level": "error"},
            }
            async with running_service(directory, config) as head:
                without = await _cpu_seconds(head, calls=0)
                with_calls = await _cpu_seconds(head, calls=HEAD_CALLS)
                requests = await _request_seconds(head)
    return HeadCost(
        1000 * without / IN_FLIGHT, 1000 * (with_calls - without) / (IN_FLIGHT * HEAD_CALLS), 1000 * requests / REQUESTS
    )


async def _request_seconds(head: RunningService) -> float:
    """Send requests one after the other; return what they cost the head."""
    before = cpu_seconds([head.pid])
    async with aiohttp.ClientSession() as client:
        for _ in range(REQUESTS):
            async with client.get(f"{head.url}/livez") as answer:
                await answer.read()
                answer.raise_for_status()
    return cpu_seconds([head.pid]) - before


async def _cpu_seconds(head: RunningService, calls: int) -> float:
    """Run the rollouts with so many calls each; return what they cost the head."""
    nodes = asyncio.create_task(run_nodes(head.url, head.token))
    async with Client(head.url, token=head.token) as client:
        await wait_for_nodes(client, HEAD_NODES)
        task = {"question": "x" * 500, "calls": calls}
        prefix = f"c{calls}-{time.time_ns()}"
        requests = [
            RolloutRequest(rollout_id=f"{prefix}-{number}", environment="math", task=task)
            for number in range(IN_FLIGHT)
        ]
        before, finished = cpu_seconds([head.pid]), (await client.status()).finished
        for start in range(0, len(requests), 1000):
            await client.submit(requests[start : start + 1000])
        while (await client.status()).finished - finished < IN_FLIGHT:  # noqa: ASYNC110
            await asyncio.sleep(0.5)  # polled: a stream would add the cost of reading records
        cpu = cpu_seconds([head.pid]) - before
        record = await client.result(requests[0].rollout_id)
        if record.reward != 1.0:
            raise BenchRefusedError("The rollouts of the nodes failed.", str(record.outcome))
    nodes.cancel()
    await asyncio.gather(nodes, return_exceptions=True)
    return cpu


class WaitingEngine(FakeEngine):
    def __init__(self, name: str) -> None:
        super().__init__(name, lambda _: Reply((0,) * TOKENS))

    async def generate(self, request: GenerationRequest) -> Any:
        await asyncio.sleep(HEAD_CALL_SECONDS)
        self.requests.clear()
        return await super().generate(request)


class CallingEnvironment(PlannedEnvironment):
    """An attempt is a number of model calls."""

    def parse_row(self, row: Mapping[str, Any]) -> Plan:
        return Plan(_turns(row), init_seconds=0.0, eval_seconds=0.0, reward=1.0, ending="ok")


def _turns(row: Mapping[str, Any]) -> tuple[Turn, ...]:
    return (Turn(output=TOKENS, observation=900, tool_seconds=0.0),) * row["calls"]


async def run_nodes(url: str, token: str) -> None:

    async def run_one(number: int) -> None:
        outbox = Outbox()
        pool = RemotePool("policy", lambda name, _: WaitingEngine(name), outbox.send)
        policies = PlannedPolicySource(lambda job: _turns(job.request.task), pool, prompt_tokens=1000)
        environment = CallingEnvironment(Shape(), random.Random(0))
        slots = IN_FLIGHT // HEAD_NODES + 1
        config = RunnerConfig(queue=slots, init=slots, run=slots, eval=slots)
        runner = InProcessRunner(lambda _: environment, policies, EmptyBackend(), config)
        transport = Transport(url, token, "its caller", 10.0, 0.2)
        head = HttpHead(transport, f"n{number}")
        node = Node(head, runner, outbox, {"policy": pool}, lease_seconds=30, slots=slots, init_slots=slots)
        try:
            await node.run()
        finally:
            await transport.close()

    await asyncio.gather(*map(run_one, range(HEAD_NODES)))
