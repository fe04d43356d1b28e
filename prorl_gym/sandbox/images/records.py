"""What this node knows about images by name: one small file each, replaced atomically."""

import hashlib
import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from prorl_gym.errors import FailureKind, SandboxError

Kind = Literal["registry", "sif", "local"]


class ImageRecord(BaseModel):
    """An image and what it consists of."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    reference: str
    kind: Kind
    """Where it can be had again: a registry, a SIF file, or (``local``) nowhere, so that it is never pruned."""
    layers: tuple[str, ...]
    """Digests, lowest first."""
    digest: str = ""
    """Of the manifest, or of the SIF."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that its author set."""
    stamp: tuple[int, ...] = ()
    """Of a SIF file: device, inode, size and time of last change, to see that it is the same."""


class Records:
    """The records below one directory.

    Args:
        directory: made by the store.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find(self, reference: str) -> ImageRecord | None:
        """Return the record of an image."""
        return _read(self._path(reference))

    def all(self) -> list[ImageRecord]:
        """Return every record, by reference."""
        if not self._directory.is_dir():
            return []
        found = [record for path in self._directory.glob("*.json") if (record := _read(path)) is not None]
        return sorted(found, key=lambda record: record.reference)

    def write(self, record: ImageRecord) -> None:
        """Store a record, replacing the one of the same reference."""
        path = self._path(record.reference)
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_text(record.model_dump_json(), encoding="utf-8")
        aside.replace(path)

    def remove(self, reference: str) -> None:
        """Forget an image; its layers go when nobody else needs them."""
        self._path(reference).unlink(missing_ok=True)

    def known(self, name: str) -> ImageRecord:
        """Return the record of a name.

        Raises:
            SandboxError: ``IMAGE_MISSING``.
        """
        record = self.find(name)
        if record is None:
            names = ", ".join(one.reference for one in self.all() if one.kind == "local") or "none"
            raise SandboxError(
                FailureKind.IMAGE_MISSING,
                f"image {name!r} is no path, no docker:// reference and no name known here (known: {names[:200]}).",
                "Make it with `prorl-gym images build` or `prorl-gym images import`.",
            )
        return record

    def _path(self, reference: str) -> Path:
        return self._directory / f"{hashlib.sha256(reference.encode()).hexdigest()[:32]}.json"


def _read(path: Path) -> ImageRecord | None:
    try:
        return ImageRecord.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
