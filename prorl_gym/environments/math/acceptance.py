r"""Rules with a direction: the gold answer may be what an answer may not.

An answer that repeats the question is refused (``\gcd(12, 18)`` equals 6, but was not computed). A closer value than a
rounded gold decimal is accepted, and so is the solution of what the gold answer leaves unsolved (``x > -4`` for
``-2x < 8``, ``y = 1/x`` for ``xy = 1``).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from fractions import Fraction
from typing import cast

from prorl_gym.environments.math import answer_text
from prorl_gym.environments.math.answer_forms import Amount, CombinationOrPoint, Form, Inequality, Labelled, RealSet
from prorl_gym.environments.math.arithmetic import evaluate, to_mpmath
from prorl_gym.environments.math.expression_tree import MathVerifyNode, Node, Number, Operation, Symbol
from prorl_gym.environments.math.expressions import OPERATORS, free_symbols, substitute
from prorl_gym.environments.math.number_sets import INFINITY, MINUS_INFINITY, ZERO
from prorl_gym.environments.math.values import (
    is_equal_constant,
    is_equivalent,
    neighbouring_points,
    rational_value,
    real_value,
    rounds_to_decimal,
    sample_grid,
    sign_changes,
)

_FORMULA = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_COMPUTATION = re.compile(
    r"[+*!^]|(?<=.)-|\\(?:times|cdot|div|binom|sqrt|log|ln|sin|cos|tan|choose|pm)(?![a-zA-Z])|[CP]\("
)
_UNSOLVED_CONDITION = re.compile(r"\||-[a-df-hj-zA-Z]")
"""What makes a condition on a variable one to be solved: ``|x| < 2``, ``-x > 1``."""


def rounds_to(first: Form | None, second: Form | None) -> bool:
    """Whether the first, a decimal that looks rounded, is what the second rounds to.

    A decimal of two digits looks rounded when it is no multiple of 1/50 or simpler, a longer one when its denominator
    is near to the power of ten: ``3.14`` and ``2.236`` do, ``2.5``, ``0.75`` and ``0.125`` do not. Money never is. The
    second must be more precise: a decimal with more digits, or an exact value that has no finite decimal.
    """
    first = first.form if isinstance(first, Labelled) else first
    second = second.form if isinstance(second, Labelled) else second
    if not isinstance(first, Amount) or not isinstance(second, Amount) or (first.places or 0) < 2:
        return False
    if first.unit != second.unit and first.unit is not None and second.unit is not None:
        return False
    exact = rational_value(first.value)
    if exact is None or first.percent != second.percent or _is_currency(first) or _is_currency(second):
        return False
    places = first.places or 0
    if exact.denominator * (2 if places == 2 else 5) < 10**places or (
        second.places is not None and second.places <= places
    ):
        return False
    value = rational_value(second.value)
    if second.places is None and value is not None and 10**12 % value.denominator == 0:
        return False  # a terminating fraction has its own exact decimal
    return rounds_to_decimal(second.value, first.value, places)


def is_evaluated_answer(
    golds: Sequence[tuple[str, Form | None]], answer: str, found: Form | None, question: str
) -> bool:
    r"""Whether an answer was worked out and does not repeat the question.

    It does not when its value still holds an operator (``\sum``, ``\int``, ``\gcd`` ...) and no gold answer holds
    one, or when it is, sign for sign, a formula of the question that leaves something to compute, and no gold answer
    is. The left side of an equation is not part of the value.

    Args:
        golds: the gold answers, as they are written and as they are read.
        answer: what was boxed.
        found: the same as it is read.
        question: text of the question; empty if it is not known.
    """
    if _has_operator(found) and not any(_has_operator(form) for _, form in golds):
        return False
    match found:
        case Amount() | CombinationOrPoint():
            leaves = _COMPUTATION
        case Labelled(_, RealSet()):
            leaves = _UNSOLVED_CONDITION
        case _:
            return True
    key = _comparison_key(answer)
    if leaves.search(key) is None or any(_comparison_key(gold) == key for gold, _ in golds):
        return True
    return not any(key == _comparison_key(next(filter(None, groups))) for groups in _FORMULA.findall(question))


def is_solution_set(answer: Form | None, gold: Form | None) -> bool:
    """Whether an inequality of one variable holds on a set of real numbers, and nowhere else."""
    if not isinstance(gold, Inequality) or len(names := free_symbols(gold.difference)) != 1:
        return False
    (name,) = names
    if isinstance(answer, Labelled) and answer.name == name:
        answer = answer.form
    if not isinstance(answer, RealSet):
        return False
    ends = [
        end for piece in answer.intervals for end in (piece.low, piece.high) if end not in (INFINITY, MINUS_INFINITY)
    ]
    if any(free_symbols(end) or not is_equal_constant(substitute(gold.difference, name, end), ZERO) for end in ends):
        return False
    closed = {
        is_closed
        for piece in answer.intervals
        for end, is_closed in ((piece.low, piece.closed_low), (piece.high, piece.closed_high))
        if end in ends
    }
    if closed != ({not gold.strict} if ends else set()):
        return False
    near = [Fraction(str(size)) for end in ends if (size := real_value(end)) is not None]
    return all(
        _holds(gold, name, at) == _contains(answer, at)
        for at in {*sample_grid(), *neighbouring_points(near)} - set(near)
    )


def is_solved_equation(name: str, found: Node, difference: Node | None) -> bool:
    """Whether ``name = found`` is the equation ``difference = 0``, solved: ``y = 1/x`` for ``xy = 1``.

    The equation must be linear in the name, and hold nowhere else: ``y = 1`` is not ``x(y-1) = 0``.
    """
    if difference is None or name not in free_symbols(difference) or name in free_symbols(found):
        return False
    start, step = _to_line(difference, name)
    line = Operation("+", (start, Operation("*", (step, Symbol(name)))))
    if not is_equivalent(substitute(difference, name, found), ZERO) or not is_equivalent(line, difference):
        return False
    return not any(_is_zero_somewhere(start, step, variable) for variable in free_symbols(step))


def _is_currency(amount: Amount) -> bool:
    return amount.unit is not None and amount.unit.dimension in ((("usd", 1),), (("euro", 1),), (("sterling", 1),))


def _has_operator(form: Form | None) -> bool:
    return next(_find_operators(form), None) is not None


def _find_operators(form: Form | None) -> Iterator[str]:
    left: list[object] = [form]  # no recursion: a tower of powers is deeper than the stack
    while left:
        part = left.pop()
        match part:
            case MathVerifyNode(text):
                yield text
            case Operation(operation) if operation in OPERATORS:
                yield operation
            case Labelled(_, inner):
                left.append(inner)  # its name is not part of the value
            case tuple():
                left.extend(cast(tuple[object, ...], part))
            case _ if is_dataclass(part):
                left.extend(getattr(part, field.name) for field in fields(part))
            case _:
                pass


def _comparison_key(text: str) -> str:
    return answer_text.comparison_key(answer_text.normalize_latex(text))


def _holds(inequality: Inequality, name: str, at: Fraction) -> bool:
    try:
        found = to_mpmath(evaluate(inequality.difference, {name: at}, True))
    except (ArithmeticError, ValueError):
        return False
    return bool(found > 0 or (found == 0 and not inequality.strict))


def _contains(reals: RealSet, at: Fraction) -> bool:
    number = to_mpmath(at)
    ends = [(real_value(piece.low), real_value(piece.high)) for piece in reals.intervals]
    return any(low is not None and high is not None and low < number < high for low, high in ends)


def _to_line(difference: Node, name: str) -> tuple[Node, Node]:
    start, end = (substitute(difference, name, Number(Fraction(at))) for at in (0, 1))
    return start, Operation("-", (end, start))


def _is_zero_somewhere(start: Node, step: Node, variable: str) -> bool:
    """Whether both parts of a line are zero somewhere, as a variable moves."""
    others = {name: Fraction(17, 13) for name in free_symbols(start) | free_symbols(step) if name != variable}
    for at in sign_changes(step, others, variable):
        try:
            if evaluate(start, {**others, variable: at}, True) == 0:
                return True
        except (ArithmeticError, ValueError):
            continue
    return False
