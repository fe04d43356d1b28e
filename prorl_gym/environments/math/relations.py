"""Equations and inequalities: solved ones are answers, unsolved ones only equal themselves."""

import re
from collections.abc import Callable
from fractions import Fraction

from prorl_gym.environments.math import intervals
from prorl_gym.environments.math.expressions import (
    Apply,
    Foreign,
    Node,
    Number,
    Symbol,
    UnreadableError,
    read_expression,
    symbols,
)
from prorl_gym.environments.math.forms import (
    Amount,
    Assigned,
    Based,
    Equation,
    Form,
    Inequality,
    Labelled,
    Ordering,
    Reals,
    Row,
    in_ten,
)
from prorl_gym.environments.math.splitting import is_label, is_name, normal_name, split
from prorl_gym.environments.math.values import rounds, same

_SIGNS = ("=", "<", ">", "\\le", "\\ge", "\\ne", "\\in", "\\approx")

_SIZE = re.compile(r"\|\s*([a-zA-Z](?:_\w)?)\s*\|")

Reader = Callable[[str], Form]


def read_relation(text: str, read: Reader) -> Form | None:
    """Return a text with a relation sign as what it says, ``None`` when it has none.

    Raises:
        UnreadableError: it says nothing that could be an answer, such as ``4 = 5``.
    """
    parts = split(text, _SIGNS)
    signs = {sign for sign, _ in parts[1:]}
    sides = [side for _, side in parts]
    if not signs:
        return None
    if signs == {"="}:
        return _equation(sides, read)
    if signs <= {"<", "\\le"}:
        return _chain(sides, [sign == "<" for sign, _ in parts[1:]])
    if signs <= {">", "\\ge"}:
        return _chain(sides[::-1], [sign == ">" for sign, _ in parts[:0:-1]])
    if signs == {"\\ne"} and len(sides) == 2:
        name, value = sides if is_name(sides[0]) else sides[::-1]
        if is_name(name):
            constant = read_expression(value)
            if symbols(constant):
                return Equation(Apply("-", (read_expression(name), constant)), is_negated=True)
            return _of(name, intervals.complement(intervals.points([constant])))
    if signs == {"\\in"} and len(sides) == 2 and is_label(sides[0]):
        return Labelled(normal_name(sides[0]), read(sides[1]), None)
    if signs <= {"\\approx", "="}:
        return _approximation(sides, read)
    raise UnreadableError("its relation signs do not go together")


def _approximation(sides: list[str], read: Reader) -> Form:
    r"""Read ``\\approx 3.14``, or an exact value with its approximation behind it, which must round to it."""
    near = read(sides[-1])
    if not isinstance(near, Amount) or not near.places:
        raise UnreadableError("an approximation that is no decimal")
    if sides[0] and is_label(sides[0]):
        sides = sides[1:]
    exact = [read(side) for side in sides[:-1] if side]
    if not exact:
        return near
    amounts = [form for form in exact if isinstance(form, Amount)]
    if len(amounts) != len(exact) or not all(rounds(amount.value, near.value, near.places) for amount in amounts):
        raise UnreadableError("an approximation of something else")
    return amounts[0]


def _equation(sides: list[str], read: Reader) -> Form:
    if len(sides) > 2 and is_name(sides[0]) and is_name(sides[1]):
        return _assigned(sides, read)
    if is_label(sides[0]):
        return _labelled(sides[0], sides[1:], read)
    if len(sides) == 2 and is_name(sides[1]) and not is_name(sides[0]):
        return _labelled(sides[1], sides[:1], read)
    if len(sides) != 2:
        return _same_throughout(sides, read)
    try:
        left, right = map(read_expression, sides)
    except UnreadableError:
        return _same_throughout(sides, read)
    if isinstance(left, Foreign) and not isinstance(right, Foreign):
        return Labelled(normal_name(sides[0]), read(sides[1]), None)
    if not symbols(left) | symbols(right):
        return _same_throughout(sides, read)
    if isinstance(left, Apply) and left.operation in "+-" and right == Number(Fraction(0)):
        variable, constant = left.arguments
        if isinstance(variable, Symbol) and is_name(variable.name) and not symbols(constant):
            value = constant if left.operation == "-" else Apply("neg", (constant,))
            return Labelled(variable.name, Amount(value), None, normal=True)
    return Equation(Apply("-", (left, right)))


