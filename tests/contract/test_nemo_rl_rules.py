"""NeMo-RL's rules (``nemo_rl_rules``) over answers of ``/run``: what a step would make of them."""

import asyncio
import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

pytestmark = [pytest.mark.gym, pytest.mark.slow, pytest.mark.timeout(300)]

import gym_needed  # noqa: E402, F401
from contract_world import Answer, World  # noqa: E402
from gym_servers import GROUP_SIZE  # noqa: E402
from nemo_rl_rules import (  # noqa: E402
    Sample,
    baseline_and_std,
    keep_informative,
    reward_columns,
    to_batch,
    to_groups,
    to_sample,
)
from policy_server import Fault, Script  # noqa: E402
from rollout_endings import ENVIRONMENTS, MEASURED, UNMEASURED, Ending, example, finish  # noqa: E402

from prorl_gym.environments.protocol import ScriptedStep  # noqa: E402
from prorl_gym.trainers.gym_request import row_digest  # noqa: E402
from prorl_gym.trainers.nemo_rl import TrainerContractError, check_result  # noqa: E402

Results = dict[tuple[str, Ending], dict[str, Any]]
MAX_MODEL_LEN = 65536
EVERY_ROW = [(name, ending) for name in ENVIRONMENTS for ending in Ending]


@pytest.fixture
def samples(results: Results) -> dict[tuple[str, Ending], Sample]:
    return {key: to_sample(result, MAX_MODEL_LEN) for key, result in results.items()}


@pytest.mark.parametrize(("name", "ending"), EVERY_ROW)
async def test_every_ending_is_a_row_of_the_batch(
    name: str, ending: Ending, results: Results, samples: dict[tuple[str, Ending], Sample]
):
    sample, result = samples[name, ending], results[name, ending]
    sampled = sum(len(message.token_ids) for message in sample.messages if message.is_assistant)
    assert sampled == (1 if result["prorl_placeholder"] else result["prorl_sampled_tokens"])
    assert sample.is_masked == (ending in UNMEASURED)


@pytest.mark.parametrize("name", ENVIRONMENTS)
async def test_rows_of_a_prompt_share_its_baseline(
    name: str, results: Results, samples: dict[tuple[str, Ending], Sample]
):
    """Also with rows of other prompts in the batch, and whatever became of each."""
    moments = dict(zip(samples, baseline_and_std(list(samples.values())), strict=True))
    (group,) = to_groups([results[name, ending] for ending in Ending], len(Ending))
    assert reward_columns(group) == frozenset()
    assert len({moments[name, ending] for ending in Ending}) == 1
    mean, std = moments[name, Ending.SOLVED]
    assert mean == pytest.approx(sum(result["reward"] for result in group) / len(group))
    assert std > 0


async def test_batch_has_loss_on_what_was_sampled_and_measured(
    results: Results, samples: dict[tuple[str, Ending], Sample]
):
    kept = keep_informative(list(samples.values()))
    assert len(kept) == len(samples)
    batch = to_batch(kept)
    expected = [results[name, ending]["prorl_sampled_tokens"] if ending in MEASURED else 0 for name, ending in samples]
    assert batch.loss_tokens == expected
    columns = (batch.input_ids, batch.token_mask, batch.generation_logprobs)
    assert {len(row) for column in columns for row in column} == {max(batch.input_lengths)}
    for mask, logprobs, has_loss in zip(batch.token_mask, batch.generation_logprobs, batch.sample_mask, strict=True):
        assert [value < 0 for value in logprobs] == list(map(bool, mask)) or not has_loss
    assert all(map(math.isfinite, batch.advantages))


@pytest.mark.parametrize("name", ENVIRONMENTS)
async def test_rows_of_the_agent_that_raises_need_no_mask(name: str, answers: dict[tuple[str, str, Ending], Answer]):
    """The SingleController puts loss on each of them."""
    bodies = [
        body for (agent, each, _), (status, body) in answers.items() if (agent, each, status) == ("raise", name, 200)
    ]
    assert len(bodies) == len(MEASURED)
    assert not any(to_sample(body, MAX_MODEL_LEN).is_masked for body in bodies)


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
        samples = [to_sample(result, MAX_MODEL_LEN) for result in group]
        assert [sample.is_masked for sample in samples] == [False, False, False, True]
        assert [sample.reward for sample in samples[:-1]] == list(measured)
        assert baseline_and_std(samples)[0][0] == pytest.approx(baseline_and_std(samples[:-1])[0][0])
        assert (keep_informative(samples) == []) == (len(set(measured)) == 1)
        assert to_batch(samples).loss_tokens[-1] == 0


async def test_dynamic_sampling_drops_the_groups_that_were_stopped_early(world: World):
    """All rows of a step come back, also those of rollouts that would never have ended."""
    gate = asyncio.Event()  # stays closed
    tasks = [example(name) | {"posted_by": "a step that stops early"} for name in ("math", "stem", "code")]
    rows = [task | {"_rowidx": i * GROUP_SIZE + r} for i, task in enumerate(tasks) for r in range(GROUP_SIZE)]
    for row in rows[GROUP_SIZE:]:
        sampled_before = row["_rowidx"] % 2
        world.plan(row, Script([ScriptedStep("", "nothing", {}), finish()], at=sampled_before, gate=gate))
    step = asyncio.create_task(world.run(*rows[1:], agent="stop"))
    await world.policy.waiting_of({row_digest(row) for row in rows[GROUP_SIZE:]})
    world.plan(rows[0], Script([finish("\\boxed{1}")]))
    answered = [*await world.run(rows[0], agent="stop"), *await step]
    assert {status for status, _ in answered} == {200}
    groups = to_groups([result for _, result in answered], GROUP_SIZE)
    samples = [to_sample(result, MAX_MODEL_LEN) for group in groups for result in group]
    assert keep_informative(samples) == samples[:GROUP_SIZE]
    assert [sample.reward for sample in samples[:GROUP_SIZE]] == [0.0, 1.0, 1.0, 1.0]
    assert not any(sample.is_masked for sample in samples[:GROUP_SIZE])
    assert all(sample.is_masked for sample in samples[GROUP_SIZE:])
    assert {result["prorl_placeholder"] for group in groups[1:] for result in group} == {False, True}


def _items(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for item in result["response"]["output"] if item.get("generation_token_ids")]


def _without_generations(result: dict[str, Any]) -> None:
    for item in _items(result):
        item["generation_token_ids"] = []
        item["generation_log_probs"] = []


def _rewritten(result: dict[str, Any]) -> None:
    _items(result)[-1]["prompt_token_ids"][3] += 1


def _not_a_number(result: dict[str, Any]) -> None:
    _items(result)[0]["generation_log_probs"][0] = math.nan


@pytest.mark.parametrize(
    ("damage", "error"),
    [(_rewritten, AssertionError), (_without_generations, ValueError), (_not_a_number, RuntimeError)],
)
async def test_what_nemo_rl_refuses_is_refused_here_and_by_our_own_check(
    damage: Callable[[dict[str, Any]], None], error: type[Exception], results: Results
):
    broken = deepcopy(results["math", Ending.SOLVED])
    damage(broken)
    with pytest.raises(error):
        to_sample(broken, MAX_MODEL_LEN)
    with pytest.raises(TrainerContractError):
        check_result(broken)


async def test_step_with_a_row_missing_or_twice_is_refused(results: Results):
    group = [results["math", ending] for ending in Ending]
    for rows in (group[1:], [*group[1:], group[1]]):
        with pytest.raises(ValueError, match="missing, or came twice"):
            to_groups(rows, len(Ending))
