"""What commands say about themselves: an example each, that works; and the page that is written out of them."""

import shlex
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from prorl_gym.cli.main import EXAMPLES, app, example_line

SCRIPT = Path(__file__).parents[2] / "scripts" / "cli_page.py"


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


def test_the_committed_page_is_current() -> None:
    spec = spec_from_file_location("cli_page", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.page() == script.PAGE.read_text(encoding="utf-8"), "run: python scripts/cli_page.py"
