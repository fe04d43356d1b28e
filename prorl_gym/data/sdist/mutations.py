"""Seeding faults: small edits of Python source at exact places, everything around them kept byte for byte.

The syntax tree gives the position of an expression; the edit changes the text between and around its parts, so
formatting and comments survive, and the difference to the original is a patch of a line or two. Operators follow the
mutation testing literature (relational, arithmetic and logical operator replacement, constants, statement and call
deletion, argument swaps); each makes a fault that a programmer could make.
"""

import ast
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Mutation:
    """One edit of one file. Offsets are in bytes of its UTF-8 text."""

    path: str
    line: int
    operator: str
    start: int
    end: int
    new: bytes

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new + source[self.end :]


_Edit = tuple[int, int, bytes]
"""Start, end, new bytes."""


class _SourceMap:
    def __init__(self, source: bytes, tree: ast.Module) -> None:
        self.source = source
        self._accompanied = set(_removable_statements(tree))
        self._starts = [0]
        for line in source.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def source_of(self, node: ast.expr | ast.stmt) -> bytes:
        return self.source[self.start(node) : self.end(node)]

    def replace_between(self, left: ast.expr, right: ast.expr, old: bytes, new: bytes) -> _Edit | None:
        """Replace the operator between two expressions, where only blanks and brackets surround it."""
        start = self.end(left)
        gap = self.source[start : self.start(right)]
        if b"\n" in gap or gap.strip(b" ()") != old:
            return None
        at = start + gap.index(old)
        return at, at + len(old), new

    def removal_of(self, statement: ast.stmt) -> _Edit:
        """Return the removal of a statement: its lines where its block has others, else ``pass``."""
        start, end = self.start(statement), self.end(statement)
        first = self._starts[statement.lineno - 1]
        last = self.source.find(b"\n", end)
        alone_on_lines = not self.source[first:start].strip() and not self.source[end:last].strip()
        if statement in self._accompanied and last >= 0 and alone_on_lines:
            return first, last + 1, b""
        return start, end, b"pass"


_COMPARISONS: dict[type[ast.cmpop], tuple[bytes, tuple[bytes, ...]]] = {
    ast.Lt: (b"<", (b"<=", b">")),
    ast.LtE: (b"<=", (b"<",)),
    ast.Gt: (b">", (b">=", b"<")),
    ast.GtE: (b">=", (b">",)),
    ast.Eq: (b"==", (b"!=",)),
    ast.NotEq: (b"!=", (b"==",)),
    ast.In: (b"in", (b"not in",)),
    ast.NotIn: (b"not in", (b"in",)),
    ast.Is: (b"is", (b"is not",)),
    ast.IsNot: (b"is not", (b"is",)),
}
_ARITHMETIC: dict[type[ast.operator], tuple[bytes, bytes]] = {
    ast.Add: (b"+", b"-"),
    ast.Sub: (b"-", b"+"),
    ast.Mult: (b"*", b"+"),
    ast.FloorDiv: (b"//", b"%"),
    ast.Mod: (b"%", b"//"),
    ast.BitAnd: (b"&", b"|"),
    ast.BitOr: (b"|", b"&"),
    ast.LShift: (b"<<", b">>"),
    ast.RShift: (b">>", b"<<"),
}
_SIBLINGS = {
    **{"min": b"max", "max": b"min", "any": b"all", "all": b"any", "lower": b"upper", "upper": b"lower"},
    **{"startswith": b"endswith", "endswith": b"startswith", "lstrip": b"rstrip", "rstrip": b"lstrip"},
    **{"find": b"rfind", "rfind": b"find", "append": b"remove", "appendleft": b"append", "popleft": b"pop"},
    **{"keys": b"values", "floor": b"ceil", "ceil": b"floor"},
}
"""A related name instead of the right one."""
_TRANSPARENT = frozenset({"abs", "list", "tuple", "sorted", "reversed", "str", "int", "float", "set", "iter"})
_UNSWAPPED = frozenset({"isinstance", "issubclass", "hasattr", "getattr", "setattr", "super", "cast"})
"""Functions whose arguments are unlikely to be swapped by mistake."""


def propose_mutations(path: str, source: bytes) -> list[Mutation]:
    """Return every single edit that our operators propose for a file, in the order of their places.

    Only code inside functions is touched: what runs at import breaks everything or nothing. A file that is not UTF-8
    with line feeds, or that does not parse, has none. Check each with ``is_fault`` before use.
    """
    if b"\r" in source or b"\f" in source or source.startswith(b"\xef\xbb\xbf"):
        return []
    tree = _parse(source)
    if tree is None:
        return []
    text = _SourceMap(source, tree)
    found: dict[_Edit, Mutation] = {}
    for node in _inside_functions(tree):
        for operator, edit in _edits(node, text):
            if edit is not None:
                found.setdefault(edit, Mutation(path, node.lineno, operator, *edit))
    return sorted(found.values(), key=lambda mutation: (mutation.start, mutation.end, mutation.new))


def is_fault(mutation: Mutation, source: bytes) -> bool:
    """Whether the result is Python, without a warning of the compiler, and not the same program. Parses both."""
    before, after = _parse(source), _parse(mutation.apply(source))
    return before is not None and after is not None and ast.dump(before) != ast.dump(after)


