"""Instances of the published server become rows of our environments."""

import json
import logging
from typing import Any

import pytest

from prorl_gym.api.compat.config import CompatConfig
from prorl_gym.api.compat.instance_task import convert_instance, resolve_environment
from prorl_gym.api.compat.requests import (
    IgnoredKeyWarnings,
    ParsedRequest,
    ProcessRequest,
    parse_request,
    parse_settings,
)
from prorl_gym.api.http.error_responses import ApiError
from prorl_gym.environments import registry
from prorl_gym.environments.code.code_row import CodeRow
from prorl_gym.environments.code.environment import CodeEnvironment
from prorl_gym.environments.math.environment import MathEnvironment
from prorl_gym.errors import Limit, TaskError
from prorl_gym.settings import RolloutSettings

MATH: dict[str, Any] = {
    "data_source": "deepscaler",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 1?"}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7, "split": "train"},
}


@pytest.mark.parametrize(
    ("source", "environment"),
    [
        *(("deepscaler", "math"), ("deepcoder", "code"), ("deepcoder_lcb", "code"), ("taco", "code")),
        *(("swebench", "swe"), ("r2egym", "swe"), ("scp116k", "stem"), ("mine", "math"), ("mine-too", "plugin")),
    ],
)
def test_a_data_source_has_an_environment(source: str, environment: str) -> None:
    assert resolve_environment(source, {"mine": "math", "mine*": "plugin"}) == environment


def test_what_is_configured_wins() -> None:
    assert resolve_environment("taco", {"taco": "mine"}) == "mine"


def test_an_unknown_data_source_is_refused() -> None:
    with pytest.raises(ApiError, match="'osworld' has no environment") as refused:
        resolve_environment("osworld", {})
    assert refused.value.status == 400


@pytest.mark.parametrize("truth", ["2", 2, ["2"], 2.0])
def test_math(truth: Any) -> None:
    row = MathEnvironment().parse_row(convert_instance("math", {**MATH, "reward_model": {"ground_truth": truth}}))
    assert (row.id, row.question, row.answer) == ("7", "What is 1 + 1?", ("2",))


@pytest.mark.parametrize(
    "change",
    [
        {"reward_model": {"ground_truth": ["2", "two"]}},
        {"reward_model": {"ground_truth": None}},
        {"reward_model": {"ground_truth": {"a": 1}}},
        {"reward_model": "2"},
        {"prompt": [{"role": "assistant", "content": "hm"}]},
        {"prompt": {"role": "user"}},
        {"prompt": [1, [2], {"role": "user", "content": [3, {"text": 4}]}]},
    ],
)
def test_an_instance_without_question_or_answer_is_a_bad_row(change: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match="instance 7:"):
        convert_instance("math", MATH | change)


def test_parts_of_a_message_are_put_together() -> None:
    content = [{"type": "text", "text": "What is"}, {"type": "text", "text": "1 + 1?"}]
    task = convert_instance("math", MATH | {"prompt": [{"role": "user", "content": content}]})
    assert task["question"] == "What is\n1 + 1?"


def code(truth: Any, question: str = "Add.") -> CodeRow:
    instance = {"data_source": "deepcoder", "instance_id": "c-1", "prompt": question}
    return CodeEnvironment().parse_row(convert_instance("code", {**instance, "reward_model": {"ground_truth": truth}}))


STDIO = [
    {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]},
    [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}, {"input": "3 4\n", "output": "7\n"}],
    [{"type": "stdin_stdout", "input": ["1 2", ""], "output": ["3", ""]}, {"input": "3 4\n", "output": "7\n"}],
]


@pytest.mark.parametrize("truth", [*STDIO, *map(json.dumps, STDIO)])
def test_programs(truth: Any) -> None:
    tests = code(truth).tests
    assert tests.kind == "stdio"
    assert [(case.stdin, case.stdout) for case in tests.cases] == [("1 2\n", "3\n"), ("3 4\n", "7\n")]


