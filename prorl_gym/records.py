"""Typed records: what the service accepts, what it returns, what the ledger stores.

Pydantic models, importable with only pydantic installed. The schema has a version, and readers refuse a newer one.
Requests are strict: an unknown field is an error. Records are tolerant: fields that a later release added are ignored,
so that a client need not be upgraded with its service.
A trajectory is a list of ``Segment``; each is a flat block of equal-length lists, which every trainer can use. One
segment is the normal case; a history that has to change begins another segment and never edits an old one.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, get_args
from uuid import uuid4

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticSerializationError

from prorl_gym.errors import CancelReason, Cause, Evidence, FailureKind, Limit, TaskError, cause_of
from prorl_gym.settings import ResolvedSettings, RolloutSettings, TrainedSegments

SCHEMA_VERSION = 1
"""Version of every record here. It rises when a field changes meaning or disappears, or a closed list of words (an
outcome's status, a failure's kind) gets a new one; not when a field is added: readers ignore those they do not know."""

NOT_SAMPLED = -1
"""Policy version of a token that no policy sampled (prompts, observations, template text)."""

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}$")]


class Record(BaseModel):
    """Base of the records: frozen; fields of a later release are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True, ser_json_inf_nan="null")


def new_rollout_id() -> str:
    return uuid4().hex


class RolloutRequest(Record):
    """One rollout to run. Submitting the same id with the same body again is harmless; another body is refused.

    Unknown fields are refused: a misspelt one would silently run another rollout than intended.
    """

    model_config = ConfigDict(extra="forbid")

    rollout_id: Identifier = Field(default_factory=new_rollout_id, examples=["a7"])
    run_id: Identifier = Field(default="default", examples=["step-7"])
    """The training or evaluation run this belongs to: the unit of cancel, demand and streaming."""
    group_id: Identifier | None = Field(default=None, examples=["prompt-3"])
    """Rollouts of one prompt share it (GRPO group). ``None``: not grouped."""
    group_size: Annotated[int, Field(ge=1)] = 1
    """How many replicas the group has."""
    replica: Annotated[int, Field(ge=0)] = 0
    """Position in the group, from 0; part of the seed, never of the prompt."""
    environment: str = Field(examples=["math"])
    """Name of the environment, for example ``math``."""
    task: dict[str, Any] = Field(examples=[{"question": "What is 6 times 7?", "answer": "42"}])
    """The dataset row as the environment reads it."""
    settings: RolloutSettings = RolloutSettings()
    """Sampling and limits; these win over the environment's, the run's and the service's."""
    evaluation: bool = False
    """Evaluation runs before training and is exempt from staleness bounds."""
    inference_url: str | None = None
    """Engine to use for this rollout only, for trainers that own the gateway; must be on the service's allow-list."""
    metadata: dict[str, str] = {}
    """Returned unchanged."""
    row_source: Annotated[str, Field(max_length=1024)] = ""
    """Where the row is from, such as its file and line; returned in the record. Not part of the request's identity."""
    stands_in_for: Identifier | None = None
    """Rollout of the same group and replica that this one replaces; set by the service (see ``prorl_gym.demand``)."""

    def to_json(self, *, canonical: bool = False) -> str:
        """Return it as JSON in ASCII: a task may hold half a surrogate pair, which UTF-8 cannot carry.

        ``canonical`` sorts the keys and leaves out what is as by default, so that a field that a later release adds
        does not make another body of a request that does not use it. Raises ``TaskError`` (``BAD_ROW``).
        """
        try:
            fields = self.model_dump(exclude_defaults=canonical)
            return json.dumps(fields, sort_keys=canonical, separators=(",", ":"), allow_nan=False)
        except (ValueError, TypeError, RecursionError, PydanticSerializationError) as error:
            raise TaskError(
                FailureKind.BAD_ROW,
                f"rollout {self.rollout_id}: its task is not JSON ({error}).",
                "Use only objects, lists, text, booleans, null and finite numbers.",
            ) from None

    @model_validator(mode="after")
    def _replica_in_group(self) -> "RolloutRequest":
        if self.replica >= self.group_size:
            raise ValueError(f"replica {self.replica} does not fit group_size {self.group_size}")
        return self


