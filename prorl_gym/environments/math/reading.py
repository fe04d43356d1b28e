"""From the text of an answer to what it is."""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product

from prorl_gym.environments.math import families, intervals, spelling, words
from prorl_gym.environments.math.amounts import read_amount
from prorl_gym.environments.math.clocks import read_clock
from prorl_gym.environments.math.expressions import (
    UNIT_VECTORS,
    Apply,
    Node,
    Number,
    Symbol,
    UnreadableError,
    read_expression,
    substitute,
    symbols,
)
from prorl_gym.environments.math.forms import (
    Ambiguous,
    Amount,
    Assigned,
    Based,
    Choice,
    Family,
    Form,
    Inequality,
    Labelled,
    Ratio,
    Reals,
    Row,
    Selection,
    Several,
    Words,
)
from prorl_gym.environments.math.prose import said_in_words, without_prefix
from prorl_gym.environments.math.relations import read_relation
from prorl_gym.environments.math.splitting import enclosed, split
from prorl_gym.environments.math.tables import read_table
from prorl_gym.environments.math.values import same

_INTEGER = re.compile(
    r"(?:,|\\text\s*\{\s*,?\s*(?:where|for|with|for\s+(?:any|all|some|every))?\s*\}|\bwhere\b|\bfor\b)?\s*"
    r"\(?\s*(?P<a>[a-zA-Z])\s*\\in\s*(?:\\mathbb\s*\{?(?:Z|(?P<natural>N))\}?|\\text\s*\{Z\}|Z)\s*\)?$"
    r"|,?\s*(?:\\text\s*\{)?\s*,?\s*(?:where|for|with)\s+(?:any|all|some|every)?\s*integers?\s*\}?\s*(?P<b>[a-zA-Z])$"
    r"|,?\s*(?:\\text\s*\{)?\s*,?\s*(?:where|for|with)?\s*\}?\s*(?P<c>[a-zA-Z])\s*(?:\\text\s*\{)?\s*"
    r"(?:is\s+)?(?:an|any)\s+integer\s*\}?$"
)
_ONLY = re.compile(r"\s*\bonly\b(?=\s*\}?$)")
_REVERSED = re.compile(r"([\](\[])([^()\[\]]*),([^()\[\]]*)([\[)\]])")
_CHOICE = re.compile(
    r"(?:\\text\s*\{\s*\(?([A-E])\)\s*\}|\(([A-E])\)|\\text\s*\{\s*([A-E])[.:]?\s*\}|([A-E])[.:)])\s*(.*)"
)
_EXCLUDED = re.compile(r"[a-zA-Z](?:_\w)?\s*\\ne(?![a-z])\s*")
_RELATION = re.compile(r"[=<>]|\\(?:[lgn]e|in|approx|equiv)(?![a-z])")
_SIGNS = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])")
_BASED = re.compile(r"([0-9A-Fa-f.]+)(?:_(?:base)?|(?:in)?base)-?(\w+)")
_BUILT_FAMILY = re.compile(
    r"(?P<form>[^:|]+?)(?:\||:|\\mid(?![a-z]))\s*(?P<letter>[a-z])\s*\\in\s*\\mathbb\s*\{?Z\}?\s*"
)
_BUILDER = re.compile(r"(?P<name>[a-zA-Z])\s*(?:\\in\s*\\mathbb\s*\{?R\}?)?\s*(?:\||:|\\mid)\s*(?P<condition>.*)")


def read(answer: str) -> Form:
    """Return what a plain answer is.

    Raises:
        UnreadableError: nothing that is known, or too large.
    """
    if (family := families.read_worded(answer)) is not None:
        return family
    said = words.words(answer)
    if said is not None and (form := said_in_words(said)) is not None:
        return form
    text = without_prefix(spelling.formula(_ONLY.sub("", answer)))
    said = words.words(text)
    if said is not None:
        return said_in_words(said) or Words(said)
    if (text_without_commas := spelling.number_with_commas(text)) is not None:
        text = text_without_commas
    return _form(text)


def _form(text: str, is_item: bool = False) -> Form:
    if not text:
        raise UnreadableError("it is empty")
    if text == "\\ldots" and is_item:
        return Words(text)
    for reader in _READERS:
        form = reader(text)
        if form is not None:
            return form
    return read_amount(text)


