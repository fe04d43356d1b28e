"""Running a batch of tests in one sandbox run, and what can be believed of its report.

One driver (``run_tests``) per sandbox runs the program on the tests of a batch, each in a process of its own. See there
for what keeps the program away from it. A batch pauses after a moment, so that a program whose output is wrong does
not spend hours on the remaining tests: only this side can tell.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from prorl_gym.environments.killed import was_killed
from prorl_gym.errors import Evidence, GraderError
from prorl_gym.sandbox.protocol import ExecResult, Sandbox

_RUN_TESTS = files("prorl_gym.environments.code").joinpath("run_tests.py").read_text(encoding="utf-8")

BATCH_SECONDS = 3.0
"""After so many seconds a batch pauses: the time that a slow program with a wrong answer can waste."""

START_SECONDS = 15.0
"""How long the driver may take to start, on a machine that is busy with other things."""

PROCESSES = 64
"""Processes and threads of a program, the driver and the sandbox's own two among them."""

_HEADROOM = 4096
"""Bytes of a frame, and of standard error."""

ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1"}
"""The same order of sets in every run: a verdict must not depend on luck."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a program is run: the same for all of its tests."""

    path: str
    """Where it is written to."""
    content: bytes
    mode: int
    argv: tuple[str, ...]
    cpu_seconds: int
    """CPU time of each test, with all processes that it starts."""
    memory: int
    """Address space of each process in bytes."""
    wall_seconds: float
    result_pipe: bool = False
    """Output is what comes on descriptor 3; what is printed goes nowhere."""
    stack: int = 8 << 20
    env: Mapping[str, str] = field(default_factory=lambda: dict(ENVIRONMENT))


@dataclass(frozen=True, slots=True)
class TestInput:
    """What one test gives to the program."""

    __test__ = False

    stdin: bytes
    room: int
    """Bytes of output that are kept; with more it fails."""


class TestEnd(BaseModel):
    """How the program did on one test."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    __test__ = False

    exit: int
    timed_out: bool
    truncated: bool
    seconds: float
    cpu: float
    clean: bool
    out: int
    err: int
    output: bytes = b""
    errors: bytes = b""
    stopped_driver: bool = False
    """It ended or stopped the driver, twice."""


class _Ready(BaseModel):
    model_config = ConfigDict(extra="forbid")
    ready: Literal[True]


class _End(BaseModel):
    model_config = ConfigDict(extra="forbid")
    end: Literal["done", "paused", "stopped", "unclean", "broken"]
    error: str = ""


@dataclass(frozen=True, slots=True)
class Batch:
    """What came of a batch: the tests that ended, in order."""

    ends: tuple[TestEnd, ...]
    interrupted: bool
    """The driver died or hung during the next test."""
    seconds: float
    """Wall clock of the tests; of the whole run, when it was interrupted."""
    sigkill: Evidence | None = None
    """See ``ExecResult``: who ended the driver or the program, if SIGKILL did."""
    driver_killed: bool = False
    """SIGKILL ended the driver."""


async def run_batch(
    sandbox: Sandbox, launch: Launch, tests: Sequence[TestInput], seconds: float, *, stop_at_crash: bool
) -> Batch:
    """Run a program on some tests, in a sandbox that holds nothing else and is not used again.

    Args:
        sandbox: a clean one.
        launch: the program.
        tests: at least one.
        seconds: wall clock left for all tests.
        stop_at_crash: leave the others alone after one that crashed, timed out or wrote too much.

    Raises:
        SandboxError: the sandbox is lost.
        GraderError: it does not run the driver, or cannot start a process for the first test.
    """
    await sandbox.write_file(launch.path, launch.content, mode=launch.mode)
    limits = replace(
        sandbox.spec.limits,
        processes=PROCESSES,
        output=2 * _HEADROOM + sum(test.room + _HEADROOM for test in tests),
    )
    result = await sandbox.exec(
        ["python3", "-I", "-c", _RUN_TESTS],
        stdin=_request(launch, tests, seconds, stop_at_crash=stop_at_crash),
        timeout=START_SECONDS + BATCH_SECONDS + min(launch.wall_seconds, seconds),
        limits=limits,
    )
    return _read(result, sandbox.spec.image)


def _request(launch: Launch, tests: Sequence[TestInput], seconds: float, *, stop_at_crash: bool) -> bytes:
    job = {
        "argv": launch.argv,
        "env": dict(launch.env),
        "cpu": launch.cpu_seconds,
        "memory": launch.memory,
        "stack": launch.stack,
        "wall": launch.wall_seconds,
        "seconds": seconds,
        "batch_seconds": BATCH_SECONDS,
        "result_pipe": launch.result_pipe,
        "stop_at_crash": stop_at_crash,
        "tests": [{"stdin": len(test.stdin), "room": test.room} for test in tests],
    }
    return b"".join([json.dumps(job).encode() + b"\n", *(test.stdin for test in tests)])


def _read(result: ExecResult, image: str) -> Batch:
    """Read the driver's frames. Only the driver can write them; it may have been stopped at any byte."""
    ends: list[TestEnd] = []
    ready, rest = _frame(result.stdout)
    if not isinstance(ready, _Ready):
        words = result.stderr.decode(errors="replace").strip().rpartition("\n")[2][:200]
        raise GraderError(
            f"python3 does not run in the grading sandbox: exit code {result.exit_code}, {words or 'no word of it'}.",
            f"Use an image with a working python3 (3.8 or later, with ctypes) instead of '{image}'.",
        )
    while True:
        frame, rest = _frame(rest)
        if not isinstance(frame, TestEnd) or len(rest) < frame.out + frame.err:
            break
        output, errors, rest = rest[: frame.out], rest[frame.out : frame.out + frame.err], rest[frame.out + frame.err :]
        ends.append(frame.model_copy(update={"output": output, "errors": errors}))
    if isinstance(frame, _End) and frame.end == "broken" and not ends:
        raise GraderError(
            f"no process could be started in a fresh grading sandbox: {frame.error[:200]}.",
            "See `prorl-gym doctor`; limits.processes and limits.memory must leave room for a program.",
        )
    interrupted = not isinstance(frame, _End) or not ends
    seconds = result.seconds if interrupted else sum(end.seconds for end in ends)
    return Batch(tuple(ends), interrupted, seconds, result.sigkill, was_killed(result))


def _frame(data: bytes) -> "tuple[_Ready | TestEnd | _End | None, bytes]":
    line, newline, rest = data.partition(b"\n")
    if not newline:
        return None, b""
    try:
        frame: Any = json.loads(line)
        for model in (TestEnd, _End, _Ready):
            if isinstance(frame, dict) and next(iter(model.model_fields)) in frame:
                return model.model_validate(frame), rest
    except (ValueError, ValidationError, RecursionError):
        pass
    return None, rest
