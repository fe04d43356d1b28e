"""The image store of a node: resolves names of images to pinned lower directories.

Each named image has a small file, its record, which is replaced atomically. Layers beyond the store's bounds are
evicted, least recently used first; those in use, and those of built or imported images, are kept.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.config import ImagesConfig
from prorl_gym.sandbox.images.layers import Layer, LayerStore, UnfinishedLayer, layer_key
from prorl_gym.sandbox.images.locks import NodeSemaphore
from prorl_gym.sandbox.images.registry.client import RegistryClient
from prorl_gym.sandbox.images.registry.http import Retries
from prorl_gym.sandbox.images.registry.oci_format import DOCKER_SCHEME, Descriptor, RegistryReference
from prorl_gym.sandbox.images.unpack import is_sif
from prorl_gym.sandbox.protocol import HOST_IMAGE

_LOG = logging.getLogger(__name__)
_ATTEMPTS = 3
"""Another process may evict a layer between its making and its pinning."""


@dataclass(frozen=True, slots=True)
class ResolvedImage:
    """An image that is ready on this node."""

    reference: str
    """As given to ``resolve``."""
    lower_dirs: tuple[str, ...]
    """Absolute paths of unpacked directories, topmost first, as overlayfs takes them. Deletions of one layer from
    those below it are marked as a ``userxattr`` overlay expects: mount them with that option. Empty for ``host``."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that the image's author set (its PATH, above all); a spec's own win over them."""


class ImageResolver(Protocol):
    """Resolves a name to read-only directories before a sandbox starts, and releases them after it is gone.

    Until then they are pinned, not evicted. The pins are file locks, which the death of the process releases.
    """

    async def resolve(self, image: str) -> ResolvedImage:
        """Make an image ready and pin it. Concurrent calls fetch and unpack it once.

        ``image`` is ``host``, the absolute path of an image directory or of a SIF file, ``docker://...``, or the name
        of a built or imported image. Raises ``SandboxError``: ``IMAGE_MISSING``, ``IMAGE_BROKEN``, or
        ``SANDBOX_UNAVAILABLE`` when the image is not the cause (no room, registry unreachable).
        """
        ...

    def release(self, image: ResolvedImage) -> None:
        """Undo one ``resolve``. Never blocks or fails; without it the image stays pinned until the process ends."""
        ...


ImageKind = Literal["registry", "sif", "local"]


class ImageRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    reference: str
    kind: ImageKind
    """Where it can be fetched again: a registry, a SIF file, or (``local``) nowhere, so that it is never evicted."""
    layers: tuple[str, ...]
    """Digests, lowest first."""
    digest: str = ""
    """Digest of the manifest, or of the SIF file."""
    environment: tuple[tuple[str, str], ...] = ()
    """Environment variables that its author set."""
    stamp: tuple[int, ...] = ()
    """``file_stamp`` of a SIF file, to see that it is unchanged."""


