"""Names of units and their factors in base units.

``stem`` uses the whole table, with prefixes, and ``math`` a few names (``math.amounts``). The factors are written out,
since a worker process would need almost a second to import ``pint`` and to build its registry; a test compares them
with pint's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Literal

# ruff: noqa: RUF001 - look-alike signs are what this file is about

QuantityKind = Literal[
    "", "angle", "turn", "cycle", "decay", "absorbed", "equivalent", "level", "points", "information"
]
"""Distinguishes units of one dimension that measure different things: 50 Hz is not 50 rad/s."""

Dimension = tuple[tuple[str, float], ...]
"""Base units and their powers, sorted."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A named unit in base units."""

    name: str
    factor: Fraction
    """Exact, unless it contains pi or was measured."""
    dimension: Dimension
    kind: QuantityKind


_TURN = Fraction(math.tau)
FACTORS: Mapping[str, Mapping[str, str | Fraction]] = {
    "": {
        "radian": "1", "degree": _TURN / 360, "arcminute": _TURN / 21600, "arcsecond": _TURN / 1296000,
        "milliarcsecond": _TURN / 1296000000, "turn": _TURN, "steradian": "1", "bit": "1", "byte": "8",
        "kibibyte": "8192", "mebibyte": "8388608", "decibel": "1", "percent": "1e-2", "percentage_point": "1e-2",
        "permille": "1e-3", "ppm": "1e-6", "ppb": "1e-9",
    },
    "m": {
        "meter": "1", "micrometer": "1e-6", "femtometer": "1e-15", "angstrom": "1e-10", "inch": "0.0254",
        "foot": "0.3048", "yard": "0.9144", "fathom": "1.8288", "furlong": "201.168", "mile": "1609.344",
        "nautical_mile": "1852", "astronomical_unit": "149597870700", "light_year": "9460730472580800",
        "parsec": "3.0856775814671916e16",
    },
    "m^2": {"hectare": "1e4", "acre": "4046.8564224", "barn": "1e-28"},
    "m^3": {
        "liter": "1e-3", "cubic_centimeter": "1e-6", "gallon": "3.785411784e-3", "quart": "0.946352946e-3",
        "pint": "0.473176473e-3", "cup": "0.2365882365e-3", "tablespoon": "14.78676478125e-6",
        "teaspoon": "4.92892159375e-6", "barrel": "0.119240471196",
    },
    "s": {
        "second": "1", "millisecond": "1e-3", "minute": "60", "hour": "3600", "day": "86400", "week": "604800",
        "fortnight": "1209600", "month": "2629800", "year": "31557600", "ten_years": "315576000",
        "century": "3155760000", "kiloyear": "31557600e3", "megayear": "31557600e6", "gigayear": "31557600e9",
    },
    "s^-1": {
        "hertz": "1", "becquerel": "1", "curie": "3.7e10", "revolutions_per_minute": _TURN / 60,
        "revolutions_per_second": _TURN,
    },
    "m s^-1": {"mile_per_hour": "0.44704", "knot": "1852/3600", "speed_of_light": "299792458"},
    "m^2 s^-1": {"stokes": "1e-4"},
    "m^2 s^-2": {"gray": "1", "sievert": "1", "rem": "1e-2", "millirem": "1e-5"},
    "kg": {
        "gram": "1e-3", "metric_ton": "1e3", "tonne": "1e3", "carat": "2e-4", "ounce": "0.028349523125",
        "pound": "0.45359237", "stone": "6.35029318", "slug": "14.593902937206365", "dalton": "1.66053906892e-27",
        "unified_atomic_mass_unit": "1.66053906892e-27",
    },
    "kg m s^-2": {"newton": "1", "dyne": "1e-5", "kilogram_force": "9.80665", "force_pound": "4.4482216152605"},
    "kg m^-1 s^-2": {
        "pascal": "1", "hectopascal": "100", "bar": "1e5", "standard_atmosphere": "101325", "torr": "101325/760",
        "millimeter_Hg": "133.322387415", "inch_Hg": "3386.388640341", "centimeter_H2O": "98.0665",
        "pound_force_per_square_inch": "6894.757293168361",
    },
    "kg m^-1 s^-1": {"poise": "0.1"},
    "kg s^-2": {"jansky": "1e-26"},
    "kg m^2 s^-2": {
        "joule": "1", "erg": "1e-7", "calorie": "4.184", "british_thermal_unit": "1055.056",
        "electron_volt": "1.602176634e-19", "rydberg": "2.179872361103e-18", "hartree": "4.359744722206e-18",
    },
    "kg m^2 s^-3": {"watt": "1", "horsepower": "745.6998715822702"},
    "A": {"ampere": "1"},
    "A s": {"coulomb": "1"},
    "A m s": {"debye": "3.335640951981521e-30"},
    "A^-1 kg m^2 s^-3": {"volt": "1"},
    "A^-2 kg m^2 s^-3": {"ohm": "1"},
    "A^2 kg^-1 m^-2 s^3": {"siemens": "1"},
    "A^2 kg^-1 m^-2 s^4": {"farad": "1"},
    "A^-2 kg m^2 s^-2": {"henry": "1"},
    "A^-1 kg m^2 s^-2": {"weber": "1"},
    "A^-1 kg s^-2": {"tesla": "1", "gauss": "1e-4"},
    "K": {"kelvin": "1", "degree_Celsius": "1", "degree_Fahrenheit": "5/9"},
    "mol": {"mole": "1"},
    "m^-3 mol": {"molar": "1e3"},
    "mol s^-1": {"katal": "1"},
    "cd": {"candela": "1", "lumen": "1"},
    "cd m^-2": {"lux": "1"},
}  # fmt: skip
"""Factors by dimension. The zero points of temperatures are in ``stem.unit_parser``."""

