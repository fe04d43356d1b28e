"""The engines of a pool, and which of them take calls."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from prorl_gym.inference.protocol import Engine, GenerationRequest, GenerationResult
from prorl_gym.records import EngineLoad

_CALLS_PER_RECOVERY = 16
"""Answered calls that make up for one failure: an engine that hangs may cost its caller a quarter of an hour."""

_AVERAGING_CALLS = 64


class ChangeSignal:
    """Wakes waiters so that they test their condition again."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify_all(self) -> None:
        news, self._next = self._next, asyncio.Event()
        news.set()

    async def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Wait until the condition holds. It may have ceased to hold when the caller resumes: test it again."""
        while not predicate():
            await self._next.wait()


@dataclass(slots=True)
class Pace:
    """How fast an engine answers: means over its last calls."""

    seconds: float = 0.0
    tokens: float = 0.0
    calls: float = 0.0

    def record_call(self, seconds: float, tokens: int) -> None:
        kept = 1 - 1 / _AVERAGING_CALLS
        self.seconds = kept * self.seconds + seconds
        self.tokens = kept * self.tokens + tokens
        self.calls = kept * self.calls + 1

    def expected_seconds(self, tokens: int, per_token: float = 0.0) -> float:
        """Return the seconds that a call takes, by this pace or the slower one ``per_token``; 0: nothing is known."""
        mean = self.seconds / self.calls if self.calls else 0.0
        return max(mean, tokens * max(per_token, self.seconds / self.tokens if self.tokens else 0.0))


class PoolEngine(Engine, Protocol):
    """An engine whose tokens are labelled with a policy version that the pool sets."""

    version: int


@dataclass(slots=True, eq=False)
class PoolMember:
    engine: PoolEngine
    unhealthy_reason: str = ""
    """Why it is out of service; empty while it is well."""
    unhealthy_since: float | None = None
    """Unix seconds at which it was taken out of service; ``None`` while it is well."""
    lacks_model: bool = False
    """It is out of service because it does not serve the model; it may be well otherwise."""
    backoff_level: int = 0
    """Failures that count, reduced by calls answered since: the more, the longer it gets no calls."""
    answered_since_failure: int = 0
    pace: Pace = field(default_factory=Pace)
    quarantine_reason: str = ""
    """Why it must not serve this policy version; empty while it may."""
    draining: bool = False
    """It takes no new calls; calls in flight may end."""
    reports_versions: bool = False
    """Its last answer reported which weights sampled which token."""
    load: EngineLoad | None = None
    """Its own metrics when they were last read."""
    in_flight: int = 0
    calls: int = 0
    """Answered since it joined; so are all counts below."""
    failures: int = 0
    """Calls that it failed; they were retried on another engine, if there was one."""
    prompt_tokens: int = 0
    """Prompt tokens of the answered calls that reported what was cached."""
    cached_tokens: int = 0
    """Prompt tokens found in its cache."""
    sampled_tokens: int = 0

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def cache_hit_rate(self) -> float | None:
        """Share of prompt tokens found in its cache, where it reports it."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def is_serving(self) -> bool:
        return not (self.unhealthy_reason or self.quarantine_reason or self.draining)

    @property
    def may_take_call(self) -> bool:
        """Whether it may have one more call: a member that has failed gets calls back one by one."""
        return not self.backoff_level or self.in_flight <= self.answered_since_failure

    @property
    def out_of_service_reason(self) -> str:
        return self.unhealthy_reason or self.quarantine_reason or ("it is being drained" if self.draining else "")

    def record_answer(self, request: GenerationRequest, result: GenerationResult, seconds: float) -> None:
        self.calls += 1
        self.answered_since_failure += 1
        if self.backoff_level and self.answered_since_failure % _CALLS_PER_RECOVERY == 0:
            self.backoff_level -= 1
        self.pace.record_call(seconds, len(result.token_ids))
        self.sampled_tokens += len(result.token_ids)
        if result.cached_tokens is not None:
            self.prompt_tokens += len(request.prompt_ids)
            self.cached_tokens += result.cached_tokens
        self.reports_versions = result.versions_reported


@dataclass(slots=True)
class PoolMembers:
    changes: ChangeSignal = field(default_factory=ChangeSignal)
    """Notified when a member joins, leaves, or begins or ceases to take calls."""
    on_join: Callable[[PoolMember], None] | None = None
    """Called with each engine that joins or comes back, before it takes a call: it may quarantine it."""
    _members: dict[str, PoolMember] = field(default_factory=dict[str, PoolMember])

    @property
    def all(self) -> list[PoolMember]:
        return list(self._members.values())

    @property
    def serving_names(self) -> list[str]:
        return [name for name, member in self._members.items() if member.is_serving]

    def get(self, name: str) -> PoolMember | None:
        return self._members.get(name)

    def has(self, member: PoolMember) -> bool:
        return self._members.get(member.name) is member

    def add(self, member: PoolMember) -> None:
        self._members[member.name] = member
        self.announce_member(member)

    def announce_member(self, member: PoolMember) -> None:
        """Report a member that joined or is well again: it may have loaded other weights than the others."""
        if self.on_join is not None:
            self.on_join(member)
        self.changes.notify_all()

    def pop(self, name: str) -> PoolMember | None:
        return self._members.pop(name, None)
