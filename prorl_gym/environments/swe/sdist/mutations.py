"""Seeding faults: small edits of Python source at exact places, everything around them kept byte for byte.

The syntax tree gives the position of an expression; the edit changes the text between and around its parts, so
formatting and comments survive, and the difference to the original is a patch of a line or two. Operators follow the
mutation testing literature (relational, arithmetic and logical operator replacement, constants, statement and call
deletion, argument swaps); each makes a fault that a programmer could make.
"""

import ast
import warnings
from collections.abc import Callable, Iterator
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
        """Return the source with the fault in it."""
        return source[: self.start] + self.new + source[self.end :]


_Edit = tuple[int, int, bytes]
"""Start, end, new bytes."""


class _SourceMap:
    """A file, and where its nodes lie in it."""

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

    def removal_of(self, statement: ast.stmt) -> "_Edit":
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
    "min": b"max",
    "max": b"min",
    "any": b"all",
    "all": b"any",
    "lower": b"upper",
    "upper": b"lower",
    "startswith": b"endswith",
    "endswith": b"startswith",
    "lstrip": b"rstrip",
    "rstrip": b"lstrip",
    "find": b"rfind",
    "rfind": b"find",
    "append": b"remove",
    "appendleft": b"append",
    "popleft": b"pop",
    "keys": b"values",
    "floor": b"ceil",
    "ceil": b"floor",
}
_TRANSPARENT = frozenset({"abs", "list", "tuple", "sorted", "reversed", "str", "int", "float", "set", "iter"})
_UNSWAPPED = frozenset({"isinstance", "issubclass", "hasattr", "getattr", "setattr", "super", "cast"})


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
    found: dict[tuple[int, int, bytes], Mutation] = {}
    for node in _inside_functions(tree):
        for name, operator in _OPERATORS:
            for start, end, new in operator(node, text):
                found.setdefault((start, end, new), Mutation(path, node.lineno, name, start, end, new))
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


def _between(text: _SourceMap, left: ast.expr, right: ast.expr, old: bytes, new: bytes) -> Iterator[_Edit]:
    """Replace the operator between two expressions, where only blanks and brackets surround it."""
    start, end = text.end(left), text.start(right)
    gap = text.source[start:end]
    if b"\n" not in gap and gap.strip(b" ()") == old:
        at = start + gap.index(old)
        yield at, at + len(old), new


def _comparison(node: _Node, text: _SourceMap) -> Iterator[_Edit]:
    if not isinstance(node, ast.Compare):
        return
    for (left, right), operator in zip(pairwise([node.left, *node.comparators]), node.ops, strict=True):
        old, others = _COMPARISONS[type(operator)]
        for new in others:
            yield from _between(text, left, right, old, new)


def _arithmetic(node: _Node, text: _SourceMap) -> Iterator[_Edit]:
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not _is_text(node.left, node.right):
        yield from _between(text, node.left, node.right, *_ARITHMETIC[type(node.op)])


def _logic(node: _Node, text: _SourceMap) -> Iterator[_Edit]:
    if isinstance(node, ast.BoolOp):
        old, new = (b"and", b"or") if isinstance(node.op, ast.And) else (b"or", b"and")
        for left, right in pairwise(node.values):
            yield from _between(text, left, right, old, new)


