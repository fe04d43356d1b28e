"""The rules by which groups are stopped, kept or helped: pure functions of a group, a demand and usual durations."""

import math
from collections import deque
from collections.abc import Iterator
from statistics import median

from prorl_gym.demand import Demand, RedundantHandling
from prorl_gym.errors import CancelReason
from prorl_gym.rollout.groups.group import Group, GroupPosition, Replacement, Replica, was_unneeded
from prorl_gym.rollout.protocol import Stage

_WINDOW = 64
"""Latest durations that count: conditions change with the policy and the machine."""

_MIN_SAMPLES = 5
"""Fewer give no median."""

_MAX_WINDOWS = 1000
"""Environments times stages that are remembered: their names come from requests."""


class StageDurations:
    """Medians and means of the latest durations, in seconds."""

    def __init__(self) -> None:
        self._windows: dict[tuple[str, Stage], deque[float]] = {}

    def record(self, environment: str, stage: Stage, seconds: float) -> bool:
        """Add a duration; return whether the median has just become known."""
        key = (environment, stage)
        if key not in self._windows and len(self._windows) >= _MAX_WINDOWS:
            del self._windows[next(iter(self._windows))]
        window = self._windows.setdefault(key, deque(maxlen=_WINDOW))
        window.append(max(0.0, seconds))
        return len(window) == _MIN_SAMPLES

    def median(self, environment: str, stage: Stage) -> float | None:
        """Return what is usual, ``None`` while too few are known."""
        window = self._windows.get((environment, stage), ())
        return median(window) if len(window) >= _MIN_SAMPLES else None

    def mean(self, environment: str, stage: Stage) -> float | None:
        """Return the mean, ``None`` while none is known."""
        window = self._windows.get((environment, stage), ())
        return sum(window) / len(window) if window else None


def max_begun_groups(demand: Demand, ready: int, informative_share: float) -> int | None:
    """Return how many groups may be under way; ``None``: as many as there are.

    The capacity law of AReaL (Fu et al. 2025, arXiv:2505.24298, section 5.1) counted in groups; never fewer than the
    demand needs at once. It bounds what waits to be used. Of the groups under way only a share will be informative and
    wait at all: counted as if all were, they would leave workers idle, the more the fewer groups teach anything.

    Args:
        demand: what is wanted.
        ready: groups that wait to be used.
        informative_share: share of the groups under way that are expected to become ready.
    """
    if demand.max_staleness is None:
        return None
    most = max((demand.max_staleness + 1) * demand.groups, demand.groups + demand.spare)
    return max(0, math.ceil((most - ready) / informative_share))


def lost_reason(group: Group) -> CancelReason | None:
    """Return why a place of the group was cut with nothing left in it: it was stopped, maybe before a restart."""
    ends = [position.end for position in group.positions if position.is_idle and not position.has_reward]
    why = {end.detail for end in ends if end is not None and was_unneeded(end)}
    if not why:
        return None
    return CancelReason.STALE if CancelReason.STALE in why else CancelReason.REDUNDANT


def has_ungraded_work(group: Group) -> bool:
    """Whether more than grading is left to do: something has not begun, is at work, or is to be made again."""
    return _awaits_replacement(group) or any(replica.stage != "eval" for replica in group.live_replicas())


def has_sunk_cost(group: Group, policy: RedundantHandling) -> bool:
    """Whether work was done on it that parking its agents keeps."""
    kept: set[Stage] = {"run", "eval", "init"} if policy.init == "finish" else {"run", "eval"}
    return any(position.has_reward for position in group.positions) or any(
        replica.stage in kept for replica in group.live_replicas()
    )


def cancelled_stages(policy: RedundantHandling) -> frozenset[Stage]:
    """Return the stages in which members of a group are cancelled that is redundant and not kept."""
    cut: set[Stage] = {"queue"}
    if policy.init == "kill":
        cut.add("init")
    if policy.run != "finish":
        cut.add("run")
    return frozenset(cut)


def would_cancel_work(group: Group, policy: RedundantHandling) -> bool:
    """Whether stopping a group would keep anything from being made."""
    cut = cancelled_stages(policy)
    return _awaits_replacement(group) or any(replica.stage in cut for replica in group.live_replicas())


def may_replace(group: Group, demand: Demand) -> bool:
    """Whether failed members of a group are still made again."""
    return group.stop_reason is None and group.failure_replacement_count < demand.replace


def due_replacements(group: Group, demand: Demand, durations: StageDurations) -> Iterator[tuple[float, Replacement]]:
    """Yield the replacements that would help a group, each with the Unix seconds from which it is due.

    Replacements that the caller requests between two items count for those that follow.
    """
    for position in group.positions:
        if position.needs_replacement and may_replace(group, demand):
            yield position.not_before, position.make_failure_replacement()
        elif (stuck := _straggler(position)) is not None and group.extra_count < demand.extra:
            since = _straggler_due_at(stuck, demand, durations)
            if since is not None:
                yield max(since, position.not_before), position.make_extra(stuck)


def _awaits_replacement(group: Group) -> bool:
    return any(position.needs_replacement or position.expected_replacement is not None for position in group.positions)


def _straggler(position: GroupPosition) -> Replica | None:
    """Return the rollout of a place that an extra replica might race: alone, and in a stage that samples no text."""
    live = position.live_replicas
    if len(live) != 1 or position.expected_replacement is not None or position.is_given_up or position.has_reward:
        return None
    return live[0] if live[0].stage in ("init", "eval") else None


def _straggler_due_at(replica: Replica, demand: Demand, durations: StageDurations) -> float | None:
    """Return the Unix seconds from which a rollout is stuck in its stage; ``None`` while the median is not known."""
    usual = durations.median(replica.environment, replica.stage)
    if usual is None:
        return None
    return replica.position.since + max(demand.straggler_seconds, demand.straggler_factor * usual)
