"""Proposes controls: wrong versions of a test with one place changed, which the right repair should fail.

The code under test can read the source of the test, so a control must look as natural as the original: a wrong constant
has the type, the length and the character classes of the right one, and all variants at a place change the same
character, so that the right one is not in their middle.
"""

import ast
import random
import re
import string
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice

from prorl_gym.environments.swe.controls.control_plan import Edit
from prorl_gym.environments.swe.controls.parsed_tests import (
    FunctionNode,
    TestFile,
    called_name,
    loop_tables,
    parametrize_tables,
)

_MAX_VARIANTS = 8
"""Versions at one place."""

# How conspicuous a change is, by the kind of the changed value; ``_conspicuousness`` adds to it.
_EXPECTED, _WRAPPED, _INPUT = 0, 3, 6
_BOOLEAN, _OTHER_ERROR, _INVERTED = 1, 4, 7
_SINGLE_CHANGE = 3
"""Added where a place has only one change: a guess about it is right half of the time."""
_MOST_CONSPICUOUS = 9
_SHORT_WORD = 3
"""Letters from which a word with a wrong letter looks misspelt."""
_MAX_CHARACTERS = 64
"""Characters of a constant that are considered."""
_ASSERTING = re.compile("_?(assert|check|verify|expect|compare|eq_)", re.IGNORECASE)
_WORD = re.compile("[A-Za-z0-9]+")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_VOWELS = "aeiou"
_CONSONANTS = "".join(letter for letter in string.ascii_lowercase if letter not in _VOWELS)
_CHARACTER_CLASSES = (_VOWELS, _CONSONANTS, _VOWELS.upper(), _CONSONANTS.upper(), string.digits)

_OPERATORS: dict[type[ast.cmpop], str] = {
    **{ast.Eq: "==", ast.Is: "is", ast.In: "in", ast.Lt: "<", ast.Gt: ">"},
    **{ast.NotEq: "!=", ast.IsNot: "is not", ast.NotIn: "not in", ast.GtE: ">=", ast.LtE: "<="},
}
_NEGATIONS = {
    **{"==": "!=", "is": "is not", "in": "not in", "<": ">=", ">": "<="},
    **{"assertTrue": "assertFalse", "assertEqual": "assertNotEqual", "assertIn": "assertNotIn"},
    **{"assertIs": "assertIsNot", "assertIsNone": "assertIsNotNone", "assertIsInstance": "assertNotIsInstance"},
    **{"assertGreater": "assertLessEqual", "assertLess": "assertGreaterEqual"},
    **{"assertRegex": "assertNotRegex", "assertAlmostEqual": "assertNotAlmostEqual"},
}
_OPPOSITES = {**_NEGATIONS, **{value: key for key, value in _NEGATIONS.items()}}
_RAISES = ("raises", "assertRaises", "assertRaisesRegex")
_ERRORS = ("ValueError", "TypeError", "KeyError", "IndexError", "AttributeError", "ZeroDivisionError", "OSError")
_SUPERCLASSES = {"KeyError": {"LookupError"}, "IndexError": {"LookupError"}, "ZeroDivisionError": {"ArithmeticError"}}
"""A test that expects one of these may get the exception itself, which is then no wrong one."""


def propose_controls(file: TestFile, name: str, rng: random.Random) -> Iterator[tuple[Edit, ...]]:
    """Yield groups of wrong versions of a function, each group at one place, the least conspicuous place first.

    A wrong expected value gives nothing away. A wrong input may: code that finds it invalid recognises the control.
    """
    function, owner = file.functions[name].node, file.functions[name].owner
    groups: list[tuple[int, tuple[Edit, ...]]] = []
    seen: set[tuple[int, int]] = set()
    body = file.text(function)
    for level, node in _constants(file, function, owner):
        if (span := file.span(node)) not in seen:
            seen.add(span)
            groups += _wrong_values(file, node, level, body, rng)
    groups += [(_INVERTED, (edit,)) for node in _assertions(function) if (edit := _inverted(file, node))]
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and called_name(node) in _RAISES and (edits := _other_errors(file, node, rng)):
            groups.append((_OTHER_ERROR, edits))
    groups.sort(key=lambda group: group[0] + _SINGLE_CHANGE * (len(group[1]) == 1))
    yield from (edits for _, edits in groups)


def _constants(
    file: TestFile, function: FunctionNode, owner: ast.ClassDef | None
) -> Iterator[tuple[int, ast.Constant]]:
    """Yield constants and how conspicuous a change of their kind is; the first time that one appears counts."""
    assigned = {
        target.id: node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        for target in _targets(node)
    }
    sides = [side for node in _assertions(function) for side in _sides(node)]
    for side in sides:
        value = assigned.get(side.id, side) if isinstance(side, ast.Name) else side
        if not _has_calls(value):
            yield from ((_EXPECTED, node) for node in _literals(value))
    compared_names = {side.id for side in sides if isinstance(side, ast.Name)} - assigned.keys()
    tables = parametrize_tables(file, function)
    for table in (*tables, *loop_tables(file, function)):
        for name in compared_names.intersection(table.names):
            for value in table.column(name):
                yield from ((_EXPECTED, node) for node in _literals(value))
    for side in sides:
        yield from ((_WRAPPED, node) for node in _literals(side) if isinstance(side, ast.Call))
    for table in tables:
        yield from ((_WRAPPED, node) for node in _literals(table.rows))
    read_names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    read_names |= {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)} if owner else set()
    for statement in (*file.tree.body, *(owner.body if owner else ())):
        if any(target.id in read_names for target in _targets(statement)):
            yield from ((_WRAPPED, node) for node in _literals(statement))
    first = function.body[0]
    has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    for statement in function.body[has_docstring:]:
        yield from ((_INPUT, node) for node in _literals(statement))


