"""Equality of two mathematical answers. Runs in a worker process: computing what a model wrote may take for ever."""

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import zip_longest
from typing import Any

from prorl_gym.environments.math import intervals, spelling, words
from prorl_gym.environments.math.antiderivatives import same_but_constant
from prorl_gym.environments.math.clocks import may_be_ratio, same_time
from prorl_gym.environments.math.evaluated import evaluated
from prorl_gym.environments.math.expressions import Apply, Node, Number, Symbol, UnreadableError, symbols
from prorl_gym.environments.math.families import PARAMETER, parameter, renamed, same_family
from prorl_gym.environments.math.forms import (
    Ambiguous,
    Amount,
    Assigned,
    Based,
    Choice,
    Clock,
    Equation,
    Family,
    Form,
    Grid,
    Inequality,
    Labelled,
    Ordering,
    Piecewise,
    Ratio,
    Reals,
    Row,
    Selection,
    Several,
    Words,
)
from prorl_gym.environments.math.labels import is_group, same_name
from prorl_gym.environments.math.reading import as_reals, read
from prorl_gym.environments.math.rounding import rounds_to
from prorl_gym.environments.math.solutions import solved_for, solves
from prorl_gym.environments.math.splitting import is_name
from prorl_gym.environments.math.tables import same_cases
from prorl_gym.environments.math.values import defined, proportional, real_number, same

_OPTIONS = frozenset("ABCDEFGH")
_QUOTIENT = re.compile(r"\\frac\{([^{}]+)\}\{([^{}]+)\}|([A-Z]{1,2}|[a-z])/([A-Z]{1,2}|[a-z])")


def grade(body: Mapping[str, Any]) -> dict[str, Any]:
    """Worker entry: ``{"gold", "answer", "question"}`` -> ``{"equal", "evaluated"}``; see ``accepted``.

    A gold answer that cannot be read comes back as ``{"unreadable"}``: nothing can be compared with it.
    """
    gold, answer, question = body["gold"], body["answer"], body["question"]
    for each in _all(gold):
        if not is_readable(each):
            return {"unreadable": each}
    is_evaluated = _evaluated(gold, answer, question)
    return {"equal": is_evaluated and _right(gold, answer), "evaluated": is_evaluated}


def accepted(gold: str | Sequence[str], answer: str, question: str = "") -> bool:
    r"""Whether an answer is right: equal to a gold one, or a closer value of a gold decimal that looks rounded.

    The rules with a direction: ``\\pi`` and ``3.1416`` are right where the gold answer is ``3.14``, but ``3.14`` is
    not where it is ``\\pi``. A decimal with few digits for its size (``2.5``, ``0.125``) does not look rounded.
    ``x > 2`` is right where the gold answer is ``2x > 4``, but not the other way round. And an answer must be evaluated
    where the gold one is (``evaluated``).

    Args:
        gold: the gold answer, or several of which any counts.
        answer: what was boxed.
        question: what was asked; empty where it is not known.
    """
    return _evaluated(gold, answer, question) and _right(gold, answer)


def is_readable(gold: str) -> bool:
    """Whether an answer can be read, so that others can be compared with it."""
    text = spelling.plain(gold)
    return spelling.means_something(text) and _read(text) is not None


def _right(gold: str | Sequence[str], answer: str) -> bool:
    found = _read(spelling.plain(answer))
    for each in _all(gold):
        form = _read(spelling.plain(each))
        if equal(each, answer) or rounds_to(form, found) or solves(found, form):
            return True
    return False


def _evaluated(gold: str | Sequence[str], answer: str, question: str) -> bool:
    golds = [(each, _read(spelling.plain(each))) for each in _all(gold)]
    return evaluated(golds, answer, _read(spelling.plain(answer)), question)


def _all(gold: str | Sequence[str]) -> Sequence[str]:
    return [gold] if isinstance(gold, str) else gold


def equal(one: str, other: str) -> bool:
    """Whether two answers are the same. Symmetric; nothing equals an empty, meaningless or unreadable answer."""
    first, second = spelling.plain(one), spelling.plain(other)
    if not spelling.means_something(first) or not spelling.means_something(second):
        return False
    left, right = _read(first), _read(second)
    if left is None or right is None:
        return False
    if spelling.key(first) == spelling.key(second):
        return not isinstance(left, Amount) or defined(left.value)
    return _same_form(left, right)


@lru_cache(maxsize=64)
def _read(text: str) -> Form | None:
    try:
        return read(text)
    except (UnreadableError, ArithmeticError, ValueError, RecursionError):
        return None


def _same_form(left: Form, right: Form) -> bool:
    try:
        return _same(_only(left), _only(right))
    except (UnreadableError, ArithmeticError, ValueError, RecursionError):
        return False


