"""Images of a store: resolved once for all who ask, torn ones never; pruned, those in use never; in real sandboxes."""

import asyncio
import io
import os
import signal
import sys
import tarfile
from pathlib import Path

import pytest
from images_support import FakeRegistry, digest_of, directory, entry, layer
from sandbox_support import closing, fails_as, sandbox_uid

from prorl_gym.errors import FailureKind
from prorl_gym.sandbox.config import ImagesConfig, SandboxConfig
from prorl_gym.sandbox.images.locks import NodeSemaphore
from prorl_gym.sandbox.images.store import EvictionResult, ImageRecord, ImageStore
from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend

BASE = layer(directory("etc"), entry("etc/base", b"base"), entry("etc/gone", b"old"))
TASK = layer(entry("etc/task", b"task"), entry("etc/.wh.gone"))


async def prune_all(store: ImageStore) -> EvictionResult:
    config = store.config
    store.config = config.model_copy(update={"max_bytes": 0})
    try:
        return await store.prune()
    finally:
        store.config = config


def owners_below(root: Path) -> set[int]:
    return {path.lstat().st_uid for path in (root, *root.rglob("*"))}


async def test_layers_come_topmost_first_and_belong_to_the_sandboxes(
    store: ImageStore, fake_registry: FakeRegistry
) -> None:
    image = await store.resolve(fake_registry.add("team/task", BASE, TASK))
    top, bottom = (Path(path) for path in image.lower_dirs)
    assert (top / "etc/task").read_bytes() == b"task"
    assert (bottom / "etc/base").read_bytes() == b"base"
    assert owners_below(top) == owners_below(bottom) == {sandbox_uid()}
    assert image.environment == (("PATH", "/opt/env/bin:/usr/bin"),)


async def test_an_image_is_fetched_once_by_all_stores_on_a_directory(
    store: ImageStore, images_config: ImagesConfig, fake_registry: FakeRegistry
) -> None:
    name = fake_registry.add("team/task", BASE, TASK)
    async with closing(ImageStore(images_config)) as other:
        images = await asyncio.gather(*(each.resolve(name) for each in (store, other) for _ in range(20)))
    assert (fake_registry.fetched(BASE), fake_registry.fetched(TASK)) == (1, 1)
    fake_registry.asked.clear()
    images.append(await store.resolve(name))
    assert len({image.lower_dirs for image in images}) == 1 and fake_registry.asked == []


async def test_shared_layers_are_fetched_once(store: ImageStore, fake_registry: FakeRegistry) -> None:
    names = [fake_registry.add(f"team/{n}", BASE, layer(entry("n", str(n).encode()))) for n in range(3)]
    images = await asyncio.gather(*(store.resolve(name) for name in names))
    assert len({image.lower_dirs[-1] for image in images}) == 1
    assert fake_registry.fetched(BASE) == 1


async def test_cancelled_fetch_leaves_nothing_and_can_be_repeated(
    store: ImageStore, fake_registry: FakeRegistry
) -> None:
    name = fake_registry.add("team/task", BASE)
    reached = asyncio.Event()
    fake_registry.faults.append(lambda request: reached.set() if digest_of(BASE) in request.path else None)
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
    torn = store.layers.directory / "building" / f"{digest_of(BASE).replace(':', '-')}-dead"
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
    with fails_as(FailureKind.IMAGE_BROKEN, match=r"team/bad:latest, layer [0-9a-f]{12}: .*leads outside"):
        await store.resolve(name)
    assert store.layers.list_layers() == []


async def test_bomb_is_stopped(place: Path, fake_registry: FakeRegistry) -> None:
    config = ImagesConfig(directory=place / "small", durable=False, layer_bytes=1 << 20, layer_entries=10)
    name = fake_registry.add("team/bomb", layer(entry("zeros", bytes(4 << 20))))
    async with closing(ImageStore(config)) as store:
        with fails_as(FailureKind.IMAGE_BROKEN, match="more than 1048576 bytes"):
            await store.resolve(name)
    assert os.listdir(place / "small/building") == []


@pytest.mark.parametrize("name", ["/no/such/image", "no-such-name", "docker://UPPER/case"])
async def test_missing_images_are_named(store: ImageStore, name: str) -> None:
    with fails_as(FailureKind.IMAGE_MISSING) as caught:
        await store.resolve(name)
    assert name in str(caught.value)


async def test_host_and_directories_need_no_store(store: ImageStore, place: Path) -> None:
    assert (await store.resolve("host")).lower_dirs == ()
    assert (await store.resolve(str(place))).lower_dirs == (str(place),)
    assert not store.layers.directory.exists()


async def test_many_stores_wait_for_a_turn_on_the_node(store: ImageStore) -> None:
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


DELETIONS = layer(
    directory("data"), entry("data/task", b"task"), entry("data/.wh.kept"), entry("data/doomed/.wh..wh..opq")
)


def tarred(tree: Path) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(tree, ".")
    return file.getvalue()


