"""What environments put into a record: what was graded, what was expected where people may see it, what tests said."""

from typing import Any

import pytest

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.environments import registry
from prorl_gym.environments.protocol import Leases
from prorl_gym.errors import GraderError
from prorl_gym.records import GradedSubmission, Score
from prorl_gym.settings import resolve_settings

PRODUCT = {"question": "What is 6*7?", "answer": ["42", "forty-two"]}
CHOICE = {"question": "Which is a noble gas?", "kind": "choice", "options": ["oxygen", "neon"], "answer": "B"}
NAMED = {"question": "Which metal?", "kind": "text", "answer": "iron", "accept": ["Fe"]}
SECRET = "needle-4711"
ECHO = {
    "question": "Print the input.",
    "tests": {"kind": "stdio", "cases": [{"stdin": text, "stdout": text} for text in ("a", "b", SECRET, "c")]},
    "time_limit": 2.0,
}
PARTIAL = {**ECHO, "partial": True}


async def graded(environment: str, row: dict[str, Any], answer: str | None, leases: Leases) -> tuple[Score, Artifacts]:
    found = registry.get(environment)
    artifacts = Artifacts(answer=answer)
    return await found.evaluate(found.parse_row(row), artifacts, leases, resolve_settings(found.settings)), artifacts


@pytest.mark.parametrize(
    ("environment", "row", "said", "kept", "expected", "why"),
    [
        ("math", PRODUCT, r"It is \boxed{41}.", "41", "42\nforty-two", "the answer differs"),
        ("math", PRODUCT, r"It is \boxed{42}.", "42", "42\nforty-two", None),
        ("stem", CHOICE, r"\boxed{A}", "A", "B", "another option"),
        ("stem", NAMED, r"\boxed{iron}", "iron", "iron\nFe", None),
    ],
)
async def test_an_answer_is_kept_beside_the_gold_one(
    environment: str, row: dict[str, Any], said: str, kept: str, expected: str, why: str | None, leases: Leases
) -> None:
    score, artifacts = await graded(environment, row, said, leases)
    assert artifacts.submission == GradedSubmission(text=kept)
    assert (score.expected, score.report, score.detail.get("why")) == (expected, "", why)


async def test_without_a_box_the_whole_message_is_what_was_graded(leases: Leases) -> None:
    score, artifacts = await graded("math", PRODUCT, "It is 42.", leases)
    assert artifacts.submission is None
    assert artifacts.answer == "It is 42."
    assert (score.reward, score.expected) == (0.0, "42\nforty-two")


WRONG = f"text = input()\nprint('no' if text == '{SECRET}' else text)\n"
CRASHING = "text = input()\nprint(text if text == 'a' else 1 / 0)\n"


@pytest.mark.parametrize(
    ("row", "program", "report"),
    [
        (PARTIAL, WRONG, "failed test 3: wrong output\npassed test 1\npassed test 2\npassed test 4"),
        (ECHO, CRASHING, "failed test 2: runtime error\npassed test 1\nnot run: 2 tests"),
    ],
    ids=["wrong", "crashing"],
)
async def test_a_program_is_kept_and_tests_are_not_quoted(
    row: dict[str, Any], program: str, report: str, leases: Leases
) -> None:
    score, artifacts = await graded("code", row, f"Here:\n```python\n{program}```\n", leases)
    assert artifacts.submission == GradedSubmission(kind="program", text=program)
    assert (score.report, score.expected) == (report, None)
    assert SECRET not in score.model_dump_json()


async def test_what_holds_no_program_is_kept_as_it_is(leases: Leases) -> None:
    score, artifacts = await graded("code", ECHO, "```java\nclass A {}\n```", leases)
    assert artifacts.submission == GradedSubmission(kind="program", text="```java\nclass A {}\n```")
    assert score.detail["why"] == "no block of Python in the answer"


async def test_a_patch_that_cannot_be_taken_leaves_an_empty_one(leases: Leases) -> None:
    row = {
        "question": "?",
        "workdir": "/repo",
        "archive": "",
        "tests": {"command": "true", "parser": "unittest", "fail_to_pass": ["a"], "files": {"tests/test_a.py": ""}},
    }
    artifacts = Artifacts(answer="Applied the repair.")
    found = registry.get("swe")
    with pytest.raises(GraderError):
        await found.evaluate(found.parse_row(row), artifacts, leases, resolve_settings(found.settings))
    assert artifacts.submission == GradedSubmission(kind="patch", text="")
