"""The bodies and answers of the routes: what the OpenAPI document describes, field by field.

Bodies are strict (a misspelt field is an error) and bounded in every string and list. Answers only grow: readers ignore
fields that they do not know.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from prorl_gym.inference.protocol import EngineLoad
from prorl_gym.records import Identifier, Record, Rollout, RolloutRequest
from prorl_gym.rollout.protocol import Accepted, LedgerUsage, Member
from prorl_gym.rollout.service import ServiceStatus

MAX_CURSOR = 2**63 - 1
"""The ledger's integers end there; a larger one would break the stream after its 200."""

MAX_VERSION = 10**15 - 1
"""Policy versions that engines may tell end there too."""

MAX_BATCH = 4096
"""Rollouts in one submission."""

MAX_NAMES = 10_000
"""Names in one cancel."""

MAX_ENGINES = 4096

Names = Annotated[list[Identifier], Field(max_length=MAX_NAMES)]
Url = Annotated[str, Field(min_length=1, max_length=2048)]
Version = Annotated[int, Field(ge=0, le=MAX_VERSION)]
Cursor = Annotated[int, Field(ge=0, le=MAX_CURSOR)]


class Body(BaseModel):
    """Base of the bodies."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Submission(RolloutRequest):
    """One rollout to make, as it may come over the wire: what the record leaves open is bounded here."""

    group_size: Annotated[int, Field(ge=1, le=65_536)] = 1
    """How many replicas the group has."""
    environment: Annotated[str, Field(min_length=1, max_length=128)]
    """Name of the environment, for example ``math``."""
    inference_url: Url | None = None
    """Engine to use for this rollout only, for trainers that own the gateway; must be on the service's allow-list."""
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=128)], Annotated[str, Field(max_length=4096)]], Field(max_length=64)
    ] = Field(default_factory=dict[str, str])
    """Returned unchanged."""


class CancelBody(Body):
    """What to cancel. ``runs`` and ``groups`` together mean these groups of these runs: runs may name groups alike."""

    rollouts: Names = []
    groups: Names = []
    runs: Names = []


class AckBody(Body):
    """Which records were received."""

    run: Identifier | None = None
    """Of this run only; of all when it is left out."""
    cursor: Cursor
    """That of the last record received."""


class PolicyBody(Body):
    """The engines have new weights and answer again."""

    version: Version
    """Of the policy, above the one before."""
    pool: Annotated[str, Field(max_length=64)] = "policy"
    """Which pool of engines; see ``/v1/status`` for their names."""
    reference: Annotated[list[Annotated[float, Field(allow_inf_nan=False)]], Field(max_length=65_536)] | None = None
    """The trainer's own log-probs of ``probe_ids`` (``GET /v1/policy``) but the first: proof against stale weights."""
    caches_dropped: bool = False
    """Whoever loaded the weights has dropped the prefix caches."""
    engines: Annotated[list[Url], Field(min_length=1, max_length=MAX_ENGINES)] | None = None
    """The full list of engines from now on: new ones join, missing ones get no more calls and leave."""


class PauseBody(Body):
    """How to pause."""

    mode: Literal["abort", "drain", "keep"] = "abort"
    """What becomes of the calls on their way: cut short (their rollouts go on from the same tokens), waited for, or
    left to engines that go on with them across a change of weights."""
    pool: Annotated[str, Field(max_length=64)] = "policy"
    """Which pool of engines."""


class ResumeBody(Body):
    """Which pool goes on."""

    pool: Annotated[str, Field(max_length=64)] = "policy"
    """Which pool of engines."""


class EngineBody(Body):
    """An engine that joins."""

    url: Url
    """Its base URL. It must be one of ``inference.engines`` or fit a pattern of ``http.engine_urls``."""
    pool: Annotated[str, Field(max_length=64)] = "policy"
    """Which pool of engines."""


class ErrorText(Record):
    """What is wrong, and what to do about it."""

    what: str
    fix: str


class ErrorAnswer(Record):
    """The one form of every error."""

    error: ErrorText


class AcceptedAnswer(Record):
    """In the order of the submission. The answer means: it is on the disk."""

    accepted: list[Accepted]


class ResultAnswer(Record):
    """A terminal record, or null while there is none."""

    rollout: Rollout | None


class RequestAnswer(Record):
    """What was accepted."""

    request: RolloutRequest


