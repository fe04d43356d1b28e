"""Filling a layer: from a registry's blob, a SIF file, a directory or an archive, always through the helper."""

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.images.config import ImagesConfig
from prorl_gym.sandbox.images.helping import ask_helper
from prorl_gym.sandbox.images.layers import Building
from prorl_gym.sandbox.shielding import finish

_TAR = ("tar", "--create", "--sort=name", "--numeric-owner", "--one-file-system", "--format=pax")
_TIMES = "--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime"


class Filler:
    """Unpacks into the directories of layers.

    Args:
        config: bounds and owner.
    """

    def __init__(self, config: ImagesConfig) -> None:
        self._config = config

    async def from_file(self, path: Path, digest: str, building: Building) -> dict[str, Any]:
        """Unpack an archive, compressed or not."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SandboxError(
                FailureKind.IMAGE_MISSING, f"{path}: {error.strerror}.", "Check the path and its permissions."
            ) from None
        try:
            return await self._ask("untar", digest, building, stdin=descriptor, final=building.final)
        finally:
            os.close(descriptor)

    async def from_sif(self, path: Path, digest: str, building: Building) -> dict[str, Any]:
        """Unpack a SIF file, which the sandboxes' uid must be able to read."""
        return await self._ask("unsif", digest, building, source=str(path), final=building.final)

    async def from_directory(self, path: Path, building: Building, options: Sequence[str] = ()) -> dict[str, Any]:
        """Copy a directory as we may read it; what comes out belongs to the sandboxes' uid.

        Args:
            path: a root file system, or the difference to one (deletions as ``.wh.NAME``).
            building: where to.
            options: more options of ``tar``.
        """
        reading, writing = os.pipe()
        try:
            packer = await asyncio.create_subprocess_exec(
                *(*_TAR, _TIMES, *options, "--directory", str(path), "."),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=asyncio.subprocess.DEVNULL,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        try:
            facts = await self._ask("untar", "", building, stdin=reading)
        finally:
            os.close(reading)  # a packer that still writes is ended by it
            if packer.returncode is None:
                await finish(packer.wait())
        if packer.returncode:
            raise SandboxError(
                FailureKind.IMAGE_BROKEN, f"{path}: not all of it could be read.", "Check the permissions below it."
            )
        return facts

    async def _ask(self, op: str, digest: str, building: Building, *, stdin: int | None = None, **more: str) -> Any:
        config = self._config
        request = {
            "op": op,
            "digest": digest,
            "target": building.target,
            "size": config.layer_bytes,
            "entries": config.layer_entries,
            "durable": config.durable,
            "final": "",  # what may still turn out to be incomplete is not published yet
            **more,
        }
        owner, seconds = config.owner(), config.unpack_seconds
        return await ask_helper(request, uid=owner, seconds=seconds, stdin=stdin, hold=building.hold)


def file_digest(path: Path) -> str:
    """Return the digest of a file. Blocks: run it in a thread."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def file_stamp(path: Path) -> tuple[int, ...]:
    """Return what tells whether a file is still the same without reading it.

    Raises:
        SandboxError: ``IMAGE_MISSING``.
    """
    with contextlib.suppress(OSError):
        found = path.stat()
        return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    raise SandboxError(FailureKind.IMAGE_MISSING, f"image {path} does not exist.", "Check the path.")
