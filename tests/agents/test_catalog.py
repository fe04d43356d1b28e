"""Agent programs by name."""

from pathlib import Path

import pytest

from prorl_gym.agents.catalog import AgentCatalog
from prorl_gym.agents.command import CommandConfig
from prorl_gym.errors import FailureKind, TaskError

MINE = CommandConfig(argv=("mine",))


def test_the_configuration_goes_before_presets(tmp_path: Path):
    catalog = AgentCatalog({"mine": MINE, "codex": MINE}, tmp_path)
    assert catalog.find("mine") is MINE
    assert catalog.find("codex") is MINE


def test_an_installed_preset_comes_with_its_layer(tmp_path: Path):
    (tmp_path / "codex-0.169.0").mkdir()
    found = AgentCatalog({}, tmp_path).find("codex")
    assert [mount.source for mount in found.sandbox_mounts()] == [str(tmp_path / "codex-0.169.0")]


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("codex", "Run: prorl-gym agents install codex --directory LAYERS"),
        ("codec", "Did you mean 'codex'?"),
        ("zzz", "Known: claude-code, codex, mine, mini-swe-agent, miniswe-sandboxed, opencode, openhands, qwen-code."),
    ],
)
def test_what_is_not_there_names_the_fix(name: str, fix: str, tmp_path: Path):
    with pytest.raises(TaskError) as caught:
        AgentCatalog({"mine": MINE}, tmp_path).find(name)
    assert (caught.value.kind, caught.value.fix) == (FailureKind.BAD_ROW, fix.replace("LAYERS", str(tmp_path)))