class ImageRecords:
    """The records below one directory, which the store makes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find_record(self, reference: str) -> ImageRecord | None:
        return _read(self._path(reference))

    def list_records(self) -> list[ImageRecord]:
        """Return every record, by reference."""
        if not self._directory.is_dir():
            return []
        found = [record for path in self._directory.glob("*.json") if (record := _read(path)) is not None]
        return sorted(found, key=lambda record: record.reference)

    def write_record(self, record: ImageRecord) -> None:
        path = self._path(record.reference)
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_text(record.model_dump_json(), encoding="utf-8")
        aside.replace(path)

    def remove_record(self, reference: str) -> None:
        """Remove a record; its layers stay until they are evicted."""
        self._path(reference).unlink(missing_ok=True)

    def get_record(self, name: str) -> ImageRecord:
        record = self.find_record(name)
        if record is None:
            names = ", ".join(one.reference for one in self.list_records() if one.kind == "local") or "none"
            raise SandboxError(
                FailureKind.IMAGE_MISSING,
                f"image {name!r} is no path, no docker:// reference and no known name (known: {names[:200]}).",
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


@dataclass(frozen=True, slots=True)
class EvictionResult:
    """Layers that an eviction removed, and the size of the rest."""

    layers: int
    removed_bytes: int
    left_bytes: int
    left_inodes: int


class ImageStore:
    """Fetches images to this node and keeps those in use. An ``ImageResolver``; one per event loop."""

    def __init__(self, config: ImagesConfig | None = None, retries: Retries | None = None) -> None:
        self.config = config or ImagesConfig()
        self.layers = LayerStore(self.config)
        self.records = ImageRecords(self.layers.directory / "images")
        self.registry = RegistryClient(self.config.mirrors, retries, self.config.login_host)
        self._unpack_slots = NodeSemaphore(self.layers.directory / "locks", self.config.jobs)
        self._pinned: list[tuple[ResolvedImage, tuple[str, ...]]] = []
        """Resolved images, with the digests of layers that are pinned for them."""

    async def close(self) -> None:
        """Close connections and release every pin. Idempotent."""
        self.layers.close()
        self._pinned.clear()
        await self.registry.close()

    async def resolve(self, image: str) -> ResolvedImage:
        if image == HOST_IMAGE:
            return ResolvedImage(image, ())
        if image.startswith("/") and os.path.isdir(image):  # noqa: ASYNC240 - a stat of a local disk
            return ResolvedImage(image, (image,))
        for _ in range(_ATTEMPTS):
            record = await self.ensure_image(image)
            if self._pin_layers(record):
                # An image may list a layer twice; overlayfs refuses that, and the upper one decides.
                topmost_first = tuple(dict.fromkeys(reversed(record.layers)))
                place = self.layers.directory.absolute()
                roots = tuple(str(place / "layers" / layer_key(digest) / "root") for digest in topmost_first)
                resolved = ResolvedImage(image, roots, record.environment)
                self._pinned.append((resolved, record.layers))
                return resolved
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            f"image {image}: its layers are evicted as fast as they are made.",
            "Raise sandbox.images.max_bytes: the images in use do not fit.",
        )

    def release(self, image: ResolvedImage) -> None:
        for position, (held, digests) in enumerate(self._pinned):
            if held is image:
                del self._pinned[position]
                for digest in digests:
                    self.layers.unpin(digest)
                return

    async def ensure_image(self, image: str, *, refresh: bool = False) -> ImageRecord:
        """Make every layer of an image present, unpinned. ``refresh``: query the registry, as a tag may have moved."""
        self.layers.make_directories()
        if image.startswith("/"):
            return await self._ensure_sif(Path(image))
        if image.startswith(DOCKER_SCHEME):
            return await self._ensure_from_registry(RegistryReference.parse(image), refresh)
        record = self.records.get_record(image)
        if self._is_complete(record):
            return record
        raise SandboxError(
            FailureKind.IMAGE_MISSING,
            f"image {image!r} is known, but not all of its layers are present any more.",
            "Build or import it again.",
        )

    def has_image(self, image: str) -> bool:
        """Whether an image, given by reference or name, is known and complete."""
        name = str(RegistryReference.parse(image)) if image.startswith(DOCKER_SCHEME) else image
        record = self.records.find_record(name)
        return record is not None and self._is_complete(record)

    def _is_complete(self, record: ImageRecord) -> bool:
        return all(self.layers.find_layer(digest) is not None for digest in record.layers)

    async def _ensure_from_registry(self, reference: RegistryReference, refresh: bool) -> ImageRecord:
        known = None if refresh else self.records.find_record(str(reference))
        if known is not None and self._is_complete(known):
            return known
        try:
            found = await self.registry.fetch_image(reference)
            environment = await self.registry.fetch_environment(found)
            async with asyncio.TaskGroup() as group:
                for layer in {layer.digest: layer for layer in found.layers}.values():
                    group.create_task(self._ensure_registry_layer(reference, layer))
        except* SandboxError as errors:
            first: BaseException = errors  # only one is reported
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from None
        record = ImageRecord(
            reference=str(reference),
            kind="registry",
            digest=found.digest,
            layers=tuple(layer.digest for layer in found.layers),
            environment=environment,
        )
        self.records.write_record(record)
        await self.prune()
        return record

    async def _ensure_registry_layer(self, reference: RegistryReference, layer: Descriptor) -> Layer:
        async def make(building: UnfinishedLayer) -> None:
            async with self._unpack_slots.slot():
                blob = await self.registry.fetch_blob(reference, layer, self.layers.directory / "blobs")
                try:
                    await self.layers.unpack_archive(blob, layer.digest, building)
                except SandboxError as error:
                    raise _with_image_name(error, f"{reference}, layer {layer.digest[7:19]}") from None
                blob.unlink()

        return await self.layers.ensure_layer(layer.digest, make)

    async def _ensure_sif(self, path: Path) -> ImageRecord:
        stamp = file_stamp(path)
        known = self.records.find_record(str(path))
        if known is not None and known.stamp == stamp and self._is_complete(known):
            return known
        digest = await self.ensure_sif_layer(path)
        record = ImageRecord(reference=str(path), kind="sif", digest=digest, layers=(digest,), stamp=stamp)
        self.records.write_record(record)
        await self.prune()
        return record

    async def ensure_sif_layer(self, path: Path) -> str:
        """Unpack a SIF file; return its digest, which is its layer's."""
        with path.open("rb") as file:
            if not is_sif(file):
                raise SandboxError(
                    FailureKind.IMAGE_BROKEN,
                    f"image {path} is neither a directory nor a SIF file.",
                    "Import an archive with `prorl-gym images import`.",
                )
        digest = await asyncio.to_thread(file_digest, path)

        async def make(building: UnfinishedLayer) -> None:
            async with self._unpack_slots.slot():
                try:
                    await self.layers.unpack_sif(path, digest, building)
                except SandboxError as error:
                    raise _with_image_name(error, str(path)) from None

        await self.layers.ensure_layer(digest, make)
        return digest

    def _pin_layers(self, record: ImageRecord) -> bool:
        """Pin all layers of an image or none of them."""
        for position, digest in enumerate(record.layers):
            if not self.layers.pin(digest):
                for done in record.layers[:position]:
                    self.layers.unpin(done)
                return False
        return True

    async def remove_image(self, image: str) -> int:
        """Remove an image and the layers that no other image needs; return the number of layers."""
        name = str(RegistryReference.parse(image)) if image.startswith(DOCKER_SCHEME) else image
        record = self.records.get_record(name)
        self.records.remove_record(name)
        needed = {digest for other in self.records.list_records() for digest in other.layers}
        alone = [self.layers.find_layer(digest) for digest in dict.fromkeys(record.layers) if digest not in needed]
        return sum([await self.layers.evict_layer(layer) for layer in alone if layer is not None])

    async def prune(self) -> EvictionResult:
        """Evict layers, least recently used first, until the rest is within the store's bounds or in use.

        Layers of images that were built or imported here are kept: they cannot be fetched again.
        """
        self.layers.make_directories()
        records = self.records.list_records()
        kept = {layer_key(digest) for record in records if record.kind == "local" for digest in record.layers}
        there = self.layers.list_layers()
        size, inodes = sum(layer.size for layer in there), sum(layer.inodes for layer in there)
        removed = removed_size = 0
        for layer in sorted((one for one in there if one.key not in kept), key=_last_use):
            if size <= self.config.max_bytes and inodes <= self.config.max_inodes:
                break
            if await self.layers.evict_layer(layer):
                removed += 1
                removed_size += layer.size
                size -= layer.size
                inodes -= layer.inodes
        if removed:
            _LOG.info("image store: removed %d layers (%d bytes)", removed, removed_size)
        return EvictionResult(removed, removed_size, size, inodes)


def _with_image_name(error: SandboxError, name: str) -> SandboxError:
    return SandboxError(error.kind, f"image {name}: {error.what.rstrip('.')}.", error.fix)


def _last_use(layer: Layer) -> int:
    try:
        return layer.directory.stat().st_mtime_ns
    except FileNotFoundError:  # another process has removed it
        return 0


def file_digest(path: Path) -> str:
    """Return the digest of a file. Blocks: run it in a thread."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def file_stamp(path: Path) -> tuple[int, ...]:
    """Return device, inode, size and time of last change of a file, which differ once it has changed."""
    with contextlib.suppress(OSError):
        found = path.stat()
        return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    raise SandboxError(FailureKind.IMAGE_MISSING, f"image {path} does not exist.", "Check the path.")
