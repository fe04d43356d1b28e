"""Test files as text: the functions in them, their tables of parameters, and a file reduced to one test function."""

import ast
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class LocatedFunction:
    node: FunctionNode
    owner: ast.ClassDef | None
    """The innermost class around it."""


class TestFile:
    """A parsed test file.

    Raises ``ValueError``: it is not Python of this interpreter's grammar, or its lines could be counted in two ways.
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
        self._line_starts = [0]
        for line in self._lines:
            self._line_starts.append(self._line_starts[-1] + len(line) + 1)
        self.all_functions: list[tuple[str, LocatedFunction]] = []
        """Each function with its name, as pytest joins them. A name may occur again, after an ``else`` for example."""
        self._classes: dict[str, ast.ClassDef] = {}
        self._collect(self.tree.body, "", None)
        self.functions: Mapping[str, LocatedFunction] = dict(self.all_functions)

    @property
    def tests(self) -> tuple[str, ...]:
        """Names of the functions and methods that may be tests."""
        return tuple(filter(is_test_name, self.functions))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the span of a node in the source, in characters, with its decorators."""
        start, end = self._offset(node, end=False), self._offset(node, end=True)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.decorator_list:
            line = min(decorator.lineno for decorator in node.decorator_list) - 1
            start = self._line_starts[line] + len(self._lines[line]) - len(self._lines[line].lstrip())
        return start, end

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end]

    def find_definition(self, name: str) -> str | None:
        """Return the name of a test's definition: its own, or that in a base class in the same file."""
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

    def _collect(self, body: Sequence[ast.stmt], prefix: str, owner: ast.ClassDef | None) -> None:
        """Collect functions and classes, those in blocks of ``if``, ``try``, ``with`` and loops too."""
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.all_functions.append((f"{prefix}{node.name}", LocatedFunction(node, owner)))
            elif isinstance(node, ast.ClassDef):
                self._classes[f"{prefix}{node.name}"] = node
                self._collect(node.body, f"{prefix}{node.name}::", node)
            else:
                for name in ("body", "orelse", "finalbody"):
                    self._collect(getattr(node, name, ()), prefix, owner)
                for handler in getattr(node, "handlers", ()):
                    self._collect(handler.body, prefix, owner)

    def _offset(self, node: ast.AST, *, end: bool) -> int:
        line: int = getattr(node, "end_lineno" if end else "lineno")
        column: int = getattr(node, "end_col_offset" if end else "col_offset")
        text = self._lines[line - 1]
        return self._line_starts[line - 1] + len(text.encode()[:column].decode())


def parse_tests(texts: Mapping[str, str]) -> dict[str, TestFile]:
    """Return the files that can be parsed, by path."""
    files: dict[str, TestFile] = {}
    for path, text in texts.items():
        with suppress(ValueError):
            files[path] = TestFile(text)
    return files


def is_test_name(name: str) -> bool:
    """Whether a function of this name, joined with its classes, may be a test."""
    return name.rpartition("::")[2].startswith("test")


def isolate_test(source: str, kept: str) -> str:
    """Return a test file with the one test whose definition is ``kept``; code that is no test keeps its text and line.

    Raises ``ValueError``; see ``TestFile``.
    """
    file = TestFile(source)
    removed = [file.span(found.node) for name, found in file.all_functions if name != kept and is_test_name(name)]
    return replace_spans(
        source, [(start, end, "pass" + "\n" * source.count("\n", start, end)) for start, end in removed]
    )


def replace_spans(source: str, replacements: Sequence[tuple[int, int, str]]) -> str:
    """Return the source with spans replaced; none may overlap another."""
    parts: list[str] = []
    position = 0
    for start, end, text in sorted(replacements):
        parts += [source[position:start], text]
        position = end
    return "".join([*parts, source[position:]])


def called_name(call: ast.Call) -> str:
    """Return the last part of the name of what is called."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def scope_nodes(function: FunctionNode) -> Iterator[ast.AST]:
    """Yield the nodes in a function's own scope: inner functions and classes, but nothing inside them."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


@dataclass(frozen=True, slots=True)
class ParameterTable:
    """Rows of values, and the names that the values of a row get."""

    names: tuple[str, ...]
    rows: ast.expr

    def column(self, name: str) -> list[ast.expr]:
        """Return the values of a name, in order; empty where they are not all written down."""
        place = self.names.index(name)
        column: list[ast.expr] = []
        for row in self.rows.elts if isinstance(self.rows, ast.List | ast.Tuple) else ():
            cells: Sequence[ast.expr] = row.elts if isinstance(row, ast.Tuple | ast.List) else []
            if isinstance(row, ast.Call) and called_name(row) == "param":
                cells = row.args
            elif len(self.names) == 1:
                cells = [row]
            if isinstance(row, ast.Starred) or len(cells) != len(self.names):
                return []
            column.append(cells[place])
        return column


def parametrize_tables(file: TestFile, function: FunctionNode) -> list[ParameterTable]:
    """Return the tables of the function's ``parametrize`` decorators."""
    tables: list[ParameterTable] = []
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and called_name(decorator) == "parametrize" and len(decorator.args) > 1:
            names, rows = decorator.args[:2]
            parts: Sequence[ast.expr] = names.elts if isinstance(names, ast.List | ast.Tuple) else [names]
            texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            split = tuple(name.strip() for text in texts for name in text.split(",") if name.strip())
            tables.append(ParameterTable(split, _resolve_constant(file, rows)))
    return tables


def loop_tables(file: TestFile, function: FunctionNode) -> list[ParameterTable]:
    """Return the tables over which the function's own loops run."""
    tables: list[ParameterTable] = []
    for node in scope_nodes(function):
        if isinstance(node, ast.For):
            targets = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
            names = tuple(target.id for target in targets if isinstance(target, ast.Name))
            if len(names) == len(targets):
                tables.append(ParameterTable(names, _resolve_constant(file, node.iter)))
    return tables


def _resolve_constant(file: TestFile, node: ast.expr) -> ast.expr:
    """Return the value of a module's name that is assigned once and read only here; any other node as it is."""
    if not isinstance(node, ast.Name):
        return node
    uses = [each for each in ast.walk(file.tree) if isinstance(each, ast.Name) and each.id == node.id]
    for statement in file.tree.body:
        if len(uses) == 2 and isinstance(statement, ast.Assign) and statement.targets[0] in uses:
            return statement.value
    return node
