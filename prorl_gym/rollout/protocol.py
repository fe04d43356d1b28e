"""Shared models of the service, and its protocols: the runner, and where a runner gets its policies.

Runners are used by serialisable requests and events only, so that one may be in this process or on another node.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from prorl_gym.agents.protocol import Agent, Policy
from prorl_gym.client.wire_models import Capacity, PendingState
from prorl_gym.errors import CancelReason, Evidence, RolloutError, blame
from prorl_gym.inference.tokens.turn_log import LoggedTurn, TurnLog
from prorl_gym.records import Record, Retry, Rollout, RolloutRequest, Segment
from prorl_gym.sandbox.protocol import Mount
from prorl_gym.settings import ResolvedSettings

Stage = Literal["queue", "init", "run", "eval"]

AttemptState = Literal["queued", "handing", "running", "waiting", "ending"]
"""``queued``: in the dispatch queue, or held back from it; ``handing``: being handed to the runner; ``running``: the
runner has it; ``waiting``: for the pause before the next attempt; ``ending``: its record is being written."""

PAGE_CHARS = 4 << 20
"""Characters of records after which a page of a stream ends."""


def group_key(request: RolloutRequest) -> str:
    """Return a name of the request's group; empty: it has none. Runs may name their groups alike."""
    return f"{request.run_id}/{request.group_id}" if request.group_id else ""


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
        """Whether no other rollout may run a payload during this attempt, so that a loss can only be its own doing."""
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
    """From 0."""
    turn: LoggedTurn


AttemptMoved = StageEntered | ParkingChanged
RunnerEvent = AttemptMoved | TurnEnded | Finished


@dataclass(slots=True, eq=False)
class AttemptPosition:
    """Where an attempt is. The service has one for each pending rollout, the runner one for each running attempt."""

    attempt: int = 0
    """Number of the attempt that began last: no other one ends the rollout."""
    state: AttemptState = "queued"
    stage: Stage = "queue"
    """The last stage that was entered."""
    since: float = 0.0
    """Unix seconds at which it was entered."""
    is_parked: bool = False
    stage_before: Stage = "queue"
    seconds_before: float = 0.0
    """How long it was in the stage before."""

    def enter_stage(self, stage: Stage, at: float) -> None:
        self.stage_before, self.seconds_before = self.stage, at - self.since
        self.stage, self.since, self.is_parked = stage, at, False


class Runner(Protocol):
    """Executes attempts. On one event loop; all methods may be called concurrently on it."""

    def require_environment(self, environment: str) -> None:
        """Raise ``TaskError`` (UNKNOWN_ENVIRONMENT), naming the known ones, if jobs of it cannot be done here."""
        ...

    async def accept(self, job: Job) -> None:
        """Start a job once there is a job slot: work is kept in the ledger. Raises ``ShuttingDownError`` (draining)."""
        ...

    def events(self) -> AsyncIterator[RunnerEvent]:
        """Yield everything that happens, in order; ends after ``drain`` or ``close``. One reader."""
        ...

    async def cancel(self, rollout_ids: Sequence[str], reason: CancelReason) -> None:
        """Stop these: engine call, processes, sandbox, lease; each still ends with one ``Finished``. Ignores others."""
        ...

    async def park(self, rollout_ids: Sequence[str]) -> None:
        """Park these agents before their next model call, without their slot and with their deadline stopped.

        They keep sandbox and tokens. One that is not in RUN is not parked (``ParkingChanged`` names those that were).
        Parked ones can be cancelled as any other.
        """
        ...

    async def unpark(self, rollout_ids: Sequence[str]) -> None:
        """Let these go on, ahead of rollouts that have not begun to run. Harmless for those that are not parked."""
        ...

    async def capacity(self) -> Capacity:
        """Return the occupancy."""
        ...

    async def drain(self) -> None:
        """Accept nothing more, finish everything, then end ``events``."""
        ...

    async def close(self) -> None:
        """Stop at once: every running attempt ends as ``cancelled(shutdown)``. Idempotent."""
        ...


class AttemptSession(Protocol):
    """The model of one attempt, with the tokens behind it."""

    async def failure_at_deadline(self) -> RolloutError | None:
        """Return the error of engines that kept the policy from answering before RUN's deadline, if they did."""
        ...

    async def wait_for_room(self) -> None:
        """Wait until the engines have room for another agent, which would block its slot. Evaluation does not wait."""
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
        """The policy of the agent loop."""
        ...


class AgentPrograms(Protocol):
    """Agents that are programs, by the name that the setting ``agent`` gives; ``prorl_gym.harness`` implements it.

    Its methods raise ``TaskError`` (``BAD_ROW``) for a name that is unknown or not installed.
    """

    def mounts_of(self, name: str) -> Sequence[Mount]:
        """Return what the agent's sandbox has to mount for a program."""
        ...

    def open_agent(self, job: Job, settings: ResolvedSettings) -> tuple[AttemptSession, Agent]:
        """Return the agent of an attempt, and the session that records its model calls; nothing is sent yet.

        Raises ``RolloutError`` where the request names an engine that it may not use.
        """
        ...


class PolicySource(Protocol):
    """Makes sessions."""

    def open_session(self, job: Job, settings: ResolvedSettings, turn_log: TurnLog | None = None) -> PolicySession:
        """Return a fresh session, which replays ``turn_log``. Raises ``RolloutError``: the engine is not allowed."""
        ...


class RecoveredRollout(NamedTuple):
    """A rollout without a terminal record as it is kept in memory: the body stays in the ledger."""

    rollout_id: str
    run_id: str
    group_id: str | None
    environment: str
    evaluation: bool
    group_size: int = 1
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
    read does not stop it. ``Rollout.model_validate_json`` reads it."""
    damage: str = ""
    """Damage of the stored record in the file, if any. Then ``record`` is a placeholder: the
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
    """Prefix of the rollout's id."""
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
