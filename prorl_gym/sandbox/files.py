"""Files of a sandbox: the guest opens them inside, the service reads and writes through the descriptor.

No path of a sandbox is ever opened by the service, so no symlink in it can lead anywhere else.
"""

import asyncio
import json
import os
from collections.abc import Callable
from errno import EFBIG
from typing import Final, Literal, TypeVar, cast

from prorl_gym.sandbox.channel import Channel
from prorl_gym.sandbox.protocol import FileEntry

T = TypeVar("T")

_INLINE = 64 << 10
"""Up to here a file is read and written on the loop: a thread would cost more than the copy."""
_MAX_LISTING = 64 << 20
_KINDS: Final = ("file", "directory", "symlink", "other")


async def write_file(channel: Channel, path: str, data: bytes, mode: int) -> None:
    """Replace a file; see ``Sandbox.write_file``. An existing one keeps its permissions and gains ``mode``'s."""
    reply = await channel.request("write", path=path, mode=mode)
    await _with(reply.descriptors[0], len(data), lambda fd: _write_all(fd, data, path))


async def read_file(channel: Channel, path: str, limit: int) -> bytes:
    """Read a regular file; see ``Sandbox.read_file``."""
    reply = await channel.request("read", path=path)
    fd = reply.descriptors[0]
    return await _with(fd, os.fstat(fd).st_size, lambda fd: _read_all(fd, limit, path))


async def list_dir(channel: Channel, path: str) -> list[FileEntry]:
    """List a directory; see ``Sandbox.list_dir``."""
    reply = await channel.request("list", path=path)
    fd = reply.descriptors[0]
    return await _with(fd, os.fstat(fd).st_size, lambda fd: _parse_listing(_read_all(fd, _MAX_LISTING, path)))


def _parse_listing(data: bytes) -> list[FileEntry]:
    rows = cast(list[tuple[str, str, int, int]], json.loads(data))
    return [FileEntry(name, _kind(kind), size, mode) for name, kind, size, mode in rows]


async def _with(fd: int, size: int, work: Callable[[int], T]) -> T:
    """Use and close a descriptor; large files in a thread. A cancelled caller does not close it under the thread."""

    def use() -> T:
        try:
            return work(fd)
        finally:
            os.close(fd)

    return use() if size <= _INLINE else await asyncio.to_thread(use)


def _write_all(fd: int, data: bytes, path: str) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError as error:
        error.filename = path
        raise


def _read_all(fd: int, limit: int, path: str, offset: int = 0) -> bytes:
    """Read at most ``limit`` bytes, whatever size the file claims or grows to."""
    if os.fstat(fd).st_size > limit:
        raise OSError(EFBIG, f"larger than {limit} bytes", path)
    pieces: list[bytes] = []
    room = limit + 1
    while room > 0 and (piece := os.pread(fd, min(room, 1 << 20), offset)):
        pieces.append(piece)
        offset += len(piece)
        room -= len(piece)
    if room <= 0:
        raise OSError(EFBIG, f"larger than {limit} bytes", path)
    return b"".join(pieces)


def _kind(word: str) -> Literal["file", "directory", "symlink", "other"]:
    return word if word in _KINDS else "other"
