"""Bodies that are read piece by piece are those that are read whole."""

import json
from collections import Counter
from typing import Any

import pytest
from harness_histories import BODIES, WIRES, Conversation
from hypothesis import given
from hypothesis import strategies as st
from token_codecs import BOUNDED

from prorl_gym.errors import ConfigError
from prorl_gym.harness.body_reader import BodyReader, ReadBody
from prorl_gym.harness.messages import MESSAGES, read_messages
from prorl_gym.inference.tokens.prompt_builder import HistoryEntry
from prorl_gym.records import Message

RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "r"}]}


ARGUMENTS = st.sampled_from(["{}", '{"a": "\u00e9\U0001f600 \\\\ud800"}', '"messages": [{'])
FORMS = st.sampled_from([{}, {"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False}])


@pytest.mark.parametrize("wire", WIRES)
@BOUNDED
@given(data=st.data())
def test_any_history_in_any_pieces(wire: str, data: st.DataObject):
    module, key, items = WIRES[wire], WIRES[wire].history_key, BODIES[wire][WIRES[wire].history_key]
    history = data.draw(st.lists(st.sampled_from(items), min_size=1, max_size=12))
    history.insert(0, {"role": "user", "content": data.draw(ARGUMENTS)})
    form = data.draw(FORMS)
    talk = Conversation(module)
    for end in data.draw(st.lists(st.integers(1, len(history)), max_size=4)):
        talk.read({"n": 1, key: history[:end], "tools": []}, **form)
    whole = {"n": 1, key: history, "tools": []}
    assert list(talk.read(whole, **form).entries) == list(Conversation(module).read(whole).entries)


@pytest.mark.parametrize("wire", WIRES)
@BOUNDED
@given(data=st.data())
def test_equal_calls_have_equal_digests_however_they_were_read(wire: str, data: st.DataObject):
    key = WIRES[wire].history_key
    items = BODIES[wire][key]
    history = data.draw(st.lists(st.sampled_from(items), min_size=1, max_size=6))
    body = {"n": 1, key: history, "tools": []}
    sent = [
        body,
        {"n": 1, "stream": True, key: history, "tools": []},
        {"stream": True, "tools": [], "n": 1, key: history},
        {**body, "stream": False},
        {**body, "stream": True, "stream_options": {"include_usage": True}},
    ]
    reader, fresh = BodyReader(10_000), BodyReader(10_000).read("/", key, json.dumps(body).encode()).digest
    for end in data.draw(st.lists(st.integers(1, len(history)), max_size=3)):
        read_whole(reader, {"n": 1, key: history[:end], "tools": []}, key)
    for each in data.draw(st.permutations(sent)):
        assert read_whole(reader, each, key).digest == fresh
    others = ({**body, "n": 2}, {**body, "tools": [{}]}, {**body, key: [*history, items[0]]})
    for other in (*others, {**body, key: [{**history[0], "stream": True}, *history[1:]]}):
        assert read_whole(reader, other, key).digest != fresh


def read_whole(reader: BodyReader, body: dict[str, Any], key: str) -> ReadBody:
    read = reader.read("/", key, json.dumps(body).encode())
    read.read_history(read.fields[key], lambda new: [HistoryEntry(Message(role="user", content=str(new)))])
    return read


def test_what_is_known_is_not_read_again():
    reader, read = BodyReader(10_000), list[Any]()

    def read_items(items: list[Any]) -> list[HistoryEntry]:
        read.extend(item["n"] for item in items)
        return [HistoryEntry(Message(role="user", content=str(item))) for item in items]

    def send(path: str, *numbers: int) -> int:
        raw = json.dumps({"messages": [{"n": number} for number in numbers]}).encode()
        new = reader.count_new(path, raw)
        body = reader.read(path, "messages", raw)
        assert len(body.read_history(body.fields["messages"], read_items)) == len(numbers)
        return new

    for end in (1, 3, 3, 4):
        send("/a", *range(end))
    assert read == [0, 1, 2, 3]
    assert send("/a", 0, 1, 2, 3, 4) < 20
    send("/a", 7, 1)
    assert read == [0, 1, 2, 3, 4, 7, 1]
    send("/b", 7, 1)
    assert read == [0, 1, 2, 3, 4, 7, 1, 7, 1], "another route reads it in another way"


@pytest.mark.parametrize("other", [1, 1.0, "true", None])
def test_a_value_that_only_python_takes_for_the_same_is_another_one(other: Any):
    def history(value: Any) -> dict[str, Any]:
        use = {"type": "tool_use", "id": "a", "name": "f", "input": {"all": value}}
        return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": [use]}, RESULT]}

    talk = Conversation(MESSAGES)
    before, after = talk.read(history(True)), talk.read(history(other))
    assert before.entries[1].message.tool_calls != after.entries[1].message.tool_calls


def test_marks_of_a_cache_that_move_change_nothing():
    def turn(text: str, **more: Any) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "text", "text": text, **more}]}

    mark = {"cache_control": {"type": "ephemeral"}}
    reader, form = BodyReader(10_000), {"separators": (",", ":")}
    first = json.dumps({"messages": [turn("a"), turn("b", **mark)]}, **form).encode()
    body = reader.read("/", "messages", first)
    body.read_history(body.fields["messages"], lambda items: read_messages(items, Counter()))
    second = json.dumps({"messages": [turn("a"), turn("b"), turn("c", **mark)]}, **form).encode()
    assert reader.read("/", "messages", second).fields["messages"] == [turn("c")]
    said = json.dumps({"messages": [turn(',"cache_control":{}')]}, **form).encode()
    assert reader.read("/", "messages", said).fields["messages"] == [turn(',"cache_control":{}')]


def test_a_tools_argument_is_no_mark_of_a_cache():
    call = {"type": "tool_use", "id": "c", "name": "fetch", "input": {"url": "u", "cache_control": {"max_age": 3}}}
    said = [{"role": "assistant", "content": [call]}]
    raw = json.dumps({"messages": said}, separators=(",", ":")).encode()
    assert BodyReader(10_000).read("/", "messages", raw).fields["messages"] == said


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"7",
        b"{",
        b'{"messages": [}',
        b'{"messages": [{}}',
        b'{"messages": [{}] "a": 1}',
        b'{"messages":[,{}]}',
    ],
)
def test_what_is_no_json_is_refused(raw: bytes):
    with pytest.raises(ValueError):
        BodyReader(10_000).read("/", "messages", raw)


def test_a_body_without_a_history_is_a_body():
    nested = {"metadata": {"messages": [1]}, 'x"messages': [2], "messages": "text"}
    body = BodyReader(10_000).read("/", "messages", json.dumps(nested).encode())
    assert body.fields == nested
    with pytest.raises(ConfigError, match="messages"):
        body.read_history(body.fields["messages"], lambda items: [])


@pytest.mark.parametrize("nested", [1, 9])
def test_lists_of_the_same_name_elsewhere_are_no_history(nested: int):
    body = {"metadata": [{"messages": [place]} for place in range(nested)], "messages": [{"role": "user"}]}
    read = BodyReader(10_000).read("/", "messages", json.dumps(body).encode())
    assert read.fields == body
    again = read_whole(BodyReader(10_000), body, "messages")
    assert (again.digest == read.digest, again.fields) == (True, body)


def test_a_known_beginning_with_another_history_behind_it_is_read_anew():
    reader = BodyReader(10_000)
    read_whole(reader, {"messages": [{"role": "user"}]}, "messages")
    assert reader.read("/", "messages", b'{"messages": [{"role": "user"}], "messages": [7]}').fields == {
        "messages": [7]
    }