FUNCTIONS = [
    {"fn_name": "add", "inputs": [[1, 2], [[3], [4]]], "outputs": [[3], [[7]]]},
    [
        {"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]},
        {"type": "function_call", "fn_name": "add", "input": [[3], [4]], "output": [[7]]},
    ],
    [
        {"testtype": "functional", "metadata": {"func_name": "add"}, "input": "1\n2", "output": "3"},
        {"testtype": "functional", "metadata": {"func_name": "add"}, "input": "[3]\n[4]", "output": "[7]"},
    ],
]


@pytest.mark.parametrize("truth", FUNCTIONS)
def test_functions(truth: Any) -> None:
    tests = code(truth).tests
    assert tests.kind == "function"
    assert tests.entry == "add"
    assert [(case.args, case.expected) for case in tests.cases] == [([1, 2], 3), ([[3], [4]], [7])]


def test_an_argument_may_hold_what_else_ends_a_line() -> None:
    case = {"testtype": "functional", "metadata": {"func_name": "f"}, "input": '"a\u2028b"\r\n1', "output": "2"}
    tests = code([case]).tests
    assert tests.kind == "function"
    assert tests.cases[0].args == ["a\u2028b", 1]


def test_a_function_of_a_class() -> None:
    tests = code(FUNCTIONS[0], "class Solution:\n    def add(self, a, b): ...").tests
    assert tests.kind == "function"
    assert tests.entry == "Solution.add"


@pytest.mark.parametrize(
    "truth",
    [
        *("", "[", "[" * 100_000, "3", "[]", "{}", None, 3, [1], [[]]),
        {"inputs": ["1"], "outputs": []},
        {"inputs": [], "outputs": []},
        {"inputs": [1], "outputs": ["1"]},
        {"fn_name": 3, "inputs": [[1]], "outputs": [1]},
        {"fn_name": "f", "inputs": ["1"], "outputs": [1]},
        [{"testtype": "functional", "input": "1", "output": "1"}],
        [{"testtype": "functional", "metadata": {"func_name": "f"}, "input": "{", "output": "1"}],
        [{"testtype": "functional", "metadata": 3, "input": "1", "output": "9" * 5000}],
        [{"input": "1", "output": "1"}, {"testtype": "functional", "input": "1", "output": "1"}],
    ],
)
def test_tests_of_no_known_form_are_a_bad_row(truth: Any) -> None:
    with pytest.raises(TaskError, match=r"instance c-1: reward_model\.ground_truth holds no tests"):
        code(truth)


def test_our_own_row_is_taken_as_it_is() -> None:
    assert convert_instance("math", MATH | {"task": {"question": "q"}}) == {"question": "q"}


def test_an_environment_without_a_converter_gets_the_instance() -> None:
    assert convert_instance("plugin", {"data_source": "p", "trajectory_id": 3, "instance_id": "i", "x": 1}) == {
        "instance_id": "i",
        "x": 1,
    }


def ask(**sampling: Any) -> ParsedRequest:
    instance = {**MATH, "instance_id": "m-1", "trajectory_id": sampling.pop("trajectory_id", 0)}
    body = ProcessRequest(instance=instance, sampling_params=sampling, job_id="job")
    return parse_request(body, CompatConfig(), registry.get)


def test_sampling_params_become_settings() -> None:
    given = ask(
        temperature=0.7, top_p=0.9, top_k=20, max_iterations=5, max_output_tokens=100, max_model_len=4096, timeout=30
    )
    assert given.request.settings == RolloutSettings(
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        max_turns=5,
        max_turn_tokens=100,
        max_tokens=4096,
        mask_overlong=(Limit.TOKENS, Limit.TIME),
    )


def test_a_setting_that_does_not_fit_is_named_as_it_was_sent() -> None:
    with pytest.raises(ApiError, match=r"sampling_params\.max_iterations is wrong") as refused:
        parse_settings({"max_iterations": "many"}, RolloutSettings())
    assert refused.value.status == 422


def test_ignored_keys_are_logged_once_and_their_values_never(caplog: pytest.LogCaptureFixture) -> None:
    keys = IgnoredKeyWarnings()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            keys.warn_new({"api_key": "sk-secret", "num_retries": "s3cret", "temperature": 1, "x" * 1000: 1})
        keys.warn_new({f"key-{index}": 1 for index in range(1000)})
    lines = [record.getMessage() for record in caplog.records]
    assert "'num_retries'" in lines[0]
    assert len(lines) == 256
    assert not any("secret" in line or "s3cret" in line or "api_key" in line or len(line) > 200 for line in lines)


def test_trajectories_of_one_prompt_share_a_group_and_no_seed() -> None:
    asks = [ask(seed=1, trajectory_id=name) for name in (0, 1, "b")]
    assert len({one.request.group_id for one in asks}) == 1
    assert len({one.request.settings.seed for one in asks}) == 3
    assert ask(seed=1, trajectory_id=1).request.settings == asks[1].request.settings  # the same again, the same sample


@pytest.mark.parametrize("wrong", [True, 1.5, [1], 2**63, "x" * 513])
def test_names_are_bounded(wrong: Any) -> None:
    with pytest.raises(ApiError, match=r"instance\.trajectory_id is wrong"):
        ask(trajectory_id=wrong)
