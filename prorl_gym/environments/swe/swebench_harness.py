"""Grading a row of SWE-bench with the ``swebench`` package: its script, its parsers, its report.

We run the script in a clean sandbox where the base is ``HEAD`` (the repository has no other commit there) and write the
log to a file. A log in which the markers of the harness are not exactly where its script prints them is refused: tests
could hide their failures with them.
"""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, cast

from prorl_gym.environments.killed_program import was_killed
from prorl_gym.environments.swe.run_tests import (
    MAX_LOG,
    CommandSequence,
    TestResults,
    report_lines,
    summarize_names,
    unsolved_score,
)
from prorl_gym.environments.swe.runner_reports import Status
from prorl_gym.environments.swe.swe_row import SweTask
from prorl_gym.environments.worker_pool import (
    WorkerDiedError,
    WorkerError,
    WorkerFailedError,
    WorkerPool,
    WorkerStuckError,
    WorkerTimeoutError,
)
from prorl_gym.errors import GraderError
from prorl_gym.records import Score
from prorl_gym.sandbox.protocol import Sandbox

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
CPU_SECONDS = 60.0
"""For one request; the first one of a worker imports the package."""
MEMORY = 8 << 30
"""Address space of a worker: the package imports arrow, which reserves much of it."""

_FIELDS = (
    "instance_id", "repo", "version", "base_commit", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS", "eval_script",
    "log_parser", "eval_type",
)  # fmt: skip
_EXIT_CODE = "SWEBENCH_TEST_EXIT_CODE"
"""Variable with the exit code of the tests, in scripts of newer releases of the harness."""
_INSTALL_FIX = "Run `pip install 'prorl-gym[swe]'` in the service's environment."
# Tests run without a network: keep pip from waiting for one.
_NO_NETWORK = "export PIP_RETRIES=0 PIP_DEFAULT_TIMEOUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1\n"

_pool = WorkerPool("prorl_gym.environments.swe.swebench_worker:call", size=1, memory=MEMORY)


async def eval_script(task: SweTask, workers: WorkerPool = _pool) -> str:
    """Return the script that the harness runs for a row, with the base commit as ``HEAD``.

    Raises ``GraderError``: the harness is not installed, or lacks the row's repository.
    """
    try:
        script = str((await _call_harness({"row": _row(task)}, workers))["script"])
    except WorkerError as error:
        if not isinstance(error, WorkerFailedError) or "No module named" in str(error):
            raise _unavailable(error) from None
        raise GraderError(
            f"swe row {task.id}: the swebench package cannot make its test script: {error}.",
            "Install `swebench>=4.1,<5`, which has the commands of each repository, or use rows with an eval_script.",
        ) from None
    if script.count(START) != 1 or script.count(END) != 1:
        raise GraderError(f"swe row {task.id}: its test script lacks the harness' markers.", "Check its eval_script.")
    return "\n".join(adapt_line(line, task.base_commit) for line in script.split("\n"))


async def run_script(sandbox: Sandbox, task: SweTask, script: str, seconds: float) -> TestResults:
    """Run the script in a sandbox with the patch applied, and return its log, without statuses."""
    run = CommandSequence(sandbox, task.workdir, seconds)
    ran = await run.run_command(f"{_NO_NETWORK}{script}\nexit $prorl_exit_code\n")
    text = await run.read_output(run.log_path)
    if ran.timed_out:
        return TestResults({}, "the tests took too long", ran.exit_code, run.used_seconds)
    if text is None:
        return TestResults({}, f"the test log is longer than {MAX_LOG} bytes", ran.exit_code, run.used_seconds)
    killed = was_killed(ran), ran.kill_evidence
    return TestResults({}, marker_problem(text), ran.exit_code, run.used_seconds, text, *killed)


