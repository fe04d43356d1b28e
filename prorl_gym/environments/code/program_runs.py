"""Running a program on all of its tests: compiling C++, then batches of tests in one sandbox each.

A C++ program is compiled in a sandbox of its own that never holds a test.

One driver (``guest_driver``) per sandbox runs the program on the tests of a batch, each in a process of its own. See
there for what keeps the program away from it. A batch pauses after a moment, so that a program whose output is wrong
does not spend hours on the remaining tests: only the service has the expected outputs.

A test during which the driver ended, or the sandbox was lost, runs again alone in a fresh sandbox. If the driver ends
there, too, the program ended it, and this test and those after it fail; if the sandbox is lost again, the program is
not to blame, and there is no verdict.

The same holds for a program that SIGKILL or SIGTERM ended within its limits: the host may have sent it (out of memory),
or the program itself. The test runs again alone, and a second kill counts against the program, as does one of the
driver, unless the sandbox has no record of one sent inside it. Then there is no verdict either.
"""

import json
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from prorl_gym.environments.code.code_row import CodeRow, FunctionTests, StdioTests
from prorl_gym.environments.killed_program import raise_if_killed, unexplained_kill_error, was_killed
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.row_format import StrictModel
from prorl_gym.errors import Evidence, FailureKind, GraderError, SandboxError, TaskError
from prorl_gym.sandbox.protocol import ExecResult, Sandbox, SandboxSpec

_GUEST_DRIVER = files("prorl_gym.environments.code").joinpath("guest_driver.py").read_text(encoding="utf-8")
_CALL_FUNCTION = files("prorl_gym.environments.code").joinpath("call_function.py").read_text(encoding="utf-8")

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
_PROGRAM = f"{SANDBOX.workdir}/solution.py"
_BINARY = f"{SANDBOX.workdir}/solution"

_STARRED = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
)
_LIVECODEBENCH_PRELUDE = (
    "".join(f"from {name} import *\n" for name in (*_STARRED, "builtins", "typing"))
    + f"import {', '.join(_STARRED)}\nsys.setrecursionlimit(50000)\n"
    + "if hasattr(sys, 'set_int_max_str_digits'): sys.set_int_max_str_digits(50000)\n"
)
_LIVECODEBENCH_PROGRAM = f"""
__file__ = {_PROGRAM!r}
try:
    exec(compile(open(__file__, "rb").read(), __file__, "exec"))
except SystemExit:  # with any code
    pass
"""

BATCH_BYTES = 32 << 20
"""Input and room for output of one batch, together: bounds the service's memory for one grading."""

WALL_FACTOR = 4.0
WALL_EXTRA = 2.0
"""Wall clock of a test: the CPU limit times the factor, plus this many seconds, so that a busy machine does not turn
right programs into wrong ones. CPU time is what a program is measured by."""

EXTRA_OUTPUT_BYTES = 64 << 10
"""Bytes that a program may write on top of a multiple of what is expected."""

_COMPILE = ("g++", "-O2", "-std=gnu++17", "-w", "-o", "solution", "solution.cpp")
_COMPILE_SECONDS = 60
_COMPILE_MEMORY = 2 << 30
_BINARY_SIZE = 64 << 20

_MAX_TRIVIAL_SHARE = 0.25
"""Share of these seconds. If the simplest program compiles within it, the program is slow and not the machine."""

_TRIVIAL = "#include <bits/stdc++.h>\nint main() { std::cout << 1; }\n"


@dataclass(frozen=True, slots=True)
class Launch:
    """How a program is run: the same for all of its tests."""

    path: str
    """Where it is written to."""
    content: bytes
    mode: int
    argv: tuple[str, ...]
    time_limit: float
    memory: int
    """Bytes that each process may touch."""
    result_pipe: bool = False
    """Output is read from descriptor 3; what the program prints is dropped."""
    stack: int = 8 << 20

    @property
    def cpu_seconds(self) -> int:
        """CPU time of each test, with all processes that it starts."""
        return math.ceil(self.time_limit)

    @property
    def wall_seconds(self) -> float:
        return self.time_limit * WALL_FACTOR + WALL_EXTRA


@dataclass(frozen=True, slots=True)
class TestInput:
    __test__ = False

    stdin: bytes
    output_limit: int
    """Bytes of output that are kept; with more it fails."""


