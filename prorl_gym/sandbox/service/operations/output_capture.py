"""Bounded output: head and tail are kept, a marker states how much was left out."""

_CONTINUATION = range(0x80, 0xC0)


class OutputCapture:
    """Collects any number of bytes. Memory is bounded by about twice the limit.

    Args:
        limit: bytes to keep; half from the start, half from the end.
    """

    def __init__(self, limit: int) -> None:
        self._head_limit = max(limit, 2) // 2
        self._tail_limit = max(limit, 2) - self._head_limit
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    @property
    def total_bytes(self) -> int:
        """Bytes that came since the last ``pop_bytes``."""
        return self._total

    @property
    def dropped_bytes(self) -> int:
        """Bytes that were dropped since the last ``pop_bytes``."""
        return max(0, self._total - self._head_limit - self._tail_limit)

    @property
    def held_bytes(self) -> int:
        """Bytes in memory."""
        return len(self._head) + len(self._tail)

    def feed(self, data: bytes) -> None:
        """Add what came."""
        self._total += len(data)
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
        """Return what was kept, with the marker where something is missing, and start anew."""
        head, tail, left_out = self._pop_parts()
        return head + (_marker(left_out).encode() if left_out else b"") + tail

    def pop_text(self, *, final: bool = True) -> str:
        r"""Return it decoded, undecodable bytes replaced, ``\r\n`` folded to ``\n``, and start anew.

        Args:
            final: ``False``: more is coming; a character that is not complete yet is kept for the next time.
        """
        head, tail, left_out = self._pop_parts()
        if left_out:
            # The cut may have gone through a character: its halves belong to what was left out.
            head = head[: len(head) - _incomplete_suffix(head)]
            tail = tail[_orphan_prefix(tail) :]
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
        self._total = 0
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


def _orphan_prefix(data: bytes) -> int:
    """Number of continuation bytes at the start, at most three."""
    count = 0
    while count < min(3, len(data)) and data[count] in _CONTINUATION:
        count += 1
    return count
