"""Outcomes and failures: every way a rollout can end, and its possible causes.

A bad rollout is data, not a crash. Each rollout ends in exactly one of four ways:

``completed``  the agent finished by itself; it has a reward.
``truncated``  a limit chosen before the run (turns, tokens, time) ended it; what it did is graded, so it has a reward.
``failed``     something broke. Its ``Cause`` decides what the number may be used for:

               * ``policy``          the model could have avoided it (it filled its disk, killed its shell).
                                     It keeps its real score.
               * ``task``            the row or its image is bad. No reward; retrying cannot help.
               * ``infrastructure``  an engine, a sandbox, a grader or this service failed. Retried inside the
                                     service; if it persists the rollout ends with **no** reward, never with 0.
``cancelled``  it is no longer wanted. No reward.

The same failure is treated the same way in every environment. Whatever the end, tokens sampled before it are kept.

Exceptions carry a ``FailureKind``; a ``FailureKind`` has exactly one ``Cause``. Code raises the narrowest exception;
the pipeline turns it into an ``Outcome``. Every message has at most two lines: what is wrong, naming the file, key or
address, and what to do about it.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Cause(StrEnum):
    """The party that caused a failure."""

    POLICY = "policy"
    TASK = "task"
    INFRASTRUCTURE = "infrastructure"


class Limit(StrEnum):
    """Which limit truncated a rollout."""

    TURNS = "turns"
    TOKENS = "tokens"
    TIME = "time"


class CancelReason(StrEnum):
    """Why a rollout was cancelled."""

    CLIENT = "client"  # requested by id, group or run
    DISCONNECTED = "disconnected"  # the caller went away
    REDUNDANT = "redundant"  # its group or its run no longer needs it
    STALE = "stale"  # its policy version fell behind the allowed bound
    SHUTDOWN = "shutdown"  # the service stopped without draining


class FailureKind(StrEnum):
    """The closed list of failures. ``cause_of`` gives the cause of each."""

    # policy
    SANDBOX_LIMIT = "sandbox_limit"  # memory, processes, disk or output beyond the sandbox's limits
    SANDBOX_BROKEN_BY_AGENT = "sandbox_broken_by_agent"  # the agent destroyed its own working environment
    # task
    BAD_ROW = "bad_row"
    UNKNOWN_ENVIRONMENT = "unknown_environment"
    IMAGE_MISSING = "image_missing"
    IMAGE_BROKEN = "image_broken"
    PROMPT_TOO_LONG = "prompt_too_long"  # the very first prompt does not fit the context
    # infrastructure
    ENGINE_UNREACHABLE = "engine_unreachable"  # refused, reset or dropped connection, 5xx
    ENGINE_TIMEOUT = "engine_timeout"
    ENGINE_OVERLOADED = "engine_overloaded"  # 429 / 503 beyond the retry budget
    ENGINE_REFUSED = "engine_refused"  # 4xx: the engine does not accept our request
    ENGINE_CONTRACT = "engine_contract"  # ids out of range, missing or mis-sized log-probs, another prompt echoed
    TEMPLATE_UNSAFE = "template_unsafe"  # the chat template cannot be extended token by token
    SANDBOX_UNAVAILABLE = "sandbox_unavailable"  # no backend, or it failed to start
    SANDBOX_LOST = "sandbox_lost"  # it died and the agent is not to blame
    GRADER_FAILED = "grader_failed"
    STAGE_TIMEOUT = "stage_timeout"  # INIT or EVAL over its deadline (RUN truncates, unless engines failed)
    SERVICE_RESTARTED = "service_restarted"
    NODE_LOST = "node_lost"  # the node that ran the attempt left, or its lease expired
    INTERNAL = "internal"  # a defect of ours


_CAUSE = {
    FailureKind.SANDBOX_LIMIT: Cause.POLICY,
    FailureKind.SANDBOX_BROKEN_BY_AGENT: Cause.POLICY,
    FailureKind.BAD_ROW: Cause.TASK,
    FailureKind.UNKNOWN_ENVIRONMENT: Cause.TASK,
    FailureKind.IMAGE_MISSING: Cause.TASK,
    FailureKind.IMAGE_BROKEN: Cause.TASK,
    FailureKind.PROMPT_TOO_LONG: Cause.TASK,
}

# NeMo Gym's shared vocabulary, where it has a word; our own kinds travel as `prorl:<kind>`.
_GYM_KIND = {
    FailureKind.ENGINE_UNREACHABLE: "provider_unavailable",
    FailureKind.ENGINE_TIMEOUT: "provider_unavailable",
    FailureKind.ENGINE_OVERLOADED: "provider_unavailable",
    FailureKind.SANDBOX_UNAVAILABLE: "provider_unavailable",
    FailureKind.SANDBOX_LOST: "session_lost",
    FailureKind.GRADER_FAILED: "verifier_error",
}


def cause_of(kind: FailureKind) -> Cause:
    """Return the cause of a failure kind; infrastructure is the default."""
    return _CAUSE.get(kind, Cause.INFRASTRUCTURE)


class Evidence(StrEnum):
    """Observations about why an attempt broke. ``blame`` gives the consequence of each."""

    LIMIT_BREACHED = "limit_breached"
    """A limit of the sandbox was reached; the breach has a name."""
    PAYLOAD_BROKE_SANDBOX = "payload_broke_sandbox"
    """The sandbox is gone and something outside it shows that its own payload did it."""
    SANDBOX_KILLED_OUTSIDE = "sandbox_killed_outside"
    """The sandbox or its channel is gone: dead spawner, host short of memory, signal from outside."""
    SANDBOX_LOST_UNEXPLAINED = "sandbox_lost_unexplained"
    """The sandbox is gone and nothing shows why."""
    SERVICE_RESTARTED = "service_restarted"
    CALL_UNANSWERED = "call_unanswered"
    """An engine call was open when RUN's time was over, and the engine showed no progress on it."""
    CALL_IN_PROGRESS = "call_in_progress"
    """An engine call was open, and the engine was sampling: the policy was slow, not the engine."""
    IMPOSSIBLE_ANSWER = "impossible_answer"
    """The engine's answer cannot have been sampled under the request."""
    PROGRAM_KILLED_OUTSIDE = "program_killed_outside"
    """The graded program was killed by something other than its limits."""
    BAD_ROW = "bad_row"
    """The row or its gold answer is bad."""
    BAD_IMAGE = "bad_image"


