"""Rows of the math environment, and making them out of public data sets."""

from typing import Any

import pytest

from prorl_gym.data.converters import select_converters
from prorl_gym.environments.math.environment import MathEnvironment
from prorl_gym.errors import TaskError

CONVERTERS = select_converters("math")
DEEPSCALER = {"problem": " What is 1+1? ", "answer": "2", "solution": "It is $\\boxed{3}$."}


def converted(row: dict[str, Any]) -> Any:
    found = [converter for converter in CONVERTERS if converter.matches(row)]
    assert len(found) == 1
    return found[0].convert(row)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("2", "2"),
        (2, "2"),
        (0.5, "0.5"),
        ("$\\frac{1}{2}$", "\\frac{1}{2}"),
        ("\\boxed{7}", "7"),
        (["24", "24.0", "24"], ["24", "24.0"]),
        (["24"], "24"),
        ("[1,2]", "[1,2]"),
        ("\\{1,2\\}", "\\{1,2\\}"),
        ("\\text{Yes, it is possible}", "\\text{Yes, it is possible}"),
    ],
)
def test_deepscaler_row_becomes_ours(answer: Any, expected: Any):
    row = converted({**DEEPSCALER, "answer": answer})
    assert (row["question"], row["answer"]) == ("What is 1+1?", expected)
    task = MathEnvironment().parse_row(row)
    assert task.answer == ((expected,) if isinstance(expected, str) else tuple(expected))


def test_answer_may_stand_in_the_solution_only():
    row = converted({"problem": "What is 1+2?", "solution": "It is $\\boxed{3}$."})
    assert row["answer"] == "3"
    assert "solution" not in row


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"answer": "", "solution": "no box"}, "no answer"),
        ({"answer": None, "solution": None}, "no answer"),
        ({"answer": True, "solution": ""}, "no answer"),
        ({"answer": "$ $", "solution": "\\boxed{"}, "no answer"),
        ({"answer": "\\frac{1}{"}, "the answer cannot be read"),
        ({"answer": "all odd numbers except 2"}, "the answer cannot be read"),
        ({"answer": "???"}, "the answer cannot be read"),
        ({"answer": "Proof omitted, see text above for it."}, "the answer is prose"),
        ({"answer": ["2", "The first player wins whatever the second does"]}, "the answer is prose"),
        ({"problem": "  "}, "no problem"),
        ({"answer": "1" * 2001}, "answer too long"),
        ({"answer": [str(number) for number in range(17)]}, "answer too long"),
    ],
)
def test_unusable_row_reports_why(change: dict[str, Any], reason: str):
    assert CONVERTERS[0].convert({**DEEPSCALER, **change}) == reason


@pytest.mark.parametrize(
    ("truth", "expected"),
    [
        ("24", "24"),
        (["24", "25"], ["24", "25"]),
        ('["24", "25"]', ["24", "25"]),
        ("[1, 2]", "[1, 2]"),
        ("[1, 2)", "[1, 2)"),
        ("{1, 2}", "{1, 2}"),
    ],
)
def test_training_form_becomes_ours(truth: Any, expected: Any):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 4!?"}]
    row = converted({"prompt": messages, "reward_model": {"ground_truth": truth, "style": "rule"}})
    assert (row["question"], row["answer"]) == ("Be brief.\n\nWhat is 4!?", expected)


def test_training_form_may_be_json_in_text():
    row = converted({"prompt": '[{"role": "user", "content": "1?"}]', "reward_model": '{"ground_truth": "1"}'})
    assert (row["question"], row["answer"]) == ("1?", "1")
    assert CONVERTERS[1].convert({"prompt": "1?", "reward_model": "broken"}) == "no answer"
    assert CONVERTERS[1].convert({"prompt": [], "reward_model": {"ground_truth": "1"}}) == "no problem"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt": [{"role": role, "content": "x=2?"} for role in ("user", "assistant", "user")]}, "with more than a"),
        ({"prompt": [{"role": role, "content": "x=2?"} for role in ("user", "system")]}, "with more than a system"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "more than text"),
        ({"prompt": [{"role": "user", "content": "x?", "tool_calls": [1]}]}, "more than text"),
        ({"images": [{"bytes": "aGk="}]}, "'verl' has no field 'images'"),
        ({"extra_info": {"index": 1, "tools_kwargs": {"calc": {}}}}, "tools of its own"),
        ({"reward_model": {"ground_truth": "3", "style": "model"}}, "no answer"),
        ({"prompt": 'End with a line "Answer: 3". 1+2?'}, "another form of the answer"),
        ({"prompt": "1+2? Your last line has the form Answer: $Answer."}, "another form of the answer"),
        ({"prompt": "1+2? Write the result after ####"}, "another form of the answer"),
        ({"prompt": "1+2? End with **Answer:** and the result"}, "another form of the answer"),
        ({"prompt": "1+2? Reply with <answer>result</answer>"}, "another form of the answer"),
    ],
)
def test_training_form_that_asks_for_more_than_ours_can_is_refused(change: dict[str, Any], reason: str):
    assert reason in CONVERTERS[1].convert({"prompt": "1+2?", "reward_model": {"ground_truth": "3"}, **change})


@pytest.mark.parametrize(
    "prompt",
    [
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n1+2?\n\n"
        'Remember to put your answer on its own line after "Answer:".',
        '1+2? Let\'s think step by step and output the final answer after "####".',
    ],
    ids=["DAPO", "GSM8K"],
)
def test_requests_of_known_sets_for_another_form_are_taken_out_and_told(prompt: str):
    row = converted({"prompt": [{"role": "user", "content": prompt}], "reward_model": {"ground_truth": "3"}})
    assert (row["question"], row["left_out"]) == ("1+2?", ["a request for another form of the answer"])


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"question": "1+2?", "answer": "1+2=<<1+2=3>>3\nIt is three.\n#### 3"}, "3"),
        ({"question": "1+2?", "expected_answer": 3}, "3"),
        ({"question": "1+2?", "answer": "3", "expected_answer": "3"}, "3"),
    ],
)
def test_bare_questions_are_rows(row: dict[str, Any], answer: str):
    assert converted(row)["answer"] == answer
    assert converted(row | {"expected_answer": "4", "answer": "3"}) == "columns of the answer disagree"
    assert converted(row | {"options": ["3", "4"]}).startswith("'questions' has no field 'options'")


def test_id_is_the_rows_own_or_made_of_the_question():
    assert converted({**DEEPSCALER, "unique_id": "test/1.json"})["id"] == "test/1.json"
    one, other = converted(DEEPSCALER), converted({**DEEPSCALER, "answer": "4"})
    assert one["id"] == other["id"] != converted({**DEEPSCALER, "problem": "What is 1+2?"})["id"]


@pytest.mark.parametrize("answer", ["", [], [""], ["1"] * 17, "1" * 2001, 5, None])
def test_row_with_an_unusable_answer_is_refused(answer: Any):
    with pytest.raises(TaskError, match="math row a"):
        MathEnvironment().parse_row({"id": "a", "question": "1?", "answer": answer})


def test_gold_trajectory_boxes_the_first_of_several_answers():
    environment = MathEnvironment()
    row = {"question": "1/2?", "answer": ["\\frac{1}{2}", "0.5"]}
    assert environment.gold_steps(row)[0].text == "The answer is $\\boxed{\\frac{1}{2}}$."
