"""Grading a program on hidden tests, in sandboxes that the agent has never touched.

Expected results stay on the service's side: the sandbox holds nothing to read, patch or forge. Whatever the program
does to itself is a failed test; a sandbox that cannot run Python at all, or is lost, raises and gives no reward.

A row's own checker runs in sandboxes without the program and on a time allowance of its own. Outputs are hostile: one
may make an honest checker fail or run until it is killed. That is the program's fault and must not look like a broken
grader, or a wrong program would have its attempt made again. So a checker that gives no answer about an output runs on
the expected output, on a third allowance; only if it fails there, too, the checker is broken.
"""

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

from prorl_gym.environments.code.batch import BatchRunner, Launch, ProgramResult, crash_reason
from prorl_gym.environments.code.code_row import CodeRow, FunctionCase, FunctionTests, StdioCase
from prorl_gym.environments.code.program_launch import (
    EXTRA_OUTPUT_BYTES,
    CompileError,
    binary_launch,
    compile_cpp,
    function_call_input,
    python_launch,
    test_inputs,
)
from prorl_gym.environments.protocol import Leases
from prorl_gym.errors import GraderError
from prorl_gym.records import Score

_TIME_SHARES = (0.5, 0.35, 0.15)
"""Of the time of a row with a checker: the program's, the checker's on its outputs, the checker's on expected outputs.
They are separate, so that a program cannot use up the others, and add up to 1, so that all together meet the
deadline."""

_THREAD_COMPARE_BYTES = 128 << 10
"""Larger outputs are compared in a thread."""


_TOLERANCE = 1e-6
"""Relative and absolute tolerance between numbers where the expected one is written with a point or an exponent."""

_DECIMAL = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?")
_INTEGER = re.compile(r"[+-]?\d+")

_Case = StdioCase | FunctionCase


_CheckerVerdict = bool | Literal["failed", "late"]
"""A checker's answer, ``failed`` when it gave none, ``late`` when the time of this question or of all ran out."""


async def grade(task: CodeRow, program: str, leases: Leases, seconds: float) -> Score:
    """Return 1.0 when the program passes every test, otherwise 0.0 with the kind of the first failure.

    With ``partial`` the share of the tests that pass.

    Args:
        task: the row with its tests.
        program: source.
        leases: gives the clean sandboxes.
        seconds: wall clock that all tests together may take, checks of the outputs included (``_TIME_SHARES``); a
            program that needs longer fails, so that a slow one cannot pass for a broken grader.

    Raises:
        SandboxError: a sandbox could not be started or was lost.
        GraderError: it does not run Python, or the row's checker is broken.
        TaskError: the row is in C++ and the image cannot compile it.
    """
    cases = task.tests.cases
    try:
        launch = await _launch(task, program, leases)
    except CompileError as complaint:
        return failed_score(str(complaint), 0, len(cases))
    own, checks, controls = (seconds * share for share in (_TIME_SHARES if task.checker else (1.0, 0.0, 0.0)))
    checker = _Checker(task, BatchRunner(leases, checks), BatchRunner(leases, controls))
    verdicts: list[str | None] = []
    runs = BatchRunner(leases, own).run_tests(launch, test_inputs(task.tests), stop_at_crash=not task.partial)
    async with aclosing(runs):
        async for ends in runs:
            position = len(verdicts)
            verdicts += await _find_failures(task, launch, cases[position : position + len(ends)], ends, checker)
            if not task.partial and any(verdicts):
                break
    return _score(task, verdicts)


async def _launch(task: CodeRow, program: str, leases: Leases) -> Launch:
    if task.language == "cpp":
        return binary_launch(task, await compile_cpp(program, leases))
    return python_launch(task, program, function=isinstance(task.tests, FunctionTests))


def _score(task: CodeRow, verdicts: list[str | None]) -> Score:
    total = len(task.tests.cases)
    why = next((verdict for verdict in verdicts if verdict), None)
    report = _report(verdicts, total)
    if why is None:
        return Score(reward=1.0, detail={"passed": total, "tests": total}, report=report)
    if not task.partial:
        return failed_score(why, verdicts.index(why), total, report)
    passed = verdicts.count(None)
    return Score(reward=passed / total, detail={"why": why, "passed": passed, "tests": total}, report=report)


