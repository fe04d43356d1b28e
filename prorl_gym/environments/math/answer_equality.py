"""Decides whether two mathematical answers are equal. Runs in a worker process: an answer may take forever to compute.

Both are parsed into forms (``answer_forms``); a table gives the comparator for the first kind that either side has.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import zip_longest
from typing import Any

from prorl_gym.environments.math import answer_text, number_sets, words
from prorl_gym.environments.math.acceptance import is_evaluated_answer, is_solution_set, is_solved_equation, rounds_to
from prorl_gym.environments.math.answer_forms import (
    Ambiguous,
    Amount,
    AnswerCollection,
    Assignment,
    BasedNumeral,
    BracketedTuple,
    CombinationOrPoint,
    Equation,
    Form,
    Inequality,
    IntegerFamily,
    Labelled,
    Matrix,
    OptionChoice,
    Ordering,
    Piecewise,
    Ratio,
    RealSet,
    TimeOfDay,
    WordAnswer,
)
from prorl_gym.environments.math.answer_parser import parse_answer, to_real_set
from prorl_gym.environments.math.answer_text import is_name
from prorl_gym.environments.math.expression_tree import Node, Number, Operation, Symbol
from prorl_gym.environments.math.expressions import UnreadableExpressionError, free_symbols, parse_expression
from prorl_gym.environments.math.number_sets import PARAMETER, find_parameter, is_same_family, with_common_letter
from prorl_gym.environments.math.values import (
    constant_ratio_sign,
    is_defined,
    is_equal_up_to_constant,
    is_equivalent,
    is_equivalent_on,
    real_value,
)
from prorl_gym.environments.math.words import LETTER_GROUPS

_OPTIONS = frozenset("ABCDEFGH")
_QUOTIENT = re.compile(r"\\frac\{([^{}]+)\}\{([^{}]+)\}|([A-Z]{1,2}|[a-z])/([A-Z]{1,2}|[a-z])")
_FUNCTION = re.compile(r"(?P<letter>[a-zA-Z]'*)(?:\^\{?-1\}?)?\((?P<argument>[a-zA-Z])\)")
_WORD = re.compile(r"[A-Za-z](?=[a-z]*[aeiou])[a-z]{2,}")


def grade(body: Mapping[str, Any]) -> dict[str, Any]:
    """Compare an answer with the gold ones; the entry of the worker.

    Args:
        body: ``gold``, ``answer``, ``question``; see ``is_accepted``.

    Returns:
        ``equal`` and ``evaluated``, or only ``unreadable`` with a gold answer that cannot be parsed.
    """
    gold, answer, question = body["gold"], body["answer"], body["question"]
    for each in _gold_answers(gold):
        if not is_readable(each):
            return {"unreadable": each}
    is_evaluated = _is_evaluated(gold, answer, question)
    return {"equal": is_evaluated and _matches_any_gold(gold, answer), "evaluated": is_evaluated}


def is_accepted(gold: str | Sequence[str], answer: str, question: str = "") -> bool:
    r"""Whether an answer is right: equal to a gold one, or right by a rule with a direction (``acceptance``).

    ``\\pi`` and ``3.1416`` are right where the gold answer is ``3.14``, but ``3.14`` is
    not where it is ``\\pi``. A decimal with few digits for its size (``2.5``, ``0.125``) does not look rounded.
    ``x > 2`` is right where the gold answer is ``2x > 4``, but not the other way round. And an answer must be evaluated
    where the gold one is (``is_evaluated_answer``).

    Args:
        gold: the gold answer, or several of which any counts.
        answer: what was boxed.
        question: text of the question; empty if it is not known.
    """
    return _is_evaluated(gold, answer, question) and _matches_any_gold(gold, answer)


def is_readable(gold: str) -> bool:
    """Whether an answer can be read, so that others can be compared with it."""
    text = answer_text.normalize_latex(gold)
    return answer_text.has_content(text) and _parse_or_none(text) is not None


def is_equal(one: str, other: str) -> bool:
    """Whether two answers are the same. Symmetric; nothing equals an empty, meaningless or unreadable answer."""
    first, second = answer_text.normalize_latex(one), answer_text.normalize_latex(other)
    if not answer_text.has_content(first) or not answer_text.has_content(second):
        return False
    left, right = _parse_or_none(first), _parse_or_none(second)
    if left is None or right is None:
        return False
    if answer_text.comparison_key(first) == answer_text.comparison_key(second):
        return not isinstance(left, Amount) or is_defined(left.value)
    return _is_same_form(left, right)


def _gold_answers(gold: str | Sequence[str]) -> Sequence[str]:
    return [gold] if isinstance(gold, str) else gold


def _is_evaluated(gold: str | Sequence[str], answer: str, question: str) -> bool:
    golds = [(each, _parse_or_none(answer_text.normalize_latex(each))) for each in _gold_answers(gold)]
    return is_evaluated_answer(golds, answer, _parse_or_none(answer_text.normalize_latex(answer)), question)


@lru_cache(maxsize=64)
def _parse_or_none(text: str) -> Form | None:
    try:
        return parse_answer(text)
    except (UnreadableExpressionError, ArithmeticError, ValueError, RecursionError):
        return None


def _matches_any_gold(gold: str | Sequence[str], answer: str) -> bool:
    found = _parse_or_none(answer_text.normalize_latex(answer))
    for each in _gold_answers(gold):
        form = _parse_or_none(answer_text.normalize_latex(each))
        if is_equal(each, answer) or rounds_to(form, found) or is_solution_set(found, form):
            return True
    return False


def _is_same_form(left: Form, right: Form) -> bool:
    try:
        return _is_same(_unwrap_singleton(left), _unwrap_singleton(right))
    except (UnreadableExpressionError, ArithmeticError, ValueError, RecursionError):
        return False


def _is_same(left: Form, right: Form) -> bool:
    # The first kind that either has decides, so the order of the two does not matter.
    for kind, compare in _COMPARATORS:
        if isinstance(left, kind):
            return compare(left, right)
        if isinstance(right, kind):
            return compare(right, left)
    return False


def _compare_ambiguous(one: Ambiguous, other: Form) -> bool:
    if isinstance(other, Ambiguous):
        return len(one.readings) == len(other.readings) and all(map(_is_same, one.readings, other.readings))
    return all(_is_same(reading, other) for reading in one.readings)


def _compare_combination(one: CombinationOrPoint, other: Form) -> bool:
    if isinstance(other, CombinationOrPoint):
        return _is_same(one.point, other.point)
    is_point = isinstance(other, BracketedTuple | Matrix | AnswerCollection | Assignment | RealSet)
    return _is_same(one.point if is_point else one.count, other)


def _compare_families(one: IntegerFamily, other: Form) -> bool:
    if not isinstance(other, IntegerFamily):
        letter = find_parameter(other)
        # 2n may be a number in the question: it is not "even", but n = 2k may be "n is even".
        is_class = one.letter == PARAMETER and not (isinstance(one.form, Labelled) and isinstance(other, Labelled))
        if letter is None or is_class:
            return False
        other = IntegerFamily(letter, other, one.domain)
    found = is_same_family(one, other)
    if found is None:
        mine, theirs = with_common_letter(one), with_common_letter(other)
        return one.domain == other.domain and mine is not None and theirs is not None and _is_same(mine, theirs)
    return found


def _compare_options(one: OptionChoice, other: Form) -> bool:
    if isinstance(other, OptionChoice):
        return one.letter == other.letter and _is_same(one.form, other.form)
    if isinstance(other, Amount) and isinstance(other.value, Symbol) and other.value.name in "ABCDE":
        return one.letter == other.value.name
    return _is_same(one.form, other)


def _compare_labelled(one: Labelled, other: Form) -> bool:
    if isinstance(other, Labelled):
        if _names_match(one.name, other.name):
            return _is_same(one.form, other.form)
        return (
            _is_same_ratio(one, other)
            or _is_same_curve(one.difference, other.difference)
            or _is_solved_form(one, other)
        )
    if isinstance(other, Equation):
        return not other.is_negated and (
            _is_same_curve(one.difference, other.difference) or _is_solved_form(one, other)
        )
    if isinstance(other, Assignment):
        return False
    return not one.normal and _is_same(one.form, other)


def _names_match(one: str, other: str) -> bool:
    """Whether two names may name the same thing. A word (``Area``) may name whatever a letter does."""
    if one == other:
        return True
    words = [_WORD.search(re.sub(r"\\[a-zA-Z]+", "", name)) is not None for name in (one, other)]
    if any(words):
        return not all(words) or one.casefold() == other.casefold()
    for function, name in ((one, other), (other, one)):
        match = _FUNCTION.fullmatch(function)
        if match is not None and "'" not in function and is_name(name):
            return name == "y" and match["argument"] != "y"  # f(x) = and y = begin the same answer
    try:
        mine, theirs = (parse_expression(name.replace(":", "/")) for name in (one, other))
        return not is_name(one) and not is_name(other) and is_equivalent(mine, theirs)
    except (UnreadableExpressionError, ArithmeticError, ValueError, RecursionError):
        return False


def _is_same_ratio(one: Labelled, other: Labelled) -> bool:
    r"""Whether ``AB:BC = 1:2``, ``BC:AB = 2:1`` and ``\\frac{AB}{BC} = \\frac12`` name the same ratio."""
    first, second = _named_ratio(one), _named_ratio(other)
    if first is None or second is None:
        return False
    (mine, ratio), (theirs, parts) = first, second
    if sorted(mine) != sorted(theirs) or len(set(mine)) != len(ratio.parts) or len(mine) != len(parts.parts):
        return False
    return _compare_ratios(ratio, Ratio(tuple(parts.parts[theirs.index(name)] for name in mine)))


def _named_ratio(one: Labelled) -> tuple[list[str], Ratio] | None:
    r"""Return the names and the proportion of ``AB:CD = 2:3``, also where it is written as a fraction."""
    match = _QUOTIENT.fullmatch(one.name)
    names = one.name.split(":") if match is None else [name for name in match.groups() if name is not None]
    match one.form:
        case Ratio():
            return names, one.form
        case Amount(value, None, False) if len(names) == 2 and not free_symbols(value):
            return names, Ratio((value, Number(Fraction(1))))
        case _:
            return None


def _compare_ratios(one: Ratio, other: Form) -> bool:
    if isinstance(other, Ratio):
        mine, theirs = one.parts, other.parts
        if len(mine) != len(theirs):
            return False
        return all(
            is_equivalent(Operation("*", (a, theirs[0])), Operation("*", (b, mine[0])))
            for a, b in zip_longest(mine[1:], theirs[1:])
        )
    if isinstance(other, Amount) and len(one.parts) == 2 and other.unit is None:
        return is_equivalent(Operation("/", one.parts), other.value)
    return False


def _is_same_curve(one: Node | None, other: Node | None) -> bool:
    return one is not None and other is not None and constant_ratio_sign(one, other) is not None


def _is_solved_form(one: Labelled, other: Labelled | Equation) -> bool:
    """Whether one equation is the other, solved for a variable."""
    for answer, equation in ((one, other), (other, one)):
        if isinstance(answer, Labelled) and is_name(answer.name) and isinstance(answer.form, Amount):
            if free_symbols(answer.form.value) and is_solved_equation(
                answer.name, answer.form.value, equation.difference
            ):
                return True
    return False


def _compare_assignments(one: Assignment, other: Form) -> bool:
    """Compare values with names: by name, or in their order where only one side has names."""
    if isinstance(other, Assignment):
        theirs = dict(zip(other.names, other.values, strict=True))
        return set(one.names) == set(theirs) and all(
            _is_same(value, theirs[name]) for name, value in zip(one.names, one.values, strict=True)
        )
    if isinstance(other, BracketedTuple):
        order = range(len(one.names)) if one.is_tuple else sorted(range(len(one.names)), key=one.names.__getitem__)
        has_order = any(set(one.names) <= group for group in LETTER_GROUPS)
        if one.is_tuple and has_order and sorted(one.names) != list(one.names):
            return False  # (y, x) = (1, 2) is not the point (1, 2)
        brackets = len(other.items) > 2 or (other.opening, other.closing) == ("(", ")")
        return (
            brackets
            and len(other.items) == len(order)
            and all(map(_is_same, (one.values[at] for at in order), other.items))
        )
    if isinstance(other, AnswerCollection):
        return len({name.partition("_")[0] for name in one.names}) == 1 and _is_same(
            AnswerCollection(one.values, False), other
        )
    return False


def _compare_collections(one: AnswerCollection, other: Form) -> bool:
    if isinstance(other, AnswerCollection):
        return _has_same_items(one, other)
    if isinstance(other, RealSet):
        found = to_real_set(AnswerCollection(one.items, True))
        return found is not None and number_sets.is_same_set(found, other)
    if isinstance(other, WordAnswer):
        return not one.is_set and _joined_letters(one) == other.text.upper()
    return isinstance(other, BracketedTuple) and _is_unbracketed(one, other)


def _has_same_items(one: AnswerCollection, other: AnswerCollection) -> bool:
    labels = [{item.name for item in each.items if isinstance(item, Labelled)} for each in (one, other)]
    if all(len(each) == 1 for each in labels) and not _names_match(*(name for each in labels for name in each)):
        return False
    mine, theirs = (_without_labels(each.items) for each in (one, other))
    if mine is None and theirs is None:
        mine, theirs = one.items, other.items
    if mine is None or theirs is None:
        return False  # one side does not say which value belongs to which name
    if one.is_set or other.is_set:
        return _covers(mine, theirs) and _covers(theirs, mine)
    rest = list(theirs)
    for item in mine:
        match = next((at for at, candidate in enumerate(rest) if _is_same(item, candidate)), None)
        if match is None:
            return False
        del rest[match]
    return not rest


def _without_labels(items: Sequence[Form]) -> tuple[Form, ...] | None:
    """Return the values of one variable (``x = 1``, ``x = 2``) without labels; ``None`` when they name several."""
    names = {item.name for item in items if isinstance(item, Labelled)}
    if len(names) > 1:
        return None
    return tuple(item.form if isinstance(item, Labelled) else item for item in items)


def _covers(items: Sequence[Form], others: Sequence[Form]) -> bool:
    return all(any(_is_same(item, other) for other in others) for item in items)


def _joined_letters(one: AnswerCollection) -> str | None:
    """Return ``A, C, D`` as ``ACD``, as options of a question are named; two letters could be a segment."""
    letters = [item.value for item in one.items if isinstance(item, Amount) and item == Amount(item.value)]
    options = [letter.name for letter in letters if isinstance(letter, Symbol) and letter.name in _OPTIONS]
    return "".join(options) if len(set(options)) == len(options) == len(one.items) > 2 else None


def _is_unbracketed(one: AnswerCollection, other: BracketedTuple) -> bool:
    """Whether a point of three or more coordinates lacks its brackets; two could be the ends of an interval."""
    return not one.is_set and len(one.items) == len(other.items) > 2 and all(map(_is_same, one.items, other.items))


def _compare_tuples(one: BracketedTuple, other: Form) -> bool:
    if isinstance(other, BracketedTuple):
        brackets = len(one.items) > 2 or (one.opening, one.closing) == (other.opening, other.closing)
        return brackets and len(one.items) == len(other.items) and all(map(_is_same, one.items, other.items))
    if isinstance(other, RealSet):
        found = to_real_set(one)
        return found is not None and number_sets.is_same_set(found, other)
    return isinstance(other, Matrix) and _is_same_matrix(_to_matrix(one), other)


def _is_same_matrix(one: Matrix | None, other: Matrix) -> bool:
    if one is None or [len(row) for row in one.rows] != [len(row) for row in other.rows]:
        return False
    return all(
        is_equivalent(*cells) for rows in zip(one.rows, other.rows, strict=True) for cells in zip(*rows, strict=True)
    )


def _to_matrix(row: BracketedTuple) -> Matrix | None:
    """Return ``[[1, 2], [3, 4]]`` or a vector as a matrix."""
    if all(isinstance(item, BracketedTuple) for item in row.items):
        rows = [item.items for item in row.items if isinstance(item, BracketedTuple)]
    else:
        rows = [(item,) for item in row.items]
    cells = tuple(tuple(cell.value for cell in cells if isinstance(cell, Amount)) for cells in rows)
    return Matrix(cells) if [len(line) for line in cells] == [len(line) for line in rows] else None


def _compare_matrices(one: Matrix, other: Form) -> bool:
    return isinstance(other, Matrix) and _is_same_matrix(one, other)


def _compare_piecewise(one: Piecewise, other: Form) -> bool:
    if isinstance(other, Amount) and other.unit is None and free_symbols(other.value) <= {one.name}:
        other = Piecewise(one.name, ((other.value, number_sets.ALL_REALS),))
    return isinstance(other, Piecewise) and one.name == other.name and _cases_match(one.cases, other.cases)


def _cases_match(one: Sequence[tuple[Node, RealSet]], other: Sequence[tuple[Node, RealSet]]) -> bool:
    """Whether two functions by cases have the same domain, and the same formula on each common part of it."""
    domains = [number_sets.EMPTY_SET, number_sets.EMPTY_SET]
    for at, cases in enumerate((one, other)):
        for _, where in cases:
            domains[at] = number_sets.union(domains[at], where)
    if not number_sets.is_same_set(*domains):
        return False
    return all(
        is_equivalent_on(left, right, number_sets.intersection(here, there))
        for left, here in one
        for right, there in other
    )


def _compare_real_sets(one: RealSet, other: Form) -> bool:
    if isinstance(other, Amount) and other.unit is None and not free_symbols(other.value):
        return len(one.intervals) == 1 and number_sets.is_same_set(one, number_sets.point_set([other.value]))
    return isinstance(other, RealSet) and number_sets.is_same_set(one, other)


def _compare_times(one: TimeOfDay, other: Form) -> bool:
    if isinstance(other, TimeOfDay):
        return _times_match(one, other)
    if isinstance(other, Ratio) and _may_be_ratio(one):
        return _compare_ratios(Ratio((Number(Fraction(one.hour)), Number(Fraction(one.minute)))), other)
    return False


def _times_match(one: TimeOfDay, other: TimeOfDay) -> bool:
    """Whether two times are the same; one without half of the day may be in either."""
    hours = (one.hour - other.hour) % 24
    undecided = (
        one.has_meridiem != other.has_meridiem
        and max(one.hour * (not one.has_meridiem), other.hour * (not other.has_meridiem)) <= 12
    )
    return (hours == 0 or (undecided and hours == 12)) and (one.minute, one.second) == (other.minute, other.second)


def _may_be_ratio(clock: TimeOfDay) -> bool:
    """Whether ``3:10`` may also be a ratio, which is written in lowest terms."""
    return not clock.has_meridiem and math.gcd(clock.hour, clock.minute, clock.second) == 1 and clock.minute >= 10


def _compare_numerals(one: BasedNumeral, other: Form) -> bool:
    return one == other


def _compare_equations(one: Equation, other: Form) -> bool:
    if not isinstance(other, Equation) or one.is_negated != other.is_negated:
        return False
    return _is_same_curve(one.difference, other.difference)


def _compare_inequalities(one: Inequality, other: Form) -> bool:
    return (
        isinstance(other, Inequality)
        and one.strict == other.strict
        and constant_ratio_sign(one.difference, other.difference) == 1
    )


def _compare_orderings(one: Ordering, other: Form) -> bool:
    return (
        isinstance(other, Ordering) and one.strict == other.strict and all(map(is_equivalent, one.sides, other.sides))
    )


def _compare_words(one: WordAnswer, other: Form) -> bool:
    if not isinstance(other, WordAnswer):
        return False
    if one.text == other.text:
        return True
    mine, theirs = words.split_word_list(one.text), words.split_word_list(other.text)
    unordered = " and " in one.text + other.text or (mine is not None and len(mine) == 2)
    return mine is not None and theirs is not None and unordered and sorted(mine) == sorted(theirs)


def _compare_amounts(one: Amount, other: Form) -> bool:
    if not isinstance(other, Amount):
        return False
    mine, theirs = one.unit, other.unit
    if one.percent or other.percent:
        return _is_same_percent(one, other)
    if mine is not None and theirs is not None and (mine.dimension or theirs.dimension):
        if mine.dimension == theirs.dimension:
            return is_equivalent(_scale(one.value, mine.factor), _scale(other.value, theirs.factor))
        if {mine.noun, theirs.noun} & {"units", "unit", "total"}:
            return is_equivalent(one.value, other.value)
        return _is_same_angle(one, other)
    return (
        is_equivalent(one.value, other.value)
        or is_equal_up_to_constant(one.value, other.value)
        or _is_same_angle(one, other)
    )


def _is_same_percent(one: Amount, other: Amount) -> bool:
    """Compare with a percent sign on one side only: ``50%`` equals ``0.5``, and ``50`` if the answer is in percent.

    A number up to one is read as a share: ``0.5`` is not ``0.5%``.
    """
    if any(amount.unit is not None for amount in (one, other)):
        return False
    if one.percent and other.percent:
        return is_equivalent(one.value, other.value)
    percent, bare = (one, other) if one.percent else (other, one)
    if is_equivalent(_scale(percent.value, Fraction(1, 100)), bare.value):
        return True
    size = real_value(bare.value)
    return size is not None and abs(size) > 1 and is_equivalent(percent.value, bare.value)


def _scale(value: Node, factor: Fraction) -> Node:
    return value if factor == 1 else Operation("*", (value, Number(factor)))


def _is_same_angle(one: Amount, other: Amount) -> bool:
    """Whether degrees on one side are the radians on the other, which need not be marked."""
    for degrees, radians in ((one, other), (other, one)):
        if degrees.unit is not None and degrees.unit.dimension == (("angle", 1),):
            if radians.unit is None or radians.unit.dimension == (("radian", 1),):
                return is_equivalent(Operation("degrees", (degrees.value,)), radians.value)
    return False


def _unwrap_singleton(form: Form) -> Form:
    """Return the member of a set of one, which is an answer like its member; inside another set it is not."""
    if (
        not isinstance(form, AnswerCollection)
        or not form.is_set
        or isinstance(form.items[0], AnswerCollection | RealSet)
    ):
        return form
    return form.items[0] if all(_is_same(item, form.items[0]) for item in form.items[1:]) else form


_COMPARATORS: tuple[tuple[type[Any], Callable[[Any, Form], bool]], ...] = (
    (Ambiguous, _compare_ambiguous),
    (CombinationOrPoint, _compare_combination),
    (IntegerFamily, _compare_families),
    (OptionChoice, _compare_options),
    (Labelled, _compare_labelled),
    (Assignment, _compare_assignments),
    (AnswerCollection, _compare_collections),
    (BracketedTuple, _compare_tuples),
    (Matrix, _compare_matrices),
    (Piecewise, _compare_piecewise),
    (RealSet, _compare_real_sets),
    (TimeOfDay, _compare_times),
    (Ratio, _compare_ratios),
    (BasedNumeral, _compare_numerals),
    (Equation, _compare_equations),
    (Inequality, _compare_inequalities),
    (Ordering, _compare_orderings),
    (WordAnswer, _compare_words),
    (Amount, _compare_amounts),
)
