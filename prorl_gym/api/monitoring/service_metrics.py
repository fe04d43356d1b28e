"""The /metrics page: outcomes, times per stage, occupancy, groups, engines, the ledger, the loop.

Labels come from bounded sets only: environments of the service, closed lists of words, engines of the configuration.
``docs/metrics.md`` lists every family; a test compares.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prorl_gym import __version__
from prorl_gym.api.monitoring.history import RolloutCounters
from prorl_gym.api.monitoring.mismatch_reports import MismatchReports
from prorl_gym.client.wire_models import DispatchStatus, LedgerStatus
from prorl_gym.inference.balance.engine_pool import EnginePool, PoolSnapshot
from prorl_gym.inference.balance.members import PoolMember
from prorl_gym.records import Rollout
from prorl_gym.rollout.nodes.node_runners import NodeRunners
from prorl_gym.rollout.service import RolloutService

_STAGE_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600)
_CANCEL_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 30)
_LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)


class ServiceMetrics:
    """Metrics of a service.

    Args:
        service: whose metrics.
        counters: of its finished rollouts.
        pools: its engines.
        count_sandboxes: how many are alive; ``None``: unknown.
        mismatches: that trainers reported.
        nodes: where attempts run; ``None``: in the service's process.
    """

    def __init__(
        self,
        service: RolloutService,
        counters: RolloutCounters,
        pools: Sequence[EnginePool] = (),
        count_sandboxes: Callable[[], int | None] = lambda: None,
        mismatches: MismatchReports | None = None,
        nodes: NodeRunners | None = None,
    ) -> None:
        self._service = service
        self._count_sandboxes = count_sandboxes
        self._registry = known = CollectorRegistry()
        self._stage = Histogram(
            "prorl_stage_seconds", "Time in a stage.", ["environment", "stage"], buckets=_STAGE_BUCKETS, registry=known
        )
        self._wait = Histogram(
            "prorl_stage_queue_seconds", "Wait before a stage.", ["stage"], buckets=_STAGE_BUCKETS, registry=known
        )
        self._cancel = Histogram(
            "prorl_cancel_seconds",
            "From a cancel until engine call and sandboxes were closed.",
            buckets=_CANCEL_BUCKETS,
            registry=known,
        )
        self._lag = Histogram(
            "prorl_event_loop_lag_seconds", "Delay of the event loop.", buckets=_LAG_BUCKETS, registry=known
        )
        self._pending = Gauge(
            "prorl_rollouts_pending", "Rollouts without a terminal record.", ["where"], registry=known
        )
        self._slots = Gauge("prorl_slots_busy", "Slots in use.", ["stage"], registry=known)
        self._ready = Gauge("prorl_ready", "Whether the service works.", registry=known)
        self._bytes = Gauge("prorl_ledger_bytes", "Size of the ledger on the disk.", registry=known)
        self._rows = Gauge("prorl_ledger_rollouts", "Rollouts in the ledger.", ["state"], registry=known)
        self._full = Gauge("prorl_ledger_full", "Whether the ledger's disk budget is used up.", registry=known)
        self._alive = Gauge("prorl_sandboxes_alive", "Sandboxes that run.", registry=known)
        Gauge("prorl_build_info", "Always 1; the label is the release.", ["version"], registry=known).labels(
            __version__
        ).set(1)
        known.register(RolloutCollector(counters))
        known.register(GroupCollector(service))
        known.register(PoolCollector(pools))
        if nodes is not None:
            known.register(NodeCollector(nodes))
        known.register(MismatchCollector(mismatches or MismatchReports()))

    async def render(self) -> bytes:
        """Return the page in Prometheus' text form."""
        self._set_gauges(await self._service.status(), await self._service.usage())
        return generate_latest(self._registry)

    def observe_loop_lag(self, seconds: float) -> None:
        """Count one measurement of the event loop's lag."""
        self._lag.observe(seconds)

    def observe_rollout(self, rollout: Rollout) -> None:
        """Count the times of a record that was written."""
        # An unknown environment's name comes from outside: as a label it would grow without a bound.
        environment = rollout.environment if rollout.settings is not None else ""
        for stage, times in rollout.stages.items():
            self._stage.labels(environment, stage).observe(times.seconds)
            self._wait.labels(stage).observe(times.queued)
        if rollout.cancel_seconds is not None:
            self._cancel.observe(rollout.cancel_seconds)

    def _set_gauges(self, status: DispatchStatus, usage: LedgerStatus) -> None:
        self._ready.set(status.ready)
        self._pending.labels("queued").set(status.queued)
        self._pending.labels("running").set(status.running)
        self._pending.labels("parked").set(status.capacity.parked)
        for stage in ("init", "run", "eval"):
            self._slots.labels(stage).set(getattr(status.capacity, stage))
        self._bytes.set(usage.bytes)
        self._full.set(usage.full)
        for state in ("pending", "kept", "released"):
            self._rows.labels(state).set(getattr(usage, state))
        self._alive.set(math.nan if (alive := self._count_sandboxes()) is None else alive)


