"""How programs of a row are run on its tests: command lines, limits, inputs, and compiling C++.

A C++ program is compiled in a sandbox of its own that never holds a test.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from prorl_gym.environments.code.batch import SANDBOX, Launch, TestInput
from prorl_gym.environments.code.code_row import CodeRow, FunctionTests, StdioTests
from prorl_gym.environments.killed_program import raise_if_killed, was_killed
from prorl_gym.environments.protocol import Leases
from prorl_gym.errors import FailureKind, SandboxError, TaskError
from prorl_gym.sandbox.protocol import ExecResult, Sandbox

_CALL_FUNCTION = files("prorl_gym.environments.code").joinpath("call_function.py").read_text(encoding="utf-8")

_PROGRAM = f"{SANDBOX.workdir}/solution.py"
_BINARY = f"{SANDBOX.workdir}/solution"

WALL_FACTOR = 4.0
WALL_EXTRA = 2.0
"""Wall clock of a test: the CPU limit times the factor, plus this many seconds, so that a busy machine does not turn
right programs into wrong ones. CPU time is what a program is measured by."""

EXTRA_OUTPUT_BYTES = 64 << 10
"""Bytes that a program may write on top of a multiple of what is expected."""


def python_launch(task: CodeRow, program: str, *, function: bool) -> Launch:
    """Return how a Python program is run, as a whole or for one function of it."""
    argv = ("python3", "-s", "-c", _CALL_FUNCTION) if function else ("python3", "-s", _PROGRAM)
    return _launch(task, _PROGRAM, program.encode(errors="replace"), 0o444, argv, result_pipe=function)


def binary_launch(task: CodeRow, binary: bytes) -> Launch:
    """Return how a compiled program is run. Its stack may take half of its memory: deep recursion is usual there."""
    return _launch(task, _BINARY, binary, 0o555, (_BINARY,), stack=task.memory_limit // 2)


def _launch(task: CodeRow, path: str, content: bytes, mode: int, argv: tuple[str, ...], **more: Any) -> Launch:
    return Launch(
        path,
        content,
        mode,
        argv,
        cpu_seconds=math.ceil(task.time_limit),
        memory=task.memory_limit,
        wall_seconds=task.time_limit * WALL_FACTOR + WALL_EXTRA,
        **more,
    )


def test_inputs(tests: StdioTests | FunctionTests) -> list[TestInput]:
    """Return what the tests give to the program."""
    if isinstance(tests, StdioTests):
        return [
            TestInput(case.stdin.encode(), EXTRA_OUTPUT_BYTES + 2 * len(case.stdout.encode())) for case in tests.cases
        ]
    return [
        function_call_input(
            tests.entry,
            case.args,
            EXTRA_OUTPUT_BYTES + 4 * len(json.dumps(case.expected)),
            tests.result,
            tests.args_as,
            tests.result_as,
        )
        for case in tests.cases
    ]


def function_call_input(
    entry: str,
    args: Sequence[Any],
    output_limit: int,
    result: str = "return",
    args_as: Sequence[str] = (),
    result_as: str = "value",
) -> TestInput:
    """Return the request that ``call_function`` serves."""
    request = {
        "program": _PROGRAM,
        "entry": entry,
        "args": args,
        "result": result,
        "args_as": list(args_as),
        "result_as": result_as,
    }
    return TestInput(json.dumps(request).encode(), output_limit)


_COMPILE = ("g++", "-O2", "-std=gnu++17", "-w", "-o", "solution", "solution.cpp")
_COMPILE_SECONDS = 60
_COMPILE_MEMORY = 2 << 30
_BINARY_SIZE = 64 << 20

_MAX_TRIVIAL_SHARE = 0.25
"""Share of these seconds. If the simplest program compiles within it, the program is slow and not the machine."""

_TRIVIAL = "#include <bits/stdc++.h>\nint main() { std::cout << 1; }\n"


class CompileError(Exception):
    """The program does not compile within bounds; the message is the failure in a few words."""


async def compile_cpp(program: str, leases: Leases) -> bytes:
    """Return the executable.

    Raises:
        CompileError: the program's own fault.
        TaskError: the image has no compiler that works.
        SandboxError: the sandbox could not be started or was lost.
    """
    built = await _build(program, leases)
    if isinstance(built, ExecResult) and _compiler_was_killed(built):
        built = await _build(program, leases)  # by the host, or because the program needs too much?
    if isinstance(built, bytes):
        return built
    await _check_compiler(built, leases)
    raise CompileError("compile time limit" if built.timed_out else "compile error")


async def _build(program: str, leases: Leases) -> bytes | ExecResult:
    """Return the executable, or how the compiler failed."""
    sandbox = await leases.start_clean_sandbox(SANDBOX)
    try:
        result = await _compile(sandbox, program)
        return await _read(sandbox) if result.exit_code == 0 else result
    finally:
        await sandbox.close()


def _compiler_was_killed(result: ExecResult) -> bool:
    """Whether the compiler was killed, or the part of it that does the work, which it reports in words."""
    return was_killed(result) or (result.breach is None and b"Killed signal terminated program" in result.stderr)


async def _read(sandbox: Sandbox) -> bytes:
    try:
        return await sandbox.read_file(f"{SANDBOX.workdir}/solution", limit=_BINARY_SIZE)
    except OSError:  # too large, or a link in its place
        raise CompileError("compile error") from None


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
