"""Runs controls: single test functions in a process each (``guest_runner``), or interleaved with their originals.

An interleaved file holds each test and its controls under random names, in random order.
"""

import asyncio
import json
import posixpath
import random
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import product
from typing import Any, get_args

from prorl_gym.environments.killed_program import was_killed
from prorl_gym.environments.swe.controls.control_plan import ControlRunner, TestFunction
from prorl_gym.environments.swe.controls.parsed_tests import TestFile, is_test_name, isolate_test, replace_spans
from prorl_gym.environments.swe.run_tests import CommandSequence, run_tests
from prorl_gym.environments.swe.runner_reports import PASSING, read_json_object
from prorl_gym.environments.swe.swe_row import SweTask
from prorl_gym.errors import Evidence
from prorl_gym.sandbox.protocol import Sandbox

_GUEST = files("prorl_gym.environments.swe.controls").joinpath("guest_runner.py").read_bytes()
_MAX_REPORT = 4 << 20
"""Bytes of a report that are read."""
_MAX_CONTROLS_PER_TEST = 3
"""Controls of a test in an interleaved file."""
_EXPORTS = 'export PRORL_JOBS={folder} PYTHONPATH="{folder}${{PYTHONPATH:+:$PYTHONPATH}}" PYTHONDONTWRITEBYTECODE=1\n'
_PLUGIN_EXPORTS = 'export PYTEST_ADDOPTS="-p {module}${{PYTEST_ADDOPTS:+ $PYTEST_ADDOPTS}}"\n'
_PRELOADED = ("pytest", "unittest", "")
"""In this order: pytest is imported before any job has run, which might change its files."""
_QUIET_EXPORTS = 'export PYTEST_ADDOPTS="$PYTEST_ADDOPTS --tb=no" PYTHONDONTWRITEBYTECODE=1\n'


LinesByPath = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class FunctionJob:
    """One process: a test file, and the one function of it that runs."""

    path: str
    """Path of the file, below the working directory."""
    text: str
    name: str
    """Name of the function, joined with its classes as pytest does."""
    runner: ControlRunner
    emit: str = ""
    """Name of the function that emits sealed values; empty when there are none."""
    gold_lines: LinesByPath | None = None
    """Lines that the gold patch changes, by path; set to trace how far the test runs. For trusted code only."""


def make_job(function: TestFunction, source: str, emit: str = "", gold_lines: LinesByPath | None = None) -> FunctionJob:
    """Return the job that runs one function of a test file's source. Raises ``ValueError``; see ``TestFile``."""
    text = isolate_test(source, function.defined)
    return FunctionJob(function.path, text, function.name, function.runner, emit, gold_lines)


