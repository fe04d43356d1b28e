"""Differences of texts: what they show, what they overlook when told to, and that they stay small and quick."""

import time

import pytest

from prorl_gym.environments.playback import mask_volatile, replay_diff


def test_equal_texts_have_none():
    assert replay_diff("a\nb", "a\nb", "turn 1") == []


def test_a_difference_is_shown_with_its_surroundings():
    then = "\n".join(map(str, range(100)))
    assert replay_diff(then, then.replace("50", "fifty"), "turn 1, bash") == [
        "--- turn 1, bash: recorded\tfrom line 48",
        "+++ turn 1, bash: replayed\tfrom line 48",
        "@@ -1,7 +1,7 @@",
        *(" 47", " 48", " 49", "-50", "+fifty", " 51", " 52", " 53"),
    ]


def test_a_missing_end_is_a_difference():
    assert replay_diff("a\n", "a", "x")[3:] == [" a", "-"]


def test_hostile_texts_take_no_time():
    began = time.perf_counter()
    lines = replay_diff("a\nb\n" * 20_000, "b\na\n" * 20_000, "x")
    assert time.perf_counter() - began < 2
    assert len(lines) < 1000
    assert lines[-1] == "... 39801 more lines are not compared"


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ("<object at 0x7f00aa>", "<object at 0x7f11bb>"),
        ("made 2024-01-02T03:04:05Z", "made 2025-11-12 13:14:15.678+02:00"),
        ("-rw-r--r-- 1 a a 3 Nov 20 17:44 f", "-rw-r--r-- 1 a a 3 Dec  1 07:04 f"),
        ("ran in 0.12s", "ran in 3.4s"),
        ("5 passed in 0.2 seconds", "5 passed in 14 seconds"),
        ("real\t0m0.004s", "real\t1m2.500s"),
        ("pid=17 died", "pid=4711 died"),
        ("[1] 17", "[1] 18"),
    ],
)
def test_what_means_nothing_is_overlooked(then: str, now: str):
    assert mask_volatile(then) == mask_volatile(now)


@pytest.mark.parametrize(("then", "now"), [("exit code 1", "exit code 2"), ("42", "43"), ("[1] ok", "[1] no")])
def test_what_means_something_is_not(then: str, now: str):
    assert mask_volatile(then) != mask_volatile(now)
