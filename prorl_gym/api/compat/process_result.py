"""A record as the answer of the published server's ``/process``.

Its messages carry their own token ids. A trainer written for that server concatenates ``token_ids`` over all messages
and regards the assistant's as sampled. So the record's one token sequence is divided among the messages: their ids put
together are that sequence, and those of assistant messages are its sampled tokens. Between two model calls the ids are
one piece (templates put several tool results into one turn): the first message of that stretch carries it, the others
carry none.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from prorl_gym.api.compat.requests import CallerId
from prorl_gym.errors import FailureKind, Limit
from prorl_gym.records import NOT_SAMPLED, Message, Rollout, Segment
from prorl_gym.trainers.sampled_turns import Turn, count_prompt_messages, segment_turns

RESOLVED_ABOVE = 0.99
"""A reward above it counts as solved, as in the published server."""


def to_process_result(
    rollout: Rollout,
    *,
    instance_id: CallerId = None,
    trajectory_id: CallerId = None,
    include_tokens: bool = True,
    include_input_ids: bool = False,
) -> dict[str, Any]:
    """Return the result dict.

    Args:
        rollout: the terminal record.
        instance_id: as it was posted.
        trajectory_id: as it was posted.
        include_tokens: see ``to_messages``.
        include_input_ids: see ``to_messages``.
    """
    outcome = rollout.outcome
    patch = rollout.git_patch if rollout.score is not None else None
    return {
        "instance_id": instance_id,
        "trajectory_id": trajectory_id,
        "resolved": rollout.reward is not None and rollout.reward > RESOLVED_ABOVE,
        "critical_error": _critical_error(rollout),
        "messages": to_messages(rollout, include_tokens=include_tokens, include_input_ids=include_input_ids),
        "tools": rollout.tools,
        **({"git_patch": patch} if patch is not None else {}),
        "success": outcome.status == "completed",
        "error": _error_text(rollout),
        "finish": outcome.status == "completed",
        "end_properly": _ends_properly(rollout),
        "filter": rollout.masked or len(rollout.segments) > 1,
        "timing": _timing(rollout),
        # What follows is ours.
        "reward": rollout.reward,
        "policy_versions": _policy_versions(rollout),
        "rollout_id": rollout.rollout_id,
        "outcome": outcome.model_dump(mode="json", exclude_none=True),
    }


def _critical_error(rollout: Rollout) -> str | None:
    """Return where a rollout broke, in the published words and one more: ``cancelled``."""
    outcome = rollout.outcome
    if outcome.status == "cancelled":
        return "cancelled"
    if _has_timed_out(rollout):
        return "timeout"
    if outcome.status != "failed":
        return None
    return outcome.stage if outcome.stage in ("init", "run", "eval") else "init"


def _has_timed_out(rollout: Rollout) -> bool:
    outcome = rollout.outcome
    return outcome.limit is Limit.TIME or outcome.kind is FailureKind.STAGE_TIMEOUT


def _error_text(rollout: Rollout) -> str | None:
    """Return the error as one text, never a traceback; ``None`` when there was none."""
    outcome = rollout.outcome
    if len(rollout.segments) > 1:
        return (
            f"Its history was rewritten {len(rollout.segments) - 1} times, and messages have one token sequence. "
            "Set 'thinking: keep' in the service's inference configuration."
        )
    if outcome.status == "completed":
        return None
    if outcome.status == "truncated":
        return outcome.message or f"It was cut short by its limit of {outcome.limit}."
    if outcome.status == "cancelled":
        return outcome.message or f"It was cancelled ({outcome.reason})."
    return outcome.message or f"It failed: {outcome.kind}."


def _ends_properly(rollout: Rollout) -> bool:
    """Whether the model ended its last turn by itself."""
    generations = [one for segment in rollout.segments for one in segment.generations]
    return bool(generations) and generations[-1].finish_reason == "stop"


def _timing(rollout: Rollout) -> dict[str, Any]:
    """Return seconds. ``others_time`` is all time that no stage is charged for: queues and repeated attempts."""
    stages = {name: rollout.stages[name].seconds if name in rollout.stages else 0.0 for name in ("init", "run", "eval")}
    counted = sum(stages.values())
    return {
        **{f"{name}_time": seconds for name, seconds in stages.items()},
        "others_time": max(0.0, rollout.finished_at - rollout.accepted_at - counted),
        "counted_elapsed": counted,
        "timeout_triggered": _has_timed_out(rollout),
    }


def _policy_versions(rollout: Rollout) -> list[int]:
    """Return every version that sampled a token of it, rising: staleness is a difference."""
    versions = {version for segment in rollout.segments for version in segment.policy_versions}
    return sorted(versions - {NOT_SAMPLED})


def to_messages(
    rollout: Rollout, *, include_tokens: bool = True, include_input_ids: bool = False
) -> list[dict[str, Any]]:
    """Return the messages.

    Args:
        rollout: the terminal record.
        include_tokens: let them carry token ids, log-probs and policy versions.
        include_input_ids: let assistant messages carry the whole prompt too, which is quadratic in the turns.
    """
    # A later segment does not extend the first one. Where no id was sampled, the engine reported none.
    if not include_tokens or not rollout.segments or not any(rollout.segments[0].mask):
        return [_message_entry(message) for message in rollout.messages]
    return _TokenAssignment(rollout.segments[0], include_input_ids).build_messages(rollout)


class _TokenAssignment:
    """Divides the tokens of a segment among messages, from the first to the last."""

    def __init__(self, segment: Segment, input_ids: bool) -> None:
        self._segment = segment
        self._input_ids = input_ids
        self._assigned = 0
        """Tokens that a message carries already."""
        self._entries: list[dict[str, Any]] = []
        self._carrier: dict[str, Any] | None = None
        """First message since the last model call that is not the assistant's."""

    def build_messages(self, rollout: Rollout) -> list[dict[str, Any]]:
        spoken = _sampled_turns(self._segment)
        first = count_prompt_messages(rollout)
        for index, message in enumerate(rollout.messages):
            if message.role == "assistant" and index >= first:
                self._add_sampled(_message_entry(message), next(spoken, None))
            else:
                self._add_unsampled(_message_entry(message))
        for turn in spoken:  # sampled, then killed before the turn was complete
            self._add_sampled(_message_entry(Message(role="assistant", content="")), turn)
        self._assign_until(len(self._segment.token_ids))
        return self._entries

    def _add_unsampled(self, entry: dict[str, Any]) -> None:
        entry["token_ids"] = []
        self._entries.append(entry)
        if self._carrier is None and entry["role"] != "assistant":  # a few-shot answer was not sampled
            self._carrier = entry

    def _add_sampled(self, entry: dict[str, Any], turn: Turn | None) -> None:
        start, end = (self._assigned, self._assigned) if turn is None else (turn.start, turn.end)
        self._assign_until(start)
        piece = slice(start, end)
        entry |= {
            "token_ids": self._segment.token_ids[piece],
            "logprobs": self._segment.logprobs[piece],
            "policy_versions": self._segment.policy_versions[piece],
        }
        if self._input_ids:
            entry["input_ids"] = self._segment.token_ids[:start]
        self._entries.append(entry)
        self._assigned, self._carrier = end, None

    def _assign_until(self, position: int) -> None:
        """Give unsampled tokens to the message that they belong to; to an empty one where there is none."""
        ids = self._segment.token_ids[self._assigned : position]
        self._assigned = position
        if not ids:
            return
        if self._carrier is None:
            self._add_unsampled(_message_entry(Message(role="user", content="")))
        assert self._carrier is not None
        self._carrier["token_ids"] = ids


def _sampled_turns(segment: Segment) -> Iterator[Turn]:
    """Yield the model's turns; one whose ids are not all sampled has none, since by its role they would count."""
    for turn in segment_turns(segment):
        yield turn if all(segment.mask[turn.start : turn.end]) else replace(turn, end=turn.start)


def _message_entry(message: Message) -> dict[str, Any]:
    """Return a message without tokens. Calls have their name and arguments where either reader looks for them."""
    entry = message.to_chat()
    for call in entry.get("tool_calls", ()):
        call |= call["function"]
    return entry
