"""What every answer of ``/run`` keeps: items 1 to 7 and 10 of the trainer's contract.

Over the answers of every environment and every ending, with the sandboxes, graders and servers that ship.
"""

from typing import Any

import pytest

pytestmark = [pytest.mark.gym, pytest.mark.slow, pytest.mark.timeout(300)]

import gym_needed  # noqa: E402, F401
from contract_world import Answer, World  # noqa: E402
from policy_server import THOUGHTS, Script  # noqa: E402
from rollout_endings import ENVIRONMENTS, MEASURED, NEVER_SAMPLED, UNMEASURED, Ending, example, finish, run_in_sandbox  # noqa: E402

from prorl_gym.trainers.nemo_rl import check_group, check_result, first_prompt  # noqa: E402

Results = dict[tuple[str, Ending], dict[str, Any]]
EVERY_ROW = [(name, ending) for name in ENVIRONMENTS for ending in Ending]


def items(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the items that a trainer trains on."""
    return [item for item in result["response"]["output"] if item.get("generation_token_ids")]


def observations(result: dict[str, Any]) -> list[str]:
    return [item["output"] for item in result["response"]["output"] if item["type"] == "function_call_output"]


@pytest.mark.parametrize("name", ENVIRONMENTS)
async def test_01_first_prompt_tokens_are_equal_across_a_group(name: str, world: World, results: Results):
    """Also in two sandboxes with names of their own, and in rows that never had a prompt."""
    rows = [example(name) | {"_ng_task_index": 1, "_ng_rollout_index": replica} for replica in range(2)]
    namespaces = run_in_sandbox(
        name, "readlink /proc/self/ns/mnt", "import os; print(os.readlink('/proc/self/ns/mnt'))"
    )
    for row in rows:
        world.plan(row, Script([namespaces, finish()]))
    found = [result for _, result in await world.run(*rows)]
    seen = [observations(result)[0] for result in found]
    assert all("mnt:[" in text for text in seen)
    assert seen[0] != seen[1], "two sandboxes"
    check_group([*found, *(results[name, ending] for ending in Ending)])


@pytest.mark.parametrize("name", ENVIRONMENTS)
async def test_02_tokens_of_four_turns_are_one_growing_sequence(name: str, world: World):
    """Over tool calls, and with a template that leaves out the thoughts of earlier turns."""
    row = example(name) | {"_ng_task_index": 2}
    world.plan(row, Script([*[run_in_sandbox(name, f"echo {n}", f"print({n})") for n in range(3)], finish()]))
    [(_, result)] = await world.run(row)
    check_result(result)
    calls = world.calls(row)
    sampled = [(item["prompt_token_ids"], item["generation_token_ids"]) for item in items(result)]
    assert sampled == [(call.prompt, call.ids) for call in calls]
    assert len(sampled) == 4
    decode = world.policy.codec.decode
    assert [decode(call.prompt).count(THOUGHTS.strip()) for call in calls] == [0, 1, 2, 3]
    assert all(decode(call.rendered).count(THOUGHTS.strip()) <= 1 for call in calls), "the template leaves them out"


@pytest.mark.parametrize("name", ENVIRONMENTS)
async def test_02_turn_that_a_limit_cut_ends_the_sequence_without_its_terminator(name: str, world: World):
    row = example(name) | {"_ng_task_index": 3}
    row["responses_create_params"]["max_output_tokens"] = 60
    world.plan(row, Script([run_in_sandbox(name, "true", "1"), finish("x" * 500)]))
    [(_, result)] = await world.run(row)
    check_result(result)
    last = items(result)[-1]["generation_token_ids"]
    assert len(last) == 60
    assert world.policy.codec.terminator_id not in last
    assert (result["prorl_truncated"], result["mask_sample"]) == (True, False)


@pytest.mark.parametrize(("name", "ending"), EVERY_ROW)
async def test_03_05_token_fields_are_complete_and_both_masks_agree(name: str, ending: Ending, results: Results):
    result = results[name, ending]
    check_result(result)
    sampled = sum(len(item["generation_token_ids"]) for item in items(result))
    assert sampled == (1 if result["prorl_placeholder"] else result["prorl_sampled_tokens"])
    assert result["instance_config"]["mask_sample"] is result["mask_sample"]


@pytest.mark.parametrize(("name", "ending"), EVERY_ROW)
async def test_04_ending_is_a_valid_row_where_failures_are_masked(name: str, ending: Ending, results: Results):
    result = results[name, ending]
    assert result["mask_sample"] == (ending in UNMEASURED)
    assert (result["mask_reason"] is None) == (ending in MEASURED)
    assert result["prorl_placeholder"] == (ending in NEVER_SAMPLED)
    assert result["failure_kind"] == {
        Ending.CANCELLED: "cancelled",
        Ending.EVAL_FAILED: "prorl:stage_timeout",
        Ending.ENGINE_OUTAGE: "provider_unavailable",
        Ending.ENGINE_SILENT: "provider_unavailable",
        Ending.INIT_FAILED: "prorl:stage_timeout" if name in ("swe", "taskdir") else "prorl:bad_row",
    }.get(ending)
    if ending in (Ending.SOLVED, Ending.WRONG):
        assert result["reward"] == float(ending is Ending.SOLVED)


@pytest.mark.parametrize(("name", "ending"), EVERY_ROW)
async def test_04_ending_without_a_reward_is_a_503_where_failures_raise(
    name: str, ending: Ending, answers: dict[tuple[str, str, Ending], Answer]
):
    """The SingleController ignores masks: what has no reward may not become a row."""
    status, result = answers["raise", name, ending]
    assert status == (503 if ending in UNMEASURED else 200), result
    if ending in MEASURED:
        check_result(result)
        assert not result["mask_sample"]


async def test_06_scalars_are_the_same_in_every_row(results: Results):
    """NeMo-RL averages the keys of the first result of a group, over all of its rows."""
    keys = {
        frozenset(key for key, value in result.items() if isinstance(value, int | float)) for result in results.values()
    }
    assert len(keys) == 1


async def test_07_reward_components_add_up_or_are_in_no_row(world: World, results: Results):
    """They are in none: all rows of a batch would need the same ones."""
    row = example("math") | {"_ng_task_index": 7, "reward_components": {"left over": 5.0}}
    [(_, result)] = await world.run(row)
    assert result["reward"] == 1.0
    assert not any("reward_components" in each for each in (result, *results.values()))


@pytest.mark.parametrize("name", ENVIRONMENTS)
async def test_10_context_overflow_ends_the_rollout_as_truncated(name: str, results: Results):
    """It is graded, keeps its tokens and has no mask."""
    result = results[name, Ending.CONTEXT_FULL]
    assert (result["prorl_outcome"], result["failure_kind"], result["mask_sample"]) == ("truncated", None, False)
    assert len(items(result)) == 1
    assert first_prompt(result) == first_prompt(results[name, Ending.SOLVED])


@pytest.mark.parametrize(("agent", "status"), [("mask", 200), ("raise", 503)])
async def test_10_first_prompt_beyond_the_context_is_no_reward_of_0(
    agent: str, status: int, world: World, results: Results
):
    row = example("math") | {"_ng_task_index": 10, "prorl": {"settings": {"max_tokens": 20}}}
    [(answered, result)] = await world.run(row, agent=agent)
    assert answered == status, result
    if agent == "mask":
        check_result(result)
        assert (result["failure_kind"], result["mask_sample"]) == ("prorl:prompt_too_long", True)
        check_group([result, results["math", Ending.SOLVED]])
