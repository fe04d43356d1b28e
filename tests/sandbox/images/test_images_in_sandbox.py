"""Images of the store in real sandboxes: several layers, their deletions, and pruning meanwhile."""

import asyncio
import io
import os
import signal
import sys
import tarfile
from pathlib import Path

import pytest
from images_support import FakeRegistry, directory, entry, layer

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.images.config import ImagesConfig
from prorl_gym.sandbox.images.store import ImageStore, evict_layers
from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend

TASK = layer(directory("data"), entry("data/task", b"task"), entry("data/.wh.kept"), entry("data/doomed/.wh..wh..opq"))


def tarred(tree: Path) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(tree, ".")
    return file.getvalue()


async def test_layers_are_one_root_and_stay_while_used(
    backend_name: str, scratch: Path, tiny_image: Path, store: ImageStore, fake_registry: FakeRegistry
) -> None:
    name = fake_registry.add("team/task", tarred(tiny_image), TASK)
    backend = NamespaceBackend(
        "apptainer" if backend_name == "apptainer" else "userns", SandboxConfig(scratch=scratch), store
    )
    try:
        box = await backend.start_sandbox(SandboxSpec(image=name))
        shown = await box.exec(["/bin/ls", "/data", "/data/doomed"], timeout=20)
        assert shown.stdout == b"/data:\ndoomed\ntask\n\n/data/doomed:\n"
        removed = await box.exec(["/bin/bash", "-c", "rm -rf /data && mkdir /data && ls -A /data"], timeout=20)
        assert (removed.exit_code, removed.stdout) == (0, b"")
        assert (await evict_layers(store.layers, store.records, 0, 0)).layers == 0
        await box.close()
        assert (await evict_layers(store.layers, store.records, 0, 0)).layers == 2
    finally:
        await backend.close()


@pytest.mark.slow
async def test_missing_image_ends_the_start(scratch: Path, store: ImageStore, fake_registry: FakeRegistry) -> None:
    backend = NamespaceBackend("userns", SandboxConfig(scratch=scratch), store)
    try:
        with pytest.raises(SandboxError) as caught:
            await backend.start_sandbox(SandboxSpec(image=fake_registry.name("nowhere")))
    finally:
        await backend.close()
    assert caught.value.kind is FailureKind.IMAGE_MISSING


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
        store = ImageStore(images_config)
        try:
            async with asyncio.timeout(20):
                made = await store.layers.ensure_layer(
                    _DIGEST, lambda target: store.unpacker.copy_directory(tree, target)
                )
        finally:
            await store.close()
    assert made.size == 1 << 20
    assert os.listdir(place_of_store / "building") == []


_DIGEST = f"sha256:{'7' * 64}"
_TORN = f"""
import asyncio, sys
from pathlib import Path
from prorl_gym.sandbox.images.config import ImagesConfig
from prorl_gym.sandbox.images.store import ImageStore
store = ImageStore(ImagesConfig(directory=Path(sys.argv[1]), durable=False))
unpack = lambda to: store.unpacker.unpack_archive(Path(sys.argv[2]), {_DIGEST!r}, to)
asyncio.run(store.layers.ensure_layer({_DIGEST!r}, unpack))
"""
