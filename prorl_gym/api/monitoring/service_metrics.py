"""The /metrics page: outcomes, times per stage, occupancy, groups, engines, the ledger, the loop.

Labels come from bounded sets only: environments of the service, closed lists of words, engines of the configuration.
``docs/metrics.md`` lists every family; a test compares.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prorl_gym import __version__
from prorl_gym.api.monitoring.history import MismatchReports, RolloutCounters
from prorl_gym.client.wire_models import NodesStatus
from prorl_gym.inference.balance.engine_pool import EnginePool, PoolSnapshot
from prorl_gym.inference.balance.members import PoolMember
from prorl_gym.left_out import left_out_counts
from prorl_gym.records import Rollout
from prorl_gym.rollout.nodes.node_runners import NodeRunners
from prorl_gym.rollout.service import RolloutService

_STAGE_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600)
_CANCEL_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 30)
_LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)


class ServiceMetrics(Collector):
    """Metrics of a service. What has an owner is read when the page is: an engine that left leaves no row."""

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
        self._counters = counters
        self._pools = pools
        self._mismatches = mismatches or MismatchReports()
        self._nodes = nodes
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
        self.loop_lag = Histogram(
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
        known.register(self)

    def collect(self) -> Iterator[Metric]:
        yield from _rollout_families(self._counters)
        yield from _group_families(self._service)
        yield from _pool_families([pool.snapshot() for pool in self._pools])
        if self._nodes is not None:
            yield from _node_families(self._nodes.status())
        yield from _mismatch_families(self._mismatches)
        left_out = {(wire,): count for wire, count in left_out_counts().items()}
        text = "What live wires said that is not known or cannot be used; the log names it."
        yield _family(_COUNTER, "prorl_left_out", text, ("wire",), left_out)

    async def render(self) -> bytes:
        status, usage = await self._service.status(), await self._service.ledger.usage()
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
        return generate_latest(self._registry)

    def observe_rollout(self, rollout: Rollout) -> None:
        # An unknown environment's name comes from outside: as a label it would grow without a bound.
        environment = rollout.environment if rollout.settings is not None else ""
        for stage, times in rollout.stages.items():
            self._stage.labels(environment, stage).observe(times.seconds)
            self._wait.labels(stage).observe(times.queued)
        if rollout.cancel_seconds is not None:
            self._cancel.observe(rollout.cancel_seconds)


_MISMATCH_FIGURES = {
    "mean_abs_diff": "Mean of these differences, in nats.",
    "kl": "Estimated KL divergence of the served policy from the trainer's in the last reported batch, in nats.",
    "mult_prob_error": "Mean factor between the trainer's and the served probabilities in the last reported batch.",
}
"""Figures of ``Mismatch`` and what the page says about them."""

_Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]
_COUNTER, _GAUGE = CounterMetricFamily, GaugeMetricFamily

_POOL_FAMILIES: Sequence[tuple[_Kind, str, str, str]] = (
    (_COUNTER, "pool_failovers", "Calls retried on another engine.", "failovers"),
    (_COUNTER, "pool_reusable_tokens", "Prompt tokens that an engine had computed before.", "reusable_tokens"),
    (_COUNTER, "admission_suspensions", "Times an admitted rollout was suspended.", "admission.suspensions"),
    (_COUNTER, "admission_cuts", "Times the budget was cut.", "admission.cuts"),
    (_COUNTER, "admission_wait_seconds", "Time that rollouts waited for admission.", "admission.waited_seconds"),
    (_GAUGE, "pool_paused", "Whether calls are paused.", "paused"),
    (_GAUGE, "pool_unserved", "Rollouts that wait because no engine serves the model.", "waiting_rollouts"),
    (_GAUGE, "pool_policy_version", "Policy version of tokens sampled from now on.", "version"),
    (
        _GAUGE,
        "admission_budget",
        "Budget of admitted rollouts: KV tokens, or rollouts if no engine reports its capacity.",
        "admission.budget",
    ),
    (_GAUGE, "admission_filled", "Part of the budget in use.", "admission.used"),
    (_GAUGE, "admission_live", "Rollouts admitted to engines.", "admission.live"),
    (_GAUGE, "admission_waiting", "Rollouts that wait for admission.", "admission.waiting"),
)
"""Kind, name, text, and attribute of the pool's snapshot; ``pool`` is the label."""

