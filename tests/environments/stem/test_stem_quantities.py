"""Quantities: what a number and a unit mean does not depend on how they are spelt, and nothing else passes for them."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stem_support import compare

from prorl_gym.environments.answers import units
from prorl_gym.environments.stem.number_parser import UnreadableQuantityError
from prorl_gym.environments.stem.quantity import grade, parse_quantity, requested_unit

# ruff: noqa: RUF001 - look-alike signs are tested here

BOUNDED = settings(derandomize=True, max_examples=60, deadline=None, database=None)

# Unit, and the same one otherwise.
SPELLINGS = [
    ("m/s^2", r"\mathrm{m\,s^{-2}}", r"\frac{\text{m}}{\text{s}^2}", "m·s⁻²", "meters per second squared"),
    ("J/(mol K)", r"\mathrm{J\,mol^{-1}K^{-1}}", "J/mol/K", "J/mol·K", "joules per mole per kelvin"),
    ("kg/m^3", r"\text{kg m}^{-3}", "kilograms per cubic meter", "kg m-3", r"\frac{\mathrm{kg}}{\mathrm{m^3}}"),
    ("kWh", r"\mathrm{kW\,h}", "kilowatt-hours", "kW·h", r"\text{kWh}"),
    ("μF", r"\mu\mathrm{F}", "uF", "microfarads", "µF"),
]
LARGER = [
    ("m", "km", 1e3),
    ("J", "kJ", 1e3),
    ("g", "kg", 1e3),
    ("s", "min", 60),
    ("Pa", "bar", 1e5),
    ("eV", "MeV", 1e6),
]
VALUES = st.floats(min_value=1e-9, max_value=1e9).map(lambda value: float(f"{value:.6g}"))


def numbers(value: float) -> list[str]:
    mantissa, exponent = f"{value:.8e}".split("e")
    power = int(exponent)
    return [
        repr(value),
        f"{mantissa}e{power}",
        rf"{mantissa} \times 10^{{{power}}}",
        rf"{mantissa}\cdot 10^{{{power}}}",
        f"{mantissa} x 10^{power}",
        f"({mantissa} ± 0.00001) × 10^{power}",
    ]


@given(value=VALUES, unit=st.sampled_from(SPELLINGS), data=st.data())
@BOUNDED
def test_spelling_does_not_count(value: float, unit: tuple[str, ...], data: st.DataObject):
    texts = [
        data.draw(st.sampled_from([r"\,", " ", "~", r"\ "])).join((data.draw(st.sampled_from(numbers(value))), spelt))
        for spelt in (data.draw(st.sampled_from(unit)), data.draw(st.sampled_from(unit)))
    ]
    assert compare(*texts, tolerance=1e-6) == "equal", texts
    assert compare(*reversed(texts), tolerance=1e-6) == "equal", texts


@given(value=VALUES, pair=st.sampled_from(LARGER), off=st.sampled_from([0.5, 0.98, 1.02, 10.0, 1000.0, -1.0]))
@BOUNDED
def test_another_unit_is_converted_and_another_value_is_not_equal(
    value: float, pair: tuple[str, str, float], off: float
):
    small, large, ratio = pair
    assert compare(f"{value * ratio!r} {small}", f"{value!r} {large}") == "equal"
    assert compare(f"{value!r} {large}", f"{value * ratio!r} {small}") == "equal"
    assert compare(f"{value!r} {large}", f"{value * ratio * off!r} {small}") == "different"
    assert compare(f"{value!r} {large}", f"{value!r} {small}") == "different"
    assert compare(f"{value!r} {large}", f"{value!r}") == "different"


@pytest.mark.parametrize(
    ("value", "verdict"), [("100", "equal"), ("101", "equal"), ("99", "equal"), ("101.1", "different")]
)
def test_tolerance_is_relative_to_gold_and_its_bounds_belong_to_it(value: str, verdict: str):
    assert compare("100 V", f"{value} V") == verdict
    assert compare("100 V", f"{value} V", tolerance=0.0) == ("equal" if value == "100" else "different")


def test_wider_tolerance_holds():
    assert compare("1.00 V", "1.4 V", absolute_tolerance=0.5) == "equal"
    assert compare("1.00 V", "1400 mV", absolute_tolerance=0.5) == "equal"
    assert compare("100 V", "100.9 V", absolute_tolerance=0.5) == "equal"


def test_unit_that_the_question_asks_for_stands_for_a_missing_one():
    asked = "What is the speed in km/h?"
    assert compare("72", "72", asked) == compare("72", "72 km/h", asked) == compare("72", "20 m/s", asked) == "equal"
    assert compare("72", "72 m/s", asked) == compare("72", "20", asked) == "different"
    assert compare("72", "72 km/h", "How fast is it?") == "different"
    assert requested_unit("Give it in units of J/(mol K).") is not None
    assert requested_unit("What happens in the end?") is None


def test_unit_may_be_left_out_only_where_the_row_allows_it():
    assert compare("5 N", "5") == "different"
    assert compare("5 N", "5", unit_optional=True) == "equal"
    assert compare("5 N", "5 J", unit_optional=True) == "different"


@given(text=st.text(alphabet=st.sampled_from("0123456789.,+-*/^(){}[]\\ eEmsNkJ°%±=~_$≈πmathrmfracsqrt"), max_size=60))
@settings(BOUNDED, max_examples=150)
def test_reading_never_raises_anything_else(text: str):
    try:
        assert all(math.isfinite(one.value) and math.isfinite(one.unit.factor) for one in parse_quantity(text))
    except UnreadableQuantityError as complaint:
        assert str(complaint)


@given(text=st.text(max_size=80))
@example(text="5 \ud800 N")
@BOUNDED
def test_foreign_text_never_raises(text: str):
    assert grade(
        {"gold": "5 N", "answer": text, "question": text, "tolerance": 0.01, "absolute_tolerance": 0,
         "unit_optional": True}
    )["verdict"] in ("equal", "different", "unread")  # fmt: skip


def test_only_known_units_are_read():
    """Names that pint would read as something: constants, and prefixes before units of other systems."""
    for name in ("cat", "k", "R", "hbar", "electron_mass", "10", "m*s", "exabarn1", "G0", "", "Å²"):
        assert units.find_unit(name) is None, name


def test_gold_that_is_no_quantity_is_named():
    assert compare("about right", "5 N") == compare("5 to 6 N", "5 N") == "bad_gold"
