"""Sealed values: a test that hands out what it got instead of comparing it with a literal.

The literal does not enter the sandbox. Only comparisons by ``==`` and ``assertEqual`` with a literal of primitives are
sealed, and ``is`` with ``True``, ``False`` or ``None``: there is nothing in them that the judge could see otherwise.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prorl_gym.environments.swe.controls.plan import Seal
from prorl_gym.environments.swe.controls.source import FunctionNode, TestFile, splice

_EQUAL = ("assertEqual", "assertEquals", "assertDictEqual", "assertListEqual", "assertTupleEqual", "assertSetEqual")
_MISSING = object()


def seals(file: TestFile, name: str) -> tuple[Seal, ...]:
    """Return the comparisons of a function that can be sealed."""
    return tuple(sorted(_seals(file, file.functions[name].node), key=lambda seal: seal.start))


def sealed(source: str, sites: Sequence[Seal], emit: str) -> str:
    """Return the source with values handed to a function of this name: ``emit(number of the site, value)``."""
    return splice(
        source,
        [
            (seal.start, seal.end, f"{emit}({number}, ({source[seal.value_start : seal.value_end]}))")
            for number, seal in enumerate(sites)
        ],
    )


def agrees(seal: Seal, emitted: Sequence[Any]) -> bool | None:
    """Whether what a site emitted is what the test expects; ``None``: it was of a kind that has no encoding.

    Args:
        seal: the site.
        emitted: values as they came, see ``read_value``.
    """
    if not emitted:
        return False
    values = [read_value(each) for each in emitted]
    if any(value is _MISSING for value in values):
        return None
    expected: Any = ast.literal_eval(seal.expected)
    return all(bool(expected == value) for value in values)


def read_value(encoded: Any) -> Any:
    """Return a value that the runner encoded, or a mark that it could not."""
    try:
        return _read(encoded)
    except (KeyError, TypeError, ValueError, IndexError, RecursionError):
        return _MISSING


def _read(encoded: Any) -> Any:
    kind, content = encoded[0], encoded[1]
    readers: Mapping[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    if kind in readers:
        return readers[kind]([_read(each) for each in content])
    if kind == "dict":
        return {_read(key): _read(value) for key, value in content}
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "float":
        return float(content)
    if kind == "int":
        return int(content, 16)
    if kind == "plain" and (content is None or isinstance(content, bool | str)):
        return content
    raise ValueError(kind)


def _seals(file: TestFile, function: FunctionNode) -> Iterator[Seal]:
    for node in _own_nodes(function):
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare) and len(node.test.ops) == 1:
            sides = (node.test.left, node.test.comparators[0])
            is_same = isinstance(node.test.ops[0], ast.Is) and _is_single(sides[1])
            if isinstance(node.test.ops[0], ast.Eq) or is_same:
                yield from _seal(file, node, *sides)
        elif (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Attribute)
            and node.value.func.attr in _EQUAL
            and len(node.value.args) >= 2
            and not any(isinstance(argument, ast.Starred) for argument in node.value.args)
        ):
            yield from _seal(file, node, *node.value.args[:2])


def _own_nodes(function: FunctionNode) -> Iterator[ast.AST]:
    """Yield the nodes of a function: of those in it that bind names of their own, nothing."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def _seal(file: TestFile, statement: ast.stmt, one: ast.expr, other: ast.expr) -> Iterator[Seal]:
    for expected, value in ((other, one), (one, other)):
        if _is_literal(expected) and not _is_literal(value):
            (start, end), (value_start, value_end) = file.span(statement), file.span(value)
            text = file.text(expected)
            yield Seal(start=start, end=end, value_start=value_start, value_end=value_end, expected=f"({text})")
            return


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _is_single(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))
