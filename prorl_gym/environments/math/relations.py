"""Parses equations, inequalities and tables: matrices, systems of equations, functions by cases."""

import re
from collections.abc import Callable
from fractions import Fraction

from prorl_gym.environments.math import answer_text, number_sets
from prorl_gym.environments.math.answer_forms import (
    Amount,
    Assignment,
    BasedNumeral,
    BracketedTuple,
    Equation,
    Form,
    Inequality,
    Labelled,
    Matrix,
    Ordering,
    Piecewise,
    RealSet,
    based_value,
)
from prorl_gym.environments.math.answer_text import is_label, is_name, is_variable, normalize_name, split_top_level
from prorl_gym.environments.math.expressions import (
    MathVerifyNode,
    Node,
    Number,
    Operation,
    Symbol,
    UnreadableExpressionError,
    free_symbols,
    parse_expression,
)
from prorl_gym.environments.math.values import is_equivalent, rounds_to_decimal

_SIGNS = ("=", "<", ">", "\\le", "\\ge", "\\ne", "\\in", "\\approx")
_ABSOLUTE_VALUE = re.compile(r"\|\s*+([a-zA-Z](?:_\w)?)\s*+\|")
_FormParser = Callable[[str], Form]
_TABLE = re.compile(
    r"(?P<factor>[^=<>]*?)(?:(?P<open>[(\[|]|\\\{)|(?<!\s))\s*+\\begin\s*+\{(?P<kind>[a-zA-Z]*matrix|array|d?r?cases|aligned|align|gathered|split)\*?\}"
    r"\s*+(?:\{[clr|@\s]*\})?(?P<body>.*?)\\end\s*+\{(?P=kind)\*?\}\s*+(?P<close>[)\]|]|\\\})?\s*+",
    re.DOTALL,
)
_CONDITION = re.compile(r"^(?:\\text\s*+\{\s*+)?(?:if|for|when|where)\b\s*+\}?\s*+|^\\text\s*+\{\s*+\}")
_OTHERWISE = re.compile(r"(?:\\text\s*+\{|(?<!\s))\s*+(?:otherwise|else|elsewhere)\s*+\}?\.?", re.IGNORECASE)


def parse_relation(text: str, read: _FormParser) -> Form | None:
    """Return an equation or an inequality as the answer that it gives, ``None`` where there is no relation sign.

    Raises ``UnreadableExpressionError``: it gives no answer, such as ``4 = 5``.
    """
    parts = split_top_level(text, _SIGNS)
    signs = {sign for sign, _ in parts[1:]}
    sides = [side for _, side in parts]
    if not signs:
        return None
    if signs == {"="}:
        return _parse_equation(sides, read)
    if signs <= {"<", "\\le"}:
        return _parse_ascending(sides, [sign == "<" for sign, _ in parts[1:]])
    if signs <= {">", "\\ge"}:
        return _parse_ascending(sides[::-1], [sign == ">" for sign, _ in parts[:0:-1]])
    if signs == {"\\ne"} and len(sides) == 2:
        name, value = sides if is_name(sides[0]) else sides[::-1]
        if is_name(name):
            constant = parse_expression(value)
            if free_symbols(constant):
                return Equation(Operation("-", (parse_expression(name), constant)), is_negated=True)
            return _label_set(name, number_sets.complement(number_sets.point_set([constant])))
    if signs == {"\\in"} and len(sides) == 2 and is_label(sides[0]):
        return Labelled(normalize_name(sides[0]), read(sides[1]), None)
    if signs <= {"\\approx", "="}:
        return _parse_approximation(sides, read)
    raise UnreadableExpressionError("its relation signs do not go together")


def parse_table(text: str, read: _FormParser) -> Form | None:
    """Return a table as a matrix, as a list of equations or as a function by cases.

    Raises ``UnreadableExpressionError``: a determinant that was not computed, or no such thing.
    """
    match = _TABLE.fullmatch(text)
    if match is None:
        return None
    rows = re.split(r"\\\\(?:\[[^\[\]]*\])?", re.sub(r"\\hline", "", match["body"]))
    rows = [row.strip() for row in rows if row.strip()]
    has_relations = any(re.search(r"=|<|>|\\[lg]e(?![a-z])", row) for row in rows)
    is_array_of_numbers = match["kind"] == "array" and match["open"] != "\\{" and not has_relations
    if match["kind"].endswith("matrix") or is_array_of_numbers:
        return _parse_matrix(rows, match["factor"], match["open"], match["kind"])
    if match["factor"].strip():
        raise UnreadableExpressionError("something before a system of equations")
    rows = [
        re.sub(r"&\s*+(?==|<|>|\\[lg]e(?![a-z])|\\approx)|(?<=[=<>])\s*+&", "", row).strip().rstrip(",;.")
        for row in rows
    ]
    if all("&" in row for row in rows) or any(_OTHERWISE.search(row) for row in rows):
        return _parse_piecewise(rows, read)
    return read(", ".join(row.replace("&", " ") for row in rows))


