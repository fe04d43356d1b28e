"""What the service answers, typed. Fields that a later release added are ignored; those it left out have defaults."""

from dataclasses import dataclass
from typing import Literal

from pydantic import ConfigDict, Field, field_validator

from prorl_gym.demand import Demand, EarlyStop, Redundant
from prorl_gym.errors import Cause
from prorl_gym.records import Record, Rollout, RolloutRequest


@dataclass(frozen=True, slots=True)
class Submission:
    """What became of one submitted rollout."""

    rollout_id: str
    duplicate: bool
    """The same body had been accepted before."""


class Delivered(Record):
    """A terminal record and its place in the stream."""

    cursor: int
    """Rises with every record; a stream goes on after it."""
    rollout: Rollout
    stale: bool = False
    """Its group is further behind the current policy than the run's demand allows."""
    damaged: bool = False
    """The record is damaged on the service's disk; ``rollout`` is a stand-in that says who it was."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """A record that was left out, since it is damaged."""

    cursor: int
    rollout_id: str
    """Empty where it cannot be read."""


@dataclass(frozen=True, slots=True)
class Group:
    """A complete group: every replica that was asked for has ended, and none was cancelled."""

    group_id: str | None
    """``None``: a rollout without a group is one by itself."""
    rollouts: tuple[Rollout, ...]
    """One for each replica, in their order; a stand-in has the place of the one that it was made for."""
    cursor: int
    """Of the record that made it complete: what ``Demand.after`` wants to know."""
    resume: int
    """Cursor up to which every record belongs to a group that is over: ``groups_of`` may go on after it."""
    stale: bool = False
    """One of its records is."""

    @property
    def rewards(self) -> list[float]:
        """The rewards that somebody may learn from."""
        return [one.reward for one in self.rollouts if one.reward is not None and not one.masked]


class Listed(Record):
    """A finished rollout without its record, as lists show it."""

    cursor: int
    rollout_id: str
    run_id: str
    group_id: str | None = None
    group_size: int = 1
    replica: int = 0
    environment: str = ""
    evaluation: bool = False
    stands_in_for: str | None = None
    status: str
    detail: str = ""
    """The outcome's kind, limit or reason; empty for a completed one."""
    cause: Cause | None = None
    reward: float | None = None
    masked: bool = False
    oldest_version: int | None = None
    turns: int = 0
    sampled_tokens: int = 0
    accepted_at: float = 0.0
    finished_at: float = 0.0
    released: bool = False
    """Its record is not kept any more."""


class Capacity(Record):
    """How much the service has in hand, by stage, and how much more it would take."""

    queued: int = 0
    init: int = 0
    run: int = 0
    eval: int = 0
    parked: int = 0
    free: int = 0


class EngineStatus(Record):
    """One engine. Counts are since it joined."""

    name: str
    url: str | None = None
    serves: bool = True
    """Whether it takes calls."""
    trouble: str = ""
    """Why it is not well; empty while it is."""
    quarantine: str = ""
    """Why it must not serve this policy version; empty while it may."""
    draining: bool = False
    version: int = 0
    """Of the policy that samples its tokens."""
    in_flight: int = 0
    calls: int = 0
    failures: int = 0
    sampled_tokens: int = 0
    hit_rate: float | None = None
    """Share of prompt tokens found in its cache, as far as it tells."""


class PoolStatus(Record):
    """The engines that serve one policy."""

    name: str
    version: int
    """Of tokens sampled from now on."""
    paused: bool = False
    engines: tuple[EngineStatus, ...] = ()


class PolicyStatus(Record):
    """The policy and the engines that serve it."""

    pool: PoolStatus
    probe_ids: tuple[int, ...] = ()
    """What a trainer computes its reference for: the log-prob of each of these ids but the first."""

    @property
    def version(self) -> int:
        """Of tokens sampled from now on."""
        return self.pool.version

    @property
    def paused(self) -> bool:
        """Whether no engine call may begin."""
        return self.pool.paused

    @property
    def engines(self) -> tuple[EngineStatus, ...]:
        """All that belong to it."""
        return self.pool.engines


class LedgerStatus(Record):
    """What the service keeps on its disk."""

    bytes: int = 0
    pending: int = 0
    kept: int = 0
    """Finished, with their record."""
    released: int = 0
    full: bool = False
    """Nothing more is accepted until records are acknowledged or expire."""


