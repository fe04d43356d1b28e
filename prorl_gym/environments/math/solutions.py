"""Whether an answer solves an inequality that the gold answer leaves unsolved: ``x > -4`` for ``-2x < 8``."""

from fractions import Fraction

from prorl_gym.environments.math.arithmetic import inexact, value
from prorl_gym.environments.math.expressions import substitute, symbols
from prorl_gym.environments.math.forms import Form, Inequality, Labelled, Reals
from prorl_gym.environments.math.intervals import INFINITY, MINUS_INFINITY, ZERO
from prorl_gym.environments.math.points import beside, grid
from prorl_gym.environments.math.values import constant_equal, real_number


def solves(answer: Form | None, gold: Form | None) -> bool:
    """Whether an inequality of one variable holds on a set of real numbers, and nowhere else."""
    if not isinstance(gold, Inequality) or len(names := symbols(gold.difference)) != 1:
        return False
    (name,) = names
    if isinstance(answer, Labelled) and answer.name == name:
        answer = answer.form
    if not isinstance(answer, Reals):
        return False
    ends = [end for piece in answer.pieces for end in (piece.low, piece.high) if end not in (INFINITY, MINUS_INFINITY)]
    if any(symbols(end) or not constant_equal(substitute(gold.difference, name, end), ZERO) for end in ends):
        return False
    closed = {
        is_closed
        for piece in answer.pieces
        for end, is_closed in ((piece.low, piece.closed_low), (piece.high, piece.closed_high))
        if end in ends
    }
    if closed != ({not gold.strict} if ends else set()):
        return False
    near = [Fraction(str(size)) for end in ends if (size := real_number(end)) is not None]
    return all(_holds(gold, name, at) == _inside(answer, at) for at in {*grid(), *beside(near)} - set(near))


def _holds(inequality: Inequality, name: str, at: Fraction) -> bool:
    try:
        found = inexact(value(inequality.difference, {name: at}, True))
    except (ArithmeticError, ValueError):
        return False
    return bool(found > 0 or (found == 0 and not inequality.strict))


def _inside(reals: Reals, at: Fraction) -> bool:
    number = inexact(at)
    ends = [(real_number(piece.low), real_number(piece.high)) for piece in reals.pieces]
    return any(low is not None and high is not None and low < number < high for low, high in ends)
