"""The messages between service and guest: one JSON object per packet, with its descriptors (SCM_RIGHTS).

Service to guest: ``{"id", "op", ...}``. Guest to service: ``{"type": "hello"}`` once, then ``{"type": "reply", "id",
...}`` per request, ``{"type": "exit", "pid", "status", "struck", "sent"}`` per child that ended (see
``KillMonitor.remove_child``), ``{"type": "breach", "pid", "breach"}`` for a limit that a child was seen to run into
(before its end is reported), ``{"type": "disk", "full"}`` when a root on disk becomes full or has room again, or
``{"type": "failed", "kind", "what", "fix"}`` when the sandbox could not be set up.

Service and spawner exchange packets of the same form; their messages are described in ``spawner/spawner.py``.
"""

import json
import os
import socket
from array import array
from collections.abc import Sequence
from typing import Any

MAX_REQUEST = 100_000
"""Bytes of one request. Socket buffers are ~200 kB, and the kernel refuses longer packets with EMSGSIZE."""
MAX_PACKET = 192 << 10
"""Bytes that a receiver makes room for, below the default send buffer; a longer packet is a broken peer."""
MAX_DESCRIPTORS = 16


class ChildStartError(OSError):
    """A child could not be started. ``stage``: ``cwd``, ``confine``, ``exec``, or ``template`` (no fork of one)."""

    def __init__(self, code: int, stage: str, message: str = "") -> None:
        super().__init__(code, message or os.strerror(code))
        self.stage = stage


class PacketError(Exception):
    """The peer sent something that is not a message."""


def encode_packet(message: dict[str, Any]) -> bytes:
    """Return the packet of a message (ASCII: lone surrogates of undecodable file names survive)."""
    return json.dumps(message, separators=(",", ":")).encode("ascii")


def send_packet(sock: socket.socket, packet: bytes, descriptors: Sequence[int] = ()) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    sock.sendmsg([packet], rights, socket.MSG_NOSIGNAL)


def receive_descriptors(sock: socket.socket, flags: int = 0) -> tuple[bytes, list[int], int]:
    """Return data, descriptors (close-on-exec) and flags of a message; ``socket.recv_fds`` does not pass flags on."""
    descriptors = array("i")
    size = descriptors.itemsize
    control = socket.CMSG_SPACE(MAX_DESCRIPTORS * size)
    data, ancillary, flags, _ = sock.recvmsg(MAX_PACKET, control, flags | socket.MSG_CMSG_CLOEXEC)
    for level, kind, rights in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(rights[: len(rights) // size * size])
    return data, list(descriptors), flags


def receive_packet(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive one message with its descriptors (close-on-exec); ``None`` when the peer is gone.

    Raises ``PacketError`` for what is not a whole JSON object (descriptors that came with it are closed), and
    ``BlockingIOError`` when there is nothing on a non-blocking socket.
    """
    packet, descriptors, flags = receive_descriptors(sock)
    if not packet:
        return None
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise PacketError("packet too long")
        message = json.loads(packet)
        if not isinstance(message, dict):
            raise PacketError("not a JSON object")
    except (ValueError, RecursionError, PacketError) as error:
        for descriptor in descriptors:
            socket.close(descriptor)
        raise PacketError(str(error)) from None
    return message, descriptors  # pyright: ignore[reportUnknownVariableType]


def try_receive_packet(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive one message; ``None`` also when the connection is broken, or what came is no message."""
    try:
        return receive_packet(sock)
    except (OSError, PacketError):
        return None
