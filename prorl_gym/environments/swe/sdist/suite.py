"""Running a project's own tests in a fresh sandbox without network, and reading the log as grading does."""

import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

from pydantic import BaseModel, ValidationError

from prorl_gym.environments.swe.parsers import PASSING, Status
from prorl_gym.environments.swe.run_tests import run_tests
from prorl_gym.environments.swe.sdist.layout import Layout
from prorl_gym.environments.swe.sdist.tree import Tree, pack
from prorl_gym.environments.swe.task import TestPlan
from prorl_gym.errors import ConfigError
from prorl_gym.sandbox.protocol import Sandbox

VENDOR = ".vendor"
"""Directory of the tree that holds the requirements, unpacked; pytest does not look for tests in hidden ones."""

_FOLDER = "/tmp/.prorl-suite"
_ARCHIVE = f"{_FOLDER}/tree.tar.gz"
_PLUGIN = f"{_FOLDER}/prorl_suite_report.py"
_REPORT = f"{_FOLDER}/report.json"
_MAX_REPORT = 16 << 20
_UNPACK_SECONDS = 60.0

Start = Callable[[], Awaitable[Sandbox]]
"""Starts a sandbox that nobody has touched, with pytest in reach of its python3."""


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """What came of one run."""

    statuses: Mapping[str, Status]
    messages: Mapping[str, str]
    """Of tests that failed: the message of the exception, as pytest tells it."""
    lines: Mapping[str, frozenset[int]]
    """Lines that ran, by path; only when they were traced."""
    seconds: float
    problem: str = ""
    """Why the run says nothing: it ran out of time, or did not come to its end."""

    @property
    def passing(self) -> frozenset[str]:
        """Tests that passed, expected failures among them."""
        return frozenset(name for name, status in self.statuses.items() if status in PASSING)

    @property
    def failing(self) -> frozenset[str]:
        """Tests that failed or could not be set up."""
        return frozenset(name for name, status in self.statuses.items() if status in ("failed", "error"))


def command_for(layout: Layout, tests: Sequence[str]) -> str:
    """Return the shell command that runs tests (files or directories) from the root of the tree.

    The project's own configuration of pytest is not read, but for the mode of pytest-asyncio: it asks for plug-ins that
    are not there. Hashes are fixed, so that the order of sets is the same in every run.
    """
    roots = [f'"$PWD/{layout.source_root}"' if layout.source_root else '"$PWD"', f'"$PWD/{VENDOR}"']
    variables = f"PYTHONPATH={':'.join(roots)}${{PYTHONPATH:+:$PYTHONPATH}} PYTHONHASHSEED=0 PYTHONDONTWRITEBYTECODE=1"
    options = "-rA -p no:cacheprovider -c /dev/null --rootdir=." + " -o asyncio_mode=auto" * layout.marks_async
    return f"{variables} python3 -m pytest {options} {' '.join(map(shlex.quote, tests))}"


async def run_suite(
    start: Start, workdir: str, tree: Tree, command: str, seconds: float, *, trace: bool = False
) -> SuiteRun:
    """Run the tests of a tree once.

    Args:
        start: see ``Start``; the sandbox is closed at the end.
        workdir: where the tree is unpacked.
        tree: all files.
        command: see ``command_for``.
        seconds: wall clock for the run.
        trace: also find out which lines of the tree run. Several times slower.

    Raises:
        ConfigError: the tree cannot be unpacked, or the sandbox has no bash or python3 to run it with.
        SandboxError: the sandbox could not be started or was lost.
    """
    sandbox = await start()
    try:
        await _place(sandbox, workdir, tree)
        plan = TestPlan(
            files={},
            patch="",
            removed=(),
            build="",
            command=f"{_with_plugin(workdir, trace)}; {command}",
            parser="pytest",
            fail_to_pass=(),
            pass_to_pass=(),
            seconds=seconds,
        )
        results = await run_tests(sandbox, workdir, plan, seconds)
        messages, lines = await _report(sandbox)
    finally:
        await sandbox.close()
    problem = results.complaint
    if "No module named pytest" in results.log and not results.statuses:
        raise ConfigError("The sandbox has no pytest.", "Use an image with python3 3.9 or newer.")
    return SuiteRun(results.statuses, messages, lines, results.seconds, problem)


def with_requirements(tree: Tree, layout: Layout, requirements: Tree) -> Tree:
    """Return the tree with what its tests import in ``VENDOR``, and the metadata that an installation would leave."""
    name = f"{layout.name.replace('-', '_')}-{layout.version}.dist-info"
    vendored = {f"{VENDOR}/{path}": file for path, file in requirements.items()}
    installed = {f"{VENDOR}/{name}/METADATA": replace(tree["PKG-INFO"], executable=False)}
    return {**tree, **vendored, **installed}


async def _place(sandbox: Sandbox, workdir: str, tree: Tree) -> None:
    await sandbox.write_file(_ARCHIVE, pack(tree))
    plugin = files("prorl_gym.environments.swe.sdist").joinpath("guest_report.py").read_bytes()
    await sandbox.write_file(_PLUGIN, plugin)
    unpack = ["tar", "--no-same-owner", "-xzf", _ARCHIVE, "-C", workdir]
    done = await sandbox.exec(["mkdir", "-p", workdir], timeout=_UNPACK_SECONDS, cwd="/")
    if not done.exit_code:
        done = await sandbox.exec(unpack, timeout=_UNPACK_SECONDS, cwd="/")
    if done.exit_code:
        said = done.stderr.decode("utf-8", "replace").strip()[:200]
        raise ConfigError(
            f"The tree cannot be unpacked in the sandbox: {said}", "Use an image with bash, tar and gzip."
        )


def _with_plugin(workdir: str, trace: bool) -> str:
    variables = {
        "PRORL_SUITE_ROOT": f"{workdir}/",
        "PRORL_SUITE_REPORT": _REPORT,
        "PRORL_SUITE_TRACE": "1" if trace else "",
        "PYTHONPATH": f"{_FOLDER}${{PYTHONPATH:+:$PYTHONPATH}}",
        "PYTEST_ADDOPTS": "$PYTEST_ADDOPTS -p prorl_suite_report --tb=no",  # making tracebacks takes most of the time
    }
    return "export " + " ".join(f'{name}="{value}"' for name, value in variables.items())


class _Hints(BaseModel):
    messages: dict[str, str] = {}
    lines: dict[str, frozenset[int]] = {}


async def _report(sandbox: Sandbox) -> tuple[Mapping[str, str], Mapping[str, frozenset[int]]]:
    """What the plugin wrote; the project's code may have kept it from writing, or written there itself."""
    try:
        hints = _Hints.model_validate_json(await sandbox.read_file(_REPORT, limit=_MAX_REPORT))
    except (OSError, ValidationError):
        return {}, {}
    return hints.messages, hints.lines
