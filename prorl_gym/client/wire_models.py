"""Bodies and answers of the service's routes: the one definition for service and client.

Bodies are strict (an unknown field is an error), and every string and list is bounded. Answers only grow: readers
ignore unknown fields, and a field that a later release adds has a default.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, RootModel, field_validator

from prorl_gym.demand import Demand, RedundantHandling
from prorl_gym.errors import CancelReason, Cause, FailureKind, Limit
from prorl_gym.records import (
    BatchMismatch,
    EngineLoad,
    Identifier,
    MismatchPosition,
    OutcomeStatus,
    Record,
    Rollout,
    RolloutRequest,
)
from prorl_gym.settings import Seconds

MAX_CURSOR = 2**63 - 1
"""Largest integer of the ledger; a larger cursor would break the stream after its 200."""

MAX_VERSION = 10**15 - 1
"""Largest policy version, also of those that engines report."""

MAX_BATCH = 4096
"""Rollouts in one submission."""

MAX_NAMES = 10_000
"""Names in one cancel."""

MAX_ENGINES = 4096

DEFAULT_EXPIRE_SECONDS = 600.0
"""Seconds after which a pause ends by itself: a trainer that died in it does not stop the service for good."""

Names = Annotated[list[Identifier], Field(max_length=MAX_NAMES)]
Url = Annotated[str, Field(min_length=1, max_length=2048)]
PoolName = Annotated[str, Field(max_length=64)]
Version = Annotated[int, Field(ge=0, le=MAX_VERSION)]
Cursor = Annotated[int, Field(ge=0, le=MAX_CURSOR)]

PauseMode = Literal["abort", "drain", "keep"]
"""Running calls are cut short, waited for, or left to the engine, which continues them."""

GroupState = Literal["open", "informative", "ready", "uninformative", "redundant", "stale", "short"]
"""``open``: undecided; ``informative``: two rewards differ, members are still running; ``ready``: complete and
informative; ``uninformative``: complete, all rewards equal; ``redundant``, ``stale``: stopped by the service;
``short``: fewer rewards than the group's size, and no member is left."""


# Readers take any text here: a later release may have more of these words.
Status = Annotated[str, Field(json_schema_extra={"enum": [*get_args(OutcomeStatus)]})]
Detail = Annotated[str, Field(json_schema_extra={"enum": ["", *Limit, *FailureKind, *CancelReason]})]


class Body(BaseModel):
    """Base of the bodies: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ErrorDetail(Record):
    """A fault, and how to fix it."""

    what: str = Field(examples=["rollout a7 was submitted before with another body."])
    fix: str = Field(examples=["Send the same body again, or use a fresh rollout_id."])
    kind: FailureKind | None = None
    """Kind of failure that a rollout would have had; absent where there is none."""


class ErrorResponse(Record):
    """The form of every error."""

    error: ErrorDetail


class IgnoredResponse(Record):
    """An answer that the client does not read."""


# --- rollouts and their records -----------------------------------------------------------------------------------


class RolloutSubmission(RolloutRequest):
    """One rollout to run, as submitted: with bounds for the fields that the record leaves unbounded."""

    group_size: Annotated[int, Field(ge=1, le=65_536)] = Field(default=1, examples=[8])
    """How many replicas the group has."""
    environment: Annotated[str, Field(min_length=1, max_length=128)] = Field(examples=["math"])
    """Name of the environment, for example ``math``."""
    inference_url: Url | None = None
    """Engine to use for this rollout only, for trainers that own the gateway; must be on the service's allow-list."""
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=128)], Annotated[str, Field(max_length=4096)]], Field(max_length=64)
    ] = Field(default_factory=dict[str, str])
    """Returned unchanged."""


@dataclass(frozen=True, slots=True)
class AcceptedRollout:
    """Answer to one submitted rollout."""

    rollout_id: Annotated[str, Field(examples=["a7"])]
    duplicate: bool
    """Whether the same body was accepted before, so that nothing was added."""


class SubmitResponse(Record):
    """Accepted rollouts, in the order of the submission. They are on the disk."""

    accepted: tuple[AcceptedRollout, ...]


class RolloutResponse(Record):
    """A terminal record, or null while there is none."""

    rollout: Rollout | None


