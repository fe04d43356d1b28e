"""Which messages and which tokens of a record the policy sampled, turn by turn."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from prorl_gym.records import Rollout, Segment


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model: ``token_ids[start:end]`` of its segment."""

    number: int
    start: int
    end: int
    routed_experts: Any = None


def count_prompt_messages(rollout: Rollout) -> int:
    """Count the messages of the first prompt; where the record has no count, all before the first assistant's."""
    if rollout.prompt_messages:
        return rollout.prompt_messages
    roles = [message.role for message in rollout.messages]
    return roles.index("assistant") if "assistant" in roles else len(roles)


def segment_turns(segment: Segment) -> Iterator[Turn]:
    """Yield the model's turns. The pieces of a turn that an engine aborted and that was continued are one turn."""
    for number, pieces in groupby(segment.generations, key=lambda generation: generation.turn):
        first, *rest = pieces
        experts = None if rest else first.routed_experts  # pieces of a turn cannot be put together: the form varies
        yield Turn(number, first.start, (rest or [first])[-1].end, experts)
