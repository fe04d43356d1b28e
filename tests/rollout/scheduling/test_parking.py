"""Parked agents hold no slot and are charged nothing; whatever happens to them, everything comes back."""

import asyncio
from typing import Any

from test_runner import Bench, end, job

from prorl_gym.agents.protocol import AssistantTurn
from prorl_gym.environments.protocol import Episode, RunContext
from prorl_gym.errors import CancelReason
from prorl_gym.rollout.protocol import Finished, ParkingChanged, StageEntered
from prorl_gym.rollout.scheduling.runner import RunnerConfig
from prorl_gym.settings import RolloutSettings
from prorl_gym.testing.rollout.fake_rollout import (
    FakeSession,
    Script,
    ScriptedEnvironment,
)

ONE = RunnerConfig(queue=8, init=2, run=1, eval=1, cleanup_seconds=1)


class Stepping(ScriptedEnvironment):
    """Waits for ``step`` between two model calls: the moment in which an agent works with its tools."""

    def __init__(self) -> None:
        super().__init__()
        self.step: dict[str, asyncio.Event] = {}
        self.calls: list[str] = []

    async def run(self, task: Script, episode: Episode, context: RunContext) -> None:
        gate = self.step.setdefault(task.id, asyncio.Event())
        for turn in range(task.turns):
            turned: AssistantTurn = await (
                context.policy.respond(()) if turn else context.policy.start_conversation(episode.messages, ())
            )
            self.calls.append(task.id)
            context.artifacts.answer = turned.text
            await gate.wait()


class Yard(Bench):
    """A runner of one RUN slot, with agents that can be held between two calls."""

    def __init__(self, config: RunnerConfig = ONE, environment: Stepping | None = None) -> None:
        self.environment = environment or Stepping()
        super().__init__(config, environment=self.environment)

    async def begin(self, name: str, limits: RolloutSettings | None = None) -> None:
        """Have this rollout make its first call and then wait."""
        await self.runner.accept(job(name, limits=limits, id=name, turns=3, sandboxes=True))
        await self.turn(lambda: name in self.environment.calls)

    async def turn(self, fact: Any) -> None:
        for _ in range(2000):
            if fact():
                return
            await asyncio.sleep(0)
        raise AssertionError("it never came true")

    def go(self, name: str) -> None:
        self.environment.step[name].set()

    @property
    def parked(self) -> list[tuple[str, bool]]:
        return [(event.rollout_id, event.is_parked) for event in self.events if isinstance(event, ParkingChanged)]


async def park(yard: Yard, name: str) -> None:
    await yard.runner.park([name])
    yard.go(name)
    await yard.turn(lambda: (name, True) in yard.parked)


async def one_parked(limits: RolloutSettings | None = None) -> Yard:
    """Return a yard whose only rollout, ``a``, is parked."""
    yard = Yard()
    await yard.begin("a", limits)
    await park(yard, "a")
    return yard


async def test_a_parked_agent_gives_its_slot_and_its_engine_place_away_and_goes_on_later() -> None:
    yard = await one_parked()
    assert yard.policies.releases == 1
    assert yard.backend.sandbox_count == 1  # it keeps its sandbox
    capacity = await yard.runner.capacity()
    assert (capacity.run, capacity.parked, capacity.queued) == (0, 1, 0)
    await yard.begin("b")  # in the slot that is free
    yard.go("b")
    await yard.runner.unpark(["a", "stranger"])
    rollouts = await yard.finish()
    assert yard.parked == [("a", True), ("a", False)]
    assert [end(rollouts[name])[0] for name in "ab"] == ["completed"] * 2
    assert rollouts["a"].turns == 3
    assert rollouts["a"].sampled_tokens == 9


