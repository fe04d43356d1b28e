"""Histories that are read piece by piece are those that are read whole."""

from typing import Any

import pytest
from harness_histories import Conversation
from hypothesis import given
from hypothesis import strategies as st
from token_codecs import BOUNDED

from prorl_gym.gateway import chat_completions, messages, responses
from prorl_gym.gateway.history_cache import HistoryCache
from prorl_gym.inference.tokens.prompt_builder import HistoryEntry
from prorl_gym.records import Message

USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
KINDS: dict[str, tuple[Any, str, list[dict[str, Any]]]] = {
    "chat": (
        chat_completions,
        "messages",
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "a", "content": "r"},
        ],
    ),
    "responses": (
        responses,
        "input",
        [
            {"role": "user", "content": "q"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": "a"},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "r"},
            {"type": "web_search_call"},
        ],
    ),
    "messages": (
        messages,
        "messages",
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}]},
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "r"}]},
        ],
    ),
}


@pytest.mark.parametrize("wire", KINDS)
@BOUNDED
@given(data=st.data())
def test_any_history_in_any_pieces(wire: str, data: st.DataObject):
    module, key, items = KINDS[wire]
    history = data.draw(st.lists(st.sampled_from(items), min_size=1, max_size=12))
    talk = Conversation(module)
    for end in data.draw(st.lists(st.integers(1, len(history)), max_size=4)):
        talk.read({key: history[:end]})
    assert list(talk.read({key: history}).entries) == list(Conversation(module).read({key: history}).entries)


def test_what_is_known_is_not_read_again():
    cache, read = HistoryCache(), list[object]()

    def read_items(items: list[object]) -> list[HistoryEntry]:
        read.extend(items)
        return [HistoryEntry(Message(role="user", content=str(item))) for item in items]

    for end in (1, 3, 3, 4):
        cache.read(list(range(end)), read_items)
    assert read == [0, 1, 2, 3]
    cache.read([7, 1], read_items)
    assert read == [0, 1, 2, 3, 7, 1]
