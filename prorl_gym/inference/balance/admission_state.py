"""Which rollouts may use the engines: those whose contexts fit into a budget. Plain data: no clock, no event loop.

A rollout asks before each of its turns and is live from its first granted turn on. When live rollouts outgrow the
budget, the youngest wait at their next turn, and come back, oldest first, before any new one; evaluation goes before
training. The first in this order never waits, so something always moves.
"""

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass
from math import inf

_AVERAGING_ROLLOUTS = 64
"""Rollouts over which the mean length is taken."""

_MAX_STARTING = 8
"""Rollouts that begin at once before any is live."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A rollout that is live, waits, or is parked."""

    session: str
    rank: tuple[int, int]
    """By falling priority, then by age: the lowest is first in and last out."""
    tokens: int
    """Its private context."""
    group: str
    is_live: bool = False
    is_parked: bool = False
    is_removed: bool = False

    def __lt__(self, other: "_Entry") -> bool:
        return self.rank < other.rank


@dataclass(slots=True)
class _Group:
    """A prompt that rollouts share: it fills the cache once, while any of them is live."""

    tokens: int
    members: int = 0
    live_members: int = 0


class ShortfallSum:
    """By how much numbers fall short of an expected one, in all; kept up to date as they and it change.

    A change moves part of a sorted list of integers, which takes microseconds with ten thousand of them.
    """

    def __init__(self) -> None:
        self.expected = 0.0
        self._numbers: list[int] = []
        """Sorted."""
        self._count = 0
        """Numbers below the expected one."""
        self._sum = 0
        """Of these."""

    @property
    def total(self) -> float:
        """The sum of ``expected - number`` over the numbers below it."""
        return self.expected * self._count - self._sum

    def add(self, number: int) -> None:
        """Add a number."""
        insort(self._numbers, number)
        if number < self.expected:
            self._count += 1
            self._sum += number

    def remove(self, number: int) -> None:
        """Remove a number that was added."""
        del self._numbers[bisect_left(self._numbers, number)]
        if number < self.expected:
            self._count -= 1
            self._sum -= number

    def expect(self, number: float) -> None:
        """Set the expected number."""
        before, self._count = self._count, bisect_left(self._numbers, number)
        self._sum += sum(self._numbers[before : self._count]) - sum(self._numbers[self._count : before])
        self.expected = number


