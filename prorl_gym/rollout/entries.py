"""What the service keeps in memory of the rollouts that have no terminal record yet: ids, not bodies."""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prorl_gym.errors import CancelReason
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.protocol import Pending

State = Literal["queued", "handing", "running", "waiting", "ending"]
"""``handing``: offered to the runner; ``waiting``: for the pause before another attempt; ``ending``: being written."""


@dataclass(slots=True, eq=False)
class Entry:
    """One rollout that is owed an answer."""

    rollout_id: str
    run_id: str
    group_id: str | None
    evaluation: bool
    failures: int = 0
    restarts: int = 0
    cancel: CancelReason | None = None
    state: State = "queued"
    handing: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    waiters: list[asyncio.Future[Rollout | None]] = field(default_factory=list[asyncio.Future[Rollout | None]])

    @classmethod
    def of(cls, source: RolloutRequest | Pending) -> "Entry":
        """Return the entry of a fresh request, or of one that the ledger remembers."""
        entry = cls(source.rollout_id, source.run_id, source.group_id, source.evaluation)
        if isinstance(source, Pending):
            entry.failures, entry.restarts, entry.cancel = source.failures, source.restarts, source.cancel
        return entry

    def answer(self, rollout: Rollout | None) -> None:
        """Tell everybody who waits; ``None``: this service will not know."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(rollout)
        self.waiters.clear()

    def fail(self, error: Exception) -> None:
        """Tell everybody who waits that there will be no record, and why."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(error)
        self.waiters.clear()


class Entries:
    """All of them, and the line of those that are ready to be handed to the runner."""

    def __init__(self) -> None:
        self._all: dict[str, Entry] = {}
        self._urgent: deque[Entry] = deque()
        self._line: deque[Entry] = deque()
        self.ready = asyncio.Event()
        """Set while somebody stands in line."""

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, rollout_id: str) -> bool:
        return rollout_id in self._all

    def get(self, rollout_id: str) -> Entry | None:
        """Return the entry, if this rollout is pending here."""
        return self._all.get(rollout_id)

    def count(self) -> dict[State, int]:
        """Return how many are in each state."""
        counts: dict[State, int] = {"queued": 0, "handing": 0, "running": 0, "waiting": 0, "ending": 0}
        for entry in self._all.values():
            counts[entry.state] += 1
        return counts

    def add(self, entry: Entry) -> None:
        """Remember a rollout."""
        self._all[entry.rollout_id] = entry

    def remove(self, entry: Entry) -> None:
        """Forget a rollout: its record is written. Harmless when it is forgotten already."""
        self._all.pop(entry.rollout_id, None)

    def line_up(self, entry: Entry) -> None:
        """Put it into the line; evaluation has a line of its own, which is served first."""
        entry.state = "queued"
        (self._urgent if entry.evaluation else self._line).append(entry)
        self.ready.set()

    def next(self, count: int) -> list[Entry]:
        """Take up to ``count`` out of the line."""
        taken: list[Entry] = []
        while len(taken) < count and (line := self._urgent or self._line):
            entry = line.popleft()
            if entry.state == "queued":  # a cancelled one may still stand there
                entry.state = "handing"
                taken.append(entry)
        if not self._urgent and not self._line:
            self.ready.clear()
        return taken

    def select(self, ids: Sequence[str], groups: Iterable[str], runs: Iterable[str]) -> list[Entry]:
        """Return those that are named by id, by group or by run."""
        wanted_groups, wanted_runs = set(groups), set(runs)
        chosen = {rollout_id: self._all[rollout_id] for rollout_id in ids if rollout_id in self._all}
        if wanted_groups or wanted_runs:
            for entry in self._all.values():
                if entry.group_id in wanted_groups or entry.run_id in wanted_runs:
                    chosen[entry.rollout_id] = entry
        return list(chosen.values())

    def all(self) -> list[Entry]:
        """Return every entry."""
        return list(self._all.values())
