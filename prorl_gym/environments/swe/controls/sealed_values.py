"""Sealed values: a test emits the value that it got instead of comparing it with a literal.

The literal does not enter the sandbox; the service compares. Sealed are comparisons by ``==``, ``assertEqual`` and
plain helpers of that kind with a literal of primitives, ``is`` with ``True``, ``False`` or ``None``, and a literal
``in`` a value. A name may stand for the literal: a variable, a parameter, or the variable of a loop over a table.
``assert f(x)`` is not sealed: it has no literal to hide.
"""

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from prorl_gym.environments.swe.controls.control_plan import SealedValue
from prorl_gym.environments.swe.controls.parsed_tests import (
    FunctionNode,
    TestFile,
    called_name,
    loop_tables,
    parametrize_tables,
    replace_spans,
    scope_nodes,
)

_EQUALITY_METHODS = (
    *("assertEqual", "assertEquals", "assertDictEqual"),
    *("assertListEqual", "assertTupleEqual", "assertSetEqual"),
)
_MISSING = object()
_MAX_LENGTH = 1 << 20
"""Longest text that an expression of literals may make."""


@dataclass(frozen=True, slots=True)
class _Assertion:
    """An assertion that compares two expressions."""

    statement: ast.stmt
    sides: tuple[tuple[ast.expr, ast.expr], ...]
    """Candidates for the expected expression, each with the value that is compared with it."""
    contains: bool = False


@dataclass(frozen=True, slots=True)
class _Literals:
    """Values of an expected expression."""

    values: tuple[Any, ...]
    blanks: tuple[tuple[int, int], ...] = ()
    """Spans of the literals when the expression is a name."""
    each: bool = False
    """One value for each time that the assertion is reached."""


def find_sealed_values(file: TestFile, name: str, helpers: Collection[str] = ()) -> tuple[SealedValue, ...]:
    """Return the comparisons of a function that can be sealed, in the order of the file.

    ``helpers`` only compare their first two arguments; see ``equality_helpers``.
    """
    function = file.functions[name].node
    names = _literal_names(file, function)
    comparisons: list[tuple[_Assertion, ast.expr, ast.expr]] = []
    for assertion in _assertions(function, helpers):
        pairs = [
            (expected, value)
            for known in ({}, names)  # a literal rather than a name
            for expected, value in assertion.sides
            if _literals(expected, known) is not None and _literals(value, known) is None
        ]
        comparisons += [(assertion, *pair) for pair in pairs[:1]]
    removable = _names_read_only_as_expected(file, function, comparisons)
    sealed: list[SealedValue] = []
    for assertion, expected, value in comparisons:
        if isinstance(expected, ast.Name) and expected.id not in removable:
            continue
        (start, end), (value_start, value_end) = file.span(assertion.statement), file.span(value)
        literals = _literals(expected, names)
        assert literals is not None
        sealed.append(
            SealedValue(
                start=start,
                end=end,
                value_start=value_start,
                value_end=value_end,
                expected=repr(list(literals.values) if literals.each else literals.values[0]),
                blanks=literals.blanks,
                each=literals.each,
                contains=assertion.contains,
            )
        )
    return tuple(sorted(sealed, key=lambda seal: seal.start))


def seal_source(source: str, seals: Sequence[SealedValue], emit: str) -> str:
    """Return the source with each assertion replaced by the call ``emit(number of the sealed value, value)``."""
    blanks = {blank for seal in seals for blank in seal.blanks}
    calls = [
        (seal.start, seal.end, f"{emit}({number}, ({source[seal.value_start : seal.value_end]}))")
        for number, seal in enumerate(seals)
    ]
    return replace_spans(source, [*((start, end, "None") for start, end in blanks), *calls])


def valid_seals(seals: Sequence[SealedValue], are_good: Sequence[bool]) -> list[int]:
    """Return the numbers of the good sealed values, without those that share a name with a bad one."""
    bad = {blank for seal, is_good in zip(seals, are_good, strict=True) if not is_good for blank in seal.blanks}
    return [number for number, seal in enumerate(seals) if are_good[number] and bad.isdisjoint(seal.blanks)]


def equality_helpers(files: Iterable[TestFile]) -> frozenset[str]:
    """Return names of functions that do nothing but compare, and perhaps print, their first two arguments."""
    found: dict[str, bool] = {}
    for file in files:
        for name, function in file.all_functions:
            found[name] = name not in found and _is_equality_helper(function.node)
    return frozenset(name for name, is_helper in found.items() if is_helper)


def matches_expected(seal: SealedValue, emitted: Sequence[Any]) -> bool:
    """Whether the expected values were emitted, encoded. One without an encoding is not: it may equal anything."""
    expected: Any = ast.literal_eval(seal.expected)
    if not emitted or (seal.each and len(emitted) != len(expected)):
        return False
    values = [decode_value(each) for each in emitted]
    if any(value is _MISSING for value in values):
        return False
    pairs: list[tuple[Any, Any]] = list(zip(expected if seal.each else [expected] * len(values), values, strict=True))
    if not seal.contains:
        return all(bool(wanted == value) for wanted, value in pairs)
    try:
        return all(wanted in value for wanted, value in pairs)
    except TypeError:
        return False


def decode_value(encoded: Any) -> Any:
    """Return a value that ``guest_runner.encode_value`` encoded, or ``_MISSING`` for one that has no encoding."""
    try:
        return _decode(encoded)
    except (KeyError, TypeError, ValueError, IndexError, RecursionError, ZeroDivisionError):
        return _MISSING