class AdmissionState:
    """Admits rollouts while what they fill fits into the budget; see the module.

    Args:
        budget: in tokens, or in rollouts when every request has ``tokens=1``.
        slack: how far live rollouts may outgrow the budget before the youngest have to wait.
    """

    def __init__(self, budget: float, *, slack: float = 0.05) -> None:
        self.budget = budget
        self.suspensions = 0
        """Times that a live rollout had to wait."""
        self.used = 0
        """What the live ones fill, shared prompts counted once."""
        self._slack = slack
        self._entries: dict[str, _Entry] = {}
        self._live: list[_Entry] = []
        """By rank."""
        self.shortfall = ShortfallSum()
        """Of the live ones' contexts against the expected length."""
        self._queue: list[_Entry] = []
        """A heap by rank; removed entries leave it when they come to its top."""
        self._groups: dict[str, _Group] = {}
        self._parked_count = 0
        self._join_count = 0
        self._mean_length = 0.0
        self._finished_count = 0

    @property
    def live(self) -> int:
        """Rollouts that may use the engines."""
        return len(self._live)

    @property
    def expected_use(self) -> float:
        """What the live rollouts will fill; those that have only begun count with the expected length."""
        return self.used + self.shortfall.total

    @property
    def waiting(self) -> int:
        """Rollouts that may not, yet."""
        return len(self._entries) - len(self._live) - self._parked_count

    @property
    def tracked(self) -> int:
        """Rollouts and groups that are known."""
        return len(self._entries) + len(self._groups)

    def request_turn(self, session: str, tokens: int, *, priority: int = 0, group: str = "", shared: int = 0) -> bool:
        """Whether a rollout may make its next turn now; if not, ``admit`` returns it later.

        Args:
            session: the rollout.
            tokens: its private context, the coming turn's new messages included.
            priority: higher is admitted first, and never suspended for a lower one. The first request decides.
            group: rollouts of one group share a prompt. The first request decides.
            shared: length of that prompt.
        """
        entry = self._entries.get(session)
        if entry is None:
            entry = self._add_session(session, priority, group, shared)
        elif entry.is_parked:
            self._unpark(entry)
            heapq.heappush(self._queue, entry)
        if not entry.is_live:
            entry.tokens = tokens
            return False
        self.used += tokens - entry.tokens
        self.shortfall.remove(entry.tokens)
        self.shortfall.add(tokens)
        entry.tokens = tokens
        if not self._must_wait(entry):
            return True
        self.suspensions += 1
        self._suspend(entry)
        heapq.heappush(self._queue, entry)
        return False

    def admit(self) -> list[str]:
        """Make rollouts live while they fit, at least one in any case; return them. Call it after any change."""
        admitted: list[str] = []
        while self._queue:
            entry = self._queue[0]
            if not entry.is_removed:
                if self._live and self.expected_use + self._cost(entry) > self.budget:
                    break
                self._make_live(entry)
                admitted.append(entry.session)
            heapq.heappop(self._queue)
        return admitted

    def has_room(self, arriving: int) -> bool:
        """Whether one more rollout may begin, in addition to so many that are about to.

        One always may while none waits: a waiting rollout is the sign that demand exceeds the budget. The number that
        begins at once doubles at most, since it is not known what they will fill.
        """
        if self.waiting:
            return False
        if not arriving or self.budget == inf:
            return True
        typical = max(1.0, self.shortfall.expected, self.used / max(1, self.live))
        return arriving < max(_MAX_STARTING, self.live) and self.expected_use + (arriving + 1) * typical <= self.budget

    def release_slot(self, session: str) -> None:
        """Free the slot of a rollout that makes no turn for a while; it keeps its rank. Ignored if it is not live."""
        entry = self._entries.get(session)
        if entry is not None and entry.is_live:
            self._suspend(entry)
            entry.is_parked = True
            self._parked_count += 1

    def remove_session(self, session: str) -> None:
        """Remove a rollout that is over or no longer waits. Unknown ones are ignored."""
        entry = self._entries.pop(session, None)
        if entry is None:
            return
        entry.is_removed = True
        if entry.is_parked:
            self._unpark(entry)
        elif entry.is_live:
            self._suspend(entry)
            self._finished_count += 1
            self._mean_length += (entry.tokens - self._mean_length) / min(self._finished_count, _AVERAGING_ROLLOUTS)
            # On average over its life, a rollout fills half of its end.
            self.shortfall.expect(self._mean_length / 2)
        if entry.group:
            group = self._groups[entry.group]
            group.members -= 1
            if not group.members:
                del self._groups[entry.group]

    def _add_session(self, session: str, priority: int, group: str, shared: int) -> _Entry:
        self._join_count += 1
        entry = self._entries[session] = _Entry(session, (-priority, self._join_count), 0, group)
        if group:
            self._groups.setdefault(group, _Group(shared)).members += 1
        heapq.heappush(self._queue, entry)
        return entry

    def _unpark(self, entry: _Entry) -> None:
        entry.is_parked = False
        self._parked_count -= 1

    def _make_live(self, entry: _Entry) -> None:
        entry.is_live = True
        insort(self._live, entry)
        self.shortfall.add(entry.tokens)
        self.used += entry.tokens
        if entry.group:
            group = self._groups[entry.group]
            self.used += 0 if group.live_members else group.tokens
            group.live_members += 1

    def _suspend(self, entry: _Entry) -> None:
        entry.is_live = False
        del self._live[bisect_left(self._live, entry)]
        self.shortfall.remove(entry.tokens)
        self.used -= entry.tokens
        if entry.group:
            group = self._groups[entry.group]
            group.live_members -= 1
            self.used -= 0 if group.live_members else group.tokens

    def _must_wait(self, entry: _Entry) -> bool:
        """Whether it is among the lowest in rank that have to wait until the rest fits."""
        excess = self.used - self.budget * (1 + self._slack)
        for position in range(len(self._live) - 1, 0, -1):  # the first never waits
            if excess <= 0:
                return False
            other = self._live[position]
            if other is entry:
                return True
            excess -= other.tokens
        return False

    def _cost(self, entry: _Entry) -> float:
        group = self._groups.get(entry.group)
        shared = group.tokens if group is not None and not group.live_members else 0
        return max(entry.tokens, self.shortfall.expected) + shared