@dataclass(frozen=True, slots=True)
class StopPoint:
    """How far a test ran."""

    steps: int
    """Instructions of the test file that were executed."""
    failed: bool
    lines: tuple[int, ...]
    """Lines of the test file in the traceback of its failure, the outermost first."""
    ran_repair: bool
    """Whether a line of the gold patch ran."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """Result of one process."""

    passed: bool
    """The test function returned and the process ended with 0."""
    emitted: Mapping[int, Sequence[Any]] = field(default_factory=dict[int, Sequence[Any]])
    """Encoded values by the number of the sealed value."""
    stop_points: tuple[StopPoint, ...] = ()
    """One for each test of the function that began, when traced; a function with parameters is several tests."""
    sigkill: Evidence | None = None
    """Set when SIGKILL ended it and no program in the sandbox sent that; see ``ExecResult.kill_evidence``."""


NOT_RUN = JobResult(passed=False)


async def run_jobs(
    sandbox: Sandbox,
    task: SweTask,
    jobs: Sequence[FunctionJob],
    seconds: float,
    total_seconds: float,
) -> list[JobResult]:
    """Run jobs one after another by the row's own command, each in a process of its own; return their results.

    The sandbox holds everything but the jobs' files. The command runs once for all jobs of a runner and a
    module that they import, for ``total_seconds`` at most; each job takes ``seconds`` of wall clock at most.
    """
    results: dict[int, JobResult] = {}
    groups = {number: (_preloaded_module(job, task), job.runner) for number, job in enumerate(jobs)}
    for preload, runner in product(_PRELOADED, get_args(ControlRunner)):
        numbered = {number: jobs[number] for number, group in groups.items() if group == (preload, runner)}
        if numbered:
            results |= await _run_with(runner, preload, sandbox, task, numbered, seconds, total_seconds)
    return [results[number] for number in range(len(jobs))]


async def run_interleaved(
    sandbox: Sandbox,
    task: SweTask,
    texts: Mapping[str, str],
    functions: Sequence[TestFunction],
    rng: random.Random,
    seconds: float,
) -> tuple[str, ...]:
    """Run controls together with their originals by the row's command.

    Return the ids of tests of which a control is not reported as failed in any of its parameters.
    """
    controls: dict[str, str] = {}
    for path in dict.fromkeys(each.path for each in functions):
        in_file = [each for each in functions if each.path == path]
        text, named = await asyncio.to_thread(_interleave_controls, texts[path], in_file, rng)
        controls.update(named)
        await sandbox.write_file(f"{task.workdir}/{path}", text.encode())
    plan = replace(task.tests, build="", command=_QUIET_EXPORTS + task.tests.command)
    results = await run_tests(sandbox, task.workdir, plan, seconds)
    failed = {
        re.split(r"::|\.", test.partition("[")[0])[-1]
        for test, status in results.statuses.items()
        if status not in PASSING and status != "skipped"
    }
    return tuple(test for name, test in controls.items() if name not in failed)


async def _run_with(
    runner: ControlRunner,
    preload: str,
    sandbox: Sandbox,
    task: SweTask,
    jobs: Mapping[int, FunctionJob],
    seconds: float,
    total_seconds: float,
) -> dict[int, JobResult]:
    folder = f"/tmp/prorl-{secrets.token_hex(8)}"
    module = "sitecustomize" if runner == "own" else f"prorl_{secrets.token_hex(8)}"
    key = secrets.token_hex(16)
    requests = [
        {
            "id": number,
            "file": posixpath.join(task.workdir, job.path),
            "text": job.text,
            "name": job.name,
            "emit": job.emit,
            "trace": job.gold_lines is not None,
            "preload": preload,
            "root": task.workdir,
            "repaired": {posixpath.join(task.workdir, path): lines for path, lines in (job.gold_lines or {}).items()},
            "seconds": seconds,
        }
        for number, job in jobs.items()
    ]
    await sandbox.write_file(f"{folder}/{module}.py", _GUEST, mode=0o444)
    await sandbox.write_file(f"{folder}/key", key.encode())
    await sandbox.write_file(f"{folder}/jobs", json.dumps(requests).encode())
    exports = _EXPORTS.format(folder=folder) + (_PLUGIN_EXPORTS.format(module=module) if runner == "pytest" else "")
    commands = CommandSequence(sandbox, task.workdir, total_seconds)
    ended = await commands.run_command(exports + task.tests.command)
    try:
        report = await sandbox.read_file(f"{folder}/report", limit=_MAX_REPORT)
    except OSError:
        report = b""
    events: dict[int, Mapping[str, Any]] = {}
    for event in filter(None, map(read_json_object, report.decode(errors="replace").split("\n"))):
        # A process may know the key from an earlier one, so a line proves no more than that some process ran.
        has_key = secrets.compare_digest(str(event.get("key", "")).encode(errors="replace"), key.encode())
        if has_key and isinstance(number := event.get("id"), int):
            events[number] = event
    results: dict[int, JobResult] = {}
    for number, job in jobs.items():
        if (event := events.get(number)) is None:
            results[number] = replace(NOT_RUN, sigkill=ended.kill_evidence if was_killed(ended) else None)
        else:
            sigkill = ended.kill_evidence if event.get("killed") is True else None
            results[number] = replace(_read_result(event, job), sigkill=sigkill)
    return results


def _preloaded_module(job: FunctionJob, task: SweTask) -> str:
    """Return the module of a runner that a job's file or a helper beside it imports anyway; empty when there is none.

    After a build there is none either: it may have replaced any module.
    """
    helpers = [text for path, text in task.tests.files.items() if "def test" not in text and "conftest" not in path]
    texts = "" if task.tests.build else "\n".join([job.text, *helpers])
    return next(name for name in _PRELOADED if not name or f"import {name}" in texts or f"from {name}" in texts)


def _read_result(event: Mapping[str, Any], job: FunctionJob) -> JobResult:
    passed = False
    emitted: dict[int, list[Any]] = {}
    stop_points: tuple[StopPoint, ...] = ()
    for found in filter(None, map(read_json_object, str(event.get("output")).split("\n"))):
        passed |= found.get("passed") is True
        if isinstance(number := found.get("site"), int):
            emitted.setdefault(number, []).append(found.get("value"))
        if job.gold_lines is not None and (points := found.get("stop_points")):
            stop_points = tuple(
                StopPoint(steps, failed, tuple(lines), ran_repair) for steps, failed, lines, ran_repair in points
            )
    return JobResult(passed and event.get("code") == 0, emitted, stop_points)


def _interleave_controls(
    source: str, functions: Sequence[TestFunction], rng: random.Random
) -> tuple[str, Mapping[str, str]]:
    """Return a file with the given functions and their controls in a shuffled order, without any other test.

    The second item is the test of each control, by the control's random name.
    """
    file = TestFile(source)
    by_definition = {each.defined: each for each in functions}
    replacements: list[tuple[int, int, str]] = []
    controls: dict[str, str] = {}
    for name, found in file.all_functions:
        start, end = file.span(found.node)
        function = by_definition.get(name)
        inner = [edit for edit in function.variants if start <= edit.start and edit.end <= end] if function else []
        inner = inner[:_MAX_CONTROLS_PER_TEST]
        if function is None or not inner or file.functions[name] is not found:
            if is_test_name(name):
                replacements.append((start, end, "pass"))
            continue
        indent = " " * (start - (source.rfind("\n", 0, start) + 1))
        copies: list[str] = []
        for edit in (None, *inner):
            text = source[start:end]
            if edit is not None:
                text = source[start : edit.start] + edit.text + source[edit.end : end]
            fresh_name = f"test_{rng.getrandbits(40):010x}"
            own_name = re.escape(name.rpartition("::")[2])
            copies.append(re.sub(rf"(\bdef\s+){own_name}\b", rf"\g<1>{fresh_name}", text, count=1))
            if edit is not None:
                controls[fresh_name] = function.test_id
        rng.shuffle(copies)
        replacements.append((start, end, f"\n\n{indent}".join(copies)))
    return replace_spans(source, replacements), controls
