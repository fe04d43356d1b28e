"""What the service is made of: a ledger that forgets nothing, and runners that do the work.

Ledger and groups talk only to runners, with serialisable requests and events, so that a runner may be in this
process or on another node.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, Protocol

from pydantic import Field

from prorl_gym.demand import Demand
from prorl_gym.errors import CancelReason, Cause, Evidence, blame
from prorl_gym.records import Record, Retry, Rollout, RolloutRequest

Stage = Literal["queue", "init", "run", "eval"]

PAGE_SIZE = 4 << 20
"""Characters of records after which a page of a stream ends."""


class Job(Record):
    """One attempt at one rollout."""

    request: RolloutRequest
    attempt: int = 0
    accepted_at: float
    """Unix seconds at which the ledger accepted the rollout (not this attempt)."""
    retries: tuple[Retry, ...] = ()
    """Earlier attempts and why they failed; they travel into the terminal record."""
    unreadable: str = ""
    """Why the stored request cannot be read (damage, or a release that knew other fields). Then ``request`` is a
    stand-in without the task: enough for a record, and nothing to run."""

    @property
    def losses(self) -> int:
        """Earlier attempts that lost a sandbox while their own payload ran, with nothing to show why."""
        return sum(retry.evidence is Evidence.SANDBOX_LOST_UNEXPLAINED for retry in self.retries)

    @property
    def alone(self) -> bool:
        """Whether no other rollout may run a payload beside this attempt, so that a loss can only be its own doing."""
        return any(retry.evidence is not None and blame(retry.evidence).alone for retry in self.retries)


class StageEntered(Record):
    """A rollout moved on."""

    type: Literal["stage"] = "stage"
    rollout_id: str
    attempt: int
    stage: Stage
    at: float


class Finished(Record):
    """An attempt ended; the record says how. Exactly one per accepted job."""

    type: Literal["finished"] = "finished"
    rollout: Rollout


class Parked(Record):
    """An agent stopped before its next model call and gave its slot away, or goes on again."""

    type: Literal["parked"] = "parked"
    rollout_id: str
    attempt: int
    parked: bool
    at: float


RunnerEvent = Annotated[StageEntered | Parked | Finished, Field(discriminator="type")]


class Capacity(Record):
    """How much a runner can take."""

    queued: int
    init: int
    run: int
    eval: int
    parked: int = 0
    """Agents that wait to be needed again; they hold no slot."""
    free: int
    """Jobs it would accept right now."""


class Runner(Protocol):
    """Does rollouts. One event loop; all methods may be called concurrently on it."""

    def must_offer(self, environment: str) -> None:
        """Check that jobs of this environment can be done here.

        Raises:
            TaskError: ``UNKNOWN_ENVIRONMENT``, naming those that are known.
        """
        ...

    async def accept(self, job: Job) -> None:
        """Take a job. Waits while the queue is full: the ledger, not the runner, is where work is kept.

        Raises:
            ShuttingDownError: it is draining.
        """
        ...

    def events(self) -> AsyncIterator[StageEntered | Parked | Finished]:
        """Everything that happens, in order; ends after ``drain`` or ``close``. One reader."""
        ...

    async def cancel(self, rollout_ids: Sequence[str], reason: CancelReason) -> None:
        """Stop these: engine call, process tree, sandbox, lease. Each still ends with one ``Finished``.

        Unknown and finished ids are ignored.
        """
        ...

    async def park(self, rollout_ids: Sequence[str]) -> None:
        """Let these agents stop before their next model call, without their slot and without being charged for it.

        They keep sandbox and tokens. One that is not in RUN is not parked (``Parked`` tells which were). Parked ones
        are cancelled as any other. Unknown and finished ids are ignored.
        """
        ...

    async def unpark(self, rollout_ids: Sequence[str]) -> None:
        """Let these go on, ahead of rollouts that have not begun to run. Harmless for those that are not parked."""
        ...

    async def capacity(self) -> Capacity:
        """Report occupancy."""
        ...

    async def drain(self) -> None:
        """Accept nothing more, finish everything, then end ``events``."""
        ...

    async def close(self) -> None:
        """Stop at once: everything in hand ends as ``cancelled(shutdown)``. Idempotent."""
        ...


class Accepted(Record):
    """Answer of the ledger to one request."""

    rollout_id: str
    duplicate: bool
    """The same body was accepted before; nothing was added."""


class Pending(NamedTuple):
    """What the service keeps in memory of a rollout without a terminal record: the body stays in the ledger."""

    rollout_id: str
    run_id: str
    group_id: str | None
    environment: str
    evaluation: bool
    group_size: int = 1
    replica: int = 0
    stands_in_for: str | None = None
    failures: int = 0
    """Attempts that ended in an infrastructure failure."""
    restarts: int = 0
    """Attempts that were lost with the service."""
    cancel: CancelReason | None = None
    """It was asked to be cancelled."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A terminal record and its place in the stream."""

    cursor: int
    """Rises with every record that is written; a reader that has seen it resumes after it."""
    record: str
    """The record as the JSON text that is stored: a stream hands it on as it is, and one that this release cannot
    read does not stop it. ``prorl_gym.rollout.encoding.decode_rollout`` reads it."""
    damaged: str = ""
    """What is wrong with the stored record, if the file is damaged there. Then ``record`` is a stand-in: it says who
    the rollout was, and ``failed(internal)``."""


