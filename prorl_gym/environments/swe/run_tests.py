"""Running the tests of a repository in a sandbox, and turning the status of each test into a reward.

Output goes to a file in the sandbox, never through a terminal, and is read whole or not at all. For pytest our plug-in
writes the result of each test to a separate file, so that a test's output cannot pass for results; for other runners
only the log exists. The environment's README describes what that protects from hostile code, and what it does not.
"""

import asyncio
import errno
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from prorl_gym.environments.killed_program import was_killed
from prorl_gym.environments.swe.runner_reports import PASSING, RunReport, Status, read_events, read_log, worse_status
from prorl_gym.environments.swe.swe_row import SweTask, TestPlan
from prorl_gym.errors import Evidence
from prorl_gym.records import Score
from prorl_gym.sandbox.protocol import ExecResult, Sandbox

MAX_LOG = 16 << 20
"""Longest log that is read, in bytes."""

_PLUGIN = files("prorl_gym.environments.swe").joinpath("pytest_report.py").read_text(encoding="utf-8")
# Added to what the image sets, which its programs need. Directories of the repository may come before ours on Python's
# path: the plug-in therefore has another name in each run.
_PLUGIN_EXPORTS = """
export PRORL_ROOT="$(pwd -P)" PYTHONPATH="$3${PYTHONPATH:+:$PYTHONPATH}" PRORL_REPORT="$3/report"
export PYTEST_ADDOPTS="-p $4${PYTEST_ADDOPTS:+ $PYTEST_ADDOPTS}"
"""
_RUN = 'exec >>"$1" 2>&1 </dev/null; if [ -n "$3" ]; then ' + _PLUGIN_EXPORTS + 'fi; set -- "$2"; eval "$1"; exit $?'

_MAX_NAMED = 3
_MAX_REPORTED_NAME = 300
_NAME_LENGTH = 120


@dataclass(frozen=True, slots=True)
class TestResults:
    """Result of a run of the tests."""

    statuses: Mapping[str, Status]
    problem: str = ""
    """Why the statuses cannot be used; empty when they can."""
    exit_code: int | None = None
    """Exit code of the test command; ``None`` when it did not run."""
    seconds: float = 0.0
    """Wall clock of build and tests."""
    log: str = ""
    """Output of the tests, or of a build that failed. For people only: it may quote hidden tests."""
    killed: bool = False
    """SIGKILL ended the build or the tests, and no limit explains that; see ``environments.killed_program``."""
    sigkill: Evidence | None = None
    """See ``ExecResult``."""

    __test__ = False


async def run_tests(
    sandbox: Sandbox,
    workdir: str,
    plan: TestPlan,
    seconds: float,
    patched_paths: Collection[str] = (),
    place_tests: Callable[[], Awaitable[str]] | None = None,
) -> TestResults:
    """Build the repository at ``workdir`` and run its tests by the plan, whose parser must not be ``swebench``.

    Build and tests together take ``seconds`` of wall clock at most. ``patched_paths`` may not implement hooks of
    pytest. ``place_tests`` puts the hidden tests in place after the build, which may run code of the patch and must not
    have them; it returns what failed, or an empty text.
    """
    run = CommandSequence(sandbox, workdir, seconds)
    if plan.build:
        built = await run.run_command(plan.build)
        if built.timed_out or built.exit_code != 0:
            why = "the build took too long" if built.timed_out else f"the build failed with exit code {built.exit_code}"
            log = await run.read_output(run.log_path)
            return TestResults({}, why, None, run.used_seconds, log or "", was_killed(built), built.kill_evidence)
    if place_tests is not None and (problem := await place_tests()):
        return TestResults({}, problem, None, run.used_seconds)
    if plan.parser == "pytest":
        await run.install_plugin()
    ran = await run.run_command(plan.command)
    killed = was_killed(ran), ran.kill_evidence
    log = await run.read_output(run.log_path)
    if ran.timed_out:
        return TestResults({}, "the tests took too long", ran.exit_code, run.used_seconds, log or "")
    if log is None:
        return TestResults(
            {}, f"the test log is longer than {MAX_LOG} bytes", ran.exit_code, run.used_seconds, "", *killed
        )
    # In a thread: the report may be long, and the code under test wrote it.
    if plan.parser == "pytest":
        report = await asyncio.to_thread(read_events, await run.read_output(run.report_path) or "", patched_paths)
    else:
        report = await asyncio.to_thread(read_log, plan.parser, log)
        if not report.problem and ran.exit_code != 0 and not {"failed", "error"} & set(report.statuses.values()):
            # A runner that fails although no test failed did not write this log.
            problem = f"no test is reported as failed, but the exit code is {ran.exit_code}"
            report = RunReport(report.statuses, problem)
    return TestResults(report.statuses, report.problem, ran.exit_code, run.used_seconds, log, *killed)