def _parse_equation(sides: list[str], read: _FormParser) -> Form:
    if len(sides) > 2 and is_name(sides[0]) and is_name(sides[1]):  # x = y = 1
        names = [normalize_name(side) for side in sides[:-1] if is_name(side)]
        if len(names) != len(sides) - 1 or len(set(names)) != len(names):
            raise UnreadableExpressionError("a chain of equations")
        return Assignment(tuple(names), (read(sides[-1]),) * len(names))
    if is_label(sides[0]) or (sides[0] == "e" and len(sides) == 2):  # an eccentricity
        return _parse_labelled(sides[0], sides[1:], read)
    if len(sides) == 2 and is_name(sides[1]) and not is_name(sides[0]):
        return _parse_labelled(sides[1], sides[:1], read)
    if len(sides) != 2:
        return _parse_equal_sides(sides, read)
    try:
        left, right = map(parse_expression, sides)
    except UnreadableExpressionError:
        return _parse_equal_sides(sides, read)
    if isinstance(left, MathVerifyNode) and not isinstance(right, MathVerifyNode):
        return Labelled(normalize_name(sides[0]), read(sides[1]), None)
    if not free_symbols(left) | free_symbols(right) or is_equivalent(left, right):
        return _parse_equal_sides(sides, read)
    if right == Number(Fraction(0)) and (zero := _zero_of(left)) is not None:
        return Labelled(zero[0], Amount(zero[1]), None, normal=True)
    return Equation(Operation("-", (left, right)))


def _zero_of(node: Node) -> tuple[str, Node] | None:
    """Return the variable of ``x - 5`` and where it is zero; ``None`` for all else."""
    match node:
        case Operation("+" | "-", (Symbol(name), constant)) if is_name(name) and not free_symbols(constant):
            return name, constant if node.operation == "-" else Operation("neg", (constant,))
        case _:
            return None


def _parse_labelled(name: str, sides: list[str], read: _FormParser) -> Form:
    form = _parse_equal_sides(sides, read)
    if name.startswith("(") and isinstance(form, BracketedTuple):
        names = tuple(normalize_name(part) for part in name.strip("() ").split(","))
        if len(names) != len(form.items) or len(set(names)) != len(names) or (form.opening, form.closing) != ("(", ")"):
            raise UnreadableExpressionError("a tuple of another bars")
        return Assignment(names, form.items, is_tuple=True)
    difference = None
    if isinstance(form, Amount) and (free_symbols(form.value) or not is_name(name)):
        try:
            difference = Operation("-", (parse_expression(name), form.value))
        except UnreadableExpressionError:
            pass
    return Labelled(normalize_name(name), form, difference)


def _parse_equal_sides(sides: list[str], read: _FormParser) -> Form:
    """Return the last of several sides, which must be equal (``3 + 4 = 7``, ``(1+2, 5) = (3, 5)``)."""
    forms = [read(side) for side in sides]
    if not all(_is_same_side(form, forms[-1]) for form in forms[:-1]):
        raise UnreadableExpressionError("the sides of an equation differ")
    return forms[-1]


def _is_same_side(one: Form, other: Form) -> bool:
    match one, other:
        case Amount(), Amount():
            return is_equivalent(one.value, other.value)
        case BasedNumeral(), Amount():
            return is_equivalent(Number(based_value(one)), other.value)
        case BracketedTuple(), BracketedTuple():
            return len(one.items) == len(other.items) and all(map(_is_same_side, one.items, other.items))
        case _:
            return False


