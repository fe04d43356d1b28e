"""Protocols and errors of inference engines, which turn token ids into token ids and log-probs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from prorl_gym.errors import EngineError, FailureKind, Limit, LimitReached
from prorl_gym.records import EngineLoad, Message, ToolCall

LogprobKind = Literal["raw", "processed"]
"""``raw``: before temperature, top-p and top-k; ``processed``: after."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages behind a prompt, for engines that take no token ids (``chat_prefix``, ``openai``)."""

    messages: Sequence[Message]
    """Everything so far; assistant messages as they were parsed."""
    tools: Sequence[Mapping[str, Any]]
    """Function schemas, as in the first prompt."""
    last_turn_span: tuple[int, int] | None = None
    """Where in the prompt ids the last sampled turn lies; ``None`` before there is one."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    request_id: str
    """Unique per call and attempt (fixed-length uuid hex): the handle for cancelling it."""
    session_id: str
    """The rollout: calls of one session share a prefix and should meet the same engine."""
    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    """-1: off, not sent."""
    stop_token_ids: tuple[int, ...]
    seed: int | None = None
    cache_salt: str | None = None
    priority: int = 0
    """Higher is served first by engines that can: evaluation > training."""
    group_id: str = ""
    """Rollouts of one group share their first prompt; empty: it is not shared."""
    conversation: Conversation | None = None
    """The same prompt as messages. Engines that take token ids ignore it."""
    prompt_ids_json: bytes | None = None
    """``prompt_ids`` as JSON text without blanks and brackets (``5,6,7``), from a caller that appends to it: it saves
    writing them all in every turn. See ``encode_prompt_ids``."""


@dataclass(frozen=True, slots=True)
class TextTurn:
    """A turn of an engine that answers in text, already parsed by the engine."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """One parsed answer of the policy, on which an agent acts. The session that sampled it records the tokens."""

    text: str
    """Decoded text without the tool-call blocks and without the terminator."""
    tool_calls: tuple[ToolCall, ...] = ()
    parse_errors: tuple[str, ...] = ()
    """One message for the model per call block that could not be parsed."""
    finish_reason: Literal["stop", "length", "abort"] = "stop"
    raw_text: str = ""
    """The text as sampled, where a call in it could not be parsed; ``text`` lacks that call."""
    context_tokens: int = 0
    """Length of the context up to its end; 0: not known."""


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The tokens that an engine sampled. The adapter has checked lengths, ids and log-probs."""

    token_ids: list[int]
    """Sampled ids, the stop id included."""
    logprobs: list[float]
    finish_reason: Literal["stop", "length", "abort"]
    """``abort``: cut short by a cancel or a pause; what was sampled is here."""
    logprob_kind: LogprobKind
    engine: str
    versions: list[int]
    """Policy version of each sampled token."""
    seconds: float
    cached_tokens: int | None = None
    routed_experts: Any = None
    """JSON that the engine gave with the tokens (which experts of a mixture each one met); passed through."""
    aborted_by_pause: bool = False
    """Set by a pool: its own pause caused the abort, which is no fault of the engine."""
    versions_reported: bool = False
    """The engine reported which weights sampled which token; otherwise it is the version at the call's start."""
    text_turn: TextTurn | None = None
    """Set by engines that answer in text. The token ids are then a local encoding of it and never carry loss."""


@dataclass(frozen=True, slots=True)
class EngineHealth:
    ok: bool
    detail: str = ""
    max_model_len: int | None = None
    unlisted_model: str = ""
    """The contents of its list of models where that lacks ours. Only a call shows whether it serves the model."""


class ContextExceeded(LimitReached):
    """Prompt and answer do not fit into the engine's context (``max_model_len`` tokens, where its message names it)."""

    def __init__(self, max_model_len: int | None) -> None:
        super().__init__(Limit.TOKENS)
        self.max_model_len = max_model_len


class ModelMissing(EngineError):
    """The server has no model of the requested name."""

    def __init__(self, address: str, message: str) -> None:
        super().__init__(
            FailureKind.ENGINE_REFUSED,
            f"engine {address}: does not serve the model ({message}).",
            "Load the model there, or set 'inference.model' to the name it has there (its --served-model-name).",
        )


