"""Text of ids that come one after the other: joined, it is the text of them all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_codecs import ALL, BOUNDED, codec

from prorl_gym.inference.tokens.tokenizer import IncrementalDecoder


def decoder(chat):
    return IncrementalDecoder(chat.tokenizer, chat.end_ids)


def in_groups(ids, sizes):
    place = 0
    while place < len(ids):
        size = sizes[place % len(sizes)]
        yield ids[place : place + size]
        place += size


@pytest.mark.parametrize("name", ALL)
@BOUNDED
@given(text=st.text(max_size=60), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_texts_come_back_whole(name, text, sizes):
    chat = codec(name)
    ids, one = [*chat.tokenizer.encode_untrusted(text), chat.terminator_id], decoder(chat)
    pieces = [one.add(group) for group in in_groups(ids, sizes)]
    assert "".join(pieces) == chat.decode_turn((), ids)


@pytest.mark.parametrize("name", ALL)
@BOUNDED
@given(ids=st.lists(st.integers(0, 3000), max_size=80))
def test_what_comes_is_a_beginning_of_the_whole_for_any_ids(name, ids):
    chat = codec(name)
    one = decoder(chat)
    joined = ""
    for token in ids:
        joined += one.add([token])
        assert chat.decode_turn((), ids).startswith(joined)


def test_a_character_comes_once_it_is_whole():
    chat = codec("small")
    ids = chat.tokenizer.encode_untrusted("a🦆b")
    one = decoder(chat)
    assert [piece for token in ids if (piece := one.add([token]))] == ["a", "🦆", "b"]


def test_nothing_comes_after_the_end_of_the_turn():
    chat = codec("small")
    one = decoder(chat)
    assert (
        one.add([*chat.tokenizer.encode_untrusted("a"), chat.terminator_id, *chat.tokenizer.encode_untrusted("b")])
        == "a"
    )
    assert one.add(chat.tokenizer.encode_untrusted("c")) == ""


def test_bytes_that_never_become_text_are_not_decoded_for_ever():
    chat = codec("small")
    broken = next(token for token in range(chat.vocab_size) if chat.decode([token]) == "\ufffd")
    one = decoder(chat)
    assert "".join(one.add([broken]) for _ in range(1000)) == ""
    assert one.add(chat.tokenizer.encode_untrusted("a")) == ""
