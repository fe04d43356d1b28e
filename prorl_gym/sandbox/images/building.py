"""Images that Apptainer makes: from a definition file, or fetched from where only it knows how."""

import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from prorl_gym.sandbox.images.importing import check_name, import_image
from prorl_gym.sandbox.images.records import ImageRecord
from prorl_gym.sandbox.images.singularity import build_sif, pull_sif
from prorl_gym.sandbox.images.sources import file_stamp
from prorl_gym.sandbox.images.store import ImageStore

FOREIGN = ("library://", "oras://", "shub://")
"""What only Apptainer fetches."""


async def build_definition(store: ImageStore, definition: Path, name: str, *, seconds: float) -> ImageRecord:
    """Build an image from a definition file; it is kept under ``name``.

    Raises:
        ConfigError: Apptainer is missing or failed, or the name cannot be used.
        SandboxError: there is no such file, or what came out is no image.
    """
    check_name(name)
    file_stamp(definition)
    return await _through_sif(store, name, lambda target: build_sif(definition.absolute(), target, seconds=seconds))


async def pull_foreign(store: ImageStore, reference: str, name: str, *, seconds: float) -> ImageRecord:
    """Fetch an image through Apptainer; it is kept under ``name``.

    Raises:
        ConfigError: Apptainer is missing or failed, or the name cannot be used.
        SandboxError: what came is no image.
    """
    check_name(name)
    return await _through_sif(store, name, lambda target: pull_sif(reference, target, seconds=seconds))


async def _through_sif(store: ImageStore, name: str, make: Callable[[Path], Awaitable[None]]) -> ImageRecord:
    store.layers.prepare()
    # Beside the store, which has the room; open to the sandboxes' uid, which unpacks it.
    with tempfile.TemporaryDirectory(dir=store.layers.place, prefix=".making-") as work:
        os.chmod(work, 0o755)
        sif = Path(work, "image.sif")
        await make(sif)
        os.chmod(sif, 0o644)
        return await import_image(store, sif, name)