class CallTimedOut(EngineError):
    """The engine did not answer within the time that a call may take.

    ``expected``: seconds that so many ``tokens`` take at its pace, where it samples. Another engine is not faster then,
    and what the call would have said measures no policy.
    """

    def __init__(self, address: str, seconds: float, tokens: int = 0, expected: float = 0.0) -> None:
        self.in_progress = expected > 0
        pace = f" At its pace {tokens} tokens take {expected:.0f} s." if self.in_progress else ""
        super().__init__(
            FailureKind.ENGINE_TIMEOUT,
            f"engine {address}: no answer within {seconds:.3g} s.{pace}",
            "Raise 'request_seconds', or lower 'max_turn_tokens' or the load.",
        )


class EngineOverloaded(EngineError):
    """The engine answered 429 or 503, or holds calls back because it is paused (``status`` is ``None`` then)."""

    def __init__(self, address: str, status: int | None, retry_after: float | None) -> None:
        what = "is paused and answers nothing" if status is None else f"overloaded or paused (HTTP {status})"
        fix = "Add engines, or lower the number of rollouts in RUN."
        super().__init__(
            FailureKind.ENGINE_OVERLOADED,
            f"engine {address}: {what}.",
            "Resume it, or take it out of the pool while it is paused." if status is None else fix,
        )
        self.retry_after = retry_after


class Engine(Protocol):
    """One inference engine behind one address."""

    @property
    def name(self) -> str:
        """Short name for records and metrics; never the address."""
        ...

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample a continuation. Cancelling the await stops the engine.

        Raises ``EngineError`` (``ENGINE_UNREACHABLE``, ``ENGINE_TIMEOUT``, ``ENGINE_OVERLOADED``, ``ENGINE_REFUSED`` or
        ``ENGINE_CONTRACT``) and ``ContextExceeded``, when the prompt does not fit the engine's context.
        """
        ...

    async def cancel(self, request_id: str) -> None:
        """Stop one call; its ``generate`` returns an abort where the engine can salvage. Unknown ids are ignored."""
        ...

    async def health(self) -> EngineHealth:
        """Return the engine's health. Never raises."""
        ...

    async def sample_trial(self, seconds: float) -> float:
        """Sample a few tokens for a short prompt; return the seconds that each of them took. Raises as ``generate``.

        A server whose other routes answer need not sample: this is what shows it.
        """
        ...

    async def close(self) -> None:
        """Release connections. Idempotent."""
        ...

    async def read_load(self) -> EngineLoad | None:
        """Read the engine's metrics; ``None`` when it shows none. Never raises."""
        ...

    async def probe_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-prob of each id but the first, given those before it: a fingerprint of the weights.

        Raises as ``generate``; ``ENGINE_REFUSED`` where the engine cannot return them.
        """
        ...

    async def reset_prefix_cache(self) -> bool:
        """Drop what was computed with older weights; whether the engine confirmed it.

        Raises as ``generate``; ``ENGINE_REFUSED`` where the engine has no such route.
        """
        ...


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The outcome of a call that a balancing policy had placed."""

    sampled_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens that the engine found in its cache, where it reports it."""
    failed: bool = False
    """The engine is to blame: the rollout should get another one."""


class BalancePolicy(Protocol):
    """Decides which engine serves a call.

    Every method is plain code between two awaits, so a place is chosen and reserved in one step.
    """

    def choose(self, request: GenerationRequest, healthy: Sequence[str]) -> str:
        """Pick one of ``healthy`` (never empty) and reserve a place on it."""
        ...

    def release(self, request: GenerationRequest, engine: str, outcome: CallOutcome) -> None:
        """Return the place. Called exactly once per ``choose``."""
        ...

    def forget_session(self, session_id: str) -> None:
        """Forget a rollout that is over. Unknown ones are ignored."""
        ...

    def invalidate_cache(self, engine: str) -> None:
        """Forget what an engine had cached: it was removed, or lost its cache. Places stay reserved."""
        ...

    def observe_load(self, engine: str, load: EngineLoad) -> None: ...
