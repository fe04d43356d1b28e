"""Test files reduced to one function."""

import ast
from pathlib import Path

import pytest

from prorl_gym.environments.swe.controls.parsed_tests import TestFile, isolate_test

FILE = '''"""Tests."""
import unittest
import pytest

@pytest.fixture
def made():
    return 1

@pytest.mark.parametrize("a", [1,
                               2])
def test_one(a): assert a

class TestGroup(Base):
    """Group."""
    value = "ü"

    def setUp(self): self.x = 1

    def test_two(self):
        assert self.value == "ü"  # with ä comment

    async def test_three(self):
        def test_inner(): pass

if True:
    def test_four(): pass
else:
    def test_four(): assert 0

class Base:
    def test_five(self): pass

class TestSub(Base, unittest.TestCase):
    pass
'''
TESTS = ("test_one", "TestGroup::test_two", "TestGroup::test_three", "test_four", "Base::test_five")


@pytest.mark.parametrize("name", TESTS)
def test_exactly_one_test_is_kept(name: str):
    reduced = isolate_test(FILE, name)
    left = TestFile(reduced)
    assert set(left.tests) == {name}
    assert {"made", "TestGroup::setUp"} <= set(left.functions)
    kept = ast.unparse(left.functions[name].node)
    assert kept == ast.unparse(TestFile(FILE).functions[name].node)


def test_an_inherited_test_is_found_where_it_is_written():
    file = TestFile(FILE)
    assert file.find_definition("TestSub::test_five") == "Base::test_five"
    assert file.find_definition("test_one") == "test_one"
    assert (file.find_definition("TestSub::test_nine"), file.find_definition("Nothing::test_five")) == (None, None)


@pytest.mark.parametrize("source", ["def test(:", "x = 1\r\n", "\ufeffx = 1", "x = 1\n\f\ny = 2"])
def test_what_could_be_read_in_two_ways_is_refused(source: str):
    with pytest.raises(ValueError):
        TestFile(source)


def test_a_span_is_the_text_of_its_node():
    file = TestFile(FILE)
    nodes = [node for node in ast.walk(file.tree) if isinstance(node, ast.Constant | ast.Name | ast.Compare)]
    assert len(nodes) > 20
    for node in nodes:
        assert ast.unparse(ast.parse(file.text(node), mode="eval")) == ast.unparse(node)


def test_files_of_this_repository_can_be_reduced():
    folder = Path(__file__).parents[1]
    for path in sorted(folder.glob("test_p*.py")):
        source = path.read_text()
        for name in TestFile(source).tests:
            assert TestFile(isolate_test(source, name)).tests == (name,)
