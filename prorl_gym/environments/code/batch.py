"""Running a program on all of its tests, in batches of one sandbox each.

One driver (``guest_driver``) per sandbox runs the program on the tests of a batch, each in a process of its own. See
there for what keeps the program away from it. A batch pauses after a moment, so that a program whose output is wrong
does not spend hours on the remaining tests: only the service has the expected outputs.

A test during which the driver ended, or the sandbox was lost, runs again alone in a fresh sandbox. If the driver ends
there, too, the program ended it, and this test and those after it fail; if the sandbox is lost again, the program is
not to blame, and there is no verdict.

The same holds for a program that SIGKILL ended within its limits: the host may have sent it (out of memory), or the
program itself. The test runs again alone, and a second kill counts against the program, as does one of the driver,
unless the sandbox has no record of a SIGKILL sent inside it. Then there is no verdict either.
"""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from prorl_gym.environments.killed_program import unexplained_kill_error, was_killed
from prorl_gym.environments.protocol import Leases
from prorl_gym.errors import Evidence, GraderError, SandboxError
from prorl_gym.sandbox.protocol import ExecResult, Sandbox, SandboxSpec

_RUN_TESTS = files("prorl_gym.environments.code").joinpath("guest_driver.py").read_text(encoding="utf-8")

BATCH_SECONDS = 3.0
"""After this time a batch pauses: what a slow program with a wrong answer can waste."""

START_SECONDS = 15.0
"""Longest start of the driver, on a busy machine."""

_PROCESSES = 64
"""Processes and threads of a program, including the driver and the sandbox's own two."""

_FRAME_BYTES = 4096
"""Bytes of a frame, and of standard error."""

_PROGRAM_ENV = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1"}
"""The same order of sets in every run: a verdict must not depend on luck."""

SANDBOX = SandboxSpec()

BATCH_BYTES = 32 << 20
"""Input and room for output of one batch, together: bounds the service's memory for one grading."""


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
    """Output is read from descriptor 3; what the program prints is dropped."""
    stack: int = 8 << 20
    env: Mapping[str, str] = field(default_factory=lambda: dict(_PROGRAM_ENV))


@dataclass(frozen=True, slots=True)
class TestInput:
    """What one test gives to the program."""

    __test__ = False

    stdin: bytes
    output_limit: int
    """Bytes of output that are kept; with more it fails."""


class ProgramResult(BaseModel):
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


class _ReadyFrame(BaseModel):
    model_config = ConfigDict(extra="forbid")
    ready: Literal[True]


class _EndFrame(BaseModel):
    model_config = ConfigDict(extra="forbid")
    end: Literal["done", "paused", "stopped", "unclean", "broken"]
    error: str = ""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What came of a batch: the tests that ended, in order."""

    results: tuple[ProgramResult, ...]
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
) -> BatchResult:
    """Run a program on at least one test, in a clean sandbox that is not used again.

    Args:
        sandbox: a clean one.
        launch: the program.
        tests: at least one.
        seconds: wall clock left for all tests.
        stop_at_crash: skip the others after one that crashed, timed out or wrote too much.

    Raises:
        SandboxError: the sandbox is lost.
        GraderError: it does not run the driver, or cannot start a process for the first test.
    """
    await sandbox.write_file(launch.path, launch.content, mode=launch.mode)
    limits = replace(
        sandbox.spec.limits,
        processes=_PROCESSES,
        output=2 * _FRAME_BYTES + sum(test.output_limit + _FRAME_BYTES for test in tests),
    )
    result = await sandbox.exec(
        ["python3", "-I", "-c", _RUN_TESTS],
        stdin=_encode_request(launch, tests, seconds, stop_at_crash=stop_at_crash),
        timeout=START_SECONDS + BATCH_SECONDS + min(launch.wall_seconds, seconds),
        limits=limits,
    )
    return _parse_frames(result, sandbox.spec.image)


def _encode_request(launch: Launch, tests: Sequence[TestInput], seconds: float, *, stop_at_crash: bool) -> bytes:
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
        "tests": [{"stdin": len(test.stdin), "room": test.output_limit} for test in tests],
    }
    return b"".join([json.dumps(job).encode() + b"\n", *(test.stdin for test in tests)])


def _parse_frames(result: ExecResult, image: str) -> BatchResult:
    """Read the driver's frames. Only the driver can write them; it may have ended at any byte."""
    ends: list[ProgramResult] = []
    ready, rest = _next_frame(result.stdout)
    if not isinstance(ready, _ReadyFrame):
        words = result.stderr.decode(errors="replace").strip().rpartition("\n")[2][:200]
        raise GraderError(
            f"python3 does not run in the grading sandbox: exit code {result.exit_code}, {words or 'no message'}.",
            f"Use an image with a working python3 (3.8 or later, with ctypes) instead of '{image}'.",
        )
    while True:
        frame, rest = _next_frame(rest)
        if not isinstance(frame, ProgramResult) or len(rest) < frame.out + frame.err:
            break
        output, errors, rest = rest[: frame.out], rest[frame.out : frame.out + frame.err], rest[frame.out + frame.err :]
        ends.append(frame.model_copy(update={"output": output, "errors": errors}))
    if isinstance(frame, _EndFrame) and frame.end == "broken" and not ends:
        raise GraderError(
            f"no process could be started in a fresh grading sandbox: {frame.error[:200]}.",
            "See `prorl-gym doctor`; limits.processes and limits.memory must leave room for a program.",
        )
    interrupted = not isinstance(frame, _EndFrame) or not ends
    seconds = result.seconds if interrupted else sum(end.seconds for end in ends)
    return BatchResult(tuple(ends), interrupted, seconds, result.sigkill_evidence, was_killed(result))


