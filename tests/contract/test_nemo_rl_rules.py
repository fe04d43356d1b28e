"""NeMo-RL's rules (``nemo_rl_rules``) over answers of ``/run``: what a step would make of them."""

import asyncio

import pytest

pytestmark = [pytest.mark.gym, pytest.mark.slow, pytest.mark.timeout(300)]

import gym_needed  # noqa: E402, F401
from contract_world import World  # noqa: E402
from gym_servers import GROUP_SIZE  # noqa: E402
from nemo_rl_rules import baseline_and_std, keep_informative, to_groups, to_sample  # noqa: E402
from policy_server import Fault, Script  # noqa: E402
from rollout_endings import example, finish  # noqa: E402

from prorl_gym.environments.protocol import ScriptedStep  # noqa: E402
from prorl_gym.trainers.gym_request import row_digest  # noqa: E402
from prorl_gym.trainers.nemo_rl import check_group, check_result  # noqa: E402


async def test_masked_row_moves_no_baseline_and_makes_no_group_informative(world: World):
    """It fails after its siblings have been answered, as one that was tried again does."""
    gate = asyncio.Event()
    rewards = [(1.0, 1.0, 0.0), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)]
    groups = [
        [example("math") | {"_ng_task_index": 4000 + index, "_rowidx": replica} for replica in range(GROUP_SIZE)]
        for index in range(len(rewards))
    ]
    for rows, measured in zip(groups, rewards, strict=True):
        for row, reward in zip(rows, measured, strict=False):
            world.plan(row, Script([finish("\\boxed{277050}" if reward else "\\boxed{1}")]))
        world.plan(rows[-1], Script([finish()], Fault.OUTAGE, at=0, gate=gate))
    failing = [rows[-1] for rows in groups]
    last = asyncio.create_task(world.run(*failing))
    answered = [[result for _, result in await world.run(*rows[:-1])] for rows in groups]
    await world.policy.waiting_of({row_digest(row) for row in failing})
    gate.set()
    for results, (_, failed), measured in zip(answered, await last, rewards, strict=True):
        (group,) = to_groups([*results, failed], GROUP_SIZE)
        samples = [to_sample(result) for result in group]
        assert [sample.is_masked for sample in samples] == [False, False, False, True]
        assert [sample.reward for sample in samples[:-1]] == list(measured)
        assert baseline_and_std(samples)[0][0] == pytest.approx(baseline_and_std(samples[:-1])[0][0])
        assert (keep_informative(samples) == []) == (len(set(measured)) == 1)


async def test_dynamic_sampling_drops_the_groups_that_were_stopped_early(world: World):
    """All rows of a step come back, also those of rollouts that would never have ended; equal rewards stop nothing."""
    gate = asyncio.Event()  # stays closed
    tasks = [example(name) | {"posted_by": "a step that stops early"} for name in ("math", "stem", "code")]
    rows = [task | {"_rowidx": i * GROUP_SIZE + r} for i, task in enumerate(tasks) for r in range(GROUP_SIZE)]
    for row in rows[GROUP_SIZE:]:
        sampled_before = row["_rowidx"] % 2
        world.plan(row, Script([ScriptedStep("", "nothing", {}), finish()], at=sampled_before, gate=gate))
    step = asyncio.create_task(world.run(*rows[1:], agent="stop"))
    await world.policy.waiting_of({row_digest(row) for row in rows[GROUP_SIZE:]})
    equal = [example("math") | {"_ng_task_index": 5000, "_rowidx": replica} for replica in range(GROUP_SIZE)]
    settled = await world.run(*equal, agent="stop")
    assert {result["prorl_cancelled"] for _, result in settled} == {0}
    world.plan(rows[0], Script([finish("\\boxed{1}")]))
    answered = [*await world.run(rows[0], agent="stop"), *await step]
    assert {status for status, _ in answered} == {200}
    groups = to_groups([result for _, result in answered], GROUP_SIZE)
    for group in groups:
        check_group(group)
        for result in group:
            check_result(result)
    assert [{result["prorl_cancelled"] for result in group} for group in groups] == [{0}, {1}, {1}]
    results = [result for group in groups for result in group]
    scalars = [{key for key, value in result.items() if isinstance(value, int | float)} for result in results]
    assert all(keys == scalars[0] for keys in scalars)
    samples = [to_sample(result) for result in results]
    assert keep_informative(samples) == samples[:GROUP_SIZE]
    assert [sample.reward for sample in samples[:GROUP_SIZE]] == [0.0, 1.0, 1.0, 1.0]
    assert not any(sample.is_masked for sample in samples[:GROUP_SIZE])
    assert {(sample.is_masked, sample.reward) for sample in samples[GROUP_SIZE:]} == {(True, 0.0)}
    assert {result["prorl_placeholder"] for group in groups[1:] for result in group} == {False, True}
