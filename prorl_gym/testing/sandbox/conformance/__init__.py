"""Rules that every sandbox obeys, as checks that any backend's tests can run.

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
from inspect import iscoroutinefunction
from types import ModuleType

from prorl_gym.sandbox.protocol import Sandbox, SandboxLimits, SandboxSpec
from prorl_gym.testing.sandbox.conformance import execution_checks, shell_checks

Check = Callable[[Sandbox], Awaitable[None]]

CHECK_SPEC = SandboxSpec(limits=SandboxLimits(output=16 << 10))
"""Spec that the checks expect, image and workdir apart."""


def _checks_of(module: ModuleType) -> tuple[Check, ...]:
    """Return the public coroutine functions that a module defines, in its order."""
    own = [value for name, value in vars(module).items() if iscoroutinefunction(value) and not name.startswith("_")]
    return tuple(value for value in own if value.__module__ == module.__name__)


PYTHON_CHECKS = tuple(check for check in _checks_of(execution_checks) if check.__name__.startswith("python_"))
EXECUTION_CHECKS = tuple(check for check in _checks_of(execution_checks) if check not in PYTHON_CHECKS)
SHELL_CHECKS = _checks_of(shell_checks)
CHECKS = (*EXECUTION_CHECKS, *SHELL_CHECKS, *PYTHON_CHECKS)
