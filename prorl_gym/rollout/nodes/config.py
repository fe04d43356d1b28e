"""The configuration of a service's nodes."""

from pydantic import Field

from prorl_gym.config import ConfigModel


class NodesConfig(ConfigModel):
    """Attempts run on nodes (``prorl-gym node``), none in the service's own process."""

    lease_seconds: float = Field(default=30.0, ge=0.5, le=300)
    """A node is lost when it sends nothing for this long, and then ends itself. After a restart of the service, nodes
    have this long to join again with the attempts that they have in hand."""
