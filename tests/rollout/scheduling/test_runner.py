"""The runner: what each way of ending becomes, and that everything taken is returned."""

import asyncio
import json
import logging
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_gym.environments.protocol import Episode
from prorl_gym.errors import CancelReason, ConflictError, Limit, ShuttingDownError
from prorl_gym.records import Message, Rollout, RolloutRequest
from prorl_gym.rollout.protocol import Finished, Job, StageEntered
from prorl_gym.rollout.scheduling.attempt import EnvironmentLookup
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.settings import RolloutSettings
from prorl_gym.testing.rollout.fake_rollout import (
    EmptyBackend,
    FakePolicySource,
    FakeSession,
    ScriptedEnvironment,
    environment_lookup,
)

SMALL = RunnerConfig(queue=4, init=2, run=3, eval=2, cleanup_seconds=1)


def job(rollout_id: str = "r0", *, limits: RolloutSettings | None = None, **task: Any) -> Job:
    request = RolloutRequest(
        rollout_id=rollout_id, environment="scripted", task=task, settings=limits or RolloutSettings()
    )
    return Job(request=request, accepted_at=time.time())


async def passes(count: int = 30) -> None:
    """Let everything that is ready on the loop run."""
    for _ in range(count):
        await asyncio.sleep(0)


class Bench:
    """A runner with counting fakes."""

    def __init__(
        self,
        config: RunnerConfig = SMALL,
        backend: EmptyBackend | None = None,
        environment: ScriptedEnvironment | None = None,
    ) -> None:
        self.backend = backend or EmptyBackend()
        self.policies = FakePolicySource()
        environments = environment_lookup(environment or ScriptedEnvironment())
        self.inner = InProcessRunner(environments, self.policies, self.backend, config)
        self.runner: Any = self.connect(environments)
        self.events: list[StageEntered | Finished] = []
        self.reader = asyncio.create_task(self._read())

    def connect(self, environments: EnvironmentLookup) -> Any:
        """Return what a service would call in place of ``inner``."""
        return self.inner

    async def _read(self) -> None:
        async for event in self.runner.events():
            self.events.append(event)

    async def finish(self) -> dict[str, Rollout]:
        await asyncio.wait_for(self.runner.drain(), 10)
        await self.reader
        finished = [event.rollout for event in self.events if isinstance(event, Finished)]
        assert len({rollout.rollout_id for rollout in finished}) == len(finished)
        self.check_returned()
        return {rollout.rollout_id: rollout for rollout in finished}

    def check_returned(self) -> None:
        assert [pool.busy for pool in self.inner.pools.by_name.values()] == [0] * 5
        assert (self.backend.sandbox_count, self.policies.open_sessions) == (0, 0)

    async def until(self, stage: str, count: int = 1) -> None:
        """Let the loop run until so many entered a stage."""
        for _ in range(1000):
            if sum(isinstance(e, StageEntered) and e.stage == stage for e in self.events) >= count:
                return
            await asyncio.sleep(0)
        raise AssertionError(f"{stage} was not entered {count} times")


async def one(
    environment: ScriptedEnvironment | None = None, *, limits: RolloutSettings | None = None, **task: Any
) -> Rollout:
    bench = Bench(environment=environment)
    await bench.runner.accept(job(limits=limits, **task))
    return (await bench.finish())["r0"]


def end(rollout: Rollout) -> tuple[Any, ...]:
    outcome = rollout.outcome
    detail = outcome.kind or outcome.limit or outcome.reason
    return outcome.status, None if detail is None else detail.value, outcome.stage, rollout.reward


async def test_a_good_rollout() -> None:
    rollout = await one(sandboxes=True, reward=0.5, turns=2)
    assert end(rollout) == ("completed", None, None, 0.5)
    assert (rollout.turns, rollout.sampled_tokens) == (2, 6)
    assert [message.role for message in rollout.messages] == ["user", "assistant", "assistant"]
    assert rollout.prompt_messages == 1
    assert set(rollout.stages) == {"init", "run", "eval"}
    assert rollout.settings is not None


