"""What each trainer gets of each ending of a rollout. ``test_real_trainers.py`` builds the trainers' own classes."""

from types import SimpleNamespace
from typing import Any

import pytest
from rollout_samples import PROMPT, cancelled, failed, rollout, segment
from trainer_samples import (
    IDS,
    LOGPROBS,
    MASK,
    PAD,
    of_group,
    of_versions,
    overlong,
    scored,
    silent,
    two_segments,
    with_experts,
)

from prorl_gym.records import Rollout
from prorl_gym.trainers.areal import to_areal
from prorl_gym.trainers.skyrl import to_skyrl
from prorl_gym.trainers.slime import normalize_rewards, to_slime
from prorl_gym.trainers.training_sequence import NoRewardError, training_sequences
from prorl_gym.trainers.trl import served_reward, to_trl
from prorl_gym.trainers.verifiers import to_verifiers
from prorl_gym.trainers.verl import to_verl


def slime(one: Rollout, index: int = 0, group: int = 0, **options: Any) -> list[dict[str, Any]]:
    return to_slime(one, group_index=group, rollout_index=index, placeholder_id=PAD, **options)


def skyrl(*members: Rollout, step_wise: bool = False) -> dict[str, Any]:
    names = [f"t{place}" for place in range(len(members))]
    return to_skyrl(of_group(*members), names, placeholder_id=PAD, step_wise=step_wise)


# --- what they have in common


@pytest.mark.parametrize("ending", [failed, cancelled, overlong])
def test_what_is_masked_has_its_tokens_but_no_loss(ending: Any):
    (one,) = training_sequences(ending())
    assert (one.response_ids, one.loss_mask) == (IDS[3:], [0] * 5)
    assert [fields["reward_score"] for fields in to_verl(ending())] == ([0.0] if ending is overlong else [])


def test_a_segment_in_which_nothing_was_sampled_is_no_sequence():
    assert training_sequences(silent()) == to_verl(silent()) == []
    text = segment().model_copy(update={"mask": [0] * 8, "logprobs": [0.0] * 8, "policy_versions": [-1] * 8})
    assert training_sequences(rollout(segments=[text])) == []


# --- verl


def test_verl_gets_an_output_for_each_segment():
    first, second = to_verl(two_segments())
    assert (first["prompt_ids"] + first["response_ids"], first["response_mask"]) == (IDS, MASK[3:])
    assert first["response_logprobs"] == LOGPROBS[3:]
    assert (second["response_ids"], second["response_mask"]) == ([100, 9], [1, 1])
    assert [one["reward_score"] for one in (first, second)] == [1.0, 1.0]
    assert first["extra_fields"]["reward_extra_info"] == {"score": 1.0}


# --- TRL


def test_trl_gets_a_row_for_each_prompt():
    output = to_trl(of_group(rollout(), silent(), two_segments(), failed()), placeholder_id=PAD)
    assert output["prompt_ids"] == [PROMPT] * 4  # also of the one that sampled nothing: its group's
    assert output["completion_ids"] == [IDS[3:], [PAD], IDS[3:], IDS[3:]]
    assert output["env_mask"] == [MASK[3:], [0], [0] * 5, [0] * 5]
    assert output["logprobs"][0] == [[-0.5], [-0.25], [0.0], [-0.5], [-0.25]]
    assert output["served_reward"] == [1.0, None, 1.0, None]
    assert served_reward(["a", "b"], served_reward=[1.0, None], prompts=["x", "y"]) == [1.0, None]


# --- AReaL


def test_areal_gets_a_row_for_each_rollout_of_one_length():
    group = of_group(rollout(), silent(), scored(0.0), failed(), two_segments())
    rows = to_areal(group, placeholder_id=PAD)
    assert rows is not None
    assert rows["input_ids"] == [IDS, [*PROMPT, PAD, 0, 0, 0, 0], IDS, IDS, IDS]
    assert rows["loss_mask"] == [MASK, [0] * 8, MASK, [0] * 8, [0] * 8]
    assert rows["logprobs"][:2] == [LOGPROBS, [0.0] * 8]
    assert rows["attention_mask"][:2] == [[True] * 8, [True] * 4 + [False] * 4]
    assert rows["rewards"] == pytest.approx([1.0, 2 / 3, 0.0, 2 / 3, 1.0])