def _targets(node: ast.AST) -> Iterator[ast.Name]:
    """Yield the plain names that a statement assigns to."""
    if isinstance(node, ast.Assign):
        yield from (target for target in node.targets if isinstance(target, ast.Name))


def _assertions(function: FunctionNode) -> Iterator[ast.Assert | ast.Call]:
    """Yield ``assert`` statements, calls of methods of ``TestCase``, and of helpers named like them."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) or (isinstance(node, ast.Call) and _ASSERTING.match(called_name(node))):
            yield node


def _sides(node: ast.Assert | ast.Call) -> Sequence[ast.expr]:
    """Return the compared expressions, of a statement the right one first: it is the expected one more often."""
    if isinstance(node, ast.Call):
        return node.args
    return [*node.test.comparators, node.test.left] if isinstance(node.test, ast.Compare) else []


def _has_calls(node: ast.expr) -> bool:
    """Whether an expression calls anything other than methods of literals."""
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
    """Yield the least conspicuous group of wrong values of a constant, and how conspicuous it is, if there is any."""
    start, end = file.span(node)
    text = file.source[start:end]
    if isinstance(node.value, bool):
        yield kind + _BOOLEAN, (Edit(start=start, end=end, text=str(not node.value)),)
    elif isinstance(node.value, int | float | str | bytes):
        places = [
            place for place, character in enumerate(text) if any(character in each for each in _CHARACTER_CLASSES)
        ]
        rng.shuffle(places)
        levels = {place: _conspicuousness(text, place, body) for place in places[:_MAX_CHARACTERS]}
        if not isinstance(node.value, str | bytes):  # trailing zeros rarely distinguish a number
            levels = {place: level + (text[place] == "0") for place, level in levels.items()}
        for place in sorted(levels, key=levels.__getitem__):
            if edits := tuple(_replacements(start, text, place, node.value, rng)):
                yield kind + levels[place], edits
                return


def _conspicuousness(text: str, place: int, body: str) -> int:
    """Return how conspicuous a change of a character is.

    A word that becomes no word is conspicuous, and so is a name or a number that the test has elsewhere unchanged.
    """
    if any(found.start() <= place < found.end() for found in _ESCAPE.finditer(text)):
        return _MOST_CONSPICUOUS
    word = next(found for found in _WORD.finditer(text) if found.start() <= place < found.end())[0]
    is_repeated = len(re.findall(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", body)) > 1
    letter_level = 0 if text[place].isdigit() else 1 if len(word) < _SHORT_WORD else 2
    return letter_level + 4 * is_repeated


def _replacements(
    start: int, text: str, place: int, value: int | float | str | bytes, rng: random.Random
) -> Iterator[Edit]:
    """Yield up to ``_MAX_VARIANTS`` edits that put another character of the same class at one place."""
    alike = next(each for each in _CHARACTER_CLASSES if text[place] in each).replace(text[place], "")
    fitting = (
        character
        for character in rng.sample(alike, len(alike))
        if _is_same_shape(text[:place] + character + text[place + 1 :], value)
    )
    for character in islice(fitting, _MAX_VARIANTS):
        yield Edit(start=start + place, end=start + place + 1, text=character)


def _is_same_shape(text: str, value: int | float | str | bytes) -> bool:
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
    """Return an edit that asserts the opposite; ``None`` for a call that has none."""
    if isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Attribute) or (other := _OPPOSITES.get(node.func.attr)) is None:
            return None
        end = file.span(node.func)[1]
        return Edit(start=end - len(node.func.attr), end=end, text=other)
    test = node.test
    start, end = file.span(test)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, right = file.span(test.left)[1], file.span(test.comparators[0])[0]
        between = file.source[left:right]
        old = _OPERATORS[type(test.ops[0])]
        if between.count(old) == 1:
            place = left + between.index(old)
            return Edit(start=place, end=place + len(old), text=_OPPOSITES[old])
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return Edit(start=start, end=end, text=file.text(test.operand))
    text = file.source[start:end]
    needs_brackets = isinstance(test, ast.BoolOp | ast.IfExp | ast.Lambda | ast.NamedExpr)
    return Edit(start=start, end=end, text=f"not ({text})" if needs_brackets else f"not {text}")


def _other_errors(file: TestFile, call: ast.Call, rng: random.Random) -> tuple[Edit, ...]:
    """Return edits that expect another exception; none where the expected one is not a plain name."""
    if not call.args or not isinstance(call.args[0], ast.Name):
        return ()
    start, end = file.span(call.args[0])
    name = call.args[0].id
    others = [error for error in _ERRORS if error != name and name not in _SUPERCLASSES.get(error, ())]
    return tuple(
        Edit(start=start, end=end, text=error) for error in rng.sample(others, min(len(others), _MAX_VARIANTS))
    )