class SubmittedRequestResponse(Record):
    """The request as it was accepted."""

    request: RolloutRequest


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """A finished rollout without its record: what lists and group verdicts need."""

    cursor: Annotated[int, Field(examples=[41])]
    rollout_id: Annotated[str, Field(examples=["a7"])]
    run_id: Annotated[str, Field(examples=["step-7"])]
    group_id: Annotated[str | None, Field(examples=["prompt-3"])]
    group_size: Annotated[int, Field(examples=[8])]
    replica: int
    environment: Annotated[str, Field(examples=["math"])]
    evaluation: bool
    stands_in_for: Annotated[str | None, Field(examples=[None])]
    status: Status
    """``Outcome.status``."""
    detail: Detail
    """The outcome's kind, limit or reason; empty for a completed one."""
    cause: Annotated[Cause | None, Field(examples=[None])]
    reward: Annotated[float | None, Field(examples=[1.0])]
    masked: bool
    oldest_version: Annotated[int | None, Field(examples=[7])]
    turns: Annotated[int, Field(examples=[1])]
    sampled_tokens: Annotated[int, Field(examples=[2])]
    accepted_at: Annotated[float, Field(examples=[1760000000.0])]
    finished_at: Annotated[float, Field(examples=[1760000000.6])]
    released: bool
    """Whether its record was acknowledged or has expired, and is deleted."""
    begun_at: float | None = None
    """When its last attempt began; null: it never did."""
    row_id: str = ""
    """The row's own id, or a short hash of the task."""
    why: str = ""
    """Why the reward is not 1, or why there is none, in one line."""


PendingState = Literal["running", "waiting"]
"""``running``: in INIT, RUN or EVAL with a slot; ``waiting``: everything else without a record."""

PendingPlace = Literal["held", "queue", "retry", "slot", "parked", "init", "run", "eval", "record"]
"""Where a rollout without a record is: held back by its run's demand or a hold, in the dispatch queue, in the pause
before another attempt, in the runner before a stage, parked, in a stage, or ended with its record being written."""


@dataclass(frozen=True, slots=True)
class PendingSummary:
    """An accepted rollout without a record."""

    rollout_id: Annotated[str, Field(examples=["a7"])]
    run_id: Annotated[str, Field(examples=["step-7"])]
    group_id: Annotated[str | None, Field(examples=["prompt-3"])]
    group_size: Annotated[int, Field(examples=[8])]
    replica: int
    environment: Annotated[str, Field(examples=["math"])]
    evaluation: bool
    problem: Annotated[str, Field(examples=["products-12"])]
    """Its group in ``/v1/problems``."""
    attempt: int
    """Number of the attempt that runs, or of the next one."""
    place: Annotated[PendingPlace, Field(examples=["run"])]
    since: Annotated[float | None, Field(examples=[1760000000.5])]
    """Unix seconds at which it came there; null where that is not known."""
    accepted_at: Annotated[float, Field(examples=[1760000000.0])]


class StateCounts(Record):
    """Rollouts that match a filter, by state."""

    waiting: int = Field(examples=[12])
    running: int = Field(examples=[4])
    finished: int = Field(examples=[1])


class RolloutListResponse(Record):
    """Rollouts without their tokens; of the two lists, the one of the state that was asked for."""

    rollouts: tuple[RolloutSummary, ...]
    """Finished ones."""
    before: Cursor | None
    """Value of ``before`` for the next page; null on the last one, and when sorted by anything but the cursor."""
    pending: tuple[PendingSummary, ...] = ()
    """Running or waiting ones."""
    counts: StateCounts | None = None
    """Counts of all that match, not of this page alone; finished ones among the newest 100,000."""


class RewardPoint(Record):
    """Rewards of one policy version in one environment of one run."""

    run_id: str = Field(examples=["step-7"])
    environment: str = Field(examples=["math"])
    evaluation: bool
    version: int | None = Field(examples=[7])
    """Oldest policy version that sampled a token; null where none was sampled."""
    count: int = Field(examples=[15])
    """Rollouts with a reward."""
    mean: float = Field(examples=[0.6])
    deviation: float = Field(examples=[0.49])
    """Standard deviation of the rewards."""
    solved: int = Field(examples=[9])
    """Rewards above zero."""