def _parse_ascending(sides: list[str], strict: list[bool]) -> Form:
    if (minus := _without_minus(sides)) is not None:
        return _parse_ascending(minus, strict[::-1])
    ordered = [parse_expression(side) for side in sides]
    if len(sides) == 3 and not free_symbols(ordered[0]) | free_symbols(ordered[2]):
        low, _, high = ordered
        if bars := _ABSOLUTE_VALUE.fullmatch(sides[1]):
            beyond = number_sets.complement(_absolute_value_set(bars[1], low, not strict[0]))
            within = _absolute_value_set(bars[1], high, strict[1])
            return _label_set(bars[1], number_sets.intersection(beyond, within))
        if is_variable(sides[1]):
            return _label_set(sides[1], number_sets.interval(low, high, not strict[0], not strict[1]))
    if len(sides) != 2:
        return Ordering(tuple(ordered), tuple(strict))
    low, high = ordered
    if (bars := _ABSOLUTE_VALUE.fullmatch(sides[0])) and not free_symbols(high):
        return _label_set(bars[1], _absolute_value_set(bars[1], high, strict[0]))
    if (bars := _ABSOLUTE_VALUE.fullmatch(sides[1])) and not free_symbols(low):
        return _label_set(bars[1], number_sets.complement(_absolute_value_set(bars[1], low, not strict[0])))
    if is_variable(sides[0]) and not free_symbols(high):
        return _label_set(sides[0], number_sets.interval(number_sets.MINUS_INFINITY, high, False, not strict[0]))
    if is_variable(sides[1]) and not free_symbols(low):
        return _label_set(sides[1], number_sets.interval(low, number_sets.INFINITY, not strict[0], False))
    if high == Number(Fraction(0)) and (zero := _zero_of(low)) is not None:
        return _label_set(zero[0], number_sets.interval(number_sets.MINUS_INFINITY, zero[1], False, not strict[0]))
    if low == Number(Fraction(0)) and (zero := _zero_of(high)) is not None:
        return _label_set(zero[0], number_sets.interval(zero[1], number_sets.INFINITY, not strict[0], False))
    difference = Operation("-", (high, low))
    return Inequality(difference, strict[0]) if free_symbols(difference) else Ordering((low, high), tuple(strict))


def _without_minus(sides: list[str]) -> list[str] | None:
    """Return a condition on ``-x`` as one on ``x``, ``None`` when it is none: ``-1 < -x`` is ``x < 1``."""
    names = [side for side in sides if is_name(side.removeprefix("-"))]
    if len(names) != 1 or not names[0].startswith("-"):
        return None
    return [side[1:].strip() if side == names[0] else f"-({side})" for side in reversed(sides)]


def _absolute_value_set(name: str, bound: Node, strict: bool) -> RealSet:
    """Return the set of ``|x| < 2``; with more than a name between the bars the inequality has to be solved."""
    if not is_name(name):
        raise UnreadableExpressionError("an inequality to be solved")
    return number_sets.interval(Operation("neg", (bound,)), bound, not strict, not strict)


def _label_set(name: str, found: RealSet) -> Labelled:
    """Return a condition on a variable: ``x > 2`` is an interval, but not ``y > 2``."""
    return Labelled(normalize_name(name), found, None)


def _parse_approximation(sides: list[str], read: _FormParser) -> Form:
    r"""Read ``\\approx 3.14``, or an exact value with its approximation behind it, which must round to it."""
    near = read(sides[-1])
    if not isinstance(near, Amount) or not near.places:
        raise UnreadableExpressionError("an approximation that is no decimal")
    if sides[0] and is_label(sides[0]):
        sides = sides[1:]
    exact = [read(side) for side in sides[:-1] if side]
    if not exact:
        return near
    for form in exact:
        if not isinstance(form, Amount) or not rounds_to_decimal(form.value, near.value, near.places):
            raise UnreadableExpressionError("an approximation of something else")
    return exact[0]


def _parse_matrix(rows: list[str], factor: str, opening: str | None, kind: str) -> Matrix:
    if kind == "vmatrix" or opening == "|":
        raise UnreadableExpressionError("a determinant that was not computed")
    grid = [[parse_expression(answer_text.normalize_formula(cell.strip())) for cell in row.split("&")] for row in rows]
    if factor := factor.strip():
        scale = parse_expression(factor.removesuffix("\\cdot").strip())
        grid = [[Operation("*", (scale, cell)) for cell in row] for row in grid]
    return Matrix(tuple(tuple(row) for row in grid))


def _parse_piecewise(rows: list[str], read: _FormParser) -> Piecewise:
    cases: list[tuple[Node, RealSet]] = []
    names: set[str] = set()
    covered = number_sets.EMPTY_SET
    for at, row in enumerate(rows):
        formula, _, condition = row.partition("&" if "&" in row else ",")
        formula = formula.strip().rstrip(",")
        condition = _CONDITION.sub("", condition.replace("&", " ").strip()).strip()
        if _OTHERWISE.fullmatch(condition):
            if at != len(rows) - 1:
                raise UnreadableExpressionError("cases behind all others")
            found = number_sets.complement(covered)
        else:
            match read(condition):
                case Labelled(name, RealSet() as found):
                    names.add(name)
                case Labelled(name, Amount() as point):
                    names.add(name)
                    found = number_sets.point_set([point.value])
                case _:
                    raise UnreadableExpressionError("a case that is no condition on a variable")
        if number_sets.intersection(covered, found).intervals:
            raise UnreadableExpressionError("cases that overlap")
        covered = number_sets.union(covered, found)
        cases.append((parse_expression(formula), found))
    if len(names) != 1 or any(free_symbols(formula) - names for formula, _ in cases):
        raise UnreadableExpressionError("cases of several variables")
    return Piecewise(names.pop(), tuple(cases))
