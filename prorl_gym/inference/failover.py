"""How hard a call is tried on other engines."""

import logging
from dataclasses import dataclass

from prorl_gym.errors import FailureKind
from prorl_gym.inference.protocol import Engine, EngineHealth

log = logging.getLogger(__name__)

FAILS_OVER = frozenset(
    {
        FailureKind.ENGINE_UNREACHABLE,
        FailureKind.ENGINE_TIMEOUT,
        FailureKind.ENGINE_OVERLOADED,
        FailureKind.ENGINE_CONTRACT,
    }
)
"""A refusal is not among them: every engine of a pool would refuse the same request."""


@dataclass(frozen=True, slots=True)
class Failover:
    """How hard a pool tries. Times in seconds."""

    attempts: int = 3
    """Engines that one call is tried on."""
    wait_seconds: float = 30.0
    """Longest wait for an engine to recover when none is well."""
    first_probe: float = 0.05
    """Delay before a failed engine is probed; doubled after each failed probe."""
    slowest_probe: float = 10.0
    trial_seconds: float = 5.0
    """Longest time that an engine may take to show that it samples."""

    def rest(self, failures: int, asked: float | None = None) -> float:
        """Seconds to leave a server alone after so many failures before, or what it asked for; bounded."""
        return min(self.first_probe * 2.0 ** min(failures, 60) if asked is None else asked, self.slowest_probe)


async def look(engine: Engine) -> EngineHealth:
    """Ask an engine how it is. One that makes the question itself break is not well, and will be asked again."""
    try:
        return await engine.health()
    except Exception as error:
        log.exception("engine %s: asking it how it is broke", engine.name)
        return EngineHealth(ok=False, detail=f"asking it how it is broke ({type(error).__name__})")