class EndCount(Record):
    """Rollouts that ended in the same way for the same reason."""

    environment: str = Field(examples=["math"])
    status: Status
    detail: Detail
    cause: Cause | None = Field(examples=[None])
    why: str = Field(examples=["the answer differs"])
    """Why; where there is no reward, of the newest of them."""
    zero: bool = Field(examples=[True])
    """Whether they have a reward, and it is not above zero."""
    count: int = Field(examples=[6])
    rollout_id: str = Field(examples=["a9"])
    """The newest of them."""


class Spread(Record):
    """Median, 90th percentile and largest of a figure."""

    p50: float
    p90: float
    max: float


class AnalysisResponse(Record):
    """Aggregates over the newest 100,000 finished rollouts that match a filter."""

    finished: int = Field(examples=[16])
    """Rollouts they are made of."""
    rewards: tuple[RewardPoint, ...]
    """By run, environment and version; the newest 5,000 if there are more."""
    ends: tuple[EndCount, ...]
    """The most frequent 200 ways in which rollouts ended without a reward above zero."""
    spreads: dict[str, Spread] = Field(examples=[{"took": {"p50": 0.6, "p90": 1.4, "max": 3.1}}])
    """By figure: ``took`` and ``waited`` in seconds, ``turns``, ``tokens``."""
    runs: tuple[str, ...] = Field(examples=[["step-7"]])
    """Runs with rollouts, the newest first, without regard to the filter; at most 200."""
    environments: tuple[str, ...] = Field(examples=[["math"]])
    """The same of environments."""


class ProblemMember(Record):
    """One finished rollout of a problem."""

    rollout_id: str = Field(examples=["a7"])
    group_id: str | None = Field(examples=["prompt-3"])
    group_size: int = Field(examples=[8])
    replica: int
    version: int | None = Field(examples=[7])
    status: Status
    detail: Detail
    why: str
    reward: float | None = Field(examples=[1.0])
    masked: bool


class Problem(Record):
    """The finished rollouts of one row of a data set."""

    run_id: str = Field(examples=["step-7"])
    environment: str = Field(examples=["math"])
    problem: str = Field(examples=["products-12"])
    """The row's name (``row_id``)."""
    count: int = Field(examples=[8])
    """Finished rollouts."""
    rewarded: int = Field(examples=[8])
    """Those with a reward."""
    solved: int = Field(examples=[1])
    """Rewards above zero."""
    mean: float | None = Field(examples=[0.125])
    members: tuple[ProblemMember, ...]
    """The newest 64, oldest policy version first, then by group and replica."""


class ProblemsResponse(Record):
    """A page of problems."""

    problems: tuple[Problem, ...]
    total: int = Field(examples=[2])
    never_solved: int = Field(examples=[1])
    """Problems with a reward of which none is above zero."""
    always_solved: int
    """Problems of which every reward is above zero."""


class CancelBody(Body):
    """Rollouts to cancel. ``runs`` and ``groups`` together mean these groups of these runs: group ids may repeat."""

    rollouts: Names = []
    groups: Names = Field(default=[], examples=[["prompt-3"]])
    runs: Names = Field(default=[], examples=[["step-7"]])
    reason: CancelReason = CancelReason.CLIENT
    """Reason that the records name."""


class CancelResponse(Record):
    """Ids of the rollouts that were cancelled. Each still gets its record."""

    cancelled: tuple[str, ...] = Field(examples=[["a8"]])


class DeliveredRecord(Record):
    """One line of the stream: a terminal record and its cursor. Empty lines only show that the service is alive."""

    cursor: Cursor
    """Rises with every record; a stream continues after it."""
    stale: bool = False
    """Whether its group is further behind the policy than the run's demand allows when this line is sent."""
    damaged: bool = False
    """The stored record is damaged: ``rollout`` is a placeholder with its identity and ``failed(internal)``."""
    rollout: Rollout


class PauseNotice(Record):
    """A line of the stream that is no record: no record came for 15 s, and this pool is paused. Once for each pause."""

    paused: str
    """Name of the pool."""
    since: float
    """When the pause began, in Unix seconds."""
    expires_at: float | None
    """When it ends by itself, in Unix seconds; null: never, or an update is under way."""


