"""What every sandbox must do, as checks that any backend's tests can run.

Each runs on a fresh sandbox::

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_conformance(check, backend):
        sandbox = await backend.start_sandbox(CHECK_SPEC)
        try:
            await check(sandbox)
        finally:
            await sandbox.close()

A check raises ``AssertionError``. They need bash, coreutils, grep and python3 in the image. ``CHECK_SPEC`` keeps them
quick.
"""

from collections.abc import Awaitable, Callable

from prorl_gym.sandbox.protocol import Sandbox, SandboxLimits, SandboxSpec
from prorl_gym.testing.sandbox.conformance.execution_checks import EXECUTION_CHECKS
from prorl_gym.testing.sandbox.conformance.filesystem_checks import FILE_CHECKS
from prorl_gym.testing.sandbox.conformance.interaction_checks import INTERACTION_CHECKS
from prorl_gym.testing.sandbox.conformance.python_checks import PYTHON_CHECKS
from prorl_gym.testing.sandbox.conformance.shell_checks import SHELL_CHECKS

Check = Callable[[Sandbox], Awaitable[None]]

CHECK_SPEC = SandboxSpec(limits=SandboxLimits(output=16 << 10))
"""What the checks expect to be started with, image and workdir apart."""

CHECKS: tuple[Check, ...] = (*EXECUTION_CHECKS, *SHELL_CHECKS, *INTERACTION_CHECKS, *FILE_CHECKS, *PYTHON_CHECKS)
"""All of them."""

__all__ = [
    "CHECKS",
    "CHECK_SPEC",
    "EXECUTION_CHECKS",
    "FILE_CHECKS",
    "INTERACTION_CHECKS",
    "PYTHON_CHECKS",
    "SHELL_CHECKS",
    "Check",
]
