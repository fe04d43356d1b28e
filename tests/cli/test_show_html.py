"""``prorl-gym show-html``: what it takes, and where the page goes."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prorl_gym.cli.main import app
from prorl_gym.cli.show_html import read_results
from prorl_gym.errors import ConfigError
from prorl_gym.trainers.gym import to_gym_result

sys.path.insert(0, str(Path(__file__).parents[1] / "trainers"))
from rollout_samples import ROW, rollout


def test_page_is_written_beside_the_results(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps(to_gym_result(rollout(), ROW)) + "\n")
    done = CliRunner().invoke(app, ["show-html", str(results)])
    assert done.stdout.strip() == str(tmp_path / "results.html")
    assert "reward" in (tmp_path / "results.html").read_text()


@pytest.mark.parametrize("text", ["", "[1]", json.dumps(ROW), '{"mean/reward": 1}'])
def test_what_is_no_results_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_results(file)
    assert str(file) in caught.value.what
    assert caught.value.fix.startswith("Give a results file of `gym eval run`")
