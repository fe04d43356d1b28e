"""Which messages and which tokens of a record the policy sampled, turn by turn; and records as marked chats."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from prorl_gym.records import SUMMARY_CONTINUATION, SUMMARY_REQUEST, Generation, Rollout, Segment
from prorl_gym.routed_experts import Call


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model: ``token_ids[start:end]`` of its segment."""

    number: int
    start: int
    end: int
    expert_calls: tuple[Call, ...] = ()
    """Reports of its calls for ``prorl_gym.routed_experts``."""


def count_prompt_messages(rollout: Rollout) -> int:
    """Count the messages of the first prompt; where the record has no count, all before the first assistant's.

    The prompt of a branch has turns of the assistant, too: those that were sampled in it are the last ones.
    """
    main = rollout.main_segment
    if main is not None and rollout.segments[main].parent is not None:
        turns = sum(len(list(segment_turns(rollout.segments[place]))) for place in message_segments(rollout))
        spoken = [place for place, message in enumerate(rollout.messages) if message.role == "assistant"]
        if turns < len(spoken):
            return spoken[-turns]
    if rollout.prompt_messages:
        return rollout.prompt_messages
    roles = [message.role for message in rollout.messages]
    return roles.index("assistant") if "assistant" in roles else len(roles)


def segment_turns(segment: Segment) -> Iterator[Turn]:
    """Yield the model's turns. The pieces of a turn that an engine aborted and that was continued are one turn."""
    for number, pieces in groupby(segment.generations, key=lambda generation: generation.turn):
        calls = list(pieces)
        yield Turn(number, calls[0].start, calls[-1].end, expert_calls(calls))


def message_segments(rollout: Rollout) -> tuple[int, ...]:
    """Return the segments whose turns are in ``Rollout.messages``, in order.

    The main one, and those before and after it that a template that drops thoughts made, or a summary of the loop's.
    """
    if not rollout.segments:
        return ()
    first = rollout.main_segment or 0
    while (parent := _continued(rollout, first)) is not None:
        first = parent
    found = [first]
    for index in range(first + 1, len(rollout.segments)):
        if _continued(rollout, index) == found[-1]:
            found.append(index)
    return tuple(found)


def _continued(rollout: Rollout, index: int) -> int | None:
    """Return the segment whose conversation a segment continues, rendered again or from a summary on.

    The messages of a harness's rollout are those of its main segment: what was before its summary is not among them.
    """
    segment = rollout.segments[index] if index < len(rollout.segments) else None
    if segment is None or index == 0:
        return None
    has_whole_conversation = rollout.settings is not None and not rollout.settings.agent
    if segment.cause == "template" or (segment.cause == "summary" and has_whole_conversation):
        return segment.parent
    before = rollout.segments[index - 1]
    return index - 1 if before.cause == segment.cause == "first" else None  # a record of an earlier release


def expert_calls(generations: Iterable[Generation]) -> tuple[Call, ...]:
    """Return what model calls reported of the experts of their tokens; calls that sampled nothing report nothing."""
    return tuple((call.end, call.routed_experts) for call in generations if call.end > call.start)


def to_chat(rollout: Rollout, train_key: Literal["train", "weight"] = "train") -> dict[str, Any]:
    """Return a rollout as a chat to fine-tune on: ``{"messages": [...]}``, with a mark on each message.

    Trained are the turns that the policy sampled: not those of the prompt (few-shot examples), and not those with a
    malformed tool call, which is answered by a message in the user's role.
    """
    trained = trained_message_indices(rollout)
    messages = [
        {**message.to_chat(), train_key: (index in trained) if train_key == "train" else int(index in trained)}
        for index, message in enumerate(rollout.messages)
    ]
    return {
        "messages": messages,
        **({"tools": rollout.tools} if rollout.tools else {}),
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "environment": rollout.environment,
        "reward": rollout.reward,
    }


def trained_message_indices(rollout: Rollout) -> set[int]:
    messages = rollout.messages
    trained = set[int]()
    for index in range(count_prompt_messages(rollout), len(messages)):
        following = next((message for message in messages[index + 1 :] if message.role != "tool"), None)
        # An error about a malformed call is a message in the user's role; it comes before the request for a summary.
        is_about_summary = following in (SUMMARY_REQUEST, SUMMARY_CONTINUATION)
        is_refused = following is not None and following.role == "user" and not is_about_summary
        if messages[index].role == "assistant" and not is_refused:
            trained.add(index)
    return trained
