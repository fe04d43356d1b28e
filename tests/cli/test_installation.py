"""``prorl-gym root``, ``venvs``, ``doctor`` and ``agents``; no index is asked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prorl_gym.cli.doctor_report import program_findings, wide_console
from prorl_gym.cli.installation import link_venvs
from prorl_gym.cli.main import app
from prorl_gym.errors import ConfigError
from prorl_gym.harness.presets import PRESETS


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/activate").touch()
    return tmp_path / "venv"


def test_our_servers_are_linked_and_again_with_another_prefix(tmp_path: Path, prefix: Path):
    link = tmp_path / "tree/resources_servers/prorl_rollout/.venv"
    assert link_venvs(tmp_path / "tree", prefix) >= 3
    assert link.resolve() == prefix
    other = prefix.rename(tmp_path / "other")
    link_venvs(tmp_path / "tree", other)
    assert link.resolve() == other


def test_servers_of_a_users_own_root_are_linked(tmp_path: Path, prefix: Path, monkeypatch: pytest.MonkeyPatch):
    server = tmp_path / "root/responses_api_agents/mine"
    server.mkdir(parents=True)
    (server / "requirements.txt").touch()
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(tmp_path / "root"))
    link_venvs(tmp_path / "tree", prefix)
    assert (tmp_path / "tree/responses_api_agents/mine/.venv").is_symlink()


@pytest.mark.gym
def test_gyms_own_servers_are_linked(tmp_path: Path, prefix: Path):
    link_venvs(tmp_path / "tree", prefix)
    assert (tmp_path / "tree/environment_servers/legacy_agent/.venv").is_symlink()


def test_real_environment_is_left_alone(tmp_path: Path, prefix: Path):
    real = tmp_path / "tree/resources_servers/prorl_rollout/.venv"
    real.mkdir(parents=True)
    link_venvs(tmp_path / "tree", prefix)
    assert not real.is_symlink()


def test_prefix_that_is_no_environment_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="not a virtual environment"):
        link_venvs(tmp_path / "tree", tmp_path)


def test_host_is_described() -> None:
    facts = {finding.name: (finding.verdict, finding.detail) for finding in program_findings()}
    assert set(facts) == {"python", "NeMo Gym", "/usr/bin/python3", "bash"}
    assert facts["python"] == ("yes", f"{'.'.join(map(str, sys.version_info[:3]))} ({sys.executable})")


def test_what_is_missing_has_a_fix() -> None:
    (fact,) = [fact for fact in program_findings("/nonexistent/python3") if fact.name == "/nonexistent/python3"]
    assert (fact.verdict, bool(fact.fix)) == ("no", True)


def test_a_pipe_has_no_width() -> None:
    code = "from prorl_gym.cli.doctor_report import wide_console; wide_console().print('x' * 300, end='')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "x" * 300
    assert wide_console().width > 0


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
