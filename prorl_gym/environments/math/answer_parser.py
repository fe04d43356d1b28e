"""Parses the text of an answer into a form (``answer_forms``): the first of ``_READERS`` that knows it decides."""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial, reduce
from itertools import pairwise, product

from prorl_gym.environments.answers.number_words import number_from_words
from prorl_gym.environments.math import answer_text, number_sets, words
from prorl_gym.environments.math.amounts import parse_amount
from prorl_gym.environments.math.answer_forms import (
    Ambiguous,
    Amount,
    AnswerCollection,
    Assignment,
    BasedNumeral,
    BracketedTuple,
    CombinationOrPoint,
    Form,
    Inequality,
    IntegerFamily,
    Labelled,
    OptionChoice,
    Ratio,
    RealSet,
    TimeOfDay,
    WordAnswer,
)
from prorl_gym.environments.math.answer_text import split_brackets, split_top_level, strip_text_macros
from prorl_gym.environments.math.expressions import (
    UNIT_VECTORS,
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
from prorl_gym.environments.math.relations import parse_relation, parse_table
from prorl_gym.environments.math.values import is_comparable, is_equivalent, rational_value
from prorl_gym.environments.math.words import strip_prefix

_INTEGER = re.compile(
    r"(?:,|\\text\s*+\{\s*+,?\s*+(?:where|for|with|for\s+(?:any|all|some|every))?\s*+\}|\bwhere\b|\bfor\b|(?<!\s))\s*+"
    r"\(?\s*+(?P<a>[a-zA-Z])\s*+\\in\s*+(?:\\mathbb\s*+\{?(?:Z|(?P<natural>N))\}?|\\text\s*+\{Z\}|Z)\s*+\)?$"
    r"|(?:,|(?<!\s))\s*+(?:\\text\s*+\{)?\s*+,?\s*+(?:where|for|with)\s++(?:any|all|some|every)?\s*+integers?\s*+\}?\s*+(?P<b>[a-zA-Z])$"
    r"|(?:,|(?<!\s))\s*+(?:\\text\s*+\{)?\s*+,?\s*+(?:where|for|with)?\s*+\}?\s*+(?P<c>[a-zA-Z])\s*+(?:\\text\s*+\{)?\s*+"
    r"(?:is\s+)?(?:an|any)\s+integer\s*+\}?$"
)
_ONLY = re.compile(r"(?<!\s)\s*+\bonly\b(?=\s*+\}?$)")
_MAX_TERMS = 60
"""Longest progression that is written out."""
_REVERSED = re.compile(r"([\](\[])([^()\[\]]*),([^()\[\]]*)([\[)\]])")
_CHOICE = re.compile(
    r"(?:\\text\s*+\{\s*+\(?([A-E])\)\s*+\}|\(([A-E])\)|\\text\s*+\{\s*+([A-E])[.:]?\s*+\}|([A-E])[.:)])\s*+(.*)"
)
_EXCLUDED = re.compile(r"[a-zA-Z](?:_\w)?\s*+\\ne(?![a-z])\s*+")
_RELATION = re.compile(r"[=<>]|\\(?:[lgn]e|in|approx|equiv)(?![a-z])")
_SIGNS = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])")
_BASED = re.compile(r"([0-9A-Fa-f.]+)(?:_(?:base)?|(?:in)?base)-?(\w+)")
_BUILT_FAMILY = re.compile(
    r"(?P<form>[^:|]+?)(?:\||:|\\mid(?![a-z]))\s*+(?P<letter>[a-z])\s*+\\in\s*+\\mathbb\s*+\{?Z\}?\s*+"
)
_BUILDER = re.compile(r"(?P<name>[a-zA-Z])\s*+(?:\\in\s*+\\mathbb\s*+\{?R\}?)?\s*+(?:\||:|\\mid)\s*+(?P<condition>.*)")
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
          "eleven": 11, "twelve": 12, "sixteen": 16, "hex": 16, "bin": 2, "oct": 8}  # fmt: skip
_TIME = re.compile(
    r"(\d{1,2})(?:\s*+:\s*+(\d\d))?(?:\s*+:\s*+(\d\d))?\s*+(?:([ap])\s*+\.?\s*+m\s*+\.?|(noon|midnight)|(o'?\s*+clock))?",
    re.IGNORECASE,
)