def _only(form: Form) -> Form:
    """Return the member of a set of one, which is an answer like its member; inside another set it is not."""
    if not isinstance(form, Several) or not form.is_set or isinstance(form.items[0], Several | Reals):
        return form
    return form.items[0] if all(_same(item, form.items[0]) for item in form.items[1:]) else form


def _same(left: Form, right: Form) -> bool:
    for kind, compare in _BY_KIND:  # the first kind that either has decides, so the order of the two does not matter
        if isinstance(left, kind):
            return compare(left, right)
        if isinstance(right, kind):
            return compare(right, left)
    return False


def _ambiguous(one: Ambiguous, other: Form) -> bool:
    if isinstance(other, Ambiguous):
        return len(one.readings) == len(other.readings) and all(map(_same, one.readings, other.readings))
    return all(_same(reading, other) for reading in one.readings)


def _family(one: Family, other: Form) -> bool:
    if not isinstance(other, Family):
        letter = parameter(other)
        # 2n may be a number that was asked for: it is not "even", but n = 2k may be "n is even".
        is_class = one.letter == PARAMETER and not (isinstance(one.form, Labelled) and isinstance(other, Labelled))
        if letter is None or is_class:
            return False
        other = Family(letter, other, one.domain)
    found = same_family(one, other)
    if found is None:
        mine, theirs = renamed(one), renamed(other)
        return one.domain == other.domain and mine is not None and theirs is not None and _same(mine, theirs)
    return found


def _selection(one: Selection, other: Form) -> bool:
    if isinstance(other, Selection):
        return _same(one.point, other.point)
    is_point = isinstance(other, Row | Grid | Several | Assigned | Reals)
    return _same(one.point if is_point else one.count, other)


def _choice(one: Choice, other: Form) -> bool:
    if isinstance(other, Choice):
        return one.letter == other.letter and _same(one.form, other.form)
    if isinstance(other, Amount) and isinstance(other.value, Symbol) and other.value.name in "ABCDE":
        return one.letter == other.value.name
    return _same(one.form, other)


def _labelled(one: Labelled, other: Form) -> bool:
    if isinstance(other, Labelled):
        if same_name(one.name, other.name):
            return _same(one.form, other.form)
        return _same_ratio(one, other) or _same_curve(one.difference, other.difference) or _solved(one, other)
    if isinstance(other, Equation):
        return not other.is_negated and (_same_curve(one.difference, other.difference) or _solved(one, other))
    if isinstance(other, Assigned):
        return False
    return not one.normal and _same(one.form, other)


def _solved(one: Labelled, other: Labelled | Equation) -> bool:
    """Whether one equation is the other, solved for a variable."""
    for answer, equation in ((one, other), (other, one)):
        if isinstance(answer, Labelled) and is_name(answer.name) and isinstance(answer.form, Amount):
            if symbols(answer.form.value) and solved_for(answer.name, answer.form.value, equation.difference):
                return True
    return False


def _same_ratio(one: Labelled, other: Labelled) -> bool:
    r"""Whether ``AB:BC = 1:2``, ``BC:AB = 2:1`` and ``\\frac{AB}{BC} = \\frac12`` say the same of the same parts."""
    first, second = _named_ratio(one), _named_ratio(other)
    if first is None or second is None:
        return False
    (mine, ratio), (theirs, parts) = first, second
    if sorted(mine) != sorted(theirs) or len(set(mine)) != len(ratio.parts) or len(mine) != len(parts.parts):
        return False
    return _ratio(ratio, Ratio(tuple(parts.parts[theirs.index(name)] for name in mine)))


def _named_ratio(one: Labelled) -> tuple[list[str], Ratio] | None:
    r"""Return the names and the proportion of ``AB:CD = 2:3``, also where it is written as a fraction."""
    match = _QUOTIENT.fullmatch(one.name)
    names = one.name.split(":") if match is None else [name for name in match.groups() if name is not None]
    match one.form:
        case Ratio():
            return names, one.form
        case Amount(value, None, False) if len(names) == 2 and not symbols(value):
            return names, Ratio((value, Number(Fraction(1))))
        case _:
            return None


def _assigned(one: Assigned, other: Form) -> bool:
    """Compare values with names: by name, or in their order where only one side has names."""
    if isinstance(other, Assigned):
        theirs = dict(zip(other.names, other.values, strict=True))
        return set(one.names) == set(theirs) and all(
            _same(value, theirs[name]) for name, value in zip(one.names, one.values, strict=True)
        )
    if isinstance(other, Row):
        order = range(len(one.names)) if one.is_tuple else sorted(range(len(one.names)), key=one.names.__getitem__)
        if one.is_tuple and is_group(one.names) and sorted(one.names) != list(one.names):
            return False  # (y, x) = (1, 2) is not the point (1, 2)
        brackets = len(other.items) > 2 or (other.opening, other.closing) == ("(", ")")
        return (
            brackets
            and len(other.items) == len(order)
            and all(map(_same, (one.values[at] for at in order), other.items))
        )
    if isinstance(other, Several):
        return len({name.partition("_")[0] for name in one.names}) == 1 and _same(Several(one.values, False), other)
    return False


