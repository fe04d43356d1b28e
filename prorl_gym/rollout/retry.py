"""How patient the service is with what fails."""

from pydantic import Field

from prorl_gym.config import ConfigModel


class RetryConfig(ConfigModel):
    """How often infrastructure failures are tried again inside the service."""

    attempts: int = Field(default=3, ge=1)
    """Attempts at one rollout, the first one counted, lost ones (restarts) not."""
    restarts: int = Field(default=8, ge=0)
    """How often a rollout may be lost with the service: bounds one that brings the service down."""
    pause_seconds: float = Field(default=1.0, ge=0)
    """Before the second attempt; doubles with each further one. No slot is held meanwhile."""
    longest_pause_seconds: float = Field(default=60.0, gt=0)
    """Bound of that doubling."""
    ledger_pause_seconds: float = Field(default=2.0, gt=0)
    """Before a write to a ledger that failed (full disk) is tried again. Nothing is started meanwhile."""
