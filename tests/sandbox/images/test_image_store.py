"""Resolving images: once for all who ask, torn ones never, those in use always there."""

import asyncio
import os
from pathlib import Path

import pytest
from images_support import FakeRegistry, directory, entry, layer
from sandbox_support import sandbox_uid

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.images.config import ImagesConfig
from prorl_gym.sandbox.images.store import ImageStore

BASE = layer(directory("etc"), entry("etc/base", b"base"), entry("etc/gone", b"old"))
TASK = layer(entry("etc/task", b"task"), entry("etc/.wh.gone"))


def owners_below(root: Path) -> set[int]:
    return {path.lstat().st_uid for path in (root, *root.rglob("*"))}


async def test_layers_come_topmost_first(store: ImageStore, fake_registry: FakeRegistry) -> None:
    image = await store.resolve(fake_registry.add("team/task", BASE, TASK))
    top, bottom = (Path(path) for path in image.lower_dirs)
    assert (top / "etc/task").read_bytes() == b"task"
    assert (bottom / "etc/base").read_bytes() == b"base"


async def test_files_belong_to_the_sandboxes_uid(store: ImageStore, fake_registry: FakeRegistry) -> None:
    image = await store.resolve(fake_registry.add("team/task", BASE))
    assert owners_below(Path(image.lower_dirs[0])) == {sandbox_uid()}


async def test_many_who_ask_at_once_fetch_once(store: ImageStore, fake_registry: FakeRegistry) -> None:
    name = fake_registry.add("team/task", BASE, TASK)
    images = await asyncio.gather(*(store.resolve(name) for _ in range(20)))
    assert len({image.lower_dirs for image in images}) == 1
    assert (fake_registry.fetched(BASE), fake_registry.fetched(TASK)) == (1, 1)


async def test_two_stores_on_one_directory_fetch_once(
    store: ImageStore, images_config: ImagesConfig, fake_registry: FakeRegistry
) -> None:
    name = fake_registry.add("team/task", BASE)
    other = ImageStore(images_config)
    try:
        first, second = await asyncio.gather(store.resolve(name), other.resolve(name))
    finally:
        await other.close()
    assert first.lower_dirs == second.lower_dirs
    assert fake_registry.fetched(BASE) == 1


async def test_shared_layers_are_fetched_once(store: ImageStore, fake_registry: FakeRegistry) -> None:
    names = [fake_registry.add(f"team/{n}", BASE, layer(entry("n", str(n).encode()))) for n in range(3)]
    images = await asyncio.gather(*(store.resolve(name) for name in names))
    assert len({image.lower_dirs[-1] for image in images}) == 1
    assert fake_registry.fetched(BASE) == 1


async def test_known_image_needs_no_registry(store: ImageStore, fake_registry: FakeRegistry) -> None:
    name = fake_registry.add("team/task", BASE)
    first = await store.resolve(name)
    asked = len(fake_registry.asked)
    assert (await store.resolve(name)).lower_dirs == first.lower_dirs
    assert len(fake_registry.asked) == asked


async def test_cancelled_fetch_leaves_nothing_and_can_be_repeated(
    store: ImageStore, fake_registry: FakeRegistry
) -> None:
    name = fake_registry.add("team/task", BASE)
    reached = asyncio.Event()

    def hold(request: object) -> None:
        if "/blobs/" in request.path and request.path.endswith(store_digest):  # type: ignore[attr-defined]
            reached.set()

    store_digest = next(digest for digest, data in fake_registry.blobs.items() if data == BASE)
    fake_registry.faults.append(hold)
    task = asyncio.ensure_future(store.resolve(name))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert os.listdir(store.layers.directory / "building") == []
    assert (await store.resolve(name)).lower_dirs


async def test_half_done_layer_of_a_dead_process_is_swept(store: ImageStore, fake_registry: FakeRegistry) -> None:
    name = fake_registry.add("team/task", BASE)
    store.layers.make_directories()
    digest = next(digest for digest, data in fake_registry.blobs.items() if data == BASE)
    torn = store.layers.directory / "building" / f"{digest.replace(':', '-')}-dead"
    torn.mkdir()
    os.chown(torn, sandbox_uid(), sandbox_uid())
    await store.resolve(name)
    assert not torn.exists()


async def test_directory_without_manifest_is_no_layer(store: ImageStore, fake_registry: FakeRegistry) -> None:
    name = fake_registry.add("team/task", BASE)
    image = await store.resolve(name)
    store.release(image)
    (Path(image.lower_dirs[0]).parent / "manifest.json").unlink()
    assert store.layers.list_layers() == []


async def test_broken_layer_names_the_image(store: ImageStore, fake_registry: FakeRegistry) -> None:
    name = fake_registry.add("team/bad", layer(entry("../out", b"1")))
    with pytest.raises(SandboxError, match=r"team/bad:latest, layer [0-9a-f]{12}: .*leads outside") as caught:
        await store.resolve(name)
    assert caught.value.kind is FailureKind.IMAGE_BROKEN
    assert store.layers.list_layers() == []


async def test_bomb_is_stopped(place: Path, fake_registry: FakeRegistry) -> None:
    store = ImageStore(ImagesConfig(directory=place / "small", durable=False, layer_bytes=1 << 20, layer_entries=10))
    name = fake_registry.add("team/bomb", layer(entry("zeros", bytes(4 << 20))))
    try:
        with pytest.raises(SandboxError, match="more than 1048576 bytes") as caught:
            await store.resolve(name)
    finally:
        await store.close()
    assert caught.value.kind is FailureKind.IMAGE_BROKEN
    assert os.listdir(place / "small/building") == []


@pytest.mark.parametrize("name", ["/no/such/image", "no-such-name", "docker://UPPER/case"])
async def test_missing_images_are_named(store: ImageStore, name: str) -> None:
    with pytest.raises(SandboxError) as caught:
        await store.resolve(name)
    assert caught.value.kind is FailureKind.IMAGE_MISSING
    assert name in str(caught.value)


async def test_host_and_directories_need_no_store(store: ImageStore, place: Path) -> None:
    assert (await store.resolve("host")).lower_dirs == ()
    assert (await store.resolve(str(place))).lower_dirs == (str(place),)
    assert not store.layers.directory.exists()


async def test_environment_of_the_image_is_kept(store: ImageStore, fake_registry: FakeRegistry) -> None:
    image = await store.resolve(fake_registry.add("team/task", BASE))
    assert image.environment == (("PATH", "/opt/env/bin:/usr/bin"),)


async def test_many_stores_wait_for_a_turn_on_the_node(store: ImageStore) -> None:
    from prorl_gym.sandbox.images.locks import NodeSemaphore

    store.layers.make_directories()
    running, most = 0, 0

    async def work(gate: NodeSemaphore) -> None:
        nonlocal running, most
        async with gate.slot():
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1

    gates = [NodeSemaphore(store.layers.directory / "locks", 2) for _ in range(4)]
    async with asyncio.TaskGroup() as group:
        for gate in gates * 3:
            group.create_task(work(gate))
    assert most == 2