class AckBody(Body):
    """Which records were received: all up to a cursor, or those of some rollouts, or both."""

    run: Identifier | None = Field(default=None, examples=["step-7"])
    """For ``cursor``: acknowledge records of this run only; of all runs by default."""
    cursor: Cursor = Field(default=0, examples=[41])
    """Cursor of the last record received."""
    rollouts: Names = []
    """Rollouts whose records were received, in any order. Those without a record are ignored."""


class AckResponse(Record):
    """Number of records that this acknowledged."""

    released: int = Field(examples=[40])


class UnacknowledgedRollout(Record):
    """An accepted rollout whose record was not acknowledged."""

    rollout_id: str = Field(examples=["a8"])
    run_id: str = Field(examples=["step-7"])
    finished: bool
    """It has its record."""


class Unacknowledged(Record):
    """Rollouts whose records were not acknowledged, oldest first."""

    cursor: Cursor = Field(examples=[41])
    """That of the newest record: a stream from here has what ends after this list was made."""
    rollouts: tuple[UnacknowledgedRollout, ...]


class FirstPromptBody(Body):
    """The messages and tools of a row, in the form of OpenAI's Responses API."""

    input: list[Any] | str = Field(
        default_factory=list[Any], max_length=MAX_NAMES, examples=[[{"role": "user", "content": "What is 2+2?"}]]
    )
    tools: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]], max_length=1024)


class FirstPrompt(Record):
    """A first prompt as the policy's tokenizer renders it."""

    prompt_token_ids: tuple[int, ...] = Field(examples=[[9, 14, 3]])
    terminator_id: int = Field(examples=[2])
    """Ends a turn of the model."""


# --- groups of a run ----------------------------------------------------------------------------------------------


class ReadyGroup(Record):
    """A complete, informative group that the trainer has not used."""

    group_id: str = Field(examples=["prompt-3"])
    cursor: int = Field(examples=[41])
    """Cursor of the record that completed it."""
    oldest_version: int | None = Field(examples=[7])
    """Policy version of its oldest token."""
    stale: bool
    """Whether it is older than the demand allows."""


def _drop_unknown_fields(value: object) -> object:
    """Drop fields of a later release: a demand refuses unknown fields when it is set, not when it is read."""

    def known(fields: object, model: type[BaseModel]) -> object:
        if not isinstance(fields, Mapping):
            return fields
        given = cast(Mapping[str, Any], fields).items()
        return {
            name: known(one, RedundantHandling) if name == "redundant" else one
            for name, one in given
            if name in model.model_fields
        }

    return known(value, Demand)


ReportedDemand = Annotated[Demand, BeforeValidator(_drop_unknown_fields)]


class DemandResponse(RootModel[ReportedDemand]):
    """The demand of a run."""


class GroupsStatus(Record):
    """The groups of a run. Counts go back to the oldest rollout of the run that the ledger still has."""

    run_id: str = Field(examples=["step-7"])
    demand: ReportedDemand | None = None
    """The run's demand; ``None``: no demand is set, and groups are not counted."""
    version: int = 0
    """Version of the policy that is current for this run."""
    satisfied: bool = False
    """Whether as many groups are ready as are needed, so that the others are redundant."""
    wanted: int = Field(default=0, examples=[64])
    """Ready groups needed past ``demand.after``, including spare ones."""
    ready: int = Field(default=0, examples=[12])
    """Ready groups past ``demand.after`` that are not stale."""
    ready_stale: int = 0
    """Ready groups past ``demand.after`` that are stale."""
    begun: int = Field(default=0, examples=[80])
    """Groups that have begun and are neither used nor lost; ``max_staleness`` bounds their number."""
    waiting: int = Field(default=0, examples=[40])
    """Groups that ``max_staleness`` keeps from beginning."""
    kept: int = 0
    """Groups that are not needed now and kept for a later demand."""
    held: int = Field(default=0, examples=[320])
    """Rollouts that may not begin now."""
    parked: int = 0
    """Parked agents."""
    states: Annotated[dict[str, int], Field(json_schema_extra={"propertyNames": {"enum": [*get_args(GroupState)]}})] = (
        Field(default_factory=dict[str, int])
    )
    """Groups by state. A later release may have more states."""
    replaced: int = 0
    """Replacements of failed rollouts."""
    extras: int = 0
    """Extra replicas that raced stragglers."""
    wasted_tokens: int = 0
    """Tokens sampled in rollouts that were cancelled as redundant or stale."""
    reclaimed_seconds: float = 0.0
    """Estimated working time that those cancels saved since the service started: for each, the mean of the
    environment's latest rollouts with a reward, less the time already worked, never below 0."""
    ready_groups: tuple[ReadyGroup, ...] = ()
    """The ready groups past ``demand.after`` by cursor, at most 1,000."""


