"""Protocols of the service: the ledger, the runner, and where a runner gets its policies.

Runners are used by serialisable requests and events only, so that one may be in this process or on another node.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from prorl_gym.agents.command import CommandConfig, ModelGateway
from prorl_gym.agents.protocol import Policy
from prorl_gym.client.wire_models import (
    AcceptedRollout,
    AnalysisResponse,
    Capacity,
    LedgerStatus,
    PendingState,
    ProblemsResponse,
    RolloutListResponse,
    RolloutSummary,
    Unacknowledged,
)
from prorl_gym.demand import Demand
from prorl_gym.errors import CancelReason, Evidence, RolloutError, blame
from prorl_gym.inference.tokens.turn_log import LoggedTurn, TurnLog
from prorl_gym.records import Record, Retry, Rollout, RolloutRequest, Segment
from prorl_gym.settings import ResolvedSettings

Stage = Literal["queue", "init", "run", "eval"]

AttemptState = Literal["queued", "handing", "running", "waiting", "ending"]
"""``queued``: in the dispatch queue, or held back from it; ``handing``: being handed to the runner; ``running``: the
runner has it; ``waiting``: for the pause before the next attempt; ``ending``: its record is being written."""

PAGE_CHARS = 4 << 20
"""Characters of records after which a page of a stream ends."""


class Job(Record):
    """One attempt at one rollout."""

    request: RolloutRequest
    attempt: int = 0
    accepted_at: float
    """Unix seconds at which the ledger accepted the rollout (not this attempt)."""
    retries: tuple[Retry, ...] = ()
    """Earlier attempts and why they failed; they travel into the terminal record."""
    turns: tuple[LoggedTurn, ...] = ()
    """Whole turns of earlier attempts, after which this one may resume."""
    unreadable_reason: str = ""
    """Why the stored request cannot be read (damage, or a release that knew other fields). Then ``request`` is a
    placeholder without the task: enough for a record, and nothing to run."""

    @property
    def unexplained_losses(self) -> int:
        """Earlier attempts that lost a sandbox while their own payload ran, with nothing to show why."""
        return sum(retry.evidence is Evidence.SANDBOX_LOST_UNEXPLAINED for retry in self.retries)

    @property
    def must_run_alone(self) -> bool:
        """Whether no other rollout may run a payload beside this attempt, so that a loss can only be its own doing."""
        return any(retry.evidence is not None and blame(retry.evidence).retry_alone for retry in self.retries)


class StageEntered(Record):
    """An attempt entered a stage."""

    type: Literal["stage"] = "stage"
    rollout_id: str
    attempt: int
    stage: Stage
    at: float


class Finished(Record):
    """An attempt ended, with this record. Exactly one per accepted job."""

    type: Literal["finished"] = "finished"
    rollout: Rollout


class ParkingChanged(Record):
    """An agent stopped before its next model call and freed its slot, or goes on again."""

    type: Literal["parked"] = "parked"
    rollout_id: str
    attempt: int
    is_parked: bool
    at: float


class TurnEnded(Record):
    """A turn of an attempt that may be resumed is whole."""

    type: Literal["turn"] = "turn"
    rollout_id: str
    attempt: int
    number: int
    """Of the turn, from 0."""
    turn: LoggedTurn


AttemptMoved = StageEntered | ParkingChanged
RunnerEvent = AttemptMoved | TurnEnded | Finished


@dataclass(slots=True, eq=False)
class AttemptPosition:
    """Where an attempt is.

    The service has one for each pending rollout, which the dispatcher, the attempt settler and the groups share. The
    runner has one for each attempt in hand, and reports its moves as events.
    """

    attempt: int = 0
    """Number of the attempt that began last: no other one ends the rollout."""
    state: AttemptState = "queued"
    stage: Stage = "queue"
    """The last one that was entered."""
    since: float = 0.0
    """Unix seconds at which it was entered."""
    is_parked: bool = False
    stage_before: Stage = "queue"
    seconds_before: float = 0.0
    """How long it was in the stage before."""

    def enter_stage(self, stage: Stage, at: float) -> None:
        """Move to a stage, entered at this time (Unix seconds)."""
        self.stage_before, self.seconds_before = self.stage, at - self.since
        self.stage, self.since, self.is_parked = stage, at, False


class Runner(Protocol):
    """Executes attempts. On one event loop; all methods may be called concurrently on it."""

    def require_environment(self, environment: str) -> None:
        """Check that jobs of this environment can be done here.

        Raises:
            TaskError: ``UNKNOWN_ENVIRONMENT``, naming those that are known.
        """
        ...

    async def accept(self, job: Job) -> None:
        """Start a job. Waits for a job slot: work is kept in the ledger, not in the runner.

        Raises:
            ShuttingDownError: it is draining.
        """
        ...

    def events(self) -> AsyncIterator[RunnerEvent]:
        """Yield everything that happens, in order; ends after ``drain`` or ``close``. One reader."""
        ...

    async def cancel(self, rollout_ids: Sequence[str], reason: CancelReason) -> None:
        """Stop these: engine call, process tree, sandbox, lease. Each still ends with one ``Finished``.

        Unknown and finished ids are ignored.
        """
        ...

    async def park(self, rollout_ids: Sequence[str]) -> None:
        """Park these agents before their next model call, without their slot and with their deadline stopped.

        They keep sandbox and tokens. One that is not in RUN is not parked (``ParkingChanged`` names those that were).
        Parked ones are cancelled as any other. Unknown and finished ids are ignored.
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


