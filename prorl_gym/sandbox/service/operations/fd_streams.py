"""Pipes on the event loop: readers, a writer and bounded captures of output; nothing blocks and nothing is polled."""

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
_CONTINUATION = bytes(range(0x80, 0xC0))
"""Bytes of a UTF-8 character after its first."""


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
    """Reads a descriptor, which it owns, into ``on_data`` until end of file or ``close``."""

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
        if self._fd >= 0:
            self._unwatch()
            os.close(self._fd)
            self._fd = -1

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self._fd)


class FdWriter:
    """Writes bytes to a descriptor as it takes them; one that it owns is closed once all is written."""

    def __init__(self, fd: int, data: bytes = b"", *, owns_fd: bool) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._owns_fd = owns_fd
        self._pending = memoryview(data)
        self._loop = asyncio.get_running_loop()
        self._flush()

    def write(self, data: bytes) -> None:
        self._pending = memoryview(bytes(self._pending) + data)
        self._flush()

    def discard_pending(self) -> None:
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


class OutputCapture:
    """Keeps ``limit`` bytes of any number, half from the start and half from the end, in bounded memory."""

    def __init__(self, limit: int) -> None:
        self._head_limit = max(limit, 2) // 2
        self._tail_limit = max(limit, 2) - self._head_limit
        self._head = bytearray()
        self._tail = bytearray()
        self.total_bytes = 0
        """Bytes that came since the last ``pop_bytes``."""

    @property
    def dropped_bytes(self) -> int:
        """Bytes that were dropped since the last ``pop_bytes``."""
        return max(0, self.total_bytes - self._head_limit - self._tail_limit)

    @property
    def held_bytes(self) -> int:
        return len(self._head) + len(self._tail)

    def feed(self, data: bytes) -> None:
        self.total_bytes += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if len(data) >= self._tail_limit:
            self._tail[:] = data[-self._tail_limit :]
        elif data:
            self._tail += data
            if len(self._tail) > 2 * self._tail_limit:  # now and then, so that many small pieces stay cheap
                del self._tail[: -self._tail_limit]

    def pop_bytes(self) -> bytes:
        """Return the bytes that were kept, with the marker where something is missing, and start again."""
        head, tail, left_out = self._pop_parts()
        return head + (_marker(left_out).encode() if left_out else b"") + tail

    def pop_text(self, *, final: bool = True) -> str:
        r"""Return it decoded, undecodable bytes replaced, ``\r\n`` folded to ``\n``, and start again.

        Unless it is ``final``, a character that is not complete yet is kept for the next time.
        """
        head, tail, left_out = self._pop_parts()
        if left_out:
            # The cut may have gone through a character: its halves belong to what was left out.
            head = head[: len(head) - _incomplete_suffix(head)]
            tail = tail[:3].lstrip(_CONTINUATION) + tail[3:]
        if not final:
            last = tail or head
            keep = 1 if last.endswith(b"\r") else _incomplete_suffix(last)
            if keep:
                self.feed(last[-keep:])
                if tail:
                    tail = tail[:-keep]
                else:
                    head = head[:-keep]
        if not left_out:
            return _decode(head + tail)
        return _decode(head) + _marker(left_out) + _decode(tail)

    def _pop_parts(self) -> tuple[bytes, bytes, int]:
        left_out = self.dropped_bytes
        head, tail = bytes(self._head), bytes(self._tail[-self._tail_limit :])
        self._head.clear()
        self._tail.clear()
        self.total_bytes = 0
        return head, tail, left_out


def _marker(left_out: int) -> str:
    return f"\n[... {left_out} bytes left out ...]\n"


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "replace").replace("\r\n", "\n")


def _incomplete_suffix(data: bytes) -> int:
    """Length of a UTF-8 character at the end that lacks bytes; 0 when there is none."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte in _CONTINUATION:
            continue
        length = 2 if byte >> 5 == 0b110 else 3 if byte >> 4 == 0b1110 else 4 if byte >> 3 == 0b11110 else 1
        return back if length > back else 0
    return 0
