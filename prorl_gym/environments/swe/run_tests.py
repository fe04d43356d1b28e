"""Running the tests of a repository in a sandbox, and reading what came of them on our side.

Output goes to a file inside, never through a terminal, and is read whole or not at all. For pytest a plug-in of ours
reports each test to a file of its own, so that what a test prints is not taken for a result; for other runners the log
is what there is. See the environment's README for what that can and cannot keep hostile code from.
"""

import asyncio
import errno
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.resources import files

from prorl_gym.environments.killed import was_killed
from prorl_gym.environments.swe.parsers import RUNNERS, Status
from prorl_gym.environments.swe.parsers.pytest_events import read_events
from prorl_gym.environments.swe.task import TestPlan
from prorl_gym.errors import Evidence
from prorl_gym.sandbox.protocol import ExecResult, Sandbox

MAX_LOG = 16 << 20
"""Longest log that is read, in bytes."""

_PLUGIN = files("prorl_gym.environments.swe").joinpath("pytest_report.py").read_text(encoding="utf-8")
# Beside what the image sets: our plug-in must be found, and so must what the image's programs need. Directories of the
# repository may come before ours on Python's path: the plug-in's name is therefore another in each run.
_PLUG_IN = """
export PRORL_ROOT="$(pwd -P)" PYTHONPATH="$3${PYTHONPATH:+:$PYTHONPATH}" PRORL_REPORT="$3/report"
export PYTEST_ADDOPTS="-p $4${PYTEST_ADDOPTS:+ $PYTEST_ADDOPTS}"
"""
_RUN = 'exec >>"$1" 2>&1 </dev/null; if [ -n "$3" ]; then ' + _PLUG_IN + 'fi; set -- "$2"; eval "$1"'


@dataclass(frozen=True, slots=True)
class TestResults:
    """What a run of the tests said."""

    statuses: Mapping[str, Status]
    complaint: str = ""
    """Why nothing in it can be believed; empty when all is well."""
    exit_code: int | None = None
    """Of the test command; ``None``: it did not come to that."""
    seconds: float = 0.0
    """That build and tests took."""
    log: str = ""
    """Output of the tests, or of the build when that failed. For people: it may quote hidden tests."""
    killed: bool = False
    """SIGKILL ended the build or the tests, and no limit explains that; see ``environments.killed``."""
    sigkill: Evidence | None = None
    """See ``ExecResult``."""

    __test__ = False


async def run_tests(
    sandbox: Sandbox,
    workdir: str,
    plan: TestPlan,
    seconds: float,
    own: Collection[str] = (),
    put_tests: Callable[[], Awaitable[str]] | None = None,
) -> TestResults:
    """Build the repository at ``workdir`` and run its tests; both as the plan says, which must not be ``swebench``.

    Args:
        sandbox: where the repository is.
        workdir: the repository.
        plan: commands and parser.
        seconds: wall clock for build and tests together.
        own: paths of the patch that may not implement hooks of pytest.
        put_tests: puts the hidden tests in place, after the build, which may run code of the patch and never sees
            them; returns what failed, or an empty text.

    Raises:
        SandboxError: the sandbox is lost.
    """
    run = CommandRun(sandbox, workdir, seconds)
    await run.prepare()
    if plan.build:
        built = await run.command(plan.build)
        if built.timed_out or built.exit_code != 0:
            why = "the build took too long" if built.timed_out else f"the build failed with exit code {built.exit_code}"
            log = await run.read(run.log)
            return TestResults({}, why, None, run.used, log or "", was_killed(built), built.sigkill)
        run.next_log()
    if put_tests is not None and (complaint := await put_tests()):
        return TestResults({}, complaint, None, run.used)
    if plan.parser == "pytest":
        await run.plug_in()
    ran = await run.command(plan.command)
    killed = was_killed(ran), ran.sigkill
    log = await run.read(run.log)
    if ran.timed_out:
        return TestResults({}, "the tests took too long", ran.exit_code, run.used, log or "")
    if log is None:
        return TestResults({}, f"the test log is longer than {MAX_LOG} bytes", ran.exit_code, run.used, "", *killed)
    if plan.parser == "pytest":
        events = await asyncio.to_thread(read_events, await run.read(run.report) or "", own)
        return TestResults(events.statuses, events.complaint, ran.exit_code, run.used, log, *killed)
    runner = RUNNERS[plan.parser]
    # In a thread: the log may be long, and is made by whoever wants to.
    statuses = await asyncio.to_thread(runner.parse, log)
    complaint = await asyncio.to_thread(runner.complaint, log, statuses) or _exit_complaint(ran, statuses)
    return TestResults(statuses, complaint, ran.exit_code, run.used, log, *killed)


class CommandRun:
    """Commands that run after each other within one budget of time, each with its output in a file.

    Args:
        sandbox: where they run.
        workdir: their working directory.
        seconds: wall clock for all together.
    """

    def __init__(self, sandbox: Sandbox, workdir: str, seconds: float) -> None:
        self._sandbox = sandbox
        self._workdir = workdir
        self._seconds = seconds
        self._plug_in = self._module = ""
        # Not to be known beforehand: the repository cannot bring a file, a link or a device of that name.
        self._directory = f"/tmp/prorl-{secrets.token_hex(8)}"
        self._logs = 0
        self.used = 0.0

    @property
    def log(self) -> str:
        """The file that output goes to."""
        return f"{self._directory}/log{self._logs}"

    @property
    def report(self) -> str:
        """The file of our pytest plug-in."""
        return f"{self._plug_in}/report"

    def next_log(self) -> None:
        """Let the output of what comes go to another file."""
        self._logs += 1

    async def prepare(self) -> None:
        """Make the directory of the logs."""
        await self._sandbox.write_file(self.log, b"")

    async def plug_in(self) -> None:
        """Put our plug-in in pytest's way, for the commands that follow: what was built before does not know it."""
        self._plug_in = f"/tmp/prorl-{secrets.token_hex(8)}"
        self._module = f"prorl_{secrets.token_hex(8)}"
        await self._sandbox.write_file(f"{self._plug_in}/{self._module}.py", _PLUGIN.encode(), mode=0o444)

    async def command(self, command: str) -> ExecResult:
        """Run a shell command with its output in ``log``. Whatever it starts ends with the time.

        Raises:
            SandboxError: the sandbox is lost.
        """
        left = max(self._seconds - self.used, 0.001)
        started = time.monotonic()
        argv = ["bash", "-c", _RUN, "bash", self.log, command, self._plug_in, self._module]
        result = await self._sandbox.exec(argv, timeout=left, cwd=self._workdir)
        self.used += time.monotonic() - started
        return result

    async def read(self, path: str) -> str | None:
        """Return the text of a file of ours: empty when it is gone or no file any more, ``None`` when it is too long.

        Raises:
            SandboxError: the sandbox is lost.
        """
        try:
            return (await self._sandbox.read_file(path, limit=MAX_LOG)).decode(errors="replace")
        except OSError as error:
            return None if error.errno == errno.EFBIG else ""


def _exit_complaint(ran: ExecResult, statuses: Mapping[str, Status]) -> str:
    """A runner that fails although nothing failed was not the one that wrote this log."""
    if ran.exit_code != 0 and not {"failed", "error"} & set(statuses.values()):
        return f"no test is reported as failed, but the exit code is {ran.exit_code}"
    return ""
