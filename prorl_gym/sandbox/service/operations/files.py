"""Files of a sandbox: a child of the guest opens, reads and writes them inside, the service moves bytes over a socket.

No path of a sandbox is ever opened by the service, so no symlink in it can lead anywhere else; and no file of one is
ever read or written by the service, so no payload that holds a file's lock can stop the service.

To find out why an operation does not end, everything that runs in the sandbox is killed. If the operation goes on then,
a payload had held it up, and has lost its processes for it. If not, the disk of the host did.
"""

import asyncio
import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from errno import EFBIG, EINVAL, ENAMETOOLONG
from typing import Any, Final, Generic, TypeVar, cast

from prorl_gym.errors import Evidence, FailureKind, SandboxError
from prorl_gym.sandbox.cancellation import run_shielded
from prorl_gym.sandbox.guest.transfer import DONE, FAILED, PACKET_BYTES
from prorl_gym.sandbox.protocol import FileEntry
from prorl_gym.sandbox.service.guest_channel import GuestChannel
from prorl_gym.sandbox.service.operations.execute import ChildProcess, invalid_reason

T = TypeVar("T")
_MIN_BYTES_PER_SECOND = 1 << 20
"""Slowest pace at which an operation may move bytes."""
_BYTES_PER_TURN = 256 << 10
"""Bytes moved before other tasks get a turn."""
_MAX_LISTING = 64 << 20
_MAX_PATH_BYTES = 4095
_KINDS: Final = ("file", "directory", "symlink", "other")


async def write_file(channel: GuestChannel, path: str, data: bytes, mode: int | None) -> None:
    request = {"what": "write", "path": path, "mode": mode, "size": len(data)}
    await _run_operation(channel, request, bytes, data=data)


async def read_file(channel: GuestChannel, path: str, limit: int) -> bytes:
    return b"".join(await _run_operation(channel, {"what": "read", "path": path, "limit": limit}, bytes, limit))


async def list_dir(channel: GuestChannel, path: str) -> list[FileEntry]:
    pieces = await _run_operation(channel, {"what": "list", "path": path}, _read_entries, _MAX_LISTING)
    return [entry for entries in pieces for entry in entries]


async def _run_operation(
    channel: GuestChannel, request: dict[str, Any], convert: Callable[[bytes], T], limit: int = 0, data: bytes = b""
) -> list[T]:
    """Do one operation (see ``transfer``), if need be after ending what holds it up.

    ``convert`` makes a result of each piece that comes, ``limit`` bounds the bytes of all pieces. Raises ``OSError`` as
    a program inside would see it; ``SandboxError``: ``SANDBOX_LOST`` also when what holds it up cannot be ended,
    ``SANDBOX_UNAVAILABLE`` when nothing of the payload's is left that could.
    """
    path = request["path"]
    if flaw := invalid_reason(path):
        raise OSError(EINVAL, f"the path {flaw}", path)
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise OSError(ENAMETOOLONG, os.strerror(ENAMETOOLONG), path)
    is_relieved, timeouts = False, channel.timeouts
    while True:
        reply = await channel.start_child("transfer", **request)
        child = ChildProcess(channel, reply.fields["pid"], reply.descriptors)
        operation = _Operation(channel, child, data, convert, limit)
        try:
            ended = await operation.wait(timeouts.file_stall_after_kill if is_relieved else timeouts.file_stall)
            if not ended and not is_relieved:
                is_relieved = await _kill_payload(channel)
                ended = await operation.wait(timeouts.file_stall_after_kill)
            if ended and operation.collect_result(path):
                return operation.pieces
        finally:
            operation.close_socket()
            if not child.exited.done() and not channel.is_closed:
                # Its end, for which nothing waits, comes when the kernel lets it.
                with suppress(SandboxError):  # the sandbox is gone, and the child with it
                    await run_shielded(channel.request("kill_tree", pid=child.pid))
        if is_relieved:
            # Not the payload: it is gone. Had something of it survived, `_kill_payload` would have raised.
            fault = "do not end" if not ended else "are killed"
            raise SandboxError(
                FailureKind.SANDBOX_UNAVAILABLE,
                f"file operations of a sandbox in which nothing runs {fault}.",
                "Look at the node's disks and memory.",
            )
        is_relieved = await _kill_payload(channel)  # it was killed: by the payload, or for memory that the payload took


