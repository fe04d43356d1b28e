"""What hostile programs try is tried once more by cells of the python session, whose workers begin in two ways.

The sandboxes run commands in cells: what tests do with a program, a cell does.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from sandbox_support import SECRET, kernel_has_user_namespaces, skip_unless_required
from test_attacks import *  # noqa: F403 - the same tests, by cells
from test_attacks_on_the_guest import *  # noqa: F403
from test_escapes import *  # noqa: F403
from test_hidden_memory import *  # noqa: F403
from test_kernel_surface import *  # noqa: F403

from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import ExecResult, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox
from prorl_gym.sandbox.spawner.spawner_protocol import BackendName

del test_a_fresh_sandbox_is_empty  # noqa: F821 - a session has a directory of its own
pytestmark = [pytest.mark.slow, pytest.mark.product, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(
    scope="module",
    params=[
        ("userns", "forked"),
        ("userns", "started"),
        pytest.param(("apptainer", "forked"), marks=pytest.mark.apptainer),
    ],
    ids="-".join,
)
def beginning(request: pytest.FixtureRequest) -> tuple[BackendName, str]:
    if not kernel_has_user_namespaces():
        skip_unless_required("this kernel refuses user namespaces to ordinary users")
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(beginning: tuple[BackendName, str], scratch: Path) -> AsyncIterator["CellBackend"]:
    backend = NamespaceBackend(beginning[0], SandboxConfig(scratch=scratch))
    os.environ["PRORL_GYM_TEST_SECRET"] = SECRET
    is_forked = beginning[1] == "forked"
    if is_forked:
        assert await backend.prepare_python()
    yield CellBackend(backend, {} if is_forked else {"PYTHONUNBUFFERED": ""})
    await backend.close()
    del os.environ["PRORL_GYM_TEST_SECRET"]


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

    A program that comes while a cell runs is run as one; Python code waits for its turn as a cell.
    """

    def __init__(self, box: RunningSandbox) -> None:
        self._box = box
        self._cell = asyncio.Lock()

    async def exec(self, argv: Sequence[str], *, timeout: float, cwd: str | None = None, **named: Any) -> ExecResult:
        if list(argv[:2]) == PYTHON and len(argv) == 3 and not cwd and not named:
            code = f"{argv[2]}\nNone"  # or the value of a last expression is printed
        elif named or self._cell.locked():
            return await self._box.exec(argv, timeout=timeout, **named, **({"cwd": cwd} if cwd else {}))
        else:
            code = RUN.format(argv=list(argv), cwd=cwd)
        async with self._cell:
            session = await self._box.python()
            result = await session.run_cell(code, timeout=timeout)
            await session.close()
        output, _, note = result.output.rpartition("[python ended")
        ended = re.match(r" \(exit code (\d+)\)", note)
        stdout, _, stderr = (output if ended else result.output).partition("\x1e")
        exit_code = int(ended[1]) if ended else int(not result.ok)
        return ExecResult(
            exit_code, stdout.encode(), (stderr or stdout).encode(), result.timed_out, breach=result.breach
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._box, name)