# --- mismatch of log-probs ----------------------------------------------------------------------------------------


class MismatchBody(Body):
    """How far a trainer's log-probs are from the served ones, over the batch of one update."""

    version: Version = Field(examples=[8])
    """Version of the policy that learns from the batch. A later report of the same version replaces the earlier one."""
    mismatch: BatchMismatch

    @field_validator("mismatch")
    @classmethod
    def _positions_are_known(cls, mismatch: BatchMismatch) -> BatchMismatch:
        if unknown := mismatch.by_position.keys() - {*get_args(MismatchPosition)}:
            raise ValueError(f"no position is called {min(unknown)[:80]}")
        return mismatch


class MismatchReport(Record):
    """A trainer's report of the batch of one update."""

    run_id: str = Field(examples=["step-7"])
    version: int = Field(examples=[8])
    """Version of the policy that learned from the batch."""
    reported_at: float = Field(examples=[1760000000.0])
    """Unix seconds."""
    mismatch: BatchMismatch


class MismatchHistory(Record):
    """Reports of a run since the service started: the latest versions."""

    reports: tuple[MismatchReport, ...]
    """In the order in which they came."""


# --- policy and engines -------------------------------------------------------------------------------------------


class PolicyUpdateBody(Body):
    """A report that the engines have new weights and answer again."""

    version: Version = Field(examples=[8])
    """Policy version of the new weights, above the current one."""
    pool: PoolName = "policy"
    """Pool of the engines; ``/v1/status`` lists the names."""
    reference: Annotated[list[Annotated[float, Field(allow_inf_nan=False)]], Field(max_length=65_536)] | None = None
    """The trainer's own log-probs of all ``probe_ids`` (``GET /v1/policy``) but the first, to detect stale weights."""
    caches_dropped: bool = False
    """Whether loading the weights dropped the prefix caches."""
    require_pause: bool = Field(default=False, examples=[True])
    """Refuse the update (409) when the pool is not paused any more, because calls may have run while weights changed:
    the pause has expired, or the service was restarted."""
    engines: Annotated[list[Url], Field(min_length=1, max_length=MAX_ENGINES)] | None = Field(
        default=None, examples=[["http://10.0.0.1:8000/v1", "http://10.0.0.3:8000/v1"]]
    )
    """The full list of engines from now on: new ones are registered, missing ones drained and deregistered."""


class PolicyUpdateResponse(Record):
    """Result of a policy update."""

    version: int = Field(examples=[8])
    serving: tuple[str, ...] = Field(examples=[["policy-0", "policy-2"]])
    quarantined: dict[str, str]
    """Engines that do not serve the version, with the reasons."""
    unverified: tuple[str, ...]
    """Engines that serve it unchecked: they cannot report log-probs of a prompt."""
    draining: tuple[str, ...] = Field(examples=[["policy-1"]])
    """Engines that are no longer listed and finish their last calls."""


class PauseBody(Body):
    """How to pause."""

    mode: PauseMode = Field(default="abort", examples=["abort"])
    """Running calls are cut short (their rollouts continue from the same tokens), waited for, or left to
    engines that continue them across a change of weights."""
    pool: PoolName = "policy"
    """Pool of engines to pause."""
    expire_seconds: Seconds | None = Field(default=DEFAULT_EXPIRE_SECONDS, examples=[600])
    """The pause ends by itself this long after this call, or after the last update in it: longer than loading takes.
    Null: never. Another pause restarts the time."""


class ResumeBody(Body):
    """Which pool to resume."""

    pool: PoolName = "policy"
    """Pool of engines to resume."""


class PauseResponse(Record):
    """Whether the pool is now paused."""

    pool: str = Field(examples=["policy"])
    paused: bool = Field(examples=[True])
    expires_at: float | None = Field(default=None, examples=[1760000600.0])
    """When the pause ends by itself, in Unix seconds; null: never."""


