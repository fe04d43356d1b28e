"""Parses and compares numbers and expressions with percent signs, units, currencies and nouns.

A unit on one side only does not count; two of a kind are converted. Words that are no unit here are a noun
(``12 ways``), and nouns do not count either (``words.is_neutral_phrase``).
"""

import re
from fractions import Fraction
from functools import cache

from prorl_gym.environments.answers import units
from prorl_gym.environments.answers.number_words import DIVISORS
from prorl_gym.environments.math.answer_forms import Amount, Dimension, Form, Labelled, Unit
from prorl_gym.environments.math.answer_text import normalize_latex, strip_text_macros
from prorl_gym.environments.math.expressions import (
    FUNCTIONS,
    GREEK,
    Node,
    Number,
    Operation,
    UnreadableExpressionError,
    free_symbols,
    parse_expression,
)
from prorl_gym.environments.math.values import (
    is_equal_up_to_constant,
    is_equivalent,
    rational_value,
    real_value,
    rounds_to_decimal,
)
from prorl_gym.environments.math.words import is_neutral_phrase

_CURRENCY = re.compile(
    r"(-?)\s*+(?:\\(usd|eur|gbp)|(?:\\text\s*+\{\s*+)?(USD|EUR|GBP|Rs)\.?\s*+\}?)\s*+(.*)", re.DOTALL
)
_DECIMAL = re.compile(r"-?\d*\.(\d+)")
_PERCENT = re.compile(r"(?<!\s)\s*+(?:%|\\text\s*+\{\s*+(?:percent|per cent|%)\s*+\}|(?<=[\d\s])percent)$")
_DEGREES = re.compile(r"\\degree\s*+(?:(?:\\text\s*+\{\s*+)?([CF])\s*+\}?)?$")
_ARC = re.compile(
    r"(\d+)\s*+\\degree\s*+(\d+)\s*+(?:'|\^\s*+\{?\\prime\}?)(?:\s*+(\d+(?:\.\d+)?)\s*+(?:''|\"|\^\s*+\{\\prime\\prime\}))?"
)
_WORD = re.compile(
    r"\\text\s*+\{|\\usd|\\eur|\\gbp|(?<![a-zA-Z\\_])[^\W\d_]{2,}|(?<=[\d)}]\s)([a-zA-Z])(?![a-zA-Z(^_'])(?=\s*+$|\s*+/)"
)
_COMPOUND = re.compile(r"(?<!\d)(\d+(?:\.\d+)?)\s*+(?:\\text\s*+\{)?\s*+([a-zA-Z]+)\s*+\}?\s*+(?:,|and|\\and)?\s*+")
_FACTORS = re.compile("[a-zA-Z]{2,3}")
_LAST_TERM = re.compile(r"[-+]\s*+(\d+(?:\.\d+)?)?$")
_QUANTITIES = re.compile(r"\d+(?:\.\d+)?\s*+[a-zA-Z]{2,3}(?:\s*+[-+]\s*+\d+(?:\.\d+)?\s*+[a-zA-Z]{2,3})+")

