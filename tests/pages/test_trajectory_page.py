from typing import Any

import pytest
from page_reader import Page, unpack
from rollout_samples import ROW, failed, rollout

from prorl_gym.pages.gym_results_page import render_gym_results
from prorl_gym.trainers.gym_result import to_gym_result


def decode(ids: Any) -> str:
    return "".join(f"<{token}>" for token in ids)


def triple(prompt: list[int], sampled: list[int], logprobs: list[float]) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "generation_token_ids": sampled, "generation_log_probs": logprobs}


def shown(*results: Any) -> Any:
    return Page(render_gym_results(list(results), decode)).data


def test_every_token_is_there_once_under_its_mask() -> None:
    tokens = unpack(shown(to_gym_result(rollout(), ROW)))
    assert tokens.ids == [1, 2, 3, 100, 9, 51, 101, 9]
    assert tokens.texts == [f"<{token}>" for token in tokens.ids]
    assert tokens.mask == [0, 0, 0, 1, 1, 0, 1, 1]
    assert tokens.logprobs == [-0.5, -0.25, -0.5, -0.25]


def test_the_conversation_has_its_turns() -> None:
    messages = shown(to_gym_result(rollout(), ROW))["rollouts"][0]["messages"]
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
    (found,) = shown(to_gym_result(failed(), ROW))["rollouts"]
    assert (found["verdict"], found["mood"]) == ("masked (provider_unavailable)", "none")


def test_rows_stand_by_task_and_repeat() -> None:
    places = [(1, 0), (0, 1), (0, 0)]
    results = [to_gym_result(rollout(), ROW | {"_ng_task_index": t, "_ng_rollout_index": r}) for t, r in places]
    for result in results:
        result["task"] = {"id": f"t{result['_ng_task_index']}"}
    titles = [found["title"] for found in shown(*results)["rollouts"]]
    assert titles == ["math / t0 #0", "math / t0 #1", "math / t1 #0"]


@pytest.mark.parametrize(
    "result",
    [
        {"response": None, "reward": None},
        {"response": {"output": "no list"}, "reward": "much", "task": [1]},
        {"response": {"output": [3, {"role": "user"}, {"type": "function_call_output"}]}, "reward": 1},
        {"response": {"output": [{"generation_token_ids": "abc"}, {"generation_token_ids": [1]}]}, "reward": 1},
        {
            "response": {
                "output": [{"generation_token_ids": [-1], "prompt_token_ids": [2], "generation_log_probs": [0]}]
            }
        },
        {"response": {"output": [{"generation_token_ids": [1], "prompt_token_ids": [], "generation_log_probs": []}]}},
        {"response": {}, "prorl_run_seconds": float("nan"), "responses_create_params": {"input": "2+2?"}},
    ],
)
def test_damaged_results_still_have_a_page(result: dict[str, Any]) -> None:
    assert len(shown(result, to_gym_result(rollout(), ROW))["rollouts"]) == 2


def test_a_history_that_was_rewritten_is_a_segment_of_its_own() -> None:
    items = [triple([1], [2], [-1.0]), triple([1, 2, 3], [4], [-1.0]), triple([1, 9], [5], [-1.0])]
    data = shown({"response": {"output": items}, "reward": 1})
    assert unpack(data, 0, 0).ids == [1, 2, 3, 4]
    assert unpack(data, 0, 1).ids == [1, 9, 5]
    assert [call[2] for segment in data["rollouts"][0]["segments"] for call in segment["calls"]] == [0, 1, 2]
