"""Which messages and which tokens of a record the policy sampled, turn by turn."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from prorl_gym.records import Generation, Rollout, Segment
from prorl_gym.routed_experts import Call


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model: ``token_ids[start:end]`` of its segment."""

    number: int
    start: int
    end: int
    expert_calls: tuple[Call, ...] = ()
    """What its calls reported for ``prorl_gym.routed_experts``."""


def count_prompt_messages(rollout: Rollout) -> int:
    """Count the messages of the first prompt; where the record has no count, all before the first assistant's."""
    if rollout.prompt_messages:
        return rollout.prompt_messages
    roles = [message.role for message in rollout.messages]
    return roles.index("assistant") if "assistant" in roles else len(roles)


def segment_turns(segment: Segment) -> Iterator[Turn]:
    """Yield the model's turns. The pieces of a turn that an engine aborted and that was continued are one turn."""
    for number, pieces in groupby(segment.generations, key=lambda generation: generation.turn):
        calls = list(pieces)
        yield Turn(number, calls[0].start, calls[-1].end, expert_calls(calls))


def expert_calls(generations: Iterable[Generation]) -> tuple[Call, ...]:
    """Return what model calls reported of the experts of their tokens; calls that sampled nothing report nothing."""
    return tuple((call.end, call.routed_experts) for call in generations if call.end > call.start)