SHORT = {
    "init": RolloutSettings(init_seconds=0.02),
    "run": RolloutSettings(run_seconds=0.02),
    "eval": RolloutSettings(eval_seconds=0.02),
}


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        # policy: keeps its real score
        ({"run": "sandbox_limit"}, ("failed", "sandbox_limit", "run", 1.0)),
        ({"run": "sandbox_broken_by_agent", "reward": 0.0}, ("failed", "sandbox_broken_by_agent", "run", 0.0)),
        ({"run": "sandbox_limit", "eval": "sandbox_lost"}, ("failed", "sandbox_lost", "eval", None)),
        # limits: truncated and graded
        ({"run": "limit:turns"}, ("truncated", "turns", None, 1.0)),
        ({"run": "limit:tokens", "reward": 0.0}, ("truncated", "tokens", None, 0.0)),
        # task
        ({"no_such_field": 1}, ("failed", "bad_row", "queue", None)),
        ({"init": "image_missing"}, ("failed", "image_missing", "init", None)),
        ({"run": "prompt_too_long"}, ("failed", "prompt_too_long", "run", None)),
        # infrastructure: never a reward
        ({"init": "sandbox_unavailable"}, ("failed", "sandbox_unavailable", "init", None)),
        ({"run": "engine_unreachable"}, ("failed", "engine_unreachable", "run", None)),
        ({"eval": "grader_failed"}, ("failed", "grader_failed", "eval", None)),
        # defects
        ({"init": "crash"}, ("failed", "internal", "init", None)),
        ({"run": "crash"}, ("failed", "internal", "run", None)),
        ({"eval": "crash"}, ("failed", "internal", "eval", None)),
        ({"eval": "limit:turns"}, ("failed", "internal", "eval", None)),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
async def test_every_end_has_its_outcome(script: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert end(await one(**{"sandboxes": True, **script})) == expected


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("init", ("failed", "stage_timeout", "init", None)),
        ("run", ("truncated", "time", None, 1.0)),
        ("eval", ("failed", "stage_timeout", "eval", None)),
    ],
)
async def test_deadlines(stage: str, expected: tuple[Any, ...]) -> None:
    assert end(await one(limits=SHORT[stage], sandboxes=True, **{stage: "hang"})) == expected


async def test_a_timeout_error_of_the_environments_own_is_a_defect_not_a_deadline() -> None:
    class Slow(ScriptedEnvironment):
        async def run(self, *_: Any) -> None:
            raise TimeoutError("a library gave up")

    assert end(await one(Slow())) == ("failed", "internal", "run", None)


