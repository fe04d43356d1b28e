"""Traces of rollouts: what hangs on what, when, and that nothing is sent unless it is configured."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rollout_samples import rollout, segment

from prorl_gym.api.monitoring.tracing import RolloutTracer, SpanSpec, build_rollout_span
from prorl_gym.errors import FailureKind
from prorl_gym.records import Generation, Retry, StageTime

STAGES = {"init": StageTime(queued=0.01, seconds=0.02), "run": StageTime(seconds=0.5), "eval": StageTime(seconds=0.01)}
RETRY = Retry(attempt=0, kind=FailureKind.SANDBOX_LOST, stage="run", message="")


def test_one_trace_with_stages_and_turns_through_the_sdk() -> None:
    traced = rollout(segments=[segment(turns=1)], stages=STAGES, retries=[RETRY])
    exporter = InMemorySpanExporter()
    tracing = RolloutTracer(SimpleSpanProcessor(exporter))
    tracing.export_rollout(traced)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    tracing.close()
    assert set(spans) == {"rollout", "attempt", "init", "run", "eval", "turn"}
    parents = {name: span.parent and span.parent.span_id for name, span in spans.items()}
    ids = {name: span.context.span_id for name, span in spans.items()}
    assert parents == {
        "rollout": None,
        "attempt": ids["rollout"],
        **dict.fromkeys(("init", "run", "eval"), ids["attempt"]),
        "turn": ids["run"],
    }
    assert len({span.context.trace_id for span in spans.values()}) == 1
    facts = spans["rollout"].attributes
    assert (facts["prorl.rollout_id"], facts["prorl.reward"], facts["prorl.retries"]) == ("r1", 1.0, 1)
    assert spans["rollout"].end_time == int(traced.finished_at * 1e9)
    assert spans["rollout"].resource.attributes["service.name"] == "prorl-gym"
    values = " ".join(str(value) for span in spans.values() for value in span.attributes.values())
    assert "boxed" not in values and "2+2" not in values


@pytest.mark.parametrize("endpoint", [None, ""])
def test_nothing_is_traced_without_an_endpoint(monkeypatch: pytest.MonkeyPatch, endpoint: str | None) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    if endpoint is not None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    assert RolloutTracer.from_environment() is None


def test_without_the_packages_it_logs_that_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert RolloutTracer.from_environment() is None
    assert "pip install 'prorl-gym[otel]'" in caplog.text


Seconds = st.floats(0, 1000)


@given(queued=Seconds, run=Seconds, turns=st.lists(Seconds, max_size=5))
@settings(max_examples=30, deadline=None)
def test_parts_lie_inside_of_what_they_are_part_of(queued: float, run: float, turns: list[float]) -> None:
    calls = [
        Generation(start=2, end=2, turn=turn, finish_reason="stop", engine="e", seconds=seconds)
        for turn, seconds in enumerate(turns)
    ]
    stages = {"run": StageTime(queued=queued, seconds=run), "eval": StageTime(seconds=1.0)}
    times = {"accepted_at": 1760000000.0, "begun_at": 1760000000.05, "finished_at": 1760000000.6}
    traced = rollout(segments=[segment().model_copy(update={"generations": calls})], stages=stages, **times)

    def look(piece: SpanSpec) -> None:
        at = piece.start
        for part in piece.children:
            assert at - 1e-3 <= part.start <= part.end <= piece.end + 1e-3
            at = part.end
            look(part)

    look(build_rollout_span(traced))
