"""Reading a quantity: a number, a unit, and perhaps what was counted (``12 electrons``, ``5 m/s downward``)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from prorl_gym.environments.math import words
from prorl_gym.environments.stem import labels
from prorl_gym.environments.stem.elements import ELEMENT
from prorl_gym.environments.stem.magnitude import Reader
from prorl_gym.environments.stem.spelling import unfonted
from prorl_gym.environments.stem.tokens import Token, Unreadable, tokens
from prorl_gym.environments.stem.unit_text import CONVENTIONS, Convention, Measure, measure, unit_called

_LEAD = re.compile(
    r"^\s*(?:(?:the\s+)?(?:final\s+)?answer\s*(?:is|:)|it\s+is|is|about|approximately|approx\.?|roughly|around|nearly"
    r"|exactly|ca\.|circa|≈|~|=|\\approx|\\sim(?:eq)?|:|p(?:H|OH|K_?\{?[abw]?\}?)\s*:?\s+(?=[-+\d]))\s*",
    re.IGNORECASE,
)
_JOINS = re.compile(
    r"[,;]|\b(?:or|and|not|never|either|neither|if|unless|but|maybe|perhaps|wrong|instead)\b|\\(?:neq?|lor|vee|land)\b",
    re.IGNORECASE,
)
_ASKED = re.compile(
    r"(?:\b(?:in|unit:?|units:?|units? of|[Hh]ow many)\s+|[(\[]\s*(?:in\s+)?)((?:[^\s?,;()\[\]]+ ?){1,4})"
)
_CHANGE = r"(?:difference|change|rise|drop|increase|decrease|fall|elevation|depression|lowering)"
_TEMPERATURE_ASKED = re.compile(
    rf"(?P<difference>\btemperature[- ]{_CHANGE}|\b{_CHANGE}s?\s+(?:in|of)\s+(?:the\s+)?(?:\w+\s+){{0,2}}"
    r"(?:temperature|(?:freezing|boiling|melting)[- ]point)|\b(?:freezing|boiling|melting)[- ]point[- ]"
    rf"{_CHANGE}|\bhow\s+many\s+(?:degrees|kelvins?)\b|\bby\s+(?:how\s+much|what\s+amount)\b|\bhow\s+much\s+(?=[^.?!]*"
    r"(?:temperature|hotter|warmer|colder|cooler))|\\?Delta\s*T\b|ΔT)"
    r"|\btemperature\b|\b(?:freezing|boiling|melting)[- ]point\b",
    re.IGNORECASE,
)
_ASKING = re.compile(r"\b(?:what|how|find|calculate|determine|compute|estimate|give|by)\b[^.?!]*", re.IGNORECASE)
_PERCENT = re.compile(r"\bpercent(?:age)?\b|\bper cent\b", re.IGNORECASE)
_PURE = re.compile(r"\(?\b(?:dimensionless|unitless|no units?)\b\)?", re.IGNORECASE)
_BRACKETED_UNIT = re.compile(r"(?:\\[,;: ])?\s*\[\s*([^\[\],;\d.][^\[\],;.]*)\]$")
_SAID_TO_BE = re.compile(
    r"^((?:[A-Za-z]+\s+){0,5}[A-Za-z]+)(?:\s+(?:is|was|are|equals|of)(?:\s+(?:about|approximately|roughly))?\s+|\s*:\s*)"
)
_SAID_WORDS = frozenset("the a an of in by for and".split())
_WORDS_ASIDE = re.compile(r"\(\s*([A-Za-z][A-Za-z ]*[A-Za-z])\s*\)$")
_ORDINAL = re.compile(r"^(?:the\s+)?(\d+)\s*-?\s*\^?\s*\{?\s*(st|nd|rd|th)\s*\}?(?![A-Za-z])", re.IGNORECASE)
_ORDINALS: Sequence[str] = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth "
    "sixteenth seventeenth eighteenth nineteenth twentieth"
).split()
_ORDINAL_WORD = re.compile(rf"^(?:the\s+)?({'|'.join(_ORDINALS)})(?![A-Za-z\-])", re.IGNORECASE)
_FIRST_WORDS = re.compile(r"^(?:[A-Za-z]+[ -]){0,6}[A-Za-z]+")
_MINUS = re.compile(r"^(?:minus|negative)\s+(?=[\d.])", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z]{2,}")
_FORMULA = re.compile(rf"(?:{ELEMENT}\d*)+")
_FLAT = re.compile(r"[_{}^]")
_MIXED_UNITS = frozenset(
    "year month week day hour minute second degree arcminute arcsecond mile yard foot inch pound ounce".split()
)
"""Units of which larger and smaller ones stand side by side: ``2 h 30 min``."""
_LONGEST_LABEL = 6
_SAME = 0.02
"""How far apart, relatively, two spellings of one answer may be (``5 km = 3.1 mi``)."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with its unit."""

    value: float
    unit: Measure
    label: str = ""
    """What was counted, or a direction: words that are no unit."""
    spread: float = 0.0
    """Uncertainty, relative to the number."""


