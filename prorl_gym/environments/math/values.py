"""Compares expressions by their values.

Rational arithmetic is exact. Anything else is computed to 300 digits, and numbers that agree to these are equal: no two
closed forms that people write are so close by accident. Expressions with variables are equal when they agree at
rational points: small, large, negative, random, and on both sides of every branch, in real numbers wherever both are
real. An absolute value, a root or a floor changes the branch of a formula where its argument is zero or whole.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial, reduce
from itertools import pairwise, permutations
from zlib import crc32

from prorl_gym.environments.math.answer_forms import Interval, RealSet
from prorl_gym.environments.math.arithmetic import (
    UndefinedError,
    Value,
    evaluate,
    logarithm,
    mp,
    to_mpmath,
    variable_names,
)
from prorl_gym.environments.math.expressions import (
    Node,
    Number,
    Operation,
    Symbol,
    UnreadableExpressionError,
    free_symbols,
    substitute,
)

COARSE_DIGITS, FINE_DIGITS = 40, 300
"""Digits of the quick comparison, which settles most pairs, and of the thorough one."""
_MIN_POINTS = 4
"""Fewest points at which both sides must be defined."""

ZERO = Number(Fraction(0))
_INTEGRATION_VARIABLES = frozenset("stuvwxyz\\theta")
"""Letters of which a formula with a constant of integration may consist."""

_CONSTANT = re.compile(r"[CcKk](?:_\w)?|[AB]")

_Point = Mapping[str, Fraction]
SMALL_POINTS, LARGE_POINTS = 9, 6
"""Points of ordinary size, and far away."""
MAX_SWITCHES, MAX_BRANCHES = 8, 24
"""Largest number of arguments whose sign changes are located, and of points next to these."""
_SCALES = (Fraction(25), Fraction(400), Fraction(30_000), Fraction(7_000_000))
_SCALES_OF_POWERS = (Fraction(5), Fraction(9))
"""For exponential growth, where larger values would cancel all digits."""
SAMPLE_GRID = (
    Fraction(0),
    *(sign * size * Fraction(10) ** power for sign in (-1, 1) for size in (1, 3) for power in range(-1, 8)),
)
"""Numbers of every size and sign."""
_INTEGERS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 15, 20, 33, 0, -1, -2)


def is_equivalent(left: Node, right: Node) -> bool:
    """Whether two expressions are equal everywhere."""
    variables = variable_names(left) | variable_names(right)
    if not variables:
        return is_equal_constant(left, right)
    found = _agree_at_samples(left, right, real=True)
    return bool(_agree_at_samples(left, right, real=False) if found is None else found)


def is_equivalent_on(left: Node, right: Node, where: RealSet) -> bool:
    """Whether two formulas of one variable are equal on a set of real numbers, by points in each interval."""
    variables = variable_names(left) | variable_names(right)
    if not variables:
        return not where.intervals or is_equal_constant(left, right)
    (name,) = variables
    return all(
        is_equal_constant(substitute(left, name, at), substitute(right, name, at))
        for piece in where.intervals
        for at in _points_inside(piece)
    )


def is_equal_constant(left: Node, right: Node) -> bool:
    """Whether two expressions without variables have the same value. One without a value equals nothing."""
    try:
        return _have_equal_values(lambda: evaluate(left), lambda: evaluate(right))
    except OverflowError:
        return _is_same_large(left, right)
    except (UndefinedError, ZeroDivisionError, ValueError):
        return False


def is_comparable(node: Node) -> bool:
    """Whether an expression can be compared with others: only sums and functions of too large numbers cannot."""
    if isinstance(node, Operation) and node.operation in ("^", "*", "/", "!", "neg"):
        return all(map(is_comparable, node.arguments))
    try:
        if not variable_names(node):
            evaluate(node)
    except OverflowError:
        return False
    except (ArithmeticError, ValueError):
        pass
    return True


def _is_same_large(left: Node, right: Node) -> bool:
    """Whether two numbers too large to compute have one logarithm, or are one operation on equal numbers."""
    try:
        if _have_equal_values(lambda: logarithm(left), lambda: logarithm(right)):
            return True
    except (ArithmeticError, ValueError):
        pass
    match left, right:
        case Operation(one, mine), Operation(other, theirs):
            return one == other and len(mine) == len(theirs) and all(map(is_equal_constant, mine, theirs))
        case _:
            return False


def constant_ratio_sign(left: Node, right: Node) -> Fraction | None:
    """Return 1 or -1, the sign of a constant ratio of two expressions with variables, or ``None``.

    This is how two equations ``left = 0`` and ``right = 0`` spell the same curve.
    """
    variables = variable_names(left)
    if not variables or variables != variable_names(right):
        return None
    pairs = [
        (point, _value_at(left, point, True), _value_at(right, point, True)) for point in _sample_points(left, right)
    ]
    usable = [(point, one, other) for point, one, other in pairs if one is not None and other is not None]
    if len(usable) < _MIN_POINTS:
        return None
    first = usable[0][0]
    for point, _, _ in usable[1:]:
        if not _have_equal_values(
            lambda point=point: evaluate(left, point) * evaluate(right, first),
            lambda point=point: evaluate(right, point) * evaluate(left, first),
        ):
            return None
    _, one, other = usable[0]
    return Fraction(1 if (one > 0) == (other > 0) else -1) if one != 0 and other != 0 else None


def is_defined(node: Node) -> bool:
    """Whether an expression has a value; one with variables has, one that is too large to compute too."""
    try:
        if not variable_names(node):
            evaluate(node)
    except (UndefinedError, ZeroDivisionError):
        return False
    except (OverflowError, ValueError):
        pass
    return True


def rational_value(node: Node) -> Fraction | None:
    """Return the exact value of an expression of rational numbers, otherwise ``None``."""
    try:
        found = evaluate(node) if not variable_names(node) else None
    except (ArithmeticError, ValueError):
        return None
    return found if isinstance(found, Fraction) else None


def real_value(node: Node) -> Value | None:
    """Return the value of a real constant, infinities included, to a few dozen digits, otherwise ``None``."""
    try:
        with mp.workdps(COARSE_DIGITS):
            found = evaluate(node, real=True) if not variable_names(node) else None
    except (ArithmeticError, ValueError):
        return None
    return to_mpmath(found) if found is not None else None


def rounds_to_decimal(exact: Node, decimal: Node, places: int) -> bool:
    """Whether a real constant rounds to a decimal with so many digits behind the point."""
    one, other = real_value(exact), real_value(decimal)
    return one is not None and other is not None and bool(abs(one - other) * 2 * 10**places <= 1)


def is_solved_equation(name: str, found: Node, difference: Node | None) -> bool:
    """Whether ``name = found`` is the equation ``difference = 0``, solved: ``y = 1/x`` for ``xy = 1``.

    The equation must be linear in the name, and hold nowhere else: ``y = 1`` is not ``x(y-1) = 0``.
    """
    if difference is None or name not in free_symbols(difference) or name in free_symbols(found):
        return False
    start, end = (substitute(difference, name, Number(Fraction(at))) for at in (0, 1))
    step = Operation("-", (end, start))
    line = Operation("+", (start, Operation("*", (step, Symbol(name)))))
    if not is_equivalent(substitute(difference, name, found), ZERO) or not is_equivalent(line, difference):
        return False
    return not any(_is_zero_somewhere(start, step, variable) for variable in free_symbols(step))


def is_equal_up_to_constant(left: Node, right: Node) -> bool:
    """Whether two formulas have constants of integration: other names of them, or a sum with another number."""
    nodes = [left, right]
    names = [sorted(filter(_CONSTANT.fullmatch, free_symbols(node))) for node in nodes]
    others = free_symbols(left).union(free_symbols(right)).difference(*names)
    is_marked = any(each and all(re.match("C|c_" if len(each) > 1 else "C", name) for name in each) for each in names)
    if not is_marked or not others or not others <= _INTEGRATION_VARIABLES or len(names[0]) != len(names[1]):
        return False
    if len(names[0]) > 1:
        return len(names[0]) < 4 and any(_has_renamed(right, each, left, names[0]) for each in permutations(names[1]))
    if _has_renamed(right, names[1], left, names[0]):
        return True
    one, other = (_without_constant(node, *each) for node, each in zip(nodes, names, strict=True))
    if one is None or other is None or not free_symbols(one):
        return False
    for point in _sample_points(one, other):
        if _value_at(one, point, True) is not None and _value_at(other, point, True) is not None:
            return is_equivalent(_minus_value_at(one, point), _minus_value_at(other, point))
    return False


def _has_renamed(right: Node, theirs: Sequence[str], left: Node, mine: Sequence[str]) -> bool:
    """Whether two formulas are the same once their constants have the same names."""
    for place, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        constant = Symbol(f"\\constant_{place}")
        left, right = substitute(left, one, constant), substitute(right, other, constant)
    return is_equivalent(left, right)


def neighbouring_points(numbers: list[Fraction]) -> list[Fraction]:
    """Return the numbers, points between them, and near and far outside."""
    if not numbers:
        return []
    ordered = sorted(set(numbers))
    between = [(low + high) / 2 for low, high in pairwise(ordered)]
    outside = [ordered[0] - Fraction(1, 7), ordered[-1] + Fraction(1, 7)]
    far = [ordered[0] - 5 * (1 + abs(ordered[0])) / 3, ordered[-1] + 5 * (1 + abs(ordered[-1])) / 3]
    return sorted({*ordered, *between, *outside, *far})


def _agree_at_samples(left: Node, right: Node, real: bool) -> bool | None:
    r"""Return whether two formulas agree, ``None`` where too few points allow a comparison.

    Bars on one side only show that the sign matters there, so the other must be defined wherever they are: ``\\ln|x|``
    is not ``\\ln x``.
    """
    bars = [any(part.operation == "abs" for part in _operations(node)) for node in (left, right)]
    strict = real and bars[0] != bars[1]
    agreed = 0
    for point in _sample_points(left, right):
        one, other = _value_at(left, point, real), _value_at(right, point, real)
        if strict and (one is None) != (other is None):
            return False
        if one is None or other is None:
            continue
        digits = (COARSE_DIGITS, FINE_DIGITS) if not agreed else (COARSE_DIGITS,)
        if not _have_equal_values(
            lambda at=point: evaluate(left, at, real), lambda at=point: evaluate(right, at, real), digits
        ):
            return False
        agreed += 1
    return True if agreed >= _MIN_POINTS else None


def _operations(node: Node) -> Iterator[Operation]:
    """Yield the operations of a formula, inner ones first."""
    if isinstance(node, Operation):
        for argument in node.arguments:
            yield from _operations(argument)
        yield node


def _sample_points(left: Node, right: Node) -> list[_Point]:
    """Return the points for two formulas; the same ones for the same formulas."""
    variables = variable_names(left) | variable_names(right)
    whole = frozenset[str]().union(*map(_integer_variables, (left, right))) & variables
    found: list[_Point] = [_ordinary_point(variables, whole, index) for index in range(SMALL_POINTS)]
    is_exponential = any(
        part.operation in ("exp", "sinh", "cosh", "tanh") or (part.operation == "^" and free_symbols(part.arguments[1]))
        for part in (*_operations(left), *_operations(right))
    )
    scales = _SCALES_OF_POWERS if is_exponential else _SCALES
    found += [_distant_point(variables, whole, scales, index) for index in range(LARGE_POINTS)]
    return found + _branch_points([left, right], sorted(variables - whole), found)


def _integer_variables(node: Node) -> frozenset[str]:
    r"""Return the variables that must be integers: ``(-1)^n``, ``n!``, ``\binom{n}{k}``, ``\lfloor n/2 \rfloor``."""
    found: frozenset[str] = frozenset()
    for part in _operations(node):
        match part:
            case Operation("^", (Operation("neg", (Number(),)), exponent)):
                found |= free_symbols(exponent)
            case Operation("^", (Number(base), exponent)) if base < 0:
                found |= free_symbols(exponent)
            case Operation("!" | "!!" | "binom" | "gcd" | "lcm" | "mod", arguments):
                found = found.union(*map(free_symbols, arguments))
            case Operation("floor" | "ceil", (argument,)):
                found |= free_symbols(argument) & frozenset("nmkj")
            case _:
                pass
    return found


def _ordinary_point(variables: Iterable[str], whole: frozenset[str], index: int) -> _Point:
    """Return a point of ordinary size; by index some are all positive, one is all negative, some are mixed."""
    point: dict[str, Fraction] = {}
    for name in sorted(variables):
        seed = crc32(f"{index}:{name}".encode())
        sign = {0: 1, 1: 1, 2: 1, 3: 1, 4: -1}.get(index, 1 if seed & 1 else -1)
        point[name] = (
            Fraction(_INTEGERS[(seed + index) % len(_INTEGERS)])
            if name in whole
            else sign * Fraction(31 + seed % 331, 97)
        )
    return point


def _distant_point(variables: Iterable[str], whole: frozenset[str], scales: Sequence[Fraction], index: int) -> _Point:
    point: dict[str, Fraction] = {}
    for name in sorted(variables):
        seed = crc32(f"far {index}:{name}".encode())
        sign = 1 if index < 2 else -1 if index < 4 else 1 if seed & 1 else -1
        if name in whole:
            point[name] = Fraction(_INTEGERS[(index + seed) % 12] + seed % 3)
        else:
            point[name] = sign * scales[(index + seed // 7) % len(scales)] * Fraction(31 + seed % 331, 97)
    return point


def _branch_points(trees: list[Node], variables: list[str], found: list[_Point]) -> list[_Point]:
    """Return points next to the zeros of the arguments that select a branch; one variable moves at a time."""
    switches = _branch_arguments(trees)
    if not switches or not found:
        return []
    branches: list[_Point] = []
    for base in (found[1], found[5])[: len(variables)]:
        for name in variables:
            found_zeros: list[Fraction] = []
            for argument, offsets in switches:
                if name in free_symbols(argument):
                    for offset in offsets:
                        found_zeros += _zeros(partial(_sign_at, argument, base, name, offset), found_zeros)
            branches += [{**base, name: at} for at in neighbouring_points(found_zeros)]
    step = max(1, -(-len(branches) // MAX_BRANCHES))
    return branches[::step]


def _branch_arguments(trees: list[Node]) -> list[tuple[Node, tuple[int, ...]]]:
    """Return the arguments at whose zeros, or whole values, a formula changes its branch; inner ones first."""
    parts = [part for tree in trees for part in _operations(tree)]
    if not any(part.operation in ("abs", "root", "floor", "ceil", "max", "min", "sgn") for part in parts):
        return []
    found: list[tuple[Node, tuple[int, ...]]] = []
    for part in parts:
        match part:
            case Operation("max" | "min", arguments):
                found += [(Operation("-", pair), (0,)) for pair in pairwise(arguments)]
            case (
                Operation("abs" | "sgn", (argument,)) | Operation("root", (_, argument)) | Operation("^", (argument, _))
            ):
                found.append((argument, (0,)))
            case Operation("floor" | "ceil", (argument,)):
                found.append((argument, (0, 1)))
            case _:
                pass
    return [(argument, offsets) for argument, offsets in dict(found).items() if free_symbols(argument)][:MAX_SWITCHES]


def _zeros(sign: Callable[[Fraction], int | None], known: list[Fraction]) -> list[Fraction]:
    """Return where a function of one variable changes its sign between points of ``SAMPLE_GRID``, or is zero there."""
    signs = [(at, sign(at)) for at in sorted({*SAMPLE_GRID, *neighbouring_points(known)})]
    found = [at for at, is_zero in signs if is_zero == 0]
    for (low, before), (high, after) in pairwise(signs):
        if before and after and before != after:
            found.append(_bisect(sign, low, high, before))
    return found


def _bisect(sign: Callable[[Fraction], int | None], low: Fraction, high: Fraction, before: int) -> Fraction:
    middle = low
    for turn in range(120):
        # By halves it narrows quickly, and the simplest number of an interval is likely to be the zero itself.
        middle = _simplest_between(low, high) if turn % 2 else (low + high) / 2
        found = sign(middle)
        if found == 0 or high - low < Fraction(1, 10**9):
            break
        low, high = (middle, high) if found == before else (low, middle)
    return middle


def _simplest_between(low: Fraction, high: Fraction) -> Fraction:
    """Return the number with the smallest denominator between two."""
    whole = low.numerator // low.denominator
    if whole + 1 < high:
        return Fraction(whole + 1) if low >= 0 or high <= 0 else Fraction(0)
    inner = high - whole
    if low == whole:
        return whole + Fraction(1, inner.denominator // inner.numerator + 1)
    return whole + 1 / _simplest_between(1 / inner, 1 / (low - whole))


def _sign_at(argument: Node, base: _Point, name: str, offset: int, at: Fraction) -> int | None:
    try:
        with mp.workdps(20):
            size = evaluate(argument, {**base, name: at}, True) - offset
            return (size > 0) - (size < 0)
    except (ArithmeticError, ValueError, TypeError):
        return None


def _value_at(node: Node, point: _Point, real: bool) -> Value | None:
    try:
        with mp.workdps(COARSE_DIGITS):
            return evaluate(node, point, real)
    except (ArithmeticError, ValueError):
        return None


def _have_equal_values(
    left: Callable[[], Value], right: Callable[[], Value], precisions: tuple[int, ...] = (COARSE_DIGITS, FINE_DIGITS)
) -> bool:
    for digits in precisions:
        with mp.workdps(digits):
            one, other = left(), right()
            if isinstance(one, Fraction) and isinstance(other, Fraction):
                return one == other
            one, other = to_mpmath(one), to_mpmath(other)
            if mp.isinf(one) or mp.isinf(other):
                return bool(one == other)
            # Sums may cancel, so the scale is at least one.
            difference, size = abs(one - other), max(abs(one), abs(other))
            bound = mp.mpf(10) ** (-digits * 4 // 5)
            if difference > bound * max(1, size):
                if digits == FINE_DIGITS:
                    return False
                return _have_equal_values(left, right, (FINE_DIGITS,))  # digits may have cancelled
            if digits == FINE_DIGITS and difference > bound * size:
                return _is_same_small(left, right)
    return True


def _is_same_small(left: Callable[[], Value], right: Callable[[], Value]) -> bool:
    """Whether two numbers near zero are equal. One that changes with the digits is zero: all of it is rounding."""
    rounded: list[list[Value]] = []
    for digits in (FINE_DIGITS, FINE_DIGITS + COARSE_DIGITS):
        with mp.workdps(digits):
            rounded.append([to_mpmath(left()), to_mpmath(right())])
    one, other = (
        now if abs(now - before) * 10 ** (COARSE_DIGITS // 2) < abs(before) else mp.mpf(0)
        for before, now in zip(*rounded, strict=True)
    )
    return bool(abs(one - other) * 10 ** (COARSE_DIGITS // 2) <= max(abs(one), abs(other)))


def _points_inside(piece: Interval) -> list[Node]:
    """Return points of an interval, also its ends where they belong to it."""
    low, high = (real_value(end) for end in (piece.low, piece.high))
    if low is None or high is None:
        raise UnreadableExpressionError("an interval without ends")
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
    return found + [piece.low] * piece.closed_low + [piece.high] * piece.closed_high


def _without_constant(node: Node, constant: str) -> Node | None:
    """Return a sum without its term ``+ C``, ``None`` when it has none or the letter occurs elsewhere too."""
    terms = list(_terms(node))
    rest = [term for term in terms if term != Symbol(constant)]
    if len(rest) != len(terms) - 1 or not rest or any(constant in free_symbols(term) for term in rest):
        return None
    return reduce(lambda total, term: Operation("+", (total, term)), rest)


def _terms(node: Node) -> Iterator[Node]:
    match node:
        case Operation("+", (left, right)):
            yield from _terms(left)
            yield from _terms(right)
        case Operation("-", (left, right)):
            yield from _terms(left)
            yield Operation("neg", (right,))
        case _:
            yield node


def _minus_value_at(node: Node, point: _Point) -> Node:
    value = node
    for name, number in point.items():
        value = substitute(value, name, Number(number))
    return Operation("-", (node, value))


def _is_zero_somewhere(start: Node, step: Node, variable: str) -> bool:
    """Whether both parts of a line are zero somewhere, as a variable moves."""
    others = {name: Fraction(17, 13) for name in free_symbols(start) | free_symbols(step) if name != variable}
    for at in _zeros(partial(_sign_at, step, others, variable, 0), []):
        try:
            if evaluate(start, {**others, variable: at}, True) == 0:
                return True
        except (ArithmeticError, ValueError):
            continue
    return False
