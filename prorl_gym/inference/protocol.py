"""What an inference engine is: token ids in, token ids and log-probs out. Nothing here knows of sandboxes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from prorl_gym.records import Message, ToolCall


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages behind a prompt, for engines that take no token ids (``chat_prefix``, ``openai``)."""

    messages: Sequence[Message]
    """Everything so far; assistant messages as they were parsed."""
    tools: Sequence[Mapping[str, Any]]
    """Function schemas, as in the first prompt."""
    last_generation: tuple[int, int] | None = None
    """Where in the prompt ids the last sampled turn lies; ``None`` before there is one."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One model call."""

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
    """Higher is served first by whoever can: evaluation > training."""
    group_id: str = ""
    """Rollouts of one group share their first prompt; empty: it is shared with nobody."""
    conversation: Conversation | None = None
    """The same prompt as messages. Engines that take token ids ignore it."""
    prompt_json: bytes | None = None
    """``prompt_ids`` as JSON text without blanks and brackets (``5,6,7``), from a caller that appends to it: it spares
    writing them all in every turn. See ``prompt_text``."""


@dataclass(frozen=True, slots=True)
class Said:
    """A turn of an engine that answers in text: what it said, already taken apart by the engine."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What an engine sampled. Checked by the adapter: equal lengths, ids inside the vocabulary, finite log-probs."""

    token_ids: list[int]
    """Sampled ids, the stop id included."""
    logprobs: list[float]
    finish_reason: Literal["stop", "length", "abort"]
    """``abort``: cut short by a cancel or a pause; what was sampled is here."""
    logprob_kind: Literal["raw", "processed"]
    engine: str
    versions: list[int]
    """Policy version of each sampled token."""
    seconds: float
    cached_tokens: int | None = None
    routed_experts: Any = None
    """JSON that the engine gave with the tokens (which experts of a mixture each one met); passed through."""
    paused: bool = False
    """Set by a pool: the abort is its own pause's, and says nothing against the engine."""
    versions_told: bool = False
    """The engine itself told which weights sampled which token; otherwise it is the version at the call's start."""
    said: Said | None = None
    """Set by engines that answer in text. The token ids are then a local encoding of it and never carry loss."""


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """A look at an engine."""

    ok: bool
    detail: str = ""
    max_model_len: int | None = None
    unlisted: str = ""
    """It answers and its list of models lacks ours: what the list says. Only a call shows whether it serves it."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine's metrics say at one moment. Tokens are counted in KV-cache slots."""

    running: int
    """Calls being decoded or prefilled."""
    waiting: int
    """Calls in the engine's own queue."""
    kv_usage: float
    """Share of the KV cache that running calls hold, 0 to 1."""
    kv_capacity: int | None = None
    """Tokens that fit into the KV cache, when the engine tells."""
    preemptions: int = 0
    """Calls that were thrown out of the cache and computed again, since the engine started."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache, since the engine started."""
    prefix_hits: int = 0
    """Of these, the ones found."""
    generated: int = 0
    """Tokens sampled, since the engine started; 0 where it does not tell."""


class Engine(Protocol):
    """One inference engine behind one address."""

    @property
    def name(self) -> str:
        """Short name for records and metrics; never the address."""
        ...

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample a continuation. Cancelling the await tells the engine to stop.

        Raises:
            EngineError: ``ENGINE_UNREACHABLE``, ``ENGINE_TIMEOUT``, ``ENGINE_OVERLOADED``, ``ENGINE_REFUSED`` or
                ``ENGINE_CONTRACT``.
            LimitReached: ``TOKENS``, when the engine says that the prompt does not fit its context.
        """
        ...

    async def cancel(self, request_id: str) -> None:
        """Stop one call; its ``generate`` returns with ``finish_reason='abort'`` where the engine can salvage.

        Unknown ids are ignored.
        """
        ...

    async def health(self) -> EngineHealth:
        """Ask the engine whether it is well. Never raises."""
        ...

    async def sample_some(self, seconds: float) -> float:
        """Sample a few tokens for a short prompt of its own; return the seconds that each of them took.

        A server whose other routes answer need not sample: this is what shows it.

        Args:
            seconds: that it may take.

        Raises:
            EngineError: as ``generate``.
        """
        ...

    async def close(self) -> None:
        """Release connections. Idempotent."""
        ...

    async def load(self) -> EngineLoad | None:
        """Read the engine's metrics; ``None`` when it shows none. Never raises."""
        ...

    async def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-prob of each id but the first, given those before it: a fingerprint of the weights.

        Raises:
            EngineError: as ``generate``; ``ENGINE_REFUSED`` where the engine has no way to tell.
        """
        ...

    async def reset_prefix_cache(self) -> bool:
        """Drop what was computed with older weights; whether the engine confirmed it.

        Raises:
            EngineError: as ``generate``; ``ENGINE_REFUSED`` where the engine has no such route.
        """
        ...


@dataclass(frozen=True, slots=True)
class Served:
    """How a call that a balancing policy had placed went."""

    sampled: int = 0
    """Tokens that came back."""
    cached: int | None = None
    """Prompt tokens that the engine found in its cache, when it tells."""
    failed: bool = False
    """The engine is to blame: its rollout should look for another one."""


class BalancePolicy(Protocol):
    """Decides which engine serves a call.

    Every method is plain code between two awaits, so a place is chosen and reserved in one step.
    """

    def choose(self, request: GenerationRequest, healthy: Sequence[str]) -> str:
        """Pick one of ``healthy`` (never empty) and reserve a place on it."""
        ...

    def release(self, request: GenerationRequest, engine: str, served: Served) -> None:
        """Return the place. Called exactly once per ``choose``."""
        ...

    def forget(self, session_id: str) -> None:
        """The rollout is over. Unknown ones are ignored."""
        ...

    def drop(self, engine: str) -> None:
        """The engine was removed, or lost its cache: what is believed to lie in it is gone. Places stay reserved."""
        ...

    def observe(self, engine: str, load: EngineLoad) -> None:
        """The engine's own figures have come in."""
        ...
