"""What the routes share: a service and everything that watches or steers it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

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


@dataclass(slots=True)
class AppContext:
    """Answers before pools, sandboxes and tokenizer are loaded: ``attach_pools`` adds them."""

    service: RolloutService
    max_pending: int
    """Rollouts without a record; beyond it submissions are refused for a while."""
    counters: RolloutCounters
    metrics: ServiceMetrics
    history: History
    mismatches: MismatchReports
    policies: PolicyControllers
    pools: list[EnginePool]
    count_sandboxes: Callable[[], int | None]
    """Returns the number of running sandboxes; ``None``: unknown."""
    decode: TokenDecoder | None = None
    """Of the tokenizer, for pages; ``None``: there is none."""
    node_config: str = ""
    """What nodes need of the configuration, as JSON; empty: the service has no nodes."""
    find_nodes: Callable[[], NodeRunners | None] = lambda: None
    """Returns the nodes; ``None``: there are none, or the service is loading."""
    render_prompt: PromptRenderer | None = None
    """By the tokenizer and its template; ``None``: there is none yet."""
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
        count_sandboxes: Callable[[], int | None] = lambda: None,
        max_pending: int = 100_000,
        history_interval_seconds: float = 5.0,
        node_config: str = "",
        find_nodes: Callable[[], NodeRunners | None] = lambda: None,
    ) -> Self:
        """Observe a service.

        Args:
            service: the caller starts and stops it.
            count_sandboxes: returns the number of running sandboxes; ``None``: unknown.
            max_pending: see the field.
            history_interval_seconds: between two samples; nothing is sampled before ``history`` is entered.
            node_config: see the field.
            find_nodes: see the field.
        """
        counters = RolloutCounters()
        pools: list[EnginePool] = []
        mismatches = MismatchReports()
        metrics = ServiceMetrics(service, counters, pools, count_sandboxes, mismatches, find_nodes)
        history = History(service, counters, pools, mismatches, interval_seconds=history_interval_seconds)
        history.lag.observers.append(metrics.observe_loop_lag)
        service.add_record_observer(counters.count_rollout)
        service.add_record_observer(metrics.observe_rollout)
        policies = PolicyControllers()
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
            node_config=node_config,
            find_nodes=find_nodes,
        )

    def attach_pools(
        self,
        pools: Sequence[EnginePool],
        weight_updaters: Mapping[str, WeightUpdater],
        registries: Mapping[str, EngineRegistry],
        decode: TokenDecoder | None,
        render_prompt: PromptRenderer | None = None,
    ) -> None:
        """Show and steer these pools from now on. Once.

        Args:
            pools: engines whose figures are shown.
            weight_updaters: by name of the pool, of those that a trainer may pause and update.
            registries: by name of the pool, of those whose engines a trainer may change.
            decode: of the tokenizer, for pages of rollouts.
            render_prompt: by the tokenizer and its template, for rows whose rollout never ran.
        """
        self.pools.extend(pools)
        self.decode, self.render_prompt = decode, render_prompt
        self.policies.set_controllers(
            [
                PolicyController(
                    pool, weight_updaters[pool.name], registries.get(pool.name), self.service.set_policy_version
                )
                for pool in pools
                if pool.name in weight_updaters
            ]
        )
