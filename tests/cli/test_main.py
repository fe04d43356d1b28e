import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prorl_gym import __version__
from prorl_gym.cli.installation import gym_root
from prorl_gym.cli.main import app

COMMANDS = (
    *("serve", "submit", "show", "watch", "cancel", "engine", "validate", "doctor", "bench"),
    *("root", "venvs", "show-html", "demo"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_there(command: str):
    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


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


def test_nothing_heavy_is_imported_before_a_command_runs():
    code = """
import sys
import prorl_gym.cli.main
heavy = {"torch", "transformers", "fastapi", "ray", "nemo_gym", "IPython"} & set(sys.modules)
sys.exit(", ".join(heavy) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_command_line_loads_nothing_heavy():
    """Every command pays for what this imports, and ``serve`` before it accepts rollouts."""
    heavy = (
        "aiohttp",
        "fastapi",
        "numpy",
        "pydantic",
        "rich",
        "transformers",
        "prorl_gym.sandbox",
        "prorl_gym.client.group_stream",
    )
    code = f"import sys, prorl_gym.cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