async def test_a_defect_shows_its_traceback_to_the_log_only(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        rollout = await one(run="crash")
    assert rollout.outcome.message == "RuntimeError in run; the service's log has the traceback."
    assert [record.exc_info is not None for record in caplog.records] == [True]


async def test_a_score_that_is_none_is_the_graders_failure() -> None:
    class Silent(ScriptedEnvironment):
        async def evaluate(self, *_: Any) -> Any:
            return None

    assert end(await one(Silent())) == ("failed", "grader_failed", "eval", None)


async def test_a_record_that_cannot_be_written_becomes_an_internal_failure() -> None:
    class Hostile(FakeSession):
        def segments(self) -> Any:
            raise ValueError("drift")

    bench = Bench()
    bench.policies.open_session = lambda *_: Hostile(bench.policies)  # type: ignore[method-assign]
    await bench.runner.accept(job())
    assert end((await bench.finish())["r0"]) == ("failed", "internal", "eval", None)


async def test_examples_in_the_first_prompt_are_counted_as_the_prompts() -> None:
    shots = tuple(Message(role=role, content=role) for role in ("user", "assistant", "user"))

    class FewShot(ScriptedEnvironment):
        async def init(self, task: Any, leases: Any, settings: Any) -> Episode:
            return Episode(shots, ())

    class TellsNothing(FewShot):
        async def run(self, task: Any, episode: Episode, context: Any) -> None:
            context.artifacts.messages.append(Message(role="assistant", content="done"))

    for environment, count in ((FewShot(), 3), (TellsNothing(), 0)):
        assert (await one(environment)).prompt_messages == count


async def test_a_release_that_hangs_does_not_hold_the_record() -> None:
    class Stuck(FakeSession):
        async def close(self) -> None:
            if not self._closed:
                await super().close()
                await asyncio.get_running_loop().create_future()

    bench = Bench(RunnerConfig(queue=1, init=1, run=1, eval=1, cleanup_seconds=0.05))
    bench.policies.open_session = lambda *_: Stuck(bench.policies)  # type: ignore[method-assign]
    await bench.runner.accept(job(run="engine_unreachable"))
    assert end((await bench.finish())["r0"]) == ("failed", "engine_unreachable", "run", None)


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
async def test_cancel_in_each_stage(stage: str) -> None:
    bench = Bench()
    await bench.runner.accept(job(sandboxes=True, **{stage: "hang"}))
    await bench.until(stage)
    await passes(8)  # let it reach the hanging place
    await bench.runner.cancel(["r0", "stranger"], CancelReason.REDUNDANT)
    await bench.runner.cancel(["r0"], CancelReason.CLIENT)
    rollout = (await bench.finish())["r0"]
    assert end(rollout) == ("cancelled", "redundant", stage, None)
    assert rollout.sampled_tokens == (0 if stage == "init" else 3)
    assert rollout.cancel_seconds is not None
    assert rollout.cancel_seconds < 1


async def test_cancel_in_the_queue() -> None:
    bench = Bench(RunnerConfig(queue=1, init=1, run=1, eval=1))
    for number in range(3):
        await bench.runner.accept(job(f"r{number}", init="hang"))
    await bench.until("init")
    await bench.runner.cancel(["r2"], CancelReason.CLIENT)
    await bench.runner.close()
    rollouts = await bench.finish()
    assert end(rollouts["r2"]) == ("cancelled", "client", "queue", None)
    assert end(rollouts["r0"]) == ("cancelled", "shutdown", "init", None)


async def test_a_swallowed_cancel_still_ends_before_the_next_stage() -> None:
    class Stubborn(ScriptedEnvironment):
        async def run(self, *_: Any) -> None:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                return

    bench = Bench(environment=Stubborn())
    await bench.runner.accept(job())
    await bench.until("run")
    await passes(5)
    await bench.runner.cancel(["r0"], CancelReason.CLIENT)
    assert end((await bench.finish())["r0"])[:2] == ("cancelled", "client")


async def test_accept_waits_while_the_runner_is_full_and_refuses_when_it_drains() -> None:
    bench = Bench(RunnerConfig(queue=1, init=1, run=1, eval=1))
    await bench.runner.accept(job("r0", init="hang"))  # over nodes, the slots are known once one has joined
    room = (await bench.runner.capacity()).free
    for number in range(1, room + 1):
        await bench.runner.accept(job(f"r{number}", init="hang"))
    waiting = asyncio.create_task(bench.runner.accept(job("one-more")))
    await bench.until("init")
    assert not waiting.done()
    assert (await bench.runner.capacity()).free == 0
    await bench.runner.cancel(["r0"], CancelReason.CLIENT)
    await asyncio.wait_for(waiting, 1)
    late = asyncio.create_task(bench.runner.accept(job("late")))
    await asyncio.sleep(0)
    await bench.runner.close()
    with pytest.raises(ShuttingDownError):
        await late
    assert len(await bench.finish()) == room + 2


async def test_the_same_rollout_twice_is_refused() -> None:
    bench = Bench()
    await bench.runner.accept(job(init="hang"))
    with pytest.raises(ConflictError, match="already running"):
        await bench.runner.accept(job())
    await bench.runner.close()
    assert len(await bench.finish()) == 1


@pytest.mark.parametrize(("ready", "started"), [(None, 1 + 4), (5, 1 + 2 + 5)])
async def test_stages_overlap_and_ready_ones_are_bounded(ready: int | None, started: int) -> None:
    """One agent is at work; others are in INIT's two slots, or ready besides."""
    bench = Bench(RunnerConfig(queue=20, init=2, ready=ready, run=1, eval=1))
    for number in range(12):
        await bench.runner.accept(job(f"r{number}", run="hang", sandboxes=True))
    await bench.until("run")
    await passes(100)
    assert bench.backend.sandbox_count == started
    assert (await bench.runner.capacity()).run == 1
    await bench.runner.close()
    await bench.finish()


async def test_levels_of_settings() -> None:
    environment = ScriptedEnvironment(settings=RolloutSettings(temperature=0.2, max_turns=2))
    runner = InProcessRunner(
        environment_lookup(environment),
        FakePolicySource(),
        EmptyBackend(),
        SMALL,
        RolloutSettings(temperature=0.4, max_turns=4, top_p=0.4, max_tokens=44),
        {"default": RolloutSettings(temperature=0.3, max_turns=3, top_p=0.3)},
    )
    await runner.accept(job(limits=RolloutSettings(temperature=0.1)))
    await runner.drain()
    (rollout,) = [event.rollout async for event in runner.events() if isinstance(event, Finished)]
    found = rollout.settings
    assert found is not None
    assert (found.temperature, found.max_turns, found.top_p, found.max_tokens) == (0.1, 2, 0.3, 44)


@pytest.mark.parametrize("limit", ["turns", "tokens", "time"])
@pytest.mark.parametrize("masked", [True, False])
async def test_an_overlong_rollout_is_graded_and_masked_by_choice(limit: str, masked: bool) -> None:
    """The choice is resolved like every setting, here the environment's, and lands in the record."""
    named = tuple(one for one in Limit if (one == limit) == masked)
    seconds = 0.05 if limit == "time" else 60.0
    environment = ScriptedEnvironment(settings=RolloutSettings(mask_overlong=named, run_seconds=seconds))
    rollout = await one(environment, run="hang" if limit == "time" else f"limit:{limit}", reward=0.5)
    assert end(rollout) == ("truncated", limit, None, 0.5)
    assert rollout.settings is not None
    assert (rollout.settings.mask_overlong, rollout.masked) == (named, masked)


ACTIONS = ["ok", "ok", "hang", "crash", "limit:turns", "sandbox_limit", "engine_timeout", "image_missing"]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
async def test_every_accepted_job_ends_once_and_returns_everything(seed: int) -> None:
    """Jobs of a few groups that park, are cancelled, give up waiting or outlive the runner, at any moment."""
    dice = random.Random(seed)
    config = RunnerConfig(
        queue=dice.randint(1, 4),
        init=dice.randint(1, 3),
        ready=dice.randint(0, 2),
        run=dice.randint(1, 3),
        eval=1,
        parked=dice.choice([None, 0, 2, 5]),
        cleanup_seconds=1,
    )
    bench = Bench(config, EmptyBackend(start_ticks=dice.randrange(3)))
    may_hang = dice.random() < 0.5
    actions = [action for action in ACTIONS if may_hang or action != "hang"]
    accepted: list[str] = []

    async def offer(number: int) -> None:
        script: dict[str, Any] = {stage: dice.choice(actions) for stage in ("init", "run", "eval")}
        turns = dice.randint(1, 6)
        await bench.runner.accept(job(f"r{number}", sandboxes=dice.random() < 0.7, turns=turns, **script))
        accepted.append(f"r{number}")

    offers = [asyncio.create_task(offer(number)) for number in range(dice.randint(1, 15))]
    for _ in range(dice.randrange(150)):
        some = [f"r{dice.randrange(15)}" for _ in range(3)]
        match dice.randrange(9):
            case 0:
                await bench.runner.cancel(some[:1], CancelReason.CLIENT)
            case 1:
                dice.choice(offers).cancel()
            case 2 | 3:
                await bench.runner.park(some)
            case 4:
                await bench.runner.unpark(some)
            case _:
                await asyncio.sleep(0)
        pools = bench.inner.pools.by_name
        assert all(pool.busy <= pool.size for name, pool in pools.items() if name != "jobs")
    if may_hang or dice.random() < 0.5:
        await bench.runner.close()
    for task in offers:
        task.cancel()
    await asyncio.gather(*offers, return_exceptions=True)
    assert set(await bench.finish()) == set(accepted)


async def test_without_room_at_the_engines_no_agent_begins_but_evaluation_does():
    bench = Bench()
    bench.policies.has_room.clear()
    await bench.runner.accept(job("training"))
    judged = job("evaluation")
    request = judged.request.model_copy(update={"evaluation": True})
    await bench.runner.accept(judged.model_copy(update={"request": request}))
    await bench.until("eval")
    await asyncio.sleep(0.02)
    assert [e.rollout_id for e in bench.events if isinstance(e, StageEntered) and e.stage == "run"] == ["evaluation"]
    bench.policies.has_room.set()
    rollouts = await bench.finish()
    assert rollouts["training"].outcome.status == "completed"
    assert rollouts["training"].stages["run"].queued >= 0.02


async def test_who_waits_for_room_can_be_cancelled():
    bench = Bench()
    bench.policies.has_room.clear()
    await bench.runner.accept(job())
    await bench.until("init")
    await asyncio.sleep(0.01)
    await bench.runner.cancel(["r0"], CancelReason.CLIENT)
    assert (await bench.finish())["r0"].outcome.status == "cancelled"
