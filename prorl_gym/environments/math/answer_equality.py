"""Decides whether two mathematical answers are equal. Runs in a worker process: an answer may take forever to compute.

Both are parsed into forms (``answer_forms``), and ``_is_same`` says for each pair of kinds when they are equal.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from fractions import Fraction
from functools import lru_cache, reduce
from typing import Any, cast, get_args

from prorl_gym.environments.math import answer_text, number_sets, words
from prorl_gym.environments.math.amounts import has_invented_unit, is_same_amount, rounds_to
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
from prorl_gym.environments.math.expressions import (
    OPERATORS,
    MathVerifyNode,
    Node,
    Number,
    Operation,
    Symbol,
    UnreadableExpressionError,
    free_symbols,
    parse_expression,
    substitute,
)
from prorl_gym.environments.math.values import (
    constant_ratio_sign,
    is_defined,
    is_equivalent,
    is_equivalent_on,
    is_solved_equation,
)
from prorl_gym.environments.math.words import LETTER_GROUPS

_OPTIONS = frozenset("ABCDEFGH")
_QUOTIENT = re.compile(r"\\frac\{([^{}]+)\}\{([^{}]+)\}|([A-Z]{1,2}|[a-z])/([A-Z]{1,2}|[a-z])")
_FUNCTION = re.compile(r"(?P<letter>[a-zA-Z]'*)(?:\^\{?-1\}?)?\((?P<argument>[a-zA-Z])\)")
_WORD = re.compile(r"[A-Za-z](?=[a-z]*[aeiou])[a-z]{2,}")
_FORMULA = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_COMPUTATION = re.compile(
    r"[+*!^]|(?<=.)-|\\(?:times|cdot|div|binom|sqrt|log|ln|sin|cos|tan|choose|pm)(?![a-zA-Z])|[CP]\("
)
_UNSOLVED_CONDITION = re.compile(r"\||-[a-df-hj-zA-Z]")
"""Signs of a condition on a variable that is to be solved: ``|x| < 2``, ``-x > 1``."""
_PRINTED_CONSTANTS = [
    (name, *(re.compile(rf"(?<![\\a-zA-Z_]){letter}(?![a-zA-Z_'(=]| =)") for letter in (name, printed)))
    for name, printed in (("i", "I"), ("i", "j"), ("e", "E"))
]
"""The imaginary unit and Euler's number, how answers spell them, and how sympy and engineers do."""
_SUM = re.compile(r"[^-+({,= ] ?[-+]")
_BASE = re.compile(r"\bbase[- ]*\$?\{?(\d+)")
_KINDS = get_args(Form)
_UNREADABLE = (UnreadableExpressionError, ArithmeticError, ValueError, RecursionError)


def grade(body: Mapping[str, Any]) -> dict[str, Any]:
    """Compare an answer with the gold ones; the entry of the worker.

    ``body`` has a list ``gold``, ``answer`` and ``question``, as ``is_accepted``. Returns ``equal`` and ``evaluated``,
    or only ``unreadable`` with a gold answer that cannot be parsed.
    """
    golds, answer, question = body["gold"], body["answer"], body["question"]
    for gold in golds:
        text = answer_text.normalize_latex(gold)
        if not answer_text.has_content(text) or _parse_or_none(text) is None:
            return {"unreadable": gold}
    is_evaluated = _is_evaluated(golds, answer, question)
    return {"equal": is_evaluated and _matches_any_gold(golds, answer, question), "evaluated": is_evaluated}


def is_accepted(gold: str | Sequence[str], answer: str, question: str = "") -> bool:
    r"""Whether an answer is right: equal to a gold one (any of several), or right by a rule with a direction.

    An answer that repeats the question is refused (``\\gcd(12, 18)`` equals 6, but was not computed). A closer value
    than a rounded gold decimal is accepted: ``\\pi`` and ``3.1416`` for ``3.14``, but not ``3.14`` for ``\\pi``. So is
    the solution of a gold answer that is unsolved: ``x > -4`` for ``-2x < 8``. ``question`` may be empty.
    """
    golds = [gold] if isinstance(gold, str) else gold
    return _is_evaluated(golds, answer, question) and _matches_any_gold(golds, answer, question)


