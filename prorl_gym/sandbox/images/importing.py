"""Taking in what lies around: a directory, a SIF file or an archive becomes an image with a name of its own."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from prorl_gym.errors import ConfigError
from prorl_gym.sandbox.images.layers import Building
from prorl_gym.sandbox.images.records import ImageRecord
from prorl_gym.sandbox.images.sources import file_digest, file_stamp
from prorl_gym.sandbox.images.squashfs import is_sif
from prorl_gym.sandbox.images.store import ImageStore

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
_TAKEN = frozenset({"host"})


def check_name(name: str) -> str:
    """Return a name that an image may have.

    Raises:
        ConfigError: it may not.
    """
    if not _NAME.fullmatch(name) or name in _TAKEN:
        raise ConfigError(
            f"--name {name!r} cannot be the name of an image.",
            "Use lower-case letters, digits, dots, dashes and underscores; 'host' is taken.",
        )
    return name


async def import_image(
    store: ImageStore, source: Path, name: str, *, on: str = "", options: Sequence[str] = ()
) -> ImageRecord:
    """Make an image of a file or directory. It is kept until it is removed by name.

    Args:
        store: where to.
        source: a directory, a SIF file, or a tar archive.
        name: replaces what had this name.
        on: image below it: ``source`` is then a thin layer on top, its deletions written as ``.wh.NAME``.
        options: more options of ``tar`` when the source is a directory.

    Raises:
        ConfigError: the name cannot be used.
        SandboxError: the source cannot be used.
    """
    check_name(name)
    below = (await store.obtain(on)).layers if on else ()
    digest = await _take_in(store, source, name, options)
    record = ImageRecord(reference=name, kind="local", digest=digest, layers=(*below, digest))
    store.records.write(record)
    return record


async def _take_in(store: ImageStore, source: Path, name: str, options: Sequence[str]) -> str:
    kind = await asyncio.to_thread(_kind_of, source)
    if kind == "directory":

        async def copy(building: Building) -> str:
            return (await store.filler.from_directory(source, building, options))["content"]

        layer = await store.layers.take_in(name, copy)
        return layer.key.replace("-", ":")
    if kind == "sif":
        return await store.unpack_file(source)
    digest = await asyncio.to_thread(file_digest, source)

    async def unpack(building: Building) -> None:
        await store.filler.from_file(source, digest, building)

    await store.layers.ensure(digest, unpack)
    return digest


def _kind_of(source: Path) -> Literal["directory", "sif", "archive"]:
    file_stamp(source)  # says it when there is nothing
    if source.is_dir():
        return "directory"
    with source.open("rb") as file:
        return "sif" if is_sif(file) else "archive"
