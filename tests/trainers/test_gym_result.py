from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from rollout_samples import MESSAGES, PROMPT, ROW, cancelled, failed, rollout, segment, truncated

from prorl_gym.errors import CancelReason, FailureKind, Limit
from prorl_gym.records import NOT_SAMPLED, Generation, GradedSubmission, Message, Outcome, Rollout, Score
from prorl_gym.routed_experts import parse_routed_experts
from prorl_gym.settings import RolloutSettings, resolve_settings
from prorl_gym.trainers.gym_result import Placeholder, to_gym_result
from prorl_gym.trainers.nemo_rl import check_result, first_prompt


def scalar_keys(result: dict[str, object]) -> set[str]:
    return {key for key, value in result.items() if isinstance(value, int | float)}


def test_items_are_interleaved_and_have_triples_of_the_segment():
    result = to_gym_result(rollout(), ROW)
    assert {key: result[key] for key in ROW} == ROW
    output, usage = result["response"]["output"], result["response"]["usage"]
    assert [item["type"] for item in output] == ["function_call", "function_call_output", "message"]
    assert output[1] == {"type": "function_call_output", "call_id": "c0", "output": "4"}
    assert output[2]["content"][0]["text"] == "\\boxed{4}"
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (3 + 6, 4, 13)
    assert output[0]["prompt_token_ids"] == PROMPT
    assert output[0]["generation_token_ids"] == [100, 9]
    assert output[2]["prompt_token_ids"] == [*PROMPT, 100, 9, 51]
    assert output[2]["generation_log_probs"] == [-0.5, -0.25]


def test_triple_is_on_the_last_item_of_the_call_only():
    messages = [*MESSAGES[:2], MESSAGES[2].model_copy(update={"content": "Let me compute."}), *MESSAGES[3:]]
    output = to_gym_result(rollout(messages=messages), ROW)["response"]["output"]
    assert [item["type"] for item in output[:2]] == ["message", "function_call"]
    assert "generation_token_ids" not in output[0]
    assert output[1]["generation_token_ids"] == [100, 9]


@pytest.mark.parametrize(
    ("outcome", "word"),
    [
        (Outcome(status="completed"), None),
        (Outcome(status="failed", kind=FailureKind.SANDBOX_LIMIT), "prorl:sandbox_limit"),
    ],
)
def test_what_measures_the_policy_keeps_its_reward_and_is_not_masked(outcome: Outcome, word: str | None):
    result = to_gym_result(rollout(outcome=outcome, score=Score(reward=0.5, components={"a": 0.2, "b": 0.3})), ROW)
    check_result(result)
    assert (result["reward"], result["mask_sample"], result["failure_kind"]) == (0.5, False, word)


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (FailureKind.ENGINE_UNREACHABLE, "provider_unavailable"),
        (FailureKind.SANDBOX_LOST, "session_lost"),
        (FailureKind.GRADER_FAILED, "verifier_error"),
        (FailureKind.BAD_ROW, "prorl:bad_row"),
    ],
)
def test_failure_without_reward_is_masked_in_both_places(kind: FailureKind, word: str):
    result = to_gym_result(failed(kind), ROW)
    check_result(result)
    assert result["reward"] == 0.0
    assert result["mask_sample"] is True
    assert result["instance_config"] == {"mask_sample": True}
    assert (result["failure_kind"], result["failure_reason"]) == (word, "engine e0 is down")
    assert result["mask_reason"] == "engine e0 is down"


@pytest.mark.parametrize(
    ("reason", "word"), [(CancelReason.REDUNDANT, "cancelled"), (CancelReason.SHUTDOWN, "shutdown")]
)
def test_cancelled_keeps_its_tokens_masked(reason: CancelReason, word: str):
    result = to_gym_result(cancelled(reason), ROW)
    check_result(result)
    assert (result["mask_sample"], result["failure_kind"]) == (True, word)
    assert first_prompt(result) == PROMPT


