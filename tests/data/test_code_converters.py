"""Rows of public data sets read into ours: small rows of the same shape, and malformed ones."""

import base64
import json
import pickle
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from prorl_gym.data import converters
from prorl_gym.environments.code.code_row import CodeRow
from prorl_gym.environments.code.environment import CodeEnvironment

CODE = CodeEnvironment()


def converted(row: dict[str, Any]) -> Any:
    made = next(converter for converter in converters.select_converters("code") if converter.matches(row)).convert(row)
    if isinstance(made, str):
        return made
    made = {**made}
    assert made.pop(converters.LEFT_OUT, []) == ["a request for another form of the answer"] * ("ability" in row)
    assert CODE.parse_row(made).id
    return made


def eurus(truth: dict[str, Any], **more: Any) -> dict[str, Any]:
    how = "Write Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end."
    question = f"Double it.\n\n{how}\nYou need to think first then write the Python code."
    return {
        "data_source": "taco",
        "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": question}],
        "ability": "code",
        "reward_model": {"ground_truth": json.dumps(truth), "style": "rule"},
        "extra_info": {"index": 7, "split": "train"},
        **more,
    }


def livecodebench(public: Any, private: Any, **more: Any) -> dict[str, Any]:
    return {
        "question_title": "T",
        "question_content": "Do it.",
        "platform": "leetcode",
        "question_id": "abc301_a",
        "starter_code": "",
        "public_test_cases": json.dumps(public),
        "private_test_cases": private,
        "metadata": "{}",
        **more,
    }


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def test_eurus_programs():
    made = converted(eurus({"inputs": ["4\n", ["1", "2"]], "outputs": ["8\n", ["2"]]}))
    assert made == {
        "id": "taco-7",
        "question": "Think.\n\nDouble it.",
        "tests": {
            "kind": "stdio",
            "compare": "tokens",
            "cases": [{"stdin": "4\n", "stdout": "8\n"}, {"stdin": "1\n2", "stdout": "2"}],
        },
    }


@pytest.mark.parametrize(
    ("outputs", "unwrap"),
    [([[3], [5]], True), ([3, 5], False), ([[3], 5], True), ([[3, 4], [5, 6]], False), ([[[3]], [[5]]], True)],
)
def test_eurus_functions(outputs: list[Any], unwrap: bool):
    made = converted(eurus({"fn_name": "add", "inputs": [[1, 2], [2, 3]], "outputs": outputs}))
    assert made["tests"] == {
        "kind": "function",
        "entry": "add",
        "cases": [{"args": [1, 2], "expected": outputs[0]}, {"args": [2, 3], "expected": outputs[1]}],
        **({"unwrap": True} if unwrap else {}),
    }


@pytest.mark.parametrize(
    "tests",
    [
        {"inputs": ["4\n"], "outputs": ["8\n"]},
        [{"type": "stdin_stdout", "input": "4\n", "output": "8\n"}],
        [{"input": "4\n", "output": "8\n", "testtype": "stdin", "metadata": {"func_name": None}}],
    ],
)
def test_deepcoder_programs(tests: Any):
    row = {
        "problem": "Double it.",
        "tests": json.dumps(tests),
        "solutions": ["```python\nprint(2 * int(input()))\n```"],
    }
    made = converted(row)
    assert made["tests"]["cases"] == [{"stdin": "4\n", "stdout": "8\n"}]
    assert made["solution"] == "print(2 * int(input()))\n"


@pytest.mark.parametrize(
    ("row", "entry"),
    [
        ({"tests": {"fn_name": "f", "inputs": [[4]], "outputs": [[8]]}}, "f"),
        ({"tests": [{"type": "function_call", "fn_name": "f", "input": [4], "output": [8]}]}, "f"),
        (
            {
                "tests": [{"input": "4", "output": "8", "testtype": "functional", "metadata": {"func_name": "f"}}],
                "starter_code": "class Solution:\n    def f(self, x):\n        ",
            },
            "Solution.f",
        ),
    ],
)
def test_deepcoder_functions(row: dict[str, Any], entry: str):
    made = converted({"problem": "Double it.", **row, "tests": json.dumps(row["tests"])})
    assert made["tests"].pop("cases") in ([{"args": [4], "expected": 8}], [{"args": [4], "expected": [8]}])
    assert made["tests"] == {"kind": "function", "entry": entry} | ({"unwrap": True} if entry == "f" else {})


def mbpp(*tests: str, **more: Any) -> dict[str, Any]:
    return {"task_id": 7, "text": "Double.", "code": "def f(x): return 2 * x", "test_list": list(tests), **more}


def test_calls_that_a_script_compares_are_cases():
    script = "METADATA = {'a': 1}\ndef check(candidate):\n    assert True, 'm'\n    assert candidate(2) == 4, 'm'\n"
    human = {"task_id": "H/0", "prompt": "def f(x):\n", "entry_point": "f", "canonical_solution": "    return 2 * x\n"}
    made = converted({**human, "test": script})
    assert made["tests"] == {"kind": "function", "entry": "f", "cases": [{"args": [2], "expected": 4}]}
    assert (made["starter_code"], made["solution"]) == ("def f(x):\n", "def f(x):\n    return 2 * x\n")
    made = converted({**human, "prompt": "k = 2\ndef f(x):\n", "test": f"{script}    assert f(1) == k\n"})
    assert (made["tests"]["kind"], made["tests"]["entry"], made["tests"]["setup"]) == ("script", "f", "k = 2")
    made = converted(mbpp("assert f([1]) == [1, 1]", challenge_test_list=["assert f('a') == 'aa'"]))
    assert made["tests"]["cases"] == [{"args": [[1]], "expected": [1, 1]}, {"args": ["a"], "expected": "aa"}]