class AttemptSession(Protocol):
    """The model of one attempt, with the tokens behind it."""

    async def failure_at_deadline(self) -> RolloutError | None:
        """Return the error of engines that kept the policy from answering before RUN's deadline, if they did."""
        ...

    async def wait_for_room(self) -> None:
        """Wait until the engines have room for another agent: without it, it would hold its slot for nothing.

        Evaluation does not wait: it goes before what waits already.
        """
        ...

    def release_engine_slot(self) -> None:
        """Free its place on the engines until the next call: the agent is parked. No call is in flight."""
        ...

    def mark_cancelled(self) -> None:
        """The rollout is cancelled: shorten the wait for the last tokens of the call in flight."""
        ...

    async def close(self) -> None:
        """Cancel the engine call in flight, keep what it sampled, end the session. Idempotent."""
        ...

    def segments(self) -> list[Segment]:
        """Return every token so far, complete after ``close``. Also after a failure or a cancel."""
        ...


class PolicySession(AttemptSession, Protocol):
    """The model as the policy of the agent loop."""

    @property
    def policy(self) -> Policy:
        """What the agent loop talks to."""
        ...


class GatewaySession(AttemptSession, Protocol):
    """The model behind the gateway of an agent program."""

    @property
    def gateway(self) -> ModelGateway:
        """What the program talks to."""
        ...


class GatewaySource(Protocol):
    """Makes sessions for agent programs."""

    def open_gateway(self, job: Job, settings: ResolvedSettings) -> GatewaySession:
        """Return a fresh session for this attempt; nothing is served yet.

        Raises:
            RolloutError: the request names an engine that it may not use.
        """
        ...


@dataclass(frozen=True, slots=True)
class AgentPrograms:
    """What a runner needs for rollouts whose agent is a program."""

    find: Callable[[str], CommandConfig]
    """Returns the program of a name; raises ``TaskError(BAD_ROW)``, naming the fix."""
    gateways: GatewaySource


class PolicySource(Protocol):
    """Makes sessions."""

    def open_session(self, job: Job, settings: ResolvedSettings, turn_log: TurnLog | None = None) -> PolicySession:
        """Return a fresh session for this attempt; nothing is sent yet.

        Args:
            job: the attempt.
            settings: sampling and limits.
            turn_log: has turns to replay, and takes the others.

        Raises:
            RolloutError: the request names an engine that it may not use.
        """
        ...


class RecoveredRollout(NamedTuple):
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
    """Attempts that were lost with the service or with a node."""
    cancel_reason: CancelReason | None = None
    """Why it was cancelled, if it was."""
    open_attempt: int | None = None
    """Attempt that a killed service left open, where ``recover`` keeps them open."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A terminal record and its place in the stream."""

    cursor: int
    """Rises with every record that is written; a reader that has seen it resumes after it."""
    record: str
    """The record as the JSON text that is stored: a stream hands it on as it is, and one that this release cannot
    read does not stop it. ``prorl_gym.rollout.ledger.encoding.decode_rollout`` reads it."""
    damage: str = ""
    """What is wrong with the stored record, if the file is damaged there. Then ``record`` is a placeholder: the
    identity of the rollout, and ``failed(internal)``."""


