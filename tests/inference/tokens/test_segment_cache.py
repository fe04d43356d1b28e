"""Turns are found by their words, and the memory keeps its bound."""

from prorl_gym.inference.tokens import segment_cache
from prorl_gym.inference.tokens.segment_cache import SegmentCache

PROMPT, SAID = [1, 2, 3], [4, 5]


def test_turns_of_one_conversation_share_their_ids():
    turns = SegmentCache()
    turns.add_turn(b"a", "s", PROMPT, SAID, None)
    turns.add_turn(b"b", "s", [*PROMPT, *SAID, 6], [7], b"a")
    assert turns.tokens == 7
    (known,) = turns.find_turns(b"b", "s")
    assert (known.ids, known.start) == ([1, 2, 3, 4, 5, 6, 7], 6)
    (known,) = turns.find_turns(b"a", "s")
    assert (known.ids, known.start) == ([1, 2, 3, 4, 5], 3)


def test_conversation_that_forks_keeps_both_ways():
    turns = SegmentCache()
    turns.add_turn(b"a", "s", PROMPT, SAID, None)
    turns.add_turn(b"b", "s", [*PROMPT, *SAID, 6], [7], b"a")
    turns.add_turn(b"c", "s", [*PROMPT, *SAID, 8], [9], b"a")
    assert [known.ids for known in turns.find_turns(b"c", "s")] == [[1, 2, 3, 4, 5, 8, 9]]
    assert [known.ids for known in turns.find_turns(b"b", "s")] == [[1, 2, 3, 4, 5, 6, 7]]


def test_own_session_comes_first():
    turns = SegmentCache()
    for session in ("a", "b", "c"):
        turns.add_turn(b"a", session, PROMPT, SAID, None)
    assert [known.session_id for known in turns.find_turns(b"a", "a")] == ["a", "c", "b"]


def test_longest_unused_is_forgotten_first():
    turns = SegmentCache(max_tokens=10)
    turns.add_turn(b"a", "s", PROMPT, SAID, None)
    turns.add_turn(b"b", "t", PROMPT, SAID, None)
    assert list(turns.find_turns(b"a", "s"))
    turns.add_turn(b"c", "u", PROMPT, SAID, None)
    assert [len(list(turns.find_turns(digest, "s"))) for digest in (b"a", b"b", b"c")] == [1, 0, 1]
    assert (turns.tokens, len(turns)) == (10, 2)


def test_turn_beyond_the_bound_is_not_kept():
    turns = SegmentCache(max_tokens=4)
    turns.add_turn(b"a", "s", PROMPT, SAID, None)
    assert (turns.tokens, len(turns), list(turns.find_turns(b"a", "s"))) == (0, 0, [])


def test_twins_are_bounded(monkeypatch):
    monkeypatch.setattr(segment_cache, "MAX_DUPLICATES", 2)
    turns = SegmentCache()
    for session in ("a", "b", "c"):
        turns.add_turn(b"a", session, PROMPT, SAID, None)
    assert {known.session_id for known in turns.find_turns(b"a", "a")} == {"b", "c"}
    assert turns.tokens == 10


def test_many_short_turns_are_bounded_too():
    turns = SegmentCache(max_turns=3)
    turns.add_turn(b"a", "s", PROMPT, SAID, None)
    turns.add_turn(b"b", "s", [*PROMPT, *SAID, 6], [7], b"a")
    turns.add_turn(b"c", "t", PROMPT, SAID, None)
    assert (len(turns), turns.tokens) == (2, 12)
    turns.add_turn(b"d", "u", PROMPT, SAID, None)
    assert (len(turns), turns.tokens) == (2, 10)
    assert not list(turns.find_turns(b"a", "s"))
    assert list(turns.find_turns(b"c", "t"))
