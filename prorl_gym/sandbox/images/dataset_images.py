"""The images that a data set needs: their names, an estimate of their size, and fetching them to this node.

Names follow the published collections, or a template. Sources: SWE-bench publishes
``swebench/sweb.eval.x86_64.<instance>`` with ``__`` written ``_1776_``; SWE-Gym
``xingyaoww/sweb.eval.x86_64.<instance>`` with ``__`` written ``_s_``; rows of R2E-Gym contain the name itself.
"""

import asyncio
import os
import re
import string
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from prorl_gym.errors import ConfigError, RolloutError, SandboxError
from prorl_gym.sandbox.images.registry.client import RegistryImage
from prorl_gym.sandbox.images.registry.oci_format import DOCKER_SCHEME, RegistryReference
from prorl_gym.sandbox.images.store import ImageStore

_UNPACKED_PER_COMPRESSED = 2.8
_BYTES_PER_INODE = 24_000
"""Both measured on images of distributions and Python environments: a SIF of 171 MB unpacks to 386 MB in 12,400 files
(gzip squashfs), and layers of small files are worse. Estimates for planning, never bounds."""
_RESERVED_FRACTION = 0.05
"""Share of a file system that is left free."""

Row = Mapping[str, Any]
ImageTemplate = Callable[[Row], str]

_IMAGE_KEYS = ("image", "docker_image", "image_name")
_NESTED = ("instance", "task", "metadata", "verifier_metadata", "extra_info")
_ROW = TypeAdapter(dict[str, Any])


class _MissingKeyError(Exception):
    """A row lacks a key. Args: its name."""


def _field(row: Row, name: str) -> str:
    """Return a field of a row, at its top or one level below."""
    for place in (row, *(row.get(nest) for nest in _NESTED)):
        if isinstance(place, Mapping):
            value = cast(Mapping[str, Any], place).get(name)
            if isinstance(value, str) and value:
                return value
    raise _MissingKeyError(name)


def _swe_bench(row: Row) -> str:
    return f"swebench/sweb.eval.x86_64.{_field(row, 'instance_id').replace('__', '_1776_').lower()}:latest"


def _swe_gym(row: Row) -> str:
    return f"xingyaoww/sweb.eval.x86_64.{_field(row, 'instance_id').replace('__', '_s_').lower()}:latest"


def _r2e_gym(row: Row) -> str:
    return _field(row, "docker_image")


def _image_key(row: Row) -> str:
    for key in _IMAGE_KEYS:
        try:
            return _field(row, key)
        except _MissingKeyError:
            continue
    raise _MissingKeyError(" or ".join(_IMAGE_KEYS))


TEMPLATES: dict[str, ImageTemplate] = {
    "row": _image_key,
    "swe-bench": _swe_bench,
    "swe-gym": _swe_gym,
    "r2e-gym": _r2e_gym,
}


def parse_template(name: str) -> ImageTemplate:
    """Return a naming template by its name, or make one from a pattern such as ``team/{repo}:{commit}``.

    Raises:
        ConfigError: it is neither.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    keys = [key for _, key, _, _ in string.Formatter().parse(name) if key is not None]
    if not keys or not all(re.fullmatch(r"\w+", key) for key in keys):
        raise ConfigError(
            f"--template {name!r} is unknown.", f"Known: {', '.join(TEMPLATES)}, or a pattern like 'team/{{key}}:v1'."
        )
    return lambda row: name.format(**{key: _field(row, key) for key in keys})


def list_images(rows: Path, template: ImageTemplate) -> list[str]:
    """Return the images that the rows of a JSONL file need, each once, in their order.

    Raises:
        ConfigError: the file or a row cannot be read, or a row lacks what the template needs.
    """
    found: dict[str, None] = {}
    for where, row in _rows(rows):
        try:
            image = template(row)
        except _MissingKeyError as missing:
            raise ConfigError(
                f"{where}: the row has no {missing}.", "Choose another --template; see `prorl-gym images sync --help`."
            ) from None
        remote = not image.startswith("/") and "://" not in image
        found[f"{DOCKER_SCHEME}{image}" if remote else image] = None
    return list(found)


def _rows(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", _ROW.validate_json(line)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).", "Check the path.") from None
    except ValidationError:
        raise ConfigError(f"{path}: one of its lines is no JSON object.", "Give one row per line.") from None


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """Estimate of what fetching images takes. Sizes in bytes."""

    missing: tuple[str, ...]
    """Images that are not in the store yet."""
    present_count: int
    """Number of images that are."""
    layer_count: int
    """Layers to fetch, each counted once."""
    shared_count: int
    """Layers that are in the store already, or that several images need."""
    download_bytes: int
    """Compressed bytes to fetch."""
    unpacked_bytes: int
    """Estimated unpacked bytes."""
    inodes: int
    """Estimated files and directories."""
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Images that their registry refuses, with the reason."""


