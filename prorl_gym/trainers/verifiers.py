"""A rollout as a verifiers ``Trace`` (``verifiers.v1``, written for 0.4.0), which prime-rl trains on.

Each segment is a branch of the trace's message graph, and prime-rl makes a sample of each; one that carries no loss
has no mask. A rollout that is masked, because it has no reward or a limit cut it, is a trace that is not ``ok``:
prime-rl takes it out of its group before advantages are computed.
"""

from typing import Any

from prorl_gym.records import NOT_SAMPLED, Message, Rollout, Segment
from prorl_gym.routed_experts import join_routed_experts
from prorl_gym.trainers.sampled_turns import count_prompt_messages, expert_calls, message_segments, segment_turns
from prorl_gym.trainers.training_sequence import loss_mask


def to_verifiers(rollout: Rollout, task_data: dict[str, Any]) -> dict[str, Any]:
    """Return what ``Trace[WireTaskData, State, WireAgentConfig].model_validate`` takes."""
    ok, outcome, weight = not rollout.masked, rollout.outcome, rollout.segment_weight
    error = {"type": outcome.kind or outcome.reason or outcome.status, "message": outcome.message}
    versions = set[int]().union(*(segment.policy_versions for segment in rollout.segments)) - {NOT_SAMPLED}
    return {
        "id": rollout.rollout_id,
        "task": {"type": rollout.environment, "data": task_data},
        "agent": {"config": {}, "name": "agent"},
        "nodes": _nodes(rollout),
        "rewards": {rollout.environment: None if rollout.reward is None else {"score": rollout.reward}},
        "metrics": {"turns": float(rollout.turns), "retries": float(len(rollout.retries))},
        "info": {"policy_versions": sorted(versions)} | ({"loss_weight": weight} if weight < 1 else {}),
        "is_completed": outcome.status in ("completed", "truncated"),
        "ok": ok,
        "stop_condition": outcome.limit,
        "errors": [] if ok else [error],
    }


def _nodes(rollout: Rollout) -> list[dict[str, Any]]:
    """Return the nodes of one path for each segment: the messages before each turn, then the turn."""
    nodes = list[dict[str, Any]]()
    shown, read_until = message_segments(rollout), count_prompt_messages(rollout)
    for place, recorded in enumerate(rollout.segments):
        segment = recorded if rollout.masked else recorded.model_copy(update={"mask": loss_mask(rollout, place)})
        messages, read = (rollout.messages, read_until) if place in shown else ([], 0)
        path = len(nodes)
        joined = join_routed_experts(expert_calls(segment.generations))
        experts = None if joined is None else joined.padded(len(segment.token_ids)).to_numpy()
        start, first = 0, 0
        for turn in segment_turns(segment):
            while read < len(messages) and messages[read].role != "assistant":
                read += 1
            before = [_message(one) for one in messages[first:read]] or [{"role": "user", "content": ""}]
            spoken = messages[read] if read < len(messages) else Message(role="assistant", content="")
            nodes += [{"message": one} for one in before[:-1]]
            nodes.append({"message": before[-1], **_span(segment, start, turn.start, experts)})
            nodes.append(
                {"message": _message(spoken), "sampled": True, **_span(segment, turn.start, turn.end, experts)}
            )
            read, start = min(read + 1, len(messages)), turn.end
            first = read
        if start < len(segment.token_ids):
            after = {"role": "user", "content": ""}
            nodes.append({"message": after, **_span(segment, start, len(segment.token_ids), experts)})
        read_until = read if place in shown else read_until
        for index in range(path, len(nodes)):
            nodes[index]["parent"] = index - 1 if index > path else None
    return nodes


def _span(segment: Segment, start: int, end: int, experts: Any) -> dict[str, Any]:
    mask, logprobs = segment.mask[start:end], segment.logprobs[start:end]
    return {
        "token_ids": segment.token_ids[start:end],
        "mask": [bool(sampled) for sampled in mask],
        "logprobs": [value for value, sampled in zip(logprobs, mask, strict=True) if sampled],
        "routed_experts": None if experts is None else experts[start:end],
    }


def _message(message: Message) -> dict[str, Any]:
    form = message.to_chat()
    form["tool_calls"] = [
        {"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls
    ] or None
    return form if message.role == "assistant" else {key: form[key] for key in form if key != "tool_calls"}