def test_areal_rejects_a_group_without_any_reward():
    assert to_areal(of_group(failed(), cancelled(), silent()), placeholder_id=PAD) is None


# --- SkyRL


def test_skyrl_gets_a_row_for_each_input():
    output = skyrl(rollout(), failed(), scored(0.0), silent(), two_segments())
    assert output["prompt_token_ids"] == [PROMPT] * 5
    assert output["response_ids"] == [IDS[3:]] * 3 + [[PAD]] + [IDS[3:]]
    assert output["loss_masks"] == [MASK[3:], [0] * 5, MASK[3:], [0], [0] * 5]
    assert output["rewards"] == pytest.approx([1.0, 2 / 3, 0.0, 2 / 3, 1.0])
    assert output["stop_reasons"] == ["stop", "error", "stop", "error", "stop"]
    assert output["rollout_logprobs"][0] == LOGPROBS[3:]
    assert (output["trajectory_ids"], output["is_last_step"]) == ([f"t{place}" for place in range(5)], None)


def test_skyrls_steps_are_the_segments():
    output = skyrl(two_segments(), silent(), step_wise=True)
    assert output["trajectory_ids"] == ["t0", "t0", "t1"]
    assert output["is_last_step"] == [False, True, True]
    assert output["loss_masks"] == [MASK[3:], [1, 1], [0]]


def test_a_group_without_any_reward_is_refused_with_the_fix():
    with pytest.raises(
        NoRewardError, match=r"no rollout of the group r0, r1 has a reward(.|\n)*Submit the group again"
    ):
        skyrl(failed(), silent())


def test_rollouts_without_a_group_do_not_lend_each_other_rewards():
    with pytest.raises(NoRewardError, match="r2"):
        to_skyrl([rollout(), failed(rollout_id="r2")], ["a", "b"], placeholder_id=PAD)


# --- slime


def test_slime_gets_a_sample_for_each_segment_of_one_rollout():
    first, second = slime(two_segments(), index=7, group=3)
    assert (first["tokens"], first["response_length"], first["loss_mask"]) == (IDS, 5, MASK[3:])
    assert first["rollout_log_probs"] == LOGPROBS[3:]
    assert (second["tokens"], second["rollout_id"], second["group_index"]) == ([*PROMPT, 100, 9], 7, 3)
    assert (first["status"], first["remove_sample"], first["reward"]) == ("completed", False, 1.0)


@pytest.mark.parametrize(("ending", "status"), [(failed, "failed"), (cancelled, "aborted"), (silent, "failed")])
def test_slime_removes_a_sample_without_a_reward(ending: Any, status: str):
    (sample,) = slime(ending())
    assert (sample["status"], sample["remove_sample"], sample["reward"]) == (status, True, None)
    assert len(sample["loss_mask"]) == len(sample["rollout_log_probs"]) == sample["response_length"] > 0
    assert sum(sample["loss_mask"]) == 0


def normalized(*groups: list[Rollout], std: bool = False) -> tuple[list[float], list[float]]:
    samples = [
        SimpleNamespace(**sample)
        for group, members in enumerate(groups)
        for place, one in enumerate(members)
        for sample in slime(one, index=10 * group + place, group=group)
    ]
    return normalize_rewards(SimpleNamespace(grpo_std_normalization=std), samples)


def test_slimes_rewards_are_normalized_by_group_and_rollout():
    raw, advantages = normalized([scored(1.0), scored(0.0)], [two_segments(), scored(0.0), scored(0.5)])
    assert raw == [1.0, 0.0, 1.0, 1.0, 0.0, 0.5]
    assert advantages == [0.5, -0.5, 0.5, 0.5, -0.5, 0.0]  # the split rollout counts once


def test_slimes_baseline_does_not_see_a_failure():
    raw, advantages = normalized([scored(1.0), failed(), scored(0.0)], [silent(), failed()])
    assert advantages == [0.5, 0.0, -0.5, 0.0, 0.0]
    assert raw == [1.0, 0.5, 0.0, 0.5, 0.5]


def test_slimes_deviation_is_that_of_the_rewards():
    _, advantages = normalized([scored(1.0), failed(), scored(0.0)], [scored(1.0)], std=True)
    assert advantages == pytest.approx([0.5 / 0.5**0.5, 0.0, -0.5 / 0.5**0.5, 0.0], rel=1e-5)


