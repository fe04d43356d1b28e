"""Keeping the store within its bounds: the least recently used layers go first, those in use and local ones never."""

from dataclasses import dataclass

from prorl_gym.sandbox.images.layers import Layer, Layers, key_of
from prorl_gym.sandbox.images.records import Records


@dataclass(frozen=True, slots=True)
class Evicted:
    """What a look at the store removed and left. Sizes in bytes."""

    layers: int
    size: int
    left_size: int
    left_inodes: int


async def evict(layers: Layers, records: Records, max_size: int, max_inodes: int) -> Evicted:
    """Remove layers, least recently used first, until the rest is within the bounds or in use.

    Layers of images that cannot be had again are kept: they were built or imported here.
    """
    kept = {key_of(digest) for record in records.all() if record.kind == "local" for digest in record.layers}
    there = layers.all()
    size, inodes = sum(layer.size for layer in there), sum(layer.inodes for layer in there)
    removed = removed_size = 0
    for layer in sorted((one for one in there if one.key not in kept), key=_last_use):
        if size <= max_size and inodes <= max_inodes:
            break
        if await layers.evict(layer):
            removed += 1
            removed_size += layer.size
            size -= layer.size
            inodes -= layer.inodes
    return Evicted(removed, removed_size, size, inodes)


def _last_use(layer: Layer) -> int:
    try:
        return layer.directory.stat().st_mtime_ns
    except FileNotFoundError:  # another process was faster
        return 0