RewardClass = Literal["above", "zero", "none"]
"""``above`` zero, ``zero`` or less, or no reward."""

SortColumn = Literal[
    "finished",
    "took",
    "waited",
    "reward",
    "turns",
    "tokens",
    "version",
    "rollout",
    "run",
    "environment",
    "problem",
    "outcome",
    "why",
]
"""Column by which finished rollouts are sorted. Pending ones have no other than ``rollout``, ``run``, ``environment``,
``problem`` and ``took`` (their age)."""

RolloutState = Literal["finished"] | PendingState

ProblemOrder = Literal["newest", "worst", "best", "problem"]


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """Which rollouts are listed or analysed: those that match every field that is set."""

    run_id: str | None = None
    group_id: str | None = None
    prefix: str | None = None
    """Of the rollout's id."""
    environment: str | None = None
    problem: str | None = None
    evaluation: bool | None = None
    status: str | None = None
    detail: str | None = None
    why: str | None = None
    version: int | None = None
    reward: RewardClass | None = None
    text: str | None = None
    """Part of the id, the problem, the group, the detail or the reason, in any case of letters."""


@dataclass(frozen=True, slots=True)
class ListPage:
    """Which part of a sorted list is wanted."""

    sort: SortColumn = "finished"
    descending: bool = True
    before: int = 0
    """Only records before this cursor; 0: from the newest. Needs the order by ``finished``, descending."""
    offset: int = 0
    limit: int = 100


