"""Wrong versions of a test: one place changed, so that the right repair fails it.

They must look as natural as the original, because code under test can read the source of the test that calls it: a
wrong constant has the type, the length and the character classes of the right one, and all variants of a test change
the same character, so that the right one is not the one in their middle.
"""

import ast
import random
import re
import string
import warnings
from collections.abc import Iterator, Sequence

from prorl_gym.environments.swe.controls.plan import Edit
from prorl_gym.environments.swe.controls.source import FunctionNode, TestFile
from prorl_gym.environments.swe.controls.tables import called, loops, parameters

VARIANTS = 8
"""Versions at one place."""

# How conspicuous a change is, by the kind of what is changed; see ``_conspicuous`` for what is added to it.
_EXPECTED, _WRAPPED, _INPUT = 0, 3, 6
_BOOLEAN, _OTHER_ERROR, _INVERTED = 1, 4, 7
_ALONE = 3
"""Added where there is one way of changing a place: a guess about it is right half of the time."""
_ASSERTING = re.compile("_?(assert|check|verify|expect|compare|eq_)", re.IGNORECASE)
_MOST = 9
_SHORT = 3
_MAX_PLACES = 64
_WORD = re.compile("[A-Za-z0-9]+")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_VOWELS = "aeiou"
_CONSONANTS = "".join(letter for letter in string.ascii_lowercase if letter not in _VOWELS)
_CLASSES = (_VOWELS, _CONSONANTS, _VOWELS.upper(), _CONSONANTS.upper(), string.digits)

_OPPOSITES = {
    "assertTrue": "assertFalse",
    "assertEqual": "assertNotEqual",
    "assertIn": "assertNotIn",
    "assertIs": "assertIsNot",
    "assertIsNone": "assertIsNotNone",
    "assertIsInstance": "assertNotIsInstance",
    "assertGreater": "assertLessEqual",
    "assertLess": "assertGreaterEqual",
    "assertRegex": "assertNotRegex",
    "assertAlmostEqual": "assertNotAlmostEqual",
}
_OPPOSITE = {**_OPPOSITES, **{value: key for key, value in _OPPOSITES.items()}}
_OPERATORS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Lt: ("<", ">="),
    ast.GtE: (">=", "<"),
    ast.Gt: (">", "<="),
    ast.LtE: ("<=", ">"),
}
"""How a comparison is spelled, and its opposite."""
_ERRORS = ("ValueError", "TypeError", "KeyError", "IndexError", "AttributeError", "ZeroDivisionError", "OSError")
_RELATED = {"KeyError": {"LookupError"}, "IndexError": {"LookupError"}, "ZeroDivisionError": {"ArithmeticError"}}
"""An exception that is one of these as well would be caught by it."""


def versions(file: TestFile, name: str, rng: random.Random) -> Iterator[tuple[Edit, ...]]:
    """Yield groups of wrong versions of a function, each group at one place, the least conspicuous place first.

    A wrong expected value tells nothing. A wrong input may: code under test that finds it invalid knows the control.

    Args:
        file: where it is.
        name: where it is written in the file.
        rng: chooses among what looks alike.
    """
    found = file.functions[name]
    groups: list[tuple[int, tuple[Edit, ...]]] = []
    seen: set[tuple[int, int]] = set()
    body = file.text(found.node)
    for level, node in _constants(file, found.node, found.owner):
        if (place := file.span(node)) not in seen:
            seen.add(place)
            groups += _wrong_values(file, node, level, body, rng)
    groups += [(_INVERTED, (edit,)) for node in _assertions(found.node) if (edit := _inverted(file, node))]
    groups += [(_OTHER_ERROR, group) for node in _raises(found.node) if (group := _other_errors(file, node, rng))]
    yield from (group for _, group in sorted(groups, key=lambda each: each[0] + _ALONE * (len(each[1]) == 1)))


def _constants(
    file: TestFile, function: FunctionNode, owner: ast.ClassDef | None
) -> Iterator[tuple[int, ast.Constant]]:
    """Yield constants and how conspicuous a change of their kind is; one may come again as a more conspicuous kind."""
    body = function.body[1:] if _is_docstring(function.body[0]) else function.body
    given = {
        target.id: node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        for target in _targets(node)
    }
    sides = [side for node in _assertions(function) for side in _sides(node)]
    for side in sides:
        value = given.get(side.id, side) if isinstance(side, ast.Name) else side
        if not _calls(value):
            yield from ((_EXPECTED, node) for node in _literals(value))
    names = {side.id for side in sides if isinstance(side, ast.Name)} - given.keys()
    tables = parameters(file, function)
    for table in (*tables, *loops(file, function)):
        for name in names.intersection(table.names):
            for value in table.column(name):
                yield from ((_EXPECTED, node) for node in _literals(value))
    for side in sides:
        yield from ((_WRAPPED, node) for node in _literals(side) if isinstance(side, ast.Call))
    for table in tables:
        yield from ((_WRAPPED, node) for node in _literals(table.rows))
    named = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    named |= {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)} if owner else set()
    for statement in (*file.tree.body, *(owner.body if owner else ())):
        if any(target.id in named for target in _targets(statement)):
            yield from ((_WRAPPED, node) for node in _literals(statement))
    for statement in body:
        yield from ((_INPUT, node) for node in _literals(statement))


def _targets(node: ast.AST) -> Iterator[ast.Name]:
    """Yield the plain names that a statement assigns its value to."""
    if isinstance(node, ast.Assign):
        yield from (target for target in node.targets if isinstance(target, ast.Name))


