"""Test files as text: the test functions in them, and a file that is reduced to one of them."""

import ast
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Found:
    """A function in a file."""

    node: FunctionNode
    owner: ast.ClassDef | None
    """The innermost class that it is written in."""


class TestFile:
    """A parsed test file.

    Raises:
        ValueError: it is not Python of this interpreter's grammar, or its lines could be counted in two ways.
    """

    __test__ = False

    def __init__(self, source: str) -> None:
        if "\r" in source or "\f" in source or source.startswith("\ufeff"):
            raise ValueError("lines could be counted otherwise than Python counts them")
        self.source = source
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self.tree = ast.parse(source)
            except (SyntaxError, RecursionError, MemoryError) as error:
                raise ValueError(str(error)) from None
        self._lines = source.split("\n")
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line) + 1)
        self.all: Sequence[tuple[str, Found]] = list(_functions(self.tree.body, "", None))
        """Each function with its name, as pytest joins them. A name may occur again, after an ``else`` for example."""
        self.functions: Mapping[str, Found] = dict(self.all)
        self._classes: Mapping[str, ast.ClassDef] = dict(_classes(self.tree.body, ""))

    @property
    def tests(self) -> tuple[str, ...]:
        """Names of the functions and methods that may be tests."""
        return tuple(name for name in self.functions if name.rpartition("::")[2].startswith("test"))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where a node stands in the source, in characters; decorators belong to what they decorate."""
        first: ast.AST = node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node, *node.decorator_list], key=lambda each: each.lineno)
            if first is not node:
                line = first.lineno - 1
                return self._starts[line] + _indent(self._lines[line]), self._offset(node, end=True)
        return self._offset(first, end=False), self._offset(node, end=True)

    def text(self, node: ast.AST) -> str:
        """Return the source of a node."""
        start, end = self.span(node)
        return self.source[start:end]

    def find(self, name: str) -> str | None:
        """Return where the test of this name is written: there, or in a base class in the same file."""
        if name in self.functions:
            return name
        owner, _, method = name.rpartition("::")
        seen: set[str] = set()
        waiting = [owner]
        while waiting:
            current = waiting.pop(0)
            if current in seen or current not in self._classes:
                continue
            seen.add(current)
            if f"{current}::{method}" in self.functions:
                return f"{current}::{method}"
            waiting += [base.id for base in self._classes[current].bases if isinstance(base, ast.Name)]
        return None

    def _offset(self, node: ast.AST, *, end: bool) -> int:
        line: int = getattr(node, "end_lineno" if end else "lineno")
        column: int = getattr(node, "end_col_offset" if end else "col_offset")
        text = self._lines[line - 1]
        return self._starts[line - 1] + len(text.encode()[:column].decode())


def reduce(source: str, kept: str, others: Collection[str] = ()) -> str:
    """Return a test file with one test function; what is no test stays as it is, and in the line where it is.

    Args:
        source: the file.
        kept: where the function is written.
        others: further names that are tests although they do not begin with ``test``.

    Raises:
        ValueError: see ``TestFile``.
    """
    file = TestFile(source)
    gone = [
        file.span(found.node)
        for name, found in file.all
        if name != kept and (name.rpartition("::")[2].startswith("test") or name in others)
    ]
    return splice(source, [(start, end, "pass" + "\n" * source.count("\n", start, end)) for start, end in gone])


def splice(source: str, replacements: Sequence[tuple[int, int, str]]) -> str:
    """Return the source with stretches replaced; none may overlap another."""
    parts: list[str] = []
    at = 0
    for start, end, text in sorted(replacements):
        parts += [source[at:start], text]
        at = end
    return "".join([*parts, source[at:]])


def _functions(body: Sequence[ast.stmt], prefix: str, owner: ast.ClassDef | None) -> Iterator[tuple[str, Found]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", Found(node, owner)
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}::", node)
        else:
            for block in _blocks(node):
                yield from _functions(block, prefix, owner)


def _classes(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield f"{prefix}{node.name}", node
            yield from _classes(node.body, f"{prefix}{node.name}::")
        else:
            for block in _blocks(node):
                yield from _classes(block, prefix)


def _blocks(node: ast.stmt) -> Iterator[Sequence[ast.stmt]]:
    """Yield the blocks of ``if``, ``try``, ``with`` and loops: tests are written in them too."""
    for name in ("body", "orelse", "finalbody"):
        block: object = getattr(node, name, None)
        if isinstance(block, list):
            yield block  # pyright: ignore[reportUnknownVariableType]
    for handler in getattr(node, "handlers", ()):
        yield handler.body


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
