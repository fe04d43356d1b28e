"""The example rows of ``swe``: what their sources say, and what it takes to solve them."""

import base64
import importlib.util
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from prorl_gym.environments import registry
from prorl_gym.environments.playback import gold_steps, play_script, wrong_steps
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.row_format import DiskRow, read_rows
from prorl_gym.environments.swe.swe_row import parse_swe_row

ROOT = Path(__file__).parents[3]
ROWS = read_rows(ROOT / "environments" / "prorl_swe" / "data" / "example.jsonl")
QUICK = min(ROWS, key=lambda row: row.task["tests"]["parser"] != "unittest")


def maker() -> Any:
    spec = importlib.util.spec_from_file_location("swe_examples", ROOT / "scripts" / "swe_examples.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unpacked(archive: str) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(archive)), mode="r:gz") as tar:
        return {entry.name: tar.extractfile(entry).read() for entry in tar}  # type: ignore[union-attr]


def name(row: DiskRow) -> str:
    return row.name


async def test_rows_are_those_of_the_sources():
    module = maker()
    made = [await module.frame(module.make_row(source)) for source in module.sources()]
    kept = [json.loads(line) for line in module.ROWS.read_text(encoding="utf-8").splitlines()]
    for row in (*made, *kept):
        row["task"]["archive"] = unpacked(row["task"]["archive"])  # how it is compressed differs between machines
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


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_the_agent_gets_no_hidden_test_and_no_repaired_file(row: DiskRow):
    seen = unpacked(row.task["archive"])
    hidden = row.task["tests"]["files"].keys() - seen.keys()
    failing = {each.partition("::")[0] for each in row.task["tests"]["fail_to_pass"]}
    assert hidden
    if row.task["tests"]["parser"] == "pytest":
        assert failing & hidden
    assert not any(path.startswith(".git/") for path in seen)


async def solve(row: DiskRow, leases: Leases):
    played = await play_script(registry.get("swe"), row.task, gold_steps("swe", row.task), leases)
    assert played.score.reward == 1.0, played.score.detail
    return played


async def test_gold_of_the_quickest_row_scores_one_and_uses_its_tools(leases: Leases):
    played = await solve(QUICK, leases)
    said = [message.content for message in played.artifacts.messages if message.role == "tool"]
    assert len(said) == len(gold_steps("swe", QUICK.task)) - 1  # finish says nothing
    assert not any("Traceback" in text for text in said)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=name)
async def test_gold_patch_does_what_the_gold_trajectory_does(row: DiskRow, leases: Leases):
    bare = {**row.task, "gold_steps": []}
    played = await play_script(registry.get("swe"), bare, registry.get("swe").gold_steps(bare), leases)
    assert played.score.reward == 1.0, played.score.detail
    patch = parse_swe_row(row.task).gold_patch
    changed = {line for line in patch.splitlines() if line.startswith(("+", "-")) and line[1:].strip()}
    assert played.score.detail["files"] == sum(line.startswith("+++ ") for line in changed)
    assert played.artifacts.submission is not None
    assert changed <= set(played.artifacts.submission.text.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=name)
async def test_the_wrong_trajectory_scores_zero(row: DiskRow, leases: Leases):
    played = await play_script(registry.get("swe"), row.task, wrong_steps("swe", row.task, seed=1), leases)
    assert played.score.reward == 0.0
    assert played.score.detail["fail_to_pass"] != f"0/{len(row.task['tests']['fail_to_pass'])}", "it should be close"
