"""What hostile programs try is tried once more by cells of the python session, whose workers begin in two ways."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from cell_sandbox import CellBackend
from sandbox_support import SECRET, kernel_has_user_namespaces, skip_unless_required
from test_attacks import *  # noqa: F403 - the same tests, by cells
from test_attacks_on_the_guest import *  # noqa: F403
from test_escapes import *  # noqa: F403
from test_hidden_memory import *  # noqa: F403
from test_kernel_surface import *  # noqa: F403

from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.spawner.spawner_protocol import BackendName

del test_a_fresh_sandbox_is_empty  # noqa: F821 - a session has a directory of its own
pytestmark = [pytest.mark.slow, pytest.mark.product, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(
    scope="module",
    params=[
        ("userns", "forked"),
        ("userns", "started"),
        pytest.param(("apptainer", "forked"), marks=pytest.mark.apptainer),
    ],
    ids="-".join,
)
def beginning(request: pytest.FixtureRequest) -> tuple[BackendName, str]:
    if not kernel_has_user_namespaces():
        skip_unless_required("this kernel refuses user namespaces to ordinary users")
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(beginning: tuple[BackendName, str], scratch: Path) -> AsyncIterator[CellBackend]:
    backend = NamespaceBackend(beginning[0], SandboxConfig(scratch=scratch))
    os.environ["PRORL_GYM_TEST_SECRET"] = SECRET
    is_forked = beginning[1] == "forked"
    if is_forked:
        assert await backend.prepare_python()
    yield CellBackend(backend, {} if is_forked else {"PYTHONUNBUFFERED": ""})
    await backend.close()
    del os.environ["PRORL_GYM_TEST_SECRET"]