def _next_frame(data: bytes) -> "tuple[_ReadyFrame | ProgramResult | _EndFrame | None, bytes]":
    line, newline, rest = data.partition(b"\n")
    if not newline:
        return None, b""
    try:
        frame: Any = json.loads(line)
        for model in (ProgramResult, _EndFrame, _ReadyFrame):
            if isinstance(frame, dict) and next(iter(model.model_fields)) in frame:
                return model.model_validate(frame), rest
    except (ValueError, ValidationError, RecursionError):
        pass
    return None, rest


class BatchRunner:
    """Runs programs on tests, within one allowance of wall clock.

    Args:
        leases: gives the clean sandboxes.
        seconds: wall clock that all tests of all programs together may take.
    """

    __test__ = False

    def __init__(self, leases: Leases, seconds: float) -> None:
        self._leases = leases
        self._seconds = seconds

    async def run_tests(
        self, launch: Launch, tests: Sequence[TestInput], *, stop_at_crash: bool
    ) -> AsyncGenerator[list[ProgramResult]]:
        """Yield results of the tests, in order, some at a time; none after a crash with ``stop_at_crash``.

        Tests for which no time is left are reported as timed out.

        Raises:
            SandboxError: a sandbox could not be started, or was lost twice during the same test, or the program or its
                driver was killed twice and nothing in the sandbox did that.
            GraderError: no test can be run there.
        """
        position, again, kills_itself = 0, False, False
        while position < len(tests):
            if self._seconds <= 0:
                yield [_timed_out_result() for _ in tests[position:]]
                return
            portion = tests[position : position + 1] if again else _next_portion(tests, position)
            batch = await self._run_batch(launch, portion, again, stop_at_crash)
            ends = list(batch.results[: len(portion)])
            struck = batch.driver_killed or any(_was_killed(end, launch) for end in ends)
            if again and struck and batch.sigkill is not None:
                raise unexplained_kill_error("the program, or what runs its tests,", batch.sigkill)
            if batch.interrupted and not ends and again:
                # Every other test would cost as much time.
                yield [_stopped_driver_result(batch) for _ in tests[position:]]
                return
            killed = next((index for index, end in enumerate(ends) if _was_killed(end, launch)), None)
            kills_itself = kills_itself or (again and killed is not None)
            if killed is not None and not kills_itself:
                ends, again = ends[:killed], True
                self._seconds -= sum(end.seconds for end in ends)
            else:
                again = batch.interrupted
                self._seconds -= batch.seconds
            position += len(ends)
            if ends:
                yield ends
            if stop_at_crash and any(crash_reason(end, launch.cpu_seconds) for end in ends):
                return

    async def _run_batch(
        self, launch: Launch, portion: Sequence[TestInput], again: bool, stop_at_crash: bool
    ) -> BatchResult:
        sandbox = await self._leases.start_clean_sandbox(SANDBOX)
        try:
            return await run_batch(sandbox, launch, portion, self._seconds, stop_at_crash=stop_at_crash)
        except SandboxError:
            if again:
                raise
            # What the program left running after an earlier test may have choked it. Only a loss in a fresh sandbox
            # shows that the machine is broken.
            return BatchResult((), interrupted=True, seconds=0.0)
        finally:
            await sandbox.close()


def _next_portion(tests: Sequence[TestInput], start: int) -> Sequence[TestInput]:
    size, end = 0, start
    while end < len(tests) and (end == start or size + len(tests[end].stdin) + tests[end].output_limit <= BATCH_BYTES):
        size += len(tests[end].stdin) + tests[end].output_limit
        end += 1
    return tests[start:end]


def _timed_out_result() -> ProgramResult:
    return ProgramResult(exit=0, timed_out=True, truncated=False, seconds=0, cpu=0, clean=True, out=0, err=0)


def _stopped_driver_result(batch: BatchResult) -> ProgramResult:
    return _timed_out_result().model_copy(update={"stopped_driver": True, "timed_out": False, "seconds": batch.seconds})


_KILLED_REASON = "killed"
"""``crash_reason`` of a program that SIGKILL ended within its limits."""
_XCPU, _KILLED, _ABORTED = 128 + 24, 128 + 9, 128 + 6


def _was_killed(end: ProgramResult, launch: Launch) -> bool:
    return crash_reason(end, launch.cpu_seconds) == _KILLED_REASON


def crash_reason(end: ProgramResult, cpu_seconds: int) -> str | None:
    """Return how a program failed regardless of its output, or ``None``."""
    if end.stopped_driver:
        return "stopped the test runner"
    # A program that ignores SIGXCPU gets SIGKILL, which has other causes, too: the CPU time decides. The kernel counts
    # the limit in ticks, which may be up to half off. Several processes together may use more than the limit.
    spent = end.exit == _XCPU or (end.exit == _KILLED and end.cpu >= 0.5 * cpu_seconds)
    if end.timed_out or spent or end.cpu > cpu_seconds + 0.5:
        return "time limit"
    if end.truncated:
        return "too much output"
    if end.exit == 0:
        return None
    if b"MemoryError" in end.errors or (end.exit == _ABORTED and b"std::bad_alloc" in end.errors):
        return "memory limit"
    return _KILLED_REASON if end.exit == _KILLED else "runtime error"
