"""Runs inside a grading sandbox without the program, as the program of ``call_function``: plays a script of assertions.

The script calls the graded function, which is not here. Results that are known take the place of its calls; calls with
other arguments are collected, and the service asks the program for them. Standard library only, for any Python from 3.8
on.
"""

from __future__ import annotations

import ast
import json
import random

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_SKIPPED = 1000
"""Calls without a result after which a script ends; its loops may wait for one."""


class UnknownResult(BaseException):
    """The function's result is not known. No ``except Exception`` of the script catches it."""


class Skipping(ast.NodeTransformer):
    """Makes a script skip a statement that needs an unknown result, so that it shows the calls of those after it."""

    def visit(self, node: ast.AST) -> Any:
        node = self.generic_visit(node)
        if not isinstance(node, (ast.Assert, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr)):
            return node
        attempt = ast.parse("try: pass\nexcept BaseException:\n    if not _may_skip(): raise").body[0]
        assert isinstance(attempt, ast.Try)
        attempt.body = [node]
        return attempt


def play(entry: str, script: str, known: dict[str, str]) -> Any:
    """Return the unknown calls that a script makes or, if it makes none, whether it ends without an exception.

    ``entry``: name of the function. ``known``: its results by its arguments. A call is a JSON array of the arguments;
    these and results are Python literals, as text.
    """
    unknown: dict[str, None] = {}
    skipped = 0

    def call(*args: Any) -> Any:
        nonlocal skipped
        given = json.dumps([repr(value) for value in args])
        if given in known:
            return ast.literal_eval(known[given])
        if ast.literal_eval(repr(args)) != args:
            raise ValueError("an argument is no Python literal")
        unknown[given] = None
        skipped += 1
        raise UnknownResult

    def may_skip() -> bool:
        return 0 < skipped < MAX_SKIPPED

    random.seed(0)  # the same calls whenever it is played
    tree = ast.fix_missing_locations(Skipping().visit(ast.parse(script)))
    try:
        exec(compile(tree, "script", "exec"), {"__name__": "script", "_may_skip": may_skip, entry: call})
    except BaseException:
        if not unknown:
            return False
    return list(unknown) or True