def _literal_names(file: TestFile, function: FunctionNode) -> dict[str, _Literals]:
    """Return the names of a function that are bound to literals only."""
    bound = [
        node.id for node in ast.walk(function) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    ]
    parameters = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    found: dict[str, _Literals] = {}
    for node in scope_nodes(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if bound.count(name) == 1 and name not in parameters and (values := _evaluate_literals([node.value])):
                found[name] = _Literals(values, (file.span(node.value),))
    decorated = parametrize_tables(file, function)
    # Several decorators multiply, so the order of values is not that of one table.
    tables = [(table, True) for table in decorated if len(decorated) == 1]
    tables += [(table, False) for table in loop_tables(file, function)]
    for table, is_parametrized in tables:
        for name in table.names:
            is_bound_here = bound.count(name) == (0 if is_parametrized else 1)
            cells = table.column(name)
            if is_bound_here and (name in parameters) is is_parametrized and (values := _evaluate_literals(cells)):
                found[name] = _Literals(values, tuple(file.span(cell) for cell in cells), each=True)
    return found


def _assertions(function: FunctionNode, helpers: Collection[str]) -> Iterator[_Assertion]:
    for node in scope_nodes(function):
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare) and len(node.test.ops) == 1:
            left, right = node.test.left, node.test.comparators[0]
            if isinstance(node.test.ops[0], ast.Eq):
                yield _Assertion(node, ((right, left), (left, right)))
            elif isinstance(node.test.ops[0], ast.Is) and isinstance(right, ast.Constant):
                if right.value is None or isinstance(right.value, bool):
                    yield _Assertion(node, ((right, left),))
            elif isinstance(node.test.ops[0], ast.In):
                yield _Assertion(node, ((left, right),), contains=True)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and len(node.value.args) >= 2:
            call, (first, second, *more) = node.value, node.value.args
            if any(isinstance(argument, ast.Starred) for argument in (first, second, *more)):
                continue
            is_helper = isinstance(call.func, ast.Name) and call.func.id in helpers and not more and not call.keywords
            is_method = isinstance(call.func, ast.Attribute)
            if is_helper or (is_method and called_name(call) in _EQUALITY_METHODS):
                yield _Assertion(node, ((second, first), (first, second)))
            elif is_method and called_name(call) == "assertIn":
                yield _Assertion(node, ((first, second),), contains=True)


def _literals(node: ast.expr, names: Mapping[str, _Literals]) -> _Literals | None:
    """Return the values of an expression; ``None`` when it is neither a literal nor one of the names."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    values = _evaluate_literals([node])
    return _Literals(values) if values else None


def _names_read_only_as_expected(
    file: TestFile, function: FunctionNode, comparisons: Sequence[tuple[_Assertion, ast.expr, ast.expr]]
) -> frozenset[str]:
    """Return the names that only the replaced assertions read, outside the values that they emit."""
    spans: dict[str, list[tuple[tuple[int, int], tuple[int, int]]]] = {}
    for assertion, expected, value in comparisons:
        if isinstance(expected, ast.Name):
            spans.setdefault(expected.id, []).append((file.span(assertion.statement), file.span(value)))

    def is_replaced(node: ast.Name) -> bool:
        start = file.span(node)[0]
        return any(
            whole[0] <= start < whole[1] and not kept[0] <= start < kept[1] for whole, kept in spans.get(node.id, ())
        )

    reads = [node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    return frozenset(spans.keys() - {node.id for node in reads if not is_replaced(node)})


def _evaluate_literals(nodes: Sequence[ast.expr]) -> tuple[Any, ...]:
    """Return the values of expressions of literals; empty when any is something else."""
    try:
        values = tuple(_evaluate(node) for node in nodes)
        return values if ast.literal_eval(repr(values)) == values else ()
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ()


def _evaluate(node: ast.expr) -> Any:
    """Return the value of literals, their sums, repeated texts and joined texts; anything else raises."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        text, count = (left, right) if isinstance(left, str) else (right, left)
        if not isinstance(text, str) or not isinstance(count, int) or len(text) * count > _MAX_LENGTH:
            raise ValueError("no repeated text")
        return text * count
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join":
        separator, parts = _evaluate(node.func.value), [_evaluate(each) for each in node.args]
        if not isinstance(separator, str) or len(parts) != 1 or node.keywords:
            raise ValueError("no joined texts")
        return separator.join(parts[0])
    if isinstance(node, ast.List):
        return [_evaluate(each) for each in node.elts]
    return ast.literal_eval(node)


def _is_equality_helper(function: FunctionNode) -> bool:
    parameters = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    asserts: list[ast.Assert] = []
    for statement in function.body:
        if isinstance(statement, ast.Assert):
            asserts.append(statement)
            continue
        # Apart from that it may only print and have a docstring.
        value = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(value, ast.Constant) and not (isinstance(value, ast.Call) and called_name(value) == "print"):
            return False
    if (
        len(asserts) != 1
        or len(parameters) < 2
        or function.decorator_list
        or isinstance(function, ast.AsyncFunctionDef)
    ):
        return False
    test = asserts[0].test
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return False
    sides = [side.id for side in (test.left, test.comparators[0]) if isinstance(side, ast.Name)]
    return sorted(sides) == sorted(parameters[:2])


def _decode(encoded: Any) -> Any:
    kind, content = encoded[0], encoded[1]
    collections: Mapping[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    if kind in collections:
        return collections[kind]([_decode(each) for each in content])
    if kind == "dict":
        return {_decode(key): _decode(value) for key, value in content}
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "float":
        return float(content)
    if kind == "int":
        return int(content, 16)
    if kind == "ratio":
        return Fraction(*(int(each, 16) for each in content))
    if kind == "plain" and (content is None or isinstance(content, bool | str)):
        return content
    raise ValueError(kind)
