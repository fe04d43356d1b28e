"""What differs from server to server: which routes there are, and how questions are written and answers read.

A dialect is plain data in and out; ``HttpEngine`` does the talking. What a server cannot do is refused by default, so
that a dialect states only what its server can.
"""

import re
import ssl
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from prorl_gym.inference.behaviour import BehaviourRule, LogprobKind
from prorl_gym.inference.checks import Checks, Expected
from prorl_gym.inference.http import Answer, Ask, Link
from prorl_gym.inference.protocol import EngineHealth, EngineLoad, GenerationRequest, GenerationResult
from prorl_gym.inference.refusals import refusal, unable

METRICS_ANSWER = 16 << 20
"""Longest metrics page in bytes: histograms of many engines behind one server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """How to talk to a server, whatever its dialect. Times in seconds."""

    model: str
    vocab_size: int
    connect_seconds: float = 10.0
    request_seconds: float = 900.0
    """Longest time one call may take, waiting in the engine's queue included."""
    max_connections: int = 1024
    api_key: str | None = None
    tls: ssl.SSLContext | None = None
    """Whom to trust over https; ``None``: the system's authorities."""
    control_ids: frozenset[int] = frozenset()
    """Control tokens of the vocabulary: a model may end its turn with one that was not named as a stop id."""
    rule: BehaviourRule | None = None
    """Shared by the engines of a pool; an engine without a pool has its own, which only warns."""

    @property
    def link(self) -> Link:
        """How to connect."""
        return Link(self.connect_seconds, self.max_connections, self.api_key, self.tls)


@dataclass(frozen=True, slots=True)
class Call:
    """A call that was answered, for its result."""

    engine: str
    version: int
    """That the pool had set when the call was made."""
    seconds: float
    context: int | None = None
    """Of the engine in tokens, as far as it is known."""
    trial: bool = False
    """It only asked whether the engine samples."""

    def expected(self, *, other_end: bool = False) -> Expected:
        """Return what its tokens are checked against."""
        return Expected(self.context, other_end, self.trial)


class Dialect(ABC):
    """One kind of server.

    Args:
        checks: reads its answers.
        logprob_kind: what its log-probs are; ``None``: its answers carry none that are of use.
    """

    def __init__(self, checks: Checks, logprob_kind: LogprobKind | None) -> None:
        self.checks = checks
        self.logprob_kind: LogprobKind | None = logprob_kind

    @property
    def address(self) -> str:
        """How messages call the server."""
        return self.checks.address

    @abstractmethod
    def sample(self, request: GenerationRequest) -> Ask:
        """Write a call.

        Raises:
            EngineError: ``ENGINE_REFUSED``, when such a call cannot be put to this server.
        """

    @abstractmethod
    def sampled(self, payload: bytes, request: GenerationRequest, call: Call) -> GenerationResult:
        """Read the answer of a call.

        Raises:
            EngineError: ``ENGINE_CONTRACT``, or what an answer of status 200 hides.
        """

    @abstractmethod
    def health(self) -> Ask:
        """Ask whether the server is well."""

    @abstractmethod
    def healthy(self, payload: bytes) -> EngineHealth:
        """Read how it is from an answer of status 200."""

    def refusal(self, answer: Answer) -> Exception:
        """Return what an answer other than 200 means."""
        return refusal(self.address, answer)

    def abort(self, request_id: str) -> Ask | None:
        """Ask to end a call early and hand out what it has; ``None``: only closing the connection ends it."""
        return None

    def paused(self) -> Ask | None:
        """Ask whether the server holds calls back; ``None``: it does not tell."""
        return None

    def is_paused(self, answer: Answer) -> bool:
        """Read whether it does, from an answer of any status but 404 and 405."""
        return False

    def metrics(self) -> Ask | None:
        """Ask for the metrics page; ``None``: it has none that can be read."""
        return None

    def load(self, payload: bytes) -> EngineLoad | None:
        """Read the metrics page; ``None`` when it is another one."""
        return None

    def probe(self, token_ids: Sequence[int]) -> Ask:
        """Ask for the log-probs of ids that are given, not sampled.

        Raises:
            EngineError: ``ENGINE_REFUSED``, when the server has no way to tell.
        """
        raise unable(self.address, "cannot tell log-probs of a given text", _OTHER)

    def probed(self, payload: bytes, token_ids: Sequence[int]) -> list[float]:
        """Read them."""
        raise NotImplementedError

    def reset(self) -> Ask:
        """Ask to drop the prefix cache.

        Raises:
            EngineError: ``ENGINE_REFUSED``, when the server has no such route.
        """
        raise unable(self.address, "has no route that drops its prefix cache", _OTHER)

    def confirmed(self, answer: Answer) -> bool:
        """Read whether it did.

        Raises:
            EngineError: it refused or broke.
        """
        raise NotImplementedError


def call_headers(request: GenerationRequest) -> dict[str, str]:
    """Return what routers and logs know a call by."""
    return {"X-Request-Id": request.request_id, "X-Session-ID": session_header(request.session_id)}


def session_header(session_id: str) -> str:
    """Return a session as a header can carry it. Callers name them: what is no plain word goes as its digest."""
    if re.fullmatch(r"[!-~]{1,256}", session_id):
        return session_id
    return blake2b(session_id.encode("utf-8", "replace"), digest_size=16).hexdigest()


_OTHER = "Serve the model with vLLM or SGLang, unmodified, for updates that have to be shown to have arrived."
