"""Regular expressions of the answer graders take linear time: doubling their worst inputs does not quadruple it."""

import ast
import inspect
import re
import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, cast

import pytest

compiler: Any = import_module("re._compiler")
parser: Any = import_module("re._parser")
codes: Any = import_module("re._constants")
ROOMS = [f"prorl_gym.environments.{room}" for room in ("answers", "math", "stem")]
MODULES = [
    import_module(f"{room}.{found.name}") for room in ROOMS for found in iter_modules(import_module(room).__path__)
]
SOURCES = {module: inspect.getsource(module) for module in MODULES}
METHODS = ("search", "sub", "findall", "finditer", "split", "match", "fullmatch")
CHARACTERS = " 1aA\\{}()[]-+.,x=|:_^'/%&*$é"
FEW = 500
"""Characters of an input that is compared with one twice as long."""
QUICK = 0.0004
"""CPU seconds that prove nothing: a linear pattern takes less on so few characters."""


def methods_of(name: str, module: Any) -> set[str]:
    """Methods that a module calls on a pattern by its name, or on the ``pattern`` of a collection."""
    called = set(re.findall(rf"\b{name}\.(\w+)", SOURCES[module])) | set(
        re.findall(r"\b(?:pattern|form)\.(\w+)\(", SOURCES[module]) if name.endswith("S") else ()
    )
    return called.intersection(METHODS) or {"search"}


def compiled(value: Any) -> Iterator[re.Pattern[str]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in cast(Iterable[Any], value):
            yield from compiled(each)


def patterns() -> Iterator[tuple[str, re.Pattern[str], str]]:
    """Yield each pattern of the rooms, by name or line, with each method that is called on it."""
    for module in MODULES:
        for name, value in vars(module).items():
            for pattern in compiled(value):
                for method in sorted(methods_of(name, module)):
                    yield f"{module.__name__}.{name}.{method}", pattern, method
        for call in ast.walk(ast.parse(SOURCES[module])):
            match call:
                case ast.Call(ast.Attribute(ast.Name("re"), method), [ast.Constant(str(text)), *_]) if (
                    method in METHODS
                ):
                    yield f"{module.__name__}:{call.lineno}", re.compile(text), method
                case _:
                    pass


def shortest(items: Any) -> str:
    """Return a short text that the items of a parsed pattern match, assertions left aside."""
    text = ""
    for code, argument in items:
        match code:
            case codes.LITERAL:
                text += chr(argument)
            case codes.IN:
                members = compiler.compile(parser.SubPattern(parser.State(), [(code, argument)]))
                text += next(filter(members.match, CHARACTERS), "C")
            case codes.ANY | codes.NOT_LITERAL:
                text += "x"
            case codes.MAX_REPEAT | codes.MIN_REPEAT | codes.POSSESSIVE_REPEAT:
                text += shortest(argument[2]) * argument[0]
            case codes.SUBPATTERN:
                text += shortest(argument[-1])
            case codes.BRANCH:
                text += shortest(argument[1][0])
            case _:
                pass
    return text


def repeats(items: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """Yield what may be repeated without end in a parsed pattern, each with a text that leads up to it."""
    for item in items:
        code, argument = item
        match code:
            case codes.MAX_REPEAT | codes.MIN_REPEAT | codes.POSSESSIVE_REPEAT:
                if argument[1] is codes.MAXREPEAT:
                    yield before, shortest(argument[2]) or "1"
                yield from repeats(argument[2], before)
            case codes.SUBPATTERN:
                yield from repeats(argument[-1], before)
            case codes.BRANCH:
                for branch in argument[1]:
                    yield from repeats(branch, before)
            case _:
                pass
        before += shortest([item])


def seconds(pattern: re.Pattern[str], method: str, text: str) -> float:
    """Return the least CPU time of three tries."""
    times: list[float] = []
    for _ in range(3):
        start = time.process_time()
        _ = getattr(pattern, method)(text) if method in ("match", "fullmatch") else list(pattern.finditer(text))
        times.append(time.process_time() - start)
    return min(times)


@pytest.mark.parametrize(("pattern", "method"), [pytest.param(*each[1:], id=each[0]) for each in patterns()])
def test_twice_the_input_is_not_four_times_the_work(pattern: re.Pattern[str], method: str) -> None:
    for before, part in sorted(set(repeats(parser.parse(pattern.pattern, pattern.flags)))):
        for start in {before, ""}:
            for few in (FEW // 20, FEW // 4, FEW):  # what is worse than quadratic shows early
                short, long = (start + part * (size // len(part)) + "\0" for size in (few, 2 * few))
                taken = seconds(pattern, method, long)
                assert taken < QUICK or taken < 3.2 * seconds(pattern, method, short), (start, part)
