"""Units by name: which ones are known, and what they are in base units.

``pint`` is the data base of factors and dimensions. It is asked for names of the tables below only: of its own, it
would read ``cat`` as centi technical atmosphere and evaluate what looks like arithmetic.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import pint  # pyright: ignore[reportMissingTypeStubs]

# ruff: noqa: RUF001 - look-alike signs are what this file is about

Flavour = Literal["", "angle", "turn", "cycle", "decay", "absorbed", "equivalent", "level", "points", "information"]
"""What tells apart units of one dimension that do not measure the same thing: 50 Hz is not 50 rad/s."""

_FLAVOURS: dict[str, Flavour] = {
    "radian": "angle", "degree": "angle", "arcminute": "angle", "arcsecond": "angle", "gradian": "angle",
    "steradian": "angle", "turn": "turn", "revolutions_per_minute": "turn", "revolutions_per_second": "turn",
    "hertz": "cycle", "becquerel": "decay", "curie": "decay", "gray": "absorbed", "sievert": "equivalent",
    "rem": "equivalent", "decibel": "level", "percentage_point": "points", "bit": "information", "byte": "information",
    "kibibyte": "information", "mebibyte": "information",
}  # fmt: skip

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
_WORDS = {
    "meter": "meter", "metre": "meter", "gram": "gram", "gramme": "gram", "second": "second", "ampere": "ampere",
    "amp": "ampere", "kelvin": "kelvin", "mole": "mole", "candela": "candela", "hertz": "hertz", "newton": "newton",
    "pascal": "pascal", "joule": "joule", "watt": "watt", "coulomb": "coulomb", "volt": "volt", "farad": "farad",
    "ohm": "ohm", "siemens": "siemens", "weber": "weber", "tesla": "tesla", "henry": "henry", "henries": "henry",
    "lumen": "lumen", "lux": "lux", "becquerel": "becquerel", "gray": "gray", "sievert": "sievert", "katal": "katal",
    "liter": "liter", "litre": "liter", "electronvolt": "electron_volt", "bar": "bar", "molar": "molar",
    "calorie": "calorie", "dalton": "dalton", "barn": "barn", "byte": "byte", "bit": "bit", "parsec": "parsec",
    "gauss": "gauss", "curie": "curie", "poise": "poise", "radian": "radian", "steradian": "steradian",
    "year": "year", "torr": "torr", "tonne": "metric_ton",
}  # fmt: skip
_PLAIN_WORDS = {
    "minute": "minute", "hour": "hour", "day": "day", "week": "week", "month": "month", "hectare": "hectare",
    "inch": "inch", "foot": "foot", "feet": "foot", "yard": "yard", "mile": "mile", "pound": "pound", "ounce": "ounce",
    "knot": "knot", "horsepower": "horsepower", "atmosphere": "standard_atmosphere", "gallon": "gallon",
    "percent": "percent", "angstrom": "angstrom", "lightyear": "light_year", "degree": "degree",
    "arcminute": "arcminute", "arcsecond": "arcsecond", "revolution": "turn", "turn": "turn", "cycle": "turn",
    "rydberg": "rydberg", "hartree": "hartree", "decibel": "decibel", "celsius": "degree_Celsius",
    "fahrenheit": "degree_Fahrenheit", "dyne": "dyne", "erg": "erg", "debye": "debye", "micron": "micrometer",
    "cup": "cup", "pint": "pint", "quart": "quart", "teaspoon": "teaspoon", "tablespoon": "tablespoon", "acre": "acre",
    "stone": "stone", "carat": "carat", "slug": "slug", "furlong": "furlong", "fathom": "fathom", "decade": "ten_years",
    "century": "century", "centurie": "century", "fortnight": "fortnight", "barrel": "barrel", "jansky": "jansky",
    "kibibyte": "kibibyte", "mebibyte": "mebibyte", "nmi": "nautical_mile",
}  # fmt: skip
_SLIPS = {
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
EITHER = {"ms": "m s", "mK": "m K", "Tm": "T m", "rads": "rad s"}
"""Units that, below a fraction bar or raised to a negative power, are rather products: ``m s^{-1}``, ``W/(m K)``."""

_OURS = {
    "gauss": (1e-4, "tesla"), "cubic_centimeter": (1e-6, "meter ** 3"), "permille": (1e-3, "dimensionless"),

    "kiloyear": (1e3, "year"), "megayear": (1e6, "year"), "gigayear": (1e9, "year"),
    "ten_years": (10.0, "year"), "jansky": (1e-26, "watt / meter ** 2 / hertz"),
    "ppb": (1e-9, "dimensionless"), "percentage_point": (1e-2, "dimensionless"),
    "decibel": (1.0, "dimensionless"),
    "millirem": (1e-5, "sievert"), "milliarcsecond": (1e-3, "arcsecond"), "rem": (1e-2, "sievert"),
    "degree_Celsius": (1.0, "kelvin"), "degree_Fahrenheit": (5 / 9, "kelvin"), "turn": (math.tau, "radian"),
    "revolutions_per_second": (math.tau, "radian / second"),
}  # fmt: skip
"""What pint lacks, defines in another system of units, or adds a zero point to."""

_LONGEST_PRODUCT = 8
_LONGEST_SYMBOL = 4

Dimension = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """A named unit in base units."""

    name: str
    factor: float
    dimension: Dimension
    flavour: Flavour


@cache
def find(name: str) -> Unit | None:
    """Return the unit of this name or symbol, prefix included; ``None`` when it is not known."""
    name = _SLIPS.get(name, name)
    if name in _SYMBOLS:
        return _unit(_SYMBOLS[name], 0)
    if name in _PREFIXED:
        return _unit(_PREFIXED[name], 0)
    prefix, symbol = name[:1], name[1:]
    if prefix in _PREFIXES and symbol in _PREFIXED:
        return _unit(_PREFIXED[symbol], _PREFIXES[prefix])
    return _word(name.casefold()) if len(name) > 2 else None


@cache
def run_together(name: str) -> tuple[str, ...]:
    """Return the symbols of which a name that is no unit is the product (``Jmol``: ``J``, ``mol``); empty: of none.

    The fewest symbols count; a name with two such readings has none.
    """
    if len(name) > _LONGEST_PRODUCT or find(name) is not None:
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
        if symbol not in EITHER and _is_symbol(symbol):
            found += [(symbol, *rest) for rest in _splits(name[end:])]
    return found


def _is_symbol(name: str) -> bool:
    return name in _PREFIXED or (name[:1] in _PREFIXES and name[1:] in _PREFIXED)


def power_of_ten(word: str) -> int | None:
    """Return what a prefix written as a word stands for, for example 3 for ``kilo``."""
    return PREFIX_WORDS.get(word)


def _word(word: str) -> Unit | None:
    for ending in ("", "s", "es"):
        if not word.endswith(ending):
            continue
        stem = word.removesuffix(ending)
        if stem in _PLAIN_WORDS:
            return _unit(_PLAIN_WORDS[stem], 0)
        if stem in _WORDS:
            return _unit(_WORDS[stem], 0)
        for prefix, power in PREFIX_WORDS.items():
            if stem.startswith(prefix) and stem.removeprefix(prefix) in _WORDS:
                return _unit(_WORDS[stem.removeprefix(prefix)], power)
    return None


@cache
def _unit(pint_name: str, power: int) -> Unit:
    scale, known = _OURS.get(pint_name, (1.0, pint_name))
    factor, dimension = _base(known)
    return Unit(pint_name, scale * factor * 10.0**power, dimension, _FLAVOURS.get(pint_name, ""))


@cache
def _registry() -> Any:
    return pint.UnitRegistry()


@cache
def _base(known: str) -> tuple[float, Dimension]:
    # "dimensionless" and products are spelt by us, never by an answer.
    base = _registry().Quantity(1.0, known).to_base_units()
    dimension = tuple(sorted((str(name), float(power)) for name, power in base.dimensionality.items()))
    return float(base.magnitude), dimension
