"""Backends for the sandbox tests: each test that asks for ``backend`` runs on every real one."""

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from sandbox_support import (
    DEBIAN_IMAGE,
    SECRET,
    closing,
    give_to_sandboxes,
    kernel_has_user_namespaces,
    make_tiny_image,
    skip_unless_required,
)

from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxLimits, SandboxSpec
from prorl_gym.sandbox.service.guest_channel import GuestTimeouts
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox
from prorl_gym.sandbox.spawner.spawner_protocol import BackendName

APPTAINER = pytest.param("apptainer", marks=[pytest.mark.apptainer, pytest.mark.slow, pytest.mark.product])


@pytest.fixture(scope="module", params=["userns", APPTAINER])
def backend_name(request: pytest.FixtureRequest) -> BackendName:
    if not kernel_has_user_namespaces():
        skip_unless_required("this kernel refuses user namespaces to ordinary users")
    return request.param


@pytest.fixture(scope="session")
def ground() -> Iterator[Path]:
    """A directory on a local disk that every uid may traverse."""
    path = Path(tempfile.mkdtemp(prefix="prorl-gym-test-", dir="/var/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def tiny_image(ground: Path) -> Path:
    return make_tiny_image(ground / "tiny")


@pytest.fixture(scope="module")
def debian_image() -> str:
    """A real distribution's image."""
    if not DEBIAN_IMAGE.is_dir():
        reason = f"normal outside CI: there is no {DEBIAN_IMAGE}; to have it, run .ci/base-image (needs a network)"
        if "apptainer" in os.environ.get("PRORL_GYM_REQUIRE", ""):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return str(DEBIAN_IMAGE)


@pytest.fixture(scope="session")
def scratch(ground: Path) -> Path:
    path = ground / "scratch"
    path.mkdir(mode=0o700)
    give_to_sandboxes(path)
    path.chmod(0o700)
    return path


@pytest.fixture
def own_scratch(ground: Path) -> Path:
    """A scratch directory of this test alone, on which it may leave things lying."""
    path = Path(tempfile.mkdtemp(dir=ground))
    give_to_sandboxes(path)
    path.chmod(0o700)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(backend_name: BackendName, scratch: Path) -> AsyncIterator[NamespaceBackend]:
    os.environ["PRORL_GYM_TEST_SECRET"] = SECRET
    async with closing(NamespaceBackend(backend_name, SandboxConfig(scratch=scratch))) as backend:
        yield backend
    del os.environ["PRORL_GYM_TEST_SECRET"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def impatient_backend(backend_name: BackendName, scratch: Path) -> AsyncIterator[NamespaceBackend]:
    """Waits a second at most for file operations, and less for python."""
    timeouts = GuestTimeouts(file_stall=1.0, python_start=0.4)
    async with closing(NamespaceBackend(backend_name, SandboxConfig(scratch=scratch), timeouts=timeouts)) as backend:
        yield backend


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(backend: NamespaceBackend) -> AsyncIterator[RunningSandbox]:
    """One host-``/usr`` sandbox for all tests of a module that only look."""
    async with closing(await backend.start_sandbox(SandboxSpec())) as box:
        yield box


@pytest_asyncio.fixture(loop_scope="module")
async def fresh(backend: NamespaceBackend) -> AsyncIterator[RunningSandbox]:
    """A sandbox of this test alone, which it may ruin."""
    async with closing(await backend.start_sandbox(SandboxSpec())) as box:
        yield box


@pytest_asyncio.fixture(loop_scope="module")
async def own_backend(backend_name: BackendName, own_scratch: Path) -> AsyncIterator[NamespaceBackend]:
    """A backend of this test alone, whose spawner it may kill."""
    async with closing(NamespaceBackend(backend_name, SandboxConfig(scratch=own_scratch))) as backend:
        yield backend


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small_box(backend: NamespaceBackend) -> AsyncIterator[RunningSandbox]:
    """A sandbox with little room."""
    async with closing(
        await backend.start_sandbox(SandboxSpec(limits=SandboxLimits(root_size=8 << 20, shm_size=1 << 20)))
    ) as box:
        yield box