_ASKED = re.compile(
    r"\b(how many|number of|in) ((?:(?:square|cubic) )?[a-z]{2,}(?: ?/ ?[a-z]+| per [a-z]+)?)", re.IGNORECASE
)
_UNITS = {
    "length": "m meter metre cm centimeter centimetre mm millimeter millimetre km kilometer kilometre dm decimeter "
    "decimetre nm nanometer inch inches in ft foot feet yd yard mi mile",
    "length^2": "m^2 ha hectare acre",
    "length^3": "m^3 l liter litre ml milliliter millilitre cl centiliter dl deciliter gal gallon quart pint",
    "length time^-1": "m/s mph",
    "time": "s sec second ms min minute h hr hour day week",
    "years": "month year yr decade century centurie",
    "mass": "g gram kg kilogram mg milligram tonne ton=tonne",
    "pounds": "oz ounce lb lbs pound",
    "angle": "degree degrees deg",
    "radian": "radian rad",
    "frequency": "hz=Hz hertz khz=kHz mhz=MHz",
    "newton": "n=N newton kn=kN",
    "joule": "j=J joule kj=kJ",
    "watt": "w=W watt kw=kW",
    "volt": "v=V volt",
    "ampere": "a=A amp ampere",
    "kelvin": "k=K kelvin",
    "pascal": "pa=Pa pascal kpa=kPa",
    "data": "bit byte kb=kB mb=MB gb=GB",
}
"""Spellings by dimension, the base unit first; where the common table has another spelling, it follows ``=``.

Years are not counted in days, nor pounds in grams, since no exact answer converts them.
"""
_OTHER_UNITS: dict[str, dict[str, str]] = {
    "joule": {"kwh": "3600000"},
    "length time^-1": dict.fromkeys(("kph", "kmph", "kmh"), "5/18"),
    "usd": {"usd": "1", "dollar": "1", "buck": "1", "cent": "1/100", "cents": "1/100"},
    "euro": {"eur": "1", "euro": "1"},
    "sterling": {"gbp": "1"},
    "rupee": {"rupee": "1"},
    "celsius": {"celsius": "1"},
    "fahrenheit": {"fahrenheit": "1"},
}
"""Factors of units that the common table lacks or has in another dimension (5 degrees are not 5 kelvins)."""

_ONE_LETTER_UNITS = frozenset("m g s h l L".split())
"""One-letter units; elsewhere they are variables, so only a space or ``\\text`` before them makes them units."""

_ONE_LETTER_UNITS_AS_TEXT = frozenset("NJWVAK")
"""One-letter units that only ``\\text`` makes units."""

_DENOMINATOR_LETTERS = frozenset("sh")
"""Units of time that are written against another one."""

_MULTIPLIERS = {
    "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
    **{word: Fraction(1, number) for word, number in DIVISORS.items()},
}  # fmt: skip

_ADJECTIVES = frozenset("long wide tall high deep away thick old total altogether apart of the area volume".split())


_PLAIN_MEASURES = re.compile(
    r"(?i)length|distance|perimeter|area|volume|height|width|radius|diameter|circumference|mass|weigh|speed|veloc|time"
    r"|dura|when|how (?:long|far|tall|wide|high|deep|heavy|much|old|fast)|temperature|age|sides?|force|energy|power"
)
_MEASURES = {
    "percent": re.compile(r"(?i)%|percent"),
    "angle": re.compile(r"(?i)degree|angle|\\circ|°|\barc|rotat|bearing|inclin|\b(?:arc)?(?:sin|cos|tan)|radian"),
    **dict.fromkeys(
        ("usd", "euro", "sterling", "rupee"),
        re.compile(r"(?i)\\\$|dollar|cents?\b|[€£]|euro|pound|rupee|price|cost|pa(?:y|id)|money|earn|profit|spen[dt]|"
                   r"sale|sell|sold|worth|salar|wage|tax|fee|how much|charge|bill|sav(?:e|ing)|invest|\bmakes?\b"),
    ),
}  # fmt: skip
"""Words of questions for a quantity, by the first dimension of its unit."""


def has_invented_unit(answer: Form | None, gold: str, question: str) -> bool:
    """Whether an answer gives a unit to a plain count, where the question speaks of no such quantity.

    A count of fixed width (``073``) has none. Without a question the gold answer may have left the unit out.
    """
    amount = answer.form if isinstance(answer, Labelled) else answer
    if not isinstance(amount, Amount) or not (count := normalize_latex(gold)).isdigit():
        return False
    dimension = (("percent", 1),) if amount.percent else amount.unit.dimension if amount.unit is not None else None
    if not dimension or (len(count) > 1 and count.startswith("0")):
        return bool(dimension)
    kinds = {kind for kind, _ in dimension}
    names = [(how, name.casefold().replace("/", " / ").split()) for how, name in _ASKED.findall(question)]
    asked = [(how, unit) for how, words in names if (unit := _parse_unit(words)) is not None]
    same = [unit.factor for _, unit in asked if unit.dimension == dimension]
    if amount.unit is not None and same and amount.unit.factor not in same:
        return True  # 42 hours where minutes are asked for
    if not same and any(how != "in" and not kinds.isdisjoint(dict(unit.dimension or ())) for how, unit in asked):
        return True  # 42 cubic metres where square metres are
    named = map(_find_unit, set(re.findall(r"[a-z]{2,}", question.casefold())) - {"in"})
    is_named = any(not kinds.isdisjoint(dict(unit.dimension or ())) for unit in named if unit is not None)
    return bool(question) and not is_named and _MEASURES.get(dimension[0][0], _PLAIN_MEASURES).search(question) is None


