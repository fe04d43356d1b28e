"""Sandboxes whose commands are cells of their python session: what tests do with a program, a cell does."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from prorl_gym.sandbox.protocol import ExecResult, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox

PYTHON = ["/usr/bin/python3", "-c"]
RUN = """
import os as _os, subprocess as _subprocess, sys as _sys
_done = _subprocess.run({argv!r}, cwd={cwd!r}, stdin=_subprocess.DEVNULL, capture_output=True)
_os.write(1, _done.stdout + b"\\x1e" + _done.stderr)
_os._exit(_done.returncode if _done.returncode >= 0 else 128 - _done.returncode)
"""


class CellBackend:
    """A backend whose sandboxes run commands in cells.

    Args:
        env: added to each sandbox's; a variable that interpreters read has the worker start afresh.
    """

    def __init__(self, backend: NamespaceBackend, env: dict[str, str]) -> None:
        self._backend = backend
        self._env = env

    async def start_sandbox(self, spec: SandboxSpec) -> "CellSandbox":
        return CellSandbox(await self._backend.start_sandbox(replace(spec, env={**spec.env, **self._env})))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class CellSandbox:
    """A sandbox: each command is the one cell of a worker of its own, of which nothing is left afterwards.

    What is run beside a cell is a program.
    """

    def __init__(self, box: RunningSandbox) -> None:
        self._box = box
        self._is_busy = False

    async def exec(self, argv: Sequence[str], *, timeout: float, cwd: str | None = None, **named: Any) -> ExecResult:
        if list(argv[:2]) == PYTHON and len(argv) == 3 and not cwd and not named:
            code = f"{argv[2]}\nNone"  # or the value of a last expression is printed
        elif named or self._is_busy:
            return await self._box.exec(argv, timeout=timeout, **named, **({"cwd": cwd} if cwd else {}))
        else:
            code = RUN.format(argv=list(argv), cwd=cwd)
        self._is_busy = True
        try:
            session = await self._box.python()
            result = await session.run_cell(code, timeout=timeout)
            await session.close()
        finally:
            self._is_busy = False
        output, _, note = result.output.rpartition("[python ended")
        ended = re.match(r" \(exit code (\d+)\)", note)
        stdout, _, stderr = (output if ended else result.output).partition("\x1e")
        exit_code = int(ended[1]) if ended else int(not result.ok)
        return ExecResult(
            exit_code, stdout.encode(), (stderr or stdout).encode(), result.timed_out, breach=result.breach
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._box, name)