@dataclass(slots=True)
class SyncResult:
    """Outcome of a synchronisation."""

    done: list[str] = field(default_factory=list[str])
    failed: dict[str, str] = field(default_factory=dict[str, str])


def select_shard(images: Sequence[str], job_array: str) -> list[str]:
    """Return the share of one job of an array, ``I/N`` with I from 0 to N-1.

    Raises:
        ConfigError: it is malformed.
    """
    index, slash, count = job_array.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise ConfigError(
            f"--shard {job_array!r} is not I/N with I below N.",
            "In Slurm: sbatch --array=0-9 and --shard $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT.",
        )
    return list(images[int(index) :: int(count)])


async def plan_sync(store: ImageStore, images: Sequence[str], jobs: int) -> SyncPlan:
    """Estimate what the images take from their manifests, without fetching layers.

    Args:
        store: holds some layers already.
        images: names as ``ImageStore.resolve`` takes them.
        jobs: requests at once.
    """
    store.layers.make_directories()
    wanted = [image for image in images if not store.has_image(image)]
    failed: dict[str, str] = {}
    found: list[RegistryImage] = []

    async def inspect(image: str) -> None:
        try:
            found.append(await store.registry.fetch_image(RegistryReference.parse(image)))
        except SandboxError as error:
            failed[image] = str(error)

    await _for_each([image for image in wanted if image.startswith(DOCKER_SCHEME)], jobs, inspect)
    mentioned = [layer for image in found for layer in image.layers]
    to_fetch = {layer.digest: layer for layer in mentioned if store.layers.find_layer(layer.digest) is None}
    download = sum(layer.size for layer in to_fetch.values())
    size = int(download * _UNPACKED_PER_COMPRESSED)
    return SyncPlan(
        missing=tuple(wanted),
        present_count=len(images) - len(wanted),
        layer_count=len(to_fetch),
        shared_count=len(mentioned) - len(to_fetch),
        download_bytes=download,
        unpacked_bytes=size,
        inodes=size // _BYTES_PER_INODE + len(to_fetch),
        failed=failed,
    )


def check_free_space(plan: SyncPlan, store: ImageStore) -> None:
    """Refuse a plan that would fill the disk, or whose images would evict each other from the store.

    Raises:
        ConfigError: there is too little room.
    """
    place = store.layers.directory
    free = os.statvfs(_nearest_existing(place))
    config = store.config
    held = store.layers.list_layers()
    room = {
        "bytes": (
            plan.unpacked_bytes + plan.download_bytes,
            int(free.f_bavail * free.f_frsize * (1 - _RESERVED_FRACTION)),
        ),
        "inodes": (plan.inodes, int(free.f_favail * (1 - _RESERVED_FRACTION)) if free.f_files else plan.inodes),
    }
    for what, (needed, there) in room.items():
        if needed > there:
            raise ConfigError(
                f"{place}: about {needed} {what} are needed and {there} are free.",
                "Use --store on a larger disk, split the rows with --shard over nodes, or --force.",
            )
    over_bytes = sum(layer.size for layer in held) + plan.unpacked_bytes > config.max_bytes
    if over_bytes or sum(layer.inodes for layer in held) + plan.inodes > config.max_inodes:
        raise ConfigError(
            f"the images need about {plan.unpacked_bytes} bytes and {plan.inodes} inodes, more than the store holds.",
            "Raise --max-bytes and --max-inodes, prune, or split the rows with --shard over nodes.",
        )


async def sync_images(
    store: ImageStore, images: Sequence[str], jobs: int, on_image_done: Callable[[str, str], None]
) -> SyncResult:
    """Fetch images. A failure of one does not stop the others; run it again to continue.

    Args:
        store: where to.
        images: names as ``ImageStore.resolve`` takes them.
        jobs: images at once; their layers share the node's unpacking slots.
        on_image_done: called with the name and ``done`` or the reason as each image ends.
    """
    outcome = SyncResult()

    async def fetch(image: str) -> None:
        try:
            await store.ensure_image(image)
        except RolloutError as error:
            outcome.failed[image] = str(error)
        else:
            outcome.done.append(image)
        on_image_done(image, outcome.failed.get(image, "done"))

    await _for_each(images, jobs, fetch)
    return outcome


async def _for_each(items: Sequence[str], jobs: int, work: Callable[[str], Awaitable[None]]) -> None:
    waiting = iter(items)

    async def worker() -> None:
        for item in waiting:
            await work(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(jobs, len(items))):
            group.create_task(worker())


def _nearest_existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
