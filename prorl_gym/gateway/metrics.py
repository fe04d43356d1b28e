"""The gateway's page of metrics, in a registry of its own."""

from collections.abc import Generator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from prorl_gym.gateway.http_errors import status_of
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.tokens.prompt_builder import PromptOrigin

_SECONDS = (0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1800)


class GatewayMetrics:
    """Counts calls, prompts and tokens."""

    def __init__(self) -> None:
        self._registry = known = CollectorRegistry()
        self._calls = Counter("prorl_model_calls", "Calls answered.", ["route", "status"], registry=known)
        self._seconds = Histogram(
            "prorl_model_call_seconds", "Time of a call.", ["route"], buckets=_SECONDS, registry=known
        )
        self._in_flight = Gauge("prorl_model_calls_in_flight", "Calls not answered yet.", registry=known)
        self._prompts = Counter(
            "prorl_model_prompts",
            "Prompts by origin: first and extended are exact, all others were rendered anew.",
            ["origin"],
            registry=known,
        )
        self._tokens = Counter("prorl_model_tokens", "Tokens, by what they are.", ["kind"], registry=known)
        self._sessions = Gauge("prorl_model_sessions", "Sessions with a call not long ago.", registry=known)
        self._memory = Gauge("prorl_model_memory_tokens", "Token ids kept of recent turns.", registry=known)
        self._engines = Gauge("prorl_model_engines", "Engines.", ["state"], registry=known)
        self._failovers = Gauge("prorl_model_failovers_total", "Calls made again on another engine.", registry=known)
        for origin in PromptOrigin:
            self._prompts.labels(origin.value)  # so that the page shows 0 before the first of them

    @contextmanager
    def track_call(self, route: str) -> Generator[None]:
        """Count and time one call, however it ends."""
        error: BaseException | None = None
        with self._in_flight.track_inprogress(), self._seconds.labels(route).time():
            try:
                yield
            except BaseException as caught:
                error = caught
                raise
            finally:
                self._calls.labels(route, str(status_of(error))).inc()

    def count_prompt(self, origin: PromptOrigin) -> None:
        """Count a prompt by its origin."""
        self._prompts.labels(origin.value).inc()

    def count_tokens(self, *, prompt: int, cached: int, sampled: int) -> None:
        """Count the tokens of one call."""
        for kind, count in (("prompt", prompt), ("cached", cached), ("sampled", sampled)):
            self._tokens.labels(kind).inc(count)

    def render_page(self, pool: EnginePool, *, sessions: int, memory_tokens: int) -> bytes:
        """Return the page in Prometheus' text form, with the state of the pool as it is now."""
        healthy = len(pool.healthy)
        self._sessions.set(sessions)
        self._memory.set(memory_tokens)
        self._engines.labels("well").set(healthy)
        self._engines.labels("not_well").set(len(pool.engines) - healthy)
        self._failovers.set(pool.failovers)
        return generate_latest(self._registry)
