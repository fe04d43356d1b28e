"""Hearing of every SIGKILL that is sent inside, before it is sent: an end by SIGKILL is then known to be the payload's.

The filter of system calls (``seccomp``) stops whoever sends one, until this end has heard of it and lets it go on. A
kernel that cannot do that leaves ends by SIGKILL unexplained, as they are seen from outside.
"""

import fcntl
import os
import socket
import struct
from collections.abc import Collection

from prorl_gym.sandbox.guest.shared_memory import SharedMemory
from prorl_gym.sandbox.guest.tree import ProcessTable
from prorl_gym.sandbox.seccomp import Target, kill_target, makes_mapping

_RECEIVE = 0xC0502100
"""SECCOMP_IOCTL_NOTIF_RECV"""
_ANSWER = 0xC0182101
"""SECCOMP_IOCTL_NOTIF_SEND"""
_CONTINUE = 1
_ROOM = socket.CMSG_SPACE(struct.calcsize("=i"))
_NOTICE = struct.Struct("=QIIiIQ6Q")
"""struct seccomp_notif: id, pid, flags, number, machine, instruction pointer, arguments."""


def hand_over(line: int, listener: int) -> None:
    """Give the guest the listener of this process's filter, in a child between fork and exec."""
    with socket.socket(fileno=os.dup(line)) as sock:
        socket.send_fds(sock, [b"+"], [listener])
    os.close(listener)


def take_over(line: socket.socket, *, wait: bool) -> tuple[bytes, int | None]:
    """Return what a child said, until its exec closes the line if ``wait``, and the listener it handed over."""
    said, listener = b"", None
    flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
    while True:
        try:
            data, ancillary, _, _ = line.recvmsg(64, _ROOM, flags)  # recv_fds does not pass flags on
        except BlockingIOError:
            return said, listener
        for _, _, descriptor in ancillary:
            (listener,) = struct.unpack("=i", descriptor)
        if not data:
            return said.removeprefix(b"+"), listener
        said += data


class KillWatch:
    """What the guest knows about SIGKILL inside its sandbox.

    Args:
        table: the process table.
        children: pids of the guest's own children.
        shared: answers what is asked about shared memory.
    """

    def __init__(self, table: ProcessTable, children: Collection[int], shared: SharedMemory | None = None) -> None:
        self._table = table
        self._children = children
        self._shared = shared
        self._watched: set[int] = set()
        self._struck: set[int] = set()
        self._senders: set[int] = set()

    def watch(self, child: int) -> None:
        """Note that a child has such a filter."""
        self._watched.add(child)

    def explain(self, child: int) -> None:
        """Note that a child is killed on request."""
        self._struck.add(child)

    def serve(self, listener: int) -> None:
        """Answer one question; SIGKILL is let go on once it is known."""
        notice = bytearray(_NOTICE.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, notice)
            number, sender, _, call, machine, _, *arguments = _NOTICE.unpack(notice)
            target = kill_target(machine, call)
            if target is None and self._shared is not None:
                self._shared.answer(
                    listener, number, sender, makes_mapping=makes_mapping(machine, call), call=arguments
                )
                return
            self._note(sender, target, arguments)
            fcntl.ioctl(listener, _ANSWER, struct.pack("=QqiI", number, 0, 0, _CONTINUE))
        except OSError:  # who wanted to send it has ended meanwhile
            return

    def forget(self, child: int) -> tuple[bool | None, bool | None]:
        """Return whether SIGKILL was sent to a child that ended, and by anything below it; ``None``: not known."""
        watched = child in self._watched
        struck, sent = child in self._struck, child in self._senders
        for children in (self._watched, self._struck, self._senders):
            children.discard(child)
        return (struck, sent) if watched else (struck or None, None)

    def _note(self, sender: int, target: Target | None, arguments: list[int]) -> None:
        owner = self._owner(sender)
        self._senders |= {owner} if owner is not None else set(self._children)
        number = struct.unpack("=i", struct.pack("=I", arguments[0] & 0xFFFFFFFF))[0]
        if target == "descriptor":
            number = self._table.process_behind(sender, number)
        if number == 0 and target == "process":
            group = self._table.group(sender)
            self._struck |= {child for child in self._children if child == group}
        elif number in (0, -1):  # of all, or of whom is not known
            self._struck |= set(self._children)
        else:
            self._struck |= {child for child in self._children if self._table.number_inside(child) == abs(number)}
            if target == "thread" and owner is not None:  # one of its own, mostly
                self._struck.add(owner)

    def _owner(self, pid: int) -> int | None:
        """Return the child of the guest that a process is, or is below."""
        while pid not in self._children:
            process = self._table.look(pid)
            if process is None or process.parent <= 0:
                return None
            pid = process.parent
        return pid
