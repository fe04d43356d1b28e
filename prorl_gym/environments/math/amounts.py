"""Numbers and expressions with percent signs, units, currencies and nouns."""

import re
from fractions import Fraction

from prorl_gym.environments.math.expressions import (
    FUNCTIONS,
    GREEK,
    Apply,
    Node,
    Number,
    UnreadableError,
    read_expression,
    symbols,
)
from prorl_gym.environments.math.forms import Amount
from prorl_gym.environments.math.spelling import untexted
from prorl_gym.environments.math.units import Tail, Unit, is_unit, read_tail, single_letter

_CURRENCY = re.compile(r"(-?)\s*(?:\\(usd|eur|gbp)|(?:\\text\s*\{\s*)?(USD|EUR|GBP|Rs)\.?\s*\}?)\s*(.*)", re.DOTALL)
_DECIMAL = re.compile(r"-?\d*\.(\d+)")
_PERCENT = re.compile(r"\s*(?:%|\\text\s*\{\s*(?:percent|per cent|%)\s*\}|(?<=[\d\s])percent)$")
_DEGREES = re.compile(r"\\degree\s*(?:(?:\\text\s*\{\s*)?([CF])\s*\}?)?$")
_ARC = re.compile(
    r"(\d+)\s*\\degree\s*(\d+)\s*(?:'|\^\s*\{?\\prime\}?)(?:\s*(\d+(?:\.\d+)?)\s*(?:''|\"|\^\s*\{\\prime\\prime\}))?"
)
_WORD = re.compile(
    r"\\text\s*\{|\\usd|\\eur|\\gbp|(?<![a-zA-Z\\_])[^\W\d_]{2,}|(?<=[\d)}]\s)([a-zA-Z])(?![a-zA-Z(^_'])(?=\s*$|\s*/)"
)
_COMPOUND = re.compile(r"(\d+(?:\.\d+)?)\s*(?:\\text\s*\{)?\s*([a-zA-Z]+)\s*\}?\s*(?:,|and|\\and)?\s*")
_FACTORS = re.compile("[a-zA-Z]{2,3}")
_LAST_TERM = re.compile(r"[-+]\s*(\d+(?:\.\d+)?)?$")
_QUANTITIES = re.compile(r"\d+(?:\.\d+)?\s*[a-zA-Z]{2,3}(?:\s*[-+]\s*\d+(?:\.\d+)?\s*[a-zA-Z]{2,3})+")


def read_amount(text: str) -> Amount:
    """Return a number or an expression with what stands behind it.

    Raises:
        UnreadableError: the text is something else.
    """
    if match := _CURRENCY.fullmatch(text):
        code = (match[2] or match[3]).casefold()
        amount = read_amount(match[1] + match[4])
        if (amount.unit is not None and amount.unit.dimension is not None) or amount.percent:
            raise UnreadableError("two units")
        kind = {"eur": "euro", "gbp": "sterling", "rs": "rupee"}.get(code, code)
        return Amount(amount.value, Unit(dimension=((kind, 1),)), places=amount.places)
    if match := _PERCENT.search(text):
        bare = _simple(text[: match.start()].strip())
        return Amount(bare.value, percent=True, places=bare.places)
    if match := _DEGREES.search(text):
        if match.start() and not re.search(r"\\(?:sin|cos|tan|cot|sec|csc|cis)(?![a-z])", text):
            bare = _simple(text[: match.start()].strip())
            kind = {"C": "celsius", "F": "fahrenheit"}.get(match[1] or "", "angle")
            return Amount(bare.value, Unit(dimension=((kind, 1),)), places=bare.places)
    return _arc(text) or _compound(text) or _with_tail(text)


def _arc(text: str) -> Amount | None:
    r"""Read ``45^\\circ 30'``, with minutes and perhaps seconds of arc."""
    match = _ARC.fullmatch(text)
    if match is None or int(match[2]) > 59 or float(match[3] or 0) >= 60:
        return None
    degrees = Fraction(match[1]) + Fraction(match[2]) / 60 + Fraction(match[3] or 0) / 3600
    return Amount(Number(degrees), Unit(dimension=(("angle", 1),)))


