"""Output that is kept, and reports of a shell that end a command."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_gym.sandbox.service.operations.fd_streams import OutputCapture
from prorl_gym.sandbox.service.operations.shell import Completion, ReportParser, TamperedReportError

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


@pytest.mark.parametrize(
    ("limit", "data", "text"),
    [
        (7, ("é" * 10).encode(), "é\n[... 13 bytes left out ...]\néé"),  # 3 + 4 bytes: both cuts go through an e-acute
        (100, b"a\xffb\r\nc\r", "a\ufffdb\nc\r"),
    ],
    ids=["a cut through a character leaves no replacement", "undecodable bytes are replaced"],
)
def test_text_of_bytes(limit: int, data: bytes, text: str) -> None:
    capture = OutputCapture(limit)
    capture.feed(data)
    assert capture.pop_text() == text


def test_an_undecodable_end_is_not_held_back_for_ever() -> None:
    capture = OutputCapture(100)
    capture.feed(b"ab\xe2\x82")
    assert capture.pop_text(final=False) == "ab"
    assert capture.pop_text(final=True) == "\ufffd"


REPORT = b'n1\x003\x00/some where\x00declare -x A="1"\n\x00'


@given(st.lists(st.integers(1, 5), min_size=60, max_size=60))
def test_any_split_gives_one_completion(steps: list[int]) -> None:
    reports = ReportParser()
    reports.expect_nonce("n1")
    completions: list[Completion | None] = []
    position = 0
    for step in steps:
        completions.append(reports.feed(REPORT[position : position + step]))
        position += step
    assert [found for found in completions if found] == [Completion(3, "/some where")]
    assert reports.environment == b'declare -x A="1"\n'


def test_the_environment_may_come_after_the_next_command_began() -> None:
    reports = ReportParser()
    reports.expect_nonce("n1")
    assert reports.feed(b"n1\x000\x00/\x00") == Completion(0, "/")
    reports.expect_nonce("n2")
    assert reports.feed(b"A=1\x00n2\x001\x00/x\x00") == Completion(1, "/x")
    assert reports.environment == b"A=1"


@pytest.mark.parametrize(
    "data",
    [
        b"n2\x000\x00/\x00",  # another nonce
        b"\x000\x00/\x00",
        b"n1\x00\x00/\x00",  # no code
        b"n1\x00256\x00/\x00",
        b"n1\x00-1\x00/\x00",
        b"n1\x001e2\x00/\x00",
        b"n1\x00\xb2\x00/\x00",  # a digit to str, not to int
        b"x" * 20_000,
        REPORT + b"n1\x003\x00/\x00",  # the same report again
        REPORT + b"more",
    ],
)
def test_anything_else_is_tampering(data: bytes) -> None:
    reports = ReportParser()
    reports.expect_nonce("n1")
    with pytest.raises(TamperedReportError):
        reports.feed(data)


def test_bytes_while_no_command_runs_are_tampering() -> None:
    with pytest.raises(TamperedReportError):
        ReportParser().feed(b"x")


def test_a_giant_environment_is_not_kept_and_not_fatal() -> None:
    reports = ReportParser()
    reports.expect_nonce("n1")
    reports.feed(b"n1\x000\x00/\x00A=1\x00")
    reports.expect_nonce("n2")
    assert reports.feed(b"n2\x000\x00/\x00") == Completion(0, "/")
    for _ in range(40):
        reports.feed(b"y" * 10_000)
    reports.feed(b"\x00")
    assert reports.environment == b"A=1"
    reports.expect_nonce("n3")
    assert reports.feed(b"n3\x005\x00/\x00") == Completion(5, "/")
