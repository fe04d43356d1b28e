"""The ``code`` environment: write a program, try it in a sandbox, hand in its source.

A program is graded on hidden tests in sandboxes that the agent has never touched. Expected results stay on the
service's side: the sandbox holds nothing to read, patch or forge. Whatever the program does to itself is a failed test;
a sandbox that cannot run Python at all, or is lost, raises and gives no reward.

A row's own checker runs in sandboxes without the program and on a time allowance of its own. Outputs are hostile: one
may make an honest checker fail or run until it is killed. That is the program's fault and must not look like a broken
grader, or a wrong program would have its attempt retried. So a checker that gives no answer about an output runs on
the expected output, on a third allowance; only if it fails there, too, the checker is broken.
"""

import asyncio
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from decimal import Decimal
from operator import eq, itemgetter
from typing import Any, Literal, cast

from prorl_gym.agents.protocol import Artifacts, Tool
from prorl_gym.agents.tools import BashTool, FinishTool, PythonTool
from prorl_gym.agents.tools.agent_sandbox import SandboxSource
from prorl_gym.environments.code import program_runs
from prorl_gym.environments.code.code_row import (
    CodeRow,
    FunctionCase,
    FunctionTests,
    ScriptTests,
    StdioCase,
    StdioTests,
)
from prorl_gym.environments.code.program_runs import BatchRunner, Launch, ProgramResult, crash_reason
from prorl_gym.environments.code.script_tests import find_script_failures
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.simple import SimpleEnvironment
from prorl_gym.errors import GraderError
from prorl_gym.records import GradedSubmission, Message, Score
from prorl_gym.sandbox.protocol import SandboxLimits, SandboxSpec
from prorl_gym.settings import ResolvedSettings, RolloutSettings

_SYSTEM_PROMPT = (
    "You write Python programs. You have a sandbox with bash and python to explore and to test your program in. When "
    "it works, call finish with the complete source of the program as the answer. Your program is then run on hidden "
    "tests in a fresh sandbox that holds none of your files, with the standard library only and limits on time and "
    "memory."
)

_CPP_PROMPT = _SYSTEM_PROMPT.replace("Python programs", "C++17 programs").replace(
    "run on hidden", "compiled with g++ -O2 and run on hidden"
)

EVAL_SHARE = 0.8
"""Share of the stage's deadline that the tests may use; the rest is for starting the sandbox."""

MAX_PROGRAM = 256 << 10
"""Longest program that is run, in bytes."""

_FENCE = "```"
_FENCE_NAMES = {"python": ("python", "py", "python3", ""), "cpp": ("cpp", "c++", "cc", "cxx", "cplusplus", "c", "")}
_DISPLAY_NAMES = {"python": "Python", "cpp": "C++"}

_TIME_SHARES = (0.5, 0.35, 0.15)
"""Shares of the time of a row with a checker: the program's, the checker's on its outputs, the checker's on expected
outputs. They are separate, so that a program cannot use up the others, and add up to 1, so that all together meet the
deadline."""

_TOLERANCE = 1e-6
"""Relative and absolute tolerance between numbers where the expected one is written with a point or an exponent."""

_DECIMAL = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?")
_INTEGER = re.compile(r"[+-]?\d+")

_Case = StdioCase | FunctionCase
_CheckerVerdict = bool | Literal["failed", "late"]
"""A checker's answer, ``failed`` when it gave none, ``late`` when the time of this question or of all ran out."""


