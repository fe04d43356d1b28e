"""Values of expressions, and when two expressions are the same.

Rational arithmetic is exact. Anything else is computed to 300 digits: numbers that agree so far are equal (no closed
form that people write comes so close to another by accident). Expressions with variables are equal when they agree at
rational points on every branch (``points``), in real numbers wherever both are real.
"""

from collections.abc import Callable, Mapping
from fractions import Fraction

from prorl_gym.environments.math.arithmetic import UndefinedError, Value, inexact, mp, names, value
from prorl_gym.environments.math.expressions import Node, Number, UnreadableError, substitute
from prorl_gym.environments.math.forms import Piece, Reals
from prorl_gym.environments.math.points import is_branching, points

COARSE, FINE = 40, 300
"""Digits of the quick look, which tells most pairs apart, and of the thorough one."""

ENOUGH = 4
"""Points that must allow a comparison."""


def same(left: Node, right: Node) -> bool:
    """Whether two expressions are equal everywhere."""
    variables = names(left) | names(right)
    if not variables:
        return constant_equal(left, right)
    found = _agree(left, right, real=True)
    return bool(_agree(left, right, real=False) if found is None else found)


def same_on(left: Node, right: Node, where: Reals) -> bool:
    """Whether two formulas of one variable are equal on a set of real numbers, seen from points in each interval."""
    variables = names(left) | names(right)
    if not variables:
        return not where.pieces or constant_equal(left, right)
    (name,) = variables
    return all(
        constant_equal(substitute(left, name, at), substitute(right, name, at))
        for piece in where.pieces
        for at in _inside(piece)
    )


def _inside(piece: Piece) -> list[Node]:
    """Return points of an interval, its ends among them where they belong to it."""
    low, high = (real_number(end) for end in (piece.low, piece.high))
    if low is None or high is None:
        raise UnreadableError("an interval without ends")
    if low == high:
        return [piece.low]
    if mp.isinf(low) and mp.isinf(high):
        low, high = mp.mpf(-3000), mp.mpf(3000)
    elif mp.isinf(low):
        low = high - 3000
    elif mp.isinf(high):
        high = low + 3000
    start, width = (Fraction(str(mp.nstr(each, 20))) for each in (low, high - low))
    found: list[Node] = [Number(start + width * Fraction(share, 3001)) for share in (1, 7, 401, 1301, 1999, 2803, 2999)]
    return found + [
        end for end, is_closed in ((piece.low, piece.closed_low), (piece.high, piece.closed_high)) if is_closed
    ]


def constant_equal(left: Node, right: Node) -> bool:
    """Whether two expressions without variables have the same value. What has none equals nothing."""
    try:
        return _equal(lambda: value(left), lambda: value(right))
    except (UndefinedError, ZeroDivisionError, OverflowError, ValueError):
        return False


def proportional(left: Node, right: Node) -> Fraction | None:
    """Return 1 or -1, the sign of a constant ratio of two expressions with variables, or ``None``.

    This is how two equations ``left = 0`` and ``right = 0`` spell the same curve.
    """
    variables = names(left)
    if not variables or variables != names(right):
        return None
    pairs = [(point, _at(left, point, True), _at(right, point, True)) for point in points(left, right)]
    usable = [(point, one, other) for point, one, other in pairs if one is not None and other is not None]
    if len(usable) < ENOUGH:
        return None
    first = usable[0][0]
    for point, _, _ in usable[1:]:
        if not _equal(
            lambda point=point: value(left, point) * value(right, first),
            lambda point=point: value(right, point) * value(left, first),
        ):
            return None
    _, one, other = usable[0]
    return Fraction(1 if (one > 0) == (other > 0) else -1) if one != 0 and other != 0 else None


def defined(node: Node) -> bool:
    """Whether an expression has a value; one with variables has, one that is too large to compute too."""
    try:
        if not names(node):
            value(node)
    except (UndefinedError, ZeroDivisionError):
        return False
    except (OverflowError, ValueError):
        pass
    return True


def rational(node: Node) -> Fraction | None:
    """Return the exact value of an expression of rational numbers, otherwise ``None``."""
    try:
        found = value(node) if not names(node) else None
    except (ArithmeticError, ValueError):
        return None
    return found if isinstance(found, Fraction) else None


def real_number(node: Node) -> Value | None:
    """Return the value of a real constant, infinities included, to a few dozen digits, otherwise ``None``."""
    try:
        with mp.workdps(COARSE):
            found = value(node, real=True) if not names(node) else None
    except (ArithmeticError, ValueError):
        return None
    return inexact(found) if found is not None else None


def rounds(exact: Node, decimal: Node, places: int) -> bool:
    """Whether a real constant rounds to a decimal with so many digits behind the point."""
    one, other = real_number(exact), real_number(decimal)
    return one is not None and other is not None and bool(abs(one - other) * 2 * 10**places <= 1)


def _agree(left: Node, right: Node, real: bool) -> bool | None:
    r"""Return whether two formulas agree, ``None`` where too few points allow a comparison.

    Bars on one side only say that the sign matters there, so the other must be defined wherever they are: ``\\ln|x|``
    is not ``\\ln x``.
    """
    strict = real and is_branching(left) != is_branching(right)
    agreed = 0
    for point in points(left, right):
        one, other = _at(left, point, real), _at(right, point, real)
        if strict and (one is None) != (other is None):
            return False
        if one is None or other is None:
            continue
        digits = (COARSE, FINE) if not agreed else (COARSE,)
        if not _equal(lambda at=point: value(left, at, real), lambda at=point: value(right, at, real), digits):
            return False
        agreed += 1
    return True if agreed >= ENOUGH else None


def is_real_at(node: Node, point: Mapping[str, Fraction]) -> bool:
    """Whether a formula has a real value at a point."""
    return _at(node, point, True) is not None


def _at(node: Node, point: Mapping[str, Fraction], real: bool) -> Value | None:
    try:
        with mp.workdps(COARSE):
            return value(node, point, real)
    except (ArithmeticError, ValueError):
        return None


def _equal(left: Callable[[], Value], right: Callable[[], Value], precisions: tuple[int, ...] = (COARSE, FINE)) -> bool:
    for digits in precisions:
        with mp.workdps(digits):
            one, other = left(), right()
            if isinstance(one, Fraction) and isinstance(other, Fraction):
                return one == other
            one, other = inexact(one), inexact(other)
            if mp.isinf(one) or mp.isinf(other):
                return bool(one == other)
            # Sums may cancel, so the scale is at least one; the thorough look is fine enough for tiny numbers.
            bound = mp.mpf(10) ** (-digits * 4 // 5) * max(1, abs(one), abs(other))
            if abs(one - other) > bound:
                if digits == FINE:
                    return False
                return _equal(left, right, (FINE,))  # digits may have cancelled
    return True