def parse_amount(text: str) -> Amount:
    """Return a number or an expression with its unit or noun. Raises ``UnreadableExpressionError``."""
    if match := _CURRENCY.fullmatch(text):
        code = (match[2] or match[3]).casefold()
        amount = parse_amount(match[1] + match[4])
        if (amount.unit is not None and amount.unit.dimension is not None) or amount.percent:
            raise UnreadableExpressionError("two units")
        kind = {"eur": "euro", "gbp": "sterling", "rs": "rupee"}.get(code, code)
        return Amount(amount.value, Unit(dimension=((kind, 1),)), places=amount.places)
    if match := _PERCENT.search(text):
        bare = _parse_plain(text[: match.start()].strip())
        return Amount(bare.value, percent=True, places=bare.places)
    if match := _DEGREES.search(text):
        if match.start() and not re.search(r"\\(?:sin|cos|tan|cot|sec|csc|cis)(?![a-z])", text):
            bare = _parse_plain(text[: match.start()].strip())
            kind = {"C": "celsius", "F": "fahrenheit"}.get(match[1] or "", "angle")
            return Amount(bare.value, Unit(dimension=((kind, 1),)), places=bare.places)
    return _parse_arc(text) or _parse_compound(text) or _parse_with_suffix(text)


def rounds_to(first: Form | None, second: Form | None) -> bool:
    """Whether the first, a decimal that looks rounded, is what the second rounds to.

    A decimal of two digits looks rounded when it is no multiple of 1/50 or simpler, a longer one when its denominator
    is near to the power of ten: ``3.14`` and ``2.236`` do, ``2.5``, ``0.75`` and ``0.125`` do not. Money never is. The
    second must be more precise: a decimal with more digits, or an exact value that has no finite decimal.
    """
    first = first.form if isinstance(first, Labelled) else first
    second = second.form if isinstance(second, Labelled) else second
    if not isinstance(first, Amount) or not isinstance(second, Amount) or (first.places or 0) < 2:
        return False
    if first.unit != second.unit and first.unit is not None and second.unit is not None:
        return False
    exact = rational_value(first.value)
    if exact is None or first.percent != second.percent or _is_currency(first) or _is_currency(second):
        return False
    places = first.places or 0
    if exact.denominator * (2 if places == 2 else 5) < 10**places or (
        second.places is not None and (second.places <= places or abs(exact) * 10**places < 100)
    ):  # 0.47 has too few digits for a rounded value
        return False
    value = rational_value(second.value)
    if second.places is None and value is not None and 10**12 % value.denominator == 0:
        return False  # a terminating fraction has its own exact decimal
    return rounds_to_decimal(second.value, first.value, places)


def is_same_amount(one: Amount, other: Amount) -> bool:
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


def _parse_plain(text: str) -> Amount:
    decimal = _DECIMAL.fullmatch(text.replace(" ", ""))
    return Amount(parse_expression(text), places=len(decimal[1]) if decimal else None)


def _parse_arc(text: str) -> Amount | None:
    r"""Return the amount of ``45^\\circ 30'``, with minutes and perhaps seconds of arc; ``None`` for other texts."""
    match = _ARC.fullmatch(text)
    if match is None or int(match[2]) > 59 or float(match[3] or 0) >= 60:
        return None
    degrees = Fraction(match[1]) + Fraction(match[2]) / 60 + Fraction(match[3] or 0) / 3600
    return Amount(Number(degrees), Unit(dimension=(("angle", 1),)))


