"""What a newcomer copies from the README and the first pages must work as it stands, and their links lead somewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from killed_service import ENGINE, SERVING, started
from typer.testing import CliRunner

from prorl_gym.cli.main import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/get-started.md", "docs/gym.md")
}
"""The README, and the pages that a newcomer is sent to."""


def block(page: str, language: str, containing: str) -> str:
    """The first fenced block of a language that contains some text."""
    for found in re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL):
        if containing in found:
            return found
    raise AssertionError(f"{page} has no {language} block with {containing!r}")


@pytest.mark.slow
def test_the_service_and_the_python_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with started(["engine", "oracle", "--port", "0", "--model", "my-model"], ENGINE) as (_, engine):
        config = tmp_path / "service.yaml"
        written = block("docs/get-started.md", "yaml", "engines:")
        config.write_text(
            written.replace("http://127.0.0.1:8000/v1", engine).replace("/path/to/its/tokenizer", "small"), "utf-8"
        )
        serve = ["serve", "--config", str(config), "--port", "0"]
        with started(serve, SERVING) as (_, address):
            ran = subprocess.run(
                [sys.executable, "-c", block("README.md", "python", "from prorl_gym import")],
                env={**os.environ, "PRORL_GYM_URL": address},
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
            )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert len(lines) == 40
    assert all(re.fullmatch(r"\w+ 1\.0 \d+ \d+", line) for line in lines), lines[:3]


def test_the_readme_writes_the_configuration_that_the_first_steps_show() -> None:
    echo = block("README.md", "bash", "serve --config").splitlines()[2]
    assert shlex.split(echo)[2:] == [">", "service.yaml"]
    written = block("docs/get-started.md", "yaml", "engines:").replace("/path/to/its/tokenizer", "small")
    assert yaml.safe_load(shlex.split(echo)[1]) == yaml.safe_load(written)


def test_the_readme_is_a_front_page() -> None:
    assert len(README) <= 9000
    program = block("README.md", "python", "from prorl_gym import")
    assert len([line for line in program.splitlines() if line]) <= 12


COMMANDS = sorted(
    {found for text in PAGES.values() for found in re.findall(r"^prorl-gym ([a-z-]+)", text, re.MULTILINE)}
)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_exist(command: str) -> None:
    ran = CliRunner().invoke(app, [command, "--help"])
    assert ran.exit_code == 0, ran.output