def row_id_of(task: Mapping[str, Any]) -> str:
    """Return a name of a row: its own ``id`` or ``instance_id``, or a short hash of its content."""
    for name in ("id", "instance_id"):
        if isinstance(own := task.get(name), str | int) and str(own).strip():
            return bounded_text(str(own), 256)
    try:
        text = json.dumps(task, sort_keys=True, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError):  # a task of a request that was never accepted
        return ""
    return f"sha256:{hashlib.sha256(text.encode('ascii')).hexdigest()[:16]}"


OutcomeStatus = Literal["completed", "truncated", "failed", "cancelled"]
AttemptStage = Literal["queue", "init", "run", "eval"]


class Outcome(Record):
    """How a rollout ended. ``prorl_gym.errors`` says which failure leads to which outcome."""

    status: OutcomeStatus
    limit: Limit | None = None
    """Limit of a truncated one."""
    kind: FailureKind | None = None
    """Kind of a failed one."""
    reason: CancelReason | None = None
    """Reason of a cancelled one."""
    stage: AttemptStage | None = None
    """Stage in which it failed or was cancelled."""
    message: str = ""
    """For people: at most two lines, no secrets, no traceback."""
    evidence: Evidence | None = None
    """Observation about why a sandbox failed, where the cause depends on it."""

    @property
    def cause(self) -> Cause | None:
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
        """Whether a reward of this rollout would be a measurement of the policy."""
        if self.status == "failed":
            return self.cause is Cause.POLICY
        return self.status in ("completed", "truncated")


def bounded_text(text: str, limit: int = 16 << 10) -> str:
    """Return a text of at most ``limit`` bytes of UTF-8: head and tail, with a mark that counts what was cut.

    Half surrogate pairs, which UTF-8 cannot carry, are replaced; control characters stay.
    """
    if len(text) <= limit and len(data := text.encode("utf-8", "replace")) <= limit:
        return data.decode()
    kept = limit - 64  # room for the mark
    head_bytes, tail_bytes = kept - kept // 4, kept // 4
    head = text[:head_bytes].encode("utf-8", "replace")[:head_bytes].decode(errors="ignore")
    tail = text[-tail_bytes:].encode("utf-8", "replace")[-tail_bytes:].decode(errors="ignore")
    return f"{head}\n[... {len(text) - len(head) - len(tail)} characters cut ...]\n{tail}"


SubmissionKind = Literal["answer", "program", "patch", "files"]
_SUBMISSION_BYTES: dict[str, int] = {"program": 256 << 10, "patch": 1 << 20}
"""Longest text of a submission. Whatever ``code`` and ``swe`` grade is kept whole."""
_TEXT_BYTES = 64 << 10
"""Longest text of any other submission."""

GraderText = Annotated[str, AfterValidator(partial(bounded_text))]
"""A text of a grader for people, cut to 16 KiB."""
DetailText = Annotated[str, AfterValidator(partial(bounded_text, limit=1 << 20))]
"""A text among the facts of a score. Earlier releases kept patches there, of up to 1 MiB."""


class GradedSubmission(Record):
    """The agent's answer as the environment graded it. Untrusted: any character may stand in it.

    Bounded, with a mark in place of what was cut: 1 MiB for a patch, 256 KiB for a program, 64 KiB for anything else.
    """

    kind: Annotated[str, Field(json_schema_extra={"enum": [*get_args(SubmissionKind)]})] = "answer"
    """``files``: the state of the sandbox was graded, which is not kept; the text is the agent's last word on it."""
    text: str = Field(examples=["42"])
    """The answer as it was compared, without the text around its box; the source of the program; the patch without
    what is not graded."""

    @field_validator("text")
    @classmethod
    def _bound_text(cls, text: str, info: ValidationInfo) -> str:
        return bounded_text(text, _SUBMISSION_BYTES.get(info.data.get("kind", ""), _TEXT_BYTES))