class Status(Record):
    """A look at the service. Sums are since it started."""

    ready: bool
    problem: str = ""
    """What keeps it from being ready."""
    queued: int
    """Waiting to be begun."""
    running: int
    finished: int
    capacity: Capacity = Capacity()
    pools: tuple[PoolStatus, ...] = ()
    sampled_tokens: int = 0
    wasted_tokens: int = 0
    """Of these, in records without a reward."""
    sandboxes: int | None = None
    """Alive now, where the backend tells."""
    ledger: LedgerStatus = LedgerStatus()


class Updated(Record):
    """What became of a policy update."""

    version: int
    serving: tuple[str, ...] = ()
    quarantined: dict[str, str] = Field(default_factory=dict[str, str])
    """Engines that do not serve it, and why."""
    unproven: tuple[str, ...] = ()
    """Engines that serve it on trust: they cannot tell log-probs of a prompt."""
    leaving: tuple[str, ...] = ()
    """Engines that were taken off the list and finish their last calls."""


class EngineAdded(Record):
    """An engine that joined, or that leaves once its calls have ended."""

    name: str
    url: str | None = None
    draining: bool = False


class ReadyGroup(Record):
    """A complete group whose rewards differ, and that the trainer has not used."""

    group_id: str
    cursor: int
    """Of the record that completed it."""
    oldest_version: int | None = None
    """Policy version of its oldest token."""
    stale: bool = False
    """It is older than the demand allows."""


class EarlyStopReport(Record):
    """How groups fared whose first rewards foretold the rest."""

    stopped: int = 0
    audited: int = 0
    """Such groups that ran to their end instead, to be counted."""
    audited_informative: int = 0
    """Those among them whose rewards differed after all."""
    rate: float | None = None
    low: float = 0.0
    high: float = 1.0
    """Ends of the rate's 95 % interval."""


class GroupsStatus(Record):
    """How the groups of a run stand. All are 0 while nobody wants anything of the run."""

    run_id: str = ""
    version: int = 0
    """Of the policy that is current for this run."""
    satisfied: bool = False
    """As many groups are ready as were wanted: the others are redundant."""
    wanted: int = 0
    ready: int = 0
    """Complete groups whose rewards differ, past ``Demand.after``, that are not stale."""
    ready_stale: int = 0
    begun: int = 0
    waiting: int = 0
    """Groups that may not begin yet, since ``max_staleness`` bounds how many do."""
    kept: int = 0
    """Groups that are not needed now and kept for a later demand."""
    held: int = 0
    """Rollouts that may not begin."""
    parked: int = 0
    states: dict[str, int] = Field(default_factory=dict[str, int])
    """Groups by state."""
    replaced: int = 0
    extras: int = 0
    wasted_tokens: int = 0
    """Sampled in rollouts that were cancelled as redundant or stale."""
    reclaimed_seconds: float = 0.0
    """Estimate of the working time that those cancels saved."""
    early_stop: EarlyStopReport | None = None
    ready_groups: tuple[ReadyGroup, ...] = ()


class _Redundant(Redundant):
    model_config = ConfigDict(extra="ignore")


class _EarlyStop(EarlyStop):
    model_config = ConfigDict(extra="ignore")


class StatedDemand(Demand):
    """A demand as the service tells it, which may know more fields than this release."""

    model_config = ConfigDict(extra="ignore")

    redundant: Redundant = _Redundant()
    early_stop: EarlyStop | None = None

    @field_validator("redundant", mode="before")
    @classmethod
    def _read_redundant(cls, value: object) -> Redundant:
        return _Redundant.model_validate(value)

    @field_validator("early_stop", mode="before")
    @classmethod
    def _read_early_stop(cls, value: object) -> EarlyStop | None:
        return None if value is None else _EarlyStop.model_validate(value)


PauseMode = Literal["abort", "drain", "keep"]
"""What becomes of the calls on their way: cut short, waited for, or left to the engine, which goes on with them."""


# --- the envelopes around these ---------------------------------------------------------------------------------


class Looked(Record):
    """Answer to one look for a record."""

    rollout: Rollout | None


class AcceptedOne(Record):
    """One line of an answer to a submission."""

    rollout_id: str
    duplicate: bool


class AcceptedAll(Record):
    """Answer to a submission."""

    accepted: tuple[AcceptedOne, ...]


class Cancelled(Record):
    """Answer to a cancel."""

    cancelled: tuple[str, ...]


class Released(Record):
    """Answer to an acknowledgement."""

    released: int = 0


class Rollouts(Record):
    """Answer to a list."""

    rollouts: tuple[Listed, ...]


class Asked(Record):
    """Answer to a look for a request."""

    request: RolloutRequest


class Anything(Record):
    """An answer of which nothing is read."""