_ENGINE_FAMILIES: Sequence[tuple[_Kind, str, str, Callable[[PoolMember], float]]] = (
    (_COUNTER, "calls", "Calls that the engine answered.", attrgetter("calls")),
    (_COUNTER, "failures", "Calls that the engine failed.", attrgetter("failures")),
    (_COUNTER, "sampled_tokens", "Tokens that the engine sampled.", attrgetter("sampled_tokens")),
    (_COUNTER, "prompt_tokens", "Prompt tokens of calls whose cached tokens are known.", attrgetter("prompt_tokens")),
    (_COUNTER, "cached_tokens", "Prompt tokens found in the engine's prefix cache.", attrgetter("cached_tokens")),
    (_GAUGE, "in_flight", "Calls in flight.", attrgetter("in_flight")),
    (_GAUGE, "up", "Whether the engine is healthy.", lambda engine: not engine.unhealthy_reason),
    (
        _GAUGE,
        "quarantined",
        "Whether the engine is kept from serving this policy version.",
        lambda engine: bool(engine.quarantine_reason),
    ),
    (_GAUGE, "draining", "Whether the engine only finishes its calls.", attrgetter("draining")),
    (_GAUGE, "policy_version", "Policy version of the tokens that the engine samples.", attrgetter("version")),
)
"""Kind, name, text and value; the labels are ``pool`` and ``engine``."""


def _pool_families(pools: Sequence[PoolSnapshot]) -> Iterator[Metric]:
    for kind, name, text, attribute in _POOL_FAMILIES:
        values = {(pool.name,): attrgetter(attribute)(pool) for pool in pools}
        yield _family(kind, f"prorl_{name}", text, ("pool",), values)
    for kind, name, text, value_of in _ENGINE_FAMILIES:
        values = {(pool.name, engine.name): value_of(engine) for pool in pools for engine in pool.engines}
        yield _family(kind, f"prorl_engine_{name}", text, ("pool", "engine"), values)


def _group_families(service: RolloutService) -> Iterator[Metric]:
    """Yield sums over all runs that have a demand: a run's id is no label, since there is no bound on runs."""
    reports = [service.groups.status(run) for run in service.groups.demands()]
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
    yield _GAUGE("prorl_groups_wasted_tokens", "Tokens sampled in rollouts cancelled as redundant or stale.", wasted)
    yield _GAUGE("prorl_groups_reclaimed_seconds", "Estimated working time saved by these cancels.", saved)


def _node_families(status: NodesStatus) -> Iterator[Metric]:
    attempts = {(node.name,): node.in_hand for node in status.nodes}
    yield _GAUGE("prorl_nodes", "Joined nodes.", len(status.nodes))
    yield _COUNTER("prorl_nodes_joined", "Times that a node joined.", status.joined)
    yield _COUNTER("prorl_nodes_lost", "Nodes that were lost.", status.lost)
    yield _family(_GAUGE, "prorl_node_rollouts", "Rollouts that a node runs.", ("node",), attempts)


def _rollout_families(counters: RolloutCounters) -> Iterator[Metric]:
    outcomes = dict(counters.outcomes.most_common())
    tokens = {(environment,): count for environment, count in counters.tokens_by_environment.items()}
    retries = {(kind,): count for kind, count in counters.retries.items()}
    means = {(one.environment,): one.mean for one in counters.reward_means()}
    labels = ("environment", "status", "cause", "kind")
    yield _family(_COUNTER, "prorl_rollouts_finished", "Terminal records written.", labels, outcomes)
    yield _family(_COUNTER, "prorl_sampled_tokens", "Tokens sampled in finished rollouts.", ("environment",), tokens)
    yield _COUNTER(
        "prorl_wasted_tokens", "Tokens sampled in rollouts that ended without a reward.", counters.wasted_tokens
    )
    yield _family(_COUNTER, "prorl_retries", "Attempts that were retried.", ("kind",), retries)
    yield _family(_GAUGE, "prorl_mean_reward", "Mean of all rewards so far.", ("environment",), means)


def _mismatch_families(reports: MismatchReports) -> Iterator[Metric]:
    """Yield figures of the report that came last, of whichever run: a run's id is no label."""
    last = [report.mismatch for report in reports.latest()[-1:]]
    positions = {(place,): one.max_abs_diff for batch in last for place, one in batch.by_position.items()}
    yield _COUNTER("prorl_mismatch_reports", "Batches whose mismatch a trainer reported.", reports.count)
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
