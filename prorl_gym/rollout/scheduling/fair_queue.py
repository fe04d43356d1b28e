"""A queue that serves environments in fair shares of worker-seconds.

The next item is of the environment that has used the least work over its weight. This is start-time fair queueing
(Goyal, Vin, Cheng 1996) for servers that cannot be interrupted, adapted to work of unknown length: running work is
charged with the mean length of its environment, and with what it has really taken as soon as that is more, so that an
environment of long work does not take every slot before its first piece has ended.

An environment with nothing waiting saves nothing up: it comes back at the virtual time of the environment that was
served last. What it used beyond its share stays used.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

_MAX_ACCOUNTS = 256
"""Environments with an account of their own; names come from requests, and any further ones share one account."""

_SHARED_ACCOUNT = ""

_MEAN_WINDOW = 32
"""Pieces of work over which the mean length is taken."""

_MIN_SECONDS = 1e-3
"""Seconds that any piece of work counts as: work that takes no time would be served for ever."""

ItemT = TypeVar("ItemT", bound=Hashable)


@dataclass(slots=True, eq=False)
class Charge:
    """A running piece of work, on the account of its environment. Ended exactly once."""

    account: "Account"
    elapsed: float = 0.0
    """Seconds that it took before the last pause."""
    running_since: float | None = None
    """When it was last resumed, ``None`` while it is paused."""
    is_over: bool = False

    def resume(self) -> None:
        """Count time from now on. Idempotent."""
        if self.running_since is None and not self.is_over:
            self.running_since = self.account.clock()
            self.account.running_charges += 1
            self.account.start_time_sum += self.running_since

    def pause(self) -> None:
        """Stop counting time. Idempotent."""
        if self.running_since is not None:
            took = self.account.clock() - self.running_since
            self.account.running_charges -= 1
            self.account.start_time_sum -= self.running_since
            self.account.elapsed += took
            self.elapsed += took
            self.running_since = None

    def end(self, seconds: float | None = None) -> None:
        """End the work and settle its charge: ``seconds`` of work, by default as long as it ran. Only once."""
        self.cancel()
        seconds = max(_MIN_SECONDS, self.elapsed if seconds is None else seconds)
        account = self.account
        account.settled_seconds += seconds
        account.finished += 1
        before = seconds if account.mean_seconds is None else account.mean_seconds
        account.mean_seconds = before + (seconds - before) / min(account.finished, _MEAN_WINDOW)

    def cancel(self) -> None:
        """End work that never began: nothing is charged for it. Only once."""
        if self.is_over:
            raise RuntimeError("a piece of work ended twice")
        self.pause()
        self.is_over = True
        self.account.elapsed -= self.elapsed
        self.account.open_charges -= 1


@dataclass(slots=True, eq=False)
class Account:
    """Worker-seconds that an environment has used."""

    weight: float
    clock: Callable[[], float]
    settled_seconds: float = 0.0
    """Seconds of work that has ended."""
    mean_seconds: float | None = None
    """Seconds of its last pieces of work, on average."""
    finished: int = 0
    open_charges: int = 0
    running_charges: int = 0
    """Running pieces that are not paused."""
    start_time_sum: float = 0.0
    """Sum of the times at which these were last resumed."""
    elapsed: float = 0.0
    """Seconds that running pieces took before their last pause."""

    def used(self, expected_seconds: float) -> float:
        """Return worker-seconds over weight, with at least ``expected_seconds`` for each running piece."""
        taken = self.running_charges * self.clock() - self.start_time_sum + self.elapsed
        return (self.settled_seconds + max(taken, self.open_charges * expected_seconds)) / self.weight

    def open_charge(self) -> Charge:
        self.open_charges += 1
        return Charge(self)


class FairQueue(Generic[ItemT]):
    """Waiting items, in one queue for each environment; ``weights`` are 1 for those that are not named."""

    def __init__(self, weights: Mapping[str, float] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._weights = weights or {}
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._waiting: dict[str, OrderedDict[ItemT, None]] = {}
        self._virtual_time = 0.0
        """The highest use of an environment when it was served: where newcomers begin."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def push(self, environment: str, item: ItemT, *, at_front: bool = False) -> None:
        """Enqueue an item behind, or with ``at_front`` before, those of the same environment. At most once per item."""
        name = self._account_name(environment)
        if name not in self._waiting:
            self._advance_account(name)
            self._waiting[name] = OrderedDict()
        self._waiting[name][item] = None
        if at_front:
            self._waiting[name].move_to_end(item, last=False)

    def remove(self, environment: str, item: ItemT) -> None:
        """Dequeue an item. Harmless when it is not in the queue."""
        for name in (environment, _SHARED_ACCOUNT):
            queue = self._waiting.get(name)
            if queue is not None and item in queue:
                del queue[item]
                if not queue:
                    del self._waiting[name]

    def charge_immediately(self, environment: str) -> Charge:
        """Charge an environment for work that is served at once, without this queue."""
        name = self._account_name(environment)
        if name not in self._waiting:
            self._advance_account(name)
        account = self._accounts[name]
        self._virtual_time = max(self._virtual_time, self._used(account))
        return account.open_charge()

    def pop(self) -> tuple[ItemT, Charge]:
        """Dequeue the next item, and charge its environment. Raises ``LookupError``: the queue is empty."""
        if not self._waiting:
            raise LookupError("the queue is empty")
        # Before any use is known, the environment with the least running work goes first.
        waiting = [(name, self._accounts[name]) for name in self._waiting]
        used, _, name = min((self._used(one), one.open_charges / one.weight, name) for name, one in waiting)
        self._virtual_time = max(self._virtual_time, used)
        queue = self._waiting[name]
        item, _ = queue.popitem(last=False)
        if not queue:
            del self._waiting[name]
        return item, self._accounts[name].open_charge()

    def usage_by_environment(self) -> dict[str, float]:
        """Return worker-seconds over weight by environment, running work included."""
        return {name: self._used(account) for name, account in self._accounts.items()}

    def _used(self, account: Account) -> float:
        if account.mean_seconds is not None:
            return account.used(account.mean_seconds)
        # It has finished none: the mean over all environments.
        known = [each.mean_seconds for each in self._accounts.values() if each.mean_seconds is not None]
        return account.used(sum(known) / len(known) if known else 0.0)

    def _account_name(self, environment: str) -> str:
        if environment not in self._accounts and len(self._accounts) >= _MAX_ACCOUNTS:
            # Accounts without work here that used no more than a newcomer.
            used = self.usage_by_environment()
            for name, account in list(self._accounts.items()):
                if name not in self._waiting and not account.open_charges and used[name] <= self._virtual_time:
                    del self._accounts[name]
        known = environment in self._accounts or len(self._accounts) < _MAX_ACCOUNTS
        return environment if known else _SHARED_ACCOUNT

    def _advance_account(self, name: str) -> None:
        """Advance an environment that begins to wait to the virtual time; it never goes back."""
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(self._weights.get(name, 1.0), self._clock)
        # Work that was shorter than its charge leaves waiting environments below the virtual time.
        stand = min((self._used(self._accounts[other]) for other in self._waiting), default=self._virtual_time)
        account.settled_seconds += max(0.0, min(stand, self._virtual_time) - self._used(account)) * account.weight
