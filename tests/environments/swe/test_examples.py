"""The example rows of ``swe``: what their sources say, and what it takes to solve them."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from prorl_gym.environments import registry
from prorl_gym.environments.playback import play_script
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.row_format import DiskRow, read_rows
from prorl_gym.environments.swe.swe_row import parse_swe_row
from tests.environments.swe.mini import unpack

ROOT = Path(__file__).parents[3]
ROWS = read_rows(ROOT / "environments" / "prorl_swe" / "data" / "example.jsonl")


def maker() -> Any:
    spec = importlib.util.spec_from_file_location("swe_examples", ROOT / "scripts" / "swe_examples.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_rows_are_those_of_the_sources():
    module = maker()
    made = [await module.frame(module.make_row(source)) for source in module.sources()]
    kept = [json.loads(line) for line in module.ROWS.read_text(encoding="utf-8").splitlines()]
    for row in (*made, *kept):
        row["task"]["archive"] = unpack(row["task"]["archive"])  # how it is compressed differs between machines
    assert kept == made, "run scripts/swe_examples.py --measure"


def test_there_are_five_of_the_kinds_that_there_should_be():
    tests = [row.task["tests"] for row in ROWS]
    assert len(ROWS) == 5
    assert {each["parser"] for each in tests} == {"pytest", "unittest"}
    assert any(each["build"] for each in tests)
    for row, each in zip(ROWS, tests, strict=True):
        assert len(each["fail_to_pass"]) + len(each["pass_to_pass"]) >= 20
        assert row.task["patch"].count("diff --git") >= 2
        assert len(row.task["archive"]) < 60_000
        assert any("{observation}" in json.dumps(step["arguments"]) for step in row.task["gold_steps"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_agent_gets_no_hidden_test_and_no_repaired_file(row: DiskRow):
    seen = unpack(row.task["archive"])
    hidden = row.task["tests"]["files"].keys() - seen.keys()
    failing = {each.partition("::")[0] for each in row.task["tests"]["fail_to_pass"]}
    assert hidden
    if row.task["tests"]["parser"] == "pytest":
        assert failing & hidden
    assert not any(path.startswith(".git/") for path in seen)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
async def test_gold_patch_does_what_the_gold_trajectory_does(row: DiskRow, leases: Leases):
    bare = {**row.task, "gold_steps": []}
    played = await play_script(registry.get("swe"), bare, registry.get("swe").gold_steps(bare), leases)
    assert played.score.reward == 1.0, played.score.detail
    patch = parse_swe_row(row.task).gold_patch
    changed = {line for line in patch.splitlines() if line.startswith(("+", "-")) and line[1:].strip()}
    assert played.score.detail["files"] == sum(line.startswith("+++ ") for line in changed)
    assert played.artifacts.submission is not None
    assert changed <= set(played.artifacts.submission.text.splitlines())