@dataclass(frozen=True, slots=True)
class Blame:
    """Consequences of a piece of evidence."""

    kind: FailureKind | None
    """``None``: nothing failed; the limit that was reached truncates the rollout."""
    retry: bool
    """Whether another attempt follows inside the service."""
    retry_alone: bool = False
    """Whether that attempt has RUN and EVAL to itself, so that no other rollout can break its sandbox."""

    @property
    def cause(self) -> Cause:
        return Cause.POLICY if self.kind is None else cause_of(self.kind)

    @property
    def has_reward(self) -> bool:
        """Whether the attempt keeps its score: only a failure caused by the policy measures the policy."""
        return self.cause is Cause.POLICY


def blame(evidence: Evidence, *, earlier_losses: int = 0) -> Blame:
    """Return the failure kind for what broke an attempt, and whether it is retried.

    The only place that decides this; every row has a test in ``tests/test_blame.py``.

    ``earlier_losses``: attempts of this rollout that already ended as ``SANDBOX_LOST_UNEXPLAINED`` while the rollout's
    own payload ran. The retry runs alone, so a second loss was caused by the payload.
    """
    match evidence:
        case Evidence.LIMIT_BREACHED:
            return Blame(FailureKind.SANDBOX_LIMIT, retry=False)
        case Evidence.PAYLOAD_BROKE_SANDBOX:
            return Blame(FailureKind.SANDBOX_BROKEN_BY_AGENT, retry=False)
        case Evidence.SANDBOX_LOST_UNEXPLAINED if earlier_losses:
            return Blame(FailureKind.SANDBOX_BROKEN_BY_AGENT, retry=False)
        case Evidence.SANDBOX_LOST_UNEXPLAINED:
            return Blame(FailureKind.SANDBOX_LOST, retry=True, retry_alone=True)
        case Evidence.SANDBOX_KILLED_OUTSIDE | Evidence.PROGRAM_KILLED_OUTSIDE:
            return Blame(FailureKind.SANDBOX_LOST, retry=True)
        case Evidence.SERVICE_RESTARTED:
            return Blame(FailureKind.SERVICE_RESTARTED, retry=True)
        case Evidence.CALL_UNANSWERED:
            return Blame(FailureKind.ENGINE_TIMEOUT, retry=True)
        case Evidence.CALL_IN_PROGRESS:
            return Blame(None, retry=False)
        case Evidence.IMPOSSIBLE_ANSWER:
            return Blame(FailureKind.ENGINE_CONTRACT, retry=True)
        case Evidence.BAD_ROW:
            return Blame(FailureKind.BAD_ROW, retry=False)
        case Evidence.BAD_IMAGE:
            return Blame(FailureKind.IMAGE_BROKEN, retry=False)


