from pathlib import Path

import pytest

from prorl_gym.cli.installation import gym_root, link_venvs, server_roots
from prorl_gym.errors import ConfigError


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/activate").touch()
    return tmp_path / "venv"


def test_our_servers_are_linked(tmp_path: Path, prefix: Path):
    count = link_venvs(tmp_path / "tree", prefix)
    link = tmp_path / "tree/resources_servers/prorl_rollout/.venv"
    assert link.resolve() == prefix
    assert count >= 3


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


def test_again_with_another_prefix_moves_the_links(tmp_path: Path, prefix: Path):
    link_venvs(tmp_path / "tree", prefix)
    other = tmp_path / "other"
    prefix.rename(other)
    link_venvs(tmp_path / "tree", other)
    assert (tmp_path / "tree/resources_servers/prorl_rollout/.venv").resolve() == other


def test_real_environment_is_left_alone(tmp_path: Path, prefix: Path):
    real = tmp_path / "tree/resources_servers/prorl_rollout/.venv"
    real.mkdir(parents=True)
    link_venvs(tmp_path / "tree", prefix)
    assert not real.is_symlink()


def test_prefix_that_is_no_environment_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="not a virtual environment"):
        link_venvs(tmp_path / "tree", tmp_path)


def test_root_is_searched_without_the_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NEMO_GYM_EXTRA_ROOTS", raising=False)
    assert gym_root() in server_roots()
