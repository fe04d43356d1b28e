"""The conformance kit on the real backends."""

import pytest
from sandbox_support import run_check

from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.testing.sandbox.conformance import CHECKS, Check

pytestmark = pytest.mark.asyncio(loop_scope="module")


def _cases() -> list[object]:
    """Every check on `userns` in the default suite; Apptainer is the same code over another root."""
    default, product = [pytest.mark.kit, pytest.mark.default], [pytest.mark.apptainer, pytest.mark.product]
    return [
        *(pytest.param("userns", check, id=f"userns-{check.__name__}", marks=default) for check in CHECKS),
        *(pytest.param("apptainer", check, id=f"apptainer-{check.__name__}", marks=product) for check in CHECKS),
    ]


@pytest.mark.parametrize(("backend_name", "check"), _cases(), indirect=["backend_name"], scope="module")
async def test_conformance(check: Check, backend: NamespaceBackend) -> None:
    await run_check(check, backend)
