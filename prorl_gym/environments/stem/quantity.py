"""Reads quantities (a number, its unit and the words around it) and compares two. Runs in a worker process.

An answer is right when one of its readings equals one of the gold answer's, converted to the unit of the gold answer. A
missing unit is a mistake, as in any examination: ``5`` is not ``5 N`` unless the row makes the unit optional. A gold
answer without a unit is a pure number, or a number in the unit that the question requests.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from prorl_gym.environments.answers.number_words import ORDINALS, number_from_words, ordinal_suffix
from prorl_gym.environments.stem import quantity_words
from prorl_gym.environments.stem.number_parser import NumberParser, Token, UnreadableQuantityError, tokenize
from prorl_gym.environments.stem.text_normalization import ELEMENT, strip_fonts
from prorl_gym.environments.stem.unit_parser import CONVENTIONS, Convention, UnitProduct, parse_units, unit_named

MAX_SPREAD = 0.25
"""Largest uncertainty of an answer, relative to its number; with a larger one the answer is a range."""
_ROUNDING_ERROR = 1e-9
_SAME_VALUE = 0.02
"""Largest relative difference of two spellings of one answer (``5 km = 3.1 mi``)."""
_NON_CONVERTIBLE = {"level", "points"}
"""Kinds to which no plain number or per cent converts."""
_ZERO_POINT_SLACK = 0.2
"""Kelvins between two spellings of a temperature, since 273 and 273.15 are both in use."""
_MAX_QUESTION = 4000
"""Characters at the end of a question in which its request is searched."""
_MAX_LABEL_WORDS = 6
_NEUTRAL = quantity_words.NEUTRAL_WORDS | quantity_words.DIRECTIONS
"""Words after a quantity that leave it unchanged."""
_MIXED_UNITS = frozenset(
    "year month week day hour minute second degree arcminute arcsecond mile yard foot inch pound ounce".split()
)
"""Units that may follow each other, larger before smaller: ``2 h 30 min``."""

# Of questions.
_REQUESTED_UNIT = re.compile(
    r"(?:\b(?:in|unit:?|units:?|units? of|[Hh]ow many)\s+|[(\[]\s*+(?:in\s+)?)((?:[^\s?,;()\[\]]+ ?){1,4})"
)
_REQUEST = re.compile(r"\b(?:what|how|find|calculate|determine|compute|estimate|give|by)\b[^.?!]*", re.IGNORECASE)
_PERCENT = re.compile(r"\bpercent(?:age)?\b|\bper cent\b", re.IGNORECASE)
_CHANGE = r"(?:difference|change|rise|drop|increase|decrease|fall|elevation|depression|lowering)"
_TEMPERATURE = re.compile(
    rf"(?P<difference>\btemperature[- ]{_CHANGE}|\b{_CHANGE}s?\s+(?:in|of)\s+(?:the\s+)?(?:\w+\s+){{0,2}}"
    r"(?:temperature|(?:freezing|boiling|melting)[- ]point)|\b(?:freezing|boiling|melting)[- ]point[- ]"
    rf"{_CHANGE}|\bhow\s+many\s+(?:degrees|kelvins?)\b|\bby\s+(?:how\s+much|what\s+amount)\b|\bhow\s+much\s++(?=[^.?!]*"
    r"(?:temperature|hotter|warmer|colder|cooler))|\\?Delta\s*+T\b|ΔT)"
    r"|\btemperature\b|\b(?:freezing|boiling|melting)[- ]point\b",
    re.IGNORECASE,
)

# Of answers.
_LEAD = re.compile(
    r"^\s*+(?:(?:the\s+)?(?:final\s+)?answer\s*+(?:is|:)|it\s+is|is|about|approximately|approx\.?|roughly|around|nearly"
    r"|exactly|ca\.|circa|≈|~|=|\\approx|\\sim(?:eq)?|:|p(?:H|OH|K_?\{?[abw]?\}?)(?:\s*+:)?\s+(?=[-+\d]))\s*+",
    re.IGNORECASE,
)
_JOINING = re.compile(
    r"[,;]|\b(?:or|and|not|never|either|neither|if|unless|but|maybe|perhaps|wrong|instead)\b|\\(?:neq?|lor|vee|land)\b",
    re.IGNORECASE,
)
"""Signs and words that make the part of a chain more than another spelling of one value."""
_DIMENSIONLESS = re.compile(r"\(?\b(?:dimensionless|unitless|no units?)\b\)?", re.IGNORECASE)
_BRACKETED_UNIT = re.compile(r"(?:\\[,;: ]|(?<!\s))\s*+\[\s*+([^\[\],;\d.][^\[\],;.]*)\]$")
_BRACKETED_WORDS = re.compile(r"\(\s*+([A-Za-z][A-Za-z ]*[A-Za-z])\s*+\)$")
_SUBJECT = re.compile(
    r"^((?:[A-Za-z]+\s+){0,5}[A-Za-z]+)(?:\s+(?:is|was|are|equals|of)(?:\s+(?:about|approximately|roughly))?\s+|\s*+:\s*+)"
)
"""``The net force is`` before a quantity."""
_SUBJECT_FILLERS = frozenset("the a an of in by for and".split())
_ORDINAL = re.compile(r"^(?:the\s+)?(\d+)\s*+-?\s*+\^?\s*+\{?\s*+(st|nd|rd|th)\s*+\}?(?![A-Za-z])", re.IGNORECASE)
_ORDINAL_WORD = re.compile(rf"^(?:the\s+)?({'|'.join(ORDINALS)})(?![A-Za-z\-])", re.IGNORECASE)
_FIRST_WORDS = re.compile(r"^(?:[A-Za-z]+[ -]){0,6}[A-Za-z]+")
_MINUS_WORD = re.compile(r"^(?:minus|negative)\s+(?=[\d.])", re.IGNORECASE)
_LABEL_WORD = re.compile(r"[A-Za-z]{2,}")
_FORMULA = re.compile(rf"(?:{ELEMENT}\d*)+")
_SCRIPT_SIGNS = re.compile(r"[_{}^]")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with its unit."""

    value: float
    unit: UnitProduct
    label: str = ""
    """Words that are no unit: a counted thing or a direction."""
    spread: float = 0.0
    """Uncertainty, relative to the number."""