_MISMATCH_FIGURES = {
    "mean_abs_diff": "Mean of these differences, in nats.",
    "kl": "Estimated KL divergence of the served policy from the trainer's in the last reported batch, in nats.",
    "mult_prob_error": "Mean factor between the trainer's and the served probabilities in the last reported batch.",
}
"""Figures of ``Mismatch`` and what the page says about them."""

_Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]
_COUNTER, _GAUGE = CounterMetricFamily, GaugeMetricFamily

_POOL_FAMILIES: Sequence[tuple[_Kind, str, str, Callable[[PoolSnapshot], float]]] = (
    (_COUNTER, "pool_failovers", "Calls made again on another engine.", lambda pool: pool.failovers),
    (
        _COUNTER,
        "pool_reusable_tokens",
        "Prompt tokens that an engine had computed before.",
        lambda pool: pool.reusable_tokens,
    ),
    (
        _COUNTER,
        "admission_suspensions",
        "Times an admitted rollout was suspended.",
        lambda pool: pool.admission.suspensions,
    ),
    (_COUNTER, "admission_cuts", "Times the budget was cut.", lambda pool: pool.admission.cuts),
    (
        _COUNTER,
        "admission_wait_seconds",
        "Time that rollouts waited for admission.",
        lambda pool: pool.admission.waited_seconds,
    ),
    (_GAUGE, "pool_paused", "Whether calls are paused.", lambda pool: pool.paused),
    (
        _GAUGE,
        "pool_unserved",
        "Rollouts that wait because no engine serves the model.",
        lambda pool: pool.waiting_rollouts,
    ),
    (_GAUGE, "pool_policy_version", "Policy version of tokens sampled from now on.", lambda pool: pool.version),
    (
        _GAUGE,
        "admission_budget",
        "Budget of admitted rollouts: KV tokens, or rollouts if no engine reports its capacity.",
        lambda pool: pool.admission.budget,
    ),
    (_GAUGE, "admission_filled", "Part of the budget in use.", lambda pool: pool.admission.used),
    (_GAUGE, "admission_live", "Rollouts admitted to engines.", lambda pool: pool.admission.live),
    (_GAUGE, "admission_waiting", "Rollouts that wait for admission.", lambda pool: pool.admission.waiting),
)
"""Kind, name, text and value; ``pool`` is the label."""

_ENGINE_FAMILIES: Sequence[tuple[_Kind, str, str, Callable[[PoolMember], float]]] = (
    (_COUNTER, "calls", "Calls that the engine answered.", lambda engine: engine.calls),
    (_COUNTER, "failures", "Calls that the engine failed.", lambda engine: engine.failures),
    (_COUNTER, "sampled_tokens", "Tokens that the engine sampled.", lambda engine: engine.sampled_tokens),
    (
        _COUNTER,
        "prompt_tokens",
        "Prompt tokens of calls whose cached tokens are known.",
        lambda engine: engine.prompt_tokens,
    ),
    (
        _COUNTER,
        "cached_tokens",
        "Prompt tokens found in the engine's prefix cache.",
        lambda engine: engine.cached_tokens,
    ),
    (_GAUGE, "in_flight", "Calls in flight.", lambda engine: engine.in_flight),
    (_GAUGE, "up", "Whether the engine is healthy.", lambda engine: not engine.unhealthy_reason),
    (
        _GAUGE,
        "quarantined",
        "Whether the engine is kept from serving this policy version.",
        lambda engine: bool(engine.quarantine_reason),
    ),
    (_GAUGE, "draining", "Whether the engine only finishes its calls.", lambda engine: engine.draining),
    (_GAUGE, "policy_version", "Policy version of the tokens that the engine samples.", lambda engine: engine.version),
)
"""As ``_POOL_FAMILIES``; the labels are ``pool`` and ``engine``."""


class PoolCollector(Collector):
    """Collects the metrics of engine pools when the page is read, so that an engine that left leaves no row.

    Args:
        pools: of different names.
    """

    def __init__(self, pools: Sequence[EnginePool]) -> None:
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        """Return all families."""
        pools = [pool.snapshot() for pool in self._pools]
        engines = [((pool.name, engine.name), engine) for pool in pools for engine in pool.engines]
        for kind, name, text, value_of in _POOL_FAMILIES:
            yield _family(kind, f"prorl_{name}", text, ("pool",), {(pool.name,): value_of(pool) for pool in pools})
        for kind, name, text, engine_value in _ENGINE_FAMILIES:
            values = {labels: engine_value(engine) for labels, engine in engines}
            yield _family(kind, f"prorl_engine_{name}", text, ("pool", "engine"), values)