def is_equal(one: str, other: str) -> bool:
    """Whether two answers are the same. Symmetric; nothing equals an empty, meaningless or unreadable answer."""
    first, second = answer_text.normalize_latex(one), answer_text.normalize_latex(other)
    first, second = _with_constants(second, first), _with_constants(first, second)
    if not answer_text.has_content(first) or not answer_text.has_content(second):
        return False
    left, right = _parse_or_none(first), _parse_or_none(second)
    if left is None or right is None:
        return False
    if answer_text.comparison_key(first) == answer_text.comparison_key(second):
        return not isinstance(left, Amount) or is_defined(left.value)
    try:
        return _is_same(_unwrap_singleton(left), _unwrap_singleton(right))
    except _UNREADABLE:
        return False


def _is_evaluated(golds: Sequence[str], answer: str, question: str) -> bool:
    r"""Whether an answer was worked out and does not repeat the question.

    It does not when its value still holds an operator (``\sum``, ``\int``, ``\gcd`` ...) and no gold answer holds
    one, or when it is, sign for sign, a formula of the question that leaves something to compute, and no gold answer
    is. The left side of an equation is not part of the value.
    """
    found = _read(answer)
    if any(_find_operators(found)) and not any(any(_find_operators(_read(gold))) for gold in golds):
        return False
    match found:
        case Amount() | CombinationOrPoint():
            leaves = _COMPUTATION
        case Labelled(_, RealSet()):
            leaves = _UNSOLVED_CONDITION
        case _:
            return True
    key = _comparison_key(answer)
    if leaves.search(key) is None or any(_comparison_key(gold) == key for gold in golds):
        return True
    return not any(key == _comparison_key(next(filter(None, groups))) for groups in _FORMULA.findall(question))


def _matches_any_gold(golds: Sequence[str], answer: str, question: str) -> bool:
    found = _read(answer)
    for gold in golds:
        form = _read(gold)
        if has_invented_unit(found, gold, question):
            continue
        if is_equal(gold, answer) or rounds_to(form, found) or number_sets.is_solution_set(found, form):
            return True
        if number_sets.is_remainder(found, form, question) or _is_numeral_in_asked_base(form, answer, question):
            return True
    return False


def _is_numeral_in_asked_base(gold: Form | None, answer: str, question: str) -> bool:
    """Whether an answer has the digits of a numeral whose base the question names, and no other base."""
    if not isinstance(gold, BasedNumeral) or set(_BASE.findall(question)) != {str(gold.base)}:
        return False
    return _read(f"{answer.strip('$ ')}_{{{gold.base}}}") == gold


def _with_constants(one: str, other: str) -> str:
    """Return the second text with ``i`` and ``e`` for its ``I``, ``j`` and ``E``, where only the first has these."""
    if len(other) == 1:
        return other  # a letter of its own, not a value
    for name, spelled, printed in _PRINTED_CONSTANTS:
        is_unit = "j" not in printed.pattern or (_SUM.search(other) is not None and "k" not in other)  # no vector 3j
        if is_unit and spelled.search(one) is not None and spelled.search(other) is None:
            other = printed.sub(name, other)
    return other


def _read(answer: str) -> Form | None:
    return _parse_or_none(answer_text.normalize_latex(answer))


@lru_cache(maxsize=64)
def _parse_or_none(text: str) -> Form | None:
    try:
        return parse_answer(text)
    except _UNREADABLE:
        return None


def _unwrap_singleton(form: Form) -> Form:
    """Return the member of a set of one, which is an answer like its member; inside another set it is not."""
    match form:
        case AnswerCollection((first, *others), True) if not isinstance(first, AnswerCollection | RealSet):
            return first if all(_is_same(item, first) for item in others) else form
        case _:
            return form


