"""Typed records: what goes into the service, what comes out, what the ledger keeps.

Typed pydantic models, importable with only pydantic installed. The schema has a version, and readers refuse a newer
one. What is sent to the service is strict: a misspelt field of a request is an error. What the service writes is read
with tolerance: fields that a later release added are ignored, so that a client need not be upgraded with its service.
A trajectory is a list of ``Segment``; each is a flat block of equal-length lists, which is what every trainer can
use. One segment is the normal case; a history that had to change opens a new one and never edits an old one.
"""

import math
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, model_validator

from prorl_gym.errors import CancelReason, Cause, Evidence, FailureKind, Limit, cause_of
from prorl_gym.settings import ResolvedSettings, RolloutSettings

SCHEMA_VERSION = 1
"""Version of every record here. It rises when a field changes meaning or disappears, or a closed list of words (an
outcome's status, a failure's kind) gets a new one; not when a field is added: readers ignore those they do not know."""

NOT_SAMPLED = -1
"""Policy version of a token that no policy sampled (prompts, observations, template text)."""

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}$")]


class Record(BaseModel):
    """Base of the records: values cannot be changed afterwards, fields of a later release are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True, ser_json_inf_nan="null")


def new_id() -> str:
    """Return a fresh rollout id."""
    return uuid4().hex


class RolloutRequest(Record):
    """One rollout to make. Submitting the same id with the same body again is harmless; another body is refused.

    Unknown fields are refused: a misspelt one would silently make another rollout than was asked for.
    """

    model_config = ConfigDict(extra="forbid")

    rollout_id: Identifier = Field(default_factory=new_id)
    run_id: Identifier = "default"
    """The training or evaluation run this belongs to: the unit of cancel, demand and streaming."""
    group_id: Identifier | None = None
    """Rollouts of one prompt share it (GRPO group). ``None``: not grouped."""
    group_size: Annotated[int, Field(ge=1)] = 1
    """How many replicas the group has."""
    replica: Annotated[int, Field(ge=0)] = 0
    """Position in the group, from 0; part of the seed, never of the prompt."""
    environment: str
    """Name of the environment, for example ``math``."""
    task: dict[str, Any]
    """The dataset row as the environment reads it."""
    settings: RolloutSettings = RolloutSettings()
    """Sampling and limits; these win over the environment's, the run's and the service's."""
    evaluation: bool = False
    """Evaluation traffic overtakes training traffic and is exempt from staleness bounds."""
    inference_url: str | None = None
    """Engine to use for this rollout only, for trainers that own the gateway; must be on the service's allow-list."""
    metadata: dict[str, str] = {}
    """Returned unchanged."""
    stands_in_for: Identifier | None = None
    """Rollout of the same group and replica that this one was made for by the service (see ``prorl_gym.demand``)."""

    @model_validator(mode="after")
    def _replica_in_group(self) -> "RolloutRequest":
        if self.replica >= self.group_size:
            raise ValueError(f"replica {self.replica} does not fit group_size {self.group_size}")
        return self


class Outcome(Record):
    """How a rollout ended. See ``prorl_gym.errors`` for the doctrine."""

    status: Literal["completed", "truncated", "failed", "cancelled"]
    limit: Limit | None = None
    """Of a truncated one."""
    kind: FailureKind | None = None
    """Of a failed one."""
    reason: CancelReason | None = None
    """Of a cancelled one."""
    stage: Literal["queue", "init", "run", "eval"] | None = None
    """Where a failure or a cancel struck."""
    message: str = ""
    """For people: at most two lines, no secrets, no traceback."""
    evidence: Evidence | None = None
    """What is known about why a sandbox failed, where that decides about the cause."""

    @property
    def cause(self) -> Cause | None:
        """Who can have caused a failure; ``None`` when it did not fail."""
        return None if self.kind is None else cause_of(self.kind)

    @model_validator(mode="after")
    def _detail_matches_status(self) -> "Outcome":
        wanted = {"truncated": "limit", "failed": "kind", "cancelled": "reason"}.get(self.status)
        for name in ("limit", "kind", "reason"):
            if (getattr(self, name) is not None) != (name == wanted):
                raise ValueError(f"status {self.status!r} and {name}={getattr(self, name)!r} do not agree")
        return self

    @property
    def may_have_reward(self) -> bool:
        """Whether a number measured on this rollout says something about the policy."""
        if self.status == "failed":
            return self.cause is Cause.POLICY
        return self.status in ("completed", "truncated")


class Score(Record):
    """The verdict of an environment."""

    reward: Annotated[float, Field(allow_inf_nan=False)]
    components: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    """Named parts; when there are any they add up to the reward."""
    detail: dict[str, str | int | float | bool | None] = {}
    """Small facts for people (expected form, failed test, ...). Never gold answers or hidden tests."""

    @model_validator(mode="after")
    def _components_add_up(self) -> "Score":
        if self.components and not math.isclose(sum(self.components.values()), self.reward, abs_tol=1e-6):
            raise ValueError(f"components add up to {sum(self.components.values())}, the reward is {self.reward}")
        return self


class Generation(Record):
    """One model call inside a segment: ``token_ids[start:end]`` was sampled given ``token_ids[:start]``."""

    start: Annotated[int, Field(ge=0)]
    end: Annotated[int, Field(ge=0)]
    turn: Annotated[int, Field(ge=0)]
    finish_reason: Literal["stop", "length", "abort"]
    engine: str
    """Name of the engine; not its address."""
    seconds: float
    cached_tokens: int | None = None
    """Prompt tokens that the engine found in its prefix cache, when it tells."""
    seed: int | None = None
    routed_experts: Any = None
    """Which experts of a mixture each token met, in the engine's own JSON; for router replay."""