def _assertions(function: FunctionNode) -> Iterator[ast.Assert | ast.Call]:
    """Yield assertions: the statement, methods of ``TestCase``, and helpers that are called so."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) or (isinstance(node, ast.Call) and _ASSERTING.match(called(node))):
            yield node


def _raises(function: FunctionNode) -> Iterator[ast.Call]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and node.args and called(node) in ("raises", "assertRaises", "assertRaisesRegex"):
            yield node


def _sides(node: ast.Assert | ast.Call) -> Sequence[ast.expr]:
    """Return what is compared; what is on the right is expected more often."""
    if isinstance(node, ast.Call):
        return node.args
    return [*node.test.comparators, node.test.left] if isinstance(node.test, ast.Compare) else []


def _calls(node: ast.expr) -> bool:
    """Whether code may be called for a value, other than methods of literals."""
    return any(
        isinstance(part, ast.Call)
        and not (isinstance(part.func, ast.Attribute) and isinstance(part.func.value, ast.Constant))
        for part in ast.walk(node)
    )


def _literals(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield the constants below a node, without the pieces of formatted texts."""
    if isinstance(node, ast.JoinedStr):
        return
    if isinstance(node, ast.Constant):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from _literals(child)


def _wrong_values(
    file: TestFile, node: ast.Constant, kind: int, body: str, rng: random.Random
) -> Iterator[tuple[int, tuple[Edit, ...]]]:
    """Yield wrong values of a constant, and how conspicuous they are, if there are any."""
    start, end = file.span(node)
    text = file.source[start:end]
    if isinstance(node.value, bool):
        yield kind + _BOOLEAN, (Edit(start=start, end=end, text=str(not node.value)),)
    elif isinstance(node.value, int | float | str | bytes):
        places = [at for at, character in enumerate(text) if any(character in each for each in _CLASSES)]
        rng.shuffle(places)
        levels = {at: _conspicuous(text, at, body) for at in places[:_MAX_PLACES]}
        if not isinstance(node.value, str | bytes):  # trailing zeros are rarely what distinguishes a number
            levels = {at: level + (text[at] == "0") for at, level in levels.items()}
        for at in sorted(levels, key=levels.__getitem__):
            if edits := tuple(_replaced(start, text, at, node.value, rng)):
                yield kind + levels[at], edits
                return


def _conspicuous(text: str, at: int, body: str) -> int:
    """Return how much a change of a character tells that it was changed.

    A word that is no word any more tells something, and so does a name or a number that stands elsewhere in the test
    and is another one now.
    """
    if any(found.start() <= at < found.end() for found in _ESCAPE.finditer(text)):
        return _MOST
    word = next(found for found in _WORD.finditer(text) if found.start() <= at < found.end())
    again = len(re.findall(rf"(?<![A-Za-z0-9]){re.escape(word[0])}(?![A-Za-z0-9])", body)) > 1
    letters = 0 if text[at].isdigit() else 1 if len(word[0]) < _SHORT else 2
    return letters + 4 * again


def _replaced(start: int, text: str, at: int, value: int | float | str | bytes, rng: random.Random) -> Iterator[Edit]:
    """Yield up to ``VARIANTS`` texts with another character of the same class at one place."""
    alike = next(each for each in _CLASSES if text[at] in each).replace(text[at], "")
    made = 0
    for character in rng.sample(alike, len(alike)):
        other = text[:at] + character + text[at + 1 :]
        if _is_alike(other, value):
            yield Edit(start=start + at, end=start + at + 1, text=character)
            made += 1
        if made == VARIANTS:
            return


def _is_alike(text: str, value: int | float | str | bytes) -> bool:
    """Whether a literal has another value of the same type and length."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            other: object = ast.literal_eval(f"({text})")
        except (SyntaxError, ValueError, MemoryError):
            return False
    if type(other) is not type(value) or other == value:
        return False
    if isinstance(other, str | bytes) and isinstance(value, str | bytes):
        return len(other) == len(value)
    return len(str(other)) == len(str(value))


def _inverted(file: TestFile, node: ast.Assert | ast.Call) -> Edit | None:
    if isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Attribute) or (other := _OPPOSITE.get(node.func.attr)) is None:
            return None
        end = file.span(node.func)[1]
        return Edit(start=end - len(node.func.attr), end=end, text=other)
    test = node.test
    start, end = file.span(test)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, right = file.span(test.left)[1], file.span(test.comparators[0])[0]
        between = file.source[left:right]
        old, new = _OPERATORS[type(test.ops[0])]
        if between.count(old) == 1:
            at = left + between.index(old)
            return Edit(start=at, end=at + len(old), text=new)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return Edit(start=start, end=end, text=file.text(test.operand))
    text = file.source[start:end]
    binds = not isinstance(test, ast.BoolOp | ast.IfExp | ast.Lambda | ast.NamedExpr)
    return Edit(start=start, end=end, text=f"not {text}" if binds else f"not ({text})")


def _other_errors(file: TestFile, call: ast.Call, rng: random.Random) -> tuple[Edit, ...]:
    if not isinstance(call.args[0], ast.Name):
        return ()
    start, end = file.span(call.args[0])
    name = call.args[0].id
    others = [error for error in _ERRORS if error != name and name not in _RELATED.get(error, ())]
    return tuple(Edit(start=start, end=end, text=error) for error in rng.sample(others, min(len(others), VARIANTS)))


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
