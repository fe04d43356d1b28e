"""What groups came to: verdicts, what is ready for the trainer, and what stopping the others cost and saved."""

from bisect import bisect_right, insort
from collections import Counter, deque
from dataclasses import dataclass

from prorl_gym.demand import Demand
from prorl_gym.rollout.groups.group import Group, State
from prorl_gym.rollout.groups.replica import is_extra, was_cut
from prorl_gym.rollout.protocol import Member

_MOST = 100_000
"""Verdicts and ready groups that are remembered; older ones are judged again from the ledger when asked for."""

_WINDOW = 128
"""Latest complete groups by which it is reckoned how many will be informative: that changes as the policy learns."""
_CAUTION = 8
"""Informative groups that are reckoned with besides: before anything is known, every group counts as one."""


@dataclass(frozen=True, slots=True, order=True)
class Settled:
    """A group that is judged for good."""

    cursor: int
    """Of the record that completed it."""
    group_id: str
    state: State
    oldest_version: int | None


def too_old(oldest: int | None, version: int, demand: Demand) -> bool:
    """Whether a token of this version is further behind the current one than the demand allows."""
    bound = demand.max_staleness
    return bound is not None and oldest is not None and version - oldest > bound


class Results:
    """Of one run."""

    def __init__(self) -> None:
        self.counts: Counter[State] = Counter()
        self.replaced = 0
        self.extras = 0
        self.wasted_tokens = 0
        self.reclaimed_seconds = 0.0
        self.early_stopped = 0
        self.audited = 0
        self.audited_informative = 0
        self._latest: deque[bool] = deque(maxlen=_WINDOW)
        self._settled: dict[str, Settled] = {}
        self._ready: list[Settled] = []
        self._asked: tuple[int, int | None, int] | None = None
        self._fresh = 0

    def get(self, group_id: str) -> Settled | None:
        """Return the verdict on a group, if it is judged and not too long ago."""
        return self._settled.get(group_id)

    def settle(self, group: Group, state: State, ends: list[Member]) -> None:
        """Note a verdict."""
        cursor = max((end.cursor for end in ends), default=0)
        settled = Settled(cursor, group.group_id, state, group.oldest_version())
        self.counts[state] += 1
        self._settled[group.group_id] = settled
        if state in ("ready", "uninformative"):
            self._latest.append(state == "ready")
        if state == "ready":
            self._asked = None
            insort(self._ready, settled)
            del self._ready[:-_MOST]
        if len(self._settled) > _MOST:
            del self._settled[next(iter(self._settled))]
        if group.foretold:
            complete = state in ("ready", "uninformative")
            self.audited += group.audited and complete
            self.audited_informative += group.audited and state == "ready"
            self.early_stopped += not group.audited and state == "redundant"

    def made(self, stand_in: str) -> None:
        """Count a rollout that stands in for another one."""
        if is_extra(stand_in):
            self.extras += 1
        else:
            self.replaced += 1

    def ended(self, member: Member, saved_seconds: float) -> None:
        """Count what a rollout that was cut had cost and what stopping it saved."""
        if was_cut(member):
            self.wasted_tokens += member.sampled_tokens
            self.reclaimed_seconds += saved_seconds

    @property
    def promise(self) -> float:
        """Return the share of groups that are expected to be informative, rather too high than too low."""
        return (sum(self._latest) + _CAUTION) / (len(self._latest) + _CAUTION)

    def unused(self, after: int) -> list[Settled]:
        """Return the ready groups that were completed past a cursor, in that order."""
        return self._ready[bisect_right(self._ready, after, key=lambda settled: settled.cursor) :]

    def fresh(self, demand: Demand, version: int) -> int:
        """Count those that a trainer can still use."""
        asked = (demand.after, demand.max_staleness, version)
        if asked != self._asked:  # it is asked after every event, and changes rarely
            self._asked = asked
            unused = self.unused(demand.after)
            self._fresh = sum(not too_old(settled.oldest_version, version, demand) for settled in unused)
        return self._fresh
