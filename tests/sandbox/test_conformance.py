"""The conformance kit on the real backends."""

import pytest

from prorl_gym.sandbox.backend import NamespaceBackend
from prorl_gym.sandbox.conformance import CHECKS, SPEC, Check

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_conformance(check: Check, backend: NamespaceBackend) -> None:
    sandbox = await backend.start(SPEC)
    try:
        await check(sandbox)
    finally:
        await sandbox.close()