def test_a_step_without_any_reward_is_refused():
    with pytest.raises(ValueError, match="no sample of this step has a reward"):
        normalized([failed(), silent()])


# --- verifiers


def test_verifiers_gets_a_path_for_each_segment():
    trace = to_verifiers(two_segments(), {"idx": 4})
    nodes = trace["nodes"]
    roots = [index for index, node in enumerate(nodes) if node["parent"] is None]
    assert len(roots) == 2
    first, second = nodes[: roots[1]], nodes[roots[1] :]
    assert [token for node in first for token in node.get("token_ids", [])] == IDS
    assert [sampled for node in first for sampled in node.get("mask", [])] == [bool(sampled) for sampled in MASK]
    assert [value for node in first for value in node.get("logprobs", [])] == [-0.5, -0.25, -0.5, -0.25]
    assert [token for node in second for token in node.get("token_ids", [])] == [*PROMPT, 100, 9]
    assert [node["message"]["role"] for node in first] == ["system", "user", "assistant", "tool", "assistant"]
    assert [node.get("sampled", False) for node in second] == [False] * 6 + [True]
    assert (trace["ok"], trace["errors"], trace["info"]) == (True, [], {"policy_versions": [0]})


@pytest.mark.parametrize("ending", [failed, cancelled, silent])
def test_a_trace_without_a_reward_is_an_error_and_not_a_zero(ending: Any):
    trace = to_verifiers(ending(), {})
    assert (trace["ok"], trace["rewards"]) == (False, {"math": None})
    assert trace["errors"][0]["type"] in ("engine_unreachable", "redundant")


def test_tokens_after_the_last_turn_stay_on_the_path():
    longer = segment(1).model_copy(
        update={
            "token_ids": [*PROMPT, 100, 9, 51],
            "mask": [0, 0, 0, 1, 1, 0],
            "logprobs": [0.0, 0.0, 0.0, -0.5, -0.25, 0.0],
            "policy_versions": [-1, -1, -1, 0, 0, -1],
        }
    )
    nodes = to_verifiers(rollout(segments=[longer]), {})["nodes"]
    assert [token for node in nodes for token in node.get("token_ids", [])] == [*PROMPT, 100, 9, 51]


# --- policy versions and routed experts


def test_policy_versions_reach_every_trainer_that_bounds_staleness():
    versioned = rollout(segments=[of_versions(3, 5)])
    fields = to_verl(versioned)[0]["extra_fields"]
    assert (fields["min_global_steps"], fields["max_global_steps"]) == (3, 5)
    rows = to_areal([versioned], placeholder_id=PAD)
    assert rows is not None and rows["versions"] == [[-1, -1, -1, 3, 3, -1, 5, 5]]
    assert slime(versioned)[0]["weight_versions"] == ["3", "5"]


def test_routed_experts_reach_every_trainer_that_replays_them():
    pytest.importorskip("numpy", reason="numpy is not installed in this environment")
    routed = rollout(segments=[with_experts()])
    expected = [0, 1, 2, 3, 4, 5, 6]  # the last token has been run by no call
    (output,) = to_verl(routed)
    (sample,) = slime(routed)
    (indices,) = skyrl(routed)["rollout_expert_indices"]
    nodes = to_verifiers(routed, {})["nodes"]
    assert output["routed_experts"][:, 0, 0].tolist() == expected
    assert sample["rollout_routed_experts"][:, 0, 0].tolist() == expected
    assert indices[:, 0, 0].tolist() == expected
    rows = [row for node in nodes if "token_ids" in node for row in node["routed_experts"][:, 0, 0].tolist()]
    assert rows == [*expected, 0]


def test_skyrl_replays_all_rows_or_none():
    pytest.importorskip("numpy", reason="numpy is not installed in this environment")
    routed = rollout(segments=[with_experts()])
    assert [len(rows) for rows in skyrl(routed, silent())["rollout_expert_indices"]] == [7, 1]
    assert skyrl(routed, rollout())["rollout_expert_indices"] is None


def test_slimes_placeholder_has_the_experts_that_its_conversion_requires():
    pytest.importorskip("numpy", reason="numpy is not installed in this environment")
    (sample,) = slime(silent(), expert_shape=(2, 3))
    assert sample["rollout_routed_experts"].tolist() == [[[0, 1, 2], [0, 1, 2]]]