def grade(body: Mapping[str, Any]) -> dict[str, Any]:
    """Compare an answer with the gold one; the entry of the worker.

    ``body`` has ``gold``, ``answer``, ``question``, ``tolerance`` (relative), ``absolute_tolerance`` (in the gold unit)
    and ``unit_optional``. Returns ``why`` and ``verdict``: ``equal``, ``different``, ``unread`` (the answer is no
    quantity) or ``bad_gold``.
    """
    question = body["question"]
    try:
        golds = parse_quantity(body["gold"])
    except UnreadableQuantityError as error:
        return {"verdict": "bad_gold", "why": str(error)}
    if quantity_words.names_other_quantity(*map(strip_fonts, (body["answer"], body["gold"], question))):
        return {"verdict": "different", "why": "another quantity is named"}
    gold_words = frozenset(quantity_words.fold_word(word) for gold in golds for word in gold.label.split())
    try:
        answers = parse_quantity(body["answer"], quantity_words.counted_words(question) | gold_words)
    except UnreadableQuantityError as error:
        return {"verdict": "unread", "why": f"the answer is no single quantity: {error}"}
    requested = None if golds[0].unit.is_given else requested_unit(question)
    requests = _REQUEST.findall(question[-_MAX_QUESTION:])
    temperature = _TEMPERATURE.search(requests[-1]) if requests else None
    if temperature is not None and temperature["difference"] is not None:  # no zero point: 25 °C become 25 K
        golds, answers = (
            [replace(each, unit=replace(each.unit, zero_point=0.0)) for each in readings]
            for readings in (golds, answers)
        )
        requested = replace(requested, zero_point=0.0) if requested else None
    why = ""
    for gold, answer in product(golds, answers):
        difference = _find_difference(gold, answer, requested, body)
        if not difference:
            return {"verdict": "equal", "why": ""}
        why = why or difference
    return {"verdict": "different", "why": why}


