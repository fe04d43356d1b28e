"""A finished rollout as NeMo Gym's ``ng_trajectory``: what a run's health check and its performance figures read.

The calls of a rollout go from the service to the engines, and pass no model server of Gym's. So Gym's own capture sees
none of them, and the agent hands over what the record holds. What a record does not hold is named in ``gaps``.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from prorl_gym.records import SUMMARY_CONTINUATION, Generation, Message, Rollout
from prorl_gym.trainers.gym_result import assistant_items, observation_item
from prorl_gym.trainers.sampled_turns import count_prompt_messages, segment_turns, told_segments

_STATUS = {"completed": "completed", "truncated": "incomplete", "cancelled": "incomplete", "failed": "failed"}


def to_gym_trajectory(rollout: Rollout, task_id: str, rollout_id: str, model: str = "policy") -> dict[str, Any]:
    """Return a ``TrajectoryRecord`` of schema 1.0, as JSON.

    Its ids of calls are ``<rollout>-<segment>-<call>``. The main invocation has the conversation; segments that the
    record's messages do not tell (side calls, sub-agents, branches) are invocations below it, with calls alone.

    Args:
        rollout: the terminal record.
        task_id: Gym's name of the task.
        rollout_id: Gym's name of the rollout.
        model: its name, as the row asks for it.
    """
    told, segments = _told(rollout), range(len(rollout.segments))
    items = [item for place, message in enumerate(rollout.messages) for item in _items(rollout, place, message)]
    main = {
        "invocation_id": rollout.rollout_id,
        "status": _STATUS[rollout.outcome.status],
        "error_type": None if rollout.outcome.kind is None else rollout.outcome.kind.value,
        "duration_ms": 1000 * rollout.stages["run"].seconds if "run" in rollout.stages else None,
        "model_calls": [_reference(rollout, n, call) for n in told for call in _calls(rollout, n)],
        "conversation": items,
    }
    turns = list(_turns(rollout, task_id, rollout_id))
    answers = {call["model_call_id"]: turn["answer"] for turn in turns for call in turn["model_calls"]}
    calls = [_model_call(rollout, n, call, model, answers) for n in segments for call in _calls(rollout, n)]
    gaps = [{"code": "turn_timestamps_unavailable", "detail": "The record has no clock time of a call."}]
    if len(answers) < len(calls):
        gaps.append({"code": "turn_model_call_scope_incomplete", "detail": "The record has no text of some calls."})
    return {
        "schema_version": "1.0",
        "task_id": task_id,
        "rollout_id": rollout_id,
        "invocations": [main, *(_branch(rollout, n, told) for n in segments if n not in told)],
        "turns": turns,
        "model_calls": calls,
        "tool_calls": list(_tool_calls(rollout)),
        "gaps": gaps,
    }


def compaction_observations(rollout: Rollout) -> dict[str, Any] | None:
    """Return an ``AgentObservationBundle`` with the compactions of the loop's context; ``None`` without any."""
    told = [n for n in _told(rollout) if rollout.segments[n].cause == "summary"]
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
        for n, place in zip(told, spoken, strict=False)
    ]
    return {"source": "prorl_gym", "records": records} if records else None


def _told(rollout: Rollout) -> list[int]:
    """Return the segments whose turns the record's messages tell."""
    return [n for n in told_segments(rollout) if n < len(rollout.segments)]


def _calls(rollout: Rollout, segment: int) -> Iterator[tuple[int, Generation]]:
    """Yield the calls of a segment that sampled something, with their numbers."""
    calls = enumerate(rollout.segments[segment].generations)
    yield from ((number, call) for number, call in calls if call.end > call.start)


def _call_id(rollout: Rollout, segment: int, number: int) -> str:
    return f"{rollout.rollout_id}-{segment}-{number}"


def _reference(rollout: Rollout, segment: int, call: tuple[int, Generation]) -> dict[str, Any]:
    return {"model_call_id": _call_id(rollout, segment, call[0])}


def _model_call(
    rollout: Rollout, segment: int, call: tuple[int, Generation], model: str, answers: Mapping[str, Any]
) -> dict[str, Any]:
    number, generation = call
    call_id = _call_id(rollout, segment, number)
    return {
        "model_call_id": call_id,
        "duration_ms": 1000 * generation.seconds,
        "response": {"output": answers[call_id]} if call_id in answers else None,
        "response_metadata": {"response_id": call_id, "model": model, "finish_reason": generation.finish_reason},
        "token_stats": {
            "prompt_tokens": generation.start,
            "completion_tokens": generation.end - generation.start,
            "total_tokens": generation.end,
            "cached_tokens": generation.cached_tokens,
        },
    }


def _branch(rollout: Rollout, segment: int, told: list[int]) -> dict[str, Any]:
    parent = rollout.segments[segment].parent
    is_below_main = parent is None or parent in told
    return {
        "invocation_id": f"{rollout.rollout_id}/{segment}",
        "parent_invocation_id": rollout.rollout_id if is_below_main else f"{rollout.rollout_id}/{parent}",
        "model_calls": [_reference(rollout, segment, call) for call in _calls(rollout, segment)],
    }


def _turns(rollout: Rollout, task_id: str, rollout_id: str) -> Iterator[dict[str, Any]]:
    """Yield the turns of the main invocation: each with what was new to the model before it, and what it said."""
    sampled = iter(
        [
            [_reference(rollout, n, call) for call in _calls(rollout, n) if call[1].turn == turn.number]
            for n in _told(rollout)
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
        thoughts, _, text = message.content.rpartition("</think>")
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
            "reasoning_content": thoughts.removeprefix("<think>").strip() or None,
            "resolved": rollout.reward >= 1 if place == last and rollout.reward is not None else None,
            "step_count": steps,
            "model_calls": next(sampled, list[dict[str, Any]]()),
        }
        question, steps = [], steps + len(message.tool_calls)


def _tool_calls(rollout: Rollout) -> Iterator[dict[str, Any]]:
    outputs = {message.tool_call_id: message.content for message in rollout.messages if message.role == "tool"}
    for message in rollout.messages[count_prompt_messages(rollout) :]:
        for call in message.tool_calls:
            yield {
                "invocation_id": rollout.rollout_id,
                "tool_call_id": call.id,
                "tool_name": call.name,
                "status": "completed" if call.id in outputs else "unknown",
                "output": outputs.get(call.id),
            }


def _items(rollout: Rollout, place: int, message: Message) -> list[dict[str, Any]]:
    if message.role == "assistant":
        return assistant_items(message, f"{rollout.rollout_id}-{place}")
    return [observation_item(message)]


def trajectory_identity(row: Mapping[str, Any], capture_id: str | None, rollout: Rollout) -> tuple[str, str]:
    """Return Gym's names of a row's task and rollout; ours where the row has no indices.

    Args:
        row: what was posted.
        capture_id: under which Gym's capture would file the row's calls.
        rollout: its record.
    """
    index = row.get("_ng_task_index")
    named = next((row[key] for key in ("task_id", "problem_id", "instance_id") if row.get(key) is not None), index)
    fallback = rollout.rollout_id if index is None else f"{index}-{row.get('_ng_rollout_index', 0)}"
    return str(rollout.rollout_id if named is None else named), capture_id or fallback
