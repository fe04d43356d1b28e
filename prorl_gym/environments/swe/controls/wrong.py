"""Wrong versions of a test: one place changed, so that the right repair fails it.

They must look as natural as the original, because code under test can read the source of the test that calls it: a
wrong constant has the type, the length and the character classes of the right one, and all variants of a test change
the same character, so that the right one is not the one in their middle.
"""

import ast
import random
import string
from collections.abc import Iterator, Sequence

from prorl_gym.environments.swe.controls.plan import Edit
from prorl_gym.environments.swe.controls.source import FunctionNode, TestFile

VARIANTS = 3
"""Versions at one place."""

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
    """Yield groups of wrong versions of a function, each group at one place, the most promising place first.

    Args:
        file: where it is.
        name: where it is written in the file.
        rng: chooses among what looks alike.
    """
    found = file.functions[name]
    seen: set[tuple[int, int]] = set()
    for node in _constants(file, found.node, found.owner):
        place = file.span(node)
        if place in seen:
            continue
        seen.add(place)
        if group := _wrong_values(file, node, rng):
            yield group
    for node in _assertions(found.node):
        if edit := _inverted(file, node):
            yield (edit,)
    for node in _raises(found.node):
        if group := _other_errors(file, node, rng):
            yield group


def _constants(file: TestFile, function: FunctionNode, owner: ast.ClassDef | None) -> Iterator[ast.Constant]:
    """Yield constants: expected values, parameters, what else the body has, and what it reads of the module."""
    for node in _assertions(function):
        for side in _expected_sides(node):
            yield from _literals(side)
    for decorator in function.decorator_list:
        yield from _literals(decorator)
    body = function.body[1:] if _is_docstring(function.body[0]) else function.body
    for statement in body:
        yield from _literals(statement)
    named = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    named |= {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)} if owner else set()
    for scope in (file.tree.body, owner.body if owner else []):
        for statement in scope:
            if isinstance(statement, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id in named for target in statement.targets
            ):
                yield from _literals(statement.value)


def _assertions(function: FunctionNode) -> Iterator[ast.Assert | ast.Call]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) or (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.startswith("assert")
        ):
            yield node


def _raises(function: FunctionNode) -> Iterator[ast.Call]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = node.func.id if isinstance(node.func, ast.Name) else called
            if called in ("raises", "assertRaises", "assertRaisesRegex"):
                yield node


def _expected_sides(node: ast.Assert | ast.Call) -> Iterator[ast.expr]:
    """Yield sides of a comparison that call nothing, or only what wraps a literal."""
    if isinstance(node, ast.Call):
        sides: Sequence[ast.expr] = node.args[:2]
    elif isinstance(node.test, ast.Compare):
        sides = [*node.test.comparators, node.test.left]
    else:
        sides = []
    yield from (side for side in sides if not any(isinstance(part, ast.Call) for part in ast.walk(side)))
    yield from (side for side in sides if isinstance(side, ast.Call) and _wraps(side))


def _wraps(call: ast.Call) -> bool:
    return all(isinstance(argument, ast.Constant | ast.UnaryOp | ast.List | ast.Tuple) for argument in call.args)


def _literals(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield the constants below a node, without the pieces of formatted texts."""
    if isinstance(node, ast.JoinedStr):
        return
    if isinstance(node, ast.Constant):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from _literals(child)


def _wrong_values(file: TestFile, node: ast.Constant, rng: random.Random) -> tuple[Edit, ...]:
    start, end = file.span(node)
    text = file.source[start:end]
    if isinstance(node.value, bool):
        return (Edit(start=start, end=end, text=str(not node.value)),)
    if not isinstance(node.value, int | float | str | bytes):
        return ()
    places = [
        at
        for at, character in enumerate(text)
        if any(character in each for each in _CLASSES) and (not at or text[at - 1] != "\\")
    ]
    rng.shuffle(places)
    if not isinstance(node.value, str | bytes):  # trailing zeros are rarely what distinguishes a number
        places.sort(key=lambda at: text[at] == "0")
    for at in places:
        edits = tuple(_replaced(start, text, at, node.value, rng))
        if edits:
            return edits
    return ()


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
        assert isinstance(node.func, ast.Attribute)
        if (other := _OPPOSITE.get(node.func.attr)) is None:
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
        return Edit(start=start, end=end, text=f"({file.text(test.operand)})")
    return Edit(start=start, end=end, text=f"not ({file.source[start:end]})")


def _other_errors(file: TestFile, call: ast.Call, rng: random.Random) -> tuple[Edit, ...]:
    if not isinstance(call.args[0], ast.Name):
        return ()
    start, end = file.span(call.args[0])
    name = call.args[0].id
    others = [error for error in _ERRORS if error != name and name not in _RELATED.get(error, ())]
    return tuple(Edit(start=start, end=end, text=error) for error in rng.sample(others, VARIANTS))


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