def _family(text: str) -> Form | None:
    match = _INTEGER.search(text)
    if match is None or not match.start():
        return None
    letter = match["a"] or match["b"] or match["c"]
    inner = text[: match.start()].strip().rstrip(",").strip()
    return Family(letter, _form(inner), "N" if match["natural"] else "Z")


def _congruence(text: str) -> Form | None:
    return families.read_congruence(text, _form)


def _choice(text: str) -> Form | None:
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
        return Choice(letter, read(rest))
    except UnreadableError:
        return None


def _union(text: str) -> Form | None:
    parts = split(text, ("\\cup", "\\cap", "\\setminus"))
    if len(parts) == 1:
        return None
    found = _reals(parts[0][1])
    for sign, part in parts[1:]:
        other = _reals(part)
        if sign == "\\cup":
            found = intervals.union(found, other)
        else:
            other = other if sign == "\\cap" else intervals.complement(other)
            found = intervals.intersection(found, other)
    return found


def _reals(text: str) -> Reals:
    if re.fullmatch(r"\(?\\mathbb\s*\{?R\}?\)?", text):
        return intervals.EVERYTHING
    found = as_reals(_form(text))
    if found is None:
        raise UnreadableError("a part of a union is no set of real numbers")
    return found


def as_reals(form: Form) -> Reals | None:
    """Return a form as a set of real numbers when it can be one."""
    match form:
        case Reals():
            return form
        case Labelled(_, inner, _) if isinstance(inner, Reals):
            return inner
        case Row((Amount(low), Amount(high)), opening, closing) if opening in "([" and closing in ")]":
            return intervals.interval(low, high, opening == "[", closing == "]")
        case Several(items, True) if all(isinstance(item, Amount) for item in items):
            return intervals.points(item.value for item in items if isinstance(item, Amount))
        case _:
            return None


def _vector(text: str) -> Form | None:
    r"""Read ``2\mathbf{i} - 3\mathbf{j}`` as coordinates."""
    if not any(unit in text for unit in UNIT_VECTORS):
        return None
    tree = read_expression(text)
    units = [unit for unit in UNIT_VECTORS if unit in ("\\ei", "\\ej") or unit in text]

    def at(one: str | None) -> Node:
        found = tree
        for unit in units:
            found = substitute(found, unit, Number(Fraction(int(unit == one))))
        return found

    total: Node = at(None)
    for unit in units:
        total = Apply("+", (total, Apply("*", (at(unit), Symbol(unit)))))
    if not same(at(None), Number(Fraction(0))) or not same(total, tree):
        raise UnreadableError("no sum of unit vectors")
    return Row(tuple(Amount(at(unit)) for unit in units), "(", ")")


def _alternatives(text: str) -> Form | None:
    """Read ``x = 1, y = 2 or x = 2, y = 1``: several points, each with its names."""
    parts = [part for _, part in split(text, ("\\or", ";"))]
    if len(parts) < 2 or not all("," in part and "=" in part for part in parts):
        return None
    forms = tuple(map(_form, parts))
    return Several(forms, is_set=False) if all(isinstance(form, Assigned) for form in forms) else None


def _several(text: str) -> Form | None:
    parts = split(text, (",", ";", "\\or", "\\and"))
    parts = [part for part in parts if part[1] or part[0] not in ("\\and", "\\or", ",")]
    if len(parts) == 1:
        return None
    if (lead := _EXCLUDED.match(parts[0][1])) and not any(_RELATION.search(part) for _, part in parts[1:]):
        parts = [(sign, part if part == parts[0][1] else lead[0] + part) for sign, part in parts]  # x \ne 0, 1
    forms = tuple(_form(part, is_item=True) for _, part in parts)
    signs = {sign for sign, _ in parts[1:]}
    if any(part == "\\ldots" for _, part in parts):
        return Row(forms, "", "")  # what goes on in between has an order
    if "\\or" in signs and any(re.fullmatch("[A-H]", part) for _, part in parts):
        raise UnreadableError("one option or another")
    if any(isinstance(_bare(form), Reals | Inequality) for form in forms):
        return _of_conditions(forms, signs)
    return _assigned(forms, signs) or Several(_flat([part for _, part in parts], forms), is_set=False)


