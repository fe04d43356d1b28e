"""Rollouts without a terminal record, by id, and the queue of those that are ready for the runner.

Memory holds ids and progress; the bodies stay in the ledger.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from prorl_gym.client.wire_models import PendingPlace
from prorl_gym.errors import CancelReason
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.protocol import AttemptMoved, AttemptPosition, Job, RecoveredRollout, StageEntered
from prorl_gym.rollout.scheduling.fair_queue import Charge, FairQueue

_IDENTITY = attrgetter("rollout_id", "run_id", "group_id", "group_size", "environment", "evaluation", "stands_in_for")
"""Returns the first fields of a ``PendingRollout``."""

_RUNNING_PLACES = frozenset({"init", "run", "eval", "record"})


@dataclass(slots=True, eq=False)
class PendingRollout:
    """One accepted rollout without a terminal record."""

    rollout_id: str
    run_id: str
    group_id: str | None
    group_size: int
    environment: str
    evaluation: bool
    stands_in_for: str | None
    """Id of the member of its group that it replaces."""
    failures: int = 0
    restarts: int = 0
    cancel_reason: CancelReason | None = None
    position: AttemptPosition = field(default_factory=AttemptPosition)
    is_held: bool = False
    """Its next attempt does not begin before ``PendingIndex.release``."""
    begun_job: Job | None = None
    """Its first attempt, if that began when it was accepted, until the runner has it."""
    charge: Charge | None = None
    """Fair-share cost of the running attempt."""
    accept_task: asyncio.Task[None] | None = None
    retry_timer: asyncio.TimerHandle | None = None
    waiter: asyncio.Future[Rollout | None] | None = None
    """Shared by all calls of ``RolloutService.result``; the first makes it."""

    @classmethod
    def from_source(cls, source: RolloutRequest | RecoveredRollout) -> "PendingRollout":
        entry = cls(*_IDENTITY(source))
        if isinstance(source, RecoveredRollout):
            entry.failures, entry.restarts, entry.cancel_reason = source.failures, source.restarts, source.cancel_reason
        return entry

    @property
    def place(self) -> PendingPlace:
        match self.position.state:
            case "queued":
                return "held" if self.is_held else "queue"
            case "waiting":
                return "retry"
            case "ending":
                return "record"
            case "handing":
                return "slot"
            case "running":
                stage = self.position.stage
                return "parked" if self.position.is_parked else "slot" if stage == "queue" else stage

    def resolve_waiters(self, rollout: Rollout | None) -> None:
        """Answer every ``RolloutService.result``; ``None``: there is no record yet, and this service stops."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(rollout)

    def fail_waiters(self, error: Exception) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_exception(error)
            self.waiter.exception()  # marks it as retrieved, for callers that are gone


class PendingIndex:
    """All pending rollouts, and the dispatch queue. For ``weights`` see ``FairQueue``."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.by_id: dict[str, PendingRollout] = {}
        self._evaluation_queue: FairQueue[PendingRollout] = FairQueue(weights)
        self._training_queue: FairQueue[PendingRollout] = FairQueue(weights)
        self.queue_not_empty = asyncio.Event()
        """Set while the queue is not empty."""
        self.reserved = 0
        """Job slots of the runner for first attempts that begin when their rollout is accepted, until it has them."""

    def select(self, ids: Sequence[str], groups: Iterable[str], runs: Iterable[str]) -> list[PendingRollout]:
        """Return the entries named by id, by group or by run; groups and runs together: these groups of these runs."""
        wanted_groups, wanted_runs = set(groups), set(runs)
        chosen = {rollout_id: self.by_id[rollout_id] for rollout_id in ids if rollout_id in self.by_id}
        if wanted_groups or wanted_runs:
            for entry in self.by_id.values():
                in_group = not wanted_groups or entry.group_id in wanted_groups
                if in_group and (not wanted_runs or entry.run_id in wanted_runs):
                    chosen[entry.rollout_id] = entry
        return list(chosen.values())

    def running_ids(self) -> list[str]:
        """Return those whose attempt has entered INIT and is not parked."""
        return [entry.rollout_id for entry in self.by_id.values() if entry.place in _RUNNING_PLACES]

    def remove(self, entry: PendingRollout) -> None:
        """Idempotent."""
        self.by_id.pop(entry.rollout_id, None)
        self.remove_from_queue(entry)

    # --- the queue ----------------------------------------------------------------------------------------------

    def enqueue(self, entry: PendingRollout) -> None:
        """Enqueue it, unless it is held. Evaluation has a queue of its own, which is served first.

        Replacements and further attempts go before what has not begun: their groups wait for them alone, and a trainer
        that gets a group without one of its members learns from a baseline with a hole.
        """
        entry.position.state = "queued"
        if not entry.is_held:
            has_priority = entry.stands_in_for is not None or entry.failures > 0 or entry.restarts > 0
            self._queue_of(entry).push(entry.environment, entry, at_front=has_priority)
            self.queue_not_empty.set()

    def hold(self, entry: PendingRollout) -> None:
        """Keep it out of the queue until ``release``. A running attempt goes on."""
        entry.is_held = True
        self.remove_from_queue(entry)

    def release(self, entry: PendingRollout) -> None:
        """End the hold; enqueue it if it is ready. Idempotent."""
        if entry.is_held:
            entry.is_held = False
            if entry.position.state == "queued" and entry.rollout_id in self.by_id:
                self.enqueue(entry)

    def remove_from_queue(self, entry: PendingRollout) -> None:
        """Harmless when it is not in the queue."""
        self._queue_of(entry).remove(entry.environment, entry)
        self._update_queue_event()

    def dequeue(self, count: int) -> list[PendingRollout]:
        """Dequeue up to ``count`` rollouts, and charge their environments."""
        taken: list[PendingRollout] = []
        while len(taken) < count and (queue := self._evaluation_queue or self._training_queue):
            entry, charge = queue.pop()
            entry.charge = charge
            entry.position.state = "handing"
            taken.append(entry)
        self._update_queue_event()
        return taken

    def pop_begun_job(self, entry: PendingRollout) -> Job | None:
        """Return the attempt that began when the rollout was accepted, once, and free its reservation."""
        begun, entry.begun_job = entry.begun_job, None
        self.reserved -= begun is not None
        return begun

    # --- its attempt --------------------------------------------------------------------------------------------

    def move(self, entry: PendingRollout, event: AttemptMoved) -> None:
        """Update the position after a report of the runner. The environment is charged for work, not for waiting."""
        if isinstance(event, StageEntered):
            entry.position.enter_stage(event.stage, event.at)
            working = event.stage != "queue"
        else:
            entry.position.is_parked = event.is_parked
            working = not event.is_parked
            if event.is_parked and entry.charge is not None:
                entry.charge.pause()
        if working and entry.charge is not None:
            entry.charge.resume()

    def settle_charge(self, entry: PendingRollout, seconds: float) -> None:
        """End the charge of an attempt that worked so many seconds; 0: it never began. Idempotent."""
        charge, entry.charge = entry.charge, None
        if charge is not None:
            charge.end(seconds) if seconds else charge.cancel()

    def _queue_of(self, entry: PendingRollout) -> FairQueue[PendingRollout]:
        return self._evaluation_queue if entry.evaluation else self._training_queue

    def _update_queue_event(self) -> None:
        if not self._evaluation_queue and not self._training_queue:
            self.queue_not_empty.clear()
