"""A sandbox of Gym's provider, seen through Gym's own API, as a ``Sandbox``: so that our conformance kit can ask it.

What Gym's contract has no words for stays out, and so do the checks that need it:

* ``shell()`` and ``python()``: Gym has terminals, no persistent shell with exit codes and no python tool.
* limits of one command and of one download.
* ``list_dir``: Gym's file calls are upload and download.

A program's arguments become one command line, its stdin a file.
"""

import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_gym.sandbox import AsyncSandbox, SandboxStatus

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.protocol import ExecResult, SandboxSpec


class ProviderBox:
    def __init__(self, sandbox: AsyncSandbox, spec: SandboxSpec) -> None:
        self._sandbox = sandbox
        self.id = "through Gym"
        self.spec = spec

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        limits: object = None,
    ) -> ExecResult:
        assert limits is None
        command = shlex.join(argv)
        if stdin:
            await self.write_file("/tmp/stdin", stdin)
            command += " < /tmp/stdin"
        try:
            result = await self._sandbox.exec(command, timeout_s=timeout, cwd=cwd, env=dict(env) if env else None)
        except RuntimeError as error:  # Gym's word for a sandbox that was stopped
            raise SandboxError(FailureKind.SANDBOX_LOST, str(error)) from None
        if result.error_type == "sandbox":
            raise SandboxError(FailureKind.SANDBOX_LOST, result.stderr or "")
        timed_out = result.error_type == "timeout"
        stdout, stderr = (result.stdout or "").encode(), (result.stderr or "").encode()
        truncated = b"bytes left out" in stdout
        return ExecResult(137 if timed_out else result.return_code, stdout, stderr, timed_out, truncated)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            await self._sandbox.upload(file.name, path)

    async def read_file(self, path: str, *, limit: int = 16 << 20) -> bytes:
        with tempfile.NamedTemporaryFile() as file:
            await self._sandbox.download(path, file.name)
            return file.read()

    async def is_alive(self) -> bool:
        return await self._sandbox.status() is SandboxStatus.RUNNING

    async def close(self) -> None:
        await self._sandbox.stop()

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"Gym's contract has no {name}")
