"""What an inference engine is: token ids in, token ids and log-probs out. Nothing here knows of sandboxes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


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


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """A look at an engine."""

    ok: bool
    detail: str = ""
    max_model_len: int | None = None


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

    async def close(self) -> None:
        """Release connections. Idempotent."""
        ...


class BalancePolicy(Protocol):
    """Decides which engine serves a call. Reservations are taken and returned atomically, on one event loop."""

    def choose(self, request: GenerationRequest, healthy: Sequence[str]) -> str:
        """Pick one of ``healthy`` (never empty) and reserve a place on it."""
        ...

    def release(self, request: GenerationRequest, engine: str, *, failed: bool) -> None:
        """Return the place. Called exactly once per ``choose``; ``failed`` ends stickiness."""
        ...

    def forget(self, session_id: str) -> None:
        """The session is over."""
        ...