class Score(Record):
    """The verdict of an environment. None of it reaches an agent."""

    reward: Annotated[float, Field(allow_inf_nan=False)] = Field(examples=[1.0])
    components: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    """Named parts; when there are any they add up to the reward."""
    detail: dict[str, DetailText | int | float | bool | None] = {}
    """Small facts for people (expected form, failed test, ...). Never gold answers or hidden tests. ``why``: why the
    reward is not 1."""
    expected: GraderText | None = None
    """The gold answer, one on each line where several are accepted; ``None`` where people may not see it."""
    report: GraderText = ""
    """The tests' report. For ``code`` and ``swe`` a line for each test, failures first: its outcome and its name,
    never what it checks. Of ``taskdir`` the verifier's output."""

    @model_validator(mode="after")
    def _components_add_up(self) -> "Score":
        if self.components and not math.isclose(sum(self.components.values()), self.reward, abs_tol=1e-6):
            raise ValueError(f"components add up to {sum(self.components.values())}, the reward is {self.reward}")
        return self


class Generation(Record):
    """One model call inside a segment: ``token_ids[start:end]`` was sampled given ``token_ids[:start]``."""

    start: Annotated[int, Field(ge=0)] = Field(examples=[2])
    end: Annotated[int, Field(ge=0)] = Field(examples=[4])
    turn: Annotated[int, Field(ge=0)]
    finish_reason: Literal["stop", "length", "abort"]
    engine: str = Field(examples=["policy-0"])
    """Name of the engine; not its address."""
    seconds: float = Field(examples=[0.4])
    cached_tokens: int | None = None
    """Prompt tokens that the engine found in its prefix cache; ``None``: not reported."""
    seed: int | None = None
    routed_experts: Any = None
    """Experts of each token of prompt and answer, in the engine's own JSON (``prorl_gym.routed_experts`` reads it)."""


BranchCause = Literal[
    "first",
    "edit",
    "retry",
    "cut_turn",
    "tools",
    "template",
    "summary",
    "side_call",
    "sub_agent",
    "conversation",
]
"""Why a segment began (docs/tokens.md has the rules)."""


class Segment(Record):
    """A flat block of tokens, in the order in which the engine saw them. All four lists have the same length.

    The segments of a rollout are a tree: a call that does not continue a segment at its end begins another one. What
    was sampled in the parent is context there, with mask 0, so every sampled token is trained on once.
    """

    token_ids: list[Annotated[int, Field(ge=0)]] = Field(examples=[[101, 102, 7, 8]])
    mask: list[Literal[0, 1]] = Field(examples=[[0, 0, 1, 1]])
    """1 = sampled by the policy (may carry loss), 0 = prompt, observation or template text."""
    logprobs: list[Annotated[float, Field(allow_inf_nan=False)]] = Field(examples=[[0.0, 0.0, -0.11, -0.02]])
    """Natural-log probability of each sampled token, as the engine gave it; 0.0 where ``mask`` is 0."""
    policy_versions: list[int] = Field(examples=[[NOT_SAMPLED, NOT_SAMPLED, 7, 7]])
    """Version of the policy that sampled the token, ``NOT_SAMPLED`` where ``mask`` is 0."""
    generations: list[Generation] = []
    temperature: float = Field(examples=[1.0])
    top_p: float = Field(examples=[1.0])
    top_k: int = Field(examples=[-1])
    logprob_kind: Literal["raw", "processed"]
    """``raw``: before temperature, top-p and top-k; ``processed``: of the distribution that was sampled from."""
    parent: Annotated[int, Field(ge=0)] | None = None
    """Index of the segment that it branches from."""
    shared_tokens: Annotated[int, Field(ge=0)] = 0
    """How many tokens, from the first, are those of the parent."""
    cause: BranchCause = "first"
    """Why it began."""
    rewrites: tuple[str, ...] = ()
    """The declared rewrites and normalisations under which a history counted as the same, or which its template needed
    (docs/tokens.md)."""
    trained: bool = True
    """Whether it may carry loss; ``Rollout.trained_segments`` says whether it does."""

    @property
    def prompt_length(self) -> int:
        """Tokens before the first one that the policy sampled."""
        return self.mask.index(1) if 1 in self.mask else len(self.mask)

    @model_validator(mode="after")
    def _lengths_agree(self) -> "Segment":
        length = len(self.token_ids)
        if not len(self.mask) == len(self.logprobs) == len(self.policy_versions) == length:
            raise ValueError("token_ids, mask, logprobs and policy_versions must have the same length")
        # Runs several times on tens of thousands of tokens. The quickest form: equal small ints are the same object.
        if [0 if version == NOT_SAMPLED else 1 for version in self.policy_versions] != self.mask:
            raise ValueError("a token has a policy version exactly when it was sampled")
        position = 0
        for generation in self.generations:
            if not position <= generation.start <= generation.end <= length:
                raise ValueError("generations must lie inside the segment, in order")
            position = generation.end
        if self.shared_tokens and (self.parent is None or any(self.mask[: self.shared_tokens])):
            raise ValueError("the tokens that a segment shares with its parent were sampled there")
        return self


