"""The images that a data set needs: their names, an estimate of their size, and fetching them to this node."""

import os
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from prorl_gym.concurrency import for_each
from prorl_gym.environments.swe.swe_row import IMAGE_NAMES, MissingKeyError, Row, image_reference, read_key
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

ImageTemplate = Callable[[Row], str]
_ROW = TypeAdapter(dict[str, Any])


def parse_template(name: str) -> ImageTemplate:
    """Return a naming template by its name, or make one from a pattern such as ``team/{repo}:{commit}``."""
    if name in IMAGE_NAMES:
        return IMAGE_NAMES[name]
    keys = [key for _, key, _, _ in string.Formatter().parse(name) if key is not None]
    if not keys or not all(re.fullmatch(r"\w+", key) for key in keys):
        raise ConfigError(
            f"--template {name!r} is unknown.", f"Known: {', '.join(IMAGE_NAMES)}, or a pattern like 'team/{{key}}:v1'."
        )
    return lambda row: name.format(**{key: read_key(row, key) for key in keys})


def list_images(rows: Path, template: ImageTemplate) -> list[str]:
    """Return the images that the rows of a JSONL file need, each once, in their order."""
    found: dict[str, None] = {}
    try:
        with rows.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    found[image_reference(template(_ROW.validate_json(line)))] = None
                except MissingKeyError as missing:
                    fix = "Choose another --template; see `prorl-gym images sync --help`."
                    raise ConfigError(f"{rows}:{number}: the row has no {missing}.", fix) from None
    except OSError as error:
        raise ConfigError(f"{rows}: cannot be read ({error.strerror}).", "Check the path.") from None
    except ValidationError:
        raise ConfigError(f"{rows}: one of its lines is no JSON object.", "Give one row per line.") from None
    return list(found)


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """Estimate of what fetching images takes. Sizes in bytes; ``unpacked_bytes`` and ``inodes`` are guesses."""

    missing: tuple[str, ...]
    """Images that are not in the store yet."""
    present_count: int
    layer_count: int
    """Layers to fetch, each counted once."""
    shared_count: int
    """Layers that are in the store already, or that several images need."""
    download_bytes: int
    """Compressed."""
    unpacked_bytes: int
    inodes: int
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Images that their registry refuses, with the reason."""


@dataclass(slots=True)
class SyncResult:
    done: list[str] = field(default_factory=list[str])
    failed: dict[str, str] = field(default_factory=dict[str, str])


def select_shard(images: Sequence[str], job_array: str) -> list[str]:
    """Return the share of one job of an array, ``I/N`` with I from 0 to N-1."""
    index, slash, count = job_array.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise ConfigError(
            f"--shard {job_array!r} is not I/N with I below N.",
            "In Slurm: sbatch --array=0-9 and --shard $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT.",
        )
    return list(images[int(index) :: int(count)])


async def plan_sync(store: ImageStore, images: Sequence[str], jobs: int) -> SyncPlan:
    """Estimate what the images take from their manifests, with ``jobs`` requests at once, without fetching layers."""
    store.layers.make_directories()
    wanted = [image for image in images if not store.has_image(image)]
    failed: dict[str, str] = {}
    found: list[RegistryImage] = []

    async def inspect(image: str) -> None:
        try:
            found.append(await store.registry.fetch_image(RegistryReference.parse(image)))
        except SandboxError as error:
            failed[image] = str(error)

    await for_each([image for image in wanted if image.startswith(DOCKER_SCHEME)], jobs, inspect)
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
    """Refuse (``ConfigError``) a plan that would fill the disk, or whose images would evict each other."""
    place = store.layers.directory
    free = os.statvfs(next(path for path in (place, *place.absolute().parents) if path.exists()))
    config = store.config
    held = store.layers.list_layers()
    free_inodes = free.f_favail if free.f_files else float("inf")
    for what, needed, all_free in (
        ("bytes", plan.unpacked_bytes + plan.download_bytes, free.f_bavail * free.f_frsize),
        ("inodes", plan.inodes, free_inodes),
    ):
        there = all_free * (1 - _RESERVED_FRACTION)
        if needed > there:
            raise ConfigError(
                f"{place}: about {needed} {what} are needed and {there:.0f} are free.",
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
    """Fetch images; a failure stops no other. ``on_image_done`` gets each name with ``done`` or the reason."""
    outcome = SyncResult()

    async def fetch(image: str) -> None:
        try:
            await store.ensure_image(image)
        except RolloutError as error:
            outcome.failed[image] = str(error)
        else:
            outcome.done.append(image)
        on_image_done(image, outcome.failed.get(image, "done"))

    await for_each(images, jobs, fetch)
    return outcome