_KINDS: dict[str, QuantityKind] = {
    "radian": "angle", "degree": "angle", "arcminute": "angle", "arcsecond": "angle", "steradian": "angle",
    "turn": "turn", "revolutions_per_minute": "turn", "revolutions_per_second": "turn", "hertz": "cycle",
    "becquerel": "decay", "curie": "decay", "gray": "absorbed", "sievert": "equivalent", "rem": "equivalent",
    "decibel": "level", "percentage_point": "points", "bit": "information", "byte": "information",
    "kibibyte": "information", "mebibyte": "information",
}  # fmt: skip


def _named_alike(words: str) -> dict[str, str]:
    return {word: word for word in words.split()}


_PREFIXES = {
    "Y": 24, "Z": 21, "E": 18, "P": 15, "T": 12, "G": 9, "M": 6, "k": 3, "d": -1,
    "c": -2, "m": -3, "u": -6, "μ": -6, "µ": -6, "n": -9, "p": -12, "f": -15, "a": -18, "z": -21, "y": -24,
}  # fmt: skip
PREFIX_WORDS = {
    "yotta": 24, "zetta": 21, "exa": 18, "peta": 15, "tera": 12, "giga": 9, "mega": 6, "kilo": 3, "hecto": 2, "deca": 1,
    "deka": 1, "deci": -1, "centi": -2, "milli": -3, "micro": -6, "nano": -9, "pico": -12, "femto": -15, "atto": -18,
    "zepto": -21, "yocto": -24,
}  # fmt: skip

