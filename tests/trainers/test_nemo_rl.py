from collections.abc import Callable
from typing import Any

import pytest
from rollout_samples import ROW, rollout, segment

from prorl_gym.trainers.gym_result import to_gym_result
from prorl_gym.trainers.nemo_rl import TrainerContractError, check_group, check_result


def result() -> dict[str, Any]:
    return to_gym_result(rollout(), ROW)


def call(r: dict[str, Any], position: int) -> dict[str, Any]:
    return r["response"]["output"][position]


def strip(r: dict[str, Any]) -> None:
    for item in r["response"]["output"]:
        for key in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
            item.pop(key, None)


BROKEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "does not extend": lambda r: call(r, 2)["prompt_token_ids"].__setitem__(0, 77),
    "all three": lambda r: call(r, 0).pop("generation_log_probs"),
    "log-probs": lambda r: call(r, 0)["generation_log_probs"].append(-1.0),
    "not a finite number": lambda r: call(r, 0)["generation_log_probs"].__setitem__(0, float("nan")),
    "not a non-negative integer": lambda r: call(r, 0)["generation_token_ids"].__setitem__(0, -4),
    "nothing to train on": strip,
    "add up": lambda r: r.__setitem__("reward_components", {"a": 3.0}),
    "reward is": lambda r: r.__setitem__("reward", float("inf")),
    "mask_sample is": lambda r: r["instance_config"].__setitem__("mask_sample", True),
    "not a list": lambda r: r.__setitem__("response", {"output": None}),
}


@pytest.mark.parametrize("complaint", BROKEN)
def test_broken_row_is_refused_with_the_reason(complaint: str):
    row = result()
    check_result(row)
    BROKEN[complaint](row)
    with pytest.raises(TrainerContractError, match=complaint):
        check_result(row)


def test_group_with_two_first_prompts_names_the_token():
    check_group([result(), result()])
    other = to_gym_result(rollout(rollout_id="r2", segments=[segment(prompt=[1, 2, 4])]), ROW)
    with pytest.raises(TrainerContractError, match="r2: its first prompt differs from its group's at token 2"):
        check_group([result(), other])
    longer = result()
    call(longer, 0)["prompt_token_ids"].append(5)
    with pytest.raises(TrainerContractError, match="at token 3"):
        check_group([result(), longer])