class EngineBody(Body):
    """An engine to register."""

    url: Url = Field(examples=["http://10.0.0.3:8000/v1"])
    """Base URL of the engine. It must be one of ``inference.engines`` or match a pattern of ``http.engine_urls``."""
    pool: PoolName = "policy"
    """Pool in which to register it."""


class EngineRegistration(Record):
    """An engine that was registered, or that is drained and deregistered."""

    name: str = Field(examples=["policy-2"])
    url: str | None = Field(examples=["http://10.0.0.3:8000/v1"])
    draining: bool


class EngineStatus(Record):
    """One engine of a pool. Counts are since it was registered."""

    name: str = Field(examples=["policy-0"])
    url: str | None = Field(examples=["http://10.0.0.1:8000/v1"])
    """``null`` if the service was not built from a configuration."""
    serves: bool = Field(examples=[True])
    """Whether it accepts calls."""
    unhealthy_reason: str
    """Empty while it is healthy."""
    unhealthy_since: float | None = None
    """Unix seconds at which it was taken out of service; null while it is healthy."""
    quarantine: str
    """Why it may not serve this policy version; empty if it may."""
    draining: bool
    version: int = Field(examples=[7])
    """Policy version of the tokens it samples."""
    in_flight: int = Field(examples=[12])
    calls: int = Field(examples=[3400])
    failures: int
    sampled_tokens: int = Field(examples=[812000])
    hit_rate: float | None = Field(examples=[0.91])
    """Share of prompt tokens found in its prefix cache, if it reports that."""
    load: EngineLoad | None
    """Its own metrics, as last read."""


class AdmissionStatus(Record):
    """Admission of rollouts to the engines of a pool."""

    budget: float | None = Field(examples=[380000.0])
    """Budget of admitted rollouts, in KV tokens (in rollouts if ``in_tokens`` is false); ``null``: unbounded."""
    in_tokens: bool = Field(examples=[True])
    filled: int = Field(examples=[150000])
    live: int = Field(examples=[40])
    waiting: int


class PoolStatus(Record):
    """One pool of engines with the same weights."""

    name: str = Field(examples=["policy"])
    version: int = Field(examples=[7])
    """Policy version of tokens sampled from now on."""
    paused: bool
    pause_expires_at: float | None = None
    """When its pause ends by itself, in Unix seconds; null if it is not paused, or never does."""
    failovers: int
    """Calls retried on another engine."""
    unavailable_reason: str = ""
    """Why no engine could serve a call even if all were healthy (there is none, or none has the model); else empty."""
    waiting_rollouts: int = 0
    """Rollouts that wait for such an engine."""
    admission: AdmissionStatus
    engines: tuple[EngineStatus, ...]


class PolicyStatus(Record):
    """The policy and the engines that serve it."""

    pool: PoolStatus
    probe_ids: tuple[int, ...] = Field(examples=[[17, 4242, 99]])
    """Tokens of the weight check: a trainer may send its log-probs of all but the first as ``reference``."""

    @property
    def version(self) -> int:
        return self.pool.version

    @property
    def paused(self) -> bool:
        return self.pool.paused

    @property
    def engines(self) -> tuple[EngineStatus, ...]:
        return self.pool.engines


# --- the service --------------------------------------------------------------------------------------------------


class DispatchResponse(Record):
    """Whether rollouts are now held."""

    held: bool


class Capacity(Record):
    """Rollouts of a runner by stage, and how many more it would accept."""

    queued: int = Field(examples=[3])
    init: int = Field(examples=[4])
    run: int = Field(examples=[56])
    eval: int = Field(examples=[1])
    parked: int = 0
    """Parked agents, which hold no slot."""
    free: int = Field(examples=[12])
    """Rollouts it would accept now."""


@dataclass(frozen=True, slots=True)
class LedgerStatus:
    """Rollouts in the ledger, by state, and its size."""

    bytes: Annotated[int, Field(examples=[81920000])]
    """Size on the disk; 0 for a ledger in memory."""
    pending: Annotated[int, Field(examples=[184])]
    kept: Annotated[int, Field(examples=[3960])]
    """Finished rollouts with their records."""
    released: Annotated[int, Field(examples=[40])]
    """Finished rollouts of which only the ``RolloutSummary`` is left."""
    full: bool
    """Whether the disk budget is used up: submissions are refused until records are acknowledged or expire."""


