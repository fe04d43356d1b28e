"""Which rollouts may use the engines, and how many: plain data, without a clock or an event loop.

Those may whose contexts fit into a budget. A rollout asks before each of its turns and is live from its first granted
turn on. When live rollouts outgrow the budget, the youngest wait at their next turn, and come back, oldest first,
before any new one; evaluation goes before training. The first in this order never waits, so something always moves.

The budget is a share of the engines' KV memory, found by AIMD. Additive increase, multiplicative decrease, as in TCP's
congestion control (Chiu and Jain 1989), finds a shared capacity that is not known. Beyond its capacity an engine with a
prefix cache does not refuse calls: it evicts what waiting rollouts have cached, computes it again at their next turn,
and preempts running calls. So the signals are preemptions, and prompt tokens that had been computed before and were
computed again.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from statistics import fmean

from prorl_gym.records import EngineLoad

_AVERAGING_ROLLOUTS = 64
"""Rollouts over which the mean length is taken."""

_MAX_STARTING = 8
"""Rollouts that begin at once before any is live."""


@dataclass(slots=True, eq=False)
class _Entry:
    session: str
    rank: tuple[int, int]
    """By falling priority, then by age: the lowest is first in and last out."""
    tokens: int
    """Length of its private context."""
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
        """Their sum."""

    @property
    def total(self) -> float:
        """The sum of ``expected - number`` over the numbers below it."""
        return self.expected * self._count - self._sum

    def add(self, number: int) -> None:
        insort(self._numbers, number)
        if number < self.expected:
            self._count += 1
            self._sum += number

    def remove(self, number: int) -> None:
        del self._numbers[bisect_left(self._numbers, number)]
        if number < self.expected:
            self._count -= 1
            self._sum -= number

    def expect(self, number: float) -> None:
        before, self._count = self._count, bisect_left(self._numbers, number)
        self._sum += sum(self._numbers[before : self._count]) - sum(self._numbers[self._count : before])
        self.expected = number


class AdmissionState:
    """Admits rollouts while what they fill fits into the budget.

    The budget is in tokens, or in rollouts when every request has ``tokens=1``. ``slack`` is how far live rollouts may
    outgrow it before the youngest have to wait.
    """

    def __init__(self, budget: float, *, slack: float = 0.05) -> None:
        self.budget = budget
        self.suspensions = 0
        self.used = 0
        """Tokens that the live ones fill, shared prompts counted once."""
        self._slack = slack
        self._entries: dict[str, _Entry] = {}
        self._live: list[_Entry] = []
        """By rank."""
        self.shortfall = ShortfallSum()
        """Shortfall of the live ones' contexts against the expected length."""
        self._queue: list[_Entry] = []
        """A heap by rank; removed entries leave it when they come to its top."""
        self._groups: dict[str, _Group] = {}
        self._parked_count = 0
        self._join_count = 0
        self._mean_length = 0.0
        self._finished_count = 0

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def expected_use(self) -> float:
        """Tokens that the live rollouts will fill; those that have only begun count with the expected length."""
        return self.used + self.shortfall.total

    @property
    def waiting(self) -> int:
        return len(self._entries) - len(self._live) - self._parked_count

    @property
    def tracked(self) -> int:
        """Rollouts and groups that are known."""
        return len(self._entries) + len(self._groups)

    def request_turn(self, session: str, tokens: int, *, priority: int = 0, group: str = "", shared: int = 0) -> bool:
        """Whether a rollout may make its next turn now; if not, ``admit`` returns it later.

        ``tokens`` is its private context, the coming turn's new messages included. A higher ``priority`` is admitted
        first, and never suspended for a lower one. Rollouts of one ``group`` share a prompt of ``shared`` tokens. The
        first request decides on priority and group.
        """
        entry = self._entries.get(session)
        if entry is None:
            self._join_count += 1
            entry = self._entries[session] = _Entry(session, (-priority, self._join_count), 0, group)
            if group:
                self._groups.setdefault(group, _Group(shared)).members += 1
            heapq.heappush(self._queue, entry)
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
                group = self._groups.get(entry.group)
                shared = group.tokens if group is not None and not group.live_members else 0
                cost = max(entry.tokens, self.shortfall.expected) + shared
                if self._live and self.expected_use + cost > self.budget:
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


