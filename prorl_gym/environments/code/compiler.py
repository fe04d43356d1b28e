"""Compiling a C++ program, in a sandbox of its own that never sees a test."""

from dataclasses import replace

from prorl_gym.environments.code.runs import SANDBOX
from prorl_gym.environments.killed import must_have_ended, was_killed
from prorl_gym.environments.protocol import Leases
from prorl_gym.errors import FailureKind, SandboxError, TaskError
from prorl_gym.sandbox.protocol import ExecResult, Sandbox

COMMAND = ("g++", "-O2", "-std=gnu++17", "-w", "-o", "solution", "solution.cpp")
SECONDS = 60
MEMORY = 2 << 30
BINARY_SIZE = 64 << 20

_USUAL_SHARE = 0.25
"""Of these seconds: with a compiler that needs no more for the simplest program, it is the program that takes long."""

_TRIVIAL = "#include <bits/stdc++.h>\nint main() { std::cout << 1; }\n"


class CompileError(Exception):
    """The program does not compile within bounds; the message says how it failed, in a few words."""


async def compile_cpp(program: str, leases: Leases) -> bytes:
    """Return the executable.

    Raises:
        CompileError: the program's own fault.
        TaskError: the image has no compiler that works.
        SandboxError: the sandbox could not be started or was lost.
    """
    built = await _build(program, leases)
    if isinstance(built, ExecResult) and _compiler_was_killed(built):
        built = await _build(program, leases)  # by the host, or is it the program that takes so much?
    if isinstance(built, bytes):
        return built
    await _check_compiler(built, leases)
    raise CompileError("compile time limit" if built.timed_out else "compile error")


async def _build(program: str, leases: Leases) -> bytes | ExecResult:
    """Return the executable, or how the compiler failed."""
    sandbox = await leases.clean(SANDBOX)
    try:
        result = await _compile(sandbox, program)
        return await _read(sandbox) if result.exit_code == 0 else result
    finally:
        await sandbox.close()


def _compiler_was_killed(result: ExecResult) -> bool:
    """Whether the compiler was, or the part of it that does the work, which it reports in words."""
    return was_killed(result) or (result.breach is None and b"Killed signal terminated program" in result.stderr)


async def _read(sandbox: Sandbox) -> bytes:
    try:
        return await sandbox.read_file(f"{SANDBOX.workdir}/solution", limit=BINARY_SIZE)
    except OSError:  # too large, or a link in its place
        raise CompileError("compile error") from None


async def _compile(sandbox: Sandbox, program: str) -> ExecResult:
    await sandbox.write_file(f"{SANDBOX.workdir}/solution.cpp", program.encode(errors="replace"))
    limits = replace(sandbox.spec.limits, memory=MEMORY, cpu_seconds=SECONDS, file_size=2 * BINARY_SIZE)
    return await sandbox.exec(COMMAND, timeout=SECONDS, limits=limits)


async def _check_compiler(result: ExecResult, leases: Leases) -> None:
    """Blame the program only when the compiler can do the simplest one, and in a fraction of the time."""
    timed_out = result.timed_out
    if result.exit_code not in (126, 127):
        sandbox = await leases.clean(SANDBOX)
        try:
            result = must_have_ended(await _compile(sandbox, _TRIVIAL), "g++")
        finally:
            await sandbox.close()
    if result.timed_out or (timed_out and result.seconds > SECONDS * _USUAL_SHARE):
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
