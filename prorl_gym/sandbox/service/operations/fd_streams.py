"""Pipes on the event loop: readers that capture, a writer that feeds; nothing blocks and nothing is polled."""

import _thread
import asyncio
import os
from collections.abc import Callable
from contextlib import suppress

_CHUNK = 1 << 16
_BYTES_PER_TURN = 1 << 16
"""Bytes moved before other tasks get a turn."""
_MAX_PIPE_BYTES = 1 << 20
"""The most that can still be in a pipe after its writer ended."""


def write_in_thread(fd: int, data: bytes) -> "asyncio.Future[bool]":
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
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(lambda: written.cancelled() or written.set_result(worked))

    _thread.start_new_thread(write, ())  # ``threading`` would wait here until it has begun
    return written


class FdReader:
    """Reads a descriptor into ``on_data`` until end of file or ``close``. Owns the descriptor.

    Args:
        fd: a pipe, a terminal master or a socket.
        on_data: gets the bytes, on the loop.
    """

    def __init__(self, fd: int, on_data: Callable[[bytes], None]) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._on_data = on_data
        self._loop = asyncio.get_running_loop()
        self._is_watched = True
        self._loop.add_reader(fd, self._read, _BYTES_PER_TURN)

    def drain(self) -> None:
        """Read what is there now. A reader that was drained after its writer's end has seen everything."""
        self._read(_MAX_PIPE_BYTES)

    def _read(self, most: int) -> None:
        done = 0
        while self._fd >= 0 and done < most:
            try:
                data = os.read(self._fd, _CHUNK)
            except BlockingIOError:
                return
            except OSError:  # a terminal whose other side is closed gives EIO
                data = b""
            if not data:
                return self._unwatch()
            done += len(data)
            self._on_data(data)

    def close(self) -> None:
        """Stop and close the descriptor. Idempotent."""
        if self._fd >= 0:
            self._unwatch()
            os.close(self._fd)
            self._fd = -1

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self._fd)


class FdWriter:
    """Writes bytes to a descriptor as it takes them.

    Args:
        fd: a pipe or a terminal master.
        owns_fd: close ``fd`` once everything is written (or its reader is gone).
    """

    def __init__(self, fd: int, data: bytes = b"", *, owns_fd: bool) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._owns_fd = owns_fd
        self._pending = memoryview(data)
        self._loop = asyncio.get_running_loop()
        self._flush()

    def write(self, data: bytes) -> None:
        """Add to what is to be written."""
        self._pending = memoryview(bytes(self._pending) + data)
        self._flush()

    def discard_pending(self) -> None:
        """Forget what was not written yet."""
        self._pending = memoryview(b"")
        if self._fd >= 0:
            self._loop.remove_writer(self._fd)

    def close(self) -> None:
        """Stop; close the descriptor when it is owned. Idempotent."""
        self.discard_pending()
        if self._fd >= 0 and self._owns_fd:
            os.close(self._fd)
        self._fd = -1

    def _flush(self) -> None:
        done = 0
        while self._pending and self._fd >= 0:
            try:
                if done >= _BYTES_PER_TURN:
                    raise BlockingIOError
                count = os.write(self._fd, self._pending[:_CHUNK])
            except BlockingIOError:
                self._loop.add_writer(self._fd, self._flush)
                return
            except OSError:  # the reader is gone
                break
            self._pending = self._pending[count:]
            done += count
        if self._owns_fd:
            self.close()
        else:
            self.discard_pending()
