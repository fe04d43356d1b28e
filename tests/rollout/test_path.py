"""docs/architecture.md says what is so: the steps of a rollout's path, what they write, and the files that it names."""

import ast
import re
from pathlib import Path

from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"\| (\d) \| `([\w/.]+)` \| `([\w.]+)` \| ([^|]+) \| ([^|]*) ?\|")

PAGE = ROOT / "docs" / "architecture.md"
BESIDE_THE_PATH = {"cancel", "withdraw_attempts", "next_jobs", "get", "log_turn"}
"""Methods of the ledger that the steps' modules call at a stop, a cancel, to read, or for a later attempt."""


def steps() -> list[tuple[str, ...]]:
    return [match.groups() for match in STEP.finditer(PAGE.read_text())]


def functions(file: str) -> dict[str, int]:
    """Lines of a file's functions, by qualified name; of nested ones by their own name."""
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse((ROOT / "prorl_gym" / file).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.setdefault(node.name, node.lineno)
        elif isinstance(node, ast.ClassDef):
            members = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
            found.update({f"{node.name}.{one.name}": one.lineno for one in members})
    return found


def ledger_calls(file: str) -> set[str]:
    return set(re.findall(r"\bself\._?ledger\.(\w+)\(", (ROOT / "prorl_gym" / file).read_text()))


def test_at_most_eight_steps_in_order() -> None:
    assert [int(number) for number, *_ in steps()] == list(range(1, len(steps()) + 1))
    assert 1 < len(steps()) <= 8


def test_every_step_is_a_function_of_its_file() -> None:
    for number, file, function, *_ in steps():
        assert function in functions(file), f"step {number}: {file} has no {function}"


def test_no_file_is_visited_twice() -> None:
    files = [file for _, file, *_ in steps()]
    left = [file for file, following in zip(files, [*files[1:], None], strict=True) if file != following]
    assert len(set(left)) == len(left)
    for file in files:
        lines = [functions(file)[function] for _, named, function, *_ in steps() if named == file]
        assert lines == sorted(lines), f"{file}: its steps do not read top to bottom"


def test_the_ledger_has_what_the_steps_write() -> None:
    written = [(file, name) for _, file, _, _, ledger in steps() for name in re.findall(r"`(\w+)`", ledger)]
    assert all(hasattr(SqliteLedger, name) for _, name in written)
    assert all(name in ledger_calls(file) for file, name in written)


def test_whatever_the_steps_tell_the_ledger_about_an_attempt_is_in_the_table() -> None:
    called = {name for _, file, *_ in steps() if file != "rollout/service.py" for name in ledger_calls(file)}
    written = {name for *_, ledger in steps() for name in re.findall(r"`(\w+)`", ledger)}
    assert called - written == BESIDE_THE_PATH
