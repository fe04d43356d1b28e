"""What the routes stand on, handed to each of them."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from prorl_gym.api.fleet import Fleet
from prorl_gym.api.history import History
from prorl_gym.api.metrics import Metrics
from prorl_gym.api.policies import Policies, PolicyDesk
from prorl_gym.api.tally import Tally
from prorl_gym.inference.lifecycle import PolicyLifecycle
from prorl_gym.inference.pool import EnginePool
from prorl_gym.rollout.service import RolloutService

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may ask for."""

    max_body_bytes: int = 64 << 20
    """Of one request."""
    max_pending: int = 100_000
    """Rollouts without a record; beyond it submissions are told to come again later."""


@dataclass(slots=True)
class Serving:
    """A service and everything that watches or steers it.

    It can answer before pools, sandboxes and tokenizer are loaded: ``load`` adds them.
    """

    service: RolloutService
    limits: Limits
    tally: Tally
    metrics: Metrics
    history: History
    policies: Policies
    pools: list[EnginePool]
    sandboxes: Callable[[], int | None] = lambda: None
    """How many are alive; ``None``: nobody knows."""
    decode: Decode | None = None
    """Of the tokenizer, for pages; ``None``: there is none."""
    started: float = field(default_factory=time.monotonic)

    def load(
        self,
        pools: Sequence[EnginePool],
        lifecycles: Mapping[str, PolicyLifecycle],
        fleets: Mapping[str, Fleet],
        decode: Decode | None,
    ) -> None:
        """Show and steer these pools from now on. Once.

        Args:
            pools: engines whose figures are shown.
            lifecycles: by name of the pool, of those that a trainer may pause and update.
            fleets: by name of the pool, of those whose engines a trainer may change.
            decode: of the tokenizer, for pages of rollouts.
        """
        self.pools.extend(pools)
        self.decode = decode
        self.policies.load(
            [
                PolicyDesk(pool, lifecycles[pool.name], fleets.get(pool.name), self.service.policy_version)
                for pool in pools
                if pool.name in lifecycles
            ]
        )
