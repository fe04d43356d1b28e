"""Grading by scripts of assertions, whose expected values only the script can compute.

A script and the program share neither a process nor a sandbox. The script is played without the program to find its
calls (``assertion_player``). Then the program is asked for their results, each in a process of its own, and the script
is played again with these. So a forged result must be one with which the assertions hold.

The first time nothing of the program is with the script: one that fails there is broken. Later, results may be hostile;
whatever they do to the script fails the test.
"""

import json
from collections.abc import Iterable
from importlib.resources import files
from typing import Any, cast

from prorl_gym.environments.code import program_runs
from prorl_gym.environments.code.code_row import CodeRow, FunctionCase, FunctionTests, ScriptTests
from prorl_gym.environments.code.program_runs import BatchRunner, Launch, crash_reason
from prorl_gym.environments.protocol import Leases
from prorl_gym.errors import GraderError

MAX_ROUNDS = 8
"""Times that calls are collected: arguments may depend on earlier results."""

_ASSERTION_PLAYER = files("prorl_gym.environments.code").joinpath("assertion_player.py").read_text(encoding="utf-8")
_PROGRAM_SHARE = 0.6
"""Share of the time that is the program's, so that it cannot use up the scripts'."""


async def find_script_failures(
    task: CodeRow, tests: ScriptTests, launch: Launch, leases: Leases, seconds: float
) -> list[str | None]:
    """Return for each script how the program failed it, or ``None``.

    Raises ``SandboxError``; ``GraderError``: a script fails, or ends, before it has called the function.
    """
    programs = BatchRunner(leases, seconds * _PROGRAM_SHARE)
    players = BatchRunner(leases, seconds * (1 - _PROGRAM_SHARE))
    player = program_runs.python_launch(task, _ASSERTION_PLAYER, function=True)
    known: dict[str, str] = {}
    verdicts: dict[int, str | None] = {}
    waiting = range(len(tests.cases))
    for is_first in (True, *(False for _ in range(MAX_ROUNDS))):
        scripts = [[tests.entry, f"{tests.setup}\n{tests.cases[number].script}", known] for number in waiting]
        wanted: dict[int, list[str]] = {}
        for number, (failure, result) in zip(waiting, await _call(players, player, "play", scripts), strict=True):
            if isinstance(result, list):
                wanted[number] = cast(list[str], result)
            elif is_first:
                raise GraderError(
                    f"a script of code row {task.id or 'without id'} fails, or calls nothing, before it has results.",
                    "Repair 'tests': each script calls the function with values that are Python literals.",
                )
            else:
                verdicts[number] = None if result is True else failure or "wrong result"
        calls = list(dict.fromkeys(call for found in wanted.values() for call in found))
        results = await _call(
            programs, launch, tests.entry, map(json.loads, calls), literals=True, stop_at_crash=not task.partial
        )
        failures = {call: failure for call, (failure, _) in zip(calls, results, strict=True) if failure}
        known |= {call: result for call, (_, result) in zip(calls, results, strict=True) if call not in failures}
        for number, found in wanted.items():
            if failed := [failures[call] for call in found if call in failures]:
                verdicts[number] = failed[0]
        waiting = [number for number in wanted if number not in verdicts]
        if not waiting or (not task.partial and any(verdicts.values())):
            break
    return [verdicts.get(number, "not decided") for number in range(len(tests.cases))]


async def _call(
    runner: BatchRunner,
    launch: Launch,
    entry: str,
    arguments: Iterable[list[Any]],
    *,
    literals: bool = False,
    stop_at_crash: bool = False,
) -> list[tuple[str | None, Any]]:
    """Return for each call of a function how it failed, or its result."""
    calls = list(arguments)
    if not calls:
        return []
    room = "x" * max(len(json.dumps(call)) for call in calls)
    cases = tuple(FunctionCase(args=call, expected=room) for call in calls)
    shapes = {"args_as": ("literal",) * max(map(len, calls)), "result_as": "literal"} if literals else {}
    tests = FunctionTests.model_validate({"kind": "function", "entry": entry, "cases": cases, **shapes})
    answers: list[tuple[str | None, Any]] = []
    async for ends in runner.run_tests(launch, program_runs.test_inputs(tests), stop_at_crash=stop_at_crash):
        for end in ends:
            failure = crash_reason(end, launch.cpu_seconds)
            try:
                answers.append((failure, None if failure else json.loads(end.output)))
            except (ValueError, RecursionError):
                answers.append(("no result", None))
    return answers + [("not called", None)] * (len(calls) - len(answers))
