"""A finished rollout as NeMo Gym's ``/run`` answer, which is also what NeMo-RL reads.

Shape: ``response.output`` holds the conversation as Responses items, and the *last* item of every model call carries
``prompt_token_ids``, ``generation_token_ids`` and ``generation_log_probs``. All three are cut from the flat segment,
so each prompt is a prefix of the next by construction. Every scalar at the top level is always present: trainers
average only the keys they saw in the first result of a group.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from prorl_gym.errors import CancelReason, gym_failure_kind
from prorl_gym.records import Message, Rollout, Segment
from prorl_gym.routed_experts import to_nemo_rl
from prorl_gym.trainers.sampled_turns import Turn, count_prompt_messages, message_segments, segment_turns

_NOT_ECHOED = ("instance_config", "response", "reward_components")
_CANCELLED = {CancelReason.SHUTDOWN: "shutdown"}


@dataclass(frozen=True, slots=True)
class Placeholder:
    """The one-token trajectory of a rollout that never sampled: trainers refuse a row without a generation.

    It is always masked and labelled ``prorl_placeholder``.
    """

    prompt_token_ids: tuple[int, ...] = (0,)
    """The first prompt as the policy's own tokenizer renders it: NeMo-RL groups rows by it."""
    terminator_id: int = 0


def to_gym_result(
    rollout: Rollout,
    row: Mapping[str, Any],
    *,
    placeholder: Placeholder | None = None,
    is_group_stopped: bool = False,
    group_mean_reward: float = 0.0,
) -> dict[str, Any]:
    """Return the JSON answer of ``/run``. The fields of ``row`` are echoed, as every Gym server does.

    ``reward_components`` are left out: NeMo-RL makes a column of each and raises unless all rows of all environments,
    failures too, have the same ones. They are in the record. ``placeholder`` is shown where nothing was sampled.

    ``is_group_stopped``: the row has reward 0 and a mask, as all of its group. Otherwise the masked row of a rollout
    without a reward has ``group_mean_reward``: NeMo-RL masks its loss and counts its reward in the baseline and the
    deviation of the group all the same; the mean of the others moves neither.
    """
    output = _output(rollout)
    sampled = any(item.get("generation_token_ids") for item in output)
    if not sampled:
        output.append(_placeholder_item(rollout, placeholder or Placeholder()))
    masked = is_group_stopped or rollout.masked or not sampled or len(rollout.trained_segments) > 1
    reward = 0.0 if is_group_stopped else group_mean_reward if rollout.reward is None else rollout.reward
    params = _object_field(row, "responses_create_params") or {"input": []}
    result = {key: value for key, value in row.items() if key not in _NOT_ECHOED}
    return result | {
        "responses_create_params": params,
        "response": _response(rollout, output, params),
        "reward": reward,
        "mask_sample": masked,
        "instance_config": {**_object_field(row, "instance_config"), "mask_sample": masked},
        "failure_kind": "cancelled" if is_group_stopped else failure_kind(rollout),
        "failure_reason": rollout.outcome.message or None,
        "mask_reason": _mask_reason(rollout, has_sampled=sampled, is_group_stopped=is_group_stopped)
        if masked
        else None,
        **_graded(rollout),
        **_scalars(rollout, is_placeholder=not sampled, is_group_stopped=is_group_stopped),
    }


