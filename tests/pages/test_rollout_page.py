"""The pages of records and results hold what those hold, exactly, and stay small."""

from typing import Any

import pytest
from long_rollouts import long_rollout
from page_reader import Page, unpack
from rollout_samples import ROW, cancelled, failed, rollout, segment, truncated

from prorl_gym.errors import CancelReason, FailureKind, Limit
from prorl_gym.pages.gym_results_page import render_gym_results
from prorl_gym.pages.rollout_page import render_rollout
from prorl_gym.records import Message, Retry, Rollout, Score, Segment, StageTime
from prorl_gym.settings import RolloutSettings, resolve_settings
from prorl_gym.trainers.gym_result import to_gym_result


def decode(ids: Any) -> str:
    return "".join(f"<{token}>" for token in ids)


def shown(record: Rollout, decode: Any = decode) -> Any:
    return Page(render_rollout(record, decode)).data


def tokens(ids: list[int], mask: list[int], logprobs: list[float], versions: list[int]) -> Segment:
    return Segment.model_validate(
        {
            **{"token_ids": ids, "mask": mask, "logprobs": logprobs, "policy_versions": versions},
            **{"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprob_kind": "raw"},
        }
    )


def test_every_segment_is_there_token_by_token() -> None:
    record = rollout(segments=[segment(), segment(3, [7, 8, 9])])
    data = shown(record)
    for number, wanted in enumerate(record.segments):
        found = unpack(data, 0, number)
        assert found.ids == wanted.token_ids
        assert found.mask == wanted.mask
        assert found.texts == [f"<{token}>" for token in wanted.token_ids]
        calls = data["rollouts"][0]["segments"][number]["calls"]
        assert [call[:3] for call in calls] == [[call.start, call.end, call.turn] for call in wanted.generations]


@pytest.mark.parametrize("logprobs", [[-0.5, -1.25], [-0.1, -1e-300], [-1e300, -0.0]])
def test_log_probs_and_versions_are_exact(logprobs: list[float]) -> None:
    found = unpack(shown(rollout(segments=[tokens([5, 6, 7], [0, 1, 1], [0.0, *logprobs], [-1, 3, 4])])))
    assert found.logprobs == logprobs
    assert found.versions == [3, 4]


def test_without_a_tokenizer_there_are_ids() -> None:
    data = shown(rollout(), None)
    assert data["texts"] is None
    assert unpack(data).ids == rollout().segments[0].token_ids


def test_more_tokens_than_two_bytes_can_count() -> None:
    ids = list(range(70_000))
    found = unpack(shown(rollout(segments=[tokens(ids, [0] * 70_000, [0.0] * 70_000, [-1] * 70_000)]), None))
    assert found.ids == ids


def test_ids_that_no_tokenizer_has() -> None:
    def strict(ids: Any) -> str:
        if max(ids) > 1 << 31:
            raise OverflowError
        return decode(ids)

    data = shown(rollout(segments=[tokens([5, 10**30], [0, 0], [0.0, 0.0], [-1, -1])]), strict)
    assert data["ids"] == [5, str(10**30)]
    assert unpack(data).texts == ["<5>", ""]


def test_a_blank_that_tokenizers_drop_at_the_beginning_is_shown() -> None:
    def dropping(ids: Any) -> str:
        return "".join({1: "a", 2: " b"}[token] for token in ids).removeprefix(" ")

    found = unpack(shown(rollout(segments=[tokens([1, 2, 1], [0] * 3, [0.0] * 3, [-1] * 3)]), dropping))
    assert found.texts == ["a", " b", "a"]


def test_bytes_that_make_no_character_are_one_token_each() -> None:
    broken = rollout(segments=[tokens([1] * 50, [0] * 50, [0.0] * 50, [-1] * 50)])
    assert unpack(shown(broken, lambda ids: "\N{REPLACEMENT CHARACTER}" * len(ids))).shared == []


def test_turns_begin_after_the_first_prompt() -> None:
    example = [Message(role="user", content="1+1?"), Message(role="assistant", content="2")]
    messages = [*example, Message(role="user", content="2+2?"), Message(role="assistant", content="4")]
    found = shown(rollout(messages=messages, prompt_messages=3))["rollouts"][0]["messages"]
    assert [message["turn"] for message in found] == [-1, -1, -1, 0]


@pytest.mark.parametrize(
    ("record", "verdict", "mood", "outcome"),
    [
        (rollout(), "reward 1", "good", "completed"),
        (rollout(score=Score(reward=0.0)), "reward 0", "bad", "completed"),
        (failed(FailureKind.SANDBOX_LOST), "no reward", "none", "failed (sandbox_lost)"),
        (cancelled(CancelReason.CLIENT), "no reward", "none", "cancelled (client)"),
        (truncated(Limit.TIME), "reward 0", "bad", "truncated (time)"),
        (
            truncated(Limit.TIME).model_copy(
                update={"settings": resolve_settings(RolloutSettings(mask_overlong=(Limit.TIME,)))}
            ),
            *("reward 0, masked", "none", "truncated (time)"),
        ),
    ],
)
def test_how_it_ended_is_said(record: Rollout, verdict: str, mood: str, outcome: str) -> None:
    (found,) = shown(record)["rollouts"]
    assert (found["verdict"], found["mood"], found["outcome"]) == (verdict, mood, outcome)


def test_what_was_tried_before_and_how_long_it_took() -> None:
    retry = Retry(attempt=0, kind=FailureKind.SANDBOX_LOST, stage="run", message="It died.", seconds=4.0)
    stages = {"run": StageTime(queued=0.5, seconds=2.0), "init": StageTime(seconds=1.0)}
    times = {"accepted_at": 100.0, "begun_at": 109.0, "finished_at": 113.0}
    (found,) = shown(rollout(attempt=1, retries=[retry], stages=stages, **times))["rollouts"]
    waited = [["accepted", 5.0, 0.0], ["attempts", 0.0, 4.0]]
    assert found["stages"] == [*waited, ["init", 0.0, 1.0], ["run", 0.5, 2.0]]
    assert ["Attempt 0 failed", "sandbox_lost in run: It died."] in found["facts"]


def test_the_wait_of_an_older_record_is_what_no_stage_counts() -> None:
    stages = {"run": StageTime(queued=0.5, seconds=2.0)}
    (found,) = shown(rollout(stages=stages, accepted_at=100.0, begun_at=None, finished_at=103.0))["rollouts"]
    assert found["stages"][0] == ["accepted", 0.5, 0.0]


def test_a_hundred_turns_of_64k_tokens_are_less_than_two_megabytes() -> None:
    record = long_rollout()
    page = render_rollout(record, lambda ids: "".join(f" tok{token}" for token in ids))
    assert unpack(Page(page).data).ids == record.segments[0].token_ids
    assert len(page.encode()) < 2_000_000


def triple(prompt: list[int], sampled: list[int], logprobs: list[float]) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "generation_token_ids": sampled, "generation_log_probs": logprobs}


def shown_results(*results: Any) -> Any:
    return Page(render_gym_results(list(results), decode)).data


def test_every_token_is_there_once_under_its_mask() -> None:
    tokens = unpack(shown_results(to_gym_result(rollout(), ROW)))
    assert tokens.ids == [1, 2, 3, 100, 9, 51, 101, 9]
    assert tokens.texts == [f"<{token}>" for token in tokens.ids]
    assert tokens.mask == [0, 0, 0, 1, 1, 0, 1, 1]
    assert tokens.logprobs == [-0.5, -0.25, -0.5, -0.25]


def test_the_conversation_has_its_turns() -> None:
    messages = shown_results(to_gym_result(rollout(), ROW))["rollouts"][0]["messages"]
    assert [(said["role"], said["turn"], said["text"], said["calls"]) for said in messages] == [
        ("user", -1, "2+2?", []),
        ("assistant", 0, "", [["python", '{"code": "2+2"}']]),
        ("tool", 0, "4", []),
        ("assistant", 1, "\\boxed{4}", []),
    ]
    assert messages[2]["name"] == "python"


def test_tokens_that_share_a_character_are_shown_together() -> None:
    smile = "\N{GRINNING FACE}".encode()
    page = render_gym_results(
        [to_gym_result(rollout(), ROW)], lambda ids: smile[: 2 * len(ids)].decode(errors="replace")
    )
    assert (3, 2, "\N{GRINNING FACE}") in unpack(Page(page).data).shared


def test_masked_rollout_names_its_failure() -> None:
    (found,) = shown_results(to_gym_result(failed(), ROW))["rollouts"]
    assert (found["verdict"], found["mood"]) == ("masked (provider_unavailable)", "none")


def test_rows_stand_by_task_and_repeat() -> None:
    places = [(1, 0), (0, 1), (0, 0)]
    results = [to_gym_result(rollout(), ROW | {"_ng_task_index": t, "_ng_rollout_index": r}) for t, r in places]
    for result in results:
        result["task"] = {"id": f"t{result['_ng_task_index']}"}
    titles = [found["title"] for found in shown_results(*results)["rollouts"]]
    assert titles == ["math / t0 #0", "math / t0 #1", "math / t1 #0"]


@pytest.mark.parametrize(
    "result",
    [
        {"response": None, "reward": None},
        {"response": {"output": "no list"}, "reward": "much", "task": [1]},
        {"response": {"output": [3, {"role": "user"}, {"type": "function_call_output"}]}, "reward": 1},
        {"response": {"output": [{"generation_token_ids": "abc"}, {"generation_token_ids": [1]}]}, "reward": 1},
        {"response": {"output": [triple([2], [-1], [0])]}},
        {"response": {"output": [triple([], [1], [])]}},
        {"response": {}, "prorl_run_seconds": float("nan"), "responses_create_params": {"input": "2+2?"}},
    ],
)
def test_damaged_results_still_have_a_page(result: dict[str, Any]) -> None:
    assert len(shown_results(result, to_gym_result(rollout(), ROW))["rollouts"]) == 2


def test_a_history_that_was_rewritten_is_a_segment_of_its_own() -> None:
    items = [triple([1], [2], [-1.0]), triple([1, 2, 3], [4], [-1.0]), triple([1, 9], [5], [-1.0])]
    data = shown_results({"response": {"output": items}, "reward": 1})
    assert unpack(data, 0, 0).ids == [1, 2, 3, 4]
    assert unpack(data, 0, 1).ids == [1, 9, 5]
    assert [call[2] for segment in data["rollouts"][0]["segments"] for call in segment["calls"]] == [0, 1, 2]
