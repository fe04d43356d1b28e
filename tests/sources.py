"""Sources of the package and of its tests, parsed once for all tests that read them."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "prorl_gym"
TESTS = ROOT / "tests"

in_one_worker = pytest.mark.xdist_group("sources")
"""For modules that read sources: each worker would parse them again."""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def package_files() -> tuple[Path, ...]:
    """Return the modules of the package, without the tests that ship with Gym's servers."""
    return tuple(sorted(path for path in PACKAGE.rglob("*.py") if "tests" not in path.relative_to(PACKAGE).parts))


@cache
def functions_of(path: Path) -> frozenset[str]:
    """Return the names of the functions of a file, those inside of others included."""
    return frozenset(re.findall(r"^\s*(?:async )?def (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))


def statements_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements below a node, at whatever depth, but none that only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from statements_of(child)
