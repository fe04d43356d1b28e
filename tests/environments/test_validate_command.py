"""``prorl-gym validate``: good rows pass, and every way a row can be bad is found and named."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import typer
from typer.testing import CliRunner, Result

from prorl_gym.cli import validate
from prorl_gym.environments import registry
from prorl_gym.environments.math.environment import MathEnvironment
from prorl_gym.errors import ConfigError
from prorl_gym.records import Score
from prorl_gym.sandbox.protocol import SandboxBackend
from tests.environments.swe.mini import BASE, PYTEST, RIGHT, pack, patch

Command = Callable[..., Result]
GOOD = {"id": "good", "question": "1+1?", "answer": "2"}


@pytest.fixture
def command(backend: SandboxBackend):
    """The command line, on whichever backend works here."""
    choice = ["--backend", "local", "--allow-unsafe-local"] if backend.name == "local" else []
    app = typer.Typer()
    app.callback()(lambda: None)
    app.command()(validate.validate)
    return lambda *arguments: CliRunner(env={"COLUMNS": "200"}).invoke(app, ["validate", *arguments, *choice])


def rows_file(folder: Path, *rows: Mapping[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


async def check(environment: Any, row: Mapping[str, Any], backend: SandboxBackend, runs: int = 2) -> str:
    return (await validate.validate_row(environment, "row", row, backend, runs)).problem


async def test_good_row_has_no_problem(backend: SandboxBackend):
    report = await validate.validate_row(registry.get("math"), "row", GOOD, backend, 2)
    assert (report.problem, report.gold, report.empty, report.turns) == ("", (1.0, 1.0), (0.0, 0.0), 1)
    assert report.wrong == (0.0, 0.0)


async def test_gold_that_does_not_score_is_found(backend: SandboxBackend):
    row = {**GOOD, "gold_steps": [{"text": "\\boxed{3}"}]}
    problem = await check(registry.get("math"), row, backend)
    assert problem == "the gold trajectory does not score 1.0 (the answer differs)"


async def test_bad_row_is_found(backend: SandboxBackend):
    problem = await check(registry.get("math"), {"id": "x", "question": "?"}, backend)
    assert problem.startswith("bad_row: math row x: required key 'answer' is missing. Add it: The gold answer")


async def test_generous_grader_is_found(backend: SandboxBackend):
    class Generous(MathEnvironment):
        async def evaluate(self, *_: Any) -> Score:
            return Score(reward=1.0)

    assert await check(Generous(), GOOD, backend) == "an empty answer does not score 0.0"


async def test_a_wrong_answer_that_is_paid_is_found(backend: SandboxBackend):
    row = {**GOOD, "wrong_steps": [{"text": "\\boxed{2}"}]}
    assert await check(registry.get("math"), row, backend) == "a wrong answer does not score 0.0"


async def test_each_run_plays_another_wrong_answer(backend: SandboxBackend):
    class Noted(MathEnvironment):
        seeds: ClassVar[list[int]] = []

        def wrong_steps(self, row: Mapping[str, Any], seed: int):
            self.seeds.append(seed)
            return super().wrong_steps(row, seed)

    assert await check(Noted(), GOOD, backend, runs=3) == ""
    assert len(set(Noted.seeds)) == 3


async def test_swe_row_whose_tests_pass_without_the_repair_is_found(backend: SandboxBackend):
    zero = "tests/test_calc.py::test_zero"
    tests = {"files": {"tests/test_calc.py": PYTEST}, "command": "python3 -m pytest -q tests", "parser": "pytest"}
    tests |= {"fail_to_pass": ["tests/test_calc.py::test_add", zero]}
    row = {"id": "mini", "question": "add subtracts.", "archive": pack(BASE), "patch": patch({"calc.py": RIGHT})}
    problem = await check(registry.get("swe"), {**row, "tests": tests}, backend, runs=1)
    assert problem == f"tests of fail_to_pass pass without the repair: {zero}"


async def test_moody_grader_is_found(backend: SandboxBackend):
    rewards = iter([1.0, 0.0, 0.0, 0.5, 0.0, 0.0])

    class Moody(MathEnvironment):
        async def evaluate(self, *_: Any) -> Score:
            return Score(reward=next(rewards))

    assert await check(Moody(), GOOD, backend) == "the reward differs between runs"


async def test_changing_prompt_is_found(backend: SandboxBackend):
    class Restless(MathEnvironment):
        count = 0

        def parse_row(self, row: Mapping[str, Any]):
            self.count += 1
            return super().parse_row({**row, "question": f"{row['question']} {self.count}"})

    assert await check(Restless(), GOOD, backend) == "the prompt differs between runs"


def test_command_shows_a_table_and_fails_naming_the_rows(tmp_path: Path, command: Command):
    result = command("math", rows_file(tmp_path, GOOD, {**GOOD, "id": "[red]bad", "answer": ""}), "--runs", "1")
    assert result.exit_code == 1
    assert "[red]bad" in result.output
    assert "1 of 2 rows failed" in result.output
    assert "bad_row" in result.output


def test_command_passes_good_rows(tmp_path: Path, command: Command):
    result = command("math", rows_file(tmp_path, GOOD), "--runs", "1")
    assert (result.exit_code, result.exception) == (0, None)
    assert "All 1 rows are good" in result.output


def test_row_of_another_environment_is_refused(tmp_path: Path, command: Command):
    row = {"responses_create_params": {}, "environment": "code", "task": GOOD}
    result = command("math", rows_file(tmp_path, row))
    assert isinstance(result.exception, ConfigError)
    assert "this row is for environment 'code'" in str(result.exception)


def test_unknown_environment_is_named_before_the_rows(tmp_path: Path, command: Command):
    row = {"responses_create_params": {}, "environment": "math", "task": GOOD}
    result = command("maths", rows_file(tmp_path, row))
    assert str(result.exception).splitlines() == ["There is no environment 'maths'.", "Did you mean 'math'?"]
