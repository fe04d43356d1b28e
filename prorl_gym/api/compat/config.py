"""Configuration of the published routes: ``http.compat``."""

from typing import Annotated

from pydantic import Field

from prorl_gym.config import ConfigModel
from prorl_gym.errors import Limit
from prorl_gym.records import Identifier
from prorl_gym.settings import Seconds

DEFAULT_PORT = 8006
"""Port of the published server."""


class CompatConfig(ConfigModel):
    """The routes of the published ProRL rollout server, on a port of their own (docs/migration.md)."""

    host: str = "127.0.0.1"
    """Address to listen on. With any other, other machines can connect; they need the token."""
    port: Annotated[int, Field(ge=0, le=65535)] = DEFAULT_PORT
    """0: any free one, which the log names."""
    run_id: Identifier = "published-routes"
    """Run of the rollouts of these routes, for them alone: its pending rollouts are cancelled at each start."""
    data_sources: dict[str, str] = Field(default_factory=dict[str, str])
    """Environment by ``data_source`` (``*`` at the end: any name with that prefix); overrides the built-in ones."""
    mask_overlong: tuple[Limit, ...] = (Limit.TOKENS, Limit.TIME)
    """Limits that make ``filter`` true when they cut a rollout short."""
    input_ids: bool = False
    """Add to each assistant message the whole prompt it was sampled from; the size is quadratic in the turns."""
    answer_seconds: Seconds | None = None
    """Longest duration of a ``/process``, including its wait in the queue; then the rollout is cancelled, with 504."""
    keep_records: bool = False
    """Keep answered records until they expire, instead of acknowledging them when nothing is pending."""
