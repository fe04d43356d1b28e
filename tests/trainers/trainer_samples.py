"""The rollouts that every trainer's shape is tried with: each ending, split turns, versions, routed experts."""

from typing import Any

from rollout_samples import MESSAGES, failed, rollout, segment, truncated

from prorl_gym.errors import Limit
from prorl_gym.records import Generation, Rollout, Score, Segment
from prorl_gym.settings import RolloutSettings, resolve_settings

PAD = 2
IDS, MASK = [1, 2, 3, 100, 9, 51, 101, 9], [0, 0, 0, 1, 1, 0, 1, 1]
LOGPROBS = [0.0, 0.0, 0.0, -0.5, -0.25, 0.0, -0.5, -0.25]
"""Of ``rollout()``: three tokens of prompt, a turn, an observation, a turn."""


def of_versions(first: int, second: int) -> Segment:
    """The sample segment, each turn with a version of its own."""
    return segment().model_copy(update={"policy_versions": [-1, -1, -1, first, first, -1, second, second]})


def with_experts() -> Segment:
    """The sample segment, whose second turn an abort split; the expert of a token is its position."""
    plain = segment()
    first, second = plain.generations

    def call(generation: Generation, start: int, end: int) -> Generation:
        experts = [[[position, 0]] for position in range(end - 1)]
        return generation.model_copy(update={"start": start, "end": end, "routed_experts": experts})

    return plain.model_copy(update={"generations": [call(first, 3, 5), call(second, 6, 7), call(second, 7, 8)]})


def two_segments(**changes: Any) -> Rollout:
    """A rollout whose history was rewritten after two turns; the third begins a segment of its own."""
    return rollout(segments=[segment(), segment(1)], messages=[*MESSAGES, MESSAGES[1], MESSAGES[4]], **changes)


def overlong() -> Rollout:
    """A rollout that a limit cut, and whose settings mask such rollouts; its reward of 0 was measured."""
    settings = resolve_settings(RolloutSettings(mask_overlong=(Limit.TOKENS,)))
    return truncated().model_copy(update={"settings": settings})


def of_group(*members: Rollout) -> list[Rollout]:
    """The rollouts as replicas of one group."""
    size = len(members)
    return [
        one.model_copy(update={"rollout_id": f"r{place}", "group_id": "g", "group_size": size, "replica": place})
        for place, one in enumerate(members)
    ]


def scored(reward: float) -> Rollout:
    return rollout(score=Score(reward=reward))


def silent() -> Rollout:
    """A rollout that failed before it sampled anything."""
    return failed(segments=[], messages=[], stages={})