def _simple(text: str) -> Amount:
    decimal = _DECIMAL.fullmatch(text.replace(" ", ""))
    return Amount(read_expression(text), places=len(decimal[1]) if decimal else None)


def _compound(text: str) -> Amount | None:
    """Read ``5 feet 6 inches``, at least two parts of one dimension."""
    text = untexted(text)
    parts = _COMPOUND.findall(text)
    if len(parts) < 2 or _COMPOUND.sub("", text).strip():
        return None
    total, dimension = Fraction(0), None
    for number, name in parts:
        tail = read_tail(name)
        if tail is None or tail.unit.dimension is None or dimension not in (None, tail.unit.dimension):
            return None
        dimension = tail.unit.dimension
        total += Fraction(number) * tail.unit.factor
    return Amount(Number(total), Unit(dimension=dimension))


def _with_tail(text: str) -> Amount:
    if _QUANTITIES.fullmatch(text) and all(map(is_unit, re.findall("[a-zA-Z]+", text))):
        raise UnreadableError("a sum of quantities")
    start = _tail_start(text)
    if start is None:
        return _simple(text)
    head, words = text[:start].strip(), _currency_words(text[start:])
    if re.search(r"\d\s*/$", head):  # "3 / hour"
        head, words = head[:-1].strip(), f"/ {words}"
    if not head:
        raise UnreadableError("words")
    tail: Tail | None = read_tail(words)
    if tail is None:
        raise UnreadableError(f"'{untexted(words)[:20]}' behind it")
    if (
        _FACTORS.fullmatch(words)
        and (term := _LAST_TERM.search(head))
        and (not term[1] or symbols(_simple(head).value))
    ):
        return _simple(text)  # in kx + 2mg are masses, in 2 + 3mg milligrams
    amount = _simple(head)
    value: Node = amount.value
    if symbols(value) and len(words) == 1:
        return _simple(text)  # h is a height behind other letters, and an hour behind a number
    if symbols(value) and tail.unit.dimension is None:
        raise UnreadableError("words behind a formula")
    if tail.multiplier != 1:
        value = Apply("*", (value, Number(Fraction(tail.multiplier))))
    return Amount(value, tail.unit, places=amount.places if tail.multiplier == 1 else None)


def _currency_words(text: str) -> str:
    for command, word in (("\\usd", "dollar"), ("\\eur", "euro"), ("\\gbp", "gbp")):
        text = text.replace(command, f" {word} ")
    return text


def _tail_start(text: str) -> int | None:
    for match in _WORD.finditer(text):
        token = match[0]
        if match[1] is not None:
            if single_letter(token):
                return match.start()
            continue
        if token.startswith("\\"):
            return match.start()
        if re.fullmatch("d[a-z]", token) and re.search(r"\\i+nt(?![a-z])", text):
            continue  # the differential of an integral
        if token in FUNCTIONS or token in GREEK or _inside_command(text, match.start()):
            continue
        if (
            len(token) <= 3
            and token.isascii()
            and (not is_unit(token) or _goes_on(text, match))
            and not re.search(r"[\d)}]\s+$", text[: match.start()])
        ):
            continue  # a product of variables
        return match.start()
    return None


def _goes_on(text: str, match: re.Match[str]) -> bool:
    r"""Whether a formula goes on behind a word: ``2mg + v``, ``\frac{2mg}{3}``. Behind a unit nothing does."""
    depth = 0
    for sign in text[match.end() :]:
        depth += {"{": 1, "(": 1, "}": -1, ")": -1}.get(sign, 0)
        if depth < 0 or (depth == 0 and sign in "+-"):
            return True
    return False


def _inside_command(text: str, position: int) -> bool:
    return re.search(r"\\(?:mathbb|begin|end|overline)\s*\{$", text[:position]) is not None