def _equation(one: Equation, other: Form) -> bool:
    if not isinstance(other, Equation) or one.is_negated != other.is_negated:
        return False
    return _same_curve(one.difference, other.difference)


def _same_curve(one: Node | None, other: Node | None) -> bool:
    return one is not None and other is not None and proportional(one, other) is not None


def _inequality(one: Inequality, other: Form) -> bool:
    return (
        isinstance(other, Inequality)
        and one.strict == other.strict
        and proportional(one.difference, other.difference) == 1
    )


def _ordering(one: Ordering, other: Form) -> bool:
    return isinstance(other, Ordering) and one.strict == other.strict and all(map(same, one.sides, other.sides))


def _words(one: Words, other: Form) -> bool:
    if not isinstance(other, Words):
        return False
    if one.text == other.text:
        return True
    mine, theirs = words.members(one.text), words.members(other.text)
    unordered = " and " in one.text + other.text or (mine is not None and len(mine) == 2)
    return mine is not None and theirs is not None and unordered and sorted(mine) == sorted(theirs)


def _several(one: Several, other: Form) -> bool:
    if isinstance(other, Several):
        return _same_items(one, other)
    if isinstance(other, Reals):
        found = as_reals(Several(one.items, True))
        return found is not None and intervals.equal_sets(found, other)
    if isinstance(other, Words):
        return not one.is_set and _run_together(one) == other.text.upper()
    return isinstance(other, Row) and _same_listing(one, other)


def _run_together(one: Several) -> str | None:
    """Return ``A, C, D`` as ``ACD``, as options of a question are named; two letters could be a segment."""
    letters = [item.value for item in one.items if isinstance(item, Amount) and item == Amount(item.value)]
    options = [letter.name for letter in letters if isinstance(letter, Symbol) and letter.name in _OPTIONS]
    return "".join(options) if len(set(options)) == len(options) == len(one.items) > 2 else None


def _same_items(one: Several, other: Several) -> bool:
    labels = [{item.name for item in each.items if isinstance(item, Labelled)} for each in (one, other)]
    if all(len(each) == 1 for each in labels) and not same_name(*(name for each in labels for name in each)):
        return False
    mine, theirs = (_unlabelled(each.items) for each in (one, other))
    if mine is None and theirs is None:
        mine, theirs = one.items, other.items
    if mine is None or theirs is None:
        return False  # which value is whose cannot be seen
    if one.is_set or other.is_set:
        return _covers(mine, theirs) and _covers(theirs, mine)
    rest = list(theirs)
    for item in mine:
        match = next((at for at, candidate in enumerate(rest) if _same(item, candidate)), None)
        if match is None:
            return False
        del rest[match]
    return not rest


def _covers(items: Sequence[Form], others: Sequence[Form]) -> bool:
    return all(any(_same(item, other) for other in others) for item in items)


def _unlabelled(items: Sequence[Form]) -> tuple[Form, ...] | None:
    """Take off the labels of values of one variable (``x = 1``, ``x = 2``); ``None`` when they name several."""
    names = {item.name for item in items if isinstance(item, Labelled)}
    if len(names) > 1:
        return None
    return tuple(item.form if isinstance(item, Labelled) else item for item in items)


def _same_listing(one: Several, other: Row) -> bool:
    """Whether a point of three or more coordinates lacks its brackets; two could be the ends of an interval."""
    return not one.is_set and len(one.items) == len(other.items) > 2 and all(map(_same, one.items, other.items))


def _row(one: Row, other: Form) -> bool:
    if isinstance(other, Row):
        brackets = len(one.items) > 2 or (one.opening, one.closing) == (other.opening, other.closing)
        return brackets and len(one.items) == len(other.items) and all(map(_same, one.items, other.items))
    if isinstance(other, Reals):
        found = as_reals(one)
        return found is not None and intervals.equal_sets(found, other)
    return isinstance(other, Grid) and _same_grid(_grid(one), other)


def _grid(row: Row) -> Grid | None:
    """Return ``[[1, 2], [3, 4]]`` or a vector as a matrix."""
    if all(isinstance(item, Row) for item in row.items):
        rows = [item.items for item in row.items if isinstance(item, Row)]
    else:
        rows = [(item,) for item in row.items]
    cells = tuple(tuple(cell.value for cell in cells if isinstance(cell, Amount)) for cells in rows)
    return Grid(cells) if [len(line) for line in cells] == [len(line) for line in rows] else None