def _assigned(sides: list[str], read: Reader) -> Form:
    """Read ``x = y = 1``."""
    names = [side for side in sides[:-1] if is_name(side)]
    if len(names) != len(sides) - 1 or len(set(map(normal_name, names))) != len(names):
        raise UnreadableError("a chain of equations")
    return Assigned(tuple(map(normal_name, names)), (read(sides[-1]),) * len(names))


def _labelled(name: str, sides: list[str], read: Reader) -> Form:
    form = _same_throughout(sides, read)
    if name.startswith("(") and isinstance(form, Row):
        names = tuple(normal_name(part) for part in name.strip("() ").split(","))
        if len(names) != len(form.items) or len(set(names)) != len(names) or (form.opening, form.closing) != ("(", ")"):
            raise UnreadableError("a tuple of another size")
        return Assigned(names, form.items, is_tuple=True)
    difference = None
    if isinstance(form, Amount) and (symbols(form.value) or not is_name(name)):
        try:
            difference = Apply("-", (read_expression(name), form.value))
        except UnreadableError:
            pass
    return Labelled(normal_name(name), form, difference)


def _same_throughout(sides: list[str], read: Reader) -> Form:
    """Return the last of several equal sides (``3 + 4 = 7``, ``(1+2, 5) = (3, 5)``).

    Raises:
        UnreadableError: they are not equal.
    """
    forms = [read(side) for side in sides]
    if not all(_equal_sides(form, forms[-1]) for form in forms[:-1]):
        raise UnreadableError("the sides of an equation differ")
    return forms[-1]


def _equal_sides(one: Form, other: Form) -> bool:
    match one, other:
        case Amount(), Amount():
            return same(one.value, other.value)
        case Based(), Amount():
            return same(Number(in_ten(one)), other.value)
        case Row(), Row():
            return len(one.items) == len(other.items) and all(map(_equal_sides, one.items, other.items))
        case _:
            return False


def _chain(sides: list[str], strict: list[bool]) -> Form:
    """Read an ascending chain."""
    if (minus := _negated(sides)) is not None:
        return _chain(minus, strict[::-1])
    ordered = [read_expression(side) for side in sides]
    if len(sides) == 3 and (size := _SIZE.fullmatch(sides[1])) and not symbols(ordered[0]) | symbols(ordered[2]):
        beyond = intervals.complement(_within(size[1], ordered[0], not strict[0]))
        return _of(size[1], intervals.intersection(beyond, _within(size[1], ordered[2], strict[1])))
    if len(sides) == 3 and is_name(sides[1]) and not symbols(ordered[0]) | symbols(ordered[2]):
        return _of(sides[1], intervals.interval(ordered[0], ordered[2], not strict[0], not strict[1]))
    if len(sides) != 2:
        return Ordering(tuple(ordered), tuple(strict))
    low, high = ordered
    if (size := _SIZE.fullmatch(sides[0])) and not symbols(high):
        return _of(size[1], _within(size[1], high, strict[0]))
    if (size := _SIZE.fullmatch(sides[1])) and not symbols(low):
        return _of(size[1], intervals.complement(_within(size[1], low, not strict[0])))
    if is_name(sides[0]) and not symbols(high):
        return _of(sides[0], intervals.interval(intervals.MINUS_INFINITY, high, False, not strict[0]))
    if is_name(sides[1]) and not symbols(low):
        return _of(sides[1], intervals.interval(low, intervals.INFINITY, not strict[0], False))
    difference = Apply("-", (high, low))
    return Inequality(difference, strict[0]) if symbols(difference) else Ordering((low, high), tuple(strict))


def _negated(sides: list[str]) -> list[str] | None:
    """Return a condition on ``-x`` as one on ``x``, ``None`` when it is none: ``-1 < -x`` says ``x < 1``."""
    names = [side for side in sides if is_name(side.removeprefix("-"))]
    if len(names) != 1 or not names[0].startswith("-"):
        return None
    return [side[1:].strip() if side == names[0] else f"-({side})" for side in reversed(sides)]


def _of(name: str, found: Reals) -> Labelled:
    """Return a condition on a variable: ``x > 2`` is an interval, but not ``y > 2``."""
    return Labelled(normal_name(name), found, None)


def _within(name: str, bound: Node, strict: bool) -> Reals:
    """Read ``|x| < 2``. With more than a name between the bars it would be a question, not an answer."""
    if not is_name(name):
        raise UnreadableError("an inequality to be solved")
    return intervals.interval(Apply("neg", (bound,)), bound, not strict, not strict)