def python_launch(task: CodeRow, program: str, *, function: bool) -> Launch:
    """Return the launch of a Python program, as a whole or for one function of it."""
    argv: tuple[str, ...] = (_PROGRAM,)
    if function:
        # Starter code in LeetCode's form has `List[int]` without an import.
        is_typed = task.starter_code or (isinstance(task.tests, FunctionTests) and "." in task.tests.entry)
        plain = "from typing import *" if is_typed else ""
        argv = ("-c", _CALL_FUNCTION, task.runner, plain if task.runner == "plain" else _LIVECODEBENCH_PRELUDE)
    elif task.runner == "livecodebench":
        argv = ("-c", _LIVECODEBENCH_PRELUDE + _LIVECODEBENCH_PROGRAM)
    limits = (task.time_limit, task.memory_limit)
    content = program.encode(errors="replace")
    return Launch(_PROGRAM, content, 0o444, ("python3", "-s", *argv), *limits, result_pipe=function)


def binary_launch(task: CodeRow, binary: bytes) -> Launch:
    """Return the launch of a compiled program. Its stack may take half of its memory: deep recursion is usual there."""
    return Launch(_BINARY, binary, 0o555, (_BINARY,), task.time_limit, task.memory_limit, stack=task.memory_limit // 2)


def test_inputs(tests: StdioTests | FunctionTests) -> list[TestInput]:
    if isinstance(tests, StdioTests):
        inputs = [(case.stdin, 2 * len(case.stdout.encode())) for case in tests.cases]
    else:
        fixed = {"program": _PROGRAM, **tests.model_dump(include={"entry", "result", "args_as", "result_as"})}
        inputs = [(json.dumps(fixed | {"args": case.args}), 4 * len(json.dumps(case.expected))) for case in tests.cases]
    return [TestInput(text.encode(), EXTRA_OUTPUT_BYTES + room) for text, room in inputs]


class CompileError(Exception):
    """The program does not compile within bounds; the message is the failure in a few words."""


async def compile_cpp(program: str, leases: Leases) -> bytes:
    """Return the executable.

    Raises ``CompileError``: the program's own fault; ``TaskError``: the image has no compiler that works;
    ``SandboxError``: the sandbox could not be started or was lost, or is too slow.
    """
    built = await _build(program, leases)
    # The part of the compiler that does the work reports a kill in words.
    if isinstance(built, ExecResult) and (
        was_killed(built) or (built.breach is None and b"Killed signal terminated program" in built.stderr)
    ):
        built = await _build(program, leases)  # killed by the host, or because the program needs too much?
    if isinstance(built, bytes):
        return built
    await _check_compiler(built, leases)
    raise CompileError("compile time limit" if built.timed_out else "compile error")


async def _build(program: str, leases: Leases) -> bytes | ExecResult:
    """Return the executable, or the result of a compiler that failed."""
    sandbox = await leases.start_clean_sandbox(SANDBOX)
    try:
        result = await _compile(sandbox, program)
        if result.exit_code != 0:
            return result
        try:
            return await sandbox.read_file(_BINARY, limit=_BINARY_SIZE)
        except OSError:  # too large, or a link in its place
            raise CompileError("compile error") from None
    finally:
        await sandbox.close()


async def _compile(sandbox: Sandbox, program: str) -> ExecResult:
    await sandbox.write_file(f"{SANDBOX.workdir}/solution.cpp", program.encode(errors="replace"))
    limits = replace(
        sandbox.spec.limits, memory=_COMPILE_MEMORY, cpu_seconds=_COMPILE_SECONDS, file_size=2 * _BINARY_SIZE
    )
    return await sandbox.exec(_COMPILE, timeout=_COMPILE_SECONDS, limits=limits)


async def _check_compiler(result: ExecResult, leases: Leases) -> None:
    """Blame the program only when the compiler can do the simplest one, and in a fraction of the time."""
    timed_out = result.timed_out
    if result.exit_code not in (126, 127):
        sandbox = await leases.start_clean_sandbox(SANDBOX)
        try:
            result = raise_if_killed(await _compile(sandbox, _TRIVIAL), "g++")
        finally:
            await sandbox.close()
    if result.timed_out or (timed_out and result.seconds > _COMPILE_SECONDS * _MAX_TRIVIAL_SHARE):
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            f"g++ is slow in the grading sandbox: {result.seconds:.0f} s for the simplest program.",
            "Look at the load of the node.",
        )
    if result.exit_code != 0:
        raise TaskError(
            FailureKind.IMAGE_BROKEN,
            f"g++ does not work in the grading sandbox: exit code {result.exit_code}.",
            f"Rows of language 'cpp' need an image with g++ and python3 instead of '{SANDBOX.image or 'the default'}'.",
        )


