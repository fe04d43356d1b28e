"""What the service keeps in memory of the rollouts that have no terminal record yet: ids, not bodies."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prorl_gym.errors import CancelReason
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.fair import Charge, FairLine
from prorl_gym.rollout.protocol import Job, Pending

State = Literal["queued", "handing", "running", "waiting", "ending"]
"""``handing``: offered to the runner; ``waiting``: for the pause before another attempt; ``ending``: being written."""


@dataclass(slots=True, eq=False)
class Entry:
    """One rollout that is owed an answer."""

    rollout_id: str
    run_id: str
    group_id: str | None
    environment: str
    evaluation: bool
    failures: int = 0
    restarts: int = 0
    stand_in: bool = False
    """It replaces a member of its group that failed."""
    cancel: CancelReason | None = None
    state: State = "queued"
    attempt: int = 0
    """Number of the attempt that began last: no other one ends the rollout."""
    held: bool = False
    """No attempt at it begins until it is allowed."""
    begun: Job | None = None
    """Its first attempt, which began when it was accepted, until it is handed over."""
    charge: Charge | None = None
    """What its attempt in hand is reckoned at."""
    handing: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    waiters: list[asyncio.Future[Rollout | None]] = field(default_factory=list[asyncio.Future[Rollout | None]])

    @classmethod
    def of(cls, source: RolloutRequest | Pending) -> "Entry":
        """Return the entry of a fresh request, or of one that the ledger remembers."""
        entry = cls(source.rollout_id, source.run_id, source.group_id, source.environment, source.evaluation)
        entry.stand_in = source.stands_in_for is not None
        if isinstance(source, Pending):
            entry.failures, entry.restarts, entry.cancel = source.failures, source.restarts, source.cancel
        return entry

    @property
    def is_late(self) -> bool:
        """Whether others of its group have come further: an earlier attempt, or the member it replaces, failed."""
        return self.stand_in or self.failures > 0 or self.restarts > 0

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
    """All of them, and the line of those that are ready to be handed to the runner.

    Args:
        shares: weights of environments, which are handed out in fair shares of worker-seconds. See ``fair``.
    """

    def __init__(self, shares: Mapping[str, float] | None = None) -> None:
        self._all: dict[str, Entry] = {}
        self._urgent: FairLine[Entry] = FairLine(shares)
        self._line: FairLine[Entry] = FairLine(shares)
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
        self.leave_line(entry)

    def line_up(self, entry: Entry) -> None:
        """Put it into the line, unless it is held; evaluation has a line of its own, which is served first.

        Replacements and further attempts go before what has not begun: their groups wait for them alone, and a trainer
        that gets a group without one of its members learns from a baseline with a hole.
        """
        entry.state = "queued"
        if not entry.held:
            self._line_of(entry).push(entry.environment, entry, first=entry.is_late)
            self.ready.set()

    def hold(self, entry: Entry) -> None:
        """Let it stand outside the line until it is allowed. An attempt that is in hand goes on."""
        entry.held = True
        self.leave_line(entry)

    def allow(self, entry: Entry) -> None:
        """End the hold: it stands in line again, if that is where it would be. Harmless when it is not held."""
        if entry.held:
            entry.held = False
            if entry.state == "queued" and entry.rollout_id in self._all:
                self.line_up(entry)

    def leave_line(self, entry: Entry) -> None:
        """Take it out of the line; harmless when it does not stand there."""
        self._line_of(entry).remove(entry.environment, entry)
        self._look()

    def next(self, count: int) -> list[Entry]:
        """Take up to ``count`` out of the line."""
        taken: list[Entry] = []
        while len(taken) < count and (line := self._urgent or self._line):
            entry, charge = line.pop()
            entry.charge = charge
            entry.state = "handing"
            taken.append(entry)
        self._look()
        return taken

    def began(self, rollout_id: str) -> None:
        """Its attempt begins, or goes on, to be work."""
        entry = self._all.get(rollout_id)
        if entry is not None and entry.charge is not None:
            entry.charge.go()

    def stands(self, rollout_id: str) -> None:
        """Its attempt is parked: what passes now is no work."""
        entry = self._all.get(rollout_id)
        if entry is not None and entry.charge is not None:
            entry.charge.stand()

    def worked(self, entry: Entry, seconds: float) -> None:
        """Its attempt is over and was so much work, in seconds; 0: it never began. Harmless when none is in hand."""
        charge, entry.charge = entry.charge, None
        if charge is not None:
            charge.end(seconds) if seconds else charge.drop()

    def select(self, ids: Sequence[str], groups: Iterable[str], runs: Iterable[str]) -> list[Entry]:
        """Return those that are named by id, by group or by run; both together mean these groups of these runs."""
        wanted_groups, wanted_runs = set(groups), set(runs)
        chosen = {rollout_id: self._all[rollout_id] for rollout_id in ids if rollout_id in self._all}
        if wanted_groups or wanted_runs:
            for entry in self._all.values():
                in_group = not wanted_groups or entry.group_id in wanted_groups
                if in_group and (not wanted_runs or entry.run_id in wanted_runs):
                    chosen[entry.rollout_id] = entry
        return list(chosen.values())

    def all(self) -> list[Entry]:
        """Return every entry."""
        return list(self._all.values())

    def _line_of(self, entry: Entry) -> FairLine[Entry]:
        return self._urgent if entry.evaluation else self._line

    def _look(self) -> None:
        if not self._urgent and not self._line:
            self.ready.clear()