async def _kill_payload(channel: GuestChannel) -> bool:
    """Kill what runs in the sandbox, except file operations; ``True``: it is gone."""
    if (await channel.request("kill_payload")).fields["gone"]:
        return True
    what = "processes that hold up a file operation of the sandbox cannot be ended."
    raise SandboxError.from_evidence(Evidence.SANDBOX_LOST_UNEXPLAINED, what)


class _Operation(Generic[T]):
    """The conversation with a child of the guest that does one operation; ``convert`` gets each piece that it sends."""

    def __init__(
        self, channel: GuestChannel, child: ChildProcess, data: bytes, convert: Callable[[bytes], T], limit: int
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._exited = child.exited
        self._socket = socket.socket(fileno=child.descriptors.pop())
        self._socket.setblocking(False)
        self._data = memoryview(data)
        self._convert = convert
        self._bytes_left = limit
        self._bytes_moved = 0
        self._outcome: bool | OSError = False
        self.pieces: list[T] = []
        self._loop.add_reader(self._socket, self._receive)
        if data:
            self._loop.add_writer(self._socket, self._send)

    async def wait(self, stall_seconds: float) -> bool:
        """Wait for its end, so many seconds and the time for its bytes; whether it has ended."""
        deadline = self._loop.time() + stall_seconds - self._bytes_moved / _MIN_BYTES_PER_SECOND
        while not self._exited.done():
            left = deadline + self._bytes_moved / _MIN_BYTES_PER_SECOND - self._loop.time()
            if left <= 0:
                return False
            await asyncio.wait([self._exited], timeout=left)
        self._exited.result()
        return True

    def collect_result(self, path: str) -> bool:
        """Read the rest of what an ended one sent; ``False``: it was killed before it was done."""
        while self._receive():
            continue
        if isinstance(self._outcome, OSError):
            self._outcome.filename = path
            raise self._outcome
        return self._outcome

    def close_socket(self) -> None:
        """Close the connection. A child that has not ended may go on for as long as the kernel keeps it."""
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()

    def _send(self) -> None:
        try:
            sent = self._socket.send(self._data[:PACKET_BYTES], socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return
        except OSError:  # it has ended, and has sent its reason
            self._data = memoryview(b"")
        else:
            self._data = self._data[sent:]
            self._bytes_moved += sent
        if not self._data:
            self._loop.remove_writer(self._socket)

    def _receive(self) -> bool:
        """Take what is there, up to a turn's worth; whether there may be more."""
        taken = 0
        while taken < _BYTES_PER_TURN:
            try:
                packet = self._socket.recv(1 + PACKET_BYTES)
            except ConnectionResetError:  # once, when it ended without reading everything; what it sent follows
                continue
            except BlockingIOError:
                return False
            if not packet:
                self._loop.remove_reader(self._socket)
                return False
            taken += len(packet)
            self._on_packet(packet[:1], packet[1:])
        self._bytes_moved += taken
        return True

    def _on_packet(self, mark: bytes, body: bytes) -> None:
        if mark == DONE:
            self._outcome = True
        elif mark == FAILED:
            code, words = cast(tuple[int, str], json.loads(body))
            self._outcome = OSError(code, words)
        elif len(body) <= self._bytes_left:
            self._bytes_left -= len(body)
            self.pieces.append(self._convert(body))
        else:  # not the child that we started, which obeys the limit
            self._outcome = OSError(EFBIG, os.strerror(EFBIG))
            self._socket.shutdown(socket.SHUT_RDWR)


def _read_entries(data: bytes) -> list[FileEntry]:
    rows = cast(list[tuple[str, str, int, int]], json.loads(data))
    return [FileEntry(name, kind if kind in _KINDS else "other", size, mode) for name, kind, size, mode in rows]
