"""``prorl-gym show-html``: what it takes, and where the page goes."""

import json
from pathlib import Path

import pytest
from rollout_samples import ROW, rollout
from typer.testing import CliRunner

from prorl_gym.cli.main import app
from prorl_gym.cli.service_client.show import read_results
from prorl_gym.errors import ConfigError
from prorl_gym.trainers.gym_result import to_gym_result


def test_page_is_written_beside_the_results(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps(to_gym_result(rollout(), ROW)) + "\n")
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


def test_numbers_beyond_any_measure_do_no_harm(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    huge = {"reward": 1, "response": {}, "prorl_run_seconds": 10**400, "_ng_task_index": 10**400}
    results.write_text(json.dumps(huge) + "\n")
    assert CliRunner().invoke(app, ["show-html", str(results)]).exit_code == 0


@pytest.mark.parametrize("text", ["[" * 100_000, "", "[1]", json.dumps(ROW), '{"mean/reward": 1}'])
def test_what_is_no_results_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_results(file)
    assert str(file) in caught.value.what
    assert caught.value.fix.startswith("Give a results file of `gym eval run`")
