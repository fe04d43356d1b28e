"""Sealed values: a test that hands out what it got instead of comparing it with a literal.

The literal does not enter the sandbox. Sealed are comparisons by ``==``, ``assertEqual`` and plain helpers of that kind
with a literal of primitives, ``is`` with ``True``, ``False`` or ``None``, and a literal ``in`` a value: there is
nothing in them that the judge could see otherwise. A name may stand for the literal: a variable, a parameter, or the
variable of a loop over a table. Truth values are not sealed where the test names none: there is nothing to guess.
"""

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prorl_gym.environments.swe.controls.plan import Seal
from prorl_gym.environments.swe.controls.source import FunctionNode, TestFile, splice
from prorl_gym.environments.swe.controls.tables import called, loops, own_nodes, parameters

_EQUAL = ("assertEqual", "assertEquals", "assertDictEqual", "assertListEqual", "assertTupleEqual", "assertSetEqual")
_MISSING = object()
_MOST = 1 << 20
"""Length of a value that an expression of literals makes."""


@dataclass(frozen=True, slots=True)
class _Site:
    """An assertion that compares two expressions."""

    statement: ast.stmt
    sides: tuple[tuple[ast.expr, ast.expr], ...]
    """What may be expected, and the value that it is compared with."""
    contains: bool = False


@dataclass(frozen=True, slots=True)
class _Name:
    """A name that stands for literals."""

    values: tuple[Any, ...]
    blanks: tuple[tuple[int, int], ...]
    each: bool


def seals(file: TestFile, name: str, helpers: Collection[str] = ()) -> tuple[Seal, ...]:
    """Return the comparisons of a function that can be sealed.

    Args:
        file: where it is.
        name: where it is written in the file.
        helpers: functions that only compare their first two arguments; see ``equalities``.
    """
    function = file.functions[name].node
    names = _names(file, function)
    found: list[tuple[_Site, ast.expr, ast.expr]] = []
    for site in _sites(function, helpers):
        pairs = [
            (expected, value)
            for known in ({}, names)
            for expected, value in site.sides
            if _expected(expected, known) is not None and _expected(value, known) is None
        ]
        found += [(site, *pair) for pair in pairs[:1]]
    hidden = _only_expected(file, function, found)
    made: list[Seal] = []
    for site, expected, value in found:
        if isinstance(expected, ast.Name) and expected.id not in hidden:
            continue
        (start, end), (value_start, value_end) = file.span(site.statement), file.span(value)
        known = _expected(expected, names)
        assert known is not None
        made.append(
            Seal(
                start=start,
                end=end,
                value_start=value_start,
                value_end=value_end,
                expected=repr(list(known.values) if known.each else known.values[0]),
                blanks=known.blanks,
                each=known.each,
                contains=site.contains,
            )
        )
    return tuple(sorted(made, key=lambda seal: seal.start))


def sealed(source: str, sites: Sequence[Seal], emit: str) -> str:
    """Return the source with values handed to a function of this name: ``emit(number of the site, value)``."""
    blanks = {blank for seal in sites for blank in seal.blanks}
    return splice(
        source,
        [
            *((start, end, "None") for start, end in blanks),
            *(
                (seal.start, seal.end, f"{emit}({number}, ({source[seal.value_start : seal.value_end]}))")
                for number, seal in enumerate(sites)
            ),
        ],
    )


def kept(sites: Sequence[Seal], are_good: Sequence[bool]) -> list[int]:
    """Return the numbers of the sites that are good; one that shares a name with another that is not cannot stay."""
    bad = {blank for seal, is_good in zip(sites, are_good, strict=True) if not is_good for blank in seal.blanks}
    return [at for at, seal in enumerate(sites) if are_good[at] and bad.isdisjoint(seal.blanks)]


def equalities(files: Iterable[TestFile]) -> frozenset[str]:
    """Return names of functions that do nothing but compare, and perhaps print, their first two arguments."""
    found: dict[str, bool] = {}
    for file in files:
        for name, each in file.all:
            found[name] = name not in found and _is_equality(each.node)
    return frozenset(name for name, is_equality in found.items() if is_equality)


def agrees(seal: Seal, emitted: Sequence[Any]) -> bool | None:
    """Whether what a site emitted is what the test expects; ``None``: it was of a kind that has no encoding.

    Args:
        seal: the site.
        emitted: values as they came, see ``read_value``.
    """
    expected: Any = ast.literal_eval(seal.expected)
    if not emitted or (seal.each and len(emitted) != len(expected)):
        return False
    values = [read_value(each) for each in emitted]
    if any(value is _MISSING for value in values):
        return None
    pairs: list[tuple[Any, Any]] = list(zip(expected if seal.each else [expected] * len(values), values, strict=True))
    if not seal.contains:
        return all(bool(one == value) for one, value in pairs)
    try:
        return all(one in value for one, value in pairs)
    except TypeError:
        return False


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