def read(text: str, known: frozenset[str] | None = None) -> list[Quantity]:
    """Return the readings of a quantity; several where authors mean different things (``J/mol K``, ``ms^{-1}``).

    Of ``F = ma = 6 N`` the last part counts, and of ``5 km (5000 m)`` the first; the others must not contradict it.

    Args:
        text: what is read.
        known: words, folded, that may stand around a quantity beside those that say nothing; ``None``: any.

    Raises:
        Unreadable: it is no single quantity.
    """
    before, aside = _split_aside(text)
    if aside and (other := _attempt(aside, known)):
        main = read(before, known)
        if not _agree(main, other):
            raise Unreadable("two values")
        return main
    parts = [part for part in labels.EQUALS.split(text) if part.strip()]
    if not parts:
        raise Unreadable("no number")
    last = _read(parts[-1], known)
    if any(_contradicts(part, last, parts[0].strip(), known) for part in parts[:-1]):
        raise Unreadable("two values")
    return last


def _contradicts(part: str, last: Sequence[Quantity], name: str, known: frozenset[str] | None) -> bool:
    """Whether an earlier part of a chain names another value than the last, or begins another chain."""
    if _JOINS.search(part):
        return True
    if not any(map(str.isdigit, part)):
        return False  # a name: e = 1.6e-19 C
    if whole := _attempt(part, known):
        return not _agree(last, whole)
    if part.strip() != name and part.rstrip().endswith(f" {name}"):
        return True  # x = 5 x = 6
    beginning = _beginning(part, known)
    alike = [one for one in last if beginning and one.unit.given and one.unit.dimension == beginning.unit.dimension]
    return bool(alike) and beginning is not None and not _agree(alike, [beginning])


def _beginning(part: str, known: frozenset[str] | None) -> Quantity | None:
    """Return the quantity with which a text begins when a name follows, not a computation that goes on."""
    try:
        found = tokens(_without_lead(part, known))
        reader = Reader(found)
        value = reader.magnitude()
        unit, length = measure(found[reader.place :], Convention())
    except Unreadable:
        return None
    rest = found[reader.place + length :]
    return Quantity(value, unit) if rest and rest[0].kind == "name" else None


def asked_unit(question: str) -> Measure | None:
    """Return the unit in which a question asks for the answer, the last one that it names; ``None`` for none."""
    asked: Measure | None = unit_called("%") if _PERCENT.search(question) else None
    for match in _ASKED.finditer(question[-4000:]):
        words = match[1].rstrip().rstrip(".?:$").split(" ")
        for count in range(len(words), 0, -1):
            found = unit_called(" ".join(words[:count]).rstrip(".?:$"))
            if found is not None:
                asked = found
                break
    return asked


def asks_difference(question: str) -> bool:
    """Whether a question asks for a difference of temperatures, which has no zero point."""
    asking = _ASKING.findall(question[-4000:])
    found = _TEMPERATURE_ASKED.search(asking[-1]) if asking else None
    return found is not None and found["difference"] is not None


def _split_aside(text: str) -> tuple[str, str]:
    """Split ``5 km (5000 m)`` into both quantities; the second is empty when there is none."""
    text = text.strip()
    before, opening, aside = text.removesuffix(")").rpartition("(")
    is_quantity = any(map(str.isdigit, aside)) and any(letter.isalpha() or letter in "%°" for letter in aside)
    whole = opening and before.strip() and text.endswith(")") and ")" not in aside
    return (before, aside) if whole and is_quantity and any(map(str.isdigit, before)) else (text, "")


def _attempt(text: str, known: frozenset[str] | None) -> list[Quantity]:
    try:
        return _read(text, known)
    except Unreadable:
        return []


def _read(text: str, known: frozenset[str] | None) -> list[Quantity]:
    found = tokens(_in_digits(_without_lead(text, known)))
    readings: list[Quantity] = []
    for convention in CONVENTIONS:
        reading = _reading(found, convention, known)
        if reading not in readings:
            readings.append(reading)
    return readings


def _without_lead(text: str, known: frozenset[str] | None) -> str:
    """Return a quantity without what leads up to it, and with its brackets taken off."""
    text = unfonted(text)
    text = _BRACKETED_UNIT.sub(r" \1", _PURE.sub("", text).strip().rstrip("."))
    while text.startswith("{") and text.find("}") == len(text) - 1:
        text = text[1:-1].strip()
    if (aside := _WORDS_ASIDE.search(text)) is not None and unit_called(aside[1]) is None:
        text = f"{text[: aside.start()]} {aside[1]}"
    if (said := _SAID_TO_BE.match(text)) is not None and _names_what_is_asked(said[1], known):
        text = text[said.end() :]
    while (match := _LEAD.match(text)) is not None and match.end():
        text = text[match.end() :]
    return text


def _names_what_is_asked(said: str, known: frozenset[str] | None) -> bool:
    named = labels.words_of(said) - _SAID_WORDS
    return named <= labels.QUANTITIES | (known or frozenset()) and all(map(labels.may_be_neutral, named))