class StreamLine(Record):
    """One line of the stream. An empty line says only that the service is alive."""

    cursor: Cursor
    stale: bool = False
    """Its group is further behind the policy than the run's demand allows, when this line is sent."""
    damaged: bool = False
    """The stored record is damaged: ``rollout`` is a stand-in that says who it was and ``failed(internal)``."""
    rollout: Rollout


class ListAnswer(Record):
    """Finished rollouts without their tokens, newest first."""

    rollouts: list[Member]
    before: Cursor | None
    """Pass it on for the next page; null on the last one."""


class CancelAnswer(Record):
    """The ids that this stopped. Each still gets its record."""

    cancelled: list[str]


class AckAnswer(Record):
    """How many records need not be kept any more because of this."""

    released: int


class EngineState(Record):
    """One engine of a pool. Counts are since it joined."""

    name: str
    url: str | None
    """``null`` where the service was not built from a configuration."""
    serves: bool
    """Whether it takes calls."""
    trouble: str
    """Why it is not well; empty while it is."""
    quarantine: str
    """Why it must not serve this policy version; empty while it may."""
    draining: bool
    version: int
    in_flight: int
    calls: int
    failures: int
    sampled_tokens: int
    hit_rate: float | None
    """Share of prompt tokens found in its prefix cache, as far as it tells."""
    load: EngineLoad | None
    """Its own figures at the last look."""


class AdmissionState(Record):
    """How many rollouts talk to the engines of a pool at once."""

    budget: float | None
    """What live rollouts may fill, in KV tokens (in rollouts when ``in_tokens`` is false); ``null``: unbounded."""
    in_tokens: bool
    filled: int
    live: int
    waiting: int


class PoolState(Record):
    """One pool of engines with the same weights."""

    name: str
    version: int
    """Of tokens sampled from now on."""
    paused: bool
    failovers: int
    """Calls made again on another engine."""
    admission: AdmissionState
    engines: list[EngineState]


class PolicyAnswer(Record):
    """What serves the policy."""

    pool: PoolState
    probe_ids: list[int]
    """Tokens for whose log-probs (all but the first) a trainer may give its reference."""


class UpdateAnswer(Record):
    """What became of an update."""

    version: int
    serving: list[str]
    quarantined: dict[str, str]
    """Engines that do not serve it, and why."""
    unproven: list[str]
    """Engines that serve it on trust: they cannot tell log-probs of a prompt."""
    leaving: list[str]
    """Engines that are not on the list any more and finish their last calls."""


class PausedAnswer(Record):
    """Whether the pool is paused now."""

    pool: str
    paused: bool


class HeldAnswer(Record):
    """Whether nothing new is begun now."""

    held: bool


class EngineAnswer(Record):
    """The engine, and what it is doing."""

    name: str
    url: str | None
    draining: bool


class Ended(Record):
    """How many rollouts ended in one way since the start."""

    environment: str
    """Empty for environments that this service does not know."""
    status: str
    cause: str
    """Of failed ones: who can have caused it."""
    detail: str
    """Kind of the failure, limit, or reason of the cancel."""
    count: int


class Rewarded(Record):
    """Rewards of an environment since the start."""

    environment: str
    count: int
    mean: float


class StatusAnswer(ServiceStatus):
    """What is going on."""

    version: str
    """Of the service's package."""
    uptime_seconds: float
    pools: list[PoolState]
    ended: list[Ended]
    rewards: list[Rewarded]
    sampled_tokens: int
    """Since the start, in all records."""
    wasted_tokens: int
    """Of these, in records without a reward."""
    sandboxes: int | None
    """Alive now; ``null`` where the backend does not tell."""
    ledger: LedgerUsage
    event_loop_lag_seconds: float | None
    """The longest of the last minute; ``null`` while nobody measures."""


class HistoryAnswer(Record):
    """Figures over time, column by column: the n-th number of each column was taken at the n-th time."""

    interval_seconds: float
    times: list[float]
    """Unix seconds."""
    columns: dict[str, list[float | None]]
    """By name; ``docs/api.md`` lists them. ``null`` where there was nothing to measure."""


class LiveAnswer(Record):
    """The event loop turns."""

    live: Literal[True] = True


class ReadyAnswer(Record):
    """Whether work is taken. The reason is on ``/v1/status``, behind the token."""

    ready: bool
