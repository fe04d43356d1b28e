"""Sealed values: the literal leaves the file, and what was emitted is compared outside."""

import ast
from fractions import Fraction
from typing import Any

import pytest

from prorl_gym.environments.swe.controls.guest_runner import encode_value
from prorl_gym.environments.swe.controls.parsed_tests import TestFile, isolate_test
from prorl_gym.environments.swe.controls.sealed_values import (
    decode_value,
    equality_helpers,
    find_sealed_values,
    matches_expected,
    seal_source,
    valid_seals,
)

FILE = """
def test_it(self):
    x = f(1)
    assert x == {"a": [1, 2.5], "b": (None, True)}, "why"
    assert "expected" == g(
        x,
    )
    self.assertEqual(h(x), -3)
    assert x is None
    assert x == y
    assert x != 4
    assert 3 == 3
    self.assertEqual(*z)

    def inner():
        assert x == 5
"""


NAMED = """
import pytest
ROWS = [("one", 11), ("two", 22)]

def same(a, b):
    "Compare."
    print(a)
    assert b == a

def other(a, b):
    assert a == b.strip()

def test_local():
    wanted = "\\n".join(["first", "second" * 2])
    got = f(1)
    assert got == wanted, f"{wanted} is wanted"
    same(wanted, g(got))

def test_read_elsewhere():
    wanted = "first"
    assert f(wanted) == wanted

def test_assigned_twice():
    wanted = "first"
    if x:
        wanted = "second"
    assert f() == wanted

def test_changed():
    wanted = []
    wanted.append(1)
    assert f() == wanted

@pytest.mark.parametrize("a, wanted", [(1, "first"), pytest.param(2, "second", id="b")])
def test_parameters(a, wanted):
    assert f(a) == wanted

@pytest.mark.parametrize("wanted", ["first"])
@pytest.mark.parametrize("a", [1, 2])
def test_crossed(a, wanted):
    assert f(a) == wanted

def test_table():
    for name, count in ROWS:
        assert f(name) == count

def test_contains():
    assert "first" in f(1)
    assert "second" not in f(1)

def test_helpers():
    other("first", f(1))
    same("second", f(1))
"""


class Text(str):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


class Whole(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def test_comparisons_with_literals_are_sealed():
    found = find_sealed_values(TestFile(FILE), "test_it")
    expected = [ast.literal_eval(seal.expected) for seal in found]
    assert expected == [{"a": [1, 2.5], "b": (None, True)}, "expected", -3, None]
    text = seal_source(FILE, found, "out")
    assert "expected" not in text and "2.5" not in text and "-3" not in text
    ast.parse(text)
    assert "out(1, (g(\n        x,\n    )))" in text


@pytest.mark.parametrize(
    "name, expected, left",
    [
        ("test_local", ["first\nsecondsecond"] * 2, []),
        ("test_read_elsewhere", [], ["first"]),
        ("test_assigned_twice", [], ["first", "second"]),
        ("test_changed", [], []),
        ("test_parameters", [["first", "second"]], []),
        ("test_crossed", [], ["first"]),
        ("test_table", [[11, 22]], []),
        ("test_contains", ["first"], ["second"]),
        ("test_helpers", ["second"], ["first"]),
    ],
)
def test_literals_behind_names_leave_the_file(name: str, expected: list[object], left: list[str]):
    file = TestFile(NAMED)
    helpers = equality_helpers([file])
    assert helpers == {"same"}
    found = find_sealed_values(file, name, helpers)
    assert [ast.literal_eval(seal.expected) for seal in found] == expected
    text = isolate_test(seal_source(NAMED, found, "out"), name)
    remaining = text[text.index("def test_" if "@pytest" not in text else "@pytest") :]
    for word in ("first", "second"):
        assert (word in remaining) is (word in left)
    assert ("11" in text) is (name != "test_table")


def test_a_site_that_is_reached_for_each_row_has_a_value_for_each():
    (seal,) = find_sealed_values(TestFile(NAMED), "test_parameters")
    one, two = encode_value("first"), encode_value("second")
    assert matches_expected(seal, [one, two]) is True
    assert matches_expected(seal, [two, one]) is False
    assert matches_expected(seal, [one]) is False


def test_what_must_be_in_a_value():
    (seal,) = find_sealed_values(TestFile(NAMED), "test_contains")
    assert matches_expected(seal, [encode_value("the first of all")]) is True
    assert matches_expected(seal, [encode_value(["first"])]) is True
    assert matches_expected(seal, [encode_value("the last of all")]) is False
    assert matches_expected(seal, [encode_value(5)]) is False


def test_sites_that_share_a_name_stay_together():
    file = TestFile(NAMED)
    found = find_sealed_values(file, "test_local", ["same"])
    assert valid_seals(found, [True, True]) == [0, 1]
    assert valid_seals(found, [True, False]) == []
    plain = find_sealed_values(TestFile(FILE), "test_it")
    assert valid_seals(plain, [True, False, True, True]) == [0, 2, 3]


def test_a_repeated_text_may_not_be_huge():
    assert not find_sealed_values(TestFile('def test():\n    assert f() == "a" * 10 ** 9\n'), "test")
    assert not find_sealed_values(TestFile(f'def test():\n    assert f() == "a" * {10**9}\n'), "test")


PLAIN: list[Any] = [None, True, 0, -(10**30), 1.5, float("inf"), "ü\n", b"\0a"]


@pytest.mark.parametrize("value", [*PLAIN, [1, [2]], (1, "a"), {1, 2}, frozenset({3}), {"a": (1,)}, Fraction(-1, 3)])
def test_values_come_out_as_they_are(value: Any):
    found = decode_value(encode_value(value))
    assert (found, type(found)) == (value, type(value))


def test_objects_that_equal_everything_are_what_they_hold():
    (seal,) = find_sealed_values(TestFile('def test():\n    assert f() == "right"\n'), "test")
    assert matches_expected(seal, [encode_value(Text("right"))]) is True
    assert matches_expected(seal, [encode_value(Text("wrong"))]) is False
    assert matches_expected(seal, [encode_value(Whole(4))]) is False


def test_one_wrong_value_among_many_is_enough_and_none_is_too_few():
    (seal,) = find_sealed_values(TestFile("def test():\n    assert f() == 3\n"), "test")
    assert matches_expected(seal, [["int", "0x3"], ["float", "3.0"]]) is True
    assert matches_expected(seal, [["int", "0x3"], ["int", "0x4"]]) is False
    assert matches_expected(seal, []) is False


STRANGE: list[Any] = [None, [], ["int"], ["other", 1], ["int", "zz"], {"a": 1}, ["set", [["list", []]]], 7]


@pytest.mark.parametrize("strange", STRANGE)
def test_what_has_no_encoding_is_not_as_expected(strange: Any):
    (seal,) = find_sealed_values(TestFile("def test():\n    assert f() == 3\n"), "test")
    assert matches_expected(seal, [strange]) is False
    with pytest.raises(TypeError):
        encode_value(object())
