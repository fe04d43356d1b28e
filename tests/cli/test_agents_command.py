"""``prorl-gym agents``, without an index."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prorl_gym.agents.presets import PRESETS
from prorl_gym.cli.main import app
from prorl_gym.errors import ConfigError


def test_presets_are_listed_with_what_is_installed(tmp_path: Path):
    (tmp_path / "codex-0.169.0").mkdir()
    lines = CliRunner().invoke(app, ["agents", "list", "--directory", str(tmp_path)]).output.splitlines()
    assert [line.split()[0] for line in lines if " installed" in line] == ["codex"]
    assert len(lines) == len(PRESETS)


def test_programs_read_the_list_as_json(tmp_path: Path):
    said = CliRunner().invoke(app, ["agents", "list", "--json", "--directory", str(tmp_path)]).output
    codex = next(row for row in json.loads(said) if row["name"] == "codex")
    assert (codex["installed"], codex["wire"]) == (False, "responses")
    assert codex["command"]["argv"][0] == "$layer/codex/bin/codex"


def test_an_unknown_preset_is_refused_before_anything_is_installed(tmp_path: Path):
    with pytest.raises(ConfigError, match="no preset 'codec'"):
        CliRunner().invoke(
            app, ["agents", "install", "codex", "codec", "--directory", str(tmp_path)], catch_exceptions=False
        )
    assert list(tmp_path.iterdir()) == []
