"""Rows of the math environment, and making them out of public data sets."""

from typing import Any

import pytest

from prorl_gym.data.converters import select_converters
from prorl_gym.environments.math.environment import MathEnvironment
from prorl_gym.errors import TaskError

CONVERTERS = select_converters("math")
DEEPSCALER = {"problem": " What is 1+1? ", "answer": "2", "solution": "It is $\\boxed{3}$."}


def converted(row: dict[str, Any]) -> Any:
    return next(converter for converter in CONVERTERS if converter.matches(row)).convert(row)


def test_answer_may_stand_in_the_solution_only():
    row = converted({"problem": "What is 1+2?", "solution": "It is $\\boxed{3}$."})
    assert row["answer"] == "3"
    assert "solution" not in row


def test_training_form_may_be_json_in_text():
    row = converted({"prompt": '[{"role": "user", "content": "1?"}]', "reward_model": '{"ground_truth": "1"}'})
    assert (row["question"], row["answer"]) == ("1?", "1")
    assert CONVERTERS[1].convert({"prompt": "1?", "reward_model": "broken"}) == "no answer"
    assert CONVERTERS[1].convert({"prompt": [], "reward_model": {"ground_truth": "1"}}) == "no problem"


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
