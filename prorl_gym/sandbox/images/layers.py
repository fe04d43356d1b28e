"""The layers of this node: unpacked directories, named by the digest of their source, pinned while in use.

    <store>/layers/<key>/manifest.json   written last, then the directory gets its name
    <store>/layers/<key>/root/           a lower directory of overlayfs, owned by the sandboxes' uid
    <store>/building/<key>-<token>/      a layer that is being made; garbage once the lock of its key is free
    <store>/locks/<key>                  held while the layer is being made

A pin is a shared lock on the layer's directory: it ends with the process that holds it, however that ends.
"""

import hashlib
import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.cancellation import run_shielded
from prorl_gym.sandbox.images.config import ImagesConfig
from prorl_gym.sandbox.images.locks import SingleFlight, locked, try_lock
from prorl_gym.sandbox.images.unpack_client import UnfinishedLayer, call_helper

_REMOVE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Layer:
    """One unpacked layer."""

    key: str
    """``sha256-<hex>`` of what it was unpacked from."""
    directory: Path
    size: int
    """Bytes of its files."""
    inodes: int


def layer_key(digest: str) -> str:
    """Return the name of the layer with this digest."""
    return digest.replace(":", "-")


class LayerStore:
    """The layers below one directory. One per process and event loop.

    Args:
        config: where and how large.
    """

    def __init__(self, config: ImagesConfig) -> None:
        self.directory = config.store_directory()
        self._config = config
        self._in_flight: SingleFlight[Layer] = SingleFlight()
        self._pins: dict[str, tuple[int, int]] = {}
        self._is_prepared = False

    def make_directories(self) -> None:
        """Make the directories. They belong to the owner of what is unpacked; only that user and root may change them.

        Raises:
            SandboxError: they cannot be made, or belong to another user.
        """
        if self._is_prepared:
            return
        owner = self._config.owner_uid()
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            for path in (self.directory, *(self.directory / name for name in ("layers", "building"))):
                _make_owned_directory(path, owner, 0o755)
            for name in ("locks", "images", "blobs"):  # this process's own: nothing unpacked goes here
                _make_owned_directory(self.directory / name, os.geteuid(), 0o700)
        except OSError as error:
            raise SandboxError(
                FailureKind.SANDBOX_UNAVAILABLE,
                f"image store {self.directory}: {error.strerror or error}.",
                "Set sandbox.images.directory to a directory on a local disk that can be made there.",
            ) from None
        self._is_prepared = True

    def find_layer(self, digest: str) -> Layer | None:
        """Return the layer with this digest; ``None``: it is not in the store."""
        return _read_layer(self.directory / "layers" / layer_key(digest))

    def list_layers(self) -> list[Layer]:
        """Return every layer of the store."""
        entries = sorted((self.directory / "layers").iterdir()) if self._is_prepared else []
        return [layer for entry in entries if (layer := _read_layer(entry)) is not None]

    async def ensure_layer(self, digest: str, make: Callable[[UnfinishedLayer], Awaitable[None]]) -> Layer:
        """Return the layer with this digest; concurrent calls, here and in other processes, make it once.

        Args:
            digest: of what it is unpacked from.
            make: fills the directory ``target`` through the helper.

        Raises:
            SandboxError: from ``make``.
        """
        self.make_directories()
        return self.find_layer(digest) or await self._in_flight.do(digest, lambda: self._make_layer(digest, make))

    async def _make_layer(self, digest: str, make: Callable[[UnfinishedLayer], Awaitable[None]]) -> Layer:
        key = layer_key(digest)
        async with locked(self.directory / "locks" / key) as lock_fd:
            found = self.find_layer(digest)  # another process may have made it while this one waited for the lock
            if found is not None:
                return found
            async with self._building(key, lock_fd, str(self.directory / "layers" / key)) as layer:
                await make(layer)
                if Path(layer.target).is_dir():  # noqa: ASYNC240 - a stat of a local disk
                    await self._publish(layer, digest)
        return self._get_made(digest)

    async def create_layer(self, name: str, make: Callable[[UnfinishedLayer], Awaitable[str]]) -> Layer:
        """Make a layer whose digest is known only once it is made.

        Args:
            name: of the image it is for; two layers with the same name are made one after the other.
            make: fills the directory ``target`` and returns the digest of what it was made from.

        Raises:
            SandboxError: from ``make``.
        """
        self.make_directories()
        key = f"name-{hashlib.sha256(name.encode()).hexdigest()}"
        async with locked(self.directory / "locks" / key) as lock_fd, self._building(key, lock_fd) as layer:
            digest = await make(layer)
            await self._publish(layer, digest)
        return self._get_made(digest)

    @asynccontextmanager
    async def _building(self, key: str, lock_fd: int, final_path: str = "") -> AsyncGenerator[UnfinishedLayer]:
        """Provide a directory to fill, and remove it if that fails. The caller holds the lock of ``key``."""
        await self._remove_unfinished(key)
        try:
            yield UnfinishedLayer(str(self._building_path(key)), lock_fd, final_path)
        except BaseException:
            await run_shielded(self._remove_unfinished(key))
            raise

    def _building_path(self, key: str) -> Path:
        return self.directory / "building" / f"{key}-{uuid4().hex[:8]}"

    async def _publish(self, layer: UnfinishedLayer, digest: str) -> None:
        """Give a finished directory its name."""
        target = self.directory / "layers" / layer_key(digest)
        await self._call_helper({"op": "publish", "source": layer.target, "target": str(target)})

    async def _remove_unfinished(self, key: str) -> None:
        for entry in sorted((self.directory / "building").iterdir()):
            if entry.name.startswith(f"{key}-"):
                await self._call_helper({"op": "remove", "path": str(entry)})

    def _get_made(self, digest: str) -> Layer:
        layer = self.find_layer(digest)
        if layer is None:
            raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, f"layer {digest} vanished while it was being made.")
        return layer

    async def _call_helper(self, request: dict[str, str]) -> None:
        await call_helper(request, uid=self._config.owner_uid(), timeout=_REMOVE_SECONDS)

    def pin(self, digest: str) -> bool:
        """Keep a layer until as many calls of ``unpin``; ``False``: it is not in the store (any more)."""
        held, count = self._pins.get(digest, (-1, 0))
        if not count:
            held = self._open_pinned(digest)
            if held < 0:
                return False
            os.utime(held)  # time of last use, for eviction
        self._pins[digest] = (held, count + 1)
        return True

    def _open_pinned(self, digest: str) -> int:
        path = self.directory / "layers" / layer_key(digest)
        try:
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return -1
        if try_lock(held, shared=True):
            # Eviction renames under an exclusive lock: what still has its name now stays.
            try:
                if os.path.samestat(os.fstat(held), os.stat(path)):
                    return held
            except FileNotFoundError:
                pass
        os.close(held)
        return -1

    def unpin(self, digest: str) -> None:
        """Undo one ``pin``."""
        held, count = self._pins.pop(digest, (-1, 0))
        if count > 1:
            self._pins[digest] = (held, count - 1)
        elif count == 1:
            os.close(held)

    async def evict_layer(self, layer: Layer) -> bool:
        """Remove a layer unless it is pinned; return whether it was removed."""
        descriptor = os.open(layer.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not try_lock(descriptor):
                return False
            target = self._building_path(layer.key)
            await self._call_helper({"op": "discard", "source": str(layer.directory), "target": str(target)})
        finally:
            os.close(descriptor)
        return True

    def close(self) -> None:
        """Release every pin."""
        for held, _ in self._pins.values():
            os.close(held)
        self._pins.clear()


def _read_layer(directory: Path) -> Layer | None:
    """Return the layer in a directory; ``None``: there is none."""
    try:
        facts = json.loads((directory / "manifest.json").read_text(encoding="ascii"))
        return Layer(directory.name, directory, int(facts["bytes"]), int(facts["inodes"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _make_owned_directory(path: Path, owner: int, mode: int) -> None:
    try:
        os.mkdir(path, mode)
        os.chown(path, owner, owner if owner != os.geteuid() else -1, follow_symlinks=False)
    except FileExistsError:
        pass
    found = os.lstat(path)
    if found.st_uid != owner or path.is_symlink() or not path.is_dir():
        raise OSError(f"{path} must be a directory that belongs to uid {owner}")