def gym_failure_kind(kind: FailureKind) -> str:
    """Return NeMo Gym's ``failure_kind`` for one of ours."""
    return _GYM_KIND.get(kind, f"prorl:{kind.value}")


class ProrlError(Exception):
    """Base of every error of this package: ``what`` is wrong, naming the file, key, id or address, and the ``fix``.

    One line each; the fix may be empty.
    """

    def __init__(self, what: str, fix: str = "") -> None:
        self.what = " ".join(what.split())
        self.fix = " ".join(fix.split())
        super().__init__(f"{self.what}\n{self.fix}" if self.fix else self.what)


class ConfigError(ProrlError, ValueError):
    """A configuration file, option or environment variable is wrong."""


class ConflictError(ProrlError):
    """The same id was submitted with another body."""


class NotFoundError(ProrlError, LookupError):
    """No such rollout, group or run."""


class GoneError(NotFoundError):
    """The rollout existed; its record was acknowledged or expired and has been deleted."""


class ShuttingDownError(ProrlError):
    """The service no longer accepts work."""


class RolloutError(ProrlError):
    """A failure of one rollout, whose kind determines cause and retry."""

    evidence: Evidence | None = None
    """Source of the kind, where that was evidence."""

    def __init__(self, kind: FailureKind, what: str, fix: str = "") -> None:
        super().__init__(what, fix)
        self.kind = kind

    @property
    def cause(self) -> Cause:
        return cause_of(self.kind)

    @property
    def retryable(self) -> bool:
        """Whether another attempt may succeed: only after infrastructure failures."""
        return self.cause is Cause.INFRASTRUCTURE


class TaskError(RolloutError):
    """The row or its image is bad."""


class EngineError(RolloutError):
    """An inference engine failed."""


class SandboxError(RolloutError):
    """A sandbox could not be started or was lost."""

    @classmethod
    def from_evidence(cls, evidence: Evidence, what: str, fix: str = "", *, earlier_losses: int = 0) -> "SandboxError":
        """Return the error whose kind ``blame`` derives. Raises ``ValueError``: by the evidence, nothing failed."""
        kind = blame(evidence, earlier_losses=earlier_losses).kind
        if kind is None:
            raise ValueError(f"{evidence} is no failure")
        error = cls(kind, what, fix)
        error.evidence = evidence
        return error


class UnusableSandboxError(SandboxError):
    """A sandbox answers but cannot work; if its payload has run, the payload is the cause.

    It is at its limit of processes, a process tree survives SIGKILL, or a child cannot set itself up.
    """

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(FailureKind.SANDBOX_LOST, what, fix)


class UnfitImageError(SandboxError):
    """An image lacks what a tool needs, or a payload has removed it; a fresh sandbox distinguishes the two."""

    def __init__(self, tool: Literal["shell", "python"], what: str, fix: str = "") -> None:
        super().__init__(FailureKind.IMAGE_BROKEN, what, fix)
        self.tool: Literal["shell", "python"] = tool
        self.evidence = Evidence.BAD_IMAGE


class GraderError(RolloutError):
    """A grader broke. A wrong answer is not an error; it is a score."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(FailureKind.GRADER_FAILED, what, fix)


class LimitReached(Exception):
    """A limit of the rollout was reached: the rollout is truncated and graded as it is."""

    def __init__(self, limit: Limit) -> None:
        super().__init__(limit.value)
        self.limit = limit
