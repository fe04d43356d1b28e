"""Whether an answer solves what another leaves unsolved: ``x > -4`` for ``-2x < 8``, ``y = 1/x`` for ``xy = 1``."""

from fractions import Fraction

from prorl_gym.environments.math.arithmetic import inexact, value
from prorl_gym.environments.math.expressions import Apply, Node, Number, Symbol, substitute, symbols
from prorl_gym.environments.math.forms import Form, Inequality, Labelled, Reals
from prorl_gym.environments.math.intervals import INFINITY, MINUS_INFINITY, ZERO
from prorl_gym.environments.math.points import beside, grid, zeros
from prorl_gym.environments.math.values import constant_equal, real_number, same


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


def solved_for(name: str, found: Node, difference: Node | None) -> bool:
    """Whether ``name = found`` is the equation ``difference = 0``, solved: ``y = 1/x`` for ``xy = 1``.

    The equation must be linear in the name, and hold nowhere else: ``y = 1`` is not ``x(y-1) = 0``.
    """
    if difference is None or name not in symbols(difference) or name in symbols(found):
        return False
    start, step = _line(difference, name)
    line = Apply("+", (start, Apply("*", (step, Symbol(name)))))
    if not same(substitute(difference, name, found), ZERO) or not same(line, difference):
        return False
    return not any(_vanishes(start, step, variable) for variable in symbols(step))


def _line(difference: Node, name: str) -> tuple[Node, Node]:
    start, end = (substitute(difference, name, Number(Fraction(at))) for at in (0, 1))
    return start, Apply("-", (end, start))


def _vanishes(start: Node, step: Node, variable: str) -> bool:
    """Whether both parts of a line are zero somewhere, as a variable moves."""
    others = {name: Fraction(17, 13) for name in symbols(start) | symbols(step) if name != variable}
    for at in zeros(step, others, variable):
        try:
            if value(start, {**others, variable: at}, True) == 0:
                return True
        except (ArithmeticError, ValueError):
            continue
    return False


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
