"""Delays between attempts."""

import math

from hypothesis import given
from hypothesis import strategies as st

from prorl_gym.backoff import backoff_delay

seconds = st.floats(min_value=0.001, max_value=1e6)


def test_delays_double_up_to_the_cap():
    assert [backoff_delay(turn, first=1.0, longest=5.0) for turn in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]


@given(st.integers(min_value=0, max_value=10**9), seconds, seconds, st.floats(min_value=0.0, max_value=1.0))
def test_a_delay_with_jitter_is_below_the_plain_one_by_at_most_the_jitter(
    turn: int, first: float, longest: float, jitter: float
):
    plain = backoff_delay(turn, first=first, longest=longest)
    delay = backoff_delay(turn, first=first, longest=longest, jitter=jitter)
    assert plain * (1 - jitter) * (1 - 1e-9) <= delay <= plain * (1 + 1e-9)
    assert math.isfinite(delay)


@given(st.integers(min_value=0, max_value=10**9), seconds, seconds)
def test_delays_never_fall_and_never_exceed_the_cap(turn: int, first: float, longest: float):
    delay, following = (backoff_delay(number, first=first, longest=longest) for number in (turn, turn + 1))
    assert min(first, longest) <= delay <= following <= longest


def test_jitter_differs_between_callers():
    assert len({backoff_delay(3, first=1.0, longest=60.0, jitter=0.5) for _ in range(20)}) > 1
