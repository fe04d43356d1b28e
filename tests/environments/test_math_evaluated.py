r"""Answers that restate the question (``\gcd(12, 18)`` for 6) are not evaluated."""

from pathlib import Path

import pytest
from grader_corpus import MathQuestion, read_corpus

from prorl_gym.environments.math.answer_equality import grade
from prorl_gym.environments.math.environment import MathGrader
from tests.environments.worker_support import InlineWorkers

QUESTIONS = read_corpus(Path(__file__).parents[1] / "corpora" / "math_questions.jsonl", MathQuestion)

EVALUATED = ("what the question asks for", "answers in the style of contests and textbooks")
"""Answers that are evaluated, and right or wrong by the question: units of a count, remainders, bases."""


@pytest.mark.parametrize("why", sorted({example.why for example in QUESTIONS}))
def test_an_answer_is_to_be_evaluated(why: str):
    for example in QUESTIONS:
        if example.why == why:
            golds = [example.gold] if isinstance(example.gold, str) else example.gold
            found = grade({"gold": golds, "answer": example.answer, "question": example.question})
            is_evaluated = example.correct or why in EVALUATED
            assert found == {"equal": example.correct, "evaluated": is_evaluated}, example


@pytest.mark.parametrize(
    ("gold", "answer", "question"), [("6", r"\gcd(12, 18)", ""), ("2", r"\int_0^1 4x dx", r"Compute $\int_0^1 4x dx$.")]
)
async def test_the_grader_knows_the_question_and_says_what_was_not_evaluated(gold: str, answer: str, question: str):
    score = await MathGrader(InlineWorkers(grade)).score(gold, answer, question)
    assert (score.reward, score.detail) == (0.0, {"why": "the answer is not evaluated"})
