r"""Answers that restate the question (``\gcd(12, 18)`` for 6) and ones that break off (``7...`` for 7)."""

# ruff: noqa: RUF001 - look-alike signs are among what is tested

import pytest

from prorl_gym.environments.math.answer_equality import grade, is_accepted
from prorl_gym.environments.math.environment import MathGrader


def slow(*values: str) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)  # the library for operators takes a second to import


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("6", r"\gcd(12, 18)"),
        ("36", r"x = \lcm(12, 18)"),
        ("11", r"17*23 \mod 19"),
        ("5", r"\min(5, 7)"),
        ("6", r"\prod_{k=1}^3 k"),
        ("1", r"\lim_{x\to0}\frac{\sin x}{x}"),
        ("6, 1", r"\gcd(12, 18), 1"),
        ("(6,1)", r"(\gcd(12, 18), 1)"),
        ("3.1416", r"\max(\pi, 3)"),
        ("6", "＼gcd(12, 18)"),
    ],
)
def test_an_operator_that_no_gold_answer_has_is_refused(gold: str, answer: str):
    assert not is_accepted(gold, answer)
    assert grade({"gold": [gold, "0"], "answer": answer, "question": ""}) == {"equal": False, "evaluated": False}


@pytest.mark.parametrize(
    ("answer", "question"),
    [
        (r"\int_0^1 4x\,dx", r"Compute $\int_0^1 4x\,dx$."),
        (r"4\int_0^1 t\,dt", r"Integrate $4x$ from 0 to 1."),
        (r"\int_0^1 4x\,dx", "What is ∫₀¹ 4x dx?"),
        (r"\sum_{k=0}^{1} 2k", r"Evaluate $\sum_{n=1}^{2} (2n-2)$."),
        (r"\sum_{k=0}^{1} 2k", "How many pairs are there?"),
        (r"\int_0^1 4x\,dx", ""),
    ],
)
def test_a_sum_or_an_integral_is_refused_whatever_the_question_is(answer: str, question: str):
    assert grade({"gold": "2", "answer": answer, "question": question}) == {"equal": False, "evaluated": False}


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("391", r"17 \times 23"),
        ("1024", "2^{10}"),
        ("6", r"\binom{4}{2}"),
        ("120", "5!"),
        ("5", r"f_{\max} = 5"),
        ("5", r"\max f(x) = 5"),
        ("5", r"x_{\min} = 5"),
        slow("6", r"\gcd(12, 18) = 6"),
        slow(r"\max(a, b)", r"\max(b, a)"),
    ],
)
def test_arithmetic_and_values_behind_their_operator_are_right(gold: str, answer: str):
    assert is_accepted(gold, answer, "How many are there?")


@pytest.mark.parametrize(
    ("gold", "answer", "question"),
    [
        ("391", r"17 \times 23", r"Compute $17 \times 23$."),
        ("1024", "2^{10}", r"What is \(2^{10}\)?"),
        ("120", "5!", "Find $5!$."),
        ("20", "C(6,3)", "What is $C(6,3)$?"),
        (r"\frac{5}{6}", r"\frac{1}{2}+\frac{1}{3}", r"Compute $$\frac{1}{2} + \frac{1}{3}$$"),
        ("2", r"\sqrt{4}", r"What is $\sqrt 4$ or \[\sqrt{4}\]?"),
    ],
)
def test_a_formula_of_the_question_is_refused(gold: str, answer: str, question: str):
    assert not is_accepted(gold, answer, question)
    assert is_accepted(gold, answer, "")
    assert is_accepted(gold, gold, question)
    assert is_accepted([gold, answer], answer, question)


@pytest.mark.parametrize(
    ("gold", "answer", "question"),
    [
        ("0.5", r"\frac{1}{2}", r"Is it $\frac{1}{2}$ or $\frac{1}{3}$?"),
        ("-3", "-3", "For $x = -3$ and $-3$, what is $x$?"),
        ("x=1", "1", "Which of $0$ and $1$ solves $x^2=x$?"),
    ],
)
def test_a_number_of_the_question_may_be_the_answer(gold: str, answer: str, question: str):
    assert is_accepted(gold, answer, question)


@pytest.mark.slow
def test_an_operator_is_right_where_one_of_several_gold_answers_has_one():
    assert is_accepted(["6", r"\lcm(2, 3)"], r"\gcd(12, 18)")


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("7", "7..."),
        ("7", r"7\ldots"),
        ("7", "7…"),
        ("7", r"\text{7...}"),
        ("3.14", "3.14159..."),
        ("1, 2, 3", "1, 2, 3, ..."),
        ("1, 2, 3", r"1, 2, 3, \ldots"),
        ("5", r"\max(5,\ldots)"),
        (r"\max(5, a)", r"\max(5, \ldots)"),
    ],
)
def test_an_answer_that_breaks_off_is_wrong(gold: str, answer: str):
    assert not is_accepted(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{1}{3}", "0.333..."),
        ("0.333...", r"\frac{1}{3}"),
        (r"\frac{1}{3}", r"0.333\ldots."),
        (r"1, 2, \ldots, n", "1, 2, ..., n"),
        ("1, 2, 3, ...", r"1, 2, 3, \dots"),
    ],
)
def test_dots_that_mean_what_the_gold_answer_means_are_right(gold: str, answer: str):
    assert is_accepted(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [("x < 1", "-x > -1"), (r"[-2,-1]\cup[1,2]", r"1 \leq |x| \leq 2"), ("[-2,2]", r"|x| \le 2")],
)
def test_an_inequality_of_the_question_is_not_solved(gold: str, answer: str):
    question = r"Solve $-x>-1$, then $1 \le |x| \le 2$, then $|x| \le 2$."
    assert not is_accepted(gold, answer, question)
    assert is_accepted(gold, answer, "Solve the inequality.")
    assert is_accepted(answer, answer, question)


def test_a_solved_condition_of_the_question_may_be_the_answer():
    assert is_accepted(r"(-e, \infty)", "x > -e", "Where is $f$ defined? Does it grow for $x > -e$?")


class Here:
    """A pool without processes."""

    async def call(self, body: dict[str, str], *, cpu_seconds: float) -> dict[str, bool]:
        return grade(body)


async def test_the_detail_shows_that_it_was_not_evaluated():
    score = await MathGrader(Here()).score("6", r"\gcd(12, 18)")
    assert (score.reward, score.detail) == (0.0, {"why": "the answer is not evaluated"})


async def test_the_grader_knows_the_question():
    score = await MathGrader(Here()).score("2", r"\int_0^1 4x dx", r"Compute $\int_0^1 4x dx$.")
    assert (score.reward, score.detail) == (0.0, {"why": "the answer is not evaluated"})
