"""Units behind a number: which are the same kind, and what they are worth.

A unit on one side only does not count; two of a kind are converted. What is no unit in this table is a noun
(``12 ways``), and nouns do not count either (``vocabulary``).
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from prorl_gym.environments.math.vocabulary import FRACTIONS, is_neutral

Dimension = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """A product of powers of units. ``dimension`` is ``None`` for a noun."""

    factor: Fraction = Fraction(1)
    dimension: Dimension | None = None
    noun: str = ""


_TABLE: dict[str, tuple[Fraction, str, int]] = {}


def _add(kind: str, power: int = 1, /, **factors: str) -> None:
    for names, factor in factors.items():
        for name in names.split("__"):
            _TABLE[name] = (Fraction(factor), kind, power)


_add("length", m__meter__metre="1", cm__centimeter__centimetre="1/100", mm__millimeter__millimetre="1/1000")
_add("length", km__kilometer__kilometre="1000", dm__decimeter__decimetre="1/10", mi__mile="1609.344")
_add("length", inch__inches__in="0.0254", ft__foot__feet="0.3048", yd__yard="0.9144", nm__nanometer="1/1000000000")
_add("length", 3, l__liter__litre="1/1000", ml__milliliter__millilitre="1/1000000", gal__gallon="0.003785411784")
_add("length", 3, cl__centiliter="1/100000", dl__deciliter="1/10000", quart="0.000946352946", pint="0.000473176473")
_add("length", 2, ha__hectare="10000", acre="4046.8564224")
_add("time", s__sec__second="1", min__minute="60", h__hr__hour="3600", day="86400", week="604800", ms="1/1000")
_add("years", year__yr="12", month="1", decade="120", century__centuries="1200")
_add("mass", g__gram="1", kg__kilogram="1000", mg__milligram="1/1000", ton__tonne="1000000")
_add("pounds", lb__lbs__pound="16", oz__ounce="1")
_add("usd", usd__dollar__buck="1", cent__cents="1/100")
_add("euro", eur__euro="1")
_add("sterling", gbp="1")
_add("rupee", rupee="1")
_add("angle", degree__degrees__deg="1")
_add("radian", radian__rad="1")
_add("celsius", celsius="1")
_add("fahrenheit", fahrenheit="1")
_add("speed-of-limit", mph="1")
_add("frequency", hz__hertz="1", khz="1000", mhz="1000000")
_add("newton", n__newton="1", kn="1000")
_add("joule", j__joule="1", kj="1000", kwh="3600000")
_add("watt", w__watt="1", kw="1000")
_add("volt", v__volt="1")
_add("ampere", a__amp__ampere="1")
_add("kelvin", k__kelvin="1")
_add("pascal", pa__pascal="1", kpa="1000")
_add("data", bit="1", byte="8", kb="8000", mb="8000000", gb="8000000000")
_TABLE["mph"] = (Fraction("1609.344") / 3600, "speed", 1)

_SINGLE = frozenset("m g s h l L".split())
"""One-letter units; elsewhere they are variables, so only a space or ``\\text`` before them makes them units."""

_SINGLE_AS_TEXT = frozenset("NJWVAK")
"""One-letter units that only ``\\text`` makes units."""

_DIVIDING = frozenset("sh")
"""Units of time that are written against another one."""

_MULTIPLIERS = {
    "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
    **{word: Fraction(1, number) for word, number in FRACTIONS.items()},
}  # fmt: skip

_ADJECTIVES = frozenset("long wide tall high deep away thick old total altogether apart of the area volume".split())


@dataclass(frozen=True, slots=True)
class Tail:
    """What stands behind a number."""

    unit: Unit
    multiplier: Fraction | int = 1


def read_tail(text: str) -> Tail | None:
    """Return the unit, noun and multiplier in the words behind a number, or ``None`` when they mean something else."""
    text = re.sub(r"\^\s*\{\s*(-?\d)\s*\}", r"^\1", text)
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).replace("{", "").replace("}", "").replace("\\cdot", " ")
    text = re.sub(r"\b(units?)\^[23]", r"\1", re.sub(r"\s*\^\s*", "^", text))
    if not re.fullmatch(r"[\s\w^/\-'.,()\\°*]*", text):
        return None
    words = [word.strip(".,()'") for word in text.replace("/", " / ").replace("*", " ").split()]
    words = [word for word in words if word]
    multiplier: Fraction | int = 1
    while words and words[0].casefold() in _MULTIPLIERS:
        multiplier *= _MULTIPLIERS[words.pop(0).casefold()]
    if not words:
        return Tail(Unit(), multiplier)
    unit = _unit([word for word in words if word.casefold() not in _ADJECTIVES] or ["total"])
    if unit is None:
        if not is_neutral(words):
            return None
        unit = Unit(noun=" ".join(words).casefold())
    return Tail(unit, multiplier)


def _unit(words: list[str]) -> Unit | None:
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
        if power.startswith("-") and name[-1] in _DIVIDING and _look_up(name[:-1]) is not None:
            words.insert(position, f"{name[-1]}^{power}")  # ms^-1 is a metre per second, not one over a millisecond
            name, power = name[:-1], ""
        found = _look_up(name)
        if found is None or not re.fullmatch(r"-?\d?", power):
            return None
        exponent = sign * prefix * int(power or 1)
        prefix = 1
        factor *= found[0] ** exponent
        dimension[found[1]] = dimension.get(found[1], 0) + found[2] * exponent
    kinds = tuple(sorted((kind, power) for kind, power in dimension.items() if power))
    if not words or prefix != 1 or (sign == -1 and not kinds):
        return None
    return Unit(factor, _known_speed(kinds))


def _known_speed(kinds: Dimension) -> Dimension:
    """Spell ``mph`` as length over time."""
    if kinds == (("speed", 1),):
        return (("length", 1), ("time", -1))
    return kinds


def _look_up(name: str) -> tuple[Fraction, str, int] | None:
    if len(name) == 1:
        return _TABLE.get(name.casefold()) if name in _SINGLE | _SINGLE_AS_TEXT else None
    lowered = name.casefold()
    for candidate in (lowered, lowered.removesuffix("s"), lowered.removesuffix("es")):
        if len(candidate) > 1 and candidate in _TABLE:
            return _TABLE[candidate]
    return None


def is_unit(name: str) -> bool:
    """Whether a word is a unit of the table."""
    return _look_up(name) is not None


def single_letter(name: str) -> bool:
    """Whether a letter may be a unit."""
    return name in _SINGLE