def _object_field(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a field that should be an object; rows come from anywhere."""
    value = row.get(key)
    return dict(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else {}


def failure_kind(rollout: Rollout) -> str | None:
    """Return NeMo Gym's word for how a rollout failed; ``None`` when it did not."""
    outcome = rollout.outcome
    if outcome.kind is not None:
        return gym_failure_kind(outcome.kind)
    if outcome.reason is not None:
        return _CANCELLED.get(outcome.reason, "cancelled")
    return None


def _mask_reason(rollout: Rollout, *, has_sampled: bool, is_group_stopped: bool) -> str:
    """Return why a rollout is masked, which may well have succeeded."""
    outcome = rollout.outcome
    if is_group_stopped:
        return "Its group was stopped: the round has enough informative groups without it."
    if rollout.reward is None:
        return outcome.message or f"It has no reward: {outcome.reason.value if outcome.reason else outcome.status}."
    if (count := len(rollout.trained_segments)) > 1:
        return (
            f"{count} segments of it carry loss, and this format has one token sequence per row. "
            "Set 'trained_segments: main', or where it is the template that makes them, 'inference.thinking: keep'."
        )
    if has_sampled and outcome.limit is not None:
        return f"A limit cut it short ({outcome.limit.value}), and the settings mask such rollouts (mask_overlong)."
    return "Nothing was sampled."


def _graded(rollout: Rollout) -> dict[str, Any]:
    """Return the row and what was graded, for people and for ``prorl-gym predictions``."""
    score, submission = rollout.score, rollout.submission
    return {
        "prorl_row_id": rollout.row_id,
        "prorl_why": rollout.why or None,
        "prorl_git_patch": None if score is None else rollout.git_patch,
        "prorl_submission": None if submission is None or submission.kind == "patch" else submission.text,
        "prorl_expected": None if score is None else score.expected,
        "prorl_report": None if score is None else score.report or None,
    }


def _scalars(rollout: Rollout, *, is_placeholder: bool, is_group_stopped: bool) -> dict[str, Any]:
    stages = {name: rollout.stages.get(name) for name in ("init", "run", "eval")}
    return {
        "prorl_rollout_id": rollout.rollout_id,
        "prorl_outcome": rollout.outcome.status,
        "prorl_placeholder": is_placeholder,
        "prorl_cancelled": int(is_group_stopped or rollout.outcome.status == "cancelled"),
        "prorl_completed": rollout.outcome.status == "completed",
        "prorl_truncated": rollout.outcome.status == "truncated",
        "prorl_turns": rollout.turns,
        "prorl_sampled_tokens": rollout.sampled_tokens,
        "prorl_total_tokens": sum(len(segment.token_ids) for segment in rollout.segments),
        "prorl_segments": len(rollout.segments),
        "prorl_retries": len(rollout.retries),
        "prorl_queued_seconds": sum(stage.queued for stage in stages.values() if stage),
        **{f"prorl_{name}_seconds": stage.seconds if stage else 0.0 for name, stage in stages.items()},
    }


def _output(rollout: Rollout) -> list[dict[str, Any]]:
    """Return the conversation after the first prompt, with the token triples on it.

    Only the main segment carries tokens: another one does not extend it, and a trainer aborts on both.
    """
    items: list[dict[str, Any]] = []
    main = rollout.main_segment or 0
    calls = (
        (rollout.segments[place] if place == main else None, turn)
        for place in message_segments(rollout)
        for turn in segment_turns(rollout.segments[place])
    )
    first = count_prompt_messages(rollout)
    for index, message in enumerate(rollout.messages[first:], first):
        if message.role == "assistant":
            segment, turn = next(calls, (None, None))
            items += _attach_tokens(assistant_items(message, f"{rollout.rollout_id}-{index}"), segment, turn)
        else:
            items.append(observation_item(message))
    for segment, turn in calls:  # sampled, then killed before the turn was complete
        items += _attach_tokens([_message_item("", f"{rollout.rollout_id}-cut-{turn.number}")], segment, turn)
    return items


def _attach_tokens(items: list[dict[str, Any]], segment: Segment | None, turn: Turn | None) -> list[dict[str, Any]]:
    """Put the triple on the last item of one model call; nothing when it sampled nothing.

    Ids that only encode an engine's text have mask 0; with 1 a trainer would learn from them.
    """
    if segment is None or turn is None:
        return items
    if any(segment.mask[turn.start : turn.end]):
        items[-1] |= {
            "prompt_token_ids": segment.token_ids[: turn.start],
            "generation_token_ids": segment.token_ids[turn.start : turn.end],
            "generation_log_probs": segment.logprobs[turn.start : turn.end],
        }
        if (experts := to_nemo_rl(turn.expert_calls, turn.end)) is not None:
            items[-1]["routed_experts"] = experts
    return items


def assistant_items(message: Message, item_id: str) -> list[dict[str, Any]]:
    """Return a turn of the model as Responses items."""
    calls = [
        {
            "type": "function_call",
            "id": f"fc-{call.id}",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for call in message.tool_calls
    ]
    return [_message_item(message.content, item_id), *calls] if message.content or not calls else calls


def _message_item(text: str, item_id: str) -> dict[str, Any]:
    return {
        "type": "message",
        "id": f"msg-{item_id}",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def observation_item(message: Message) -> dict[str, Any]:
    """Return a message that is not the model's as a Responses item."""
    if message.role == "tool" and message.tool_call_id:
        return {"type": "function_call_output", "call_id": message.tool_call_id, "output": message.content}
    role = message.role if message.role in ("user", "system") else "user"
    return {"type": "message", "role": role, "content": message.content}


def _placeholder_item(rollout: Rollout, placeholder: Placeholder) -> dict[str, Any]:
    first = rollout.segments[0] if rollout.segments else None
    known = first.token_ids if first else []
    if first and first.generations:
        known = known[: first.generations[0].start]
    return _message_item("", f"{rollout.rollout_id}-placeholder") | {
        "prompt_token_ids": list(known or placeholder.prompt_token_ids),
        "generation_token_ids": [placeholder.terminator_id],
        "generation_log_probs": [0.0],
    }


def _response(rollout: Rollout, output: list[dict[str, Any]], params: Mapping[str, Any]) -> dict[str, Any]:
    calls = [call for segment in rollout.segments for call in segment.generations if call.end > call.start]
    prompts, sampled = sum(call.start for call in calls), sum(call.end - call.start for call in calls)
    return {
        "id": f"resp-{rollout.rollout_id}",
        "object": "response",
        "created_at": rollout.accepted_at,
        "model": str(params.get("model") or "policy"),
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": params.get("tools") or [],
        "metadata": dict(rollout.metadata),
        "usage": {
            "input_tokens": prompts,
            "output_tokens": sampled,
            "total_tokens": prompts + sampled,
            "input_tokens_details": {"cached_tokens": sum(call.cached_tokens or 0 for call in calls)},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }
