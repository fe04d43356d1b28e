"""The store's end of the unpacking helper: fills layers, one helper process for each request.

What is inside images is touched by the helper alone. A request is one JSON object, its answer another; cancelling a
request kills its helper.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prorl_gym
from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.cancellation import run_shielded
from prorl_gym.sandbox.images.config import ImagesConfig

_INHERITED = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
_NO_SPACE = (28, 122)  # ENOSPC, EDQUOT
_TAR = ("tar", "--create", "--sort=name", "--numeric-owner", "--one-file-system", "--format=pax")
_DROP_TIMES = "--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime"


@dataclass(frozen=True, slots=True)
class UnfinishedLayer:
    """A layer that is being made."""

    target: str
    lock_fd: int
    """Descriptor of the lock, which the helper holds too."""
    final_path: str = ""
    """Name that the helper may give the finished layer; if empty, the store names it."""


class LayerUnpacker:
    """Fills the directories of layers through the helper.

    Args:
        config: bounds and owner.
    """

    def __init__(self, config: ImagesConfig) -> None:
        self._config = config

    async def unpack_archive(self, path: Path, digest: str, layer: UnfinishedLayer) -> None:
        """Unpack an archive, compressed or not."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SandboxError(
                FailureKind.IMAGE_MISSING, f"{path}: {error.strerror}.", "Check the path and its permissions."
            ) from None
        try:
            await self._call_helper("untar", digest, layer, stdin=descriptor, final=layer.final_path)
        finally:
            os.close(descriptor)

    async def unpack_sif(self, path: Path, digest: str, layer: UnfinishedLayer) -> None:
        """Unpack a SIF file, which the sandboxes' uid must be able to read."""
        await self._call_helper("unsif", digest, layer, source=str(path), final=layer.final_path)

    async def copy_directory(self, path: Path, layer: UnfinishedLayer, tar_options: Sequence[str] = ()) -> str:
        """Copy a directory that this process may read; the copy belongs to the sandboxes' uid.

        Args:
            path: a root file system, or the difference to one (deletions as ``.wh.NAME``).
            layer: where to.
            tar_options: more options of ``tar``.

        Returns:
            The digest of the copied contents.
        """
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
            manifest = await self._call_helper("untar", "", layer, stdin=reading)
        finally:
            os.close(reading)  # ends a packer that still writes
            if packer.returncode is None:
                await run_shielded(packer.wait())
        if packer.returncode:
            raise SandboxError(
                FailureKind.IMAGE_BROKEN, f"{path}: not all of it could be read.", "Check the permissions below it."
            )
        return manifest["content"]

    async def _call_helper(
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


async def call_helper(
    request: Mapping[str, Any], *, uid: int, timeout: float, stdin: int | None = None, lock_fd: int | None = None
) -> dict[str, Any]:
    """Run the helper for one request. Cancelling kills it.

    Args:
        request: see ``unpack_helper``.
        uid: the user that the helper becomes when this process is root; otherwise it stays this one.
        timeout: seconds after which it is killed.
        stdin: descriptor of the layer to unpack.
        lock_fd: descriptor of a lock, held until the helper has ended.

    Raises:
        SandboxError: the image is broken, or this node cannot hold it.
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
