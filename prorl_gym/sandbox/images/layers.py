"""The layers of this node: unpacked directories, named by the digest of their source, pinned while in use.

    <store>/layers/<key>/manifest.json   written last, then the directory gets its name
    <store>/layers/<key>/root/           a lower directory of overlayfs, owned by the sandboxes' uid
    <store>/building/<key>-<token>/      a layer that is being made; garbage once the lock of its key is free
    <store>/locks/<key>                  held while the layer is being made

A pin is a shared lock on the layer's directory: it ends with the process that holds it, however that ends.

The content of images is touched by the unpacking helper alone, one process for each request. A request is one JSON
object, its answer another; cancelling a request kills its helper.
"""

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import prorl_gym
from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.cancellation import run_shielded
from prorl_gym.sandbox.config import ImagesConfig
from prorl_gym.sandbox.images.locks import SingleFlight, locked, try_lock

_REMOVE_SECONDS = 600.0
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
_NO_SPACE = (28, 122)  # ENOSPC, EDQUOT
_TAR = ("tar", "--create", "--sort=name", "--numeric-owner", "--one-file-system", "--format=pax")
_DROP_TIMES = "--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime"


@dataclass(frozen=True, slots=True)
class Layer:
    key: str
    """``sha256-<hex>`` of what it was unpacked from."""
    directory: Path
    size: int
    """Bytes of its files."""
    inodes: int


@dataclass(frozen=True, slots=True)
class UnfinishedLayer:
    target: str
    lock_fd: int
    """Descriptor of the lock, which the helper holds too."""
    final_path: str = ""
    """Name that the helper may give the finished layer; if empty, the store names it."""


def layer_key(digest: str) -> str:
    return digest.replace(":", "-")


class LayerStore:
    """The layers below one directory, filled by the unpacking helper. One per process and event loop."""

    def __init__(self, config: ImagesConfig) -> None:
        self.directory = config.store_directory()
        self._config = config
        self._in_flight: SingleFlight[Layer] = SingleFlight()
        self._pins: dict[str, tuple[int, int]] = {}
        self._is_prepared = False

    def make_directories(self) -> None:
        """Make the directories; refuse those that belong to another user than they should."""
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
        return _read_layer(self.directory / "layers" / layer_key(digest))

    def list_layers(self) -> list[Layer]:
        entries = sorted((self.directory / "layers").iterdir()) if self._is_prepared else []
        return [layer for entry in entries if (layer := _read_layer(entry)) is not None]

    async def ensure_layer(self, digest: str, make: Callable[[UnfinishedLayer], Awaitable[None]]) -> Layer:
        """Return the layer unpacked from this digest; concurrent calls, here and in other processes, make it once."""
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
        """Make a layer whose digest only ``make`` knows; those for one image ``name`` are made one after the other."""
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

    async def unpack_archive(self, path: Path, digest: str, layer: UnfinishedLayer) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SandboxError(
                FailureKind.IMAGE_MISSING, f"{path}: {error.strerror}.", "Check the path and its permissions."
            ) from None
        try:
            await self._fill("untar", digest, layer, stdin=descriptor, final=layer.final_path)
        finally:
            os.close(descriptor)

    async def unpack_sif(self, path: Path, digest: str, layer: UnfinishedLayer) -> None:
        """Unpack a SIF file, which the sandboxes' uid must be able to read."""
        await self._fill("unsif", digest, layer, source=str(path), final=layer.final_path)

    async def copy_directory(self, path: Path, layer: UnfinishedLayer, tar_options: Sequence[str] = ()) -> str:
        """Copy a directory, or the difference to one (deletions as ``.wh.NAME``); return the copy's digest."""
        reading, writing = os.pipe()
        try:
            packer = await asyncio.create_subprocess_exec(
                *(*_TAR, _DROP_TIMES, *tar_options, "--directory", str(path), "."),
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
            manifest = await self._fill("untar", "", layer, stdin=reading)
        finally:
            os.close(reading)  # ends a packer that still writes
            if packer.returncode is None:
                await run_shielded(packer.wait())
        if packer.returncode:
            raise SandboxError(
                FailureKind.IMAGE_BROKEN, f"{path}: not all of it could be read.", "Check the permissions below it."
            )
        return manifest["content"]

    async def _fill(
        self, op: str, digest: str, layer: UnfinishedLayer, *, stdin: int | None = None, **more: str
    ) -> Any:
        config = self._config
        request = {
            "op": op,
            "digest": digest,
            "target": layer.target,
            "size": config.layer_bytes,
            "entries": config.layer_entries,
            "durable": config.durable,
            "final": "",  # a copy is named only once all of the directory is known to be read
            **more,
        }
        owner, seconds = config.owner_uid(), config.unpack_seconds
        return await call_helper(request, uid=owner, timeout=seconds, stdin=stdin, lock_fd=layer.lock_fd)

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
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(held), os.stat(path)):
                    return held
        os.close(held)
        return -1

    def unpin(self, digest: str) -> None:
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
        for held, _ in self._pins.values():
            os.close(held)
        self._pins.clear()


def _read_layer(directory: Path) -> Layer | None:
    try:
        facts = json.loads((directory / "manifest.json").read_text(encoding="ascii"))
        return Layer(directory.name, directory, int(facts["bytes"]), int(facts["inodes"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _make_owned_directory(path: Path, owner: int, mode: int) -> None:
    with suppress(FileExistsError):
        os.mkdir(path, mode)
        os.chown(path, owner, owner if owner != os.geteuid() else -1, follow_symlinks=False)
    found = os.lstat(path)
    if found.st_uid != owner or path.is_symlink() or not path.is_dir():
        raise OSError(f"{path} must be a directory that belongs to uid {owner}")


async def call_helper(
    request: Mapping[str, Any], *, uid: int, timeout: float, stdin: int | None = None, lock_fd: int | None = None
) -> dict[str, Any]:
    """Run the helper for one request. Cancelling kills it, as does ``timeout`` (seconds).

    ``uid`` is the user that the helper becomes when this process is root, ``stdin`` the descriptor of the layer to
    unpack; the lock at ``lock_fd`` is held until the helper has ended.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "prorl_gym.sandbox.images.unpack_helper"),
        json.dumps({**request, "uid": uid, "parent": os.getpid()}),
        stdin=asyncio.subprocess.DEVNULL if stdin is None else stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=() if lock_fd is None else (lock_fd,),
        env=helper_environment(),
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(timeout):
            output, errors = await process.communicate()
    except TimeoutError:
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            f"unpacking was not done after {timeout:.0f} s.",
            "Raise sandbox.images.unpack_seconds, or put the store on a faster disk.",
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await run_shielded(process.wait())
    return _read_answer(output, errors, process.returncode)


def helper_environment() -> dict[str, str]:
    """Return the few variables that a helper gets: what it unpacks is hostile."""
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return {**kept, "PYTHONPATH": str(Path(prorl_gym.__file__).parent.parent), "LANG": "C.UTF-8"}


def _read_answer(output: bytes, errors: bytes, status: int | None) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(output)
    except ValueError:
        last = (errors.decode(errors="replace").strip().splitlines() or [f"exit status {status}"])[-1]
        raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, f"the unpacking process failed: {last[:200]}") from None
    if "done" in answer:
        return answer["done"]
    error = answer["error"]
    if error["kind"]:
        raise SandboxError(FailureKind(error["kind"]), error["what"], error["fix"])
    fix = "Free some space, or lower sandbox.images.max_bytes and run `prorl-gym images prune`."
    full = error.get("errno") in _NO_SPACE
    raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, error["what"], fix if full else error["fix"])