def parse_quantity(text: str, known: frozenset[str] | None = None) -> list[Quantity]:
    """Return the readings of a quantity; several if the notation is ambiguous (``J/mol K``, ``ms^{-1}``).

    Of ``F = ma = 6 N`` the last part counts, and of ``5 km (5000 m)`` the first; the others must not contradict it.
    ``known`` has folded words that may surround a quantity, besides neutral ones; ``None``: any. Raises
    ``UnreadableQuantityError``: it is no single quantity.
    """
    main, bracketed = _split_bracketed(text)
    if bracketed and (other := _try_parse(bracketed, known)):
        readings = parse_quantity(main, known)
        if not _agree(readings, other):
            raise UnreadableQuantityError("two values")
        return readings
    parts = [part for part in quantity_words.EQUALS.split(text) if part.strip()]
    if not parts:
        raise UnreadableQuantityError("no number")
    readings = _parse_readings(parts[-1], known)
    if any(_contradicts(part, readings, parts[0].strip(), known) for part in parts[:-1]):
        raise UnreadableQuantityError("two values")
    return readings


def requested_unit(question: str) -> UnitProduct | None:
    """Return the unit that a question requests for the answer, the last one if there are several."""
    requested: UnitProduct | None = unit_named("%") if _PERCENT.search(question) else None
    for match in _REQUESTED_UNIT.finditer(question[-_MAX_QUESTION:]):
        words = match[1].rstrip().rstrip(".?:$").split(" ")
        for count in range(len(words), 0, -1):
            unit = unit_named(" ".join(words[:count]).rstrip(".?:$"))
            if unit is not None:
                requested = unit
                break
    return requested


def _find_difference(gold: Quantity, answer: Quantity, requested: UnitProduct | None, rules: Mapping[str, Any]) -> str:
    """Return why an answer is wrong; empty if it is right."""
    if answer.label and gold.label and answer.label != gold.label:
        return "something else is counted"
    if answer.spread > max(MAX_SPREAD, gold.spread):
        return "the uncertainty leaves the value open"
    unit = gold.unit if gold.unit.is_given else requested or gold.unit
    value, slack = answer.value, 0.0
    if not answer.unit.is_given:
        is_ratio = gold.unit.is_given and not gold.unit.dimension and not gold.unit.kinds
        if is_ratio and _is_close(value / unit.factor, gold.value, rules):
            return ""  # 0.125 is 12.5 %
        if gold.unit.is_given and not rules["unit_optional"]:
            return "the unit is missing"
    elif unit.is_given or answer.unit.name != "degree":  # 30° is right where the gold answer is 30
        ratio = _kind_ratio(answer.unit, unit) if answer.unit.dimension == unit.dimension else None
        if ratio is None:
            return "the unit is of another kind"
        value = _in_base_units(answer) * ratio / unit.factor - unit.zero_point
        if unit.zero_point != answer.unit.zero_point:
            slack = _ZERO_POINT_SLACK * unit.zero_point / 273.15
    return "" if _is_close(value, gold.value, rules, slack) else "the value differs"


def _is_close(value: float, gold: float, rules: Mapping[str, Any], slack: float = 0.0) -> bool:
    allowed = max(rules["tolerance"] * abs(gold), rules["absolute_tolerance"], slack)
    return abs(value - gold) <= allowed + _ROUNDING_ERROR * max(abs(gold), abs(value) if allowed else 0.0)


def _kind_ratio(answer: UnitProduct, unit: UnitProduct) -> float | None:
    """Return the factor between units of equal dimension but different kinds; ``None`` if they do not convert."""
    first, second = dict(answer.kinds), dict(unit.kinds)
    if first == second:
        return 1.0
    if not first or not second:
        return None if _NON_CONVERTIBLE & {*first, *second} else 1.0
    angles = {"angle", "turn"}
    if set(first) <= angles and set(second) <= angles and sum(first.values()) == sum(second.values()):
        return 1.0
    if set(first) == {"turn"} and set(second) == {"cycle"}:
        return math.tau ** -first["turn"]
    if set(first) == {"cycle"} and set(second) == {"turn"}:
        return math.tau ** first["cycle"]
    return None


def _in_base_units(quantity: Quantity) -> float:
    return (quantity.value + quantity.unit.zero_point) * quantity.unit.factor


