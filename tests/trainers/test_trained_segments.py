"""Which segments of a tree carry loss, in every shape."""

import pytest
from rollout_samples import MESSAGES, ROW, rollout, segment
from trainer_samples import PAD

from prorl_gym.records import Message, Rollout, Segment
from prorl_gym.settings import RolloutSettings, resolve_settings
from prorl_gym.trainers.areal import to_areal
from prorl_gym.trainers.gym_result import to_gym_result
from prorl_gym.trainers.skyrl import to_skyrl
from prorl_gym.trainers.slime import to_slime
from prorl_gym.trainers.training_sequence import training_sequences
from prorl_gym.trainers.trl import to_trl
from prorl_gym.trainers.verifiers import to_verifiers
from prorl_gym.trainers.verl import to_verl


def branch(turns: int, prompt: list[int], **changes: object) -> Segment:
    return segment(turns, prompt).model_copy(update=changes)


def tree(policy: str) -> Rollout:
    """A title, the main agent, its sub-agent, an edit in the sub-agent, and the main agent after a summary."""
    segments = [
        branch(3, [7, 7, 7], cause="side_call", trained=False),
        branch(2, [1, 2, 3]),
        branch(3, [4, 4, 4], cause="sub_agent", parent=1),
        branch(1, [4, 4, 5], cause="edit", parent=2, shared_tokens=2),
        branch(1, [1, 2, 8], cause="summary", parent=1, shared_tokens=2),
    ]
    settings = resolve_settings(RolloutSettings.model_validate({"trained_segments": policy, "agent": "claude-code"}))
    return rollout(segments=segments, settings=settings)


@pytest.mark.parametrize(
    ("policy", "main", "trained"),
    [("all", 1, (1, 2, 3, 4)), ("normalized", 1, (1, 2, 3, 4)), ("main", 1, (1,)), ("last", 4, (4,))],
)
def test_the_setting_says_which_segments_carry_loss(policy, main, trained):
    record = tree(policy)
    assert (record.main_segment, record.trained_segments) == (main, trained)
    shown = [sum(one.loss_mask) for one in training_sequences(record)]
    assert shown == [sum(one.mask) if place in trained else 0 for place, one in enumerate(record.segments)]
    assert shown == [sum(fields["response_mask"]) for fields in to_verl(record)]
    samples = to_slime(record, group_index=0, rollout_index=0, placeholder_id=PAD)
    assert shown == [sum(sample["loss_mask"]) for sample in samples]
    assert shown == [sum(mask) for mask in to_skyrl([record], ["t"], placeholder_id=PAD, step_wise=True)["loss_masks"]]
    nodes = to_verifiers(record, {})["nodes"]
    assert sum(shown) == sum(sum(node.get("mask", ())) for node in nodes)


@pytest.mark.parametrize(("policy", "weight"), [("all", 1.0), ("normalized", 0.25), ("main", 1.0), ("last", 1.0)])
def test_segments_share_the_weight_of_one_where_the_setting_says_so(policy, weight):
    record = tree(policy)
    assert record.segment_weight == weight
    assert {one.weight for one in training_sequences(record)} == {weight}
    assert {fields["extra_fields"]["loss_weight"] for fields in to_verl(record)} == {weight}
    assert {fields["reward_score"] for fields in to_verl(record)} == {record.reward}
    assert to_verifiers(record, {})["info"].get("loss_weight", 1.0) == weight


@pytest.mark.parametrize("policy", ["normalized", "main"])
def test_one_segment_and_none_weigh_one(policy):
    settings = resolve_settings(RolloutSettings(trained_segments=policy))
    assert rollout(settings=settings).segment_weight == rollout(settings=settings, segments=[]).segment_weight == 1.0


def test_the_messages_of_a_compacted_rollout_tell_all_its_segments():
    """The loop's messages are the whole conversation, and not only that of the main segment."""
    settings = resolve_settings(RolloutSettings(trained_segments="last"))
    segments = [branch(1, [1, 2, 3]), branch(1, [1, 2, 8], cause="summary", parent=0, shared_tokens=2)]
    output = to_gym_result(rollout(segments=segments, settings=settings), ROW)["response"]["output"]
    assert [item.get("prompt_token_ids") for item in output] == [None, None, [1, 2, 8]]


@pytest.mark.parametrize(
    ("policy", "prompt", "tokens"), [("all", [1, 2, 3], 0), ("main", [1, 2, 3], 4), ("last", [1, 2, 8], 2)]
)
def test_a_shape_of_one_sequence_has_the_main_segment(policy, prompt, tokens):
    record = tree(policy)
    columns = to_trl([record], placeholder_id=PAD)
    assert columns["prompt_ids"] == [prompt]
    assert sum(columns["env_mask"][0]) == tokens
    rows = to_areal([record], placeholder_id=PAD)
    assert rows is not None
    assert sum(rows["loss_mask"][0]) == tokens
    result = to_gym_result(record, ROW)
    assert result["mask_sample"] is (policy == "all")
    assert ("trained_segments: main" in (result["mask_reason"] or "")) is (policy == "all")


def test_nemo_rls_row_tells_the_main_segments_turns():
    items = to_gym_result(tree("main"), ROW)["response"]["output"]
    calls = [item for item in items if "generation_token_ids" in item]
    assert [item["prompt_token_ids"][:3] for item in calls] == [[1, 2, 3], [1, 2, 3]]
    assert len([item for item in items if item["type"] != "function_call_output"]) == 2, MESSAGES


def test_the_prompt_of_a_branch_has_turns_that_were_sampled_elsewhere():
    segments = [branch(1, [1, 2, 3]), branch(2, [1, 2, 8], cause="edit", parent=0, shared_tokens=2)]
    context = [*MESSAGES[:2], Message(role="assistant", content="elsewhere"), MESSAGES[1]]
    settings = resolve_settings(RolloutSettings(trained_segments="main"))
    record = rollout(segments=segments, settings=settings, messages=[*context, *MESSAGES[2:]])
    result = to_gym_result(record, ROW)
    output = result["response"]["output"]
    assert [item.get("generation_token_ids") for item in output] == [[100, 9], None, [101, 9]]
    assert result["mask_sample"] is False


def test_a_segment_cannot_sample_what_it_shares():
    fields = segment().model_dump()
    with pytest.raises(ValueError, match="were sampled there"):
        Segment.model_validate(fields | {"parent": 0, "shared_tokens": 4})
    with pytest.raises(ValueError, match="were sampled there"):
        Segment.model_validate(fields | {"shared_tokens": 2})


def test_a_parent_comes_first():
    record = tree("all").model_dump()
    record["segments"][2]["parent"] = 3
    with pytest.raises(ValueError, match="parents come first"):
        Rollout.model_validate(record)