def parse_answer(answer: str) -> Form:
    """Return the form of a plain answer. Raises ``UnreadableExpressionError``: it has none, or is too large."""
    answer = words.strip_sort(answer)
    text = strip_prefix(answer_text.normalize_formula(_ONLY.sub("", answer)))
    if (family := number_sets.parse_worded_family(answer) or number_sets.parse_worded_family(text)) is not None:
        return family
    said = words.normalize_words(answer)
    if said is not None and (form := _parse_worded_math(said)) is not None:
        return form
    said = words.normalize_words(text)
    if said is not None:
        return _parse_worded_math(said) or WordAnswer(said)
    if (text_without_commas := answer_text.parse_comma_number(text)) is not None:
        text = text_without_commas
    form = _parse_form(text)
    if isinstance(form, Amount) and not isinstance(form.value, MathVerifyNode) and not is_comparable(form.value):
        raise UnreadableExpressionError("too large to be compared")
    return form


def to_real_set(form: Form) -> RealSet | None:
    """Return a form as a set of real numbers when it can be one."""
    match form:
        case RealSet():
            return form
        case Labelled(_, inner, _) if isinstance(inner, RealSet):
            return inner
        case BracketedTuple((Amount(low), Amount(high)), opening, closing) if opening in "([" and closing in ")]":
            return number_sets.interval(low, high, opening == "[", closing == "]")
        case AnswerCollection(items, True) if all(isinstance(item, Amount) for item in items):
            return number_sets.point_set(item.value for item in items if isinstance(item, Amount))
        case _:
            return None


def _parse_worded_math(said: str) -> Form | None:
    """Return the mathematics in words; ``None`` leaves them words."""
    match words.MEANINGS.get(said):
        case "empty":
            return number_sets.EMPTY_SET
        case "reals":
            return number_sets.ALL_REALS
        case "infinite":
            return Amount(number_sets.INFINITY)
        case "undefined":
            return WordAnswer("undefined")
        case _:
            pass
    numeral = number_from_words(said)
    return Amount(parse_expression(numeral)) if numeral is not None else None


def _parse_form(text: str, is_item: bool = False) -> Form:
    if not text:
        raise UnreadableExpressionError("it is empty")
    if text == "\\ldots" and is_item:
        return WordAnswer(text)
    for reader in _READERS:
        form = reader(text)
        if form is not None:
            return form
    return parse_amount(text)


def _parse_family(text: str) -> Form | None:
    match = _INTEGER.search(text)
    if match is None or not match.start():
        return None
    letter = match["a"] or match["b"] or match["c"]
    inner = text[: match.start()].strip().rstrip(",").strip()
    return IntegerFamily(letter, _parse_form(inner), "N" if match["natural"] else "Z")


def _parse_option(text: str) -> Form | None:
    match = _CHOICE.fullmatch(text)
    if match is None:
        return None
    letter = next(group for group in match.groups()[:4] if group)
    rest = match[5].strip()
    if not rest:
        return Amount(Symbol(letter))
    if _CHOICE.fullmatch(rest):
        return None  # two letters
    if (
        rest[0] in "+-*/^=<>_|,!)"
        or rest.startswith(("\\cdot", "\\cup", "\\cap", "\\le", "\\ge", "\\in"))
        or "," in text[:4]
    ):
        return None
    try:
        return OptionChoice(letter, parse_answer(rest))
    except UnreadableExpressionError:
        return None


def _parse_vector(text: str) -> Form | None:
    r"""Read ``2\mathbf{i} - 3\mathbf{j}`` as coordinates."""
    if not any(unit in text for unit in UNIT_VECTORS):
        return None
    tree = parse_expression(text)
    units = [unit for unit in UNIT_VECTORS if unit in ("\\ei", "\\ej") or unit in text]

    def at(one: str | None) -> Node:
        found = tree
        for unit in units:
            found = substitute(found, unit, Number(Fraction(int(unit == one))))
        return found

    total: Node = at(None)
    for unit in units:
        total = Operation("+", (total, Operation("*", (at(unit), Symbol(unit)))))
    if not is_equivalent(at(None), Number(Fraction(0))) or not is_equivalent(total, tree):
        raise UnreadableExpressionError("no sum of unit vectors")
    return BracketedTuple(tuple(Amount(at(unit)) for unit in units), "(", ")")


