"""The local backend runs the whole conformance kit: everything above the namespaces is tested through it."""

import os
from collections.abc import AsyncIterator

import pytest
from sandbox_support import closing, fails_as

from prorl_gym.errors import FailureKind
from prorl_gym.sandbox.protocol import Mount, SandboxSpec
from prorl_gym.sandbox.service.local_backend import LocalBackend
from prorl_gym.testing.sandbox.conformance import CHECK_SPEC, CHECKS, Check


@pytest.fixture
async def backend() -> AsyncIterator[LocalBackend]:
    async with closing(LocalBackend(allow_unsafe_local=True)) as backend:
        yield backend


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.product
async def test_conformance(check: Check, backend: LocalBackend) -> None:
    await check(await backend.start_sandbox(CHECK_SPEC))


async def test_probe_starts_one(backend: LocalBackend) -> None:
    probe = await backend.probe()
    assert probe.ok and probe.backend == "local"


def test_refused_unless_asked_for() -> None:
    with fails_as(FailureKind.SANDBOX_UNAVAILABLE) as refused:
        LocalBackend()
    assert str(refused.value).count("\n") == 1


@pytest.mark.parametrize("spec", [SandboxSpec(image="/some/image"), SandboxSpec(mounts=(Mount("/a", "/b"),))])
async def test_images_and_mounts_are_refused(spec: SandboxSpec, backend: LocalBackend) -> None:
    with fails_as(FailureKind.SANDBOX_UNAVAILABLE):
        await backend.start_sandbox(spec)


async def test_temporary_files_go_with_the_sandbox(backend: LocalBackend) -> None:
    box = await backend.start_sandbox(CHECK_SPEC)
    made = (await box.exec(["mktemp"], timeout=10)).stdout.decode().strip()
    assert (await box.exec(["test", "-f", made], timeout=10)).exit_code == 0
    await box.close()
    assert not os.path.lexists(made)  # noqa: ASYNC240
