"""The warm pool: what it holds, what it hands out, and that nothing of it is left."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from sandbox_support import closing, wait_until_dead

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import Sandbox, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.warm_pool import MEMORY_PER_SANDBOX, WarmPool, with_warm_pool
from prorl_gym.sandbox.spawner.scratch import read_state
from prorl_gym.testing.sandbox.conformance import CHECK_SPEC, CHECKS, Check
from prorl_gym.testing.sandbox.fake_sandbox import FakeBackend, FakeSandbox, SandboxScript

A, B = SandboxSpec(), SandboxSpec(workdir="/elsewhere")


def pool_of(backend: FakeBackend, per_spec: int = 2, in_all: int = 8, idle_seconds: float = 900.0) -> WarmPool:
    return WarmPool(backend, per_spec=per_spec, memory=in_all * MEMORY_PER_SANDBOX, idle_seconds=idle_seconds)


def open_of(backend: FakeBackend) -> list[FakeSandbox]:
    return [box for box in backend.started if not box.closed]


@pytest.fixture
def fake() -> FakeBackend:
    return FakeBackend()


async def test_the_second_start_is_warm(fake: FakeBackend) -> None:
    async with closing(pool_of(fake)) as pool:
        first = await pool.start_sandbox(A)
        await pool.wait_idle()
        assert (pool.misses, pool.hits, pool.ready_count) == (1, 0, 1)
        assert await pool.start_sandbox(A) is not first
        assert (pool.misses, pool.hits) == (1, 1)


async def test_equal_specs_share_a_shelf_and_others_do_not(fake: FakeBackend) -> None:
    async with closing(pool_of(fake)) as pool:
        pool.prewarm(SandboxSpec(env={"X": "1", "Y": "2"}))
        await pool.wait_idle()
        await pool.start_sandbox(SandboxSpec(env={"Y": "2", "X": "1"}))
        assert pool.hits == 1
        await pool.start_sandbox(SandboxSpec(env={"X": "2", "Y": "2"}))
        assert pool.hits == 1


async def test_what_was_used_does_not_come_back(fake: FakeBackend) -> None:
    async with closing(pool_of(fake)) as pool:
        seen: set[str] = set()
        for _ in range(6):
            box = await pool.start_sandbox(A)
            assert box.id not in seen
            seen.add(box.id)
            await box.close()
            await pool.wait_idle()


async def test_a_dead_one_is_not_handed_out(fake: FakeBackend) -> None:
    async with closing(pool_of(fake)) as pool:
        pool.prewarm(A, 2)
        await pool.wait_idle()
        for box in fake.started:
            box.mark_lost()
        alive = await pool.start_sandbox(A)
        assert await alive.is_alive() and pool.misses == 1
        await pool.wait_idle()
        assert all(box.closed for box in fake.started[:2])


async def test_a_burst_is_remembered_within_the_bound(fake: FakeBackend) -> None:
    async with closing(pool_of(fake, per_spec=3)) as pool:
        await asyncio.gather(*(pool.start_sandbox(A) for _ in range(10)))
        await pool.wait_idle()
        assert pool.ready_count == 3


async def test_memory_bounds_all_specs_together(fake: FakeBackend) -> None:
    async with closing(pool_of(fake, per_spec=4, in_all=5)) as pool:
        pool.prewarm(A, 4)
        await pool.wait_idle()
        pool.prewarm(B, 4)
        await pool.wait_idle()
        open_specs = [box.spec for box in open_of(fake)]
        assert (open_specs.count(A), open_specs.count(B)) == (1, 4)  # what was asked for last has displaced the rest


async def test_unrequested_sandboxes_are_evicted(fake: FakeBackend) -> None:
    async with closing(pool_of(fake, idle_seconds=0.05)) as pool:
        pool.prewarm(A, 2)
        await pool.wait_idle()
        assert pool.ready_count == 2
        async with asyncio.timeout(5):
            while open_of(fake):  # noqa: ASYNC110 - a fake sandbox raises no event when it is closed
                await asyncio.sleep(0.01)
        assert pool.ready_count == 0


async def test_a_spec_that_cannot_start_is_not_retried_by_itself() -> None:
    failing = SandboxError(FailureKind.IMAGE_MISSING, "image x: gone.")
    calls = 0

    def start(spec: SandboxSpec) -> None:
        nonlocal calls
        calls += 1
        raise failing

    pool = pool_of(FakeBackend(SandboxScript(on_start=start)))
    with pytest.raises(SandboxError, match="image x"):
        await pool.start_sandbox(A)
    await pool.wait_idle()
    assert calls == 2  # the caller's, and one attempt to refill
    await pool.close()


async def test_close_leaves_nothing_and_refuses_starts() -> None:
    backend = FakeBackend()
    pool = pool_of(backend)
    pool.prewarm(A, 2)
    await asyncio.sleep(0)
    await pool.close()
    await pool.close()
    assert not open_of(backend) and backend.closed
    with pytest.raises(SandboxError, match="closed"):
        await pool.start_sandbox(A)


async def test_a_warm_up_that_fails_loses_no_sandbox() -> None:
    backend = FakeBackend()

    async def warm_up(box: Sandbox) -> None:
        raise SandboxError(FailureKind.IMAGE_BROKEN, "no bash")

    pool = WarmPool(backend, per_spec=2, warm_up=warm_up)
    pool.prewarm(A)
    await pool.wait_idle()
    assert not open_of(backend) and pool.ready_count == 0
    await pool.close()


@pytest.mark.parametrize(("config", "pooled"), [({}, False), ({"warm": 2}, True)])
async def test_the_configuration_decides(config: dict[str, int], pooled: bool) -> None:
    backend = with_warm_pool(FakeBackend(), SandboxConfig.model_validate(config))
    assert isinstance(backend, WarmPool) is pooled
    await backend.close()


# Real sandboxes.

on_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(backend: NamespaceBackend) -> AsyncIterator[WarmPool]:
    class Borrowed:
        """The module's backend is closed by its own fixture."""

        name, probe, start_sandbox = backend.name, backend.probe, backend.start_sandbox

        async def close(self) -> None:
            return

    async with closing(WarmPool(Borrowed(), per_spec=3, warm_up=lambda box: box.shell())) as pool:
        yield pool


