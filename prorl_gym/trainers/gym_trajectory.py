"""A finished rollout as NeMo Gym's ``ng_trajectory``: what a run's health check and its performance figures read.

The calls of a rollout go from the service to the engines, and pass no model server of Gym's. So Gym's own capture sees
none of them, and the agent hands over what the record holds. What a record does not hold is named in ``gaps``.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from prorl_gym.records import SUMMARY_CONTINUATION, Generation, Message, Rollout
from prorl_gym.thoughts import split_thinking
from prorl_gym.trainers.gym_result import assistant_items, observation_item
from prorl_gym.trainers.sampled_turns import count_prompt_messages, message_segments, segment_turns

_STATUS = {"completed": "completed", "truncated": "incomplete", "cancelled": "incomplete", "failed": "failed"}


def to_gym_trajectory(rollout: Rollout, task_id: str, rollout_id: str, model: str = "policy") -> dict[str, Any]:
    """Return a ``TrajectoryRecord`` of schema 1.0, as JSON.

    Its ids of calls are ``<rollout>-<segment>-<call>``. The main invocation has the conversation; segments that the
    record's messages do not tell (side calls, sub-agents, branches) are invocations below it, with calls alone.

    ``task_id`` and ``rollout_id`` are Gym's names; ``model`` is named as the row asks for it.
    """
    name, shown = rollout.rollout_id, message_segments(rollout)
    items = [item for place, message in enumerate(rollout.messages) for item in _items(rollout, place, message)]
    main = {
        "invocation_id": name,
        "status": _STATUS[rollout.outcome.status],
        "error_type": None if rollout.outcome.kind is None else rollout.outcome.kind.value,
        "duration_ms": 1000 * rollout.stages["run"].seconds if "run" in rollout.stages else None,
        "model_calls": [{"model_call_id": call_id} for n in shown for call_id in _calls(rollout, n)],
        "conversation": items,
    }
    branches = [
        {
            "invocation_id": f"{name}/{n}",
            "parent_invocation_id": name if parent is None or parent in shown else f"{name}/{parent}",
            "model_calls": [{"model_call_id": call_id} for call_id in _calls(rollout, n)],
        }
        for n, parent in enumerate(segment.parent for segment in rollout.segments)
        if n not in shown
    ]
    turns = list(_turns(rollout, task_id, rollout_id))
    answers = {call["model_call_id"]: turn["answer"] for turn in turns for call in turn["model_calls"]}
    calls = [
        {
            "model_call_id": call_id,
            "duration_ms": 1000 * call.seconds,
            "response": {"output": answers[call_id]} if call_id in answers else None,
            "response_metadata": {"response_id": call_id, "model": model, "finish_reason": call.finish_reason},
            "token_stats": {
                "prompt_tokens": call.start,
                "completion_tokens": call.end - call.start,
                "total_tokens": call.end,
                "cached_tokens": call.cached_tokens,
            },
        }
        for n in range(len(rollout.segments))
        for call_id, call in _calls(rollout, n).items()
    ]
    outputs = {message.tool_call_id: message.content for message in rollout.messages if message.role == "tool"}
    tool_calls = [
        {
            "invocation_id": name,
            "tool_call_id": call.id,
            "tool_name": call.name,
            "status": "completed" if call.id in outputs else "unknown",
            "output": outputs.get(call.id),
        }
        for message in rollout.messages[count_prompt_messages(rollout) :]
        for call in message.tool_calls
    ]
    gaps = [{"code": "turn_timestamps_unavailable", "detail": "The record has no clock time of a call."}]
    if len(answers) < len(calls):
        gaps.append({"code": "turn_model_call_scope_incomplete", "detail": "The record has no text of some calls."})
    return {
        "schema_version": "1.0",
        "task_id": task_id,
        "rollout_id": rollout_id,
        "invocations": [main, *branches],
        "turns": turns,
        "model_calls": calls,
        "tool_calls": tool_calls,
        "gaps": gaps,
    }


def compaction_observations(rollout: Rollout) -> dict[str, Any] | None:
    """Return an ``AgentObservationBundle`` with the compactions of the loop's context; ``None`` without any."""
    compacted = [n for n in message_segments(rollout) if rollout.segments[n].cause == "summary"]
    spoken = [place - 1 for place, message in enumerate(rollout.messages) if message == SUMMARY_CONTINUATION]
    records = [
        {
            "kind": "context_compaction",
            "invocation_id": rollout.rollout_id,
            "trigger": "compact_tokens",
            "tokens_before": len(rollout.segments[n - 1].token_ids),
            "tokens_after": rollout.segments[n].prompt_length,
            "outcome": "completed",
            "summary": rollout.messages[place].content,
        }
        for n, place in zip(compacted, spoken, strict=False)
    ]
    return {"source": "prorl_gym", "records": records} if records else None


def _calls(rollout: Rollout, segment: int) -> dict[str, Generation]:
    """Return the calls of a segment that sampled something, by id."""
    calls = enumerate(rollout.segments[segment].generations)
    return {f"{rollout.rollout_id}-{segment}-{number}": call for number, call in calls if call.end > call.start}


def _turns(rollout: Rollout, task_id: str, rollout_id: str) -> Iterator[dict[str, Any]]:
    """Yield the turns of the main invocation: each with what was new to the model before it, and what it said."""
    sampled = iter(
        [
            [{"model_call_id": one} for one, call in _calls(rollout, n).items() if call.turn == turn.number]
            for n in message_segments(rollout)
            for turn in segment_turns(rollout.segments[n])
        ]
    )
    first = count_prompt_messages(rollout)
    last = max((n for n, message in enumerate(rollout.messages) if message.role == "assistant"), default=-1)
    question: list[dict[str, Any]] = []
    number, steps = 0, 0
    for place, message in enumerate(rollout.messages):
        if message.role != "assistant" or place < first:
            question += _items(rollout, place, message)
            continue
        thoughts, text = split_thinking(message.content)
        said = message.model_copy(update={"content": text.strip()})
        number += 1
        yield {
            "invocation_id": rollout.rollout_id,
            "task_id": task_id,
            "rollout_id": rollout_id,
            "turn_no": number,
            "timestamp": rollout.accepted_at,
            "question": question,
            "answer": _items(rollout, place, said) if said.content or said.tool_calls else [],
            "reasoning_content": thoughts or None,
            "resolved": rollout.reward >= 1 if place == last and rollout.reward is not None else None,
            "step_count": steps,
            "model_calls": next(sampled, list[dict[str, Any]]()),
        }
        question, steps = [], steps + len(message.tool_calls)


def _items(rollout: Rollout, place: int, message: Message) -> list[dict[str, Any]]:
    if message.role == "assistant":
        return assistant_items(message, f"{rollout.rollout_id}-{place}")
    return [observation_item(message)]


def trajectory_identity(row: Mapping[str, Any], capture_id: str | None, rollout: Rollout) -> tuple[str, str]:
    """Return Gym's names of a row's task and rollout; ours where the row has no indices.

    Gym's capture would file the row's calls under ``capture_id``.
    """
    index = row.get("_ng_task_index")
    named = next((row[key] for key in ("task_id", "problem_id", "instance_id") if row.get(key) is not None), index)
    fallback = rollout.rollout_id if index is None else f"{index}-{row.get('_ng_rollout_index', 0)}"
    return str(rollout.rollout_id if named is None else named), capture_id or fallback
