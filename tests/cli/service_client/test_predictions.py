"""``prorl-gym predictions``: results of an evaluation as SWE-bench's own harness reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
from rollout_samples import failed, rollout
from typer.testing import CliRunner

from prorl_gym.cli.main import app
from prorl_gym.errors import ConfigError, FailureKind
from prorl_gym.records import GradedSubmission, Score
from prorl_gym.trainers.gym_result import to_gym_result

PATCH = "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"


def result(instance: str, score: Score | None, repeat: int = 0, environment: str = "swe") -> dict[str, Any]:
    """A line of the results."""
    patch = GradedSubmission(kind="patch", text=PATCH if score is SOLVED else "")
    record = rollout(score=score, submission=patch) if score else failed(FailureKind.SANDBOX_LOST)
    row = {
        "responses_create_params": {"input": []},
        "environment": environment,
        "task": {"id": instance, "instance_id": instance},
        "_ng_rollout_index": repeat,
    }
    return to_gym_result(record, row)


SOLVED = Score(reward=1.0)
EMPTY = Score(reward=0.0, detail={"why": "the agent broke its sandbox"})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(*results: dict[str, Any]) -> None:
    Path("results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in results))


def written(*options: str) -> tuple[int, list[dict[str, str]]]:
    """Return the exit code and the predictions."""
    done = CliRunner().invoke(app, ["predictions", "results.jsonl", "--model", "m", *options], catch_exceptions=False)
    return done.exit_code, [json.loads(line) for line in Path("predictions.jsonl").read_text().splitlines()]


def test_each_instance_has_its_patch(folder: Path) -> None:
    write(result("a__a-1", SOLVED), result("a__a-2", EMPTY), result("other", SOLVED, environment="math"))
    code, predictions = written()
    assert code == 0
    assert predictions == [
        {"instance_id": "a__a-1", "model_name_or_path": "m", "model_patch": PATCH},
        {"instance_id": "a__a-2", "model_name_or_path": "m", "model_patch": ""},
    ]


def test_one_sample_of_each_row_is_taken(folder: Path) -> None:
    write(result("a__a-1", SOLVED), result("a__a-1", EMPTY, repeat=1))
    assert written("--repeat", "1")[1] == [{"instance_id": "a__a-1", "model_name_or_path": "m", "model_patch": ""}]
    with pytest.raises(ConfigError, match="holds no sample 2 of a swe row"):
        written("--repeat", "2")


def test_a_row_that_infrastructure_failed_is_no_empty_patch(folder: Path) -> None:
    write(result("a__a-1", SOLVED), result("a__a-2", None))
    code, predictions = written()
    assert (code, [one["instance_id"] for one in predictions]) == (1, ["a__a-1"])
