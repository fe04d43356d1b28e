"""The table of units agrees with pint."""

from fractions import Fraction

import pint
import pytest

from prorl_gym.environments.answers.units import FACTORS, find_unit

PINT = pint.UnitRegistry()
SPELLED = {
    "cubic_centimeter": (1, "centimeter ** 3"), "permille": (1e-3, ""), "ppb": (1e-9, ""), "decibel": (1, ""),
    "percentage_point": (1e-2, ""), "kiloyear": (1e3, "year"), "megayear": (1e6, "year"), "gigayear": (1e9, "year"),
    "ten_years": (10, "year"), "jansky": (1e-26, "watt / meter ** 2 / hertz"), "gauss": (1e-4, "tesla"),
    "rem": (1e-2, "sievert"), "millirem": (1e-5, "sievert"), "milliarcsecond": (1e-3, "arcsecond"),
    "degree_Celsius": (1, "kelvin"), "degree_Fahrenheit": (5 / 9, "kelvin"),
    "revolutions_per_second": (1, "turn / second"), "acre": (43560, "foot ** 2"), "fathom": (6, "foot"),
    "furlong": (660, "foot"),
}  # fmt: skip
"""What pint lacks, adds a zero point to, or defines otherwise: until 0.25, the last three by the US survey foot."""


@pytest.mark.parametrize("powers", FACTORS)
def test_factors_and_dimensions_are_those_of_pint(powers: str):
    dimension = PINT.Quantity(1, powers.replace("^", "**").replace(" ", "*")).dimensionality
    for name, factor in FACTORS[powers].items():
        number, unit = SPELLED.get(name, (1, name))
        theirs = PINT.Quantity(float(number), unit).to_base_units()
        assert theirs.dimensionality == dimension, name
        assert float(Fraction(factor)) == pytest.approx(theirs.magnitude, rel=1e-10), name


def test_prefixes_and_spellings_lead_to_one_unit():
    units = [find_unit(name) for name in ("km", "Km", "kilometers", "kilometre")]
    assert all(unit is not None and (unit.name, unit.factor) == ("meter", 1000) for unit in units)
    assert [find_unit(name) for name in ("cat", "foo", "kfoot")] == [None, None, None]