def _is_same(left: Form, right: Form) -> bool:
    """Compare two forms, by the first case that has their kinds. Symmetric, since ``_KINDS`` orders them."""
    first, second = sorted((left, right), key=lambda form: _KINDS.index(type(form)))
    match first, second:
        case Ambiguous() as one, Ambiguous() as other:
            return _are_all_same(one.readings, other.readings)
        case Ambiguous() as one, other:
            return all(_is_same(reading, other) for reading in one.readings)
        case CombinationOrPoint() as one, CombinationOrPoint() as other:
            return _is_same(one.point, other.point)
        case CombinationOrPoint() as one, BracketedTuple() | Matrix() | AnswerCollection() | Assignment() | RealSet():
            return _is_same(one.point, second)
        case CombinationOrPoint() as one, other:
            return _is_same(one.count, other)
        case IntegerFamily() as one, other:
            return _is_same_family(one, other)
        case OptionChoice() as one, OptionChoice() as other:
            return one.letter == other.letter and _is_same(one.form, other.form)
        case OptionChoice() as one, Amount(Symbol(name)) if name in "ABCDE":
            return one.letter == name
        case OptionChoice() as one, other:
            return _is_same(one.form, other)
        case Labelled() as one, Labelled() as other if (renamed := _with_argument_of(one, other)) is not None:
            return _is_same(one.form, renamed)
        case Labelled() as one, Labelled() as other if _names_match(one.name, other.name):
            return _is_same(one.form, other.form)
        case Labelled() as one, Labelled() as other:
            if _is_same_named_ratio(one, other) or _is_same_curve(one.difference, other.difference):
                return True
            return _is_solved_form(one, other)
        case Labelled() as one, Equation() as other:
            if other.is_negated:
                return False
            return _is_same_curve(one.difference, other.difference) or _is_solved_form(one, other)
        case Labelled(), Assignment():
            return False
        case Labelled() as one, other:
            return not one.normal and _is_same(one.form, other)
        case Assignment() as one, Assignment() as other:
            mine, theirs = (dict(zip(each.names, each.values, strict=True)) for each in (one, other))
            return mine.keys() == theirs.keys() and all(_is_same(mine[name], theirs[name]) for name in mine)
        case Assignment() as one, BracketedTuple() as other:
            return _is_unnamed(one, other)
        case Assignment() as one, AnswerCollection() as other:
            if one.is_tuple and not other.is_set and len(other.items) > 2:
                return _is_unnamed(one, BracketedTuple(other.items, "(", ")"))
            letters = {name.partition("_")[0] for name in one.names}
            return len(letters) == 1 and _is_same(AnswerCollection(one.values, False), other)
        case AnswerCollection() as one, AnswerCollection() as other:
            return _has_same_items(one, other)
        case AnswerCollection() as one, BracketedTuple() as other:
            # A point without its brackets; two coordinates could be the ends of an interval.
            return not one.is_set and len(one.items) > 2 and _are_all_same(one.items, other.items)
        case AnswerCollection() as one, RealSet() as other:
            found = to_real_set(AnswerCollection(one.items, True))
            return found is not None and number_sets.is_same_set(found, other)
        case AnswerCollection() as one, WordAnswer() as other:
            return not one.is_set and _joined_letters(one) == other.text.upper()
        case BracketedTuple() as one, BracketedTuple() as other:
            has_same_brackets = len(one.items) > 2 or (one.opening, one.closing) == (other.opening, other.closing)
            return has_same_brackets and _are_all_same(one.items, other.items)
        case BracketedTuple() as one, Matrix() as other:
            return _is_same_matrix(_to_matrix(one), other)
        case BracketedTuple() as one, RealSet() as other:
            found = to_real_set(one)
            return found is not None and number_sets.is_same_set(found, other)
        case Matrix() as one, Matrix() as other:
            return _is_same_matrix(one, other)
        case Piecewise() as one, Piecewise() as other:
            return one.name == other.name and _is_same_function(one.cases, other.cases)
        case Piecewise() as one, Amount(formula, None) if free_symbols(formula) <= {one.name}:
            return _is_same_function(one.cases, [(formula, number_sets.ALL_REALS)])
        case RealSet() as one, RealSet() as other:
            return number_sets.is_same_set(one, other)
        case RealSet() as one, Amount(number, None) if not free_symbols(number):
            return len(one.intervals) == 1 and number_sets.is_same_set(one, number_sets.point_set([number]))
        case TimeOfDay() as one, TimeOfDay() as other:
            return _is_same_time(one, other)
        case TimeOfDay() as one, Ratio() as other:
            # 3:10 may also be a ratio, which is written in lowest terms.
            is_reduced = math.gcd(one.hour, one.minute, one.second) == 1 and one.minute >= 10
            parts = Number(Fraction(one.hour)), Number(Fraction(one.minute))
            return not one.has_meridiem and is_reduced and _is_same_ratio(parts, other.parts)
        case Ratio() as one, Ratio() as other:
            return _is_same_ratio(one.parts, other.parts)
        case Ratio((_, _)) as one, Amount(quotient, None):
            return is_equivalent(Operation("/", one.parts), quotient)
        case BasedNumeral() as one, BasedNumeral() as other:
            return one == other
        case Equation() as one, Equation() as other:
            return one.is_negated == other.is_negated and _is_same_curve(one.difference, other.difference)
        case Inequality() as one, Inequality() as other:
            return one.strict == other.strict and constant_ratio_sign(one.difference, other.difference) == 1
        case Ordering() as one, Ordering() as other:
            return one.strict == other.strict and all(map(is_equivalent, one.sides, other.sides))
        case WordAnswer() as one, WordAnswer() as other:
            mine, theirs = words.split_word_list(one.text), words.split_word_list(other.text)
            if one == other or mine is None or theirs is None:
                return one == other
            is_unordered = " and " in one.text + other.text or len(mine) == 2
            return is_unordered and sorted(mine) == sorted(theirs)
        case Amount() as one, Amount() as other:
            return is_same_amount(one, other)
        case _:
            return False