class Ledger(Protocol):
    """Durable memory. When ``add_rollouts`` returns, a SIGKILL cannot lose the rollout."""

    async def add_rollouts(self, requests: Sequence[RolloutRequest]) -> list[AcceptedRollout]:
        """Write a batch in one commit, all or nothing.

        Raises:
            ConflictError: an id exists with another body (nothing of the batch was written).
            LedgerFullError: the disk budget is used up by records that were not acknowledged.
        """
        ...

    async def add_and_begin(self, requests: Sequence[RolloutRequest]) -> tuple[list[AcceptedRollout], list[Job]]:
        """As ``add_rollouts``; the first attempt at all that is new begins in the same commit. Returns these, too.

        Raises:
            ConflictError, LedgerFullError: as ``add_rollouts``.
        """
        ...

    async def pending_jobs(self) -> list[Job]:
        """Every accepted rollout without a terminal record, oldest first, with the attempt to make next."""
        ...

    async def recover(self, *, keep_open: bool = False) -> list[RecoveredRollout]:
        """Close the attempts that a killed service left open, as ``SERVICE_RESTARTED``; list what is pending, by age.

        Called once, before anything else is begun.

        Args:
            keep_open: leave them open: nodes may have them in hand.
        """
        ...

    async def next_jobs(self, rollout_ids: Sequence[str]) -> list[Job]:
        """Return the next attempt of these, in this order; finished and unknown ids are left out.

        A row that cannot be read does not keep the others: see ``Job.unreadable_reason``.
        """
        ...

    async def begin_attempt(self, rollout_id: str) -> Job:
        """Begin the next attempt and return it, once it is remembered: a restart uses a fresh number.

        An attempt that is open is closed as lost. What cannot be read (``Job.unreadable_reason``) does not begin.

        Raises:
            ConflictError: the rollout is finished.
            NotFoundError: never accepted.
        """
        ...

    async def withdraw_attempts(self, rollout_ids: Sequence[str]) -> None:
        """Forget the attempts of these that began and have not ended: a stop cut them off. Their numbers stay used."""
        ...

    async def log_turn(self, ended: TurnEnded) -> None:
        """Keep a whole turn, in place of this and all later ones of earlier attempts, for ``begin_attempt``.

        A SIGKILL loses none that was kept; a power cut may. They are kept until the terminal record is written, or an
        attempt fails that has added none. Not kept: one of an attempt that is over, one after a gap, what goes beyond
        a rollout's share of the disk, anything once the disk budget is used up.
        """
        ...

    async def fail_attempt(self, rollout_id: str, retry: Retry) -> None:
        """Remember how an attempt that will be made again ended. The attempt must have begun."""
        ...

    async def finish(self, rollout: Rollout) -> int | None:
        """Write the terminal record and return its cursor. ``None`` when the id has one already: the first stands.

        Raises:
            ConflictError: the attempt is over (it failed, or a later one has begun): its end ends nothing.
            CancelledRolloutError: it was cancelled; only a cancelled record may be written.
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

    async def read_records(self, run_id: str | None, after: int, limit: int) -> list[Delivery]:
        """Return terminal records of a run (``None``: of all) past the cursor ``after``, in order.

        Up to ``limit``, and no more once they are ``PAGE_CHARS`` together: readers may be slow, and hold them.
        """
        ...

    async def summaries(
        self,
        run_id: str | None = None,
        *,
        groups: Sequence[str] | None = None,
        prefix: str | None = None,
        after: int = 0,
        limit: int = 1000,
        newest_first: bool = False,
    ) -> list[RolloutSummary]:
        """Return finished rollouts without their records, by cursor; also those whose record is not kept any more.

        Args:
            run_id: only of this run.
            groups: only of these groups.
            prefix: only those whose id has it.
            after: only past this cursor; with ``newest_first`` only before it (0: from the newest on).
            limit: the most to return.
            newest_first: in falling order.
        """
        ...

    async def list_rollouts(
        self, wanted: RolloutFilter, state: RolloutState, page: ListPage, running: Sequence[str] = ()
    ) -> RolloutListResponse:
        """Return rollouts that match, sorted, and how many match in each state.

        The ``place`` of pending ones is not known here. Finished ones are sorted and counted among the newest 100,000
        of the run; in the order by ``finished`` all are listed.

        Args:
            wanted: which; what is known at the end of a rollout matches no pending one.
            state: which of the states to list.
            page: which part.
            running: ids of pending rollouts that run; the others wait.
        """
        ...

    async def analyze(self, wanted: RolloutFilter) -> AnalysisResponse:
        """Aggregate the newest 100,000 finished rollouts of the run, of those that match."""
        ...

    async def list_problems(
        self, wanted: RolloutFilter, order: ProblemOrder, offset: int, limit: int
    ) -> ProblemsResponse:
        """Return the finished rollouts that match by problem, of the newest 100,000 of the run."""
        ...

    async def acknowledge(self, run_id: str | None, cursor: int) -> int:
        """Note that records of a run (``None``: of all) up to this cursor were received, and need not be kept.

        Returns:
            How many records this released.
        """
        ...

    async def acknowledge_rollouts(self, rollout_ids: Sequence[str]) -> int:
        """Release the records of these rollouts, as ``acknowledge`` does; unknown and unfinished ids are ignored.

        Returns:
            How many records this released.
        """
        ...

    async def unacknowledged(self, run_id: str | None) -> Unacknowledged:
        """Return the rollouts of a run (``None``: of all) without a record or with one that is kept, oldest first."""
        ...

    async def set_demand(self, run_id: str, demand: Demand | None) -> None:
        """Store the demand of a run; ``None`` deletes it."""
        ...

    async def demands(self) -> Mapping[str, Demand]:
        """Return what is remembered, by run."""
        ...

    async def set_policy_version(self, pool: str, version: int) -> None:
        """Remember which policy version the engines of a pool serve: they outlive the service."""
        ...

    async def policy_versions(self) -> Mapping[str, int]:
        """Return what is remembered, by pool."""
        ...

    async def usage(self) -> LedgerStatus:
        """Report what it holds."""
        ...

    async def collect_garbage(self) -> int:
        """Forget what may be forgotten by now: expired records, and old tombstones of released ones.

        Returns:
            How many records this released.
        """
        ...

    async def cancel(self, rollout_ids: Sequence[str], reason: CancelReason) -> list[str]:
        """Remember that these are cancelled: a restart does not run them, and none of them gets another record.

        The first reason is kept.

        Returns:
            Those without a terminal record, in the given order; finished and unknown ids are left out.
        """
        ...

    async def close(self) -> None:
        """Flush and close. Idempotent."""
        ...
