"""A hundred thousand rollouts that wait: a restart takes them up, and a cancel ends them, without a standstill."""

import asyncio
import itertools
import time
from pathlib import Path

import pytest

from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.scheduling.runner import InProcessRunner
from prorl_gym.rollout.service import RolloutService
from prorl_gym.testing.rollout.fake_rollout import (
    EmptyBackend,
    FakePolicySource,
    ScriptedEnvironment,
    environment_lookup,
)

COUNT = 90_000
RECOVER = 1.5
"""Seconds of processor time; 0.6 on an idle machine."""
WRITTEN = 8000
"""Records that are written while the event loop is watched."""
CANCEL = 2.0
"""Seconds of processor time until the answer; 0.6 on an idle machine."""


def ask(number: int) -> RolloutRequest:
    return RolloutRequest(
        rollout_id=f"r{number}",
        group_id=f"g{number // 8}",
        group_size=8,
        replica=number % 8,
        environment="scripted",
        task={"run": "hang"},
    )


async def lives(turns: list[float], alive: asyncio.Event) -> None:
    """Note at which processor time of its thread the event loop had a turn: only what the service does can delay it."""
    while True:
        turns.append(time.thread_time())
        alive.set()
        await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_many_that_wait_are_taken_up_and_cancelled(tmp_path: Path) -> None:
    config = LedgerConfig(path=tmp_path / "l.db")
    ledger = await SqliteLedger.open(config)
    for start in range(0, COUNT, 1000):
        await ledger.add_rollouts([ask(number) for number in range(start, start + 1000)])
    await ledger.close()
    runner = InProcessRunner(environment_lookup(ScriptedEnvironment()), FakePolicySource(), EmptyBackend())
    began = time.process_time()
    service = RolloutService(await SqliteLedger.open(config), runner)
    await service.start()
    recovered = time.process_time() - began
    assert service.pending == COUNT
    service.hold_dispatch()
    records: list[str] = []
    written = asyncio.Event()

    def on_record(record: Rollout) -> None:
        records.append(record.rollout_id)
        if len(records) == WRITTEN:
            written.set()

    service.add_record_observer(on_record)
    turns: list[float] = []
    alive = asyncio.Event()
    living = asyncio.create_task(lives(turns, alive))
    await alive.wait()
    began, since = time.process_time(), time.monotonic()
    stopped = await service.cancel(runs=["default"])
    cancelled, answered = time.process_time() - began, time.monotonic() - since
    await asyncio.wait_for(written.wait(), 30)
    living.cancel()
    longest = max(later - earlier for earlier, later in itertools.pairwise(turns))
    print(f"recovered {recovered:.2f} s, cancelled {cancelled:.2f} s ({answered:.2f} s), longest {longest:.2f} s")
    assert len(stopped) == COUNT
    assert service.pending <= COUNT - WRITTEN
    await asyncio.wait_for(service.stop(drain=False), 30)
    assert recovered < 2 * RECOVER
    assert cancelled < 2 * CANCEL
    assert longest < 2.0
    ledger = await SqliteLedger.open(config)
    assert all(one.cancel_reason is not None for one in await ledger.recover()), "the next start ends the rest"
    await ledger.close()
