r"""Sets of real numbers (disjoint intervals with exact ends) and integer families.

A family is a union of progressions: ``\frac{\pi}{4} + k\pi``, ``x \equiv 3 \pmod 7``, ``n is odd``.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial, reduce
from typing import Any

from prorl_gym.environments.math.answer_forms import (
    Amount,
    AnswerCollection,
    BracketedTuple,
    Form,
    Inequality,
    IntegerFamily,
    Interval,
    Labelled,
    RealSet,
)
from prorl_gym.environments.math.answer_text import is_name, normalize_name, strip_text_macros
from prorl_gym.environments.math.arithmetic import evaluate, mp, to_mpmath
from prorl_gym.environments.math.expressions import (
    Node,
    Number,
    Operation,
    Symbol,
    UnreadableExpressionError,
    free_symbols,
    substitute,
)
from prorl_gym.environments.math.values import (
    SAMPLE_GRID,
    ZERO,
    is_equal_constant,
    neighbouring_points,
    rational_value,
    real_value,
)

INFINITY = Symbol("\\infty")
MINUS_INFINITY = Operation("neg", (INFINITY,))
ALL_REALS = RealSet((Interval(MINUS_INFINITY, INFINITY, False, False),))
EMPTY_SET = RealSet(())
PARAMETER = "\\psi"
"""The integer of a residue class, which has no letter of its own."""
_DIGITS = 80
_MAX_RESIDUES = 240
_CONGRUENCE = re.compile(
    r"(?:(?P<name>[^=<>,]*?)(?<!\s)\s*+\\equiv)?\s*+(?P<residues>[^=<>]*?)(?<!\s)\s*+"
    r"(?:\\pmod|(?P<infix>\\b?mod|\\text\s*+\{\s*+\(?mod\s*+\}?|\(\s*+(?:\\b?mod|\\text\s*+\{\s*+mod\s*+\}|mod(?![a-z]))|mod(?![a-z])))"
    r"\s*+[{(]?\s*+(?P<modulus>\d+)\s*+(?:[)}]\s*+)*"
)
_CONDITION_WORDS = r"(?:(?:for|if|iff|if and only if|when|whenever|exactly when|precisely when|only if)\s+)?"
_LEAD = rf"{_CONDITION_WORDS}(?:(?:all|any|every|an?)\s+)?"
_NAMED = r"(?P<name>[a-zA-Z])(?![a-zA-Z])\s*+"
_VERB = r"(?:\b(?:is|are|must be|has to be|be)\s+(?P<negated>not\s+)?)"
_NOUNS = r"(?:\s+(?:integers?|numbers?|values?(?:\s+of)?))?"
_WORDED_FAMILIES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"{_LEAD}{_NAMED}{_VERB}?(?:an?\s+)?(?P<parity>odd|even){_NOUNS}",
        rf"{_LEAD}(?P<parity>odd|even){_NOUNS}(?:\s+(?P<name>[a-zA-Z]))?",
        rf"{_LEAD}{_NAMED}{_VERB}(?:divisible\s+by|an?\s+(?:integer\s+)?multiple\s+of)\s+(?P<modulus>\d{{1,3}})",
        rf"{_LEAD}(?:integer\s+)?multiples?\s+of\s+(?P<modulus>\d{{1,3}})",
        rf"(?P<modulus>\d{{1,3}})\s*+(?:\||\\mid|divides)\s*+{_NAMED}",
    )
)
_Progression = tuple[Node, Node]
"""Start and step."""


def interval(low: Node, high: Node, closed_low: bool, closed_high: bool) -> RealSet:
    """Return an interval; an end at infinity is open however it was written.

    Raises ``UnreadableExpressionError``: an end is no real number, or they are in the wrong order.
    """
    order = _compare(low, high)
    if order > 0:
        raise UnreadableExpressionError("an interval's ends are in the wrong order")
    if order == 0:
        return RealSet((Interval(low, high, True, True),)) if closed_low and closed_high else EMPTY_SET
    closed_low = closed_low and not is_equal_constant(low, MINUS_INFINITY)
    closed_high = closed_high and not is_equal_constant(high, INFINITY)
    return RealSet((Interval(low, high, closed_low, closed_high),))


def point_set(values: Iterable[Node]) -> RealSet:
    """Return a finite set. Raises ``UnreadableExpressionError``: a member is no real number."""
    return reduce(union, (interval(value, value, True, True) for value in values), EMPTY_SET)


def union(one: RealSet, other: RealSet) -> RealSet:
    """Return the union, with adjacent intervals joined."""
    joined: list[Interval] = []
    pieces = [*one.intervals, *other.intervals]
    for piece in sorted(pieces, key=lambda piece: (real_value(piece.low), not piece.closed_low)):
        order = _compare(piece.low, joined[-1].high) if joined else 1
        if order < 0 or (order == 0 and (joined[-1].closed_high or piece.closed_low)):
            joined[-1] = _join_intervals(joined[-1], piece)
        else:
            joined.append(piece)
    return RealSet(tuple(joined))


def complement(one: RealSet) -> RealSet:
    """Return the real numbers that are not in a set."""
    gaps: list[Interval] = []
    low, closed = MINUS_INFINITY, False
    for piece in one.intervals:
        gaps.extend(_gap(low, piece.low, closed, not piece.closed_low))
        low, closed = piece.high, not piece.closed_high
    gaps.extend(_gap(low, INFINITY, closed, False))
    return RealSet(tuple(gaps))


def intersection(one: RealSet, other: RealSet) -> RealSet:
    return complement(union(complement(one), complement(other)))


def is_same_set(one: RealSet, other: RealSet) -> bool:
    return len(one.intervals) == len(other.intervals) and all(
        (left.closed_low, left.closed_high) == (right.closed_low, right.closed_high)
        and is_equal_constant(left.low, right.low)
        and is_equal_constant(left.high, right.high)
        for left, right in zip(one.intervals, other.intervals, strict=True)
    )


def is_solution_set(answer: Form | None, gold: Form | None) -> bool:
    """Whether an inequality of one variable holds on a set of real numbers, and nowhere else."""
    if not isinstance(gold, Inequality) or len(names := free_symbols(gold.difference)) != 1:
        return False
    (name,) = names
    if isinstance(answer, Labelled) and answer.name == name:
        answer = answer.form
    if not isinstance(answer, RealSet):
        return False
    both_ends = [
        each for piece in answer.intervals for each in ((piece.low, piece.closed_low), (piece.high, piece.closed_high))
    ]
    finite_ends = [(end, is_closed) for end, is_closed in both_ends if end not in (INFINITY, MINUS_INFINITY)]
    for end, is_closed in finite_ends:
        if free_symbols(end) or not is_equal_constant(substitute(gold.difference, name, end), ZERO):
            return False
        if is_closed == gold.strict:
            return False
    near = [Fraction(str(size)) for end, _ in finite_ends if (size := real_value(end)) is not None]
    return all(
        _holds(gold, name, at) == _contains(answer, at) for at in {*SAMPLE_GRID, *neighbouring_points(near)} - set(near)
    )


def parse_congruence(text: str, read: Callable[[str], Form]) -> IntegerFamily | None:
    r"""Return ``x \equiv 1, 4 \pmod 5`` or ``3 \pmod 5`` as a family; ``17 \bmod 5`` is an operation, and none."""
    match = _CONGRUENCE.fullmatch(text)
    if match is None or "mod" in match["residues"] or "\\equiv" in match["residues"]:
        return None
    if match["name"] is None and match["infix"] and not match["infix"].startswith("("):
        return None
    if match["name"] and not is_name(match["name"]):
        raise UnreadableExpressionError("a congruence to be solved")
    form = read(match["residues"])
    return _residue_classes(
        match["name"] or None, form.items if isinstance(form, AnswerCollection) else (form,), int(match["modulus"])
    )


def is_remainder(answer: Form | None, gold: Form | None, question: str) -> bool:
    r"""Whether ``4 \\pmod 9`` is the remainder that a question about 9 asks for."""
    if not isinstance(answer, IntegerFamily) or not isinstance(gold, Amount) or answer.letter != PARAMETER:
        return False
    residues = answer.form.form if isinstance(answer.form, Labelled) else answer.form
    match residues:
        case AnswerCollection((Amount(Operation("+", (residue, Operation("*", (Number(modulus), _))))),)):
            found = rational_value(residue)
            is_least = found is not None and found == rational_value(gold.value) and 0 <= found < modulus
            return is_least and re.search(rf"(?:remainder|mod).*?(?<!\d){modulus}(?!\d)", question) is not None
        case _:
            return False


def parse_worded_family(text: str) -> IntegerFamily | None:
    """Return ``n is odd``, ``all even integers`` or ``n is divisible by 3`` as a family, ``None`` for all else."""
    text = " ".join(strip_text_macros(text).split()).strip(" .")
    match = next((found for pattern in _WORDED_FAMILIES if (found := pattern.fullmatch(text))), None)
    if match is None:
        return None
    found = match.groupdict()
    modulus = int(found.get("modulus") or 2)
    residues = [int((found.get("parity") or "").casefold() == "odd")]
    if found.get("negated"):
        residues = [each for each in range(modulus) if each not in residues]
    if not 2 <= modulus <= _MAX_RESIDUES:
        raise UnreadableExpressionError("a class of too many residues, or of all numbers")
    return _residue_classes(found.get("name"), [Amount(Number(Fraction(each))) for each in residues], modulus)


def names_of(form: Form) -> set[str]:
    """Return the names before the formulas of a family: of ``n = 4k`` or ``n = 4k+1`` one."""
    parts = (form, *(form.items if isinstance(form, AnswerCollection) else ()))
    return {part.name for part in parts if isinstance(part, Labelled)}


def find_parameter(form: Form) -> str | None:
    r"""Return the letter of a formula that may be a family without a declared integer, such as ``2k\\pi``."""
    inner = form.form if isinstance(form, Labelled) else form
    items = inner.items if isinstance(inner, AnswerCollection) else (inner,)
    items = [item.form if isinstance(item, Labelled) else item for item in items]
    letters = frozenset[str]().union(*(free_symbols(item.value) for item in items if isinstance(item, Amount)))
    return next(iter(letters)) if len(letters) == 1 and letters <= frozenset("knmlj") else None


def is_same_family(one: IntegerFamily, other: IntegerFamily) -> bool | None:
    """Whether two families are the same set of numbers, ``None`` where they are no progressions."""
    if one.domain != "Z" or other.domain != "Z":
        return None
    if len(names_of(one.form) | names_of(other.form)) > 1:
        return False
    mine, theirs = _progressions(one.form, one.letter), _progressions(other.form, other.letter)
    return None if mine is None or theirs is None else _is_same_union(mine, theirs)


def with_common_letter(form: Form, letter: str) -> Form | None:
    """Return a form with a common letter for the integer of a family, ``None`` when it is more than formulas."""
    renamed = partial(substitute, name=letter, by=Symbol(PARAMETER))
    match form:
        case Amount(node, unit, percent):
            return Amount(renamed(node), unit, percent)
        case Labelled(name, inner):
            found = with_common_letter(inner, letter)
            return None if found is None else Labelled(name, found, None)
        case AnswerCollection() | BracketedTuple():
            items = [found for item in form.items if (found := with_common_letter(item, letter)) is not None]
            return replace(form, items=tuple(items)) if len(items) == len(form.items) else None
        case RealSet(pieces):
            return RealSet(tuple(replace(each, low=renamed(each.low), high=renamed(each.high)) for each in pieces))
        case _:
            return None


def _compare(left: Node, right: Node) -> int:
    one, other = real_value(left), real_value(right)
    if one is None or other is None:
        raise UnreadableExpressionError("an end of an interval is no real number")
    if is_equal_constant(left, right):
        return 0
    return -1 if one < other else 1


def _join_intervals(left: Interval, right: Interval) -> Interval:
    order = _compare(right.high, left.high)
    if order > 0:
        return replace(left, high=right.high, closed_high=right.closed_high)
    if order == 0:
        return replace(left, closed_high=left.closed_high or right.closed_high)
    return left


def _gap(low: Node, high: Node, closed_low: bool, closed_high: bool) -> tuple[Interval, ...]:
    if is_equal_constant(low, high) and (not (closed_low and closed_high) or _is_infinite(low)):
        return ()
    return interval(low, high, closed_low and not _is_infinite(low), closed_high and not _is_infinite(high)).intervals


def _is_infinite(node: Node) -> bool:
    return is_equal_constant(node, INFINITY) or is_equal_constant(node, MINUS_INFINITY)


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


def _residue_classes(name: str | None, residues: Sequence[Form], modulus: int) -> IntegerFamily:
    step = Operation("*", (Number(Fraction(modulus)), Symbol(PARAMETER)))
    several = AnswerCollection(tuple(_residue(item, step) for item in residues), is_set=True)
    return IntegerFamily(PARAMETER, several if name is None else Labelled(normalize_name(name), several, None))


def _residue(item: Form, step: Node) -> Amount:
    if (
        not isinstance(item, Amount)
        or item.unit is not None
        or (found := rational_value(item.value)) is None
        or found.denominator != 1
    ):
        raise UnreadableExpressionError("a residue that is no integer")
    return Amount(Operation("+", (item.value, step)))


def _progressions(form: Form, letter: str) -> list[_Progression] | None:
    match form:
        case Labelled(_, inner):
            return _progressions(inner, letter)
        case AnswerCollection(items):
            found = [_progressions(item, letter) for item in items]
            return None if None in found else [each for progressions in found for each in progressions or ()]
        case Amount(node, None, False) if free_symbols(node) <= {letter}:
            if (linear := _to_progression(node, letter)) is not None:
                return [linear]
            twice = Operation("*", (Number(Fraction(2)), Symbol(letter)))
            indexes = [Operation("+", (twice, Number(Fraction(rest)))) for rest in (0, 1)]
            halves = [_to_progression(substitute(node, letter, index), letter) for index in indexes]
            return None if None in halves else [half for half in halves if half is not None]
        case _:
            return None


def _to_progression(node: Node, letter: str) -> _Progression | None:
    """Return start and step, where a formula of an integer is linear in it."""

    def at(index: int) -> Node:
        return substitute(node, letter, Number(Fraction(index)))

    start = at(0)
    step = Operation("-", (at(1), start))
    for index in (2, 3, -1, 7, -4):
        if not is_equal_constant(at(index), Operation("+", (start, Operation("*", (Number(Fraction(index)), step))))):
            return None
    return start, step


def _is_same_union(mine: list[_Progression], theirs: list[_Progression]) -> bool:
    """Whether two unions of progressions are the same, by their residues for a common multiple of all steps."""
    with mp.workdps(_DIGITS):
        sizes = [
            [(to_mpmath(evaluate(start)), abs(to_mpmath(evaluate(step)))) for start, step in each]
            for each in (mine, theirs)
        ]
        steps = [step for each in sizes for _, step in each if step != 0]
        if not steps:
            return False
        unit = steps[0]
        shares: list[Fraction] = []
        for step in steps:
            share = Fraction(str(mp.nstr(step / unit, 30))).limit_denominator(1000)
            if abs(step / unit - to_mpmath(share)) >= mp.mpf(10) ** (-_DIGITS // 2):
                return False
            shares.append(share)
        period = (
            unit * math.lcm(*(share.numerator for share in shares)) / math.gcd(*(share.denominator for share in shares))
        )
        left, right = (list(_residues(each, period)) for each in sizes)
        if max(len(left), len(right)) > _MAX_RESIDUES:
            raise UnreadableExpressionError("progressions with too many residues")
        return all(
            any(_is_congruent(one, other, period) for other in others)
            for ones, others in ((left, right), (right, left))
            for one in ones
        )


def _residues(progressions: list[tuple[Any, Any]], period: Any) -> Iterator[Any]:
    for start, step in progressions:
        if step == 0:
            raise UnreadableExpressionError("a constant next to a progression")
        for index in range(min(int(mp.nint(period / step)), _MAX_RESIDUES + 1)):
            yield start + index * step


def _is_congruent(one: Any, other: Any, period: Any) -> bool:
    turns = (one - other) / period
    return abs(turns - mp.nint(turns)) < mp.mpf(10) ** (-_DIGITS // 2)