def _parse_compound(text: str) -> Amount | None:
    """Return the amount of ``5 feet 6 inches``, at least two parts of one dimension; ``None`` for other texts."""
    text = strip_text_macros(text)
    parts = _COMPOUND.findall(text)
    if len(parts) < 2 or _COMPOUND.sub("", text).strip():
        return None
    total, dimension = Fraction(0), None
    for number, name in parts:
        suffix = _parse_unit_suffix(name)
        if suffix is None:
            return None
        unit, _ = suffix
        if unit.dimension is None or dimension not in (None, unit.dimension):
            return None
        dimension = unit.dimension
        total += Fraction(number) * unit.factor
    return Amount(Number(total), Unit(dimension=dimension))


def _parse_unit_suffix(text: str) -> tuple[Unit, Fraction | int] | None:
    """Return the unit or noun behind a number, and a factor such as ``million``; ``None`` for other words."""
    text = re.sub(r"\^\s*+\{\s*+(-?\d)\s*+\}", r"^\1", text)
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).replace("{", "").replace("}", "").replace("\\cdot", " ")
    text = re.sub(r"\b(units?)\^[23]", r"\1", re.sub(r"(?<!\s)\s*+\^\s*+", "^", text))
    if not re.fullmatch(r"[\s\w^/\-'.,()\\°*]*", text):
        return None
    words = [word.strip(".,()'") for word in text.replace("/", " / ").replace("*", " ").split()]
    words = [word for word in words if word]
    multiplier: Fraction | int = 1
    while words and words[0].casefold() in _MULTIPLIERS:
        multiplier *= _MULTIPLIERS[words.pop(0).casefold()]
    if not words:
        return Unit(), multiplier
    unit = _parse_unit([word for word in words if word.casefold() not in _ADJECTIVES] or ["total"])
    if unit is None:
        if not is_neutral_phrase(words):
            return None
        unit = Unit(noun=" ".join(words).casefold())
    return unit, multiplier


def _parse_unit(words: list[str]) -> Unit | None:
    factor = Fraction(1)
    dimension: dict[str, int] = {}
    sign, prefix = 1, 1
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        lowered = word.casefold()
        if lowered in ("/", "per"):
            sign = -1
            continue
        if lowered in ("square", "sq", "cubic", "cu"):
            prefix = 2 if lowered.startswith("sq") else 3
            continue
        if position < len(words) and words[position].casefold() in ("squared", "cubed"):
            prefix = 2 if words[position].casefold() == "squared" else 3
            position += 1
        name, _, power = word.partition("^")
        if power.startswith("-") and name[-1] in _DENOMINATOR_LETTERS and _find_unit(name[:-1]) is not None:
            words.insert(position, f"{name[-1]}^{power}")  # ms^-1 is a metre per second, not one over a millisecond
            name, power = name[:-1], ""
        found = _find_unit(name)
        if found is None or not re.fullmatch(r"-?\d?", power):
            return None
        exponent = sign * prefix * int(power or 1)
        prefix = 1
        factor *= found.factor**exponent
        for kind, count in found.dimension or ():
            dimension[kind] = dimension.get(kind, 0) + count * exponent
    kinds = tuple(sorted((kind, power) for kind, power in dimension.items() if power))
    if not words or prefix != 1 or (sign == -1 and not kinds):
        return None
    return Unit(factor, kinds)


def _find_unit(name: str) -> Unit | None:
    table, lowered = _unit_table(), name.casefold()
    if len(name) == 1:
        return table.get(lowered) if name in _ONE_LETTER_UNITS | _ONE_LETTER_UNITS_AS_TEXT else None
    names = (lowered, lowered.removesuffix("s"), lowered.removesuffix("es"))
    return next((table[each] for each in names if len(each) > 1 and each in table), None)


