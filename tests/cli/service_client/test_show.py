"""``prorl-gym show-html``, ``dashboard`` and ``predictions``: what they take, and what they write."""

import json
import stat
import webbrowser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest
from rollout_samples import ROW, failed, rollout
from typer.testing import CliRunner

from prorl_gym.cli.main import app
from prorl_gym.cli.service_client.show import read_results
from prorl_gym.errors import ConfigError, FailureKind
from prorl_gym.records import GradedSubmission, Score
from prorl_gym.trainers.gym_result import to_gym_result


def test_page_is_written_beside_the_results(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    huge = {"reward": 1, "response": {}, "prorl_run_seconds": 10**400, "_ng_task_index": 10**400}
    results.write_text(f"{json.dumps(to_gym_result(rollout(), ROW))}\n{json.dumps(huge)}\n")
    done = CliRunner().invoke(app, ["show-html", str(results)])
    assert done.stdout.strip() == str(tmp_path / "results.html")
    assert "reward" in (tmp_path / "results.html").read_text()


def test_a_result_with_what_looks_like_a_line_s_end_is_read(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(json.dumps({"reward": 1, "response": "a\u2028b"}, ensure_ascii=False) + "\n\n", encoding="utf-8")
    assert read_results(file) == [{"reward": 1, "response": "a\u2028b"}]


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_results(file)


@pytest.mark.parametrize("text", ["[" * 100_000, "", "[1]", json.dumps(ROW), '{"mean/reward": 1}'])
def test_what_is_no_results_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_results(file)
    assert str(file) in caught.value.what
    assert caught.value.fix.startswith("Give a results file of `gym eval run`")


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRORL_GYM_TOKEN", "a&b c")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("PRORL_GYM_URL", raising=False)


def test_the_token_stands_behind_the_hash_only() -> None:
    result = CliRunner().invoke(app, ["dashboard", "--url", "http://node7:9000/"])
    assert (result.exit_code, result.stdout) == (0, "http://node7:9000/#token=a%26b%20c\n")


def test_the_browser_is_not_started_with_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def note(address: str) -> bool:
        opened.append(address)
        return True

    monkeypatch.setattr(webbrowser, "open", note)
    for _ in range(2):
        result = CliRunner().invoke(app, ["dashboard", "--open"])
        assert result.exit_code == 0
    assert "token" not in opened[0]
    page = Path(unquote(urlparse(opened[0]).path))
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert result.stdout.strip() in page.read_text()


def test_without_a_browser_the_address_is_there_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    result = CliRunner().invoke(app, ["dashboard", "--open"])
    assert result.exit_code == 1
    assert "#token=" in result.stdout
    assert "by hand" in result.stderr


def test_a_state_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    result = CliRunner().invoke(app, ["dashboard", "--open"])
    assert isinstance(result.exception, ConfigError)
    assert "#token=" in result.stdout


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