class CodeEnvironment(SimpleEnvironment[CodeRow]):
    """Implements ``Environment[CodeRow]``."""

    name = "code"
    row_model = CodeRow
    settings = RolloutSettings(max_turns=16, eval_seconds=300.0)
    sandbox = SandboxSpec(limits=SandboxLimits(output=16 << 10))
    gold_field = "solution"

    def messages(self, task: CodeRow) -> tuple[Message, ...]:
        system = _CPP_PROMPT if task.language == "cpp" else _SYSTEM_PROMPT
        return Message(role="system", content=system), Message(role="user", content=_prompt(task))

    def tools(self, sandbox: SandboxSource, settings: ResolvedSettings) -> Sequence[Tool]:
        return (
            BashTool(sandbox, settings.action_seconds),
            PythonTool(sandbox, settings.action_seconds),
            FinishTool("Hand in the complete source of your program and end."),
        )

    def normalize_answer(self, text: str) -> str:
        return text

    async def evaluate(self, task: CodeRow, artifacts: Artifacts, leases: Leases, settings: ResolvedSettings) -> Score:
        answer = artifacts.answer or ""
        artifacts.submission = GradedSubmission(kind="program", text=answer)
        try:
            program = find_program(answer, task.language)
        except NoProgramError as error:
            return _unrun_score(task, error)
        artifacts.submission = GradedSubmission(kind="program", text=program)
        return await grade(task, program, leases, settings.eval_seconds * EVAL_SHARE)

    def wrong_answer(self, task: CodeRow, seed: int) -> str:
        if task.language == "cpp":
            return f'#include <cstdio>\nint main() {{ puts("seed {seed}"); }}\n'
        name = "main" if isinstance(task.tests, StdioTests) else task.tests.entry.split(".")[0]
        return f"def {name}(*arguments):\n    return 'seed {seed}'\n\n\nprint('seed {seed}')\n"


def _prompt(task: CodeRow) -> str:
    """Return the question and the form of the tests; the same for every replica."""
    if isinstance(task.tests, StdioTests):
        form = "Your program must read standard input and print to standard output."
    else:
        form = f"Your program must define `{task.tests.entry}`, which the tests call."
        if isinstance(task.tests, FunctionTests) and task.tests.result != "return":
            form += f" It works in place: its {task.tests.result} is looked at after the call."
    limits = f"Limits for each test: {task.time_limit:g} s of CPU time, {task.memory_limit >> 20} MiB of memory."
    start = (
        f"\n\nStart from this code:\n```{task.language}\n{task.starter_code.strip()}\n```" if task.starter_code else ""
    )
    return f"{task.question}{start}\n\n{form} {limits}"


class NoProgramError(ValueError):
    """The answer has no program to run; the message has the reason."""


def find_program(answer: str, language: str = "python") -> str:
    """Return the last fenced block that is a program, or the whole answer when nothing in it is fenced.

    A block without a language may be sample output, as may one without a parenthesis: others come before these.
    Raises ``NoProgramError``: empty, too long, or fenced as another language only.
    """
    if len(answer) > 4 * MAX_PROGRAM:
        raise NoProgramError(f"the answer is longer than {4 * MAX_PROGRAM} characters")
    blocks = list(_blocks(answer))
    programs = [((name != "", "(" in body), body) for name, body in blocks if name in _FENCE_NAMES[language]]
    if blocks and not programs:
        raise NoProgramError(f"no block of {_DISPLAY_NAMES[language]} in the answer")
    program = max(reversed(programs), key=itemgetter(0))[1] if programs else answer
    if not program.strip():
        raise NoProgramError("no program in the answer")
    if len(program.encode(errors="replace")) > MAX_PROGRAM:
        raise NoProgramError(f"the program is longer than {MAX_PROGRAM} bytes")
    return program


def _blocks(answer: str) -> Iterator[tuple[str, str]]:
    """Yield language and body of each closed block. One pass: a pattern would be quadratic on unclosed fences."""
    language: str | None = None
    body: list[str] = []
    for line in answer.split("\n"):
        text = line.strip()
        if language is None and text.startswith(_FENCE) and _FENCE not in text[3:]:
            language, body = text[3:].strip().partition(" ")[0].lower(), []
        elif language is not None and text == _FENCE:
            yield language, "".join(f"{line}\n" for line in body)
            language = None
        elif language is not None:
            body.append(line)