@dataclass(frozen=True, slots=True)
class Member:
    """What is kept of a finished rollout beside its record: enough to judge its group, and to list it."""

    cursor: int
    rollout_id: str
    run_id: str
    group_id: str | None
    group_size: int
    replica: int
    environment: str
    evaluation: bool
    stands_in_for: str | None
    status: str
    """Of ``Outcome``."""
    detail: str
    """The outcome's kind, limit or reason; empty for a completed one."""
    cause: Cause | None
    reward: float | None
    masked: bool
    oldest_version: int | None
    turns: int
    sampled_tokens: int
    accepted_at: float
    finished_at: float
    released: bool
    """Its record was acknowledged, or it expired: it is not kept any more."""


@dataclass(frozen=True, slots=True)
class LedgerUsage:
    """What a ledger holds."""

    bytes: int
    """On the disk, 0 for one in memory."""
    pending: int
    kept: int
    """Finished, with their record."""
    released: int
    """Finished, of which only the ``Member`` is left."""
    full: bool
    """The disk budget is used up: nothing more is accepted until records are acknowledged or expire."""


class Ledger(Protocol):
    """Durable memory. When ``accept`` returns, a SIGKILL cannot lose the rollout."""

    async def accept(self, requests: Sequence[RolloutRequest]) -> list[Accepted]:
        """Write a batch in one commit, all or nothing.

        Raises:
            ConflictError: an id exists with another body (nothing of the batch was written).
            LedgerFullError: the disk budget is used up by records that nobody has acknowledged.
        """
        ...

    async def accept_and_begin(self, requests: Sequence[RolloutRequest]) -> tuple[list[Accepted], list[Job]]:
        """As ``accept``; the first attempt at all that is new begins in the same commit. Returns these, too.

        Raises:
            ConflictError, LedgerFullError: as ``accept``.
        """
        ...

    async def pending(self) -> list[Job]:
        """Every accepted rollout without a terminal record, oldest first, with the attempt to make next."""
        ...

    async def recover(self) -> list[Pending]:
        """Close the attempts that a killed service left open, as ``SERVICE_RESTARTED``; list what is pending, by age.

        Called once, before anything else is begun.
        """
        ...

    async def jobs(self, rollout_ids: Sequence[str]) -> list[Job]:
        """Return the next attempt of these, in this order; finished and unknown ids are left out.

        A row that cannot be read does not keep the others: its job says so (``Job.unreadable``).
        """
        ...

    async def begin(self, rollout_id: str) -> Job:
        """Begin the next attempt and return it, once it is remembered: a restart uses a fresh number.

        An attempt that is open is closed as lost. What cannot be read (``Job.unreadable``) does not begin.

        Raises:
            ConflictError: the rollout is finished.
            NotFoundError: never accepted.
        """
        ...

    async def withdraw(self, rollout_ids: Sequence[str]) -> None:
        """Forget the attempts of these that began and have not ended: a stop cut them off. Their numbers stay used."""
        ...

    async def fail_attempt(self, rollout_id: str, retry: Retry) -> None:
        """Remember how an attempt that will be made again ended. The attempt must have begun."""
        ...

    async def finish(self, rollout: Rollout) -> int | None:
        """Write the terminal record and return its cursor. ``None`` when the id has one already: the first stands.

        Raises:
            ConflictError: the attempt is over (it failed, or a later one has begun): its end ends nothing.
            CancelledRolloutError: its cancel is remembered; only a record that says so may be written.
            NotFoundError: never accepted.
        """
        ...

    async def get(self, rollout_id: str) -> Rollout | RolloutRequest:
        """Return the terminal record, or the request while there is none.

        Raises:
            NotFoundError: never accepted.
            GoneError: its record is not kept any more: it was acknowledged, or it expired.
            UnreadableRecordError: it was written, and this release cannot read it.
        """
        ...

    async def requests(self, rollout_ids: Sequence[str]) -> list[RolloutRequest]:
        """Return what was accepted under these ids, finished ones too; unknown and unreadable ones are left out."""
        ...

    async def finished(self, run_id: str | None, after: int, limit: int) -> list[Delivery]:
        """Return terminal records of a run (``None``: of all) past the cursor ``after``, in order.

        Up to ``limit``, and no more once they are ``PAGE_SIZE`` together: readers may be slow, and hold them.
        """
        ...

    async def members(
        self,
        run_id: str | None = None,
        *,
        groups: Sequence[str] | None = None,
        after: int = 0,
        limit: int = 1000,
        newest_first: bool = False,
    ) -> list[Member]:
        """Return finished rollouts without their records, by cursor; also those whose record is not kept any more.

        Args:
            run_id: only of this run.
            groups: only of these groups.
            after: only past this cursor; with ``newest_first`` only before it (0: from the newest on).
            limit: the most to return.
            newest_first: in falling order.
        """
        ...

    async def acknowledge(self, run_id: str | None, cursor: int) -> int:
        """Note that records of a run (``None``: of all) up to this cursor were received, and need not be kept.

        Returns:
            How many records this released.
        """
        ...

    async def set_demand(self, run_id: str, demand: Demand | None) -> None:
        """Remember what a trainer wants of a run, ``None``: everything again."""
        ...

    async def demands(self) -> Mapping[str, Demand]:
        """Return what is remembered, by run."""
        ...

    async def set_version(self, pool: str, version: int) -> None:
        """Remember which policy version the engines of a pool serve: they outlive the service."""
        ...

    async def versions(self) -> Mapping[str, int]:
        """Return what is remembered, by pool."""
        ...

    async def usage(self) -> LedgerUsage:
        """Report what it holds."""
        ...

    async def collect(self) -> int:
        """Forget what may be forgotten by now: expired records, and old traces of released ones.

        Returns:
            How many records this released.
        """
        ...

    async def cancel(self, rollout_ids: Sequence[str], reason: CancelReason) -> list[str]:
        """Remember that these are cancelled: a restart does not run them, and none of them gets another record.

        The first reason stands.

        Returns:
            Those without a terminal record, in the order asked for; finished and unknown ids are left out.
        """
        ...

    async def close(self) -> None:
        """Flush and close. Idempotent."""
        ...
