"""Records as NeMo Gym's trajectories, read by Gym's own models and judged by its own health check."""

import json
from pathlib import Path
from typing import Any

import pytest
from rollout_samples import MESSAGES, ROW, cancelled, failed, rollout, segment, truncated

from prorl_gym.records import SUMMARY_CONTINUATION, SUMMARY_REQUEST, Message, Rollout
from prorl_gym.settings import RolloutSettings, resolve_settings
from prorl_gym.trainers.gym_result import to_gym_result
from prorl_gym.trainers.gym_trajectory import compaction_observations, to_gym_trajectory, trajectory_identity

pytestmark = pytest.mark.gym

observability = pytest.importorskip("nemo_gym.rollout_observability")
if not hasattr(observability, "TrajectoryRecord"):
    pytest.skip("needs NeMo Gym 0.7", allow_module_level=True)


def read(record: Rollout) -> Any:
    return observability.TrajectoryRecord.model_validate(to_gym_trajectory(record, "3", "3-0"))


def compacted() -> Rollout:
    second = segment(1, [1, 2, 8]).model_copy(update={"parent": 0, "cause": "summary", "shared_tokens": 2})
    messages = [
        *MESSAGES[:4],
        SUMMARY_REQUEST,
        Message(role="assistant", content="<think>Hm.</think>It is 4."),
        SUMMARY_CONTINUATION,
        Message(role="assistant", content="\\boxed{4}"),
    ]
    settings = resolve_settings(RolloutSettings(compact_tokens=5))
    return rollout(segments=[segment(), second], messages=messages, settings=settings)


def harness() -> Rollout:
    """The main segment, and a side call and a sub-agent that its messages do not tell."""
    side = segment(1).model_copy(update={"cause": "side_call", "trained": False, "parent": 0})
    child = segment(1).model_copy(update={"cause": "sub_agent", "parent": 0})
    below = segment(1, [1, 2, 8]).model_copy(update={"cause": "edit", "parent": 2, "shared_tokens": 2})
    return rollout(segments=[segment(), side, child, below], settings=resolve_settings(RolloutSettings(agent="codex")))


def test_a_turn_has_what_the_matrix_names():
    found = read(rollout())
    assert (found.task_id, found.rollout_id) == ("3", "3-0")
    [invocation] = found.invocations
    assert (invocation.invocation_id, invocation.status, invocation.duration_ms) == ("r1", "completed", 2000.0)
    assert [item.type for item in invocation.conversation] == [
        *("message", "message", "function_call", "function_call_output", "message")
    ]
    first, second = found.turns
    assert [item["content"] for item in first.question] == ["Solve.", "2+2?"]
    assert (first.answer[0]["name"], first.step_count, first.resolved) == ("python", 0, None)
    assert [item["output"] for item in second.question] == ["4"]
    assert (second.answer[0]["content"][0]["text"], second.step_count, second.resolved) == ("\\boxed{4}", 1, True)
    assert [call.token_stats.prompt_tokens for call in found.model_calls] == [3, 6]
    assert [call.token_stats.completion_tokens for call in found.model_calls] == [2, 2]
    assert [call.response_metadata.finish_reason for call in found.model_calls] == ["stop", "stop"]
    assert [[ref.model_call_id for ref in turn.model_calls] for turn in found.turns] == [["r1-0-0"], ["r1-0-1"]]
    [tool] = found.tool_calls
    assert (tool.tool_call_id, tool.tool_name, tool.output, tool.status) == ("c0", "python", "4", "completed")
    assert [gap.code for gap in found.gaps] == ["turn_timestamps_unavailable"]


def test_thoughts_are_apart_from_the_answer():
    second = read(compacted()).turns[1]
    assert (second.reasoning_content, second.answer[0]["content"][0]["text"]) == ("Hm.", "It is 4.")


def test_a_compaction_is_an_observation():
    assert compaction_observations(rollout()) is None
    bundle = observability.AgentObservationBundle.model_validate(compaction_observations(compacted()))
    [seen] = bundle.records
    assert (seen.tokens_before, seen.tokens_after, seen.outcome) == (8, 3, "completed")
    assert seen.summary == "<think>Hm.</think>It is 4."


def test_segments_without_text_are_invocations_below_the_main_one():
    found = read(harness())
    assert [(one.invocation_id, one.parent_invocation_id) for one in found.invocations] == [
        *(("r1", None), ("r1/1", "r1"), ("r1/2", "r1"), ("r1/3", "r1/2"))
    ]
    assert len(found.model_calls) == 5
    assert "turn_model_call_scope_incomplete" in [gap.code for gap in found.gaps]


@pytest.mark.parametrize(("end", "status"), [(failed, "failed"), (cancelled, "incomplete"), (truncated, "incomplete")])
def test_how_it_ended(end: Any, status: str):
    assert read(end()).invocations[0].status == status


def test_what_was_never_sampled_is_read_too():
    assert read(rollout(segments=[], messages=[])).model_calls == []
    assert len(read(rollout(segments=[])).turns) == 2


def test_names_are_those_of_the_collector():
    row = {"_ng_task_index": 3, "_ng_rollout_index": 1}
    assert trajectory_identity(row, "3-1-a2", rollout()) == ("3", "3-1-a2")
    assert trajectory_identity(row | {"instance_id": "x"}, None, rollout()) == ("x", "3-1")
    assert trajectory_identity({}, None, rollout()) == ("r1", "r1")


@pytest.mark.parametrize(
    ("record", "verdict"),
    [(rollout(), "healthy"), (compacted(), "healthy"), (truncated(), "healthy"), (harness(), "unobserved")],
    ids=["whole", "compacted", "truncated", "harness"],
)
def test_gyms_health_check_finds_it_healthy(record: Rollout, verdict: str, tmp_path: Path):
    """A harness's side calls have tokens and no text, so that no turn can own them: one check sees too little."""
    health = pytest.importorskip("nemo_gym.rollout_health")
    if verdict == "unobserved" and "turn_model_call_scope_incomplete" not in Path(health.__file__).read_text():
        pytest.skip("needs NeMo Gym 0.7 or newer")
    result = to_gym_result(record, ROW | {"_ng_rollout_index": 0})
    result["ng_trajectory"] = to_gym_trajectory(record, "3", "3-0")
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(result) + "\n")
    found = health.run_health_checks(tmp_path / "rollouts.jsonl", output_dir=tmp_path, workers=1)
    [digest] = found.rollouts
    assert (digest.verdict, digest.findings) == (verdict, [])
    assert digest.unobserved == ([] if verdict == "healthy" else ["rollout_token_count_mismatch"])
