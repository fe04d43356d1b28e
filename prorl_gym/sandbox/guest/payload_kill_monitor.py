"""Notices every SIGKILL that is sent inside, before it is sent: an end by SIGKILL is then known to be the payload's.

The filter of system calls (``seccomp``) stops the sender until the guest has noted it and continues the call. A
kernel that cannot do that leaves ends by SIGKILL unexplained, as they are seen from outside.
"""

import fcntl
import os
import socket
import struct
from collections.abc import Collection

from prorl_gym.sandbox.guest.process_table import ProcessTable
from prorl_gym.sandbox.guest.seccomp import SignalTarget, is_mmap, signal_target
from prorl_gym.sandbox.guest.shared_memory import SharedMemoryAccount

_RECEIVE = 0xC0502100
"""SECCOMP_IOCTL_NOTIF_RECV"""
_ANSWER = 0xC0182101
"""SECCOMP_IOCTL_NOTIF_SEND"""
_CONTINUE = 1
_CONTROL_BYTES = socket.CMSG_SPACE(struct.calcsize("=i"))
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
"""struct seccomp_notif: id, pid, flags, number, machine, instruction pointer, arguments."""


def send_listener(guest_fd: int, listener: int) -> None:
    """Give the guest the listener of this process's filter, in a child between fork and exec."""
    with socket.socket(fileno=os.dup(guest_fd)) as sock:
        socket.send_fds(sock, [b"+"], [listener])
    os.close(listener)


def receive_report(sock: socket.socket, *, wait: bool) -> tuple[bytes, int | None]:
    """Return what a child wrote, until its exec closes the socket if ``wait``, and the listener it handed over."""
    written, listener = b"", None
    flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
    while True:
        try:
            data, ancillary, _, _ = sock.recvmsg(64, _CONTROL_BYTES, flags)  # recv_fds does not pass flags on
        except BlockingIOError:
            return written, listener
        for _, _, descriptor in ancillary:
            (listener,) = struct.unpack("=i", descriptor)
        if not data:
            return written.removeprefix(b"+"), listener
        written += data


class SigkillMonitor:
    """Records which of the guest's children were sent SIGKILL, and which sent one.

    Args:
        table: the process table.
        children: pids of the guest's own children.
        shared_memory: handles the notifications of shared memory.
    """

    def __init__(
        self, table: ProcessTable, children: Collection[int], shared_memory: SharedMemoryAccount | None = None
    ) -> None:
        self._table = table
        self._children = children
        self._shared_memory = shared_memory
        self._filtered: set[int] = set()
        self._killed: set[int] = set()
        self._senders: set[int] = set()

    def register_child(self, child: int) -> None:
        """Note that a child has such a filter."""
        self._filtered.add(child)

    def mark_killed(self, child: int) -> None:
        """Note that a child is killed on request."""
        self._killed.add(child)

    def handle_notification(self, listener: int) -> None:
        """Handle one notification; a SIGKILL continues once it is recorded."""
        notice = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, notice)
            number, sender, _, call, machine, _, *arguments = _NOTIFICATION.unpack(notice)
            target = signal_target(machine, call)
            if target is None and self._shared_memory is not None:
                self._shared_memory.answer_notification(
                    listener, number, sender, is_mmap=is_mmap(machine, call), arguments=arguments
                )
                return
            self._record_sigkill(sender, target, arguments)
            fcntl.ioctl(listener, _ANSWER, struct.pack("=QqiI", number, 0, 0, _CONTINUE))
        except OSError:  # the sender has ended
            return

    def remove_child(self, child: int) -> tuple[bool | None, bool | None]:
        """Return whether SIGKILL was sent to a child that ended, and by anything below it; ``None``: not known."""
        watched = child in self._filtered
        struck, sent = child in self._killed, child in self._senders
        for children in (self._filtered, self._killed, self._senders):
            children.discard(child)
        return (struck, sent) if watched else (struck or None, None)

    def _record_sigkill(self, sender: int, target: SignalTarget | None, arguments: list[int]) -> None:
        owner = self._top_level_child(sender)
        self._senders |= {owner} if owner is not None else set(self._children)
        number = struct.unpack("=i", struct.pack("=I", arguments[0] & 0xFFFFFFFF))[0]
        if target == "descriptor":
            number = self._table.read_pidfd_target(sender, number)
        if number == 0 and target == "process":
            group = self._table.read_process_group(sender)
            self._killed |= {child for child in self._children if child == group}
        elif number in (0, -1):  # to all, or to an unknown target
            self._killed |= set(self._children)
        else:
            self._killed |= {child for child in self._children if self._table.read_inner_pid(child) == abs(number)}
            if target == "thread" and owner is not None:  # one of its own, mostly
                self._killed.add(owner)

    def _top_level_child(self, pid: int) -> int | None:
        """Return the child of the guest that a process is, or is below."""
        while pid not in self._children:
            process = self._table.find(pid)
            if process is None or process.parent <= 0:
                return None
            pid = process.parent
        return pid