def _report(verdicts: Sequence[str | None], total: int) -> str:
    """Return a line for each test that ran, failures first, without quoting any."""
    numbered = list(enumerate(verdicts, 1))
    lines = [f"failed test {number}: {verdict}" for number, verdict in numbered if verdict]
    lines += [f"passed test {number}" for number, verdict in numbered if not verdict]
    if unrun := total - len(verdicts):
        lines.append(f"not run: {unrun} test{'s' if unrun > 1 else ''}")
    return "\n".join(lines)


def failed_score(why: str, passed: int, total: int, report: str = "") -> Score:
    """Return the score of a program that fails; ``passed`` counts the tests before the first failure."""
    return Score(reward=0.0, detail={"why": why, "passed": passed, "tests": total}, report=report)


class _Checker:
    """Runs the checker of a row.

    Args:
        task: the row.
        checks: runs it on outputs. Those for which no time is left are wrong.
        controls: runs it on expected outputs; on an allowance of its own.
    """

    def __init__(self, task: CodeRow, checks: BatchRunner, controls: BatchRunner) -> None:
        self._task = task
        self._checks = checks
        self._controls = controls
        self._has_answered = False

    async def check_outputs(self, questions: Sequence[list[Any]]) -> list[bool]:
        """Return for each (input, expected, output) whether the output is right.

        The checker returns ``True`` or ``False``; any other answer, or none in time, is a failure of the checker.

        Raises:
            SandboxError: a sandbox could not be started or was lost.
            GraderError: it fails on an expected output, too, or no test can be run there.
        """
        answers = await self._run(questions, self._checks)
        failed = [question for question, answer in zip(questions, answers, strict=True) if isinstance(answer, str)]
        await self._check_expected_outputs([[given, expected, expected] for given, expected, _ in failed])
        return [answer is True for answer in answers]

    async def _check_expected_outputs(self, questions: Sequence[list[Any]]) -> None:
        answers = await self._run(questions, self._controls)
        self._has_answered = self._has_answered or not {True, False}.isdisjoint(answers)
        # The program decides how many questions need this control, so running out of time here does not show that a
        # checker is broken which has answered another question.
        if "failed" in answers or ("late" in answers and not self._has_answered):
            raise GraderError(
                f"the checker of code row {self._task.id or 'without id'} fails on an expected output.",
                "Repair 'checker': check(input, expected, output) must return True or False in time.",
            )

    async def _run(self, questions: Sequence[list[Any]], runner: BatchRunner) -> list[_CheckerVerdict]:
        if not questions:
            return []
        launch = python_launch(self._task, self._task.checker, function=True)
        tests = [function_call_input("check", question, EXTRA_OUTPUT_BYTES) for question in questions]
        return [
            _read_verdict(end, launch.cpu_seconds)
            async for ends in runner.run_tests(launch, tests, stop_at_crash=False)
            for end in ends
        ]


def _read_verdict(end: ProgramResult, cpu_seconds: int) -> _CheckerVerdict:
    if end.timed_out:
        return "late"
    said = b"" if crash_reason(end, cpu_seconds) else end.output.strip()
    answers: dict[bytes, _CheckerVerdict] = {b"true": True, b"false": False}
    return answers.get(said, "failed")


async def _find_failures(
    task: CodeRow, launch: Launch, cases: Sequence[_Case], ends: Sequence[ProgramResult], checker: _Checker
) -> list[str | None]:
    """Return for each test that ended how it failed, without quoting the test, or ``None``.

    Raises:
        SandboxError, GraderError: the checker could not be run.
    """
    verdicts: list[str | None] = []
    wrong = "wrong result" if isinstance(task.tests, FunctionTests) else "wrong output"
    questions: list[tuple[int, list[Any]]] = []
    for index, (case, end) in enumerate(zip(cases, ends, strict=True)):
        verdict = crash_reason(end, launch.cpu_seconds)
        if verdict is None and not task.checker:
            verdict = await _compare(task, case, end.output)
        elif verdict is None:
            question = _checker_question(case, end.output)
            verdict = question if isinstance(question, str) else None
            if not isinstance(question, str):
                questions.append((index, question))
        verdicts.append(verdict)
    answers = await checker.check_outputs([args for _, args in questions])
    for (index, _), answer in zip(questions, answers, strict=True):
        verdicts[index] = None if answer else wrong
    return verdicts


