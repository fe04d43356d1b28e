"""A service with everything that watches or steers it: the state that the routes share."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from types import MappingProxyType

from prorl_gym.api.http.error_responses import ApiError
from prorl_gym.api.monitoring.history import History, MismatchReports, RolloutCounters
from prorl_gym.api.monitoring.service_metrics import ServiceMetrics
from prorl_gym.api.policy_control import EngineRegistry, PolicyController
from prorl_gym.client.wire_models import FirstPrompt, FirstPromptBody
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.weights.weight_updater import WeightUpdater
from prorl_gym.pages.page_data import TokenDecoder
from prorl_gym.rollout.nodes.node_runners import NodeRunners
from prorl_gym.rollout.service import RolloutService

PromptRenderer = Callable[[FirstPromptBody], FirstPrompt]
"""The first prompt of a row to token ids."""


def _render_nothing(_: FirstPromptBody) -> FirstPrompt:
    raise ApiError(404, "This service has no tokenizer.")


@dataclass(eq=False)
class AppContext:
    """A service with its pools, counters and metrics. The caller starts and stops the service.

    Nothing is sampled before ``history`` is entered.
    """

    service: RolloutService
    _: KW_ONLY
    pools: Sequence[EnginePool] = ()
    weight_updaters: InitVar[Mapping[str, WeightUpdater]] = MappingProxyType({})
    registries: InitVar[Mapping[str, EngineRegistry]] = MappingProxyType({})
    count_sandboxes: Callable[[], int | None] = lambda: None
    """Returns the number of running sandboxes, if it is known."""
    decode: TokenDecoder | None = None
    render_prompt: PromptRenderer = _render_nothing
    max_pending: int = 100_000
    """Beyond so many rollouts without a record, submissions are refused for a while."""
    history_interval_seconds: float = 5.0
    nodes: NodeRunners | None = None
    """Where attempts run; ``None``: in this process."""
    node_config: str = ""
    """The part of the configuration that nodes need, as JSON."""

    def __post_init__(
        self, weight_updaters: Mapping[str, WeightUpdater], registries: Mapping[str, EngineRegistry]
    ) -> None:
        service, pools = self.service, self.pools
        self.started_at = time.monotonic()
        self.counters = RolloutCounters()
        self.mismatches = MismatchReports()
        self.metrics = ServiceMetrics(service, self.counters, pools, self.count_sandboxes, self.mismatches, self.nodes)
        self.history = History(
            service, self.counters, pools, self.mismatches, interval_seconds=self.history_interval_seconds
        )
        self.history.lag.observers.append(self.metrics.loop_lag.observe)
        service.record_observers.append(self.counters.count_rollout)
        service.record_observers.append(self.metrics.observe_rollout)
        self.policies = {
            pool.name: PolicyController(
                pool, weight_updaters[pool.name], registries.get(pool.name), service.set_policy_version
            )
            for pool in pools
            if pool.name in weight_updaters
        }
        """By the name of their pool."""

    def get_policy(self, pool: str) -> PolicyController:
        if pool not in self.policies:
            known = ", ".join(list(self.policies)[:20]) or "none"
            raise ApiError(404, f"This service has no pool '{pool[:64]}'.", f"It has: {known}.")
        return self.policies[pool]