@on_loop
@pytest.mark.parametrize("backend_name", ["userns"], indirect=True, scope="module")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.slow
async def test_conformance_of_warm_ones(check: Check, pool: WarmPool) -> None:
    pool.prewarm(CHECK_SPEC)
    await pool.wait_idle()
    before = pool.hits
    async with closing(await pool.start_sandbox(CHECK_SPEC)) as sandbox:
        assert pool.hits == before + 1
        await check(sandbox)


def sandbox_names(backend: NamespaceBackend) -> set[str]:
    return {name for name in os.listdir(backend.scratch) if not name.startswith(".")}  # others are being removed


@on_loop
async def test_a_killed_warm_one_is_not_handed_out(pool: WarmPool, backend: NamespaceBackend) -> None:
    spec = SandboxSpec(workdir="/killed")
    await pool.wait_idle()  # the pool refills what the tests before this one took
    before = sandbox_names(backend)
    pool.prewarm(spec, 1)
    await pool.wait_idle()
    (name,) = sandbox_names(backend) - before
    state = read_state(backend.scratch / name, "")
    assert state is not None and state.init is not None
    handle = os.pidfd_open(state.init.pid)
    assert state.init.kill() and wait_until_dead([handle], 10) == 0
    os.close(handle)
    fresh = await pool.start_sandbox(spec)  # the loop has not had a turn in which it could have heard of the death
    assert fresh.id != name and (await fresh.exec(["true"], timeout=20)).exit_code == 0
    await fresh.close()
