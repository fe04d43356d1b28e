"""``bench ablation``: its clock, its engines and its trainer; what it measures is not tested."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from _ablation_parts import RoundRobin, TimedToolEnvironment
from _ablation_workload import FAST, PUBLISHED, SLOW, Plan, draw
from _sim_workload import Turn
from ablation import Job, Part, execute

from prorl_gym.agents.protocol import Artifacts, AssistantTurn, ToolSpec
from prorl_gym.environments.protocol import Episode, RunContext
from prorl_gym.inference.protocol import GenerationRequest
from prorl_gym.records import Message
from prorl_gym.sandbox.protocol import Sandbox, SandboxSpec
from prorl_gym.settings import RolloutSettings, resolve_settings
from prorl_gym.testing.inference.simulated_engine import Call, Hardware, LoopEngine, SimEngine
from prorl_gym.testing.virtual_clock import run_virtually

SMALL = replace(PUBLISHED, engines=2, agents=8, init=4, eval=4, steps=2, batch=2, submitted=10, size=4)


class NoLeases:
    """Has no sandboxes."""

    async def get_agent_sandbox(self, spec: SandboxSpec) -> Sandbox:
        raise NotImplementedError

    async def start_clean_sandbox(self, spec: SandboxSpec) -> Sandbox:
        raise NotImplementedError


def ask(session: str, prompt: int = 6000, output: int = 100) -> GenerationRequest:
    return GenerationRequest(session, session, range(prompt), output, 1.0, 1.0, -1, (), group_id="g")


def engine() -> SimEngine:
    return SimEngine("e", Hardware(100_000), 2048, 2048)


def test_hours_pass_at_once_and_in_order():
    async def work() -> list[tuple[str, float]]:
        loop, seen = asyncio.get_running_loop(), list[tuple[str, float]]()

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, loop.time()))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sleeper("late", 7200.0))
            tasks.create_task(sleeper("early", 0.5))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10.0):
                await asyncio.Event().wait()
        seen.append(("timeout", loop.time()))
        return seen

    assert run_virtually(work()) == [
        ("early", pytest.approx(0.5)),
        ("late", pytest.approx(7200.0)),
        ("timeout", pytest.approx(7210.0)),
    ]


def test_a_loop_on_which_nothing_will_happen_raises():
    async def work() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="everything waits"):
        run_virtually(work())


def test_calls_on_the_loop_end_when_the_simulated_engine_ends_them():
    alone = engine()
    for name in ("a", "b"):
        alone.submit(Call(name, "g", 6000, 100, 0.0), 0.0)
    expected = 0.0
    while alone.next_event != float("inf"):
        expected = alone.next_event
        alone.advance()

    async def work() -> float:
        one = LoopEngine(engine())
        results = await asyncio.gather(one.generate(ask("a")), one.generate(ask("b")))
        assert [len(result.token_ids) for result in results] == [100, 100]
        return asyncio.get_running_loop().time()

    assert run_virtually(work()) == pytest.approx(expected, rel=1e-6)


def test_a_call_that_is_cut_off_leaves_the_others_alone():
    async def work() -> int:
        one = LoopEngine(engine())
        cut = asyncio.ensure_future(one.generate(ask("cut")))
        other = asyncio.ensure_future(one.generate(ask("other")))
        await asyncio.sleep(0.5)
        cut.cancel()
        return len((await other).token_ids)

    assert run_virtually(work()) == 100


def test_without_balancing_every_engine_gets_as_many_rollouts():
    equal, engines = RoundRobin(), ["a", "b", "c"]
    homes = [equal.choose(ask(f"s{n}"), engines) for n in range(6)]
    assert homes == ["a", "b", "c"] * 2
    assert equal.choose(ask("s1"), engines) == "b"


@pytest.mark.slow
@pytest.mark.parametrize("off", ["", "load balancing", "load balancing and admission", "fast shell", "clean-up"])
def test_the_real_service_makes_the_steps(off: Part):
    made = execute(Job(SMALL, off, seed=1))
    assert made.delivered == SMALL.steps * SMALL.batch * SMALL.size
    assert 0 < made.utilisation <= 1
    if off == "clean-up":
        assert made.ended == SMALL.steps * SMALL.submitted * SMALL.size


def test_a_run_is_alike_each_time():
    job = Job(replace(SMALL, steps=1), "", seed=1)
    assert execute(job) == execute(job)


@pytest.mark.slow
def test_unneeded_work_takes_time():
    full, stale = (execute(Job(SMALL, off, seed=1)).seconds for off in ("", "clean-up"))
    assert stale > full


class Instant:
    """A policy that answers at once."""

    async def start_conversation(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> AssistantTurn:
        return AssistantTurn("")

    async def respond(self, messages: Sequence[Message]) -> AssistantTurn:
        return AssistantTurn("")


def test_every_action_takes_longer_in_the_slow_shell():
    plan = Plan(tuple(Turn(10, 10, seconds) for seconds in (0.1, 0.5, 0.9)), 0.0, 0.0, 1.0)

    async def work(slow: bool) -> float:
        episode = Episode((), ())
        settings = resolve_settings(RolloutSettings())
        context = RunContext(Instant(), NoLeases(), settings, Artifacts())
        await TimedToolEnvironment({}, slow=slow).run(plan, episode, context)
        return asyncio.get_running_loop().time()

    assert run_virtually(work(False)) == pytest.approx(1.5)
    assert run_virtually(work(True)) == pytest.approx(1.5 + 3 * (SLOW - FAST))


def test_groups_depend_on_the_seed_alone():
    assert draw(SMALL, 1, 5) == draw(SMALL, 1, 5) != draw(SMALL, 2, 5)
    assert max(len(plan.turns) for group in range(50) for plan in draw(PUBLISHED, 1, group)) <= 50