async def _compare(task: CodeRow, case: _Case, output: bytes) -> str | None:
    if len(output) > _THREAD_COMPARE_BYTES:
        return await asyncio.to_thread(_compare_inline, task, case, output)
    return _compare_inline(task, case, output)


def _compare_inline(task: CodeRow, case: _Case, output: bytes) -> str | None:
    if isinstance(task.tests, FunctionTests):
        assert isinstance(case, FunctionCase)
        question = _checker_question(case, output)
        if isinstance(question, str):
            return question
        return None if results_match(case.expected, question[2]) else "wrong result"
    assert isinstance(case, StdioCase)
    return None if outputs_match(case.stdout, output, task.tests.compare) else "wrong output"


def _checker_question(case: _Case, output: bytes) -> list[Any] | str:
    """Return the checker's arguments (input, expected, output), or how the test failed before it."""
    if isinstance(case, StdioCase):
        try:
            return [case.stdin, case.stdout, output.decode()]
        except UnicodeDecodeError:
            return "wrong output"
    if not output.strip():
        return "no result"
    try:
        return [case.args, case.expected, parse_result(output)]
    except ValueError:
        return "unreadable result"


def outputs_match(expected: str, actual: bytes, compare: str = "lines") -> bool:
    """Whether a program printed what was expected.

    ``lines``: white space at the end of lines and empty lines at the end do not count. ``tokens``: no white space
    counts. In both, where the expected text has a decimal number, a number within ``_TOLERANCE`` will do; integers must
    be written exactly. ``exact``: only the last line feed may differ.
    """
    try:
        text = actual.decode()
    except UnicodeDecodeError:
        return False
    if compare == "exact":
        return expected.removesuffix("\n") == text.removesuffix("\n")
    if compare == "tokens":
        tokens, found = expected.split(), text.split()
        return len(tokens) == len(found) and all(map(_same_token, tokens, found))
    wanted, given = _lines(expected), _lines(text)
    return len(wanted) == len(given) and all(map(_same_line, wanted, given))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.replace("\r\n", "\n").rstrip().split("\n")]


def _same_line(wanted: str, given: str) -> bool:
    if wanted == given:
        return True
    parts, found = re.split(r"(\s+)", wanted), re.split(r"(\s+)", given)
    return len(parts) == len(found) and all(map(_same_token, parts, found))


def _same_token(wanted: str, given: str) -> bool:
    if wanted == given:
        return True
    if not _DECIMAL.fullmatch(wanted) or _INTEGER.fullmatch(wanted) or not _DECIMAL.fullmatch(given):
        return False
    return _close(float(wanted), float(given))


def parse_result(text: bytes) -> Any:
    """Parse a result from a sandbox.

    Raises:
        ValueError: it is not JSON, too deeply nested, or holds a number that is too long.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def results_match(expected: Any, actual: Any) -> bool:
    """Whether two JSON values are the same.

    Numbers agree within ``_TOLERANCE`` where the expected one is a float, exactly otherwise; ``True`` is not ``1``.
    """
    if isinstance(expected, bool) or isinstance(actual, bool):
        return expected is actual
    if isinstance(expected, float) and isinstance(actual, int | float):
        return _close(expected, actual)
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        return _same_mapping(expected, actual)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(expected, list) and isinstance(actual, list):
        return _same_list(expected, actual)  # pyright: ignore[reportUnknownArgumentType]
    return bool(expected == actual)


def _same_list(expected: Sequence[Any], actual: Sequence[Any]) -> bool:
    return len(expected) == len(actual) and all(map(results_match, expected, actual))


def _same_mapping(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> bool:
    return expected.keys() == actual.keys() and all(results_match(expected[key], actual[key]) for key in expected)


def _close(expected: float, actual: float) -> bool:
    if math.isnan(expected):
        return math.isnan(actual)
    try:
        return math.isclose(expected, actual, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except OverflowError:  # an integer that no float can hold
        return False
