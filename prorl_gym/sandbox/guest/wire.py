"""The messages between service and guest: one JSON object per packet, descriptors beside it (SCM_RIGHTS).

Service to guest: ``{"id", "op", ...}``. Guest to service: ``{"type": "hello"}`` once, then ``{"type": "reply", "id",
...}`` per request, ``{"type": "exit", "pid", "status", "struck", "sent"}`` per child that ended (see
``KillWatch.forget``), ``{"type": "breach", "pid", "breach"}`` for a limit that a child was seen to run into (before its
end is told), or ``{"type": "failed", "kind", "what", "fix"}`` when the sandbox could not be set up.
"""

import json
import socket
from array import array
from collections.abc import Sequence
from typing import Any

MAX_REQUEST = 100_000
"""Bytes of one request. Socket buffers are ~200 kB, and the kernel refuses longer packets with EMSGSIZE."""
MAX_PACKET = 160_000
"""Bytes that a receiver makes room for; a longer packet is a broken peer."""
MAX_DESCRIPTORS = 8


class PacketError(Exception):
    """The peer sent something that is not a message."""


def encode(message: dict[str, Any]) -> bytes:
    """Return the packet of a message (ASCII: lone surrogates of undecodable file names survive)."""
    return json.dumps(message, separators=(",", ":")).encode("ascii")


def send(sock: socket.socket, packet: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send one packet. Raises ``OSError`` as ``sendmsg``."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    sock.sendmsg([packet], rights, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
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
