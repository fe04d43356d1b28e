"""The messages between service and guest: one JSON object per packet, descriptors beside it (SCM_RIGHTS).

Service to guest: ``{"id", "op", ...}``. Guest to service: ``{"type": "hello"}`` once, then ``{"type": "reply", "id",
...}`` per request, ``{"type": "exit", "pid", "status", "struck", "sent"}`` per child that ended (see
``SigkillMonitor.remove_child``), ``{"type": "breach", "pid", "breach"}`` for a limit that a child was seen to run into
(before its end is reported), ``{"type": "disk", "full"}`` when a root on disk becomes full or has room again, or
``{"type": "failed", "kind", "what", "fix"}`` when the sandbox could not be set up.

Service and spawner exchange packets of the same form; their messages are described in ``spawner/spawner.py``.
"""

import json
import socket
from array import array
from collections.abc import Sequence
from typing import Any

MAX_REQUEST = 100_000
"""Bytes of one request. Socket buffers are ~200 kB, and the kernel refuses longer packets with EMSGSIZE."""
MAX_PACKET = 192 << 10
"""Bytes that a receiver makes room for, below the default send buffer; a longer packet is a broken peer."""
MAX_DESCRIPTORS = 16


class PacketError(Exception):
    """The peer sent something that is not a message."""


def encode_packet(message: dict[str, Any]) -> bytes:
    """Return the packet of a message (ASCII: lone surrogates of undecodable file names survive)."""
    return json.dumps(message, separators=(",", ":")).encode("ascii")


def send_packet(sock: socket.socket, packet: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send one packet. Raises ``OSError`` as ``sendmsg``."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    sock.sendmsg([packet], rights, socket.MSG_NOSIGNAL)


def receive_packet(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive one message with its descriptors (close-on-exec); ``None`` when the peer is gone.

    Raises:
        PacketError: not a whole JSON object. Descriptors that came with it are closed.
        BlockingIOError: nothing there (on a non-blocking socket).
    """
    packet, descriptors, flags, _ = socket.recv_fds(sock, MAX_PACKET, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
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