def _parse_time(text: str) -> TimeOfDay | None:
    match = _TIME.fullmatch(strip_text_macros(text).strip())
    if match is None or not any(match.group(2, 4, 5, 6)):
        return None
    hour, minute, second = int(match[1]), int(match[2] or 0), int(match[3] or 0)
    half = match[4].lower() if match[4] else {"noon": "p", "midnight": "a"}.get((match[5] or "").lower())
    if hour > 24 or minute > 59 or second > 59:
        return None
    if half is not None:
        if not 1 <= hour <= 12:
            return None
        return TimeOfDay(hour % 12 + (12 if half == "p" else 0), minute, second, has_meridiem=True)
    return TimeOfDay(hour, minute, second, has_meridiem=False)


def _parse_coupled_signs(text: str) -> Form | None:
    r"""Read signs that go through several parts: ``x = \pm 1, y = \mp 1``, but not ``\pm 1, \pm 2``."""
    if text.startswith("\\{") or len(_SIGNS.findall(text)) < 2:
        return None
    parts = [part for _, part in split_top_level(text, (",", ";", "\\and"))]
    signed = [part for part in parts if _SIGNS.search(part)]
    labels = {part.partition("=")[0].strip() for part in signed if "=" in part}
    if len(signed) < 2 or ("\\mp" not in text and len(labels) < 2):
        return None
    return _parse_plus_minus(text)


def _parse_plus_minus(text: str) -> Form | None:
    signs = _SIGNS.findall(text)
    if not signs or text.startswith("\\{"):
        return None
    together = AnswerCollection(
        (_parse_form(_choose_signs(text, "+" * len(signs))), _parse_form(_choose_signs(text, "-" * len(signs)))),
        is_set=True,
    )
    if len(signs) == 1 or len(set(signs)) > 1:
        return together
    if len(signs) > 4:
        raise UnreadableExpressionError("too many signs")
    apart = tuple(_parse_form(_choose_signs(text, "".join(each))) for each in product("+-", repeat=len(signs)))
    return Ambiguous((together, AnswerCollection(apart, is_set=True)))


def _choose_signs(text: str, signs: str) -> str:
    r"""Return a text with a sign for each ``\\pm``, and the opposite one for each ``\\mp``."""
    given, opposite = iter(signs), {"+": "-", "-": "+"}
    signed = _SIGNS.sub(lambda match: next(given) if match[0] == "\\pm" else opposite[next(given)], text)
    return re.sub(r"(^|[({\[,=])\s*+\+", r"\1", signed)


def _parse_alternatives(text: str) -> Form | None:
    """Read ``x = 1, y = 2 or x = 2, y = 1``: several points, each with its names."""
    parts = [part for _, part in split_top_level(text, ("\\or", ";"))]
    if len(parts) < 2 or not all("," in part and "=" in part for part in parts):
        return None
    forms = tuple(map(_parse_form, parts))
    return AnswerCollection(forms, is_set=False) if all(isinstance(form, Assignment) for form in forms) else None


def _parse_several(text: str) -> Form | None:
    parts = split_top_level(text, (",", ";", "\\or", "\\and"))
    parts = [part for part in parts if part[1] or part[0] not in ("\\and", "\\or", ",")]
    if len(parts) == 1:
        return None
    if (lead := _EXCLUDED.match(parts[0][1])) and not any(_RELATION.search(part) for _, part in parts[1:]):
        parts = [(sign, part if part == parts[0][1] else lead[0] + part) for sign, part in parts]  # x \ne 0, 1
    forms = tuple(_parse_form(part, is_item=True) for _, part in parts)
    signs = {sign for sign, _ in parts[1:]}
    if any(part == "\\ldots" for _, part in parts):
        forms = _complete_progression(forms)
        if WordAnswer("\\ldots") in forms:
            return BracketedTuple(forms, "", "")  # what goes on in between has an order
        return AnswerCollection(forms, is_set=False)
    if "\\or" in signs and any(re.fullmatch("[A-H]", part) for _, part in parts):
        raise UnreadableExpressionError("one option or another")
    if any(isinstance(form.form if isinstance(form, Labelled) else form, RealSet | Inequality) for form in forms):
        return _combine_conditions(forms, signs)
    return _to_assignment(forms, signs) or AnswerCollection(_flatten([part for _, part in parts], forms), is_set=False)