class Segment(Record):
    """A flat block of tokens, in the order in which the engine saw them. All four lists have the same length."""

    token_ids: list[Annotated[int, Field(ge=0)]]
    mask: list[Literal[0, 1]]
    """1 = sampled by the policy (may carry loss), 0 = prompt, observation or template text."""
    logprobs: list[Annotated[float, Field(allow_inf_nan=False)]]
    """Natural-log probability of each sampled token, as the engine gave it; 0.0 where ``mask`` is 0."""
    policy_versions: list[int]
    """Version of the policy that sampled the token, ``NOT_SAMPLED`` where ``mask`` is 0."""
    generations: list[Generation] = []
    temperature: float
    top_p: float
    top_k: int
    logprob_kind: Literal["raw", "processed"]
    """``raw``: before temperature, top-p and top-k; ``processed``: the distribution that was really sampled from."""

    @model_validator(mode="after")
    def _consistent(self) -> "Segment":
        length = len(self.token_ids)
        if not len(self.mask) == len(self.logprobs) == len(self.policy_versions) == length:
            raise ValueError("token_ids, mask, logprobs and policy_versions must have the same length")
        # Tens of thousands of tokens pass here several times. The quickest form: equal small ints are the same object.
        if [0 if version == NOT_SAMPLED else 1 for version in self.policy_versions] != self.mask:
            raise ValueError("a token has a policy version exactly when it was sampled")
        position = 0
        for generation in self.generations:
            if not position <= generation.start <= generation.end <= length:
                raise ValueError("generations must lie inside the segment, in order")
            position = generation.end
        return self


class ToolCall(Record):
    """A call the model asked for. ``arguments`` is the JSON text that was parsed out of the sampled text."""

    id: str
    name: str
    arguments: str


class Message(Record):
    """One message of the conversation, as people and SFT exports read it. The tokens in the segments are the truth."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    """Of a tool message: the tool."""


class StageTime(Record):
    """Seconds that one stage took, with the wait before it counted apart."""

    queued: float = 0.0
    seconds: float = 0.0


class Retry(Record):
    """An attempt that ended in an infrastructure failure and was made again."""

    attempt: int
    kind: FailureKind
    stage: str
    message: str
    sampled_tokens: int = 0
    """Tokens that the policy sampled in it; they are not kept."""
    seconds: float = 0.0
    """That its stages took."""
    evidence: Evidence | None = None
    """What is known about why a sandbox failed, where that decides about the cause."""


class Rollout(Record):
    """The terminal record of one rollout: exactly one per accepted id."""

    schema_version: int = SCHEMA_VERSION
    rollout_id: Identifier
    attempt: Annotated[int, Field(ge=0)] = 0
    """Number of the attempt this record describes, from 0."""
    run_id: Identifier
    group_id: Identifier | None
    group_size: int
    replica: int
    environment: str
    evaluation: bool = False
    metadata: dict[str, str] = {}
    stands_in_for: Identifier | None = None
    """Of a rollout that the service made in another one's place: that one."""
    outcome: Outcome
    score: Score | None = None
    segments: list[Segment] = []
    messages: list[Message] = []
    prompt_messages: Annotated[int, Field(ge=0)] = 0
    """How many of ``messages``, from the first, are the first prompt: an assistant message among them (a few-shot
    example) was not sampled. 0: not known, as in records of earlier releases."""
    tools: list[dict[str, Any]] = []
    """What the agent could call, in the form that chat templates take (OpenAI's ``function``)."""
    settings: ResolvedSettings | None = None
    """What was in force; ``None`` when the rollout ended before they could be resolved."""
    stages: dict[Literal["init", "run", "eval"], StageTime] = {}
    retries: list[Retry] = []
    cancel_seconds: float | None = None
    """Of one that was cancelled in hand: from the cancel until its engine call and its sandboxes were closed."""
    accepted_at: float
    """Unix seconds."""
    finished_at: float

    @property
    def reward(self) -> float | None:
        """The reward, or ``None`` when there is none to learn from."""
        return None if self.score is None else self.score.reward

    @property
    def masked(self) -> bool:
        """Whether nobody is to learn from it: it has no reward, or a limit cut it short that was chosen to mask."""
        overlong = self.settings.mask_overlong if self.settings is not None else ()
        return self.score is None or self.outcome.limit in overlong

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest policy that sampled a token of it; ``None`` when none was sampled."""
        found = set[int]().union(*(segment.policy_versions for segment in self.segments))
        return min(found - {NOT_SAMPLED}, default=None)

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the policy sampled."""
        return sum(sum(segment.mask) for segment in self.segments)

    @property
    def worked_seconds(self) -> float:
        """Seconds that its stages took, waits not counted."""
        return sum(stage.seconds for stage in self.stages.values())

    @property
    def turns(self) -> int:
        """How many model calls were made."""
        return sum(len(segment.generations) for segment in self.segments)

    @model_validator(mode="after")
    def _known_and_honest(self) -> "Rollout":
        if self.schema_version > SCHEMA_VERSION:
            raise ValueError(f"record schema {self.schema_version} is newer than {SCHEMA_VERSION}: upgrade prorl-gym")
        if self.score is not None and not self.outcome.may_have_reward:
            raise ValueError(f"a rollout that ended as {self.outcome.status}/{self.outcome.kind} cannot have a reward")
        return self