async def test_no_deadline_runs_while_parked() -> None:
    yard = await one_parked(RolloutSettings(run_seconds=1.0))
    await asyncio.sleep(1.2)
    await yard.runner.unpark(["a"])
    rollout = (await yard.finish())["a"]
    assert rollout.outcome.status == "completed"
    assert rollout.stages["run"].queued >= 1.2
    assert rollout.stages["run"].seconds < 1.0


async def test_who_goes_on_is_served_before_who_has_not_begun() -> None:
    yard = await one_parked()
    await yard.begin("b")
    for name in ("c", "d"):
        await yard.runner.accept(job(name, id=name, turns=1))
        yard.environment.step[name] = asyncio.Event()
        yard.go(name)
    await yard.turn(lambda: yard.runner.pools.by_name["run"].waiting == 2)
    await yard.runner.unpark(["a"])
    await yard.turn(lambda: yard.runner.pools.by_name["run"].waiting == 3)
    yard.go("b")
    await yard.finish()
    served = [
        event.rollout_id
        for event in yard.events
        if (isinstance(event, StageEntered) and event.stage == "run")
        or (isinstance(event, ParkingChanged) and not event.is_parked)
    ]
    assert served == ["a", "b", "a", "c", "d"]


async def test_many_parked_ones_do_not_keep_others_from_being_taken_in() -> None:
    yard = Yard(RunnerConfig(queue=1, init=1, run=1, eval=1, parked=10))
    for number in range(8):
        await yard.begin(f"a{number}")
        await park(yard, f"a{number}")
    assert (await yard.runner.capacity()).parked == 8
    assert len(await yard.finish()) == 8  # a drain lets all of them go on


async def test_no_more_are_parked_than_may_be() -> None:
    yard = Yard(RunnerConfig(queue=1, init=1, run=2, eval=1, parked=1))
    for name in "ab":
        await yard.begin(name)
    await yard.runner.park(["a", "b"])
    for name in "ab":
        yard.go(name)
    await yard.turn(lambda: any(isinstance(e, Finished) for e in yard.events))
    assert yard.parked == [("a", True)]
    assert len(await yard.finish()) == 2


async def test_a_wish_taken_back_before_the_next_call_changes_nothing() -> None:
    yard = Yard()
    await yard.begin("a")
    await yard.runner.park(["a"])
    await yard.runner.unpark(["a"])
    yard.go("a")
    assert (await yard.finish())["a"].turns == 3
    assert yard.parked == []


async def test_only_an_agent_at_work_is_parked() -> None:
    yard = Yard()
    await yard.runner.accept(job("a", init="hang"))
    await yard.until("init")
    await yard.runner.park(["a", "stranger"])
    await yard.runner.cancel(["a"], CancelReason.CLIENT)
    await yard.finish()
    assert yard.parked == []


async def test_a_parked_one_is_cancelled_at_once_with_its_tokens() -> None:
    yard = await one_parked()
    await yard.runner.cancel(["a"], CancelReason.REDUNDANT)
    rollout = (await yard.finish())["a"]
    assert end(rollout) == ("cancelled", "redundant", "run", None)
    assert rollout.sampled_tokens == 3


async def test_a_swallowed_cancel_makes_no_further_call_and_does_not_park_for_ever() -> None:
    calls = 0

    class Counting(FakeSession):
        async def respond(self, messages: Any) -> AssistantTurn:
            nonlocal calls
            calls += 1
            return await super().respond(messages)

    class Stubborn(Stepping):
        async def run(self, task: Script, episode: Episode, context: RunContext) -> None:
            try:
                await super().run(task, episode, context)
            except asyncio.CancelledError:
                await context.policy.respond(())

    yard = Yard(environment=Stubborn())
    yard.policies.open_session = lambda *_: Counting(yard.policies)  # type: ignore[method-assign]
    await yard.begin("a")
    await park(yard, "a")
    await yard.runner.cancel(["a"], CancelReason.CLIENT)
    assert (await yard.finish())["a"].outcome.status == "cancelled"
    assert calls == 1