def _complete_progression(forms: tuple[Form, ...]) -> tuple[Form, ...]:
    r"""Return all terms of ``1, 3, \\ldots, 9``; of one that is long or ends in a letter its first terms and its last.

    From two terms in front it goes on by differences, from three also by quotients. All else stays as it is.
    """
    marks = [at for at, form in enumerate(forms) if form == WordAnswer("\\ldots")]
    if len(marks) != 1 or marks[0] < 2:
        return forms
    values = [rational_value(form.value) if isinstance(form, Amount) and form.unit is None else None for form in forms]
    before, after = values[: marks[0]], values[marks[0] + 1 :]
    pairs = [*pairwise(before), *pairwise(after)]
    for operation, given in (("-", 2), ("/", 3)):
        steps = {_step(operation, one, other) for one, other in pairs}
        if len(before) < given or len(steps) != 1 or (step := steps.pop()) is None or before[0] is None:
            continue
        terms = [before[0]]
        while len(terms) < _MAX_TERMS and terms[-1] != values[-1]:
            terms.append(terms[-1] + step if operation == "-" else terms[-1] * step)
        if after and terms[-1] == values[-1] and len(terms) >= len(forms) - 1:
            return tuple(Amount(Number(term)) for term in terms)
        return (*forms[:given], forms[marks[0]], *forms[marks[0] + 1 :][-1:])
    return forms


def _step(operation: str, one: Fraction | None, other: Fraction | None) -> Fraction | None:
    """Return what leads from a term to the next; ``None`` where one is no number, or nothing does."""
    if one is None or other is None or one in (other, 0 if operation == "/" else other):
        return None
    return other - one if operation == "-" else other / one


def _combine_conditions(forms: Sequence[Form], signs: set[str]) -> Form:
    """Join conditions: ``or`` means any of them, ``and`` or a comma all, but never nothing by a comma."""
    names = {form.name for form in forms if isinstance(form, Labelled)}
    if len(names) > 1 or any(isinstance(form, Inequality) for form in forms):
        if "\\or" in signs:
            raise UnreadableExpressionError("conditions on several variables of which one holds")
        return AnswerCollection(tuple(forms), is_set=False)
    conditions: list[RealSet] = []
    for form in forms:
        match form:
            case Labelled(_, Amount(value)):
                condition = number_sets.point_set([value])
            case _:
                condition = to_real_set(form)
        if condition is None:
            raise UnreadableExpressionError("conditions next to something else")
        conditions.append(condition)
    found = reduce(number_sets.union if "\\or" in signs else number_sets.intersection, conditions)
    if signs <= {",", ";"} and not found.intervals:
        found = reduce(number_sets.union, conditions)
    return Labelled(names.pop(), found, None) if names else found


def _to_assignment(forms: Sequence[Form], signs: set[str]) -> Assignment | None:
    """Return ``x = 1, y = 2`` as values with names; values of one name (``x = 1, x = 2``) are several answers."""
    pairs: list[tuple[str, Form]] = []
    for form in forms:
        match form:
            case Labelled(name, value):
                pairs.append((name, value))
            case Assignment(names, values):
                pairs.extend(zip(names, values, strict=True))
            case _:
                return None
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names) or "\\or" in signs:
        return None
    return Assignment(tuple(names), tuple(value for _, value in pairs))


def _flatten(texts: Sequence[str], forms: Sequence[Form]) -> tuple[Form, ...]:
    r"""Return the items of a list, in which ``\pm 1`` counts as two; a set among them stays one item."""
    items: list[Form] = []
    for text, form in zip(texts, forms, strict=True):
        items.extend(form.items if isinstance(form, AnswerCollection) and not text.startswith("\\{") else (form,))
    return tuple(items)


def _parse_brackets(text: str) -> Form | None:
    if match := _REVERSED.fullmatch(text):
        opening, low, high, closing = match.groups()
        if opening == "]" or closing == "[":
            return number_sets.interval(parse_expression(low), parse_expression(high), opening == "[", closing == "]")
    if text == "\\emptyset":
        return number_sets.EMPTY_SET
    if re.fullmatch(r"\\mathbb\s*+\{?R\}?", text):
        return number_sets.ALL_REALS
    if re.fullmatch(r"[A-Z]\s*+\(.*,.*\)", text):
        point = _parse_brackets(text[1:].strip())  # it has a name
        tree = _expression_or_none(text)
        if point is None or not isinstance(tree, Operation) or tree.operation.startswith("call"):
            return point
        return CombinationOrPoint(Amount(tree), point)
    found = split_brackets(text)
    if found is None:
        return None
    opening, content, closing = found
    if opening == "\\{":
        return _parse_set(content)
    items = [part for _, part in split_top_level(content, (",", ";"))]
    if len(items) == 1:
        is_factor = _expression_or_none(text) is not None
        if text.startswith("[[") and text.count("[") == 2 and isinstance(row := _parse_form(content), BracketedTuple):
            return BracketedTuple((row,), opening, closing)
        return None if opening != "(" or closing != ")" or is_factor else _parse_form(content)
    if len(items) == 2 and closing != {"(": ")", "[": "]"}.get(opening, closing):
        low, high = map(parse_expression, items)
        if free_symbols(low) | free_symbols(high):
            return BracketedTuple((Amount(low), Amount(high)), opening, closing)
        return number_sets.interval(low, high, opening == "[", closing == "]")
    return BracketedTuple(
        _complete_progression(tuple(_parse_form(item, is_item=True) for item in items)),
        opening.replace("\\langle", "("),
        closing.replace("\\rangle", ")"),
    )


