"""Sandboxes that waiting attempts will start are prewarmed, one for each attempt and no more."""

import asyncio
import time
from typing import Any

from test_runner import Bench

from prorl_gym.errors import CancelReason
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.protocol import Job
from prorl_gym.rollout.scheduling.runner import Prewarmer, RunnerConfig
from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend

IMAGE = SandboxSpec(image="swe-1")


class Preparer:
    """Notes what is to be prepared."""

    def __init__(self) -> None:
        self.requested: list[tuple[str, int]] = []

    def prewarm(self, spec: SandboxSpec, count: int = 1) -> None:
        self.requested.append((spec.image, count))


def ask(number: int = 0, **fields: Any) -> RolloutRequest:
    return RolloutRequest(rollout_id=f"r{number}", environment="swe", task={}, **fields)


def test_replicas_that_wait_are_prepared_for_when_the_first_has_shown_what_they_need() -> None:
    pool = Preparer()
    forecast = Prewarmer(pool, max_prewarmed=3)
    group = [ask(number, group_id="g", group_size=8) for number in range(6)]
    for request in group:
        forecast.add_waiting(request)
    assert pool.requested == []
    forecast.remove_waiting(group[0])
    forecast.record_spec(group[0], IMAGE)
    assert pool.requested == [("swe-1", 3)]  # five wait, three may begin
    for request in group[1:5]:
        forecast.remove_waiting(request)
    forecast.record_spec(group[1], IMAGE)
    forecast.add_waiting(ask(9, group_id="g", group_size=8))
    assert pool.requested[1:] == [("swe-1", 1), ("swe-1", 2)]


def test_other_groups_and_runs_tell_nothing() -> None:
    pool = Preparer()
    forecast = Prewarmer(pool, max_prewarmed=3)
    forecast.record_spec(ask(0, group_id="g"), IMAGE)
    forecast.add_waiting(ask(1, group_id="h"))
    forecast.add_waiting(ask(2, group_id="g", run_id="other"))
    forecast.add_waiting(ask(3))
    assert pool.requested == []


def test_what_is_remembered_is_bounded() -> None:
    pool = Preparer()
    forecast = Prewarmer(pool, max_prewarmed=1)
    forecast.record_spec(ask(group_id="first"), IMAGE)
    for number in range(600):
        forecast.add_waiting(ask(group_id=f"g{number}"))
    forecast.add_waiting(ask(group_id="first"))
    assert pool.requested == []


async def test_the_runner_announces_to_its_backend_what_comes_next() -> None:
    class Warm(EmptyBackend, Preparer):
        def __init__(self) -> None:
            EmptyBackend.__init__(self)
            Preparer.__init__(self)

    backend = Warm()
    bench = Bench(RunnerConfig(queue=8, init=1, ready=1, run=1, eval=1), backend)
    for number in range(6):
        request = RolloutRequest(
            rollout_id=f"r{number}", environment="scripted", task={"sandboxes": True, "run": "hang"}
        )
        await bench.runner.accept(Job(request=request, accepted_at=time.time()))
    await bench.until("init", 3)
    for _ in range(20):
        await asyncio.sleep(0)
    assert [count for _, count in backend.requested] == [2, 2, 2]  # never more than may be on their way
    await bench.runner.cancel([f"r{number}" for number in range(6)], CancelReason.CLIENT)
    await bench.finish()
    assert not any(kind.waiting for kind in bench.runner.prewarmer.workloads.values())