def _sites(function: FunctionNode, helpers: Collection[str]) -> Iterator[_Site]:
    for node in own_nodes(function):
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare) and len(node.test.ops) == 1:
            left, right = node.test.left, node.test.comparators[0]
            if isinstance(node.test.ops[0], ast.Eq):
                yield _Site(node, ((right, left), (left, right)))
            elif isinstance(node.test.ops[0], ast.Is) and _is_single(right):
                yield _Site(node, ((right, left),))
            elif isinstance(node.test.ops[0], ast.In):
                yield _Site(node, ((left, right),), contains=True)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and len(node.value.args) >= 2:
            call, (one, other, *more) = node.value, node.value.args
            if any(isinstance(argument, ast.Starred) for argument in (one, other, *more)):
                continue
            is_helper = isinstance(call.func, ast.Name) and call.func.id in helpers and not more and not call.keywords
            is_method = isinstance(call.func, ast.Attribute)
            if is_helper or (is_method and called(call) in _EQUAL):
                yield _Site(node, ((other, one), (one, other)))
            elif is_method and called(call) == "assertIn":
                yield _Site(node, ((one, other),), contains=True)


def _expected(node: ast.expr, names: Mapping[str, _Name]) -> _Name | None:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    values = _values([node])
    return _Name(values, (), each=False) if values else None


def _names(file: TestFile, function: FunctionNode) -> dict[str, _Name]:
    """Return the names of a function that stand for literals all the time."""
    bound = [
        node.id for node in ast.walk(function) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    ]
    arguments = {each.arg for node in ast.walk(function) if isinstance(node, ast.arguments) for each in _all(node)}
    found: dict[str, _Name] = {}
    for node in own_nodes(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if bound.count(name) == 1 and name not in arguments and (values := _values([node.value])):
                found[name] = _Name(values, (file.span(node.value),), each=False)
    given = parameters(file, function)
    tables = [(table, 0) for table in given if len(given) == 1] + [(table, 1) for table in loops(file, function)]
    for table, count in tables:
        for name in table.names:
            cells = table.column(name)
            if bound.count(name) == count and (name in arguments) is not bool(count) and (values := _values(cells)):
                found[name] = _Name(values, tuple(file.span(cell) for cell in cells), each=True)
    return found


def _all(arguments: ast.arguments) -> list[ast.arg]:
    special = [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *special]


def _only_expected(
    file: TestFile, function: FunctionNode, found: Sequence[tuple[_Site, ast.expr, ast.expr]]
) -> frozenset[str]:
    """Return the names that are read by nothing but the assertions that go."""
    spans = {
        expected.id: [
            (file.span(site.statement), file.span(value))
            for site, other, value in found
            if isinstance(other, ast.Name) and other.id == expected.id
        ]
        for _, expected, _ in found
        if isinstance(expected, ast.Name)
    }
    read = [node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    left = {node.id for node in read if not any(_between(file.span(node), *each) for each in spans.get(node.id, ()))}
    return frozenset(spans.keys() - left)


def _between(place: tuple[int, int], whole: tuple[int, int], kept: tuple[int, int]) -> bool:
    """Whether a place is in a stretch, and not in the part of it that stays."""
    return whole[0] <= place[0] < whole[1] and not kept[0] <= place[0] < kept[1]


def _values(nodes: Sequence[ast.expr]) -> tuple[Any, ...]:
    """Return what expressions of literals make, or nothing when one is no such expression."""
    try:
        values = tuple(_value(node) for node in nodes)
        return values if ast.literal_eval(repr(values)) == values else ()
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ()


def _value(node: ast.expr) -> Any:
    """Return the value of literals, of their sums, and of texts that are joined.

    Raises:
        ValueError, TypeError, SyntaxError: it is none of these.
    """
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        one, other = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add):
            return one + other
        text, count = (one, other) if isinstance(one, str) else (other, one)
        if not isinstance(text, str) or not isinstance(count, int) or len(text) * count > _MOST:
            raise ValueError("no repeated text")
        return text * count
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join":
        mark, parts = _value(node.func.value), [_value(each) for each in node.args]
        if not isinstance(mark, str) or len(parts) != 1 or node.keywords:
            raise ValueError("no joined texts")
        return mark.join(parts[0])
    if isinstance(node, ast.List):
        return [_value(each) for each in node.elts]
    return ast.literal_eval(node)


def _is_single(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))


def _is_equality(function: FunctionNode) -> bool:
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    asserted: list[ast.Assert] = []
    for statement in function.body:
        if isinstance(statement, ast.Assert):
            asserted.append(statement)
        elif not isinstance(statement, ast.Expr) or not _is_quiet(statement.value):
            return False
    if len(asserted) != 1 or len(names) < 2 or function.decorator_list or isinstance(function, ast.AsyncFunctionDef):
        return False
    test = asserted[0].test
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return False
    sides = [side.id for side in (test.left, test.comparators[0]) if isinstance(side, ast.Name)]
    return sorted(sides) == sorted(names[:2])


def _is_quiet(node: ast.expr) -> bool:
    """Whether it is a docstring, or only prints."""
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Call) and called(node) == "print")
