"""How a pool stands at one moment, for metrics and status pages."""

from dataclasses import dataclass

from prorl_gym.inference.admission import AdmissionSnapshot
from prorl_gym.inference.protocol import EngineLoad


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """One engine. Counts are since it joined the pool."""

    name: str
    version: int
    in_flight: int
    calls: int
    """Answered."""
    failures: int
    """Calls that it failed and that were made again elsewhere, where there was an elsewhere."""
    prompt_tokens: int
    """Of the answered calls that told what was cached."""
    cached_tokens: int
    """Of these, found in its cache."""
    sampled_tokens: int
    trouble: str
    """Why it is not well; empty while it is."""
    quarantine: str
    """Why it must not serve this policy version; empty while it may."""
    draining: bool
    load: EngineLoad | None
    """Its own figures at the last look."""

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens found in its cache, as far as it tells."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def serves(self) -> bool:
        """Whether it takes calls."""
        return not (self.trouble or self.quarantine or self.draining)


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """A pool."""

    name: str
    version: int
    paused: bool
    failovers: int
    """Calls that were made again on another engine."""
    reusable_tokens: int
    """Prompt tokens sent that had been computed before."""
    lacking: str
    """Why no engine could serve a call even if all were well; empty otherwise."""
    unserved: int
    """Rollouts that wait for an engine that has the model."""
    admission: AdmissionSnapshot
    engines: tuple[EngineSnapshot, ...]
