"""Pools of engines on the /metrics page. Read when it is asked for, so an engine that left leaves no row."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prorl_gym.inference.pool import EnginePool
from prorl_gym.inference.snapshot import EngineSnapshot, PoolSnapshot

_ENGINE_COUNTS: Sequence[tuple[str, str, Callable[[EngineSnapshot], float]]] = (
    ("calls", "Calls that the engine answered.", lambda engine: engine.calls),
    ("failures", "Calls that the engine failed.", lambda engine: engine.failures),
    ("sampled_tokens", "Tokens that it sampled.", lambda engine: engine.sampled_tokens),
    ("prompt_tokens", "Prompt tokens of calls that told what was cached.", lambda engine: engine.prompt_tokens),
    ("cached_tokens", "Of these, found in its prefix cache.", lambda engine: engine.cached_tokens),
)
_ENGINE_STATES: Sequence[tuple[str, str, Callable[[EngineSnapshot], float]]] = (
    ("in_flight", "Calls on their way.", lambda engine: engine.in_flight),
    ("up", "Whether it is well.", lambda engine: not engine.trouble),
    ("quarantined", "Whether it must not serve this policy version.", lambda engine: bool(engine.quarantine)),
    ("draining", "Whether it takes no more calls.", lambda engine: engine.draining),
    ("policy_version", "Of the tokens that it samples.", lambda engine: engine.version),
)
_POOL_COUNTS: Sequence[tuple[str, str, Callable[[PoolSnapshot], float]]] = (
    ("pool_failovers", "Calls made again on another engine.", lambda pool: pool.failovers),
    ("pool_reusable_tokens", "Prompt tokens that had been computed before.", lambda pool: pool.reusable_tokens),
    ("admission_suspensions", "Times a live rollout had to wait.", lambda pool: pool.admission.suspended),
    ("admission_cuts", "Times the budget was cut.", lambda pool: pool.admission.cuts),
    ("admission_wait_seconds", "Waited by all rollouts.", lambda pool: pool.admission.waited_seconds),
)
_POOL_STATES: Sequence[tuple[str, str, Callable[[PoolSnapshot], float]]] = (
    ("pool_paused", "Whether no call may begin.", lambda pool: pool.paused),
    ("pool_unserved", "Rollouts that wait because no engine has the model.", lambda pool: pool.unserved),
    ("pool_policy_version", "Of tokens sampled from now on.", lambda pool: pool.version),
    (
        "admission_budget",
        "What live rollouts may fill: KV tokens, or rollouts where no engine tells its capacity.",
        lambda pool: pool.admission.budget,
    ),
    ("admission_filled", "What they fill.", lambda pool: pool.admission.filled),
    ("admission_live", "Rollouts that may talk to engines.", lambda pool: pool.admission.live),
    ("admission_waiting", "Rollouts that wait for room.", lambda pool: pool.admission.waiting),
)


class PoolCollector(Collector):
    """Shows pools.

    Args:
        pools: of different names.
    """

    def __init__(self, pools: Sequence[EnginePool]) -> None:
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        """Return all families."""
        pools = [pool.snapshot() for pool in self._pools]
        engines = [((pool.name, engine.name), engine) for pool in pools for engine in pool.engines]
        for name, text, read in _POOL_COUNTS:
            yield _counts(name, text, ("pool",), (((pool.name,), read(pool)) for pool in pools))
        for name, text, read in _POOL_STATES:
            yield _states(name, text, ("pool",), (((pool.name,), read(pool)) for pool in pools))
        for name, text, tell in _ENGINE_COUNTS:
            yield _counts(f"engine_{name}", text, ("pool", "engine"), ((labels, tell(one)) for labels, one in engines))
        for name, text, tell in _ENGINE_STATES:
            yield _states(f"engine_{name}", text, ("pool", "engine"), ((labels, tell(one)) for labels, one in engines))


def _counts(
    name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], float]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"prorl_{name}", text, labels=labels)
    for of, value in rows:
        family.add_metric(of, value)
    return family


def _states(
    name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"prorl_{name}", text, labels=labels)
    for of, value in rows:
        family.add_metric(of, value)
    return family
