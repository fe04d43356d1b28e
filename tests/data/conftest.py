"""Real sandboxes for rows from source distributions: a backend for each test."""

import pytest_asyncio

from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.protocol import SandboxBackend
from tests.environments.conftest import real_backend


@pytest_asyncio.fixture
async def backend():
    found = await real_backend()
    yield found
    await found.close()


@pytest_asyncio.fixture
async def leases(backend: SandboxBackend):
    lent = SandboxLeases(backend)
    yield lent
    await lent.close()