def main_segment(segments: Sequence[Segment], policy: TrainedSegments) -> int | None:
    """Return the index of the segment in which the main agent sampled most, or under ``last`` of its last one.

    ``None`` where it sampled nothing.
    """
    own = [index for index, segment in enumerate(segments) if any(segment.mask) and _is_of_main_agent(segments, index)]
    if policy == "last":
        return own[-1] if own else None
    return max(own, key=lambda index: sum(segments[index].mask), default=None)


def _is_of_main_agent(segments: Sequence[Segment], index: int) -> bool:
    """Whether a segment is no side call, and neither it nor what it branches from is a sub-agent's."""
    at: int | None = index
    while at is not None and segments[at].cause != "sub_agent":
        at = segments[at].parent
    return at is None and segments[index].trained


class ToolCall(Record):
    """A tool call of the model. ``arguments`` is the JSON text that was parsed out of the sampled text."""

    id: str
    name: str
    arguments: str

    def to_chat(self) -> dict[str, Any]:
        """Return it as OpenAI's chat API spells it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Message(Record):
    """One message of the conversation, for people and SFT exports. The tokens in the segments are authoritative."""

    role: Literal["system", "user", "assistant", "tool"] = Field(examples=["user"])
    content: str = Field(examples=["What is 6 times 7?"])
    tool_calls: tuple[ToolCall, ...] = Field(default=(), examples=[()])
    tool_call_id: str | None = None
    name: str | None = None
    """Name of the tool, in a tool message."""

    def to_chat(self) -> dict[str, Any]:
        """Return it as OpenAI's chat API spells it. Arguments of calls travel as JSON text."""
        form: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            form["tool_calls"] = [call.to_chat() for call in self.tool_calls]
        if self.tool_call_id is not None:
            form["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            form["name"] = self.name
        return form


SUMMARY_REQUEST = Message(
    role="user",
    content=(
        "Your context is nearly full. Write a summary of your work so far, without calling a tool. You will go on "
        "with the task and this summary alone, so note all that you need: what you found and did, what is left to do, "
        "and exact names, paths and values."
    ),
)
"""Asks the policy to summarise its work (``RolloutSettings.compact_tokens``)."""

SUMMARY_CONTINUATION = Message(role="user", content="The work so far is in your summary above. Go on with the task.")
"""Follows the summary in the prompt of the segment that begins with it."""


class StageTime(Record):
    """Seconds of one stage, and, separately, of the wait before it."""

    queued: float = 0.0
    seconds: float = 0.0


class Retry(Record):
    """An attempt that ended in an infrastructure failure and was retried."""

    attempt: int
    kind: FailureKind
    stage: Annotated[str, Field(json_schema_extra={"enum": [*get_args(AttemptStage)]})]
    message: str
    sampled_tokens: int = 0
    """Tokens that the policy sampled in it. They are not kept, but for turns that a later attempt resumes after."""
    seconds: float = 0.0
    """Time in its stages."""
    evidence: Evidence | None = None
    """Observation about why a sandbox failed, where the cause depends on it."""


class Rollout(Record):
    """The terminal record of one rollout: exactly one per accepted id."""

    schema_version: int = SCHEMA_VERSION
    rollout_id: Identifier = Field(examples=["a7"])
    attempt: Annotated[int, Field(ge=0)] = 0
    """Number of the attempt this record describes, from 0."""
    run_id: Identifier = Field(examples=["step-7"])
    group_id: Identifier | None = Field(examples=["prompt-3"])
    group_size: int = Field(examples=[8])
    replica: int
    environment: str = Field(examples=["math"])
    evaluation: bool = False
    metadata: dict[str, str] = {}
    row_id: str = ""
    """The row's own id, or ``sha256:`` and 16 digits of the hash of its task; empty in records of earlier releases."""
    row_source: str = ""
    """``RolloutRequest.row_source``."""
    stands_in_for: Identifier | None = None
    """The rollout that this one replaces, if the service made it as a replacement."""
    outcome: Outcome
    score: Score | None = None
    submission: GradedSubmission | None = None
    """Graded, also where grading failed; ``None``: the rollout ended before."""
    segments: list[Segment] = []
    messages: list[Message] = []
    prompt_messages: Annotated[int, Field(ge=0)] = 0
    """How many of ``messages``, from the first, are the first prompt: an assistant message among them (a few-shot
    example) was not sampled. 0: not known, as in records of earlier releases."""
    tools: list[dict[str, Any]] = []
    """Tools that the agent could call, in the form that chat templates take (OpenAI's ``function``)."""
    settings: ResolvedSettings | None = Field(default=None, examples=[None])
    """The settings used; ``None`` when the rollout ended before they were resolved."""
    stages: dict[Literal["init", "run", "eval"], StageTime] = {}
    retries: list[Retry] = Field(default=[], examples=[[]])
    resumed_turns: Annotated[int, Field(ge=0)] = 0
    """Turns that earlier attempts sampled, after which this one went on (see ``RolloutSettings.resume``)."""
    resume_refused: str = ""
    """Why this attempt started from nothing although turns of an earlier one were logged."""
    agent_log: str = ""
    """End of what the agent's program printed, if ``settings.agent`` named one; for people."""
    cancel_seconds: float | None = None
    """From the cancel of a running rollout until its engine call and its sandboxes were closed."""
    accepted_at: float = Field(examples=[1760000000.0])
    """Unix seconds."""
    begun_at: float | None = None
    """When this attempt began, in Unix seconds: from here on ``stages`` counts the waits. Before it lie the dispatch
    queue and, after a retry, the earlier attempts. ``None``: it never began, or a record of an earlier release."""
    finished_at: float = Field(examples=[1760000000.6])

    @property
    def reward(self) -> float | None:
        """The reward; ``None`` without a score."""
        return None if self.score is None else self.score.reward

    @property
    def why(self) -> str:
        """Why the reward is not 1, or why there is none, in one line; empty where nothing tells."""
        reason = "" if self.score is None else str(self.score.detail.get("why") or "")
        if not reason and self.reward != 1.0:
            cut = f"cut short by the limit on {self.outcome.limit.value}" if self.outcome.limit is not None else ""
            reason = self.outcome.message or cut
        return " ".join(bounded_text(reason, 300).split())

    @property
    def git_patch(self) -> str | None:
        """The graded patch of a ``swe`` rollout; ``None`` where none could be taken."""
        if self.submission is not None and self.submission.kind == "patch":
            return self.submission.text
        found = None if self.score is None else self.score.detail.get("git_patch")  # as earlier releases kept it
        return found if isinstance(found, str) else None

    @property
    def masked(self) -> bool:
        """Whether to compute no loss on it: it has no reward, or a limit in ``settings.mask_overlong`` truncated it."""
        overlong = self.settings.mask_overlong if self.settings is not None else ()
        return self.score is None or self.outcome.limit in overlong

    @property
    def main_segment(self) -> int | None:
        """Index of the segment for shapes that take one. See the function."""
        return main_segment(self.segments, "all" if self.settings is None else self.settings.trained_segments)

    @property
    def trained_segments(self) -> tuple[int, ...]:
        """Indices of the segments that carry loss, unless the rollout is ``masked``. See ``RolloutSettings``."""
        if self.settings is None or self.settings.trained_segments in ("all", "normalized"):
            return tuple(n for n, segment in enumerate(self.segments) if segment.trained and any(segment.mask))
        return () if self.main_segment is None else (self.main_segment,)

    @property
    def segment_weight(self) -> float:
        """Factor for the loss of each trained segment: below 1 under ``normalized``."""
        is_normalized = self.settings is not None and self.settings.trained_segments == "normalized"
        return 1 / max(1, len(self.trained_segments)) if is_normalized else 1.0

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest policy that sampled a token of it; ``None`` when none was sampled."""
        found = set[int]().union(*(segment.policy_versions for segment in self.segments))
        return min(found - {NOT_SAMPLED}, default=None)

    @property
    def sampled_tokens(self) -> int:
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
    def _schema_and_reward_agree(self) -> "Rollout":
        if self.schema_version > SCHEMA_VERSION:
            raise ValueError(f"record schema {self.schema_version} is newer than {SCHEMA_VERSION}: upgrade prorl-gym")
        if self.score is not None and not self.outcome.may_have_reward:
            raise ValueError(f"a rollout that ended as {self.outcome.status}/{self.outcome.kind} cannot have a reward")
        for index, segment in enumerate(self.segments):
            if segment.parent is not None and segment.parent >= index:
                raise ValueError(f"segment {index} cannot branch from segment {segment.parent}: parents come first")
        return self


class EngineLoad(Record):
    """An engine's own metrics at one time. Tokens are counted in KV-cache slots."""

    running: int = Field(examples=[12])
    """Calls being decoded or prefilled."""
    waiting: int
    """Calls in the engine's own queue."""
    kv_usage: float = Field(examples=[0.4])
    """Share of the KV cache that running calls hold, 0 to 1."""
    kv_capacity: int | None = None
    """Tokens that fit into the KV cache, if the engine reports it."""
    preemptions: int = 0
    """Calls that were evicted from the cache and recomputed, since the engine started."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache, since the engine started."""
    prefix_hits: int = 0
    """Prompt tokens found in the prefix cache, since the engine started."""
    generated: int = 0
    """Tokens sampled, since the engine started; 0 if it does not report them."""


def _nan_for_null(value: object) -> object:
    return math.nan if value is None else value


Figure = Annotated[
    float, BeforeValidator(_nan_for_null), WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}]})
]
"""A number that may be NaN or infinite. JSON has null in place of either, which is read as NaN."""