def _assigned(forms: Sequence[Form], signs: set[str]) -> Assigned | None:
    """Return ``x = 1, y = 2`` as values with names; values of one name (``x = 1, x = 2``) are several answers."""
    pairs: list[tuple[str, Form]] = []
    for form in forms:
        match form:
            case Labelled(name, value):
                pairs.append((name, value))
            case Assigned(names, values):
                pairs.extend(zip(names, values, strict=True))
            case _:
                return None
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names) or "\\or" in signs:
        return None
    return Assigned(tuple(names), tuple(value for _, value in pairs))


def _of_conditions(forms: Sequence[Form], signs: set[str]) -> Form:
    names = {form.name for form in forms if isinstance(form, Labelled)}
    if len(names) > 1 or any(isinstance(form, Inequality) for form in forms):
        if "\\or" in signs:
            raise UnreadableError("conditions on several variables of which one holds")
        return Several(tuple(forms), is_set=False)
    found = _conditions([_condition(form) for form in forms], signs)
    return Labelled(names.pop(), found, None) if names else found


def _bare(form: Form) -> Form:
    return form.form if isinstance(form, Labelled) else form


def _condition(form: Form) -> Reals:
    if isinstance(form, Labelled) and isinstance(form.form, Amount):
        return intervals.points([form.form.value])
    if (found := as_reals(form)) is None:
        raise UnreadableError("conditions beside something else")
    return found


def _conditions(found: Sequence[Reals], signs: set[str]) -> Reals:
    """Join conditions: ``or`` means any of them, ``and`` or a comma all, but never nothing by a comma."""
    result = found[0]
    for other in found[1:]:
        result = intervals.union(result, other) if "\\or" in signs else intervals.intersection(result, other)
    if signs <= {",", ";"} and not result.pieces:
        result = found[0]
        for other in found[1:]:
            result = intervals.union(result, other)
    return result


def _coupled(text: str) -> Form | None:
    r"""Read signs that go through several parts: ``x = \pm 1, y = \mp 1``, but not ``\pm 1, \pm 2``."""
    if text.startswith("\\{") or len(_SIGNS.findall(text)) < 2:
        return None
    parts = [part for _, part in split(text, (",", ";", "\\and"))]
    signed = [part for part in parts if _SIGNS.search(part)]
    labels = {part.partition("=")[0].strip() for part in signed if "=" in part}
    if len(signed) < 2 or ("\\mp" not in text and len(labels) < 2):
        return None
    return _plus_minus(text)


def _plus_minus(text: str) -> Form | None:
    signs = _SIGNS.findall(text)
    if not signs or text.startswith("\\{"):
        return None
    together = Several((_form(_signed(text, "+" * len(signs))), _form(_signed(text, "-" * len(signs)))), is_set=True)
    if len(signs) == 1 or len(set(signs)) > 1:
        return together
    if len(signs) > 4:
        raise UnreadableError("too many signs")
    apart = tuple(_form(_signed(text, "".join(each))) for each in product("+-", repeat=len(signs)))
    return Ambiguous((together, Several(apart, is_set=True)))


def _signed(text: str, signs: str) -> str:
    r"""Put a sign in place of each ``\\pm``, and the other one in place of each ``\\mp``."""
    given = iter(signs)

    def one(match: re.Match[str]) -> str:
        sign = next(given)
        return sign if match[0] == "\\pm" else {"+": "-", "-": "+"}[sign]

    return re.sub(r"(^|[({\[,=])\s*\+", r"\1", _SIGNS.sub(one, text))