def _negation(node: _Node, text: _SourceMap) -> Iterator[_Edit]:
    """``not x`` becomes ``x``; a bare condition gets a ``not``."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield text.start(node), text.start(node.operand), b""
    if isinstance(node, ast.If | ast.While | ast.IfExp) and isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
        yield text.start(node.test), text.start(node.test), b"not "


def _constant(node: _Node, text: _SourceMap) -> Iterator[_Edit]:
    """Numbers move by one, truth values flip."""
    if not isinstance(node, ast.Constant):
        return
    spelled = text.source_of(node)
    if isinstance(node.value, bool):
        yield text.start(node), text.end(node), b"False" if node.value else b"True"
    elif isinstance(node.value, int) and spelled.isdigit():
        for value in (node.value + 1, node.value - 1):
            if value >= 0:
                yield text.start(node), text.end(node), str(value).encode()


def _boundary(node: _Node, text: _SourceMap) -> Iterator[_Edit]:
    """Off by one: the bounds of a slice or a range that are no plain numbers."""
    bounds: list[ast.expr | None] = []
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        bounds = [node.slice.lower, node.slice.upper]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        bounds = list(node.args[:2])
    for bound in bounds:
        if isinstance(bound, ast.Name | ast.Attribute | ast.Call):
            yield text.end(bound), text.end(bound), b" + 1"
            yield text.end(bound), text.end(bound), b" - 1"


def _dropped_call(node: _Node, text: _SourceMap) -> Iterator[_Edit]:
    """Drop a call that passes its value through, or one made for its effect."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield text.removal_of(node)
    if not isinstance(node, ast.Call) or node.keywords:
        return
    if isinstance(node.func, ast.Name) and node.func.id in _TRANSPARENT and len(node.args) == 1:
        if isinstance(node.args[0], ast.Name | ast.Attribute | ast.Call | ast.Subscript):
            yield text.start(node), text.end(node), text.source_of(node.args[0])
    elif isinstance(node.func, ast.Attribute) and not node.args:
        yield text.start(node), text.end(node), text.source_of(node.func.value)


def _swapped_arguments(node: _Node, text: _SourceMap) -> Iterator[_Edit]:
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return
    if isinstance(node.func, ast.Name) and node.func.id in _UNSWAPPED:
        return  # an unlikely mistake
    for left, right in pairwise(node.args):
        if not isinstance(left, ast.Starred) and not isinstance(right, ast.Starred):
            gap = text.source[text.end(left) : text.start(right)]
            yield text.start(left), text.end(right), text.source_of(right) + gap + text.source_of(left)


def _sibling(node: _Node, text: _SourceMap) -> Iterator[_Edit]:
    """A related name instead of the right one: ``min`` for ``max``, ``find`` for ``rfind``."""
    if not isinstance(node, ast.Call):
        return
    if isinstance(node.func, ast.Name) and node.func.id in _SIBLINGS:
        yield text.start(node.func), text.end(node.func), _SIBLINGS[node.func.id]
    elif isinstance(node.func, ast.Attribute) and node.func.attr in _SIBLINGS:
        end = text.end(node.func)
        yield end - len(node.func.attr), end, _SIBLINGS[node.func.attr]


def _loop_exit(node: _Node, text: _SourceMap) -> Iterator[_Edit]:
    if isinstance(node, ast.Break | ast.Continue):
        yield text.start(node), text.end(node), b"continue" if isinstance(node, ast.Break) else b"break"


def _augmented(node: _Node, text: _SourceMap) -> Iterator[_Edit]:
    """``x += 1`` becomes ``x -= 1`` or ``x = 1``."""
    if isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC and not _is_text(node.value):
        old, new = _ARITHMETIC[type(node.op)]
        yield from _between(text, node.target, node.value, old + b"=", new + b"=")
        yield from _between(text, node.target, node.value, old + b"=", b"=")


def _is_text(*nodes: ast.expr) -> bool:
    return any(
        isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
        for node in nodes
    )


_Operator = Callable[[_Node, _SourceMap], Iterator[_Edit]]
_OPERATORS: tuple[tuple[str, _Operator], ...] = (
    ("comparison", _comparison),
    ("arithmetic", _arithmetic),
    ("logic", _logic),
    ("negation", _negation),
    ("constant", _constant),
    ("boundary", _boundary),
    ("dropped call", _dropped_call),
    ("swapped arguments", _swapped_arguments),
    ("sibling", _sibling),
    ("loop exit", _loop_exit),
    ("augmented", _augmented),
)
