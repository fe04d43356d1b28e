"""A clean sandbox with the repository and a patch in it, before any hidden test."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.swe.placing import apply_patch
from prorl_gym.environments.swe.prepare import place
from prorl_gym.environments.swe.spec import sandbox_spec
from prorl_gym.environments.swe.task import SweTask
from prorl_gym.sandbox.protocol import Sandbox


@dataclass(frozen=True, slots=True)
class Ready:
    """A sandbox in which the hidden tests are still to be put in place."""

    sandbox: Sandbox
    way: str
    """How the patch was applied."""


class Unsolved(Exception):
    """The patch is worth nothing, before any test ran."""


@asynccontextmanager
async def repaired(
    task: SweTask, patch: bytes, leases: Leases, *, hidden: SweTask | None = None
) -> AsyncGenerator[Ready]:
    """Start a clean sandbox with the repository and the patch in it.

    Args:
        task: what is put in place.
        patch: the agent's; may be empty.
        leases: gives the sandbox.
        hidden: names the paths of hidden tests, when it is another than ``task``.

    Raises:
        Unsolved: the patch does not apply.
        SandboxError, TaskError: see ``grade``.
    """
    sandbox = await leases.clean(await sandbox_spec(task))
    try:
        await place(task, sandbox)
        yield Ready(sandbox, await _apply(hidden or task, patch, sandbox))
    finally:
        await sandbox.close()


async def _apply(task: SweTask, patch: bytes, sandbox: Sandbox) -> str:
    if not patch.strip():
        return ""
    applied = await apply_patch(sandbox, task, patch)
    if not applied.way:
        raise Unsolved(f"the patch does not apply: {applied.complaint}")
    return applied.way
