"""Bringing all images of a data set here: what it will take first, then the work, continued wherever it stopped."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prorl_gym.errors import ConfigError, RolloutError, SandboxError
from prorl_gym.sandbox.images.reference import DOCKER, RegistryReference
from prorl_gym.sandbox.images.registry import RegistryImage
from prorl_gym.sandbox.images.store import ImageStore

_UNPACKED_PER_COMPRESSED = 2.8
_BYTES_PER_INODE = 24_000
"""Both as seen in images of distributions and Python environments: a SIF of 171 MB unpacks to 386 MB in 12,400 files
(gzip squashfs), and layers of small files are worse. An estimate for planning, never a bound."""
_KEPT_FREE = 0.05


@dataclass(frozen=True, slots=True)
class Plan:
    """What bringing images here would take. Sizes in bytes."""

    wanted: tuple[str, ...]
    """Images that are not here yet."""
    here: int
    """Images that are."""
    layers: int
    """Layers to fetch, each counted once."""
    shared: int
    """Layers of the images that are here already or are needed by several of them."""
    download: int
    """Compressed bytes to fetch."""
    size: int
    """Estimated unpacked bytes."""
    inodes: int
    """Estimated files and directories."""
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Images that their registry does not give, with the reason."""


@dataclass(slots=True)
class Outcome:
    """What became of a synchronisation."""

    done: list[str] = field(default_factory=list[str])
    failed: dict[str, str] = field(default_factory=dict[str, str])


def share_of(images: Sequence[str], job_array: str) -> list[str]:
    """Return the share of one job of an array, ``I/N`` with I from 0 to N-1.

    Raises:
        ConfigError: it is not of this form.
    """
    index, slash, count = job_array.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise ConfigError(
            f"--job-array {job_array!r} is not I/N with I below N.",
            "In Slurm: sbatch --array=0-9 and --job-array $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT.",
        )
    return list(images[int(index) :: int(count)])


async def plan(store: ImageStore, images: Sequence[str], jobs: int) -> Plan:
    """Ask the registries what the images consist of, without fetching any.

    Args:
        store: which layers are here already.
        images: names as ``ImageStore.resolve`` takes them.
        jobs: how many questions at once.
    """
    store.layers.prepare()
    wanted = [image for image in images if not store.has(image)]
    failed: dict[str, str] = {}
    found: list[RegistryImage] = []

    async def ask(image: str) -> None:
        try:
            found.append(await store.registry.image(RegistryReference.parse(image)))
        except SandboxError as error:
            failed[image] = str(error)

    await _each([image for image in wanted if image.startswith(DOCKER)], jobs, ask)
    mentioned = [layer for image in found for layer in image.layers]
    to_fetch = {layer.digest: layer for layer in mentioned if store.layers.find(layer.digest) is None}
    download = sum(layer.size for layer in to_fetch.values())
    size = int(download * _UNPACKED_PER_COMPRESSED)
    return Plan(
        wanted=tuple(wanted),
        here=len(images) - len(wanted),
        layers=len(to_fetch),
        shared=len(mentioned) - len(to_fetch),
        download=download,
        size=size,
        inodes=size // _BYTES_PER_INODE + len(to_fetch),
        failed=failed,
    )


def check_room(plan: Plan, store: ImageStore) -> None:
    """Refuse a plan that would fill the disk, or of which the store would prune one part for the other.

    Raises:
        ConfigError: with what is missing.
    """
    place = store.layers.place
    free = os.statvfs(_existing(place))
    config = store.config
    held = store.layers.all()
    room = {
        "bytes": (plan.size + plan.download, int(free.f_bavail * free.f_frsize * (1 - _KEPT_FREE))),
        "inodes": (plan.inodes, int(free.f_favail * (1 - _KEPT_FREE)) if free.f_files else plan.inodes),
    }
    for what, (needed, there) in room.items():
        if needed > there:
            raise ConfigError(
                f"{place}: about {needed} {what} are needed and {there} are free.",
                "Use --store on a larger disk, split the rows with --job-array over nodes, or --force.",
            )
    over_bytes = sum(layer.size for layer in held) + plan.size > config.max_bytes
    if over_bytes or sum(layer.inodes for layer in held) + plan.inodes > config.max_inodes:
        raise ConfigError(
            f"the images need about {plan.size} bytes and {plan.inodes} inodes, more than the store may hold.",
            "Raise --max-bytes and --max-inodes, prune, or split the rows with --job-array over nodes.",
        )


async def sync(store: ImageStore, images: Sequence[str], jobs: int, report: Callable[[str, str], None]) -> Outcome:
    """Bring images here. One that fails keeps no other from coming; run it again to continue.

    Args:
        store: where to.
        images: names as ``ImageStore.resolve`` takes them.
        jobs: images at once; their layers wait for the node's gate besides.
        report: called with the name and ``done`` or the reason as each image ends.
    """
    outcome = Outcome()

    async def bring(image: str) -> None:
        try:
            await store.obtain(image)
        except RolloutError as error:
            outcome.failed[image] = str(error)
        else:
            outcome.done.append(image)
        report(image, outcome.failed.get(image, "done"))

    await _each(images, jobs, bring)
    return outcome


async def _each(items: Sequence[str], jobs: int, work: Callable[[str], Awaitable[None]]) -> None:
    waiting = iter(items)

    async def worker() -> None:
        for item in waiting:
            await work(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(jobs, len(items))):
            group.create_task(worker())


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
