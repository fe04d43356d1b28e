"""One file operation, in a child of the guest that ends with it.

A payload can make any system call on its files slow: the kernel lets one writer of a file wait for another, for as long
as that one likes (``fallocate`` in many threads). Here it is one process of the same sandbox that waits.

To the child, a file's bytes come in packets. From it: ``DATA`` and bytes of the file or JSON rows of a listing, then
``DONE``, or ``FAILED`` and JSON: an errno and its words. A child that ends without either was killed.
"""

import errno
import json
import os
import resource
import signal
import socket
from collections.abc import Mapping
from typing import Any

from prorl_gym.sandbox.guest.child import FD_LIMIT
from prorl_gym.sandbox.guest.files import Files

DATA, DONE, FAILED = b"+", b"=", b"!"
PIECE = 64 << 10
"""Bytes of one packet, without the mark before them."""
_ROWS = 40
"""Entries of a directory in one packet: a name has up to 255 bytes, each of which JSON may spell in six."""


def transfer(files: Files, request: Mapping[str, Any], connection: socket.socket, *, is_full: bool) -> None:
    """Do what is asked and end this process, which is a fresh child of the guest.

    Args:
        files: opens paths.
        request: ``what`` (``read``, ``write`` or ``list``), ``path``; ``limit`` of a read; ``mode`` and ``size`` of a
            write.
        connection: the service's, of packets.
        is_full: no file may be written: the sandbox's disk is used up.
    """
    try:
        signal.set_wakeup_fd(-1)
        _keep_only(connection)
        try:
            _act(files, request, connection, is_full=is_full)
        except OSError as error:
            _fail(connection, error.errno or errno.EIO, error.strerror or str(error))
        except Exception as error:  # the request makes no sense
            _fail(connection, errno.EINVAL, str(error)[:1000])
        else:
            connection.send(DONE, socket.MSG_NOSIGNAL)
    finally:  # also when the service hung up: an exception must not unwind into the guest's own loop
        os._exit(0)


def _act(files: Files, request: Mapping[str, Any], connection: socket.socket, *, is_full: bool) -> None:
    path = request["path"]
    match request["what"]:
        case "read":
            _read(files.open_read(path), request["limit"], connection)
        case "write":
            if is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _write(files.open_write(path, request["mode"]), request["size"], connection)
        case "list":
            rows = files.list_dir(path)
            for start in range(0, len(rows), _ROWS):
                connection.send(DATA + json.dumps(rows[start : start + _ROWS]).encode("ascii"), socket.MSG_NOSIGNAL)
        case other:
            raise ValueError(f"cannot {other} a file")


def _read(fd: int, limit: int, connection: socket.socket) -> None:
    """Send at most ``limit`` bytes, whatever size the file claims or grows to."""
    if os.fstat(fd).st_size > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes")
    while data := os.read(fd, PIECE):
        limit -= len(data)
        if limit < 0:
            raise OSError(errno.EFBIG, "larger than the limit, and growing")
        connection.send(DATA + data, socket.MSG_NOSIGNAL)


def _write(fd: int, size: int, connection: socket.socket) -> None:
    while size > 0:
        data = memoryview(connection.recv(PIECE))
        if not data:
            raise OSError(errno.ECANCELED, "the service gave up")
        size -= len(data)
        while data:
            try:
                data = data[os.write(fd, data) :]
            except OSError as error:
                # A root on disk is full now: every process of the sandbox may only write files of no size.
                if error.errno == errno.EFBIG and resource.getrlimit(resource.RLIMIT_FSIZE)[0] == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
                raise


def _fail(connection: socket.socket, code: int, words: str) -> None:
    connection.send(FAILED + json.dumps([code, words]).encode("ascii"), socket.MSG_NOSIGNAL)


def _keep_only(connection: socket.socket) -> None:
    """Close what is the guest's: the service must see the end of the guest when the guest ends."""
    number = connection.fileno()
    os.closerange(3, number)
    os.closerange(number + 1, FD_LIMIT)
