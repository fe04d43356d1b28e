"""Results of a run's groups: verdicts, ready groups, and what stopping the others cost and saved."""

from bisect import bisect_right, insort
from collections import Counter, deque
from dataclasses import dataclass

from prorl_gym.client.wire_models import GroupState, RolloutSummary
from prorl_gym.demand import Demand
from prorl_gym.rollout.groups.group import Group, is_extra, was_unneeded

_MAX_REMEMBERED = 100_000
"""Verdicts and ready groups kept in memory; older ones are derived again from the ledger when needed."""

_WINDOW = 128
"""Latest complete groups that estimate the informative share: it changes as the policy learns."""
_PRIOR_INFORMATIVE = 8
"""Informative groups added to the estimate as a prior: at first, every group counts as one."""


@dataclass(frozen=True, slots=True, order=True)
class SettledGroup:
    """A group that is judged for good."""

    cursor: int
    """Of the record that completed it."""
    group_id: str
    state: GroupState
    oldest_version: int | None


def is_too_old(oldest: int | None, version: int, demand: Demand) -> bool:
    """Whether a token of this version is further behind the current one than the demand allows."""
    bound = demand.max_staleness
    return bound is not None and oldest is not None and version - oldest > bound


class GroupResults:
    """Of one run."""

    def __init__(self) -> None:
        self.counts: Counter[GroupState] = Counter()
        self.replaced = 0
        self.extras = 0
        self.wasted_tokens = 0
        self.reclaimed_seconds = 0.0
        self._latest: deque[bool] = deque(maxlen=_WINDOW)
        self._settled: dict[str, SettledGroup] = {}
        self._ready: list[SettledGroup] = []
        self._fresh_key: tuple[int, int | None, int] | None = None
        self._fresh = 0

    def get(self, group_id: str) -> SettledGroup | None:
        """Return the verdict on a group, if it is judged and not too long ago."""
        return self._settled.get(group_id)

    def record_verdict(self, group: Group, state: GroupState, ends: list[RolloutSummary]) -> None:
        """Note a verdict."""
        cursor = max((end.cursor for end in ends), default=0)
        settled = SettledGroup(cursor, group.group_id, state, group.oldest_version())
        self.counts[state] += 1
        self._settled[group.group_id] = settled
        if state in ("ready", "uninformative"):
            self._latest.append(state == "ready")
        if state == "ready":
            self._fresh_key = None
            insort(self._ready, settled)
            del self._ready[:-_MAX_REMEMBERED]
        if len(self._settled) > _MAX_REMEMBERED:
            del self._settled[next(iter(self._settled))]

    def count_replacement(self, replacement: str) -> None:
        """Count a rollout that stands in for another one."""
        if is_extra(replacement):
            self.extras += 1
        else:
            self.replaced += 1

    def count_cancelled(self, member: RolloutSummary, saved_seconds: float) -> None:
        """Count what a rollout that was cut had cost and what stopping it saved."""
        if was_unneeded(member):
            self.wasted_tokens += member.sampled_tokens
            self.reclaimed_seconds += saved_seconds

    @property
    def informative_share(self) -> float:
        """Return the share of groups that are expected to be informative, rather too high than too low."""
        return (sum(self._latest) + _PRIOR_INFORMATIVE) / (len(self._latest) + _PRIOR_INFORMATIVE)

    def unused_ready(self, after: int) -> list[SettledGroup]:
        """Return the ready groups that were completed past a cursor, in that order."""
        return self._ready[bisect_right(self._ready, after, key=lambda settled: settled.cursor) :]

    def count_fresh(self, demand: Demand, version: int) -> int:
        """Count those that a trainer can still use."""
        asked = (demand.after, demand.max_staleness, version)
        if asked != self._fresh_key:  # called after every event, and changes rarely
            self._fresh_key = asked
            unused = self.unused_ready(demand.after)
            self._fresh = sum(not is_too_old(settled.oldest_version, version, demand) for settled in unused)
        return self._fresh
