"""Tests of code rows, and programs graded by them."""

import asyncio
import textwrap
from collections.abc import Iterable
from typing import Any

from grader_corpus import CodeExample, is_rewarded

from prorl_gym.environments.code.code_row import CodeRow
from prorl_gym.environments.code.environment import grade
from prorl_gym.environments.protocol import Leases
from prorl_gym.records import Score
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.protocol import SandboxBackend


def function(*cases: tuple[list[Any], Any], entry: str = "f", **more: Any) -> dict[str, Any]:
    """Return tests of a function, given arguments and the expected result."""
    found = [{"args": args, "expected": expected} for args, expected in cases]
    return {"kind": "function", "entry": entry, "cases": found, **more}


def stdio(*cases: tuple[str, str], **more: Any) -> dict[str, Any]:
    """Return tests of a program, given input and the expected output."""
    return {"kind": "stdio", "cases": [{"stdin": given, "stdout": wanted} for given, wanted in cases], **more}


async def mark(tests: dict[str, Any], program: str, leases: Leases, seconds: float = 60.0, **more: Any) -> Score:
    row = CodeRow.model_validate({"question": "?", "tests": tests, "time_limit": 1.0, **more})
    return await grade(row, textwrap.dedent(program), leases, seconds)


async def verdicts(backend: SandboxBackend, pairs: Iterable[CodeExample]) -> list[bool]:
    """Return whether each program is rewarded, three at a time, each with sandboxes of its own."""
    turns = asyncio.Semaphore(3)

    async def one(pair: CodeExample) -> bool:
        leases = SandboxLeases(backend)
        async with turns:
            try:
                return await is_rewarded(pair, leases)
            finally:
                await leases.close()

    return await asyncio.gather(*map(one, pairs))