def _parse(source: bytes) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            tree = ast.parse(source)
            compile(source, "<source>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError, Warning):
            return None
    return tree


_Node = ast.expr | ast.stmt


def _removable_statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of blocks with several, docstrings not counted."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block: list[ast.stmt] | None = getattr(node, name, None)
            if isinstance(block, list):
                working = [
                    one for one in block if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
                ]
                yield from working if len(working) > 1 else ()


def _inside_functions(tree: ast.Module) -> Iterator[_Node]:
    """Yield expressions and statements of function bodies; no annotations, docstrings, defaults or f-string parts."""
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    while waiting:
        node, inside = waiting.pop()
        if inside and isinstance(node, ast.expr | ast.stmt):
            yield node
        if isinstance(node, ast.JoinedStr | ast.Assert | ast.Raise):
            continue  # positions inside f-strings are wrong before 3.12; messages and assertions are no behaviour
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += [(statement, True) for statement in reversed(node.body)]
        elif isinstance(node, ast.AnnAssign):
            waiting += [(node.value, inside)] if node.value else []
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            waiting += [(child, inside) for child in reversed(list(ast.iter_child_nodes(node)))]


def _edits(node: _Node, text: _SourceMap) -> Iterator[tuple[str, _Edit | None]]:
    """Yield the operators that apply to a node, with their edits; ``None`` where the source allows none."""
    start, end = text.start(node), text.end(node)
    match node:
        case ast.Compare():
            for (left, right), operator in zip(pairwise([node.left, *node.comparators]), node.ops, strict=True):
                old, others = _COMPARISONS[type(operator)]
                for new in others:
                    yield "comparison", text.replace_between(left, right, old, new)
        case ast.BinOp() if type(node.op) in _ARITHMETIC and not _is_text(node.left, node.right):
            yield "arithmetic", text.replace_between(node.left, node.right, *_ARITHMETIC[type(node.op)])
        case ast.BoolOp():
            old, new = (b"and", b"or") if isinstance(node.op, ast.And) else (b"or", b"and")
            for left, right in pairwise(node.values):
                yield "logic", text.replace_between(left, right, old, new)
        case ast.UnaryOp(op=ast.Not()):
            yield "negation", (start, text.start(node.operand), b"")
        case ast.If() | ast.While() | ast.IfExp() if isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
            yield "negation", (text.start(node.test), text.start(node.test), b"not ")
        case ast.Constant(value=bool() as value):
            yield "constant", (start, end, b"False" if value else b"True")
        case ast.Constant(value=int() as value) if text.source_of(node).isdigit():
            for other in (value + 1, value - 1):
                if other >= 0:
                    yield "constant", (start, end, str(other).encode())
        case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper)):
            yield from _shifted_bounds([lower, upper], text)
        case ast.Expr(value=ast.Call()):
            yield "dropped call", text.removal_of(node)
        case ast.Call():
            yield from _call_edits(node, text)
        case ast.Break() | ast.Continue():
            yield "loop exit", (start, end, b"continue" if isinstance(node, ast.Break) else b"break")
        case ast.AugAssign() if type(node.op) in _ARITHMETIC and not _is_text(node.value):
            old, new = _ARITHMETIC[type(node.op)]
            yield "augmented", text.replace_between(node.target, node.value, old + b"=", new + b"=")
            yield "augmented", text.replace_between(node.target, node.value, old + b"=", b"=")
        case _:
            pass


def _shifted_bounds(bounds: Iterable[ast.expr | None], text: _SourceMap) -> Iterator[tuple[str, _Edit]]:
    """Off by one: bounds that are no plain numbers."""
    for bound in bounds:
        if isinstance(bound, ast.Name | ast.Attribute | ast.Call):
            for shift in (b" + 1", b" - 1"):
                yield "boundary", (text.end(bound), text.end(bound), shift)


def _call_edits(node: ast.Call, text: _SourceMap) -> Iterator[tuple[str, _Edit]]:
    start, end, function, args = text.start(node), text.end(node), node.func, node.args
    name = function.id if isinstance(function, ast.Name) else ""
    if name == "range":
        yield from _shifted_bounds(args[:2], text)
    if not node.keywords:  # drop a call that passes its value through
        if name in _TRANSPARENT and len(args) == 1:
            if isinstance(args[0], ast.Name | ast.Attribute | ast.Call | ast.Subscript):
                yield "dropped call", (start, end, text.source_of(args[0]))
        elif isinstance(function, ast.Attribute) and not args:
            yield "dropped call", (start, end, text.source_of(function.value))
    for left, right in pairwise(args) if name not in _UNSWAPPED else ():
        if not isinstance(left, ast.Starred) and not isinstance(right, ast.Starred):
            gap = text.source[text.end(left) : text.start(right)]
            yield (
                "swapped arguments",
                (text.start(left), text.end(right), text.source_of(right) + gap + text.source_of(left)),
            )
    name = function.attr if isinstance(function, ast.Attribute) else name
    if name in _SIBLINGS:
        yield "sibling", (text.end(function) - len(name), text.end(function), _SIBLINGS[name])


def _is_text(*nodes: ast.expr) -> bool:
    return any(
        isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
        for node in nodes
    )