class CommandSequence:
    """Commands that run after each other within one budget of wall clock, each with its output in a file."""

    def __init__(self, sandbox: Sandbox, workdir: str, seconds: float) -> None:
        self._sandbox = sandbox
        self._workdir = workdir
        self._seconds = seconds
        self._plugin_directory = self._module = ""
        # Unpredictable: the repository cannot bring a file, a link or a device of that name.
        self._directory = f"/tmp/prorl-{secrets.token_hex(8)}"
        self._ran = 0
        self.log_path = ""
        """File with the output of the last command."""
        self.report_path = ""
        """File that our pytest plug-in writes."""
        self.used_seconds = 0.0

    async def install_plugin(self) -> None:
        """Make pytest load our plug-in in the commands that follow; the build before did not see it."""
        self._plugin_directory = f"/tmp/prorl-{secrets.token_hex(8)}"
        self.report_path = f"{self._plugin_directory}/report"
        self._module = f"prorl_{secrets.token_hex(8)}"
        await self._sandbox.write_file(f"{self._plugin_directory}/{self._module}.py", _PLUGIN.encode(), mode=0o444)

    async def run_command(self, command: str) -> ExecResult:
        """Run a shell command with its output in a log of its own. Everything it starts ends at the timeout."""
        self.log_path = f"{self._directory}/log{self._ran}"
        if self._ran == 0:  # makes the directory
            await self._sandbox.write_file(self.log_path, b"")
        self._ran += 1
        left = max(self._seconds - self.used_seconds, 0.001)
        started = time.monotonic()
        argv = ["bash", "-c", _RUN, "bash", self.log_path, command, self._plugin_directory, self._module]
        result = await self._sandbox.exec(argv, timeout=left, cwd=self._workdir)
        self.used_seconds += time.monotonic() - started
        return result

    async def read_output(self, path: str) -> str | None:
        """Return a file's text: empty when it is gone or no file any more, ``None`` when it is too long."""
        try:
            return (await self._sandbox.read_file(path, limit=MAX_LOG)).decode(errors="replace")
        except OSError as error:
            return None if error.errno == errno.EFBIG else ""


def score_tests(task: SweTask, results: TestResults) -> Score:
    """Return 1.0 when every test that must pass is reported as passed and the report is consistent.

    The detail counts them and names up to three tests that failed and three that are missing.
    """
    if results.problem:
        return unsolved_score(results.problem)
    find = StatusLookup(results.statuses, without_file=task.source == "r2egym")
    fail_to_pass = find.statuses_of(task.tests.fail_to_pass)
    pass_to_pass = find.statuses_of(task.tests.pass_to_pass)
    both = [*fail_to_pass, *pass_to_pass]
    detail: dict[str, str | int | float | bool | None] = {
        "fail_to_pass": f"{_passing(fail_to_pass)}/{len(fail_to_pass)}",
        "pass_to_pass": f"{_passing(pass_to_pass)}/{len(pass_to_pass)}",
    }
    report = report_lines([(status, name) for name, status in both])
    if fail_to_pass and _passing(both) == len(both):
        return Score(reward=1.0, detail=detail, report=report)
    missing = [name for name, status in both if status == "missing"]
    failed = [name for name, status in both if status not in PASSING and status != "missing"]
    detail |= {"failed": summarize_names(failed), "missing": summarize_names(missing)}
    if _passing(fail_to_pass) < len(fail_to_pass):
        why = "the fault is not repaired"
    else:
        why = "tests that passed before do not any more" if pass_to_pass else "no test shows the repair"
    return Score(reward=0.0, detail={"why": why, **detail}, report=report)


def broke_only_others(task: SweTask, results: TestResults) -> bool:
    """Whether the fault is repaired, and only tests fail that passed before."""
    find = StatusLookup(results.statuses, without_file=task.source == "r2egym")
    repaired = all(status in PASSING for _, status in find.statuses_of(task.tests.fail_to_pass))
    others = [status for _, status in find.statuses_of(task.tests.pass_to_pass)]
    return not results.problem and repaired and any(status not in PASSING for status in others)


def with_flaky_detail(score: Score, task: SweTask, results: TestResults, again: TestResults) -> Score:
    """Name in the detail the tests whose result differed in a second run.

    The reward stays: the repair may be what makes a test flaky. Check rows that often name one.
    """
    first, second = (StatusLookup(each.statuses, without_file=task.source == "r2egym") for each in (results, again))
    names = task.tests.pass_to_pass
    flaky = [name for name in names if (first.status_of(name) in PASSING) is not (second.status_of(name) in PASSING)]
    return score.model_copy(update={"detail": {**score.detail, "flaky": summarize_names(flaky)}}) if flaky else score


def unsolved_score(why: str) -> Score:
    """Return the score of a repair without a result for each test."""
    return Score(reward=0.0, detail={"why": why})


def summarize_names(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    shown = ", ".join(name[:_NAME_LENGTH] for name in names[:_MAX_NAMED])
    return f"{shown} and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else shown


def report_lines(tests: Iterable[tuple[Status, str]]) -> str:
    """Return outcome and name of each test on a line, failures first."""
    ordered = sorted(tests, key=lambda test: test[0] in PASSING)
    return "\n".join(f"{status} {' '.join(name.split())[:_MAX_REPORTED_NAME]}" for status, name in ordered)


class StatusLookup:
    """Finds tests by the names that data sets use.

    ``without_file``: pytest ids are also known without their file, joined by dots, as R2E-Gym has them. Tests of
    several files that share such a name count as the worst of them.
    """

    def __init__(self, statuses: Mapping[str, Status], *, without_file: bool = False) -> None:
        self._statuses = statuses
        self._short: dict[str, Status] = {}
        for name, status in statuses.items() if without_file else ():
            short = ".".join(name.split("::")[1:]).split(" - ")[0]
            self._short[short] = worse_status(self._short[short], status) if short in self._short else status

    def statuses_of(self, names: Iterable[str]) -> list[tuple[str, Status]]:
        return [(name, self.status_of(name)) for name in names]

    def status_of(self, name: str) -> Status:
        """Return the status of a test; ``missing`` when it is not reported."""
        if name in self._statuses:
            return self._statuses[name]
        if name in self._short:
            return self._short[name]
        # Some data sets end an id at the first space, in the middle of a parameter.
        found: Status = "missing"
        if name.count("[") > name.count("]"):
            for candidate, status in self._statuses.items():
                if candidate.startswith(name):
                    found = status if found == "missing" else worse_status(found, status)
        return found


def _passing(tests: Sequence[tuple[str, Status]]) -> int:
    return sum(status in PASSING for _, status in tests)
