import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_gym.sandbox.service.operations.shell import Completion, ReportParser, TamperedReportError

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
