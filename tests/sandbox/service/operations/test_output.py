from hypothesis import given
from hypothesis import strategies as st

from prorl_gym.sandbox.service.operations.output_capture import OutputCapture

PIECES = st.lists(st.binary(max_size=40), max_size=12)


@given(PIECES, st.integers(2, 60))
def test_head_and_tail_are_exact(pieces: list[bytes], limit: int) -> None:
    capture = OutputCapture(limit)
    for piece in pieces:
        capture.feed(piece)
    whole = b"".join(pieces)
    head, tail = limit // 2, limit - limit // 2
    assert capture.total_bytes == len(whole)
    if len(whole) <= limit:
        assert capture.pop_bytes() == whole
    else:
        marker = f"\n[... {len(whole) - limit} bytes left out ...]\n".encode()
        assert capture.pop_bytes() == whole[:head] + marker + whole[-tail:]


@given(PIECES, st.integers(2, 60))
def test_memory_is_bounded(pieces: list[bytes], limit: int) -> None:
    capture = OutputCapture(limit)
    for piece in pieces * 5:
        capture.feed(piece)
        assert capture.held_bytes <= 3 * limit + 40


@given(PIECES)
def test_take_starts_anew(pieces: list[bytes]) -> None:
    capture = OutputCapture(10)
    for piece in pieces:
        capture.feed(piece)
    capture.pop_bytes()
    assert (capture.pop_bytes(), capture.total_bytes, capture.dropped_bytes) == (b"", 0, 0)


@given(st.text(max_size=60), st.data())
def test_characters_survive_any_split(text: str, data: st.DataObject) -> None:
    encoded = text.encode()
    capture = OutputCapture(10_000)
    seen = ""
    position = 0
    while position < len(encoded):
        step = data.draw(st.integers(1, 7))
        capture.feed(encoded[position : position + step])
        seen += capture.pop_text(final=False)
        position += step
    seen += capture.pop_text()
    assert seen == text.replace("\r\n", "\n")


@given(st.binary(max_size=60), st.integers(2, 20))
def test_any_bytes_become_text(data: bytes, limit: int) -> None:
    capture = OutputCapture(limit)
    capture.feed(data)
    assert isinstance(capture.pop_text(), str)


def test_a_cut_through_a_character_leaves_no_replacement() -> None:
    capture = OutputCapture(7)  # 3 + 4 bytes: both cuts go through an e-acute
    capture.feed(("é" * 10).encode())
    assert capture.pop_text() == "é\n[... 13 bytes left out ...]\néé"


def test_undecodable_bytes_are_replaced() -> None:
    capture = OutputCapture(100)
    capture.feed(b"a\xffb\r\nc\r")
    assert capture.pop_text() == "a\ufffdb\nc\r"


def test_an_undecodable_end_is_not_held_back_for_ever() -> None:
    capture = OutputCapture(100)
    capture.feed(b"ab\xe2\x82")
    assert capture.pop_text(final=False) == "ab"
    assert capture.pop_text(final=True) == "\ufffd"
