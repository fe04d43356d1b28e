from hypothesis import given
from hypothesis import strategies as st

from prorl_gym.sandbox.output import Capture

PIECES = st.lists(st.binary(max_size=40), max_size=12)


@given(PIECES, st.integers(2, 60))
def test_head_and_tail_are_exact(pieces: list[bytes], limit: int) -> None:
    capture = Capture(limit)
    for piece in pieces:
        capture.feed(piece)
    whole = b"".join(pieces)
    head, tail = limit // 2, limit - limit // 2
    assert capture.total == len(whole)
    if len(whole) <= limit:
        assert capture.take() == whole
    else:
        marker = f"\n[... {len(whole) - limit} bytes left out ...]\n".encode()
        assert capture.take() == whole[:head] + marker + whole[-tail:]


@given(PIECES, st.integers(2, 60))
def test_memory_is_bounded(pieces: list[bytes], limit: int) -> None:
    capture = Capture(limit)
    for piece in pieces * 5:
        capture.feed(piece)
        assert len(capture._head) + len(capture._tail) <= 3 * limit + 40  # pyright: ignore[reportPrivateUsage]


@given(PIECES)
def test_take_starts_anew(pieces: list[bytes]) -> None:
    capture = Capture(10)
    for piece in pieces:
        capture.feed(piece)
    capture.take()
    assert (capture.take(), capture.total, capture.left_out) == (b"", 0, 0)


@given(st.text(max_size=60), st.data())
def test_characters_survive_any_split(text: str, data: st.DataObject) -> None:
    encoded = text.encode()
    capture = Capture(10_000)
    seen = ""
    position = 0
    while position < len(encoded):
        step = data.draw(st.integers(1, 7))
        capture.feed(encoded[position : position + step])
        seen += capture.take_text(final=False)
        position += step
    seen += capture.take_text()
    assert seen == text.replace("\r\n", "\n")


@given(st.binary(max_size=60), st.integers(2, 20))
def test_any_bytes_become_text(data: bytes, limit: int) -> None:
    capture = Capture(limit)
    capture.feed(data)
    assert isinstance(capture.take_text(), str)


def test_a_cut_through_a_character_leaves_no_replacement() -> None:
    capture = Capture(7)  # 3 + 4 bytes: both cuts go through an e-acute
    capture.feed(("é" * 10).encode())
    assert capture.take_text() == "é\n[... 13 bytes left out ...]\néé"


def test_undecodable_bytes_are_replaced() -> None:
    capture = Capture(100)
    capture.feed(b"a\xffb\r\nc\r")
    assert capture.take_text() == "a\ufffdb\nc\r"


def test_an_undecodable_end_is_not_held_back_for_ever() -> None:
    capture = Capture(100)
    capture.feed(b"ab\xe2\x82")
    assert capture.take_text(final=False) == "ab"
    assert capture.take_text(final=True) == "\ufffd"
