"""Tables of a test: the literals that stand for a name, row by row, in parameters and in loops."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prorl_gym.environments.swe.controls.source import FunctionNode, TestFile


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of values, and the names that the values of a row get."""

    names: tuple[str, ...]
    rows: ast.expr

    def column(self, name: str) -> list[ast.expr]:
        """Return the values of a name, in order; empty where they are not all written down."""
        at = self.names.index(name)
        cells: list[ast.expr] = []
        for row in self.rows.elts if isinstance(self.rows, ast.List | ast.Tuple) else ():
            found = _cells(row, is_single=len(self.names) == 1)
            if isinstance(row, ast.Starred) or len(found) != len(self.names):
                return []
            cells.append(found[at])
        return cells


def parameters(file: TestFile, function: FunctionNode) -> list[Table]:
    """Return the tables of ``parametrize``."""
    found: list[Table] = []
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and called(decorator) == "parametrize" and len(decorator.args) > 1:
            found.append(Table(_header(decorator.args[0]), _resolved(file, decorator.args[1])))
    return found


def loops(file: TestFile, function: FunctionNode) -> list[Table]:
    """Return the tables that the function's own loops go through."""
    found: list[Table] = []
    for node in own_nodes(function):
        if isinstance(node, ast.For):
            targets = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
            names = tuple(target.id for target in targets if isinstance(target, ast.Name))
            if len(names) == len(targets):
                found.append(Table(names, _resolved(file, node.iter)))
    return found


def own_nodes(function: FunctionNode) -> Iterator[ast.AST]:
    """Yield the nodes of a function: of those in it that bind names of their own, nothing."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def called(call: ast.Call) -> str:
    """Return the last part of the name of what is called."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _header(node: ast.expr) -> tuple[str, ...]:
    parts: Sequence[ast.expr] = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return tuple(name.strip() for text in texts for name in text.split(",") if name.strip())


def _cells(row: ast.expr, *, is_single: bool) -> Sequence[ast.expr]:
    if isinstance(row, ast.Call) and called(row) == "param":
        return row.args
    if is_single:
        return [row]
    return row.elts if isinstance(row, ast.Tuple | ast.List) else []


def _resolved(file: TestFile, node: ast.expr) -> ast.expr:
    """Return the value of a name of the module that is assigned once and read at this place only."""
    if not isinstance(node, ast.Name):
        return node
    uses = [each for each in ast.walk(file.tree) if isinstance(each, ast.Name) and each.id == node.id]
    for statement in file.tree.body:
        if len(uses) == 2 and isinstance(statement, ast.Assign) and statement.targets[0] in uses:
            return statement.value
    return node
