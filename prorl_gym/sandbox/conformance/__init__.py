"""What every sandbox must do, as checks that any backend's tests can run.

Each runs on a fresh sandbox::

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_conformance(check, backend):
        sandbox = await backend.start(SPEC)
        try:
            await check(sandbox)
        finally:
            await sandbox.close()

A check raises ``AssertionError``. They need bash, coreutils, grep and python3 in the image. ``SPEC`` keeps them quick.
"""

from collections.abc import Awaitable, Callable

from prorl_gym.sandbox.conformance.execution import EXECUTION
from prorl_gym.sandbox.conformance.filesystem import FILES
from prorl_gym.sandbox.conformance.interaction import INTERACTION
from prorl_gym.sandbox.conformance.python import PYTHON
from prorl_gym.sandbox.conformance.shell import SHELL
from prorl_gym.sandbox.protocol import Sandbox, SandboxLimits, SandboxSpec

Check = Callable[[Sandbox], Awaitable[None]]

SPEC = SandboxSpec(limits=SandboxLimits(output=16 << 10))
"""What the checks expect to be started with, image and workdir apart."""

CHECKS: tuple[Check, ...] = (*EXECUTION, *SHELL, *INTERACTION, *FILES, *PYTHON)
"""All of them."""

__all__ = ["CHECKS", "EXECUTION", "FILES", "INTERACTION", "PYTHON", "SHELL", "SPEC", "Check"]