def _same_grid(one: Grid | None, other: Grid) -> bool:
    if one is None or [len(row) for row in one.rows] != [len(row) for row in other.rows]:
        return False
    return all(same(*cells) for rows in zip(one.rows, other.rows, strict=True) for cells in zip(*rows, strict=True))


def _matrix(one: Grid, other: Form) -> bool:
    return isinstance(other, Grid) and _same_grid(one, other)


def _real_set(one: Reals, other: Form) -> bool:
    if isinstance(other, Amount) and other.unit is None and not symbols(other.value):
        return len(one.pieces) == 1 and intervals.equal_sets(one, intervals.points([other.value]))
    return isinstance(other, Reals) and intervals.equal_sets(one, other)


def _ratio(one: Ratio, other: Form) -> bool:
    if isinstance(other, Ratio):
        mine, theirs = one.parts, other.parts
        if len(mine) != len(theirs):
            return False
        return all(
            same(Apply("*", (a, theirs[0])), Apply("*", (b, mine[0]))) for a, b in zip_longest(mine[1:], theirs[1:])
        )
    if isinstance(other, Amount) and len(one.parts) == 2 and other.unit is None:
        return same(Apply("/", one.parts), other.value)
    return False


def _clock(one: Clock, other: Form) -> bool:
    if isinstance(other, Clock):
        return same_time(one, other)
    if isinstance(other, Ratio) and may_be_ratio(one):
        return _ratio(Ratio((Number(Fraction(one.hour)), Number(Fraction(one.minute)))), other)
    return False


def _piecewise(one: Piecewise, other: Form) -> bool:
    if isinstance(other, Amount) and other.unit is None and symbols(other.value) <= {one.name}:
        other = Piecewise(one.name, ((other.value, intervals.EVERYTHING),))
    return isinstance(other, Piecewise) and one.name == other.name and same_cases(one.cases, other.cases)


def _based(one: Based, other: Form) -> bool:
    return one == other


def _amount(one: Amount, other: Form) -> bool:
    if not isinstance(other, Amount):
        return False
    mine, theirs = one.unit, other.unit
    if one.percent or other.percent:
        return _same_percent(one, other)
    if mine is not None and theirs is not None and (mine.dimension or theirs.dimension):
        if mine.dimension == theirs.dimension:
            return same(_scaled(one.value, mine.factor), _scaled(other.value, theirs.factor))
        if {mine.noun, theirs.noun} & {"units", "unit", "total"}:
            return same(one.value, other.value)
        return _same_angle(one, other)
    return same(one.value, other.value) or same_but_constant(one.value, other.value) or _same_angle(one, other)


def _same_angle(one: Amount, other: Amount) -> bool:
    """Whether degrees on one side are the radians on the other, which need not be marked."""
    for degrees, radians in ((one, other), (other, one)):
        if degrees.unit is not None and degrees.unit.dimension == (("angle", 1),):
            if radians.unit is None or radians.unit.dimension == (("radian", 1),):
                return same(Apply("degrees", (degrees.value,)), radians.value)
    return False


def _same_percent(one: Amount, other: Amount) -> bool:
    """A percent sign on one side only is taken either way: ``50%`` is ``0.5``, and ``50`` when percents are asked.

    Not with a number up to one, which is rather a share: ``0.5`` is not ``0.5%``.
    """
    if any(amount.unit is not None for amount in (one, other)):
        return False
    if one.percent and other.percent:
        return same(one.value, other.value)
    percent, bare = (one, other) if one.percent else (other, one)
    if same(_scaled(percent.value, Fraction(1, 100)), bare.value):
        return True
    size = real_number(bare.value)
    return size is not None and abs(size) > 1 and same(percent.value, bare.value)


def _scaled(value: Node, factor: Fraction) -> Node:
    return value if factor == 1 else Apply("*", (value, Number(factor)))


_BY_KIND: tuple[tuple[type[Any], Callable[[Any, Form], bool]], ...] = (
    (Ambiguous, _ambiguous), (Selection, _selection), (Family, _family), (Choice, _choice), (Labelled, _labelled),
    (Assigned, _assigned), (Several, _several), (Row, _row), (Grid, _matrix), (Piecewise, _piecewise),
    (Reals, _real_set), (Clock, _clock), (Ratio, _ratio), (Based, _based), (Equation, _equation),
    (Inequality, _inequality), (Ordering, _ordering), (Words, _words), (Amount, _amount),
)  # fmt: skip
