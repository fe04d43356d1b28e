"""The pool of grader processes: what each misbehaviour costs, and that nothing is left behind."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from prorl_gym.deadlines import Deadline
from prorl_gym.environments import worker_pool
from prorl_gym.environments.worker_pool import (
    WorkerDiedError,
    WorkerFailedError,
    WorkerPool,
    WorkerStuckError,
    WorkerTimeoutError,
    WorkerUnavailableError,
)

TARGET = "broken_workers:obey"


@pytest.fixture
def pool():
    """Workers that find this directory's module."""
    workers = WorkerPool(TARGET, size=2, memory=256 << 20, folders=[Path(__file__).parent])
    yield workers
    workers.close()


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def test_values_travel(pool: WorkerPool):
    text = "π" * 100_000
    assert (await pool.call(text, cpu_seconds=5))["echo"] == text


async def test_loop_is_killed_by_its_cpu_time_and_replaced(pool: WorkerPool):
    first = await pool.call("pid", cpu_seconds=5)
    with pytest.raises(WorkerTimeoutError):
        await pool.call("loop", cpu_seconds=0.2)
    assert gone(first)
    assert await pool.call("pid", cpu_seconds=5) != first


async def test_cpu_time_is_counted_for_each_request(pool: WorkerPool):
    first = await pool.call("pid", cpu_seconds=5)
    for _ in range(50):
        await pool.call("x" * 100_000, cpu_seconds=0.2)
    assert await pool.call("pid", cpu_seconds=5) == first


async def test_a_hung_worker_costs_one_grading(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker_pool, "STUCK_SECONDS", 0.3)
    first, second = await asyncio.gather(*(pool.call("pid", cpu_seconds=5) for _ in range(2)))
    for pid in {first, second}:
        os.kill(pid, signal.SIGSTOP)
    answers = await asyncio.gather(*(pool.call("pid", cpu_seconds=600) for _ in range(4)), return_exceptions=True)
    assert sum(isinstance(answer, WorkerStuckError) for answer in answers) == len({first, second})
    assert gone(first) and gone(second)


async def test_a_worker_that_works_is_not_given_up(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker_pool, "STUCK_SECONDS", 0.1)
    with pytest.raises(WorkerTimeoutError):
        await pool.call("loop", cpu_seconds=0.6)


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("die", WorkerDiedError, "exit status"),
        ("eat", WorkerFailedError, "MemoryError"),
        ("raise", WorkerFailedError, "ValueError: no"),
    ],
)
async def test_failure_is_named_and_costs_the_worker(pool: WorkerPool, body: str, error: type[Exception], message: str):
    first = await pool.call("pid", cpu_seconds=5)
    with pytest.raises(error, match=message):
        await pool.call(body, cpu_seconds=30)
    assert gone(first)


async def test_cancelled_call_kills_its_worker(pool: WorkerPool):
    first = await pool.call("pid", cpu_seconds=5)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await pool.call("loop", cpu_seconds=60)
    assert gone(first)


async def test_secrets_of_the_service_are_not_inherited(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("API_KEY", "secret")
    assert "API_KEY" not in await pool.call("environment", cpu_seconds=5)


async def test_calls_wait_for_their_turn(pool: WorkerPool):
    pids = await asyncio.gather(*(pool.call("pid", cpu_seconds=5) for _ in range(6)))
    assert len(set(pids)) <= 2


async def test_the_wait_for_a_worker_is_charged_to_no_deadline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker_pool, "STUCK_SECONDS", 0.6)
    workers = WorkerPool(TARGET, size=1, memory=256 << 20, folders=[Path(__file__).parent])

    async def hold_the_worker() -> None:
        with pytest.raises(WorkerStuckError):
            await workers.call("sleep", cpu_seconds=5)

    async def grade() -> Deadline:
        async with Deadline(60) as deadline:
            await workers.call("pid", cpu_seconds=5)
        return deadline

    try:
        _, deadline = await asyncio.gather(hold_the_worker(), grade())
        assert deadline.paused_seconds > 0.5
    finally:
        workers.close()


def test_one_pool_serves_several_loops(pool: WorkerPool):
    async def burst() -> list[int]:
        return await asyncio.gather(*(pool.call("pid", cpu_seconds=5) for _ in range(4)))

    assert set(asyncio.run(burst())) & set(asyncio.run(burst()))


async def test_missing_target_is_unavailable():
    with pytest.raises(WorkerUnavailableError, match="no_such_module"):
        await WorkerPool("no_such_module:f").call(1, cpu_seconds=1)


async def test_missing_interpreter_is_unavailable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(WorkerUnavailableError, match="/nowhere/python"):
        await WorkerPool(TARGET).call(1, cpu_seconds=1)


async def test_close_ends_idle_workers(pool: WorkerPool):
    pid = await pool.call("pid", cpu_seconds=5)
    pool.close()
    assert gone(pid)
