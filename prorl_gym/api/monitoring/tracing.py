"""One OpenTelemetry trace per rollout, made from its record when it ends: ``pip install 'prorl-gym[otel]'``.

Where to send them: the standard variables (``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_EXPORTER_OTLP_HEADERS``,
``OTEL_SERVICE_NAME``, ...); without an endpoint, or without the packages, nothing is traced. Spans carry numbers and
closed words only: neither prompts nor model output.

A record has the durations of its last attempt's stages and its end time, so stages are laid out backwards from there.
Turns have durations but no times: within RUN they are laid out in order, and the rest of RUN (tools, waits) is divided
evenly before, between and after them; their spans are marked ``prorl.estimated``.
"""

import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prorl_gym import __version__
from prorl_gym.records import Rollout

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

_LOG = logging.getLogger(__name__)

_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_STAGES = ("init", "run", "eval")
_MAX_TURN_SPANS = 256
"""Spans of turns in one trace."""

AttributeValue = str | bool | int | float


@dataclass(frozen=True, slots=True)
class SpanSpec:
    """A span to be made; times in Unix seconds."""

    name: str
    start: float
    end: float
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict[str, AttributeValue])
    children: tuple["SpanSpec", ...] = ()


class RolloutTracer:
    """Sends traces. A thread of the SDK exports, and drops spans rather than block."""

    def __init__(self, processor: "SpanProcessor") -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider

        named = {SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME") or "prorl-gym", SERVICE_VERSION: __version__}
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("prorl_gym", __version__)

    @classmethod
    def from_environment(cls) -> "RolloutTracer | None":
        """Return one, or ``None`` when no endpoint is set or the packages are missing."""
        wanted = any(os.environ.get(name) for name in _ENDPOINT_VARIABLES)
        if not wanted or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
            return None
        if importlib.util.find_spec("opentelemetry.sdk") is None:
            _LOG.warning(
                "%s is set, but the packages are missing: pip install 'prorl-gym[otel]'", _ENDPOINT_VARIABLES[0]
            )
            return None
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        return cls(BatchSpanProcessor(OTLPSpanExporter()))

    def export_rollout(self, rollout: Rollout) -> None:
        self._emit(build_rollout_span(rollout), None)

    def close(self) -> None:
        """Send pending spans. Blocks for up to the exporter's timeout: do not call it on an event loop."""
        self._provider.shutdown()

    def _emit(self, piece: SpanSpec, parent: "Span | None") -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        # An empty context, not the current one: a rollout is no child of the request in which it ended.
        context = Context() if parent is None else set_span_in_context(parent, Context())
        span = self._tracer.start_span(
            piece.name, context, attributes=dict(piece.attributes), start_time=int(piece.start * 1e9)
        )
        for part in piece.children:
            self._emit(part, span)
        span.end(int(piece.end * 1e9))


def build_rollout_span(rollout: Rollout) -> SpanSpec:
    """Return the spans of a record: the rollout, its last attempt, the stages of that, the turns of RUN."""
    outcome = rollout.outcome
    detail = outcome.kind or outcome.limit or outcome.reason
    facts: dict[str, AttributeValue] = {
        "prorl.rollout_id": rollout.rollout_id,
        "prorl.run_id": rollout.run_id,
        "prorl.group_id": rollout.group_id or "",
        "prorl.environment": rollout.environment,
        "prorl.status": outcome.status,
        "prorl.detail": detail.value if detail else "",
        "prorl.turns": rollout.turns,
        "prorl.sampled_tokens": rollout.sampled_tokens,
        "prorl.retries": len(rollout.retries),
        **({} if rollout.reward is None else {"prorl.reward": rollout.reward}),
    }
    stages = tuple(_stage_spans(rollout))
    begun = stages[0].start if stages else rollout.finished_at
    numbers: dict[str, AttributeValue] = {"prorl.attempt": rollout.attempt}
    attempt = SpanSpec("attempt", begun, rollout.finished_at, numbers, stages)
    return SpanSpec("rollout", min(rollout.accepted_at, begun), rollout.finished_at, facts, (attempt,))


def _stage_spans(rollout: Rollout) -> Iterator[SpanSpec]:
    known = [(name, rollout.stages[name]) for name in _STAGES if name in rollout.stages]
    at = rollout.finished_at - sum(times.queued + times.seconds for _, times in known)
    for name, times in known:
        start, at = at + times.queued, at + times.queued + times.seconds
        waited: dict[str, AttributeValue] = {"prorl.queued_seconds": times.queued}
        yield SpanSpec(name, start, at, waited, tuple(_turn_spans(rollout, start, at)) if name == "run" else ())


def _turn_spans(rollout: Rollout, start: float, end: float) -> Iterator[SpanSpec]:
    made = [one for segment in rollout.segments for one in segment.generations][:_MAX_TURN_SPANS]
    seconds = [max(0.0, one.seconds) for one in made]
    scale = min(1.0, (end - start) / total) if (total := sum(seconds)) else 1.0
    gap = max(0.0, end - start - total * scale) / (len(made) + 1)
    at = start
    for one, took in zip(made, seconds, strict=True):
        at += gap
        facts: dict[str, AttributeValue] = {
            "prorl.turn": one.turn,
            "prorl.engine": one.engine,
            "prorl.sampled_tokens": one.end - one.start,
            "prorl.finish_reason": one.finish_reason,
            "prorl.estimated": True,
        }
        if one.cached_tokens is not None:
            facts["prorl.cached_tokens"] = one.cached_tokens
        yield SpanSpec("turn", at, at + took * scale, facts)
        at += took * scale