def _expression_or_none(text: str) -> Node | None:
    try:
        return parse_expression(text)
    except UnreadableExpressionError:
        return None


def _parse_set(content: str) -> Form:
    if not content:
        return number_sets.EMPTY_SET
    if match := _BUILT_FAMILY.fullmatch(content):
        return IntegerFamily(match["letter"], _parse_form(match["form"].strip()))
    if match := _BUILDER.fullmatch(content):
        condition = _parse_form(match["condition"])
        form = to_real_set(condition)
        if form is None or (isinstance(condition, Labelled) and condition.name != match["name"]):
            raise UnreadableExpressionError("a set of what is no condition")
        return form
    parts = [part for _, part in split_top_level(content, (",", ";"))]
    items = _flatten(parts, [_parse_form(part, is_item=True) for part in parts])
    return AnswerCollection(_complete_progression(items), is_set=True)


def _parse_union(text: str) -> Form | None:
    parts = split_top_level(text, ("\\cup", "\\cap", "\\setminus"))
    if len(parts) == 1:
        return None
    found = _parse_reals(parts[0][1])
    for sign, part in parts[1:]:
        other = _parse_reals(part)
        match sign:
            case "\\cup":
                found = number_sets.union(found, other)
            case "\\cap":
                found = number_sets.intersection(found, other)
            case _:
                found = number_sets.intersection(found, number_sets.complement(other))
    return found


def _parse_reals(text: str) -> RealSet:
    if re.fullmatch(r"\(?\\mathbb\s*+\{?R\}?\)?", text):
        return number_sets.ALL_REALS
    found = to_real_set(_parse_form(text))
    if found is None:
        raise UnreadableExpressionError("a part of a union is no set of real numbers")
    return found


def _parse_ratio(text: str) -> Form | None:
    text = re.sub(r"(?<=\d)\s*+(?:\\text\s*+\{\s*+)?\bto\b\s*+\}?\s*+(?=\d)", ":", text)
    parts = [part for _, part in split_top_level(text, (":",))]
    if len(parts) == 1:
        return None
    return Ratio(tuple(parse_expression(part) for part in parts))


def _parse_based_numeral(text: str) -> Form | None:
    bare = re.sub(r"[\s(){}]|\\text", "", text)
    match = _BASED.fullmatch(bare)
    if match is None or not re.match(r"\(?(?:\\text\s*+\{)?\s*+\(?[0-9A-Fa-f]", text):
        return None
    if not re.search(r"\d", match[1]) and (match[2] != "16" or not match[1].isupper()):
        return None
    base = int(match[2]) if match[2].isdigit() else _BASES.get(match[2])
    if base is None or not 2 <= base <= 36:
        return None
    if base == 10:
        return Amount(parse_expression(match[1]))
    digits = match[1].upper()
    if any(int(digit, 36) >= base for digit in digits.replace(".", "")):
        raise UnreadableExpressionError(f"a digit that base {base} does not have")
    return BasedNumeral(digits.lstrip("0") or "0", base)


_READERS: tuple[Callable[[str], Form | None], ...] = (
    _parse_family,
    partial(number_sets.parse_congruence, read=_parse_form),
    _parse_option,
    partial(parse_table, read=_parse_form),
    _parse_vector,
    _parse_time,
    _parse_coupled_signs,
    _parse_alternatives,
    _parse_several,
    _parse_plus_minus,
    _parse_brackets,
    partial(parse_relation, read=_parse_form),
    _parse_union,
    _parse_ratio,
    _parse_based_numeral,
)