def _are_all_same(items: Sequence[Form], others: Sequence[Form]) -> bool:
    return len(items) == len(others) and all(map(_is_same, items, others))


def _is_same_family(one: IntegerFamily, other: Form) -> bool:
    if not isinstance(other, IntegerFamily):
        letter = number_sets.find_parameter(other)
        # 2n may be a number in the question: it is not "even", but n = 2k may be "n is even".
        has_names = bool(number_sets.names_of(one.form) and number_sets.names_of(other))
        is_class = one.letter == number_sets.PARAMETER and not has_names
        if letter is None or is_class:
            return False
        other = IntegerFamily(letter, other, one.domain)
    found = number_sets.is_same_family(one, other)
    if found is None:
        mine, theirs = (number_sets.with_common_letter(family.form, family.letter) for family in (one, other))
        return one.domain == other.domain and mine is not None and theirs is not None and _is_same(mine, theirs)
    return found


def _names_match(one: str, other: str) -> bool:
    """Whether two names may name the same thing. A word (``Area``) may name whatever a letter does."""
    if "\\triangle" in one + other:  # S is the area S_{\triangle ABC}
        bare = [re.sub(r"_\{?\\triangle[^}]*\}?", "", name) for name in (one, other)]
        one, other = bare if "_" not in one or "_" not in other else (one, other)
    if ("\\overrightarrow" in one) != ("\\overrightarrow" in other):
        one, other = (name.replace("\\overrightarrow", "") for name in (one, other))
    if one == other:
        return True
    words = [_WORD.search(re.sub(r"\\[a-zA-Z]+", "", name)) is not None for name in (one, other)]
    if any(words):
        return not all(words) or one.casefold() == other.casefold()
    if one.count("'") == other.count("'"):
        one, other = one.replace("'", ""), other.replace("'", "")
    for function, name in ((one, other), (other, one)):
        match = _FUNCTION.fullmatch(function)
        if match is not None and "'" not in function and is_name(name):
            # f(x) = and y = begin the same answer, and so does f =
            return name != match["argument"] and (name == "y" or function.startswith(f"{name}("))
    try:
        mine, theirs = (parse_expression(name.replace(":", "/")) for name in (one, other))
        return not is_name(one) and not is_name(other) and is_equivalent(mine, theirs)
    except _UNREADABLE:
        return False


def _with_argument_of(one: Labelled, other: Labelled) -> Amount | None:
    """Return the formula of ``f(t) = 2t`` in the variable of ``f(x) = 2x``; ``None`` where that is no other one."""
    mine, theirs = _FUNCTION.fullmatch(one.name), _FUNCTION.fullmatch(other.name)
    if mine is None or theirs is None or not isinstance(other.form, Amount):
        return None
    to, start = mine["argument"], theirs["argument"]
    letters = free_symbols(formula := other.form.value)
    if one.name != other.name.replace(f"({start})", f"({to})") or start not in letters or to in letters:
        return None
    return replace(other.form, value=substitute(formula, start, Symbol(to)))


def _is_same_named_ratio(one: Labelled, other: Labelled) -> bool:
    r"""Whether ``AB:BC = 1:2``, ``BC:AB = 2:1`` and ``\\frac{AB}{BC} = \\frac12`` name the same ratio."""
    (mine, parts), (theirs, others) = _named_ratio(one), _named_ratio(other)
    if not parts or sorted(mine) != sorted(theirs) or len(set(mine)) != len(parts) or len(mine) != len(others):
        return False
    return _is_same_ratio(parts, [others[theirs.index(name)] for name in mine])


