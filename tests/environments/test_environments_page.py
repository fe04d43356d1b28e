"""``docs/environments.md``: its rows are read by their environments, its limits and formats are those of the code."""

import json
import re
from pathlib import Path

import pytest

from prorl_gym.data.converters import MODULES, select_converters
from prorl_gym.environments import registry
from prorl_gym.settings import resolve_settings

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text("utf-8")
ROWS = [json.loads(line) for line in PAGE.splitlines() if line.startswith('{"environment"')]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["environment"])
def test_example_rows_are_read(row: dict[str, object]) -> None:
    registry.get(str(row["environment"])).parse_row(row["task"])  # pyright: ignore[reportArgumentType]


def test_every_environment_has_an_example() -> None:
    assert {row["environment"] for row in ROWS} == set(registry.names())


def test_limits_are_those_of_the_environments() -> None:
    head, *lines = re.findall(r"^\| (`\w+`|environment) \| (.*) \|$", PAGE.partition("## Limits of a rollout")[2], re.M)
    names = [name.strip("`") for name in head[1].split(" | ")]
    shown = {name.strip("`"): [float(cell) for cell in cells.split(" | ")] for name, cells in lines}
    assert shown == {
        name: [float(getattr(resolve_settings(registry.get(name).settings), field)) for field in names]
        for name in registry.names()
    }


@pytest.mark.parametrize("name", MODULES)
def test_formats_are_named(name: str) -> None:
    formats = PAGE.partition("## Rows of public data sets")[2].partition("## Baseline")[0]
    assert {converter.name for converter in select_converters(name)} <= set(re.findall(r"`(\w+)`", formats))