class ProgramResult(StrictModel):
    """Result of one test, as the driver reports it."""

    exit: int
    """Its exit code, or minus the number of the signal that ended it."""
    timed_out: bool
    truncated: bool
    seconds: float
    cpu: float
    clean: bool
    out: int
    err: int
    output: bytes = b""
    errors: bytes = b""
    over_memory: bool = False
    stopped_driver: bool = False
    """It ended or stopped the driver, twice."""


_OUT_OF_TIME = ProgramResult(exit=0, timed_out=True, truncated=False, seconds=0, cpu=0, clean=True, out=0, err=0)


class _ReadyFrame(StrictModel):
    ready: Literal[True]


class _EndFrame(StrictModel):
    end: Literal["done", "paused", "stopped", "unclean", "broken"]
    error: str = ""


_Frame = _ReadyFrame | ProgramResult | _EndFrame
_FRAMES: TypeAdapter[_Frame] = TypeAdapter(_Frame)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The tests of a batch that ended, in order."""

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
    """Run a program on at least one test, in a clean sandbox that is not used again, for ``seconds`` at most.

    ``stop_at_crash`` skips the others after one that crashed, timed out or wrote too much. Raises ``GraderError``: the
    sandbox does not run the driver, or cannot start a process for the first test.
    """
    await sandbox.write_file(launch.path, launch.content, mode=launch.mode)
    limits = replace(
        sandbox.spec.limits,
        processes=_PROCESSES,
        output=2 * _FRAME_BYTES + sum(test.output_limit + _FRAME_BYTES for test in tests),
    )
    job = {
        "argv": launch.argv,
        "env": _PROGRAM_ENV,
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
    result = await sandbox.exec(
        ["python3", "-I", "-c", _GUEST_DRIVER],
        stdin=b"".join([json.dumps(job).encode() + b"\n", *(test.stdin for test in tests)]),
        timeout=START_SECONDS + BATCH_SECONDS + min(launch.wall_seconds, seconds),
        limits=limits,
    )
    return _parse_frames(result, sandbox.spec.image)


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
    return BatchResult(tuple(ends), interrupted, seconds, result.kill_evidence, was_killed(result))


def _next_frame(data: bytes) -> tuple[_Frame | None, bytes]:
    line, newline, rest = data.partition(b"\n")
    try:
        return (_FRAMES.validate_json(line), rest) if newline else (None, b"")
    except ValidationError:
        return None, rest


class BatchRunner:
    """Runs programs on tests, which may take ``seconds`` of wall clock all together."""

    def __init__(self, leases: Leases, seconds: float) -> None:
        self._leases = leases
        self._seconds = seconds

    async def run_tests(
        self, launch: Launch, tests: Sequence[TestInput], *, stop_at_crash: bool
    ) -> AsyncGenerator[list[ProgramResult]]:
        """Yield results of the tests, in order, some at a time; none after a crash with ``stop_at_crash``.

        Tests for which no time is left are reported as timed out. Raises ``SandboxError``: a sandbox could not be
        started, or was lost twice during the same test, or the program or its driver was killed twice and nothing in
        the sandbox did that; ``GraderError``: no test can be run there.
        """
        position, again, kills_itself = 0, False, False
        while position < len(tests):
            if self._seconds <= 0:
                yield [_OUT_OF_TIME for _ in tests[position:]]
                return
            portion = tests[position : position + 1] if again else _next_portion(tests, position)
            batch = await self._run_batch(launch, portion, again, stop_at_crash)
            ends = list(batch.results[: len(portion)])
            struck = batch.driver_killed or any(_was_killed(end, launch) for end in ends)
            if again and struck and batch.sigkill is not None:
                raise unexplained_kill_error("the program, or what runs its tests,", batch.sigkill)
            if batch.interrupted and not ends and again:
                # Every other test would cost as much time.
                stopped = {"stopped_driver": True, "timed_out": False, "seconds": batch.seconds}
                yield [_OUT_OF_TIME.model_copy(update=stopped) for _ in tests[position:]]
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


_XCPU, _TERMINATED, _KILLED, _ABORTED = -24, -15, -9, -6


def _was_killed(end: ProgramResult, launch: Launch) -> bool:
    """Whether SIGKILL or SIGTERM ended the program within its limits."""
    return crash_reason(end, launch.cpu_seconds) == "killed"


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
    if end.over_memory:
        return "memory limit"
    if end.exit == 0:
        return None
    if b"MemoryError" in end.errors or (end.exit == _ABORTED and b"std::bad_alloc" in end.errors):
        return "memory limit"
    return "killed" if end.exit in (_KILLED, _TERMINATED) else "runtime error"
