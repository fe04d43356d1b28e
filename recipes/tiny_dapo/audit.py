"""What the recipe expects of its rollouts beyond what every trainer can check (``prorl_gym.trainers.checks``)."""

from collections.abc import Iterable, Sequence

from prorl_gym.records import Rollout


class LearnError(Exception):
    """Learning cannot be trusted, or did not happen; the message names the reason."""


def check_segments(groups: Iterable[Sequence[Rollout]]) -> None:
    """Check that no history had to be rewritten: its agent only appends.

    Raises:
        LearnError: naming the rollout.
    """
    for rollout in (one for group in groups for one in group):
        if len(rollout.segments) != 1 and not rollout.masked:
            raise LearnError(f"history: {rollout.rollout_id} has {len(rollout.segments)} segments, one was expected")