def _split_bracketed(text: str) -> tuple[str, str]:
    """Split ``5 km (5000 m)`` into both quantities; the second is empty when there is none."""
    text = text.strip()
    main, opening, bracketed = text.removesuffix(")").rpartition("(")
    is_bracketed = opening and main.strip() and text.endswith(")") and ")" not in bracketed
    is_quantity = any(map(str.isdigit, bracketed)) and any(sign.isalpha() or sign in "%°" for sign in bracketed)
    return (main, bracketed) if is_bracketed and is_quantity and any(map(str.isdigit, main)) else (text, "")


def _try_parse(text: str, known: frozenset[str] | None) -> list[Quantity]:
    try:
        return _parse_readings(text, known)
    except UnreadableQuantityError:
        return []


def _parse_readings(text: str, known: frozenset[str] | None) -> list[Quantity]:
    tokens = tokenize(_number_in_digits(_strip_lead(text, known)))
    readings: list[Quantity] = []
    for convention in CONVENTIONS:
        reading = _parse_tokens(tokens, convention, known)
        if reading not in readings:
            readings.append(reading)
    return readings


def _number_in_digits(text: str) -> str:
    """Replace a number in words, or an ordinal, at the beginning of a text by digits."""
    text = _MINUS_WORD.sub("-", text)
    if (match := _ORDINAL.match(text)) is not None and match[2].casefold() == ordinal_suffix(int(match[1])):
        return f"{match[1]} {text[match.end() :]}"
    if (match := _ORDINAL_WORD.match(text)) is not None:
        return f"{ORDINALS.index(match[1].casefold()) + 1} {text[match.end() :]}"
    if (match := _FIRST_WORDS.match(text)) is not None:
        words = re.split("[ -]", match[0])
        if (fraction := _fraction_in_digits(words)) is not None:
            return fraction + text[len(" ".join(words[:2])) :]
        for count in range(len(words), 0, -1):
            if (number := number_from_words(" ".join(words[:count]).casefold())) is not None:
                return number + text[len(" ".join(words[:count])) :]
    return text


def _fraction_in_digits(words: Sequence[str]) -> str | None:
    """Return ``one sixth`` or ``five eighths`` as a fraction."""
    parts = [word.casefold() for word in words[:2]]
    above = number_from_words(parts[0])
    if len(parts) < 2 or above is None or not above.isdigit():
        return None
    below = parts[1].removesuffix("s") if above != "1" else parts[1]
    return f"({above}/{ORDINALS.index(below) + 1})" if below in ORDINALS[2:] else None


def _strip_lead(text: str, known: frozenset[str] | None) -> str:
    """Return a quantity without words before it and without brackets around it."""
    text = strip_fonts(text)
    text = _BRACKETED_UNIT.sub(r" \1", _DIMENSIONLESS.sub("", text).strip().rstrip("."))
    while text.startswith("{") and text.find("}") == len(text) - 1:
        text = text[1:-1].strip()
    if (words := _BRACKETED_WORDS.search(text)) is not None and unit_named(words[1]) is None:
        text = f"{text[: words.start()]} {words[1]}"
    if (subject := _SUBJECT.match(text)) is not None:
        named = quantity_words.folded_words(subject[1]) - _SUBJECT_FILLERS
        is_known = named <= quantity_words.QUANTITIES | (known or frozenset())
        if is_known and quantity_words.NEVER_NEUTRAL.isdisjoint(named):
            text = text[subject.end() :]
    while (match := _LEAD.match(text)) is not None and match.end():
        text = text[match.end() :]
    return text


def _parse_tokens(tokens: Sequence[Token], convention: Convention, known: frozenset[str] | None) -> Quantity:
    parser = NumberParser(tokens)
    value = parser.parse_magnitude()
    spread = parser.spread
    unit, length = parse_units(tokens[parser.position :], convention)
    rest = tokens[parser.position + length :]
    if rest and rest[0].text == "±":
        parser = NumberParser(rest[1:])
        error = parser.parse_magnitude()
        error_unit, length = parse_units(rest[1 + parser.position :], convention)
        unit = unit if unit.is_given else error_unit
        error *= error_unit.factor / unit.factor if error_unit.is_given else 1.0
        spread = max(spread, abs(error / value) if value else 0.0)
        rest = rest[1 + parser.position + length :]
    else:
        added, rest = _parse_smaller_parts(rest, unit, convention)
        value += added if value >= 0 else -added
    return Quantity(value, unit, _parse_label(rest, unit, known), spread)


