"""What a record keeps of its row, of what was graded and of the verdict: bounded, whatever a model writes."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sample_records import record

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.environments.protocol import Leases
from prorl_gym.records import (
    GradedSubmission,
    Outcome,
    Rollout,
    RolloutRequest,
    Score,
    SubmissionKind,
    bounded_text,
    row_id_of,
)
from prorl_gym.rollout.ledger.encoding import encode_rollout
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.scheduling.attempt_settler import RetryConfig
from prorl_gym.rollout.scheduling.runner import InProcessRunner
from prorl_gym.rollout.service import RolloutService
from prorl_gym.settings import ResolvedSettings
from prorl_gym.testing.rollout.fake_rollout import (
    EmptyBackend,
    FakePolicySource,
    Script,
    ScriptedEnvironment,
    environment_lookup,
)

MIB = 1 << 20
PIECES = ["\0", "\x1b[31m", "\ud800", "\udfff\ud800", "\r\n", "é", "\U0001f600", "</script><b>", "\u2028", "x", '"\\']
HOSTILE = st.builds(
    lambda pieces, times: "".join(pieces) * times, st.lists(st.sampled_from(PIECES), max_size=8), st.integers(0, 40_000)
)
BOUNDS: list[tuple[SubmissionKind, int]] = [
    ("answer", 64 << 10),
    ("program", 256 << 10),
    ("patch", MIB),
    ("files", 64 << 10),
]


@settings(deadline=None)  # texts of up to a megabyte
@given(text=HOSTILE, limit=st.integers(100, 5000))
@example(text="é" * 3000, limit=5000)
def test_a_bounded_text_is_utf8_within_its_limit_and_bounded_once(text: str, limit: int) -> None:
    bounded = bounded_text(text, limit)
    assert len(bounded.encode()) <= limit
    assert bounded_text(bounded, limit) == bounded
    if len(text.encode("utf-8", "replace")) <= limit:
        assert bounded == text.encode("utf-8", "replace").decode()
    else:
        assert "characters cut ...]" in bounded


@settings(deadline=None)  # texts of up to a megabyte
@given(text=HOSTILE, bound=st.sampled_from(BOUNDS))
def test_a_record_with_hostile_texts_round_trips_within_its_bounds(
    text: str, bound: tuple[SubmissionKind, int]
) -> None:
    kind, limit = bound
    kept = record(
        "r",
        submission=GradedSubmission(kind=kind, text=text),
        score=Score(reward=0.0, detail={"why": text, "got": text}, expected=text, report=text),
        row_id=row_id_of({"id": text, "x": 1}),
    )
    stored = encode_rollout(kept)
    assert json.loads(stored)["rollout_id"] == "r"
    read = Rollout.model_validate_json(stored)
    assert (read.submission, read.score) == (kept.submission, kept.score)
    assert read.submission is not None
    assert len(read.submission.text.encode()) <= limit
    assert len(stored) <= 6 * (limit + 2 * (16 << 10) + 2 * MIB) + 4096  # a control character takes six bytes
    assert len(read.why.encode()) <= 300
    assert "\n" not in read.why


def test_a_mark_counts_what_was_cut() -> None:
    kept = GradedSubmission(text="a" * 10 * MIB).text
    head, mark, tail = kept.split("\n")
    cut = int(mark.removeprefix("[... ").removesuffix(" characters cut ...]"))
    assert len(head) + len(tail) + cut == 10 * MIB
    assert len(head) > len(tail) > 1000


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ({"id": "q7", "instance_id": "no"}, "q7"),
        ({"id": 7}, "7"),
        ({"id": "", "instance_id": "a__b-1"}, "a__b-1"),
        ({"question": "?", "answer": "\ud800"}, "sha256:41a256f8dd302eab"),
    ],
)
def test_a_row_is_named_by_its_id_or_its_hash(task: dict[str, Any], name: str) -> None:
    assert row_id_of(task) == name
    assert row_id_of(dict(reversed(task.items()))) == name


class HostileEnvironment(ScriptedEnvironment):
    """Grades an answer of 10 MB, and writes as much about it."""

    async def evaluate(self, task: Script, artifacts: Artifacts, leases: Leases, settings: ResolvedSettings) -> Score:
        await super().evaluate(task, artifacts, leases, settings)
        text = "\0\x1b[31m\ud800" * (10 * MIB // 7)
        artifacts.answer = text
        return Score(reward=0.0, detail={"why": text}, expected=text, report=text)


async def ended(tmp_path: Path, environment: ScriptedEnvironment, task: dict[str, Any]) -> tuple[Rollout, Any]:
    """Return the record of a rollout as a file holds it, and its summary."""
    ledger = await SqliteLedger.open(LedgerConfig(path=tmp_path / "ledger.sqlite3"))
    runner = InProcessRunner(environment_lookup(environment), FakePolicySource(), EmptyBackend())
    service = RolloutService(ledger, runner, RetryConfig(pause_seconds=0.001, attempts=1))
    await service.start()
    request = RolloutRequest(rollout_id="r", environment="scripted", task=task, row_source="rows.jsonl:12")
    await service.submit([request])
    assert await service.result("r", wait=30) is not None
    (delivery,) = await ledger.read_records(None, 0, 10)
    (summary,) = await service.ledger.summaries(None)
    await service.stop(drain=True)
    return Rollout.model_validate_json(delivery.record), summary


async def test_ten_megabytes_of_control_characters_make_a_small_record(tmp_path: Path) -> None:
    rollout, summary = await ended(tmp_path, HostileEnvironment(), {"id": "row-1"})
    assert rollout.submission is not None
    assert rollout.submission.kind == "answer"
    assert len(rollout.submission.text.encode()) <= 64 << 10
    assert rollout.score is not None
    assert rollout.score.expected is not None
    assert max(len(rollout.score.expected), len(rollout.score.report)) <= 16 << 10
    assert (rollout.row_id, rollout.row_source) == ("row-1", "rows.jsonl:12")
    assert (summary.row_id, summary.why, summary.begun_at) == ("row-1", rollout.why, rollout.begun_at)
    assert rollout.begun_at is not None
    assert rollout.accepted_at <= rollout.begun_at <= rollout.finished_at


@pytest.mark.parametrize(("failing", "kept"), [("eval", True), ("run", False)])
async def test_a_failed_grading_keeps_what_was_handed_in(tmp_path: Path, failing: str, kept: bool) -> None:
    rollout, summary = await ended(tmp_path, ScriptedEnvironment(), {failing: "grader_failed", "turns": 1})
    assert (rollout.outcome.status, rollout.score) == ("failed", None)
    assert (rollout.submission is not None) == kept
    assert summary.why == rollout.why == "scripted grader_failed. Nothing to do: this is a test."


def test_the_reason_of_a_limit_is_told() -> None:
    assert record("r", Outcome(status="completed")).why == ""
    cut = record("r", Outcome.model_validate({"status": "truncated", "limit": "turns"}), score=Score(reward=0.0))
    assert cut.why == "cut short by the limit on turns"


async def test_the_same_row_of_another_file_is_the_same_request(tmp_path: Path) -> None:
    ledger = await SqliteLedger.open(LedgerConfig(path=tmp_path / "ledger.sqlite3"))
    try:
        first = RolloutRequest(rollout_id="r", environment="scripted", task={}, row_source="a.jsonl:1")
        again = first.model_copy(update={"row_source": "b.jsonl:2"})
        answers = [*await ledger.add_rollouts([first]), *await ledger.add_rollouts([again])]
        assert [answer.duplicate for answer in answers] == [False, True]
        (job,) = await ledger.next_jobs(["r"])
        assert job.request.row_source == "a.jsonl:1"
    finally:
        await ledger.close()
