"""Running single test functions in a sandbox by the runner of ours (``guest.py``), and reading what it reports."""

import json
import posixpath
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any, cast

from prorl_gym.environments.killed import was_killed
from prorl_gym.environments.swe.controls.plan import Runner
from prorl_gym.environments.swe.run_tests import CommandRun
from prorl_gym.environments.swe.task import SweTask
from prorl_gym.errors import Evidence
from prorl_gym.sandbox.protocol import Sandbox

_GUEST = files("prorl_gym.environments.swe.controls").joinpath("guest.py").read_bytes()
_MAX_REPORT = 4 << 20
_EXPORT = 'export PRORL_JOBS={folder} PYTHONPATH="{folder}${{PYTHONPATH:+:$PYTHONPATH}}" PYTHONDONTWRITEBYTECODE=1\n'
_PLUG_IN = 'export PYTEST_ADDOPTS="-p {module}${{PYTEST_ADDOPTS:+ $PYTEST_ADDOPTS}}"\n'


@dataclass(frozen=True, slots=True)
class Job:
    """One process: a test file in place, and the one function of it that runs."""

    path: str
    """Of the file, below the working directory."""
    text: str
    name: str
    """The function, as pytest joins it with its classes."""
    emit: str = ""
    """Name of the function that hands out sealed values; empty: none are."""
    repaired: Mapping[str, Sequence[int]] | None = None
    """Lines that the gold patch changes, by path; set to find out how far the test comes. For code that is trusted."""


@dataclass(frozen=True, slots=True)
class End:
    """How far a test came."""

    steps: int
    """Instructions of the test file that ran."""
    failed: bool
    lines: tuple[int, ...]
    """Of the test file, in the traceback of its failure, the outermost first."""
    repair: bool
    """Whether a line of the gold patch ran."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What the runner says about one process."""

    passed: bool
    """The test function returned and the process ended with 0."""
    emitted: Mapping[int, Sequence[Any]] = field(default_factory=dict[int, Sequence[Any]])
    """Encoded values by site."""
    ends: tuple[End, ...] = ()
    """Of each test that the function is and that begun, when they were traced."""
    sigkill: Evidence | None = None
    """It was ended by SIGKILL, which no program in the sandbox sent; see ``ExecResult.sigkill``."""


NOT_RUN = Ran(passed=False)


async def run_jobs(
    sandbox: Sandbox,
    task: SweTask,
    runner: Runner,
    jobs: Sequence[Job],
    seconds: float,
    together: float,
    *,
    warm: bool = False,
) -> list[Ran]:
    """Run jobs after each other, started by the row's own command, each in a process of its own.

    Args:
        sandbox: where the repository and everything but the jobs' files is in place.
        task: gives command and working directory.
        runner: what calls the functions.
        jobs: what to run.
        seconds: wall clock for each.
        together: wall clock for all.
        warm: import pytest once for all of them, in the process that keeps the key. For code that is trusted.

    Raises:
        SandboxError: the sandbox is lost.
    """
    folder = f"/tmp/prorl-{secrets.token_hex(8)}"
    module = "sitecustomize" if runner == "own" else f"prorl_{secrets.token_hex(8)}"
    key = secrets.token_hex(16)
    described = [
        {
            "id": number,
            "file": posixpath.join(task.workdir, job.path),
            "text": job.text,
            "name": job.name,
            "emit": job.emit,
            "trace": job.repaired is not None,
            "warm": warm,
            "repaired": {posixpath.join(task.workdir, path): lines for path, lines in (job.repaired or {}).items()},
            "seconds": seconds,
        }
        for number, job in enumerate(jobs)
    ]
    await sandbox.write_file(f"{folder}/{module}.py", _GUEST, mode=0o444)
    await sandbox.write_file(f"{folder}/key", key.encode())
    await sandbox.write_file(f"{folder}/jobs", json.dumps(described).encode())
    prefix = _EXPORT.format(folder=folder) + (_PLUG_IN.format(module=module) if runner == "pytest" else "")
    run = CommandRun(sandbox, task.workdir, together)
    await run.prepare()
    ended = await run.command(prefix + task.tests.command)
    try:
        report = await sandbox.read_file(f"{folder}/report", limit=_MAX_REPORT)
    except OSError:
        report = b""
    said = _read_report(report.decode(errors="replace"), key)
    not_run = replace(NOT_RUN, sigkill=ended.sigkill if was_killed(ended) else None)
    rans = [_read_job(said[number], job) if number in said else not_run for number, job in enumerate(jobs)]
    killed = {number for number, event in said.items() if event.get("killed") is True}
    return [replace(ran, sigkill=ended.sigkill) if number in killed else ran for number, ran in enumerate(rans)]


def _read_report(text: str, key: str) -> Mapping[int, Mapping[str, Any]]:
    """Return what is said of each job. A process that follows another one may know the key."""
    found: dict[int, Mapping[str, Any]] = {}
    for line in text.split("\n"):
        event = _object(line)
        known = secrets.compare_digest(str(event.get("key", "")).encode(errors="replace"), key.encode())
        if known and isinstance(number := event.get("id"), int):
            found[number] = event
    return found


def _read_job(event: Mapping[str, Any], job: Job) -> Ran:
    passed = False
    emitted: dict[int, list[Any]] = {}
    ends: tuple[End, ...] = ()
    for line in str(event.get("said")).split("\n"):
        said = _object(line)
        passed |= said.get("passed") is True
        if isinstance(site := said.get("site"), int):
            emitted.setdefault(site, []).append(said.get("value"))
        if job.repaired is not None:
            ends = (
                tuple(End(steps, failed, tuple(lines), repair) for steps, failed, lines, repair in said.get("ends", ()))
                or ends
            )
    return Ran(passed and event.get("code") == 0, emitted, ends)


def _object(line: str) -> Mapping[str, Any]:
    try:
        event: Any = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return cast(Mapping[str, Any], event) if isinstance(event, dict) else {}