def _named_ratio(one: Labelled) -> tuple[list[str], Sequence[Node]]:
    r"""Return the names and the parts of ``AB:CD = 2:3``, also where it is written as a fraction; otherwise nothing."""
    match = _QUOTIENT.fullmatch(one.name)
    names = one.name.split(":") if match is None else [name for name in match.groups() if name is not None]
    match one.form:
        case Ratio(parts):
            return names, parts
        case Amount(value, None, False) if len(names) == 2 and not free_symbols(value):
            return names, (value, Number(Fraction(1)))
        case _:
            return [], ()


def _is_same_ratio(parts: Sequence[Node], others: Sequence[Node]) -> bool:
    return len(parts) == len(others) and all(
        is_equivalent(Operation("*", (part, others[0])), Operation("*", (other, parts[0])))
        for part, other in zip(parts[1:], others[1:], strict=True)
    )


def _is_same_curve(one: Node | None, other: Node | None) -> bool:
    return one is not None and other is not None and constant_ratio_sign(one, other) is not None


def _is_solved_form(one: Labelled, other: Labelled | Equation) -> bool:
    """Whether one equation is the other, solved for a variable."""
    for answer, equation in ((one, other), (other, one)):
        if isinstance(answer, Labelled) and is_name(answer.name) and isinstance(answer.form, Amount):
            solution = answer.form.value
            if free_symbols(solution) and is_solved_equation(answer.name, solution, equation.difference):
                return True
    return False


def _is_unnamed(one: Assignment, other: BracketedTuple) -> bool:
    """Whether a tuple has the values of several names in their order."""
    order = range(len(one.names)) if one.is_tuple else sorted(range(len(one.names)), key=one.names.__getitem__)
    has_order = any(set(one.names) <= group for group in LETTER_GROUPS)
    if one.is_tuple and has_order and sorted(one.names) != list(one.names):
        return False  # (y, x) = (1, 2) is not the point (1, 2)
    brackets = len(other.items) > 2 or (other.opening, other.closing) == ("(", ")")
    return brackets and _are_all_same([one.values[at] for at in order], other.items)


def _has_same_items(one: AnswerCollection, other: AnswerCollection) -> bool:
    labels = [{item.name for item in each.items if isinstance(item, Labelled)} for each in (one, other)]
    if all(len(each) == 1 for each in labels) and not _names_match(*(name for each in labels for name in each)):
        return False
    mine, theirs = (_without_labels(each.items) for each in (one, other))
    if (mine is None and theirs is None) or any(isinstance(item, Equation) for item in (*one.items, *other.items)):
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
    names = {re.sub(r"\([a-zA-Z]\)$", "", item.name) for item in items if isinstance(item, Labelled)}
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


def _is_same_function(one: Sequence[tuple[Node, RealSet]], other: Sequence[tuple[Node, RealSet]]) -> bool:
    """Whether two functions by cases have the same domain, and the same formula on each common part of it."""
    domains = [reduce(number_sets.union, (where for _, where in cases)) for cases in (one, other)]
    if not number_sets.is_same_set(*domains):
        return False
    return all(
        is_equivalent_on(left, right, number_sets.intersection(here, there))
        for left, here in one
        for right, there in other
    )


def _is_same_time(one: TimeOfDay, other: TimeOfDay) -> bool:
    """Whether two times are the same. One without ``a.m.`` or ``p.m.`` may be in either half of the day."""
    hours = (one.hour - other.hour) % 24
    undecided = (
        one.has_meridiem != other.has_meridiem
        and max(one.hour * (not one.has_meridiem), other.hour * (not other.has_meridiem)) <= 12
    )
    return (hours == 0 or (undecided and hours == 12)) and (one.minute, one.second) == (other.minute, other.second)


def _find_operators(form: Form | None) -> Iterator[str]:
    left: list[object] = [form]  # no recursion: a tower of powers is deeper than the stack
    while left:
        part = left.pop()
        match part:
            case MathVerifyNode(text):
                yield text
            case Operation(operation) if operation in OPERATORS:
                yield operation
            case Labelled(_, inner):
                left.append(inner)  # its name is not part of the value
            case tuple():
                left.extend(cast(tuple[object, ...], part))
            case _ if is_dataclass(part):
                left.extend(getattr(part, field.name) for field in fields(part))
            case _:
                pass


def _comparison_key(text: str) -> str:
    return answer_text.comparison_key(answer_text.normalize_latex(text))