def _parse_smaller_parts(
    rest: Sequence[Token], unit: UnitProduct, convention: Convention
) -> tuple[float, Sequence[Token]]:
    """Return what ``30 min`` adds to the hours before it, and the tokens after it."""
    added, last = 0.0, unit
    while rest and last.name in _MIXED_UNITS:
        joint = rest[0].text in ("and", ",")
        parser = NumberParser(rest[joint:])
        if (number := parser.peek()) is None or number.kind != "number":
            break
        value = parser.parse_magnitude()
        smaller, length = parse_units(rest[joint + parser.position :], convention)
        is_smaller_unit = (
            smaller.name in _MIXED_UNITS and smaller.dimension == last.dimension and smaller.factor < last.factor
        )
        if not is_smaller_unit or value * smaller.factor >= last.factor:
            break
        added += value * smaller.factor / unit.factor
        last, rest = smaller, rest[joint + parser.position + length :]
    return added, rest


def _parse_label(rest: Sequence[Token], unit: UnitProduct, known: frozenset[str] | None) -> str:
    """Return the words after a quantity, without neutral ones; they must not change it."""
    words: list[str] = []
    for number, token in enumerate(rest):
        text = _SCRIPT_SIGNS.sub("", token.text)
        if token.is_adjacent and number:  # adjacent tokens are one word, as in O2
            words[-1] += text
        else:
            words.append(text)
    if not words:
        return ""
    if rest[0].is_adjacent and not unit.is_given and rest[0].text != "(":
        raise UnreadableQuantityError("letters close to a number")  # 2mgR
    names_substance = words[0] == "of" and unit.is_given
    folded = [quantity_words.fold_word(word) for word in words if word not in quantity_words.FILLERS]
    is_label = (
        len(words) <= _MAX_LABEL_WORDS
        and words[-1] not in quantity_words.FILLERS
        and quantity_words.NEVER_NEUTRAL.isdisjoint(folded)
        and all(_LABEL_WORD.fullmatch(word) or _FORMULA.fullmatch(word) or word in (known or ()) for word in folded)
        and (known is None or names_substance or set(folded) <= known | _NEUTRAL)
    )
    if not is_label:
        raise UnreadableQuantityError("more than a quantity")
    return " ".join(word for word in folded if word not in quantity_words.NEUTRAL_WORDS)


def _agree(readings: Sequence[Quantity], others: Sequence[Quantity]) -> bool:
    """Whether any two readings have about the same value."""
    for one, other in product(readings, others):
        if not (one.unit.is_given and other.unit.is_given):
            first, second = one.value, other.value
        elif one.unit.dimension != other.unit.dimension:
            continue
        else:
            first, second = _in_base_units(one), _in_base_units(other)
        if abs(first - second) <= _SAME_VALUE * max(abs(first), abs(second)):
            return True
    return False


def _contradicts(part: str, last: Sequence[Quantity], name: str, known: frozenset[str] | None) -> bool:
    """Whether an earlier part of a chain has another value than the last, or begins another chain.

    ``name`` is the chain's first part; see ``parse_quantity`` about ``known``.
    """
    if _JOINING.search(part):
        return True
    if not any(map(str.isdigit, part)):
        return False  # a name: e = 1.6e-19 C
    if readings := _try_parse(part, known):
        return not _agree(last, readings)
    if part.strip() != name and part.rstrip().endswith(f" {name}"):
        return True  # x = 5 x = 6
    first = _parse_before_name(part, known)
    if first is None:
        return False
    comparable = [each for each in last if each.unit.is_given and each.unit.dimension == first.unit.dimension]
    return bool(comparable) and not _agree(comparable, [first])


def _parse_before_name(part: str, known: frozenset[str] | None) -> Quantity | None:
    """Return the quantity at the beginning of a text if a name follows, not the rest of a computation."""
    try:
        tokens = tokenize(_strip_lead(part, known))
        parser = NumberParser(tokens)
        value = parser.parse_magnitude()
        unit, length = parse_units(tokens[parser.position :], Convention())
    except UnreadableQuantityError:
        return None
    rest = tokens[parser.position + length :]
    return Quantity(value, unit) if rest and rest[0].kind == "name" else None