MismatchPosition = Literal[
    "turn 1",
    "turn 2",
    "turn 3",
    "turns 4-7",
    "turns 8-15",
    "turns 16-",
    "first token",
    "last token",
    "quarter 1",
    "quarter 2",
    "quarter 3",
    "quarter 4",
]
"""Where a sampled token is: in which turn, at which end of it, in which quarter of its segment's sampled tokens."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Differences between a trainer's log-probs and the served ones over some tokens.

    ``d`` is the trainer's log-prob of a token minus the served one, in nats. Figures are NaN when a log-prob is.
    """

    tokens: Annotated[Annotated[int, Field(ge=0)], Field(examples=[8000])]
    max_abs_diff: Annotated[Figure, Field(examples=[0.041])]
    """Largest ``|d|``."""
    mean_abs_diff: Annotated[Figure, Field(examples=[0.0031])]
    """Mean of ``|d|``."""
    kl: Annotated[Figure, Field(examples=[0.00002])]
    """Mean of ``exp(d) - d - 1``: an estimate, never negative, of the KL divergence of the served policy from the
    trainer's (Schulman, "Approximating KL divergence")."""
    mult_prob_error: Annotated[Figure, Field(examples=[1.0031])]
    """Mean of ``exp(|d|)``: by which factor probabilities differ; 1 when they are equal."""
    zeros: Annotated[int, Field(ge=0)]
    """Tokens whose served log-prob is exactly 0.0 and whose own is not near 0: a value that was filled in."""


@dataclass(frozen=True, slots=True)
class BatchMismatch:
    """Mismatch of the tokens of a batch that carry loss: of all, and of parts that faults show in."""

    total: Mismatch
    by_version: Annotated[dict[Annotated[int, Field(ge=NOT_SAMPLED)], Mismatch], Field(max_length=256)]
    """By the policy version that sampled the token; ``NOT_SAMPLED``: it carries loss, and no policy sampled it."""
    by_position: Annotated[
        dict[str, Mismatch], Field(json_schema_extra={"propertyNames": {"enum": [*get_args(MismatchPosition)]}})
    ]
    """By ``MismatchPosition``; a later release may have more of them."""
    by_engine: Annotated[dict[Annotated[str, Field(max_length=128)], Mismatch], Field(max_length=4096)]
    """By the engine that sampled the token, where the record names one."""
