"""Memory of the sockets in this network namespace, sockets that are in flight themselves among them (sock_diag(7))."""

import os
import socket
import struct

_SOCK_DIAG = 4
_BY_FAMILY = 20
_REQUEST, _DUMP = 1, 0x300
_DONE, _ERROR = 3, 2
_HEADER = struct.Struct("=IHHII")
_EVERY_STATE = 0xFFFFFFFF
_ATTRIBUTE = struct.Struct("=HH")
_MEMORY = struct.Struct("=8I")
"""struct sk_meminfo: received, its bound, sent, its bound, set aside, waiting to be sent, options, backlog."""
_UNIX_MEMORY, _INET_MEMORY = 5, 7
_PROTOCOLS = (socket.IPPROTO_TCP, socket.IPPROTO_UDP)
_RECEIVE = 1 << 18


_NUMBER = b"sockets: used "


class SocketMemory:
    """Asks the kernel for the memory of all sockets. Of a family for which it has no answer, it counts nothing.

    Most sandboxes have no sockets: then one line of ``/proc/net/sockstat``, which counts those in flight too, is all
    that is read.

    Args:
        proc_fd: descriptor of a procfs that shows this process.
    """

    def __init__(self, proc_fd: int) -> None:
        self._proc_fd = proc_fd
        self._socket: socket.socket | None = None
        self._own = self._number()
        # Families whose question the kernel answers with an error are not asked about again.
        self._questions = [(_unix_question(), 16, _UNIX_MEMORY)]
        for family in (socket.AF_INET, socket.AF_INET6):
            self._questions += [(_inet_question(family, protocol), 72, _INET_MEMORY) for protocol in _PROTOCOLS]

    def __call__(self) -> int:
        """Return bytes."""
        if self._own is not None and self._number() == self._own + (self._socket is not None):
            return 0
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG)
                self._socket.settimeout(1)
            found = 0
            for question in list(self._questions):
                amount = self._ask(*question)
                if amount is None:
                    self._questions.remove(question)
                else:
                    found += amount
            return found
        except OSError:  # an answer that was cut, or none at all: the next look asks afresh
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            return 0

    def _number(self) -> int | None:
        """Return the number of sockets in this network namespace, where the kernel tells."""
        try:
            fd = os.open("self/net/sockstat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc_fd)
        except OSError:
            return None
        try:
            line = os.read(fd, 64).partition(b"\n")[0]
        finally:
            os.close(fd)
        return int(line[len(_NUMBER) :]) if line.startswith(_NUMBER) else None

    def _ask(self, body: bytes, skipped: int, wanted: int) -> int | None:
        assert self._socket is not None
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST | _DUMP, 0, 0) + body)
        found = 0
        while True:
            data = self._socket.recv(_RECEIVE)
            at = 0
            while at + _HEADER.size <= len(data):
                length, kind, *_ = _HEADER.unpack_from(data, at)
                if kind == _DONE:
                    return found
                if kind == _ERROR:
                    return None
                found += _read(data[at + _HEADER.size + skipped : at + length], wanted)
                at += -(-length // 4) * 4


def _unix_question() -> bytes:
    show_memory = 0x20
    return struct.pack("=BBHIII8s", socket.AF_UNIX, 0, 0, _EVERY_STATE, 0, show_memory, b"\xff" * 8)


def _inet_question(family: int, protocol: int) -> bytes:
    return struct.pack("=BBBxI48s", family, protocol, 1 << (_INET_MEMORY - 1), _EVERY_STATE, bytes(48))


def _read(attributes: bytes, wanted: int) -> int:
    at = 0
    while at + _ATTRIBUTE.size <= len(attributes):
        length, kind = _ATTRIBUTE.unpack_from(attributes, at)
        if kind == wanted:
            received, _, sent, _, set_aside, waiting, options, backlog = _MEMORY.unpack_from(attributes, at + 4)
            return received + max(sent, waiting) + set_aside + options + backlog
        at += max(4, -(-length // 4) * 4)
    return 0
