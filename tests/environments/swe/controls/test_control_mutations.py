"""Wrong versions of tests: natural, at one place, and different."""

import ast
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_gym.environments.swe.controls.control_mutations import propose_controls
from prorl_gym.environments.swe.controls.parsed_tests import TestFile

FILE = '''
import pytest
CASES = {"key": [10, 2.5]}

def helper(x): return x

@pytest.mark.parametrize("a, b", [(1, "one"), (22, "two")])
def test_many(a, b):
    """Not this 1."""
    assert f"{a} 7" != "x"
    assert helper(a) == -305
    assert helper("Grün") == "Größe 12\\n", "message 4"
    assert helper(b) == b"bytes\\x00"
    assert helper(0x1F) == 1_000
    assert helper(CASES) in (True, 1.50)
    with pytest.raises(KeyError, match="no"):
        helper({})

class TestX:
    def test_call(self):
        self.assertEqual(helper(3), 4.25)
        self.assertTrue(helper(1))
        assert not helper(0)
'''


def edits(name: str, seed: int):
    file = TestFile(FILE)
    return file, list(propose_controls(file, name, random.Random(seed)))


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 500), st.sampled_from(["test_many", "TestX::test_call"]))
def test_each_version_is_a_program_that_differs_at_one_place(seed: int, name: str):
    file, groups = edits(name, seed)
    assert len(groups) > 3
    for group in groups:
        assert len({(edit.start, edit.end) for edit in group}) == 1
        assert len({edit.text for edit in group}) == len(group)
        for edit in group:
            assert ast.dump(ast.parse(edit.apply(FILE))) != ast.dump(file.tree)


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 500))
def test_a_wrong_constant_looks_like_the_right_one(seed: int):
    _, groups = edits("test_many", seed)
    constants = [edit for group in groups for edit in group if len(edit.text) == 1 == edit.end - edit.start]
    assert constants
    right = [type(node.value) for node in ast.walk(ast.parse(FILE)) if isinstance(node, ast.Constant)]
    for edit in constants:
        old = FILE[edit.start : edit.end]
        wrong = edit.apply(FILE)
        assert (old.isdigit(), old.islower(), old.isupper()) == (
            edit.text.isdigit(), edit.text.islower(), edit.text.isupper()
        )  # fmt: skip
        assert right == [type(node.value) for node in ast.walk(ast.parse(wrong)) if isinstance(node, ast.Constant)]


def test_docstrings_are_never_changed():
    _, groups = edits("test_many", 1)
    docstring = FILE.index("Not this"), FILE.index("Not this") + len("Not this 1.")
    assert not any(docstring[0] <= edit.start < docstring[1] for group in groups for edit in group)


@pytest.mark.parametrize(
    "body, expected",
    [
        ("assert f(12) == 345", "345"),
        ("assert 345 == f(12)", "345"),
        ("self.assertEqual(f(12), 345)", "345"),
        ("wanted = '\\n'.join(['345'])\n    got = f(12)\n    assert_equal(got, wanted)", "345"),
        ("assert f('x 345') == 'y 345'\n    assert f(12) == 'z 67'", "67"),
        ("x = 12\n    assert f(x) == [g, 345]", "345"),
        ("f('abc', 12)\n    assert h == 'word'", "word"),
    ],
)
def test_expected_values_are_changed_before_inputs(body: str, expected: str):
    source = f"def test_it(self):\n    {body}\n"
    first = next(propose_controls(TestFile(source), "test_it", random.Random(0)))
    at = source.index(expected)
    assert at <= first[0].start < at + len(expected)


def test_conditions_of_a_test_are_not_changed():
    source = '@skipif(version[0] > 3, reason="old")\ndef test_it():\n    assert f(1) == 2\n'
    groups = propose_controls(TestFile(source), "test_it", random.Random(0))
    assert all(edit.start > source.index("def") for group in groups for edit in group)


def test_of_parameters_the_expected_column_is_changed_first():
    source = '@parametrize("a, b", [(1, "one"), (22, "two")])\ndef test_it(a, b):\n    assert f(a) == b\n'
    first = next(propose_controls(TestFile(source), "test_it", random.Random(0)))
    assert source.rfind('"', 0, first[0].start) in (source.index('"one'), source.index('"two'))


@pytest.mark.parametrize(
    "body, wrong",
    [
        ("assert f(x)", "assert not f(x)"),
        ("assert not f(x)", "assert f(x)"),
        ("assert f(x) is g", "assert f(x) is not g"),
        ("assert f(x) not in g", "assert f(x) in g"),
        ("assert a == b == c", "assert not a == b == c"),
        ("assert a and b", "assert not (a and b)"),
        ("assert not (a and b)", "assert a and b"),
        ("self.assertFalse(f(x))", "self.assertTrue(f(x))"),
        ("assert f(x) is True", "assert f(x) is False"),
    ],
)
def test_assertions_without_a_constant_are_inverted(body: str, wrong: str):
    source = f"def test_it(self):\n    {body}\n"
    (first, *_) = propose_controls(TestFile(source), "test_it", random.Random(0))
    assert first[0].apply(source) == f"def test_it(self):\n    {wrong}\n"


def test_another_exception_is_none_that_would_be_caught():
    source = "def test_it():\n    with raises(LookupError):\n        f()\n"
    for seed in range(30):
        (group,) = propose_controls(TestFile(source), "test_it", random.Random(seed))
        assert not {edit.text for edit in group} & {"KeyError", "IndexError", "LookupError"}


def test_constants_of_the_module_that_a_test_reads_are_used():
    source = "WANTED = 'some'\nOTHER = 'none'\n\ndef test_it():\n    assert f() == WANTED\n"
    changed = {
        edit.apply(source)[:17] for g in propose_controls(TestFile(source), "test_it", random.Random(0)) for edit in g
    }
    assert any(text.startswith("WANTED = '") and text != "WANTED = 'some'\n" for text in changed)
    assert all(
        g[0].start > 16 or g[0].end <= 16 for g in propose_controls(TestFile(source), "test_it", random.Random(0))
    )
