"""``prorl-gym validate``: good rows pass, and every way a row can be bad is found and named."""

import asyncio
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
from prorl_gym.environments.row_format import DiskRow
from prorl_gym.errors import ConfigError, GraderError
from prorl_gym.records import Score
from prorl_gym.sandbox import backend_selection
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxBackend
from prorl_gym.testing.sandbox.fake_sandbox import FakeBackend
from tests.environments.swe.mini import BASE, PYTEST, RIGHT, pack, patch

Command = Callable[..., Result]
GOOD = {"id": "good", "question": "1+1?", "answer": "2"}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    """The backend that commands open."""
    found = FakeBackend()

    async def opened(config: SandboxConfig) -> SandboxBackend:
        return found

    monkeypatch.setattr(backend_selection, "open_backend", opened)
    return found


@pytest.fixture
def command(fake: FakeBackend):
    """The command line, of rows that need no sandbox."""
    app = typer.Typer()
    app.callback()(lambda: None)
    app.command()(validate.validate)
    return lambda *arguments: CliRunner(env={"COLUMNS": "200"}).invoke(app, ["validate", *arguments])


class Held(MathEnvironment):
    """Grades a row when the event of its question is set."""

    def __init__(self, *questions: str) -> None:
        super().__init__()
        self.reached = {question: asyncio.Event() for question in questions}
        self.may_end = {question: asyncio.Event() for question in questions}

    async def evaluate(self, task: Any, artifacts: Any, *_: Any) -> Score:
        self.reached[task.question].set()
        await self.may_end[task.question].wait()
        return Score(reward=float(artifacts.answer == "The answer is $\\boxed{2}$."))

    def checked(self, jobs: int) -> "asyncio.Task[list[validate.RowReport]]":
        rows = [DiskRow(name, None, {**GOOD, "id": name, "question": name}) for name in self.may_end]
        return asyncio.create_task(validate.play_rows(self, rows, 1, SandboxConfig(), jobs, ()))


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


def swe_row(gold: str, *wanted: str) -> Mapping[str, Any]:
    tests = {"files": {"tests/test_calc.py": PYTEST}, "command": "python3 -m pytest -q tests", "parser": "pytest"}
    tests |= {"fail_to_pass": wanted}
    return {"id": "mini", "question": "add subtracts.", "archive": pack(BASE), "patch": gold, "tests": tests}


async def test_swe_row_whose_tests_pass_without_the_repair_is_found(backend: SandboxBackend):
    add, zero = "tests/test_calc.py::test_add", "tests/test_calc.py::test_zero"
    problem = await check(registry.get("swe"), swe_row(patch({"calc.py": RIGHT}), add, zero), backend, runs=1)
    assert problem == f"tests of fail_to_pass pass without the repair: {zero}"


async def test_the_last_tool_result_of_a_gold_trajectory_that_fails_is_shown(backend: SandboxBackend):
    gold = patch({"calc.py": RIGHT}).replace("add(a, b)", "add(a,b)")
    problem = await check(registry.get("swe"), swe_row(gold, "tests/test_calc.py::test_add"), backend, runs=1)
    assert "empty patch; error: patch failed: calc.py:1 error: calc.py: patch does not apply" in problem


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


ASKED = "End with a line of the form Answer: $Answer."


@pytest.mark.parametrize(
    ("question", "form"),
    [
        (ASKED, "Answer: X"),
        ("Put it after 'Answer:'.", "Answer: X"),
        ('Output the final answer after "####".', "#### X"),
        ("Think, then write <answer>number</answer>.", "<answer>X</answer>"),
        ("#### Problem 1\nWhat is the answer: (a) 1 or (b) 2?", ""),
        (f"{ASKED} Use \\boxed{{}} there.", ""),
        ("1+1? Answer:", ""),
    ],
)
@pytest.mark.parametrize("name", ["math", "stem"])
async def test_gold_is_rewarded_in_the_form_that_the_prompt_asks_for(name: str, question: str, form: str):
    row = {**GOOD, "question": question} | ({"kind": "numeric"} if name == "stem" else {})
    problem = (await validate.validate_row(registry.get(name), "row", row, FakeBackend(), 1)).problem
    said = f"the question asks for the form '{form}', which is not rewarded (no boxed answer). Take that out of"
    assert problem.startswith(said) if form else not problem


async def test_reports_are_in_the_order_of_the_file_and_lines_as_rows_end(
    fake: FakeBackend, capsys: pytest.CaptureFixture[str]
):
    environment = Held("first", "second", "third")
    environment.may_end["second"].set()
    checking = environment.checked(jobs=2)
    async with asyncio.timeout(60):
        await environment.reached["third"].wait()
        assert capsys.readouterr().err.startswith("1/3 second: good (")
        environment.may_end["third"].set()
        environment.may_end["first"].set()
        reports = await checking
    assert [report.name for report in reports] == ["first", "second", "third"]


async def test_an_interrupt_ends_rows_and_closes_the_backend(fake: FakeBackend):
    environment = Held("first", "second", "third")
    checking = environment.checked(jobs=2)
    async with asyncio.timeout(60):
        await environment.reached["second"].wait()
        checking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await checking
    assert fake.closed
    assert not environment.reached["third"].is_set()


def test_failed_infrastructure_is_not_a_bad_row(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch):
    async def evaluate(*_: Any) -> Score:
        raise GraderError("No worker.", "Look.")

    monkeypatch.setattr(MathEnvironment, "evaluate", evaluate)
    result = command("math", rows_file(tmp_path, GOOD), "--runs", "1")
    assert result.exit_code == 1
    assert "1/1 good: grader_failed: No worker. Look." in result.stderr
    assert "1 of 1 rows could not be checked, for infrastructure failed: good" in result.stderr
    assert "rows failed" not in result.output


def test_an_error_that_is_no_rows_ends_the_command_as_itself(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(MathEnvironment, "wrong_answer", lambda *_: [][0])
    assert isinstance(command("math", rows_file(tmp_path, GOOD)).exception, IndexError)


def test_the_commonest_gold_is_tried_on_every_row(tmp_path: Path, command: Command):
    rows = [{"id": str(n), "question": f"{n}?", "answer": gold} for n, gold in enumerate(("3", "2", "2", "2.0"))]
    result = command("math", rows_file(tmp_path, *rows), "--runs", "1", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, [row["constant"] for row in found["rows"]]) == (0, [0.0, 1.0, 1.0, 1.0])
    assert found["constant"] == {"answer": "The answer is $\\boxed{2}$.", "paid": 3, "rows": 4}
    assert "is paid on 3 of 4 good rows" in result.stderr
    assert "Most rows are paid without a look at their tasks" in result.stderr


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
