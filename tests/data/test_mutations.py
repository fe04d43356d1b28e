"""Edits that seed faults: what each operator makes, and that nothing else of a file changes."""

import ast
import bisect
import fnmatch
import heapq
import random
import shlex
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_gym.data.sdist.mutations import Mutation, is_fault, propose_mutations

MODULES = [Path(module.__file__) for module in (bisect, fnmatch, heapq, shlex, textwrap)]
SOURCES = {path.name: path.read_bytes() for path in MODULES}
FOUND = {name: propose_mutations(name, source) for name, source in SOURCES.items()}


def inside(statement: str) -> bytes:
    return f"def f(a, b, c):\n    {statement}\n    return a\n".encode()


def faults(statement: str, operator: str) -> set[str]:
    source = inside(statement)
    made = [one for one in propose_mutations("x.py", source) if one.operator == operator and is_fault(one, source)]
    return {one.apply(source).decode().split("\n", 1)[1].removesuffix("    return a\n").strip() for one in made}


@pytest.mark.parametrize(
    "operator,before,after",
    [
        ("comparison", "a = b < c  # why", {"a = b <= c  # why", "a = b > c  # why"}),
        ("comparison", "a = b not in c", {"a = b in c"}),
        ("comparison", "a = (b)  ==  (c)", {"a = (b)  !=  (c)"}),
        ("arithmetic", "a = b  //  c", {"a = b  %  c"}),
        ("arithmetic", "a = 'x%s' % b", set()),
        ("logic", "a = b and c", {"a = b or c"}),
        ("negation", "a = not b", {"a = b"}),
        ("negation", "a = b if c else a", {"a = b if not c else a"}),
        ("constant", "a = b[1]", {"a = b[2]", "a = b[0]"}),
        ("constant", "a = True", {"a = False"}),
        ("constant", "a = 0x10", set()),
        ("boundary", "a = b[c:]", {"a = b[c + 1:]", "a = b[c - 1:]"}),
        ("boundary", "a = range(c)", {"a = range(c + 1)", "a = range(c - 1)"}),
        ("dropped call", "b.append(c)", {""}),
        ("dropped call", "a = b.strip()", {"a = b"}),
        ("dropped call", "a = sorted(b)", {"a = b"}),
        ("dropped call", "if a: b.append(c)", {"if a: pass"}),
        ("swapped arguments", "a = max(b,  c)", {"a = max(c,  b)"}),
        ("swapped arguments", "a = isinstance(b, c)", set()),
        ("swapped arguments", "a = max(*b, c)", set()),
        ("sibling", "a = b.lower()", {"a = b.upper()"}),
        ("sibling", "a = min(b)", {"a = max(b)"}),
        ("loop exit", "for a in b: break", {"for a in b: continue"}),
        ("augmented", "a += b", {"a -= b", "a = b"}),
    ],
)
def test_each_operator_makes_its_edits_and_no_others(operator: str, before: str, after: set[str]) -> None:
    assert faults(before, operator) == after


@pytest.mark.parametrize(
    "source",
    [
        b'"""1 < 2"""\nX = 1 < 2\n',
        b'def f(a=1 < 2) -> "1 < 2":\n    """1 < 2"""\n',
        b"def f(a):\n    assert a < 2\n    raise ValueError(1 < 2, f'{1 < 2}')\n",
        b"def f(a):\r\n    return a < 1\r\n",
        b"\xef\xbb\xbfdef f(a):\n    return a < 1\n",
        b"def f(a):\n    return a <\n",
        b"def f(a):\n    return '\xff' < a\n",
    ],
)
def test_what_runs_at_import_or_cannot_be_read_is_left_alone(source: bytes) -> None:
    assert propose_mutations("x.py", source) == []


def test_what_the_compiler_warns_of_is_no_fault() -> None:
    source = b"def f(a):\n    return a == 1\n"
    assert is_fault(Mutation("x.py", 2, "", source.index(b"=="), source.index(b"==") + 2, b"!="), source)
    assert not is_fault(Mutation("x.py", 2, "", source.index(b"=="), source.index(b"==") + 2, b"is"), source)
    assert not is_fault(Mutation("x.py", 2, "", source.index(b"=="), source.index(b"==") + 2, b"  =="), source)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(SOURCES)), st.randoms(use_true_random=False))
def test_a_fault_is_a_small_edit_inside_a_function(name: str, rng: random.Random) -> None:
    source, mutation = SOURCES[name], rng.choice(FOUND[name])
    broken = mutation.apply(source)
    assert broken[: mutation.start] == source[: mutation.start]
    assert broken[len(broken) - (len(source) - mutation.end) :] == source[mutation.end :]
    if not is_fault(mutation, source):
        return
    ast.parse(broken)
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    assert any(one.body[0].lineno <= mutation.line <= (one.end_lineno or 0) for one in functions)
    assert source[: mutation.start].count(b"\n") + 1 >= mutation.line - 1


def test_there_is_enough_to_choose_from() -> None:
    for name, found in FOUND.items():
        assert len({mutation.operator for mutation in found}) >= 3, name
        assert found == propose_mutations(name, SOURCES[name])