class GroupCollector(Collector):
    """Collects groups over all runs that have a demand: a run's id is no label, since there is no bound on runs.

    Args:
        service: whose groups.
    """

    def __init__(self, service: RolloutService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Return all families."""
        reports = [self._service.groups_status(run) for run in self._service.demands()]
        states: Counter[str] = Counter()
        for report in reports:
            states.update(report.states)
        held = sum(report.held for report in reports)
        wasted = sum(report.wasted_tokens for report in reports)
        saved = sum(report.reclaimed_seconds for report in reports)
        by_state = {(state,): count for state, count in states.items()}
        yield _GAUGE("prorl_demands", "Runs with a demand.", len(reports))
        yield _family(_GAUGE, "prorl_groups", "Groups of runs with a demand.", ("state",), by_state)
        yield _GAUGE("prorl_rollouts_held", "Rollouts held until a demand needs them.", held)
        yield _GAUGE(
            "prorl_groups_wasted_tokens", "Tokens sampled in rollouts cancelled as redundant or stale.", wasted
        )
        yield _GAUGE("prorl_groups_reclaimed_seconds", "Estimated working time saved by these cancels.", saved)


class NodeCollector(Collector):
    """Collects the state of nodes.

    Args:
        nodes: the nodes.
    """

    def __init__(self, nodes: NodeRunners) -> None:
        self._nodes = nodes

    def collect(self) -> Iterator[Metric]:
        """Return all families."""
        status = self._nodes.status()
        in_hand = {(node.name,): node.in_hand for node in status.nodes}
        yield _GAUGE("prorl_nodes", "Joined nodes.", len(status.nodes))
        yield _COUNTER("prorl_nodes_joined", "Times that a node joined.", status.joined)
        yield _COUNTER("prorl_nodes_lost", "Nodes that were lost.", status.lost)
        yield _family(_GAUGE, "prorl_node_rollouts", "Rollouts that a node has in hand.", ("node",), in_hand)


class RolloutCollector(Collector):
    """Collects the counts of finished rollouts.

    Args:
        counters: the counts.
    """

    def __init__(self, counters: RolloutCounters) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        """Return all families."""
        counters = self._counters
        outcomes = {
            (one.environment, one.status, one.cause, one.detail): one.count for one in counters.outcome_counts()
        }
        tokens = {(environment,): count for environment, count in counters.tokens_by_environment.items()}
        retries = {(kind,): count for kind, count in counters.retries.items()}
        means = {(one.environment,): one.mean for one in counters.reward_means()}
        labels = ("environment", "status", "cause", "kind")
        yield _family(_COUNTER, "prorl_rollouts_finished", "Terminal records written.", labels, outcomes)
        yield _family(
            _COUNTER, "prorl_sampled_tokens", "Tokens sampled in finished rollouts.", ("environment",), tokens
        )
        yield _COUNTER(
            "prorl_wasted_tokens", "Tokens sampled in rollouts that ended without a reward.", counters.wasted_tokens
        )
        yield _family(_COUNTER, "prorl_retries", "Attempts that were retried.", ("kind",), retries)
        yield _family(_GAUGE, "prorl_mean_reward", "Mean of all rewards so far.", ("environment",), means)


class MismatchCollector(Collector):
    """Collects the report that came last, of whichever run: a run's id is no label.

    Args:
        reports: the reports.
    """

    def __init__(self, reports: MismatchReports) -> None:
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        """Return all families."""
        last = [report.mismatch for report in self._reports.latest()[-1:]]
        positions = {(place,): one.max_abs_diff for batch in last for place, one in batch.by_position.items()}
        yield _COUNTER("prorl_mismatch_reports", "Batches whose mismatch a trainer reported.", self._reports.count)
        yield _family(
            _GAUGE,
            "prorl_mismatch_max_abs_diff",
            "Largest difference of the trainer's and the served log-probs in the last reported batch, in nats.",
            ("position",),
            positions,
        )
        for name, text in _MISMATCH_FIGURES.items():
            values = [((), getattr(batch.total, name)) for batch in last]
            yield _family(_GAUGE, f"prorl_mismatch_{name}", text, (), dict(values))


def _family(
    kind: _Kind, name: str, text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], float]
) -> Metric:
    """Return a family of metrics; ``values`` maps the labels' values to the metric's."""
    family = kind(name, text, labels=labels)
    for of, value in values.items():
        family.add_metric(of, value)
    return family
