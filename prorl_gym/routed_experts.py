"""Which experts of a mixture each token met, for router replay (R3): read from what engines return, joined over calls.

An engine reports the experts of a whole call, one row per token of prompt and answer. The token that was sampled last
has no row, or one that is padding: the model has not run it yet. A sequence that took several calls gets for each token
the row of the call that ran it first, since the tokens after it were sampled with that one.

Forms that are read: base64 of an ``.npy`` file (vLLM), ``nrlre1:DTYPE:TOKENSxLAYERSxTOP_K:BASE64`` (NeMo-RL's server),
base64 of int32 values whose layers are not reported (SGLang), and nested lists.
"""

import ast
from array import array
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, cast

# pyright: reportUnknownMemberType=false

if TYPE_CHECKING:
    from numpy.typing import NDArray

Call = tuple[int, Any]
"""Length of the sequence after one call, and what the engine returned with it."""

_NEMO_RL = "nrlre1"
_NPY = b"\x93NUMPY"
_DTYPES = {"|u1": "uint8", "|i1": "int8", "<u2": "uint16", "<i2": "int16", "<i4": "int32"}
_CODES = {"uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "int32": "i"}
_SIGNED = {"uint8": "int16", "uint16": "int32"}
"""Types that NeMo-RL reads, in place of those that it does not."""


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Indices of experts: ``tokens`` rows of ``row_shape`` values, little-endian, in C order."""

    dtype: str
    row_shape: tuple[int, ...]
    """(layers, experts per token), or their product alone where the engine does not report them."""
    data: bytes

    @property
    def code(self) -> str:
        """Type code of one value, as ``struct`` spells it."""
        return _CODES[self.dtype]

    @property
    def item_bytes(self) -> int:
        return array(self.code).itemsize

    @property
    def row_bytes(self) -> int:
        return self.item_bytes * prod(self.row_shape)

    @property
    def tokens(self) -> int:
        return len(self.data) // self.row_bytes

    def rows(self, start: int, end: int) -> bytes:
        return self.data[start * self.row_bytes : end * self.row_bytes]

    def padded(self, tokens: int) -> "RoutedExperts":
        """Return it with exactly so many rows; those that no call reported name the first experts of each layer."""
        choices = self.row_shape[-1]
        row = array(self.code, list(range(choices)) * prod(self.row_shape[:-1])).tobytes()
        return replace(self, data=self.rows(0, tokens) + row * max(0, tokens - self.tokens))

    def to_numpy(self, row_shape: tuple[int, int] | None = None) -> "NDArray[Any]":
        """Return an array of (tokens, layers, experts per token); SGLang does not report the latter two."""
        import numpy as np

        return np.frombuffer(self.data, dtype=np.dtype(self.dtype)).reshape(-1, *(row_shape or self.row_shape))


def join_routed_experts(calls: Sequence[Call]) -> RoutedExperts | None:
    """Return the experts of a sequence, from its first token; ``None`` where a call did not report them all."""
    joined: RoutedExperts | None = None
    data, done = bytearray(), 0
    for position, (end, value) in enumerate(calls, 1):
        found = parse_routed_experts(value, end)
        if found is None or found.tokens < end - 1 or (joined and replace(found, data=b"") != joined):
            return None
        joined = replace(found, data=b"")
        upto = min(found.tokens, end) if position == len(calls) else end - 1
        data += found.rows(done, upto)
        done = upto
    return None if joined is None else replace(joined, data=bytes(data))


def parse_routed_experts(value: object, tokens: int) -> RoutedExperts | None:
    """Read what an engine returned with one call of so many tokens, prompt and answer; ``None``: no known form."""
    try:
        if isinstance(value, list):
            found = _from_lists(cast("list[Any]", value))
        elif isinstance(value, str):
            found = _from_nemo_rl(value) if value.startswith(_NEMO_RL) else _from_bytes(b64decode(value), tokens)
        else:
            return None
    except (ValueError, TypeError, KeyError, IndexError, SyntaxError, OverflowError):
        return None
    return found if found.row_bytes and found.data and len(found.data) % found.row_bytes == 0 else None


def to_nemo_rl(calls: Sequence[Call], tokens: int) -> Any:
    """Return the experts of one turn in NeMo-RL's form, with a row for each token, as it requires.

    What a single call returned in an unknown form is returned unchanged; of several such calls, ``None``.
    """
    if len(calls) == 1 and isinstance(calls[0][1], str) and calls[0][1].startswith(_NEMO_RL):
        return calls[0][1]  # complete by that server's promise; re-encoding costs megabytes
    found = join_routed_experts(calls)
    if found is None or len(found.row_shape) != 2:
        return calls[0][1] if len(calls) == 1 else None
    # The padding is NeMo-RL's own; it replaces the row of a turn's last token by that of the next prompt.
    whole = _signed(found.padded(tokens))
    shape = "x".join(map(str, (tokens, *whole.row_shape)))
    return f"{_NEMO_RL}:{whole.dtype}:{shape}:{b64encode(whole.data).decode()}"


def _from_lists(rows: list[Any]) -> RoutedExperts:
    layers, choices = len(rows[0]), len(rows[0][0])
    if any(len(row) != layers or any(len(layer) != choices for layer in row) for row in rows):
        raise ValueError("the rows differ in shape")
    values = array("i", chain.from_iterable(chain.from_iterable(rows)))
    if min(values) < 0:
        raise ValueError("an expert is negative")
    return RoutedExperts("int32", (layers, choices), values.tobytes())


def _from_nemo_rl(text: str) -> RoutedExperts:
    _, dtype, shape, data = text.split(":", 3)
    tokens, *row_shape = (int(size) for size in shape.split("x"))
    return _checked(RoutedExperts(dtype, tuple(row_shape), b64decode(data)), tokens)


def _from_bytes(data: bytes, tokens: int) -> RoutedExperts:
    if not data.startswith(_NPY):
        values = len(data) // 4
        if tokens < 2 or values % (tokens - 1):
            raise ValueError("the values do not divide into rows")
        return _checked(RoutedExperts("int32", (values // (tokens - 1),), data), tokens - 1)
    start = 10 if data[6] == 1 else 12
    end = start + int.from_bytes(data[8:start], "little")
    header: dict[str, Any] = ast.literal_eval(data[start:end].decode("latin1"))
    if header["fortran_order"]:
        raise ValueError("the file is in Fortran's order")
    rows, *row_shape = header["shape"]
    return _checked(RoutedExperts(_DTYPES[header["descr"]], tuple(row_shape), data[end:]), rows)


def _checked(found: RoutedExperts, tokens: int) -> RoutedExperts:
    if len(found.data) != tokens * found.row_bytes:
        raise ValueError("the data do not have the size that they declare")
    return found


def _signed(found: RoutedExperts) -> RoutedExperts:
    """Widen an unsigned type, which NeMo-RL does not read."""
    if found.dtype not in _SIGNED:
        return found
    narrow = found.item_bytes
    wide = bytearray(2 * len(found.data))
    for byte in range(narrow):
        wide[byte :: 2 * narrow] = found.data[byte::narrow]
    return RoutedExperts(_SIGNED[found.dtype], found.row_shape, bytes(wide))