async def grade(task: CodeRow, program: str, leases: Leases, seconds: float) -> Score:
    """Return 1.0 when the program passes every test, otherwise 0.0 with the kind of the first failure.

    With ``partial`` the share of the tests that pass. All tests together may take ``seconds`` of wall clock, checks of
    the outputs included (``_TIME_SHARES``); a program that needs longer fails, so that a slow one cannot pass for a
    broken grader. Raises ``SandboxError``; ``GraderError``: the sandbox does not run Python, or the row's checker is
    broken; ``TaskError``: the row is in C++ and the image cannot compile it.
    """
    try:
        if task.language == "cpp":
            launch = program_runs.binary_launch(task, await program_runs.compile_cpp(program, leases))
        else:
            launch = program_runs.python_launch(task, program, function=not isinstance(task.tests, StdioTests))
    except program_runs.CompileError as error:
        return _unrun_score(task, error)
    if isinstance(task.tests, ScriptTests):
        return _score(task, await find_script_failures(task, task.tests, launch, leases, seconds))
    cases = task.tests.cases
    own, checks, controls = (seconds * share for share in (_TIME_SHARES if task.checker else (1.0, 0.0, 0.0)))
    checker = _Checker(task, BatchRunner(leases, checks), BatchRunner(leases, controls))
    verdicts: list[str | None] = []
    tests = program_runs.test_inputs(task.tests)
    runs = BatchRunner(leases, own).run_tests(launch, tests, stop_at_crash=not task.partial)
    async with aclosing(runs):
        async for ends in runs:
            position = len(verdicts)
            verdicts += await _find_failures(task, launch, cases[position : position + len(ends)], ends, checker)
            if not task.partial and any(verdicts):
                break
    return _score(task, verdicts)


def _score(task: CodeRow, verdicts: list[str | None]) -> Score:
    total, why = len(task.tests.cases), next((verdict for verdict in verdicts if verdict), None)
    # A line for each test that ran, failures first, without quoting any.
    numbered = list(enumerate(verdicts, 1))
    lines = [f"failed test {number}: {verdict}" for number, verdict in numbered if verdict]
    lines += [f"passed test {number}" for number, verdict in numbered if not verdict]
    if unrun := total - len(verdicts):
        lines.append(f"not run: {unrun} test{'s' if unrun > 1 else ''}")
    report = "\n".join(lines)
    if why is None:
        return Score(reward=1.0, detail={"passed": total, "tests": total}, report=report)
    passed = verdicts.count(None) if task.partial else verdicts.index(why)
    reward = passed / total if task.partial else 0.0
    return Score(reward=reward, detail={"why": why, "passed": passed, "tests": total}, report=report)


def _unrun_score(task: CodeRow, error: Exception) -> Score:
    return Score(reward=0.0, detail={"why": str(error), "passed": 0, "tests": len(task.tests.cases)})


@dataclass(slots=True)
class _Checker:
    """Runs the checker of a row: ``checks`` on outputs, ``controls`` on expected outputs, each in its own time.

    Outputs for which no time is left are wrong.
    """

    _task: CodeRow
    _checks: BatchRunner
    _controls: BatchRunner
    _has_answered: bool = False

    async def check_outputs(self, questions: Sequence[list[Any]]) -> list[bool]:
        """Return for each (input, expected, output) whether the output is right.

        The checker returns ``True`` or ``False``; any other answer, or none in time, is a failure of the checker.
        Raises ``GraderError``: it fails on an expected output, too, or no test can be run there.
        """
        answers = await self._run(questions, self._checks)
        failed = [question for question, answer in zip(questions, answers, strict=True) if isinstance(answer, str)]
        repeated = await self._run([[given, expected, expected] for given, expected, _ in failed], self._controls)
        self._has_answered = self._has_answered or not {True, False}.isdisjoint(repeated)
        # The program decides how many questions need this control, so running out of time here does not show that a
        # checker is broken which has answered another question.
        if "failed" in repeated or ("late" in repeated and not self._has_answered):
            raise GraderError(
                f"the checker of code row {self._task.id or 'without id'} fails on an expected output.",
                "Repair 'checker': check(input, expected, output) must return True or False in time.",
            )
        return [answer is True for answer in answers]

    async def _run(self, questions: Sequence[list[Any]], runner: BatchRunner) -> list[_CheckerVerdict]:
        if not questions:
            return []
        launch = program_runs.python_launch(self._task, self._task.checker, function=True)
        cases = tuple(FunctionCase(args=question, expected=True) for question in questions)
        tests = FunctionTests(kind="function", entry="check", cases=cases)
        answers: list[_CheckerVerdict] = []
        async for ends in runner.run_tests(launch, program_runs.test_inputs(tests), stop_at_crash=False):
            for end in ends:
                output = b"" if crash_reason(end, launch.cpu_seconds) else end.output.strip()
                said: _CheckerVerdict = {b"true": True, b"false": False}.get(output, "failed")
                answers.append("late" if end.timed_out else said)
        return answers