def test_truncated_is_masked_only_when_its_settings_ask():
    asked = truncated().model_copy(
        update={"settings": resolve_settings(RolloutSettings(mask_overlong=(Limit.TOKENS,)))}
    )
    plain, masked = (to_gym_result(one, ROW) for one in (truncated(), asked))
    assert (plain["mask_sample"], plain["mask_reason"]) == (False, None)
    assert (masked["mask_sample"], masked["instance_config"]["mask_sample"]) == (True, True)
    assert "(tokens)" in masked["mask_reason"]


@pytest.mark.parametrize("record", [rollout(), truncated(), cancelled(CancelReason.REDUNDANT)])
def test_row_of_a_stopped_group_has_no_reward_whatever_it_did(record: Rollout):
    result = to_gym_result(record, ROW, is_group_stopped=True)
    check_result(result)
    assert (result["reward"], result["mask_sample"], result["prorl_cancelled"]) == (0.0, True, 1)
    assert result["failure_kind"] == "cancelled"


def reward_columns(results: Sequence[Mapping[str, Any]]) -> set[str]:
    """The columns that NeMo-RL makes of the rewards of one prompt group (``reward/<component>`` beside the total)."""
    components = [result["reward_components"] for result in results if "reward_components" in result]
    return {"total_reward", *(f"reward/{name}" for each in components for name in each)}


def test_prompt_stream_groups_a_blend_have_the_same_reward_columns():
    """Asynchronous GRPO concatenates the groups of a blend and raises unless all have the same columns."""
    scored = rollout(score=Score(reward=0.5, components={"a": 0.2, "b": 0.3}))
    row = ROW | {"reward_components": {"a": 1.0}}  # a result of an earlier epoch that is posted as a row
    groups = [
        [to_gym_result(scored, ROW), to_gym_result(failed(FailureKind.SANDBOX_LOST), ROW)],
        [to_gym_result(rollout(), row), to_gym_result(scored, row, is_group_stopped=True)],
        [to_gym_result(failed(FailureKind.GRADER_FAILED), ROW)] * 2,
    ]
    first, *others = map(reward_columns, groups)
    assert all(columns == first for columns in others)


def test_strange_row_is_answered():
    check_result(to_gym_result(rollout(), {"responses_create_params": [1], "instance_config": "x"}))


def test_never_sampled_gets_a_labelled_placeholder():
    result = to_gym_result(
        failed(segments=[], messages=[]),
        ROW,
        placeholder=Placeholder(prompt_token_ids=(7, 8), terminator_id=9),
    )
    check_result(result)
    assert result["prorl_placeholder"] is True
    assert result["mask_sample"] is True
    assert first_prompt(result) == [7, 8]
    assert result["response"]["output"][-1]["generation_token_ids"] == [9]


def test_generation_that_was_cut_before_its_message_is_kept():
    result = to_gym_result(failed(messages=MESSAGES[:4]), ROW)
    check_result(result)
    assert result["response"]["output"][-1]["generation_token_ids"] == [101, 9]


def test_history_that_changed_is_exported_up_to_the_change_and_masked():
    changed = rollout(
        segments=[segment(turns=1), segment(turns=1, prompt=[4, 5, 6])],
        messages=[*MESSAGES, Message(role="assistant", content="later")],
    )
    result = to_gym_result(changed, ROW)
    check_result(result)
    assert sum("generation_token_ids" in item for item in result["response"]["output"]) == 1
    assert result["mask_sample"] is True
    assert (result["failure_kind"], result["failure_reason"]) == (None, None), "it did not fail"
    assert result["mask_reason"] == (
        "2 segments of it carry loss, and this format has one token sequence per row. "
        "Set 'trained_segments: main', or where it is the template that makes them, 'inference.thinking: keep'."
    )


def test_ids_that_stand_for_an_engines_text_are_never_shown_to_a_trainer():
    sampled = segment()
    length = len(sampled.token_ids)
    text = sampled.model_copy(
        update={"mask": [0] * length, "logprobs": [0.0] * length, "policy_versions": [NOT_SAMPLED] * length}
    )
    result = to_gym_result(rollout(segments=[text]), ROW)
    check_result(result)
    *said, placeholder = result["response"]["output"]
    assert not any("generation_token_ids" in item for item in said)
    assert placeholder["prompt_token_ids"] == PROMPT
    assert (result["mask_sample"], result["prorl_placeholder"]) == (True, True)


