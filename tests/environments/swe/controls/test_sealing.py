"""Sealed values: the literal leaves the file, and what was emitted is compared outside."""

import ast
from typing import Any

import pytest

from prorl_gym.environments.swe.controls.guest import _encoded  # pyright: ignore[reportPrivateUsage]
from prorl_gym.environments.swe.controls.sealing import agrees, read_value, sealed, seals
from prorl_gym.environments.swe.controls.source import TestFile

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


class Text(str):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


class Whole(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def test_comparisons_with_literals_are_sealed():
    found = seals(TestFile(FILE), "test_it")
    expected = [ast.literal_eval(seal.expected) for seal in found]
    assert expected == [{"a": [1, 2.5], "b": (None, True)}, "expected", -3, None]
    text = sealed(FILE, found, "out")
    assert "expected" not in text and "2.5" not in text and "-3" not in text
    ast.parse(text)
    assert "out(1, (g(\n        x,\n    )))" in text


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(10**30),
        1.5,
        float("inf"),
        "ü\n",
        b"\0a",
        [1, [2]],
        (1, "a"),
        {1, 2},
        frozenset({3}),
        {"a": (1,)},
    ],
)
def test_values_come_out_as_they_are(value: Any):
    found = read_value(_encoded(value))
    assert (found, type(found)) == (value, type(value))


def test_objects_that_equal_everything_are_what_they_hold():
    (seal,) = seals(TestFile('def test():\n    assert f() == "right"\n'), "test")
    assert agrees(seal, [_encoded(Text("right"))]) is True
    assert agrees(seal, [_encoded(Text("wrong"))]) is False
    assert agrees(seal, [_encoded(Whole(4))]) is False


def test_one_wrong_value_among_many_is_enough_and_none_is_too_few():
    (seal,) = seals(TestFile("def test():\n    assert f() == 3\n"), "test")
    assert agrees(seal, [["int", "0x3"], ["float", "3.0"]]) is True
    assert agrees(seal, [["int", "0x3"], ["int", "0x4"]]) is False
    assert agrees(seal, []) is False


STRANGE: list[Any] = [None, [], ["int"], ["other", 1], ["int", "zz"], {"a": 1}, ["set", [["list", []]]], 7]


@pytest.mark.parametrize("strange", STRANGE)
def test_what_has_no_encoding_is_told_from_what_is_wrong(strange: Any):
    (seal,) = seals(TestFile("def test():\n    assert f() == 3\n"), "test")
    assert agrees(seal, [strange]) is None
    with pytest.raises(TypeError):
        _encoded(object())
