"""Load on a service: in batches, one by one, at random moments; and a look at one with a long queue."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

import _service_work as work
import aiohttp
from _service_server import TOKEN, Health, Server

from prorl_gym.client import Client
from prorl_gym.records import Rollout, RolloutRequest


def require_completed(rollout: Rollout) -> Rollout:
    """Return it.

    Raises:
        RuntimeError: it did not complete: the figure would be worthless.
    """
    if rollout.outcome.status != "completed" or not rollout.segments:
        raise RuntimeError(f"rollout {rollout.rollout_id}: {rollout.outcome}")
    return rollout


async def batch_throughput(server: Server, run_id: str, count: int = work.BATCHED) -> float:
    """Submit batches, read the stream; return rollouts per second, from the first request to the last record."""
    requests = [work.request(run_id) for _ in range(count)]
    room = asyncio.Semaphore(work.WINDOW)

    async def submit(client: Client) -> None:
        for first in range(0, count, work.BATCH):
            batch = requests[first : first + work.BATCH]
            for _ in batch:
                await room.acquire()
            await client.submit(batch)

    async with server.client() as client:
        began = time.perf_counter()
        submitting = asyncio.create_task(submit(client))
        received = 0
        stream = client.stream(run_id)
        async for delivered in stream:
            require_completed(delivered.rollout)
            room.release()
            received += 1
            if received == count:
                break
        seconds = time.perf_counter() - began
        await stream.aclose()
        await submitting
    return count / seconds


async def single_throughput(server: Server, run_id: str, count: int = work.SINGLE) -> float:
    """Let callers each post one rollout and wait for its record, over and over; return rollouts per second."""
    async with server.client() as client:

        async def caller(first: int) -> None:
            for _ in range(first, count, work.CALLERS):
                await submit_and_wait(client, work.request(run_id))

        began = time.perf_counter()
        async with asyncio.TaskGroup() as callers:
            for first in range(work.CALLERS):
                callers.create_task(caller(first))
        return count / (time.perf_counter() - began)


async def submit_and_wait(client: Client, request: RolloutRequest) -> Rollout:
    """Submit a rollout and wait for its record."""
    await client.submit(request)
    return require_completed(await client.result(request.rollout_id))


async def poisson_arrivals(
    rate: float, act: Callable[[float], Awaitable[Sequence[float]]], seconds: float = work.LATENCY_SECONDS
) -> list[float]:
    """Act at random moments, whether or not what came before is done; return all that was noted.

    Args:
        rate: arrivals per second (Poisson).
        act: is given the moment at which it was due, on the clock of ``perf_counter``: a late start counts.
        seconds: how long arrivals come.
    """
    rng = random.Random(work.SEED)
    noted: list[float] = []

    async def arrival(due: float) -> None:
        noted.extend(await act(due))

    began = due = time.perf_counter()
    async with asyncio.TaskGroup() as arrivals:
        while (due := due + rng.expovariate(rate)) < began + seconds:
            await asyncio.sleep(due - time.perf_counter())
            arrivals.create_task(arrival(due))
    return noted


async def single_latency(server: Server, run_id: str) -> list[float]:
    """Return ms that the service added to each of many single rollouts that arrive at a steady rate."""
    async with server.client() as client:

        async def act(due: float) -> list[float]:
            rollout = await submit_and_wait(client, work.request(run_id))
            return [(time.perf_counter() - due - rollout.worked_seconds) * 1000]

        await act(time.perf_counter())  # opens a connection
        return await poisson_arrivals(work.ARRIVALS["single"], act)


async def batch_latency(server: Server, run_id: str) -> list[float]:
    """Return ms that the service added to each rollout of batches that are read from the stream."""
    arrived: dict[str, asyncio.Future[float]] = {}

    async def read(client: Client) -> list[float]:
        async for delivered in client.stream(run_id):
            rollout = require_completed(delivered.rollout)
            arrived[rollout.rollout_id].set_result(time.perf_counter() - rollout.worked_seconds)
        raise RuntimeError("the stream ended")

    async with server.client() as client:
        reading = asyncio.create_task(read(client))

        async def act(due: float) -> list[float]:
            batch = [work.request(run_id) for _ in range(work.BATCH)]
            arrived.update((request.rollout_id, asyncio.Future()) for request in batch)
            await client.submit(batch)
            noted = [(await arrived[request.rollout_id] - due) * 1000 for request in batch]
            for request in batch:
                del arrived[request.rollout_id]
            return noted

        submitting = asyncio.create_task(poisson_arrivals(work.ARRIVALS["batches"] / work.BATCH, act))
        done, _ = await asyncio.wait({reading, submitting}, return_when=asyncio.FIRST_COMPLETED)
        reading.cancel()
        submitting.cancel()
        return await submitting if submitting in done else await reading


async def echo_throughput(server: Server, count: int = work.SINGLE) -> float:
    """Return requests per second of a route that only gives 20 kB back."""
    body = work.request("echo").model_dump_json().encode()
    headers = {"Authorization": f"Bearer {TOKEN}"}  # without it the server reads no body
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:

        async def caller(first: int) -> None:
            for _ in range(first, count, work.CALLERS):
                async with session.post(server.url + "/echo", data=body) as answer:
                    await answer.read()

        began = time.perf_counter()
        async with asyncio.TaskGroup() as callers:
            for first in range(work.CALLERS):
                callers.create_task(caller(first))
        return count / (time.perf_counter() - began)


@dataclass(slots=True)
class LongQueueFigures:
    """A service with a long queue."""

    submitted: float
    """Rollouts per second while the queue was filled."""
    filling: Health
    health: Health
    queued: int
    running: int
    routes: dict[str, float] = field(default_factory=dict[str, float])
    """Median ms of each route."""


async def long_queue(server: Server) -> LongQueueFigures:
    """Queue many rollouts whose agents wait, read their records, and look at the server meanwhile.

    Raises:
        RuntimeError: fewer were queued or running than is claimed.
    """
    requests = work.waiting(work.QUEUED + work.RUNNING + work.SPARE, "queue")
    async with server.client() as client, aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http:

        async def read() -> None:
            async for delivered in client.stream("queue"):
                require_completed(delivered.rollout)

        reading = asyncio.create_task(read())
        await server.health()
        began = time.perf_counter()
        for first in range(0, len(requests), work.BATCH):
            await client.submit(requests[first : first + work.BATCH])
        submitted = len(requests) / (time.perf_counter() - began)
        while (status := await client.status()).capacity.run < work.RUNNING:  # noqa: ASYNC110
            await asyncio.sleep(0.1)  # another process: there is no event to wait for
        filling = await server.health()
        routes: dict[str, list[float]] = {}
        end = time.perf_counter() + work.WATCHED_SECONDS
        while time.perf_counter() < end:
            for path in ("/v1/status", "/metrics", "/v1/history", "/"):
                asked = time.perf_counter()
                async with http.get(server.url + path) as answer:
                    answer.raise_for_status()
                    await answer.read()
                routes.setdefault(path, []).append((time.perf_counter() - asked) * 1000)
            await asyncio.sleep(1)  # a person's dashboard and a scraper do not ask more often
        status, health = await client.status(), await server.health()
        reading.cancel()
    queued, running = status.queued, status.capacity.run
    if queued < work.QUEUED or running < 0.95 * work.RUNNING:
        raise RuntimeError(f"only {queued} were queued and {running} running")
    return LongQueueFigures(
        submitted, filling, health, queued, running, {path: median(ms) for path, ms in routes.items()}
    )


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return quantiles(values, n=100, method="inclusive")[98]
