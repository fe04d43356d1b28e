"""What the service is made of: a ledger that forgets nothing, and runners that do the work.

Ledger and groups talk only to runners, with serialisable requests and events, so that a runner may be in this
process or on another node.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Literal, Protocol

from pydantic import Field

from prorl_gym.errors import CancelReason
from prorl_gym.records import Record, Retry, Rollout, RolloutRequest

Stage = Literal["queue", "init", "run", "eval"]


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


RunnerEvent = Annotated[StageEntered | Finished, Field(discriminator="type")]


class Capacity(Record):
    """How much a runner can take."""

    queued: int
    init: int
    run: int
    eval: int
    free: int
    """Jobs it would accept right now."""


class Runner(Protocol):
    """Does rollouts. One event loop; all methods may be called concurrently on it."""

    async def accept(self, job: Job) -> None:
        """Take a job. Waits while the queue is full: the ledger, not the runner, is where work is kept.

        Raises:
            ShuttingDownError: it is draining.
        """
        ...

    def events(self) -> AsyncIterator[StageEntered | Finished]:
        """Everything that happens, in order; ends after ``drain`` or ``close``. One reader."""
        ...

    async def cancel(self, rollout_ids: Sequence[str], reason: CancelReason) -> None:
        """Stop these: engine call, process tree, sandbox, lease. Each still ends with one ``Finished``.

        Unknown and finished ids are ignored.
        """
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


class Pending(Record):
    """What the service keeps in memory of a rollout without a terminal record: the body stays in the ledger."""

    rollout_id: str
    run_id: str
    group_id: str | None
    evaluation: bool
    failures: int = 0
    """Attempts that ended in an infrastructure failure."""
    restarts: int = 0
    """Attempts that were lost with the service."""
    cancel: CancelReason | None = None
    """It was asked to be cancelled."""


class Delivery(Record):
    """A terminal record and its place in the stream."""

    cursor: int
    """Rises with every record that is written; a reader that has seen it resumes after it."""
    rollout: Rollout


class Ledger(Protocol):
    """Durable memory. When ``accept`` returns, a SIGKILL cannot lose the rollout."""

    async def accept(self, requests: Sequence[RolloutRequest]) -> list[Accepted]:
        """Write a batch in one commit, all or nothing.

        Raises:
            ConflictError: an id exists with another body (nothing of the batch was written).
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

    async def begin_attempt(self, rollout_id: str, attempt: int) -> None:
        """Remember that this attempt was started, so that a restart uses a fresh number.

        Raises:
            ConflictError: this attempt was begun before, or the rollout is finished.
            NotFoundError: never accepted.
        """
        ...

    async def withdraw(self, rollout_ids: Sequence[str]) -> None:
        """Forget the attempts of these that began and have not ended: no runner worked on them. Numbers stay used."""
        ...

    async def fail_attempt(self, rollout_id: str, retry: Retry) -> None:
        """Remember how an attempt that will be made again ended. The attempt must have begun."""
        ...

    async def finish(self, rollout: Rollout) -> bool:
        """Write the terminal record. ``False`` when the id has one already: the first one stands."""
        ...

    async def get(self, rollout_id: str) -> Rollout | RolloutRequest:
        """Return the terminal record, or the request while there is none.

        Raises:
            NotFoundError: never accepted.
        """
        ...

    async def finished(self, run_id: str | None, after: int, limit: int) -> list[Delivery]:
        """Return up to ``limit`` terminal records of a run (``None``: of all) past the cursor ``after``, in order."""
        ...

    async def cancel(self, rollout_ids: Sequence[str], reason: CancelReason) -> None:
        """Remember that these are to be cancelled, so that a restart does not run them."""
        ...

    async def close(self) -> None:
        """Flush and close. Idempotent."""
        ...