def _brackets(text: str) -> Form | None:
    if match := _REVERSED.fullmatch(text):
        opening, low, high, closing = match.groups()
        if opening == "]" or closing == "[":
            return intervals.interval(read_expression(low), read_expression(high), opening == "[", closing == "]")
    if text == "\\emptyset":
        return intervals.NOTHING
    if re.fullmatch(r"\\mathbb\s*\{?R\}?", text):
        return intervals.EVERYTHING
    if re.fullmatch(r"[A-Z]\s*\(.*,.*\)", text):
        point = _brackets(text[1:].strip())  # it has a name
        count = _selection(text)
        return Selection(count, point) if count is not None and point is not None else point
    found = enclosed(text)
    if found is None:
        return None
    opening, content, closing = found
    if opening == "\\{":
        return _set(content)
    items = [part for _, part in split(content, (",", ";"))]
    if len(items) == 1:
        return None if opening != "(" or closing != ")" or _is_expression(text) else _form(content)
    if len(items) == 2 and closing != {"(": ")", "[": "]"}.get(opening, closing):
        low, high = map(read_expression, items)
        if symbols(low) | symbols(high):
            return Row((Amount(low), Amount(high)), opening, closing)
        return intervals.interval(low, high, opening == "[", closing == "]")
    return Row(
        tuple(_form(item, is_item=True) for item in items),
        opening.replace("\\langle", "("),
        closing.replace("\\rangle", ")"),
    )


def _selection(text: str) -> Amount | None:
    """Return ``C(6,3)`` or ``P(6,3)`` as the number of ways to choose, where it may be one."""
    try:
        tree = read_expression(text)
    except UnreadableError:
        return None
    return Amount(tree) if isinstance(tree, Apply) and not tree.operation.startswith("call") else None


def _is_expression(text: str) -> bool:
    try:
        read_expression(text)
    except UnreadableError:
        return False
    return True


def _set(content: str) -> Form:
    if not content:
        return intervals.NOTHING
    if match := _BUILT_FAMILY.fullmatch(content):
        return Family(match["letter"], _form(match["form"].strip()))
    if match := _BUILDER.fullmatch(content):
        condition = _form(match["condition"])
        form = as_reals(condition)
        if form is None or (isinstance(condition, Labelled) and condition.name != match["name"]):
            raise UnreadableError("a set of what is no condition")
        return form
    parts = [part for _, part in split(content, (",", ";"))]
    return Several(_flat(parts, [_form(part, is_item=True) for part in parts]), is_set=True)


def _flat(texts: Sequence[str], forms: Sequence[Form]) -> tuple[Form, ...]:
    r"""Put the values of ``\pm 1`` beside its neighbours; a set among them stays one item."""
    flat: list[Form] = []
    for text, form in zip(texts, forms, strict=True):
        flat.extend(form.items if isinstance(form, Several) and not text.startswith("\\{") else (form,))
    return tuple(flat)


def _table(text: str) -> Form | None:
    return read_table(text, _form)


def _clock(text: str) -> Form | None:
    return read_clock(text)


def _ratio(text: str) -> Form | None:
    text = re.sub(r"(?<=\d)\s*(?:\\text\s*\{\s*)?\bto\b\s*\}?\s*(?=\d)", ":", text)
    parts = [part for _, part in split(text, (":",))]
    if len(parts) == 1:
        return None
    return Ratio(tuple(read_expression(part) for part in parts))


_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
          "eleven": 11, "twelve": 12, "sixteen": 16, "hex": 16, "bin": 2, "oct": 8}  # fmt: skip


def _based(text: str) -> Form | None:
    bare = re.sub(r"[\s(){}]|\\text", "", text)
    match = _BASED.fullmatch(bare)
    if match is None or not re.match(r"\(?(?:\\text\s*\{)?\s*\(?[0-9A-Fa-f]", text):
        return None
    if not re.search(r"\d", match[1]) and (match[2] != "16" or not match[1].isupper()):
        return None
    base = int(match[2]) if match[2].isdigit() else _BASES.get(match[2])
    if base is None or not 2 <= base <= 36:
        return None
    if base == 10:
        return Amount(read_expression(match[1]))
    digits = match[1].upper()
    if any(int(digit, 36) >= base for digit in digits.replace(".", "")):
        raise UnreadableError(f"a digit that base {base} does not have")
    return Based(digits.lstrip("0") or "0", base)


def _relation(text: str) -> Form | None:
    return read_relation(text, _form)


_READERS: tuple[Callable[[str], Form | None], ...] = (
    _family, _congruence, _choice, _table, _vector, _clock, _coupled, _alternatives, _several, _plus_minus, _brackets,
    _relation, _union, _ratio, _based,
)  # fmt: skip