def _in_digits(text: str) -> str:
    """Return a text that begins with a number in words, or with an ordinal one, with digits instead."""
    text = _MINUS.sub("-", text)
    if (found := _ORDINAL.match(text)) is not None and found[2].casefold() == _ending(int(found[1])):
        return f"{found[1]} {text[found.end() :]}"
    if (found := _ORDINAL_WORD.match(text)) is not None:
        return f"{_ORDINALS.index(found[1].casefold()) + 1} {text[found.end() :]}"
    if (found := _FIRST_WORDS.match(text)) is not None:
        spoken = re.split("[ -]", found[0])
        if (share := _share(spoken)) is not None:
            return share + text[len(" ".join(spoken[:2])) :]
        for count in range(len(spoken), 0, -1):
            if (number := words.number(" ".join(spoken[:count]).casefold())) is not None:
                return number + text[len(" ".join(spoken[:count])) :]
    return text


def _share(spoken: Sequence[str]) -> str | None:
    """Return ``one sixth`` or ``five eighths`` as a fraction."""
    parts = [word.casefold() for word in spoken[:2]]
    above = words.number(parts[0])
    if len(parts) < 2 or above is None or not above.isdigit():
        return None
    below = parts[1].removesuffix("s") if above != "1" else parts[1]
    return f"({above}/{_ORDINALS.index(below) + 1})" if below in _ORDINALS[2:] else None


def _ending(number: int) -> str:
    return "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")


def _reading(found: Sequence[Token], convention: Convention, known: frozenset[str] | None) -> Quantity:
    reader = Reader(found)
    value = reader.magnitude()
    spread = reader.spread
    unit, length = measure(found[reader.place :], convention)
    rest = found[reader.place + length :]
    if rest and rest[0].text == "±":
        uncertainty = Reader(rest[1:])
        error = uncertainty.magnitude()
        again, length = measure(rest[1 + uncertainty.place :], convention)
        unit = unit if unit.given else again
        error *= again.factor / unit.factor if again.given else 1.0
        spread = max(spread, abs(error / value) if value else 0.0)
        rest = rest[1 + uncertainty.place + length :]
    else:
        more, rest = _smaller_parts(rest, unit, convention)
        value += more if value >= 0 else -more
    return Quantity(value, unit, _label(rest, unit, known), spread)


def _smaller_parts(rest: Sequence[Token], unit: Measure, convention: Convention) -> tuple[float, Sequence[Token]]:
    """Return what ``30 min`` adds to the hours before it, in hours, and what is left behind it."""
    added, last = 0.0, unit
    while rest and last.name in _MIXED_UNITS:
        joint = rest[0].text in ("and", ",")
        reader = Reader(rest[joint:])
        if (number := reader.peek()) is None or number.kind != "number":
            break
        value = reader.magnitude()
        smaller, length = measure(rest[joint + reader.place :], convention)
        smaller_kind = smaller.name in _MIXED_UNITS and smaller.dimension == last.dimension
        if not smaller_kind or smaller.factor >= last.factor or value * smaller.factor >= last.factor:
            break
        added += value * smaller.factor / unit.factor
        last, rest = smaller, rest[joint + reader.place + length :]
    return added, rest


def _label(rest: Sequence[Token], unit: Measure, known: frozenset[str] | None) -> str:
    """Return the words behind a quantity, without those that tell nothing apart.

    Raises:
        Unreadable: they are no words, or may change what the quantity is.
    """
    said = [_FLAT.sub("", word) for word in _joined(rest)]
    if not said:
        return ""
    if rest[0].glued and not unit.given and rest[0].text != "(":
        raise Unreadable("letters close to a number")  # 2mgR
    of_a_substance = said[0] == "of" and unit.given
    plain = [labels.folded(word) for word in said if word not in labels.FILLERS]
    if len(said) > _LONGEST_LABEL or said[-1] in labels.FILLERS or not all(map(labels.may_be_neutral, plain)):
        raise Unreadable("more than a quantity")
    if not all(_WORD.fullmatch(word) or _FORMULA.fullmatch(word) or (known and word in known) for word in plain):
        raise Unreadable("more than a quantity")
    if known is not None and not of_a_substance and not labels.all_neutral(plain, known):
        raise Unreadable("more than a quantity")
    return " ".join(word for word in plain if word not in labels.SILENT)


def _joined(rest: Sequence[Token]) -> list[str]:
    """Return the words of tokens, with what stands close to them: ``O2`` is one."""
    said: list[str] = []
    for token in rest:
        if token.glued and said and token is not rest[0]:
            said[-1] += token.text
        else:
            said.append(token.text)
    return said


def _agree(readings: Sequence[Quantity], others: Sequence[Quantity]) -> bool:
    return any(_alike(one, other) for one in readings for other in others)


def _alike(one: Quantity, other: Quantity) -> bool:
    if not (one.unit.given and other.unit.given):
        first, second = one.value, other.value
    elif one.unit.dimension != other.unit.dimension:
        return False
    else:
        first = (one.value + one.unit.zero) * one.unit.factor
        second = (other.value + other.unit.zero) * other.unit.factor
    return abs(first - second) <= _SAME * max(abs(first), abs(second))