_PREFIXED = {
    "m": "meter", "g": "gram", "s": "second", "A": "ampere", "K": "kelvin", "mol": "mole", "cd": "candela",
    "Hz": "hertz", "N": "newton", "Pa": "pascal", "J": "joule", "W": "watt", "C": "coulomb", "V": "volt", "F": "farad",
    "Ω": "ohm", "ohm": "ohm", "S": "siemens", "Wb": "weber", "T": "tesla", "H": "henry", "lm": "lumen",
    "lx": "lux", "Bq": "becquerel", "Gy": "gray", "Sv": "sievert", "kat": "katal", "L": "liter", "l": "liter",
    "ℓ": "liter", "eV": "electron_volt", "bar": "bar", "M": "molar", "cal": "calorie", "Da": "dalton", "b": "barn",
    "B": "byte", "bit": "bit", "pc": "parsec", "G": "gauss", "Ci": "curie", "P": "poise", "St": "stokes",
    "rad": "radian", "yr": "year", "Torr": "torr", "torr": "torr", "sr": "steradian", "dyn": "dyne", "tonne": "tonne",
}  # fmt: skip
_SYMBOLS = {
    "u": "unified_atomic_mass_unit", "amu": "unified_atomic_mass_unit", "min": "minute", "h": "hour", "hr": "hour",
    "d": "day", "wk": "week", "y": "year", "t": "metric_ton", "ha": "hectare", "in": "inch", "ft": "foot",
    "yd": "yard", "mi": "mile", "lb": "pound", "lbf": "force_pound", "oz": "ounce", "mph": "mile_per_hour",
    "kn": "knot", "kt": "knot", "hp": "horsepower", "psi": "pound_force_per_square_inch", "atm": "standard_atmosphere",
    "gal": "gallon", "BTU": "british_thermal_unit", "Btu": "british_thermal_unit", "ppm": "ppm", "ppb": "ppb",
    "%": "percent", "‰": "permille", "Å": "angstrom", "AU": "astronomical_unit",
    "au": "astronomical_unit", "ly": "light_year", "°": "degree", "deg": "degree", "′": "arcminute", "″": "arcsecond",
    "arcsec": "arcsecond", "arcmin": "arcminute", "rpm": "revolutions_per_minute", "rps": "revolutions_per_second",
    "rev": "turn", "c": "speed_of_light", "Ry": "rydberg", "mmHg": "millimeter_Hg", "inHg": "inch_Hg",
    "cmH2O": "centimeter_H2O", "dB": "decibel", "°C": "degree_Celsius", "°F": "degree_Fahrenheit", "°K": "kelvin",
    "erg": "erg", "D": "debye", "rem": "rem", "mrem": "millirem", "mas": "milliarcsecond", "sec": "second",
    "secs": "second", "hrs": "hour", "mins": "minute", "lbs": "pound", "fm": "femtometer", "cc": "cubic_centimeter",
    "hPa": "hectopascal", "pp": "percentage_point", "pct": "percent", "yrs": "year",
    "nmi": "nautical_mile", "kgf": "kilogram_force", "KiB": "kibibyte", "MiB": "mebibyte", "Jy": "jansky",
    "ka": "kiloyear", "Ma": "megayear", "Ga": "gigayear", "msec": "millisecond", "rads": "radian",
    "degC": "degree_Celsius", "degF": "degree_Fahrenheit",
}  # fmt: skip
_WORDS = _named_alike(
    "meter gram second ampere kelvin mole candela hertz newton pascal joule watt coulomb volt farad ohm siemens weber "
    "tesla henry lumen lux becquerel gray sievert katal liter bar molar calorie dalton barn byte bit parsec gauss "
    "curie poise radian steradian year torr"
) | {
    "metre": "meter", "gramme": "gram", "amp": "ampere", "henries": "henry", "litre": "liter",
    "electronvolt": "electron_volt", "tonne": "metric_ton",
}  # fmt: skip
"""Words that take prefixes."""
_PLAIN_WORDS = _named_alike(
    "minute hour day week month hectare inch foot yard mile pound ounce knot horsepower gallon percent angstrom "
    "degree arcminute arcsecond turn rydberg hartree decibel dyne erg debye cup pint quart teaspoon tablespoon acre "
    "stone carat slug furlong fathom century fortnight barrel jansky kibibyte mebibyte"
) | {
    "feet": "foot", "atmosphere": "standard_atmosphere", "lightyear": "light_year", "revolution": "turn",
    "cycle": "turn", "celsius": "degree_Celsius", "fahrenheit": "degree_Fahrenheit", "micron": "micrometer",
    "decade": "ten_years", "centurie": "century", "nmi": "nautical_mile",
}  # fmt: skip
_MISSPELLINGS = {
    "Kg": "kg", "KG": "kg", "kgs": "kg", "Km": "km", "KM": "km", "kms": "km", "KJ": "kJ", "Kj": "kJ", "kj": "kJ",
    "KPa": "kPa", "Kpa": "kPa", "kpa": "kPa", "Mpa": "MPa", "Gpa": "GPa", "hz": "Hz", "HZ": "Hz", "Khz": "kHz",
    "KHz": "kHz", "khz": "kHz", "Mhz": "MHz", "Ghz": "GHz", "ev": "eV", "Mev": "MeV", "kev": "keV", "Kev": "keV",
    "KeV": "keV", "Gev": "GeV", "KN": "kN", "KW": "kW", "Kw": "kW", "kw": "kW", "Kcal": "kcal", "ATM": "atm",
    "KV": "kV", "Kv": "kV", "kv": "kV", "AMU": "amu", "RPM": "rpm", "PPM": "ppm", "PSI": "psi", "DB": "dB", "db": "dB",
    "gm": "g", "gms": "g", "mL": "mL", "KHZ": "kHz", "MHZ": "MHz", "nM": "nM", "μs": "μs", "Mol": "mol",
}  # fmt: skip
COMPOUNDS = {
    "Nm": "N m", "kNm": "kN m", "Ns": "N s", "Wh": "W h", "kWh": "kW h", "KWh": "kW h", "kwh": "kW h", "MWh": "MW h",
    "GWh": "GW h", "TWh": "TW h", "Ah": "A h", "mAh": "mA h", "Js": "J s", "Ws": "W s", "Vs": "V s", "kph": "km/h",
    "kmph": "km/h", "kmh": "km/h", "mps": "m/s", "fps": "ft/s", "sqft": "ft^2", "diopter": "1/m", "dioptre": "1/m",
    "diopters": "1/m", "dioptres": "1/m", "Pas": "Pa s", "mPas": "mPa s", "kNs": "kN s", "Nmm": "N mm", "Nms": "N m s",
}  # fmt: skip
"""Units that are written as one word and are products of others."""
AMBIGUOUS_PRODUCTS = {"ms": "m s", "mK": "m K", "Tm": "T m", "rads": "rad s"}
"""Units that are usually products in a denominator or with a negative power: ``m s^{-1}``, ``W/(m K)``."""