async def score_log(task: SweTask, results: TestResults) -> Score:
    """Return the verdict of the harness on a log.

    A log on which its parsers fail scores 0.0: the code under test decides what is in it. Raises ``GraderError``: the
    harness is not installed or cannot work.
    """
    if results.problem:
        return unsolved_score(results.problem)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="prorl-swe-", suffix=".log") as file:
        await asyncio.to_thread(file.write, results.log)
        await asyncio.to_thread(file.flush)
        try:
            answer = await _call_harness({"row": _row(task), "log": file.name, "exit_code": results.exit_code})
        except (WorkerTimeoutError, WorkerFailedError, WorkerDiedError) as error:
            return unsolved_score(f"the test log cannot be read ({type(error).__name__})")
        except WorkerError as error:
            raise _unavailable(error) from None
    if not answer["readable"]:
        return unsolved_score("the harness finds no test results in the log")
    fail_to_pass, pass_to_pass = _lists(answer, "FAIL_TO_PASS"), _lists(answer, "PASS_TO_PASS")
    wanted = len(task.tests.fail_to_pass)
    detail: dict[str, str | int | float | bool | None] = {
        "harness": "swebench",
        "fail_to_pass": f"{len(fail_to_pass[0])}/{wanted}",
        "pass_to_pass": f"{len(pass_to_pass[0])}/{len(task.tests.pass_to_pass)}",
    }
    if answer["contradiction"]:
        return Score(reward=0.0, detail={"why": "nothing is reported as failed, but the tests' exit code says so"})
    passed: list[tuple[Status, str]] = [("passed", name) for name in (*fail_to_pass[0], *pass_to_pass[0])]
    unpassed: list[tuple[Status, str]] = [("failed", name) for name in (*fail_to_pass[1], *pass_to_pass[1])]
    report = report_lines([*unpassed, *passed])
    if answer["resolved"]:
        return Score(reward=1.0, detail=detail, report=report)
    failed = summarize_names([name for _, name in unpassed])
    why = "the fault is not repaired" if len(fail_to_pass[0]) < wanted else "tests that passed before do not any more"
    return Score(reward=0.0, detail={"why": why, **detail, "failed": failed}, report=report)


def _lists(answer: Mapping[str, Any], name: str) -> tuple[Sequence[str], Sequence[str]]:
    found = cast(Mapping[str, Sequence[str]], answer["tests"].get(name, {}))
    return found.get("success", ()), found.get("failure", ())


async def _call_harness(body: dict[str, Any], workers: WorkerPool = _pool) -> dict[str, Any]:
    try:
        return await workers.call(body, cpu_seconds=CPU_SECONDS)
    except WorkerDiedError:  # perhaps the node is short of memory: try once more
        return await workers.call(body, cpu_seconds=CPU_SECONDS)


def _row(task: SweTask) -> dict[str, Any]:
    """Return the fields that the harness reads. The names are ours: parquet readers leave arrays that are no JSON."""
    row = {name: task.raw[name] for name in _FIELDS if task.raw.get(name) is not None}
    return row | {"FAIL_TO_PASS": list(task.tests.fail_to_pass), "PASS_TO_PASS": list(task.tests.pass_to_pass)}


def adapt_line(line: str, base_commit: str) -> str:
    """Return a line of the script for our sandbox: one commit, and an exit code that is that of the tests."""
    if line.startswith("git ") and base_commit:
        line = line.replace(base_commit, "HEAD")
    return f"prorl_exit_code=${{{_EXIT_CODE}:-$?}}\n{line}" if END in line else line


def marker_problem(text: str) -> str:
    """Return why a log cannot be believed, by the harness' markers in it; empty when it can."""
    if text.count(START) == 1 and text.count(END) == 1 and text.index(START) < text.index(END):
        return ""
    if END not in text:
        return "the test run did not end"
    return "the markers of the harness are not where its script prints them"


def _unavailable(error: WorkerError) -> GraderError:
    if "No module named" in str(error):
        return GraderError(f"the swebench package cannot be imported: {error}.", _INSTALL_FIX)
    if isinstance(error, WorkerStuckError):
        return GraderError(f"the swebench harness hung: {error}.", "Look at this node's disks and memory.")
    return GraderError(f"the swebench harness does not work: {error}.", _INSTALL_FIX)