async def test_layers_are_one_root_and_stay_while_used(
    backend_name: str, scratch: Path, tiny_image: Path, store: ImageStore, fake_registry: FakeRegistry
) -> None:
    name = fake_registry.add("team/task", tarred(tiny_image), DELETIONS)
    async with closing(
        NamespaceBackend(
            "apptainer" if backend_name == "apptainer" else "userns", SandboxConfig(scratch=scratch), store
        )
    ) as backend:
        box = await backend.start_sandbox(SandboxSpec(image=name))
        shown = await box.exec(["/bin/ls", "/data", "/data/doomed"], timeout=20)
        assert shown.stdout == b"/data:\ndoomed\ntask\n\n/data/doomed:\n"
        removed = await box.exec(["/bin/bash", "-c", "rm -rf /data && mkdir /data && ls -A /data"], timeout=20)
        assert (removed.exit_code, removed.stdout) == (0, b"")
        assert (await prune_all(store)).layers == 0
        await box.close()
        assert (await prune_all(store)).layers == 2


async def test_killed_service_leaves_a_store_that_works(place: Path, images_config: ImagesConfig) -> None:
    fifo = place / "slow.tar"
    tree = place / "tree"
    tree.mkdir()
    (tree / "file").write_bytes(bytes(1 << 20))
    os.mkfifo(fifo)
    place_of_store = images_config.store_directory()
    service = await asyncio.create_subprocess_exec(sys.executable, "-c", _TORN, str(place_of_store), str(fifo))
    with await asyncio.to_thread(open, fifo, "wb", 0) as pipe:
        # More than a pipe holds: when it is written, the unpacking has begun. The rest never comes.
        await asyncio.to_thread(pipe.write, tarred(tree)[: 512 << 10])
        assert len(os.listdir(place_of_store / "building")) == 1
        service.send_signal(signal.SIGKILL)
        await service.wait()
        async with closing(ImageStore(images_config)) as store:
            async with asyncio.timeout(20):
                made = await store.layers.ensure_layer(
                    _DIGEST, lambda target: store.layers.copy_directory(tree, target)
                )
    assert made.size == 1 << 20
    assert os.listdir(place_of_store / "building") == []


_DIGEST = f"sha256:{'7' * 64}"
_TORN = f"""
import asyncio, sys
from pathlib import Path
from prorl_gym.sandbox.config import ImagesConfig
from prorl_gym.sandbox.images.locks import NodeSemaphore
from prorl_gym.sandbox.images.store import ImageStore
store = ImageStore(ImagesConfig(directory=Path(sys.argv[1]), durable=False))
unpack = lambda to: store.layers.unpack_archive(Path(sys.argv[2]), {_DIGEST!r}, to)
asyncio.run(store.layers.ensure_layer({_DIGEST!r}, unpack))
"""


LAYERS = [layer(entry(f"file-{n}", bytes([n]) * 1000)) for n in range(3)]


def there(layer: str) -> bool:
    return os.path.isdir(layer)


async def filled(store: ImageStore, registry: FakeRegistry) -> list[str]:
    """Bring three images in, the first one used last; return their layers' directories."""
    roots = list[str]()
    for n, data in enumerate(LAYERS):
        image = await store.resolve(registry.add(f"image-{n}", data))
        store.release(image)
        roots.append(str(Path(image.lower_dirs[0]).parent))
        os.utime(roots[-1], (1000 - n, 1000 - n))
    return roots


@pytest.mark.parametrize(
    ("max_size", "max_inodes", "left"),
    [(2500, 100, [True, True, False]), (1 << 20, 1, [True, False, False])],
    ids=["bytes", "inodes"],
)
async def test_least_recently_used_goes_first(
    store: ImageStore, fake_registry: FakeRegistry, max_size: int, max_inodes: int, left: list[bool]
) -> None:
    roots = await filled(store, fake_registry)
    store.config = store.config.model_copy(update={"max_bytes": max_size, "max_inodes": max_inodes})
    done = await store.prune()
    assert (done.layers, done.left_bytes) == (left.count(False), left.count(True) * 1000)
    assert [there(root) for root in roots] == left
    assert os.listdir(store.layers.directory / "building") == []


async def test_what_is_in_use_stays(
    store: ImageStore, images_config: ImagesConfig, fake_registry: FakeRegistry
) -> None:
    roots = await filled(store, fake_registry)
    pins = [await store.resolve(fake_registry.name("image-2")) for _ in range(2)]
    os.utime(roots[2], (1, 1))
    async with closing(ImageStore(images_config)) as other:
        other.layers.make_directories()
        assert (await prune_all(other)).layers == 2
        for pin in pins:
            assert there(roots[2])
            store.release(pin)
            await prune_all(other)
    assert not there(roots[2])


async def test_pruned_image_is_fetched_again(store: ImageStore, fake_registry: FakeRegistry) -> None:
    await filled(store, fake_registry)
    await prune_all(store)
    image = await store.resolve(fake_registry.name("image-0"))
    assert (Path(image.lower_dirs[0]) / "file-0").exists()


async def test_local_images_are_never_pruned(store: ImageStore, fake_registry: FakeRegistry) -> None:
    roots = await filled(store, fake_registry)
    digest = Path(roots[0]).name.replace("-", ":")
    store.records.write_record(ImageRecord(reference="mine", kind="local", layers=(digest,)))
    await prune_all(store)
    assert [there(root) for root in roots] == [True, False, False]


async def test_closed_directories_can_be_pruned(store: ImageStore, fake_registry: FakeRegistry) -> None:
    name = fake_registry.add("closed", layer(entry("a/b/file", b"1")))
    image = await store.resolve(name)
    os.chmod(f"{image.lower_dirs[0]}/a", 0o000)
    store.release(image)
    assert os.stat(f"{image.lower_dirs[0]}/a").st_uid == sandbox_uid()
    assert (await prune_all(store)).layers == 1