_LONGEST_PRODUCT = 8
_LONGEST_SYMBOL = 4


@cache
def find_unit(name: str) -> Unit | None:
    """Return the unit of this name or symbol, prefix included; ``None`` when it is not known."""
    name = _MISSPELLINGS.get(name, name)
    if name in _SYMBOLS:
        return _unit(_SYMBOLS[name], 0)
    if name in _PREFIXED:
        return _unit(_PREFIXED[name], 0)
    prefix, symbol = name[:1], name[1:]
    if prefix in _PREFIXES and symbol in _PREFIXED:
        return _unit(_PREFIXED[symbol], _PREFIXES[prefix])
    return _find_word(name.casefold()) if len(name) > 2 else None


@cache
def split_unit_product(name: str) -> tuple[str, ...]:
    """Return the symbols in a name that is a product (``J`` and ``mol`` of ``Jmol``); empty for any other name.

    The reading with the fewest symbols counts; where two have as few, there is none.
    """
    if len(name) > _LONGEST_PRODUCT or find_unit(name) is not None:
        return ()
    found = sorted(_splits(name), key=len)
    if not found or (len(found) > 1 and len(found[0]) == len(found[1])):
        return ()
    return found[0]


def _splits(name: str) -> list[tuple[str, ...]]:
    if not name:
        return [()]
    found: list[tuple[str, ...]] = []
    for end in range(1, min(len(name), _LONGEST_SYMBOL) + 1):
        symbol = name[:end]
        is_symbol = symbol in _PREFIXED or (symbol[:1] in _PREFIXES and symbol[1:] in _PREFIXED)
        if is_symbol and symbol not in AMBIGUOUS_PRODUCTS:
            found += [(symbol, *rest) for rest in _splits(name[end:])]
    return found


def _find_word(word: str) -> Unit | None:
    for stem in (word, word.removesuffix("s"), word.removesuffix("es")):
        if stem in _PLAIN_WORDS:
            return _unit(_PLAIN_WORDS[stem], 0)
        if stem in _WORDS:
            return _unit(_WORDS[stem], 0)
        for prefix, power in PREFIX_WORDS.items():
            if stem.startswith(prefix) and stem.removeprefix(prefix) in _WORDS:
                return _unit(_WORDS[stem.removeprefix(prefix)], power)
    return None


@cache
def _unit(name: str, power: int) -> Unit:
    dimension, factor = _factors()[name]
    return Unit(name, factor * Fraction(10) ** power, dimension, _KINDS.get(name, ""))


@cache
def _factors() -> dict[str, tuple[Dimension, Fraction]]:
    by_name: dict[str, tuple[Dimension, Fraction]] = {}
    for powers, units in FACTORS.items():
        pairs = (part.partition("^") for part in powers.split())
        dimension = tuple(sorted((base, float(power or 1)) for base, _, power in pairs))
        by_name |= {name: (dimension, Fraction(factor)) for name, factor in units.items()}
    return by_name
