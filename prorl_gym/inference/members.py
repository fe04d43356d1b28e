"""The engines of a pool: who is in it, and who takes calls."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from prorl_gym.inference.changes import Changes
from prorl_gym.inference.protocol import Engine, EngineLoad, GenerationRequest, GenerationResult
from prorl_gym.inference.snapshot import EngineSnapshot

_FORGIVEN_AFTER = 16
"""Calls answered in a row that make up for one failure: one that hangs may cost its caller a quarter of an hour."""

_REMEMBERED_CALLS = 64


@dataclass(slots=True)
class Pace:
    """How fast an engine answers: means over its last calls."""

    seconds: float = 0.0
    tokens: float = 0.0
    calls: float = 0.0

    def took(self, seconds: float, tokens: int) -> None:
        """Count a call that was answered."""
        kept = 1 - 1 / _REMEMBERED_CALLS
        self.seconds = kept * self.seconds + seconds
        self.tokens = kept * self.tokens + tokens
        self.calls = kept * self.calls + 1

    def expected(self, tokens: int, per_token: float = 0.0) -> float:
        """Seconds that a call of so many tokens takes, at least those of a mean call; 0 while nothing is known.

        Args:
            tokens: that it samples.
            per_token: seconds, as seen elsewhere; the slower of both counts.
        """
        mean = self.seconds / self.calls if self.calls else 0.0
        return max(mean, tokens * max(per_token, self.seconds / self.tokens if self.tokens else 0.0))


class PoolEngine(Engine, Protocol):
    """An engine whose tokens are labelled with a policy version that the pool sets."""

    version: int


@dataclass(slots=True, eq=False)
class Member:
    """An engine and what the pool knows about it."""

    engine: PoolEngine
    trouble: str = ""
    """Why it is out of service; empty while it is well."""
    lacks_model: bool = False
    """It is out of service because it does not serve the model: it may have nothing else wrong with it."""
    relapses: int = 0
    """How often it failed, less what it was forgiven: the more, the longer it is left alone."""
    proven: int = 0
    """Calls that it answered since it failed."""
    pace: Pace = field(default_factory=Pace)
    quarantine: str = ""
    """Why it must not serve this policy version; empty while it may."""
    draining: bool = False
    """It takes no new calls; those it has may end."""
    tells_versions: bool = False
    """Its last answer told by itself which weights had sampled which token."""
    load: EngineLoad | None = None
    in_flight: int = 0
    calls: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0

    @property
    def name(self) -> str:
        """Of the engine."""
        return self.engine.name

    @property
    def serves(self) -> bool:
        """Whether it takes calls."""
        return not (self.trouble or self.quarantine or self.draining)

    @property
    def has_room(self) -> bool:
        """Whether it may have one more call: one that has failed gets its calls back one by one."""
        return not self.relapses or self.in_flight <= self.proven

    @property
    def reason(self) -> str:
        """Why it takes none."""
        return self.trouble or self.quarantine or ("it is being drained" if self.draining else "")

    def answered(self, request: GenerationRequest, result: GenerationResult, seconds: float) -> None:
        """Count a call, which took so long."""
        self.calls += 1
        self.proven += 1
        if self.relapses and self.proven % _FORGIVEN_AFTER == 0:
            self.relapses -= 1
        self.pace.took(seconds, len(result.token_ids))
        self.sampled_tokens += len(result.token_ids)
        if result.cached_tokens is not None:
            self.prompt_tokens += len(request.prompt_ids)
            self.cached_tokens += result.cached_tokens
        self.tells_versions = result.versions_told

    def snapshot(self) -> EngineSnapshot:
        """Return how it stands."""
        return EngineSnapshot(
            name=self.name,
            version=self.engine.version,
            in_flight=self.in_flight,
            calls=self.calls,
            failures=self.failures,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            sampled_tokens=self.sampled_tokens,
            trouble=self.trouble,
            quarantine=self.quarantine,
            draining=self.draining,
            load=self.load,
        )


@dataclass(slots=True)
class Roster:
    """All members of a pool, by name."""

    changes: Changes = field(default_factory=Changes)
    """Announced whenever somebody comes, goes, or begins or ceases to take calls."""
    vet: Callable[[Member], None] | None = None
    """Called with each engine that joins or comes back, before it takes a call: it may quarantine it."""
    _members: dict[str, Member] = field(default_factory=dict[str, Member])

    @property
    def all(self) -> list[Member]:
        """Everybody."""
        return list(self._members.values())

    @property
    def serving(self) -> list[str]:
        """Names of those that take calls."""
        return [name for name, member in self._members.items() if member.serves]

    def get(self, name: str) -> Member | None:
        """Find one."""
        return self._members.get(name)

    def has(self, member: Member) -> bool:
        """Whether it is still in the pool."""
        return self._members.get(member.name) is member

    def add(self, member: Member) -> None:
        """Take one in."""
        self._members[member.name] = member
        self.arrived(member)

    def arrived(self, member: Member) -> None:
        """It joined, or is well again: what it has loaded may not be what the others have."""
        if self.vet is not None:
            self.vet(member)
        self.changes.announce()

    def pop(self, name: str) -> Member | None:
        """Let one go."""
        return self._members.pop(name, None)
