"""A real backend for the environments' tests: ``userns`` where the kernel allows it, otherwise plain processes.

One backend serves them all, as it does in a service, so the tests of this folder share one event loop. That hostile
programs run beside innocent ones is part of what is tested.
"""

import inspect
from pathlib import Path

import pytest
import pytest_asyncio

from prorl_gym.environments.protocol import Leases
from prorl_gym.errors import SandboxError
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.backend_selection import open_backend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxBackend
from prorl_gym.sandbox.service.local_backend import LocalBackend


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        ours = Path(__file__).parent in item.path.parents
        if ours and isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.function):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


async def real_backend() -> SandboxBackend:
    try:
        return await open_backend(SandboxConfig(backend="userns"))
    except SandboxError:
        return LocalBackend(allow_unsafe_local=True)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def backend():
    found = await real_backend()
    yield found
    await found.close()


@pytest_asyncio.fixture(loop_scope="session")
async def leases(backend: SandboxBackend):
    lent: Leases = SandboxLeases(backend)
    yield lent
    await lent.close()


@pytest.fixture
def isolated(backend: SandboxBackend) -> None:
    if backend.name == "local":
        pytest.skip("needs isolation: no user namespaces here")