@dataclass(frozen=True, slots=True)
class AimdOptions:
    """Shares are of an engine's KV capacity."""

    initial_share: float = 0.85
    min_share: float = 0.1
    max_share: float = 1.5
    """Above 1, since rollouts of a group share their prompts and not every estimate is too low."""
    increase: float = 0.02
    """Added after each update without a sign of overload while the share is used up."""
    decrease_factor: float = 0.85
    """Factor after an update with a sign of overload."""
    cooldown_seconds: float = 20.0
    """Time between two cuts: the effect of one shows when rollouts come to their next turns."""
    max_recomputed: float = 0.05
    """Share of reusable prompt tokens that, computed again, calls for a cut."""
    low_recomputed: float = 0.02
    """The same below which the share may grow."""
    memory: float = 0.9
    """Weight of what came before, at each look: few calls end between two of them."""
    full_usage: float = 0.95
    """Share of the cache that running calls hold on an engine beyond which nothing is added."""


class AimdShare:
    """A share for each engine, updated from its metrics; that of the fleet is their mean.

    One share for all would be cut whenever any engine is overloaded, and of many engines one always is.
    """

    def __init__(self, options: AimdOptions | None = None) -> None:
        self._options = options or AimdOptions()
        self.share = self._options.initial_share
        """Share of the fleet."""
        self.cuts = 0
        self._shares: dict[str, float] = {}
        self._cooldown_until: dict[str, float] = {}
        self._last_loads: dict[str, EngineLoad] = {}
        self._last_reusable = 0
        self._found = self._could = 0.0
        """Prompt tokens that were found, and that could have been, in the last looks."""

    def update_share(self, loads: Mapping[str, EngineLoad], reusable: int, *, is_used_up: bool, now: float) -> float:
        """Update the shares from the metrics of all engines, by name; return that of the fleet.

        ``reusable`` are prompt tokens sent to these engines so far, in all calls together, that had been part of an
        earlier call of the same rollout or group: what a large enough cache would have found. ``is_used_up``: rollouts
        wait for a larger share; otherwise none is raised. ``now`` is of any clock in seconds that does not go back.
        """
        recomputed = self._recomputed_share(loads, reusable)
        options, before = self._options, self._last_loads
        self._shares = {name: self._shares.get(name, self.share) for name in loads}
        self._cooldown_until = {name: self._cooldown_until.get(name, -inf) for name in loads}
        for name, load in loads.items():
            is_crowded = load.waiting > 0 and load.kv_usage > options.full_usage
            preempted = name in before and load.preemptions > before[name].preemptions
            if preempted or recomputed > options.max_recomputed:
                if now >= self._cooldown_until[name]:
                    self.cuts += 1
                    self._shares[name] = max(options.min_share, self._shares[name] * options.decrease_factor)
                    self._cooldown_until[name] = now + options.cooldown_seconds
            elif is_used_up and recomputed < options.low_recomputed and not is_crowded:
                self._shares[name] = min(options.max_share, self._shares[name] + options.increase)
        self._last_loads = dict(loads)
        self._last_reusable = reusable
        if loads:
            self.share = fmean(self._shares.values())
        return self.share

    def _recomputed_share(self, loads: Mapping[str, EngineLoad], reusable: int) -> float:
        """Return the share of what could have been found in the caches since the last look, and was not."""
        if loads.keys() != self._last_loads.keys():  # a new engine's counters do not cover the whole time
            return 0.0
        news = [(load, self._last_loads[name]) for name, load in loads.items()]
        found = sum(load.prefix_hits - before.prefix_hits for load, before in news)
        asked = sum(load.prefix_queries - before.prefix_queries for load, before in news)
        could = reusable - self._last_reusable
        # A restarted engine counts from zero; some engines have no such counters.
        if could < 0 or asked < 0 or found < 0:
            self._found = self._could = 0.0
            return 0.0
        keep = self._options.memory
        self._found, self._could = keep * self._found + found, keep * self._could + could
        return max(0.0, 1.0 - self._found / self._could) if self._could and asked else 0.0
