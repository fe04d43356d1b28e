"""Finding environments, and errors about a name or a row."""

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from prorl_gym.environments import registry
from prorl_gym.environments.code.environment import CodeEnvironment
from prorl_gym.environments.math.environment import MathEnvironment
from prorl_gym.environments.playback import fill_step, gold_steps, task_text, wrong_steps
from prorl_gym.environments.protocol import ScriptedStep
from prorl_gym.errors import FailureKind, TaskError

MATH = {"id": "m1", "question": "1+1?", "answer": "2"}
CODE = {"id": "c1", "question": "Print 1.", "tests": {"kind": "stdio", "cases": [{"stdout": "1"}]}}

FUNCTION = {"kind": "function", "entry": "f", "cases": [{"args": [], "expected": 1}]}


def complaint(name: str, row: dict[str, Any]) -> str:
    with pytest.raises(TaskError) as caught:
        registry.get(name).parse_row(row)
    assert caught.value.kind is FailureKind.BAD_ROW
    return str(caught.value)


def test_built_in_ones_are_known():
    assert {"math", "code", "stem", "swe", "taskdir"} <= set(registry.names())
    assert isinstance(registry.get("math"), MathEnvironment)
    assert isinstance(registry.get("code"), CodeEnvironment)
    assert registry.get("math") is registry.get("math")


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(TaskError) as caught:
        registry.get("maths")
    assert caught.value.kind is FailureKind.UNKNOWN_ENVIRONMENT
    assert str(caught.value) == "There is no environment 'maths'.\nDid you mean 'math'?"


def test_unknown_name_without_a_neighbour_lists_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "installed_plugins", dict)
    with pytest.raises(TaskError, match=r"Known: code, math\b"):
        registry.get("zzzz")


def test_unknown_names_read_the_packages_metadata_once(monkeypatch: pytest.MonkeyPatch):
    """Reading it takes tens of milliseconds, and a batch of bad rows would stop the service's loop for minutes."""
    reads: list[str] = []
    monkeypatch.setattr(registry, "entry_points", lambda group: reads.append(group) or ())
    registry.installed_plugins.cache_clear()
    try:
        for _ in range(3):
            with pytest.raises(TaskError):
                registry.get("maths")
    finally:
        registry.installed_plugins.cache_clear()
    assert len(reads) == 1


def test_plugin_is_found(monkeypatch: pytest.MonkeyPatch):
    entry = EntryPoint("mine", "prorl_gym.environments.math.environment:MathEnvironment", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "installed_plugins", lambda: {"mine": entry})
    assert "mine" in registry.names()
    assert isinstance(registry.get("mine"), MathEnvironment)


def test_plugin_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        registry, "installed_plugins", lambda: {"torn": EntryPoint("torn", "no_module:X", registry.ENTRY_POINT_GROUP)}
    )
    with pytest.raises(TaskError, match=r"Environment 'torn' \(no_module:X\) cannot be loaded: ModuleNotFoundError"):
        registry.get("torn")


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("math", {**MATH, "anwser": "2"}, "math row m1: unknown key 'anwser'.\nDid you mean 'answer'?"),
        (
            "math",
            {"answer": "2"},
            "math row without id: required key 'question' is missing.\n"
            "Add it: The user's question; part of the prompt, verbatim.",
        ),
    ],
)
def test_bad_row_is_reported_in_two_lines(name: str, row: dict[str, Any], message: str):
    assert complaint(name, row) == message


@pytest.mark.parametrize(
    ("name", "row", "key"),
    [
        ("math", {**MATH, "answer": 2}, "'answer'"),
        ("math", {**MATH, "gold_steps": [{"tol": "python"}]}, "'gold_steps.0.tol'"),
        ("code", {**CODE, "tests": {"kind": "stdio", "cases": []}}, "cases'"),
        ("code", {**CODE, "tests": {"kind": "telepathy"}}, "'tests'"),
        ("code", {**CODE, "tests": {"kind": "function", "entry": "os.system;x", "cases": []}}, "entry'"),
        ("code", {**CODE, "tests": {**FUNCTION, "result": "argument"}}, "result'"),
        ("code", {**CODE, "tests": {**FUNCTION, "args_as": ["graph"]}}, "args_as"),
        ("code", {**CODE, "tests": {**CODE["tests"], "compare": "loosely"}}, "compare'"),
        ("code", {**CODE, "tests": FUNCTION, "language": "cpp"}, "language 'cpp'"),
        ("code", {**CODE, "language": "cobol"}, "'language'"),
        ("code", {**CODE, "partial": "half"}, "'partial'"),
        ("code", {**CODE, "time_limit": 0}, "'time_limit'"),
        ("code", {**CODE, "memory_limit": 1}, "'memory_limit'"),
    ],
)
def test_bad_value_names_its_key(name: str, row: dict[str, Any], key: str):
    said = complaint(name, row)
    assert key in said
    assert said.count("\n") <= 1


def test_gold_without_steps_is_the_answer():
    assert gold_steps("math", MATH) == [ScriptedStep("The answer is $\\boxed{2}$.")]
    assert gold_steps("code", {**CODE, "solution": "print(1)"}) == [
        ScriptedStep(tool="finish", arguments={"answer": "print(1)"})
    ]


def test_row_without_any_gold_is_bad():
    with pytest.raises(TaskError, match="no gold answer") as caught:
        gold_steps("code", CODE)
    assert caught.value.kind is FailureKind.BAD_ROW


@pytest.mark.parametrize(("name", "row"), [("math", MATH), ("code", CODE)])
def test_generic_wrong_steps_depend_on_the_seed_only(name: str, row: dict[str, Any]):
    assert wrong_steps(name, row, 1) == wrong_steps(name, row, 1)
    assert wrong_steps(name, row, 1) != wrong_steps(name, row, 2)


def test_observation_is_filled_in_text_and_arguments():
    step = ScriptedStep("\\boxed{{observation}}", "finish", {"answer": "<{observation}>", "times": 2})
    assert fill_step(step, " 42\n") == ScriptedStep("\\boxed{42}", "finish", {"answer": "<42>", "times": 2})


def test_task_text_is_the_question():
    assert task_text({"question": "  1+1?\n"}) == "1+1?"
    assert task_text({"problem_statement": "It breaks.\n"}) == "It breaks."
    assert task_text({}) == ""