def test_routed_experts_travel_with_the_tokens_they_belong_to():
    # Three tokens of prompt and two of the answer: the last one has not been run through the model.
    whole = segment(turns=1)
    call = whole.generations[0].model_copy(update={"routed_experts": [[[expert]] for expert in (1, 2, 3, 4)]})

    def exported(*generations: Generation) -> list[int]:
        routed = rollout(segments=[whole.model_copy(update={"generations": list(generations)})], messages=MESSAGES[:3])
        (item,) = to_gym_result(routed, ROW)["response"]["output"]
        assert item["generation_token_ids"] == [100, 9], "one call, also of a turn that an engine aborted"
        found = parse_routed_experts(item["routed_experts"], tokens=5)
        assert found is not None
        return list(array("i", found.data))

    assert exported(call) == [1, 2, 3, 4, 0]
    # Split by an abort: the second call computes the prompt anew, and is the first to run the fourth token.
    first = call.model_copy(update={"end": 4, "routed_experts": [[[expert]] for expert in (1, 2, 3)]})
    second = call.model_copy(update={"start": 4, "routed_experts": [[[expert]] for expert in (7, 8, 9, 4)]})
    assert exported(first, second) == [1, 2, 3, 4, 0]


def test_graded_patch_is_in_the_result_also_of_a_row_that_a_limit_cut_short():
    patch = GradedSubmission(kind="patch", text="diff")
    outcome = Outcome(status="truncated", limit=Limit.TURNS)
    result = to_gym_result(rollout(score=Score(reward=1.0), submission=patch, outcome=outcome), ROW)
    assert (result["prorl_git_patch"], result["prorl_submission"]) == ("diff", None)
    assert to_gym_result(failed(submission=patch), ROW)["prorl_git_patch"] is None
    of_an_earlier_release = rollout(score=Score(reward=1.0, detail={"git_patch": "diff"}))
    assert to_gym_result(of_an_earlier_release, ROW)["prorl_git_patch"] == "diff"


def test_the_result_names_the_row_and_what_was_graded():
    score = Score(reward=0.0, detail={"why": "the answer differs"}, expected="42", report="failed test 1")
    result = to_gym_result(rollout(row_id="q7", submission=GradedSubmission(text="41"), score=score), ROW)
    graded = {name: result[f"prorl_{name}"] for name in ("row_id", "why", "submission", "expected", "report")}
    assert graded == {
        "row_id": "q7",
        "why": "the answer differs",
        "submission": "41",
        "expected": "42",
        "report": "failed test 1",
    }


def test_scalar_schema_is_the_same_for_every_ending():
    endings = [rollout(), failed(), cancelled(), truncated(), failed(segments=[], messages=[], stages={})]
    keys = [scalar_keys(to_gym_result(ending, ROW)) for ending in endings]
    assert all(each == keys[0] for each in keys)


def test_examples_in_the_prompt_are_no_turns():
    shots = [Message(role="user", content="1+1?"), Message(role="assistant", content="\\boxed{2}")]
    messages = [MESSAGES[0], *shots, *MESSAGES[1:]]
    output = to_gym_result(rollout(messages=messages, prompt_messages=4), ROW)["response"]["output"]
    assert [item["type"] for item in output] == ["function_call", "function_call_output", "message"]
    assert output[0]["prompt_token_ids"] == PROMPT
    assert (output[2]["content"][0]["text"], output[2]["generation_token_ids"]) == ("\\boxed{4}", [101, 9])
    never_sampled = failed(segments=[], messages=[shots[1], MESSAGES[1]], prompt_messages=2)
    (placeholder,) = to_gym_result(never_sampled, ROW)["response"]["output"]
    assert placeholder["content"][0]["text"] == ""
