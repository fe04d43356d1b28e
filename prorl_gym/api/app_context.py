"""What the routes share: a service and everything that watches or steers it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from prorl_gym.api.http.error_responses import ApiError
from prorl_gym.api.monitoring.history import History, RolloutCounters
from prorl_gym.api.monitoring.mismatch_reports import MismatchReports
from prorl_gym.api.monitoring.problems import find_problem, pool_problem
from prorl_gym.api.monitoring.service_metrics import ServiceMetrics
from prorl_gym.api.policy_control import EngineRegistry, PolicyController, PolicyControllers
from prorl_gym.client.wire_models import FirstPrompt, FirstPromptBody
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.weights.weight_updater import WeightUpdater
from prorl_gym.rollout.nodes.node_runners import NodeRunners
from prorl_gym.rollout.service import RolloutService

TokenDecoder = Callable[[Sequence[int]], str]
"""Token ids to text."""

PromptRenderer = Callable[[FirstPromptBody], FirstPrompt]
"""The first prompt of a row to token ids."""


def _render_nothing(_: FirstPromptBody) -> FirstPrompt:
    raise ApiError(404, "This service has no tokenizer.")


@dataclass(slots=True)
class AppContext:
    """A service with its pools, counters and metrics. See ``create``."""

    service: RolloutService
    max_pending: int
    """Rollouts without a record; beyond it submissions are refused for a while."""
    counters: RolloutCounters
    metrics: ServiceMetrics
    history: History
    mismatches: MismatchReports
    policies: PolicyControllers
    pools: Sequence[EnginePool]
    count_sandboxes: Callable[[], int | None]
    """Returns the number of running sandboxes; ``None``: unknown."""
    decode: TokenDecoder | None
    """Of the tokenizer, for pages; ``None``: there is none."""
    render_prompt: PromptRenderer
    """By the tokenizer and its template."""
    nodes: NodeRunners | None
    """Where attempts run; ``None``: in this process."""
    node_config: str
    """What nodes need of the configuration, as JSON."""
    started_at: float = field(default_factory=time.monotonic)

    @property
    def problem(self) -> str:
        """What keeps rollouts from being made, its cause and what to do, in one line; empty if nothing does."""
        return find_problem(self.service, self.pools)

    @property
    def engine_problem(self) -> str:
        """The same of the engines alone."""
        return pool_problem(self.pools)

    @classmethod
    def create(
        cls,
        service: RolloutService,
        *,
        pools: Sequence[EnginePool] = (),
        weight_updaters: Mapping[str, WeightUpdater] | None = None,
        registries: Mapping[str, EngineRegistry] | None = None,
        count_sandboxes: Callable[[], int | None] = lambda: None,
        decode: TokenDecoder | None = None,
        render_prompt: PromptRenderer = _render_nothing,
        max_pending: int = 100_000,
        history_interval_seconds: float = 5.0,
        nodes: NodeRunners | None = None,
        node_config: str = "",
    ) -> Self:
        """Observe a service.

        Args:
            service: the caller starts and stops it.
            pools: engines whose figures are shown.
            weight_updaters: by name of the pool, of those that a trainer may pause and update.
            registries: by name of the pool, of those whose engines a trainer may change.
            count_sandboxes: see the field.
            decode: see the field.
            render_prompt: see the field.
            max_pending: see the field.
            history_interval_seconds: between two samples; nothing is sampled before ``history`` is entered.
            nodes: see the field.
            node_config: see the field.
        """
        weight_updaters, registries = weight_updaters or {}, registries or {}
        counters = RolloutCounters()
        mismatches = MismatchReports()
        metrics = ServiceMetrics(service, counters, pools, count_sandboxes, mismatches, nodes)
        history = History(service, counters, pools, mismatches, interval_seconds=history_interval_seconds)
        history.lag.observers.append(metrics.observe_loop_lag)
        service.add_record_observer(counters.count_rollout)
        service.add_record_observer(metrics.observe_rollout)
        policies = PolicyControllers(
            [
                PolicyController(
                    pool, weight_updaters[pool.name], registries.get(pool.name), service.set_policy_version
                )
                for pool in pools
                if pool.name in weight_updaters
            ]
        )
        return cls(
            service,
            max_pending,
            counters,
            metrics,
            history,
            mismatches,
            policies,
            pools,
            count_sandboxes,
            decode,
            render_prompt,
            nodes,
            node_config,
        )
