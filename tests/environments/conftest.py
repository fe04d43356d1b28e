"""A real backend for the environments' tests: ``userns`` where the kernel allows it, otherwise plain processes."""

import pytest

from prorl_gym.environments.protocol import Leases
from prorl_gym.errors import SandboxError
from prorl_gym.rollout.leases import SandboxLeases
from prorl_gym.sandbox.choose import open_backend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.local import LocalBackend
from prorl_gym.sandbox.protocol import SandboxBackend
from prorl_gym.settings import SERVICE_DEFAULTS, ResolvedSettings, resolve


async def real_backend() -> SandboxBackend:
    try:
        return await open_backend(SandboxConfig(backend="userns"))
    except SandboxError:
        return LocalBackend(allow_unsafe_local=True)


@pytest.fixture
async def backend():
    found = await real_backend()
    yield found
    await found.close()


@pytest.fixture
async def leases(backend: SandboxBackend):
    lent: Leases = SandboxLeases(backend)
    yield lent
    await lent.close()


@pytest.fixture
def settings() -> ResolvedSettings:
    return resolve(SERVICE_DEFAULTS)