class OutcomeCount(Record):
    """Number of rollouts with the same outcome since the start."""

    environment: str = Field(examples=["math"])
    """Empty for environments that this service does not have."""
    status: Status
    cause: Annotated[str, Field(json_schema_extra={"enum": ["", *Cause]})]
    """Cause of the failure; empty unless failed."""
    detail: Detail
    """Kind of the failure, limit, or reason of the cancel."""
    count: int = Field(examples=[3990])


class RewardMean(Record):
    """Rewards of an environment since the start."""

    environment: str = Field(examples=["math"])
    count: int = Field(examples=[3990])
    mean: float = Field(examples=[0.42])


class DispatchStatus(Record):
    """Queued, running and finished rollouts."""

    ready: bool = Field(examples=[True])
    problem: str = ""
    """Why the service is not ready or nothing is sampled, its cause and what to do; empty if all is well."""
    queued: int = Field(examples=[120])
    """Rollouts in the ledger's queue, or between attempts."""
    running: int = Field(examples=[64])
    """Rollouts in the runner, or whose record is being written."""
    finished: int = Field(examples=[4000])
    """Terminal records written since the start."""
    places: dict[PendingPlace, int] = Field(default_factory=dict[PendingPlace, int])
    """Rollouts without a record, by where they are; places without one are left out."""
    paused: bool = False
    """Whether rollouts are held (``POST /v1/hold``); the service is still ready."""
    capacity: Capacity


class NodeStatus(Record):
    """A joined node."""

    name: str
    slots: int
    """Most running attempts that are not parked."""
    in_hand: int
    """Running attempts, parked ones included."""
    parked: int
    calls: int
    """Model calls that are placed or wait for it."""
    draining: bool
    """It takes no more attempts."""
    silent_seconds: float
    """Since its last request. Its attempts are lost after ``nodes.lease_seconds``."""


class NodesStatus(Record):
    """The nodes of a service."""

    joined: int
    """Since the start; a node that joins again counts again."""
    lost: int
    """Nodes whose lease expired or that left with running attempts, since the start."""
    nodes: tuple[NodeStatus, ...]


class ServiceStatus(DispatchStatus):
    """State of the whole service."""

    version: str = Field(examples=["0.1.0"])
    """Release of the service."""
    uptime_seconds: float = Field(examples=[3600.0])
    pools: tuple[PoolStatus, ...]
    ended: tuple[OutcomeCount, ...]
    rewards: tuple[RewardMean, ...]
    sampled_tokens: int = Field(examples=[812000])
    """Tokens sampled since the start, in all records."""
    wasted_tokens: int = Field(examples=[900])
    """Tokens sampled since the start, in records without a reward."""
    mismatches: tuple[MismatchReport, ...] = ()
    """The latest report of each run whose trainer reports one; the newest is the last."""
    sandboxes: int | None = Field(examples=[60])
    """Live sandboxes; ``null`` if the backend does not report them, or the service has nodes."""
    nodes: NodesStatus | None = Field(default=None, examples=[None])
    """``null`` if the service runs attempts itself."""
    ledger: LedgerStatus
    event_loop_lag_seconds: float | None = Field(examples=[0.004])
    """Longest delay of the event loop in the last minute; ``null`` before the first measurement."""


class HistoryResponse(Record):
    """Figures over time, by column: the n-th number of each column was measured at the n-th time."""

    interval_seconds: float = Field(examples=[5.0])
    times: list[float] = Field(examples=[[1760000000.0, 1760000005.0]])
    """Unix seconds."""
    columns: dict[str, list[float | None]] = Field(examples=[{"queued": [120, 118], "mean_reward": [None, 0.4]}])
    """Columns by name; ``docs/api.md`` lists them. ``null`` if there was nothing to measure."""


class LivenessResponse(Record):
    """The event loop runs."""

    live: Literal[True] = Field(default=True, examples=[True])


class ReadinessResponse(Record):
    """Whether the service is ready. ``/v1/status``, which needs the token, has the reason."""

    ready: bool = Field(examples=[True])
    problem: str = ""
    """That no engine serves or that the policy is paused, if it is so. The cause is in ``/v1/status``."""