@pytest.mark.parametrize(
    "test",
    [
        "assert f((1,)) == 2",
        "assert f(1) == {1}",
        "assert f({1: 2}) == 2",
        "assert abs(f(1) - 2) < 1",
        "assert f(1)",
        "import os; assert f(1) == 2",
    ],
)
def test_other_assertions_are_scripts(test: str):
    made = converted(mbpp(test, "assert f(1) == 2", test_setup_code="y = 2", test_imports=["import re"]))
    assert [case["script"] for case in made["tests"]["cases"]] == [test, "assert f(1) == 2"]
    assert (made["tests"]["kind"], made["tests"]["setup"]) == ("script", "y = 2\nimport re")


CASES = [{"input": "5\n", "output": "25\n", "testtype": "stdin"}]


@pytest.mark.parametrize(
    "private",
    [
        json.dumps(CASES),
        packed(json.dumps(CASES).encode()),
        *(packed(pickle.dumps(json.dumps(CASES), protocol=protocol)) for protocol in range(6)),
    ],
)
def test_livecodebench_programs(private: str):
    made = converted(livecodebench([{"input": "4\n", "output": "16\n", "testtype": "stdin"}], private))
    assert made["id"] == "abc301_a"
    assert made["runner"] == "livecodebench"
    assert [case["stdout"] for case in made["tests"]["cases"]] == ["16\n", "25\n"]


def test_tests_of_many_bytes_are_packed():
    cases = [{"input": f"{n} " * 1000, "output": f"{n}\n", "testtype": "stdin"} for n in range(100)]
    made = converted(livecodebench(cases, "[]"))
    assert list(made["tests"]) == ["packed"] and len(made["tests"]["packed"]) < 10_000
    unpacked = CodeRow.model_validate(made).tests.model_dump()["cases"]
    assert list(unpacked) == [{"stdin": case["input"], "stdout": case["output"]} for case in cases]


@pytest.mark.parametrize(
    "packed_tests",
    ["?", "", 3, packed(b"{"), packed(b"[]"), packed(b"[" * 200_000), base64.b64encode(b"junk").decode()],
)
def test_what_is_not_packed_as_it_should_is_no_row(packed_tests: Any):
    with pytest.raises(ValidationError):
        CodeRow.model_validate({"question": "q", "tests": {"packed": packed_tests}})


def test_unpacked_tests_are_bounded(monkeypatch: pytest.MonkeyPatch):
    from prorl_gym.environments.code import code_row

    monkeypatch.setattr(code_row, "MAX_UNPACKED_TESTS", 1 << 10)
    with pytest.raises(ValidationError, match="may hold 1024 bytes"):
        CodeRow.model_validate({"question": "q", "tests": {"packed": packed(b" " * (1 << 20))}})


def test_livecodebench_functions():
    tests = [{"input": '[1, 2]\n"a"', "output": "[2]", "testtype": "functional"}]
    starter = "class Solution:\n    def go(self, x: List[int], s: str) -> List[int]:\n        "
    made = converted(livecodebench(tests, "[]", starter_code=starter, metadata='{"func_name": "go"}'))
    assert (made["starter_code"], made["runner"]) == (starter, "livecodebench")
    assert made["tests"] == {
        "kind": "function",
        "entry": "Solution.go",
        "cases": [{"args": [[1, 2], "a"], "expected": [2]}],
    }


class Executed:
    """Unpickling it runs a program."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('unpickled')",))


@pytest.mark.parametrize(
    ("private", "why"),
    [
        (packed(pickle.dumps(Executed())), "packed tests hold more than a text"),
        (packed(pickle.dumps(["a", "b"])), "packed tests hold more than a text"),
        (packed(b"junk"), "a field is missing or malformed"),
        (base64.b64encode(b"junk").decode(), "packed tests cannot be unpacked"),
        ("?", "a field is missing or malformed"),
    ],
)
def test_packed_tests_are_never_executed(private: str, why: str):
    assert converted(livecodebench(CASES, private)) == why


def test_packed_tests_are_bounded(monkeypatch: pytest.MonkeyPatch):
    from prorl_gym.data import code_converters

    monkeypatch.setattr(code_converters, "MAX_TESTS", 1 << 16)
    assert converted(livecodebench(CASES, packed(b" " * (1 << 20)))) == "packed tests are too large"


@pytest.mark.parametrize("nested", [f"{'(' * 999}1)", f"{'-' * 20_000}1"], ids=["brackets", "signs"])
def test_tests_that_python_cannot_parse_are_refused(nested: str):
    assert converted(mbpp(f"assert f({nested}) == 2")) == "tests that are no Python"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(problem=JSON, tests=JSON, solutions=JSON, prompt=JSON, truth=JSON, private=JSON)
def test_any_row_is_converted_or_skipped(**fields: Any):
    rows = [
        {"problem": fields["problem"], "tests": fields["tests"], "solutions": fields["solutions"]},
        {"prompt": fields["prompt"], "reward_model": fields["truth"]},
        {"question_content": "q", "public_test_cases": fields["tests"], "private_test_cases": fields["private"]},
    ]
    for row in rows:
        made = converted(row)
        assert isinstance(made, str) or made["question"]
