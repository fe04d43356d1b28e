"""A line that serves environments in fair shares of worker-seconds.

Of those that wait, the one goes next whose environment has used the least work over its weight. This is start-time fair
queueing (Goyal, Vin, Cheng 1996) for servers that cannot be interrupted, with a turn that work of unknown length asks
for: work in hand is charged with the mean length of its environment, and with what it has really taken as soon as that
is more, so that an environment of long work does not take every slot before its first piece has ended.

An environment with nothing waiting saves nothing up: when it comes back it stands where the one was that was served
last. What it used beyond its share stays used.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

_MOST = 256
"""Environments with an account of their own; names come from requests, and any further ones share one account."""

_OTHERS = ""

_MEMORY = 32
"""Pieces of work over which the mean length is taken."""

_LEAST = 1e-3
"""Seconds that any piece of work counts as: work that takes no time would be served for ever."""

ItemT = TypeVar("ItemT", bound=Hashable)


@dataclass(slots=True, eq=False)
class Charge:
    """A piece of work in hand, on the account of its environment. Ended exactly once."""

    account: "Account"
    spent: float = 0.0
    """Seconds that it took before it last stood still."""
    since: float | None = None
    """When it last went on, ``None`` while it stands still."""
    over: bool = False

    def go(self) -> None:
        """It runs from now on. Harmless when it does already."""
        if self.since is None and not self.over:
            self.since = self.account.clock()
            self.account.running += 1
            self.account.began += self.since

    def stand(self) -> None:
        """It stands still: what passes is no work. Harmless when it does already."""
        if self.since is not None:
            took = self.account.clock() - self.since
            self.account.running -= 1
            self.account.began -= self.since
            self.account.spent += took
            self.spent += took
            self.since = None

    def end(self, seconds: float | None = None) -> None:
        """It is over.

        Args:
            seconds: how much work it was, ``None``: as long as it ran.

        Raises:
            RuntimeError: it was over before.
        """
        self.drop()
        self.account.ended(max(_LEAST, self.spent if seconds is None else seconds))

    def drop(self) -> None:
        """It was never begun: nothing is charged for it.

        Raises:
            RuntimeError: it was over before.
        """
        if self.over:
            raise RuntimeError("a piece of work ended twice")
        self.stand()
        self.over = True
        self.account.spent -= self.spent
        self.account.in_hand -= 1


@dataclass(slots=True, eq=False)
class Account:
    """What an environment has used."""

    weight: float
    clock: Callable[[], float]
    settled: float = 0.0
    """Seconds of what is over."""
    mean: float | None = None
    """Seconds of its last pieces of work, on average."""
    finished: int = 0
    in_hand: int = 0
    running: int = 0
    """Pieces in hand that do not stand still."""
    began: float = 0.0
    """Sum of the times at which these last went on."""
    spent: float = 0.0
    """What pieces in hand took before they last stood still."""

    def used(self, typical: float) -> float:
        """Return worker-seconds over weight, work in hand included.

        Args:
            typical: seconds that a piece in hand is reckoned at.
        """
        taken = self.running * self.clock() - self.began + self.spent
        return (self.settled + max(taken, self.in_hand * typical)) / self.weight

    def begin(self) -> Charge:
        """Charge a piece of work that is handed out."""
        self.in_hand += 1
        return Charge(self)

    def ended(self, seconds: float) -> None:
        """Learn how long a piece of work was."""
        self.settled += seconds
        self.finished += 1
        before = seconds if self.mean is None else self.mean
        self.mean = before + (seconds - before) / min(self.finished, _MEMORY)


class FairLine(Generic[ItemT]):
    """Who waits, in one line per environment.

    Args:
        weights: by environment; 1 for those that are not named.
        clock: in seconds.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._weights = weights or {}
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._waiting: dict[str, OrderedDict[ItemT, None]] = {}
        self._reached = 0.0
        """What the environment had used that was served last, at its highest: where newcomers stand."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def push(self, environment: str, item: ItemT, *, first: bool = False) -> None:
        """Enqueue an item behind, or with ``first`` before, those of the same environment. At most once per item."""
        name = self._name(environment)
        if name not in self._waiting:
            self._catch_up(name)
            self._waiting[name] = OrderedDict()
        self._waiting[name][item] = None
        if first:
            self._waiting[name].move_to_end(item, last=False)

    def remove(self, environment: str, item: ItemT) -> None:
        """Take something out of the line; harmless when it does not stand there."""
        for name in (environment, _OTHERS):
            line = self._waiting.get(name)
            if line is not None and item in line:
                del line[item]
                if not line:
                    del self._waiting[name]

    def charge(self, environment: str) -> Charge:
        """Charge an environment for work that need not stand in this line: it is served at once."""
        name = self._name(environment)
        if name not in self._waiting:
            self._catch_up(name)
        account = self._accounts[name]
        self._reached = max(self._reached, self._used(account))
        return account.begin()

    def pop(self) -> tuple[ItemT, Charge]:
        """Take out who is next, and charge its environment.

        Raises:
            LookupError: nobody waits.
        """
        if not self._waiting:
            raise LookupError("nobody waits")
        used, _, name = min(map(self._standing, self._waiting))
        self._reached = max(self._reached, used)
        line = self._waiting[name]
        item, _ = line.popitem(last=False)
        if not line:
            del self._waiting[name]
        return item, self._accounts[name].begin()

    def used(self) -> dict[str, float]:
        """Return worker-seconds over weight by environment, as they are reckoned with."""
        return {name: self._used(account) for name, account in self._accounts.items()}

    def _standing(self, name: str) -> tuple[float, float, str]:
        """Return where it stands, the lowest first: before anything is known, who has the least in hand."""
        account = self._accounts[name]
        return self._used(account), account.in_hand / account.weight, name

    def _used(self, account: Account) -> float:
        return account.used(self._typical() if account.mean is None else account.mean)

    def _typical(self) -> float:
        """Return what a piece of work takes where its environment has not shown it: as elsewhere."""
        known = [account.mean for account in self._accounts.values() if account.mean is not None]
        return sum(known) / len(known) if known else 0.0

    def _name(self, environment: str) -> str:
        if environment not in self._accounts and len(self._accounts) >= _MOST:
            self._forget_idle()
        known = environment in self._accounts or len(self._accounts) < _MOST
        return environment if known else _OTHERS

    def _catch_up(self, name: str) -> None:
        """Put an environment that begins to wait where the one was that was served last; it is never put back."""
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(self._weights.get(name, 1.0), self._clock)
        # Work that turned out shorter than it was reckoned at leaves those that wait below what was reached.
        stand = min((self._used(self._accounts[other]) for other in self._waiting), default=self._reached)
        account.settled += max(0.0, min(stand, self._reached) - self._used(account)) * account.weight

    def _forget_idle(self) -> None:
        """Drop the accounts that say nothing: of who has no work here, and used no more than a newcomer."""
        used = self.used()
        for name, account in list(self._accounts.items()):
            if name not in self._waiting and not account.in_hand and used[name] <= self._reached:
                del self._accounts[name]
