"""Pipes on the event loop: readers that capture, a writer that feeds; nothing blocks and nothing is polled."""

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress

_CHUNK = 1 << 16
_TURN = 1 << 16
"""Bytes moved before other tasks get a turn."""
_PIPE = 1 << 20
"""The most that can still be in a pipe after its writer ended."""


def write_aside(fd: int, data: bytes) -> "asyncio.Future[bool]":
    """Replace the beginning of a file in a thread of its own, and set its position there; whether that worked.

    For a file that a payload can open, too: it can hold the file's lock, and the thread then waits for as long as it
    likes. The thread has a duplicate of the descriptor, ends with the process, and is one per file at a time.
    """
    loop = asyncio.get_running_loop()
    written: asyncio.Future[bool] = loop.create_future()
    own = os.dup(fd)

    def write() -> None:
        try:
            worked = os.pwrite(own, data, 0) == len(data)
            os.lseek(own, 0, os.SEEK_SET)
        except OSError:
            worked = False
        finally:
            os.close(own)
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(lambda: written.cancelled() or written.set_result(worked))

    threading.Thread(target=write, name="command-text", daemon=True).start()
    return written


class Reader:
    """Reads a descriptor into ``sink`` until end of file or ``close``. Owns the descriptor.

    Args:
        fd: a pipe, a terminal master or a socket.
        sink: gets the bytes, on the loop.
    """

    def __init__(self, fd: int, sink: Callable[[bytes], None]) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._watched = True
        self._loop.add_reader(fd, self._read, _TURN)

    def drain(self) -> None:
        """Read what is there now. A reader that was drained after its writer's end has seen everything."""
        self._read(_PIPE)

    def _read(self, most: int) -> None:
        done = 0
        while self._fd >= 0 and done < most:
            try:
                data = os.read(self._fd, _CHUNK)
            except BlockingIOError:
                return
            except OSError:  # a terminal whose other side is closed says EIO
                data = b""
            if not data:
                return self._unwatch()
            done += len(data)
            self._sink(data)

    def close(self) -> None:
        """Stop and close the descriptor. Idempotent."""
        if self._fd >= 0:
            self._unwatch()
            os.close(self._fd)
            self._fd = -1

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            self._loop.remove_reader(self._fd)


class Writer:
    """Writes bytes to a descriptor as it takes them.

    Args:
        fd: a pipe or a terminal master.
        own: close ``fd`` once everything is written (or nobody reads it any more).
    """

    def __init__(self, fd: int, data: bytes = b"", *, own: bool) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._own = own
        self._data = memoryview(data)
        self._loop = asyncio.get_running_loop()
        self._push()

    def write(self, data: bytes) -> None:
        """Add to what is to be written."""
        self._data = memoryview(bytes(self._data) + data)
        self._push()

    def drop(self) -> None:
        """Forget what was not written yet."""
        self._data = memoryview(b"")
        if self._fd >= 0:
            self._loop.remove_writer(self._fd)

    def close(self) -> None:
        """Stop; close the descriptor when it is owned. Idempotent."""
        self.drop()
        if self._fd >= 0 and self._own:
            os.close(self._fd)
        self._fd = -1

    def _push(self) -> None:
        done = 0
        while self._data and self._fd >= 0:
            try:
                if done >= _TURN:
                    raise BlockingIOError
                count = os.write(self._fd, self._data[:_CHUNK])
            except BlockingIOError:
                self._loop.add_writer(self._fd, self._push)
                return
            except OSError:  # nobody reads: what is left has no taker
                break
            self._data = self._data[count:]
            done += count
        if self._own:
            self.close()
        else:
            self.drop()