async def _find_failures(
    task: CodeRow, launch: Launch, cases: Sequence[_Case], ends: Sequence[ProgramResult], checker: _Checker
) -> list[str | None]:
    """Return for each test that ended how it failed, without quoting the test, or ``None``."""
    wrong = "wrong result" if isinstance(task.tests, FunctionTests) else "wrong output"
    pairs = zip(cases, ends, strict=True)
    questions = [crash_reason(end, launch.cpu_seconds) or _question(case, end.output) for case, end in pairs]
    asked = [question for question in questions if not isinstance(question, str)]
    if task.checker:
        answers = iter(await checker.check_outputs(asked))
    else:
        answers = iter(await asyncio.to_thread(lambda: [_is_right(task, *answer) for _, *answer in asked]))
    return [question if isinstance(question, str) else None if next(answers) else wrong for question in questions]


def _is_right(task: CodeRow, expected: Any, output: Any) -> bool:
    if isinstance(task.tests, StdioTests):
        return outputs_match(expected, output.encode(), task.tests.compare if task.runner == "plain" else task.runner)
    may_unwrap = isinstance(task.tests, FunctionTests) and task.tests.unwrap
    wrapped: list[Any] = expected if may_unwrap and issubclass(type(expected), list) else []
    accepted = [expected, *(wrapped if len(wrapped) == 1 else ())]
    match = eq if task.runner == "livecodebench" else results_match
    return any(match(value, output) for value in accepted)


def _question(case: _Case, output: bytes) -> list[Any] | str:
    """Return a checker's arguments (input, expected, output), or why the test failed before it."""
    try:
        if isinstance(case, StdioCase):
            return [case.stdin, case.stdout, output.decode()]
        return [case.args, case.expected, parse_result(output)] if output.strip() else "no result"
    except ValueError:
        return "wrong output" if isinstance(case, StdioCase) else "unreadable result"


def outputs_match(expected: str, actual: bytes, compare: str = "lines") -> bool:
    """Whether a program printed what was expected.

    ``lines``: white space at the end of lines and empty lines at the end do not count. ``tokens``: no white space
    counts. In both, where the expected text has a decimal number, a number within ``_TOLERANCE`` will do; integers must
    be written exactly. ``exact``: only the last line feed may differ. ``livecodebench``: see ``CodeRow.runner``.
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
    if compare == "livecodebench":
        wanted, given = ([line.strip() for line in whole.strip().split("\n")] for whole in (expected, text))
        return len(wanted) == len(given) and all(map(_same_decimals, wanted, given))
    wanted, given = _lines(expected), _lines(text)
    return len(wanted) == len(given) and all(map(_same_line, wanted, given))


def _same_decimals(wanted: str, given: str) -> bool:
    if wanted == given:
        return True
    try:
        return list(map(Decimal, wanted.split())) == list(map(Decimal, given.split()))
    except ArithmeticError:  # a word is no number
        return False


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

    Raises ``ValueError``: it is not JSON, too deeply nested, or holds a number that is too long.
    """
    try:
        return json.loads(text, parse_constant=float)  # a NaN of its own: ``in`` and ``==`` of lists go by identity
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
        one, other = cast(Mapping[str, Any], expected), cast(Mapping[str, Any], actual)
        return one.keys() == other.keys() and all(results_match(one[key], other[key]) for key in one)
    if isinstance(expected, list) and isinstance(actual, list):
        values, others = cast(list[Any], expected), cast(list[Any], actual)
        return len(values) == len(others) and all(map(results_match, values, others))
    return bool(expected == actual)


def _close(expected: float, actual: float) -> bool:
    if math.isnan(expected):
        return math.isnan(actual)
    try:
        return math.isclose(expected, actual, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except OverflowError:  # an integer that no float can hold
        return False