@cache
def _unit_table() -> dict[str, Unit]:
    table: dict[str, Unit] = {}
    for dimension, spellings in _UNITS.items():
        pairs = [(name, symbol or name) for name, _, symbol in (each.partition("=") for each in spellings.split())]
        worth = {name: found.factor for name, symbol in pairs if (found := units.find_unit(symbol)) is not None}
        base = worth.get(pairs[0][0], Fraction(1))  # m^2 is no name, and worth 1
        table |= {name: Unit(factor / base, _parse_dimension(dimension)) for name, factor in worth.items()}
    for dimension, factors in _OTHER_UNITS.items():
        table |= {name: Unit(Fraction(factor), _parse_dimension(dimension)) for name, factor in factors.items()}
    return table


def _parse_dimension(spelling: str) -> Dimension:
    return tuple((kind, int(power or 1)) for kind, _, power in (part.partition("^") for part in spelling.split()))


def _parse_with_suffix(text: str) -> Amount:
    if _QUANTITIES.fullmatch(text) and all(map(_find_unit, re.findall("[a-zA-Z]+", text))):
        raise UnreadableExpressionError("a sum of quantities")
    start = _find_suffix(text)
    if start is None:
        return _parse_plain(text)
    head, words = text[:start].strip(), text[start:]
    for command, word in (("\\usd", "dollar"), ("\\eur", "euro"), ("\\gbp", "gbp")):
        words = words.replace(command, f" {word} ")
    if re.search(r"\d\s*+/$", head):  # "3 / hour"
        head, words = head[:-1].strip(), f"/ {words}"
    if not head:
        raise UnreadableExpressionError("words")
    suffix = _parse_unit_suffix(words)
    if suffix is None:
        raise UnreadableExpressionError(f"'{strip_text_macros(words)[:20]}' behind it")
    unit, multiplier = suffix
    if (
        _FACTORS.fullmatch(words)
        and (term := _LAST_TERM.search(head))
        and (not term[1] or free_symbols(_parse_plain(head).value))
    ):
        return _parse_plain(text)  # in kx + 2mg are masses, in 2 + 3mg milligrams
    amount = _parse_plain(head)
    value: Node = amount.value
    if free_symbols(value) and len(words) == 1:
        return _parse_plain(text)  # h is a height behind other letters, and an hour behind a number
    if free_symbols(value) and unit.dimension is None:
        raise UnreadableExpressionError("words behind a formula")
    if multiplier == 1:
        return Amount(value, unit, places=amount.places)
    return Amount(Operation("*", (value, Number(Fraction(multiplier)))), unit)


def _find_suffix(text: str) -> int | None:
    for match in _WORD.finditer(text):
        token = match[0]
        if match[1] is not None:
            if token in _ONE_LETTER_UNITS:
                return match.start()
            continue
        if token.startswith("\\"):
            return match.start()
        if re.fullmatch("d[a-z]", token) and re.search(r"\\i+nt(?![a-z])", text):
            continue  # the differential of an integral
        if token in FUNCTIONS or token in GREEK:
            continue
        if re.search(r"\\(?:mathbb|begin|end|overline)\s*+\{$", text[: match.start()]):
            continue
        if (
            len(token) <= 3
            and token.isascii()
            and (_find_unit(token) is None or _has_more_formula(text, match))
            and (not re.search(r"[\d)}]\s+$", text[: match.start()]) or _has_more_formula(text, match, ""))
        ):
            continue  # a product of variables
        return match.start()
    return None


def _has_more_formula(text: str, match: re.Match[str], signs: str = "+-") -> bool:
    r"""Whether a formula goes on behind a word: ``2mg + v``, ``\frac{2mg}{3}``. Behind a unit nothing does."""
    depth = 0
    for sign in text[match.end() :]:
        depth += {"{": 1, "(": 1, "}": -1, ")": -1}.get(sign, 0)
        if depth < 0 or (depth == 0 and sign in signs):
            return True
    return False


def _is_currency(amount: Amount) -> bool:
    return amount.unit is not None and amount.unit.dimension in ((("usd", 1),), (("euro", 1),), (("sterling", 1),))


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
