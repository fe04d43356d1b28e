"""What is pruned and what never is."""

import os
from pathlib import Path

from images_support import FakeRegistry, entry, layer
from sandbox_support import sandbox_uid

from prorl_gym.sandbox.images.config import ImagesConfig
from prorl_gym.sandbox.images.store import ImageRecord, ImageStore, evict_layers

# s import ImageRecord

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


async def test_least_recently_used_goes_first(store: ImageStore, fake_registry: FakeRegistry) -> None:
    roots = await filled(store, fake_registry)
    done = await evict_layers(store.layers, store.records, max_size=2500, max_inodes=100)
    assert (done.layers, done.left_bytes) == (1, 2000)
    assert [there(root) for root in roots] == [True, True, False]
    assert os.listdir(store.layers.directory / "building") == []


async def test_inodes_count_too(store: ImageStore, fake_registry: FakeRegistry) -> None:
    await filled(store, fake_registry)
    assert (await evict_layers(store.layers, store.records, max_size=1 << 20, max_inodes=1)).layers == 2


async def test_what_is_in_use_stays(
    store: ImageStore, images_config: ImagesConfig, fake_registry: FakeRegistry
) -> None:
    roots = await filled(store, fake_registry)
    image = await store.resolve(fake_registry.name("image-2"))
    os.utime(roots[2], (1, 1))
    other = ImageStore(images_config)
    other.layers.make_directories()
    try:
        assert (await evict_layers(other.layers, other.records, 0, 0)).layers == 2
        assert there(roots[2])
        store.release(image)
        assert (await evict_layers(other.layers, other.records, 0, 0)).layers == 1
    finally:
        await other.close()
    assert not there(roots[2])


async def test_pin_is_counted(store: ImageStore, fake_registry: FakeRegistry) -> None:
    roots = await filled(store, fake_registry)
    first, second = [await store.resolve(fake_registry.name("image-0")) for _ in range(2)]
    store.release(first)
    await evict_layers(store.layers, store.records, 0, 0)
    assert there(roots[0])
    store.release(second)
    await evict_layers(store.layers, store.records, 0, 0)
    assert not there(roots[0])


async def test_pruned_image_is_fetched_again(store: ImageStore, fake_registry: FakeRegistry) -> None:
    await filled(store, fake_registry)
    await evict_layers(store.layers, store.records, 0, 0)
    image = await store.resolve(fake_registry.name("image-0"))
    assert (Path(image.lower_dirs[0]) / "file-0").exists()


async def test_local_images_are_never_pruned(store: ImageStore, fake_registry: FakeRegistry) -> None:
    roots = await filled(store, fake_registry)
    digest = Path(roots[0]).name.replace("-", ":")
    store.records.write_record(ImageRecord(reference="mine", kind="local", layers=(digest,)))
    await evict_layers(store.layers, store.records, 0, 0)
    assert [there(root) for root in roots] == [True, False, False]


async def test_closed_directories_can_be_pruned(store: ImageStore, fake_registry: FakeRegistry) -> None:
    name = fake_registry.add("closed", layer(entry("a/b/file", b"1")))
    image = await store.resolve(name)
    os.chmod(f"{image.lower_dirs[0]}/a", 0o000)
    store.release(image)
    assert os.stat(f"{image.lower_dirs[0]}/a").st_uid == sandbox_uid()
    assert (await evict_layers(store.layers, store.records, 0, 0)).layers == 1
