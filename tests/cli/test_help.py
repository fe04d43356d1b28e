"""What commands say about themselves: an example each, that works; and what the command line loads."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from prorl_gym import __version__
from prorl_gym.cli.installation import gym_root
from prorl_gym.cli.main import EXAMPLES, app, example_line


def leaves(command: Any, name: str = "") -> dict[str, Any]:
    inner = getattr(command, "commands", None)
    if inner is None:
        return {name: command}
    return {path: leaf for key, one in inner.items() for path, leaf in leaves(one, f"{name} {key}".strip()).items()}


COMMANDS = leaves(get_command(app))


def test_every_command_has_an_example() -> None:
    assert set(EXAMPLES) == set(COMMANDS), "prorl_gym/cli/main.py has one line for each command"


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_its_help_shows_it(name: str) -> None:
    result = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert f"Example: {example_line(name)}" in result.output


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_its_arguments_are_taken(name: str) -> None:
    COMMANDS[name].make_context(name, shlex.split(EXAMPLES[name]))  # raises what a user would be told


@pytest.mark.parametrize("words", ["doctor --json False", "doctor --json=False", "gc --dry-run=False"])
def test_a_switch_has_no_text_that_could_mean_its_opposite(words: str) -> None:
    assert CliRunner().invoke(app, words.split()).exit_code == 2


def test_version():
    assert CliRunner().invoke(app, ["--version"]).stdout == f"prorl-gym {__version__}\n"


def test_root_is_where_gym_looks():
    assert CliRunner().invoke(app, ["root"]).stdout.strip().split(os.pathsep)[-1] == str(gym_root())


def test_own_error_is_two_lines_and_no_traceback(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", "from prorl_gym.cli.main import app; app()", "show-html", str(tmp_path / "none.jsonl")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"prorl-gym: {tmp_path / 'none.jsonl'}: cannot be read (No such file or directory).",
        "Check the path.",
    ]


def test_the_command_line_loads_nothing_heavy():
    """Every command pays for what this imports, and ``serve`` before it accepts rollouts."""
    heavy = (
        *("IPython", "aiohttp", "fastapi", "nemo_gym", "numpy", "pydantic", "ray", "rich", "torch", "transformers"),
        *("prorl_gym.sandbox", "prorl_gym.client.group_stream"),
    )
    code = f"import sys, prorl_gym.cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
