"""Points at which two formulas are compared: small, large, negative, random, and on both sides of every branch.

An absolute value, a root or a floor makes a formula change its branch where its argument is zero or whole. Two formulas
that agree on one branch say nothing about another, so each branch gets points of its own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import pairwise
from zlib import crc32

from prorl_gym.environments.math.arithmetic import mp, names, value
from prorl_gym.environments.math.expressions import Apply, Node, Number, symbols

Point = Mapping[str, Fraction]

SMALL, LARGE = 9, 6
"""Points of ordinary size, and far away."""

MOST_SWITCHES, MOST_BRANCHES = 8, 24
"""Arguments whose sign is followed, and points beside their zeros."""

_SCALES = (Fraction(25), Fraction(400), Fraction(30_000), Fraction(7_000_000))
_SCALES_OF_POWERS = (Fraction(5), Fraction(9))
"""For what grows exponentially: larger values would cancel all digits."""
_GRID = sorted(
    sign * mantissa * Fraction(10) ** exponent for sign in (-1, 1) for mantissa in (1, 3) for exponent in range(-1, 8)
)
_WHOLE = (1, 2, 3, 4, 5, 6, 7, 8, 12, 15, 20, 33, 0, -1, -2)


def points(left: Node, right: Node) -> list[Point]:
    """Return the points for two formulas; the same ones for the same formulas."""
    variables = names(left) | names(right)
    whole = frozenset[str]().union(*map(_whole_names, (left, right))) & variables
    found: list[Point] = [_small(variables, whole, index) for index in range(SMALL)]
    scales = _SCALES_OF_POWERS if any(map(_grows, (*_parts(left), *_parts(right)))) else _SCALES
    found += [_large(variables, whole, scales, index) for index in range(LARGE)]
    return found + _branches([left, right], sorted(variables - whole), found)


def grid() -> list[Fraction]:
    """Return numbers of every size and sign."""
    return [*_GRID, Fraction(0)]


def is_branching(node: Node) -> bool:
    """Whether a formula has an absolute value in it."""
    return any(part.operation == "abs" for part in _parts(node))


def zeros(node: Node, base: Point, name: str) -> list[Fraction]:
    """Return where a formula changes its sign or is zero as one variable moves, the others at a point."""
    return _zeros(partial(_sign, node, base, name, 0), [])


def _small(variables: Iterable[str], whole: frozenset[str], index: int) -> Point:
    """Some all positive, one all negative, some mixed."""
    point: dict[str, Fraction] = {}
    for name in sorted(variables):
        seed = crc32(f"{index}:{name}".encode())
        sign = {0: 1, 1: 1, 2: 1, 3: 1, 4: -1}.get(index, 1 if seed & 1 else -1)
        point[name] = (
            Fraction(_WHOLE[(seed + index) % len(_WHOLE)]) if name in whole else sign * Fraction(31 + seed % 331, 97)
        )
    return point


def _grows(part: Apply) -> bool:
    return part.operation in ("exp", "sinh", "cosh", "tanh") or (
        part.operation == "^" and bool(symbols(part.arguments[1]))
    )


def _large(variables: Iterable[str], whole: frozenset[str], scales: Sequence[Fraction], index: int) -> Point:
    point: dict[str, Fraction] = {}
    for name in sorted(variables):
        seed = crc32(f"far {index}:{name}".encode())
        sign = 1 if index < 2 else -1 if index < 4 else 1 if seed & 1 else -1
        if name in whole:
            point[name] = Fraction(_WHOLE[(index + seed) % 12] + seed % 3)
        else:
            point[name] = sign * scales[(index + seed // 7) % len(scales)] * Fraction(31 + seed % 331, 97)
    return point


def _parts(node: Node) -> Iterator[Apply]:
    """Yield the operations of a formula, inner ones first."""
    if isinstance(node, Apply):
        for argument in node.arguments:
            yield from _parts(argument)
        yield node


def _whole_names(node: Node) -> frozenset[str]:
    r"""Return the variables that must be integers: ``(-1)^n``, ``n!``, ``\binom{n}{k}``, ``\lfloor n/2 \rfloor``."""
    found: frozenset[str] = frozenset()
    for part in _parts(node):
        match part:
            case Apply("^", (base, exponent)) if not symbols(base) and _is_negative(base):
                found |= symbols(exponent)
            case Apply("!" | "!!" | "binom" | "gcd" | "lcm" | "mod", arguments):
                found = found.union(*map(symbols, arguments))
            case Apply("floor" | "ceil", (argument,)):
                found |= symbols(argument) & frozenset("nmkj")
            case _:
                pass
    return found


def _is_negative(constant: Node) -> bool:
    match constant:
        case Apply("neg", (Number(),)):
            return True
        case Number(number):
            return number < 0
        case _:
            return False


def _branches(trees: list[Node], variables: list[str], found: list[Point]) -> list[Point]:
    """Return points beside the zeros of what decides about a branch, one variable moving at a time."""
    switches = _switches(trees)
    if not switches or not found:
        return []
    branches: list[Point] = []
    for base in (found[1], found[5])[: len(variables)]:
        for name in variables:
            found_zeros: list[Fraction] = []
            for argument, offsets in switches:
                if name in symbols(argument):
                    for offset in offsets:
                        found_zeros += _zeros(partial(_sign, argument, base, name, offset), found_zeros)
            branches += [{**base, name: at} for at in beside(found_zeros)]
    step = max(1, -(-len(branches) // MOST_BRANCHES))
    return branches[::step]


def _switches(trees: list[Node]) -> list[tuple[Node, tuple[int, ...]]]:
    """Return the arguments at whose zeros, or whole values, a formula changes its branch; inner ones first."""
    parts = [part for tree in trees for part in _parts(tree)]
    if not any(part.operation in ("abs", "root", "floor", "ceil", "max", "min", "sgn") for part in parts):
        return []
    found: list[tuple[Node, tuple[int, ...]]] = []
    for part in parts:
        match part:
            case Apply("max" | "min", arguments):
                found += [(Apply("-", pair), (0,)) for pair in pairwise(arguments)]
            case Apply("abs" | "sgn", (argument,)) | Apply("root", (_, argument)) | Apply("^", (argument, _)):
                found.append((argument, (0,)))
            case Apply("floor" | "ceil", (argument,)):
                found.append((argument, (0, 1)))
            case _:
                pass
    return [(argument, offsets) for argument, offsets in dict(found).items() if symbols(argument)][:MOST_SWITCHES]


def _sign(argument: Node, base: Point, name: str, offset: int, at: Fraction) -> int | None:
    try:
        with mp.workdps(20):
            size = value(argument, {**base, name: at}, True) - offset
            return (size > 0) - (size < 0)
    except (ArithmeticError, ValueError, TypeError):
        return None


def _zeros(sign: Callable[[Fraction], int | None], known: list[Fraction]) -> list[Fraction]:
    """Return where a function of one variable changes its sign, seen from a grid that widens with its size."""
    signs = [(at, sign(at)) for at in sorted({*grid(), *beside(known)})]
    found = [at for at, is_zero in signs if is_zero == 0]
    for (low, before), (high, after) in pairwise(signs):
        if before and after and before != after:
            found.append(_bisected(sign, low, high, before))
    return found


def _bisected(sign: Callable[[Fraction], int | None], low: Fraction, high: Fraction, before: int) -> Fraction:
    middle = low
    for turn in range(120):
        # By halves it narrows quickly, and the simplest number of an interval is likely to be the zero itself.
        middle = _simplest(low, high) if turn % 2 else (low + high) / 2
        found = sign(middle)
        if found == 0 or high - low < Fraction(1, 10**9):
            break
        low, high = (middle, high) if found == before else (low, middle)
    return middle


def _simplest(low: Fraction, high: Fraction) -> Fraction:
    """Return the number with the smallest denominator between two."""
    whole = low.numerator // low.denominator
    if whole + 1 < high:
        return Fraction(whole + 1) if low >= 0 or high <= 0 else Fraction(0)
    inner = high - whole
    if low == whole:
        return whole + Fraction(1, inner.denominator // inner.numerator + 1)
    return whole + 1 / _simplest(1 / inner, 1 / (low - whole))


def beside(numbers: list[Fraction]) -> list[Fraction]:
    """Return the numbers, points between them, and near and far outside."""
    if not numbers:
        return []
    ordered = sorted(set(numbers))
    between = [(low + high) / 2 for low, high in pairwise(ordered)]
    outside = [ordered[0] - Fraction(1, 7), ordered[-1] + Fraction(1, 7)]
    far = [ordered[0] - 5 * (1 + abs(ordered[0])) / 3, ordered[-1] + 5 * (1 + abs(ordered[-1])) / 3]
    return sorted({*ordered, *between, *outside, *far})
