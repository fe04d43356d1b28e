"""A turn that is streamed is the turn that is not: for every wire, every text and every way of cutting it."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from event_readers import join_chat, join_messages, join_responses
from harness_histories import SAMPLING, answer_format
from hypothesis import given
from hypothesis import strategies as st
from token_codecs import ALL, BOUNDED, TOOLS, codec

from prorl_gym.gateway import chat_completions, responses
from prorl_gym.gateway.answer import AnswerFormat, CompletedTurn
from prorl_gym.gateway.model_call import ModelCall
from prorl_gym.gateway.turn_stream import Piece, StreamDivergedError, TurnStream
from prorl_gym.harness import messages
from prorl_gym.inference.protocol import Conversation
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.prompt_builder import BuiltPrompt, PromptOrigin
from prorl_gym.inference.tokens.turn import SampledTurn, read_turn
from prorl_gym.records import Message

CALL = '<tool_call>\n{"name": "calc", "arguments": {"term": "1<2"}}\n</tool_call>'
OTHER_CALL = "<tool_call>\n<function=calc>\n<parameter=term>\n1\n</parameter>\n</function>\n</tool_call>"
JSON_CALL = '{"name": "calc", "parameters": {"term": "1"}}'
TAGS = [
    "<think>",
    "</think>",
    "<think>\n",
    "\n</think>\n\n",
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "<TOOLCALL>",
]
WORDS = [CALL, OTHER_CALL, JSON_CALL, "[", "{", "<", "</", "<function=", " ", "\n", "🦆", "Hm.", "I look. ", "\ufffd"]
fragments = st.sampled_from([*TAGS, *WORDS])
texts = st.lists(st.one_of(fragments, st.text(max_size=6)), max_size=8).map("".join)
sizes = st.lists(st.integers(1, 5), min_size=1, max_size=3)
CHANNELS = [
    (chat_completions, chat_completions.ChatEvents, join_chat),
    (responses, responses.ResponseEvents, join_responses),
    (messages, messages.MessageEvents, join_messages),
]


@dataclass
class Turn:
    """A sampled turn, parsed as a gateway does."""

    chat: ChatCodec
    ids: list[int]
    may_call_tools: bool = True

    def __post_init__(self) -> None:
        call = ModelCall([], TOOLS, SAMPLING, self.may_call_tools)
        ids = self.chat.encode_prompt([Message(role="user", content="Hi.")], TOOLS)
        prompt = BuiltPrompt(ids, PromptOrigin.FIRST, Conversation((), ()), ())
        sampled = SampledTurn(self.ids, [-1.0] * len(self.ids), [0] * len(self.ids), "stop", 1, prompt_ids=ids)
        parsed = read_turn(self.chat, sampled, TOOLS, may_call_tools=self.may_call_tools, single_tool_call=False)
        self.completed = CompletedTurn(call, prompt, sampled, parsed)
        self.form: AnswerFormat = replace(answer_format(), codec=self.chat)

    def pieces(self, groups: list[int]) -> list[Piece]:
        stream, found, place = TurnStream(self.chat, may_call_tools=self.may_call_tools), [], 0
        while place < len(self.ids):
            size = groups[place % len(groups)]
            found += stream.add(self.completed.prompt.ids, self.ids[place : place + size])
            place += size
        parsed = self.completed.parsed
        return found + stream.finish(parsed.thinking, self.form.text_of(parsed))


def spoken(name: str, text: str, **options: Any) -> Turn:
    chat = codec(name)
    return Turn(chat, [*chat.tokenizer.encode_trusted(text), chat.terminator_id], **options)


def joined(pieces: list[Piece], kind: str) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)


@pytest.mark.parametrize("may_call_tools", [True, False])
@pytest.mark.parametrize("name", [*ALL, "small-opens"])
@BOUNDED
@given(text=texts, groups=sizes)
def test_pieces_are_the_parsed_turn(name: str, may_call_tools: bool, text: str, groups: list[int]):
    turn = spoken(name, text, may_call_tools=may_call_tools)
    pieces, parsed = turn.pieces(groups), turn.completed.parsed
    assert joined(pieces, "thinking") == parsed.thinking
    assert joined(pieces, "text") == turn.form.text_of(parsed)
    kinds = [piece.kind for piece in pieces]
    assert kinds == sorted(kinds, reverse=True), "all thoughts come before all text"
    assert all(piece.text for piece in pieces)


@pytest.mark.parametrize("name", [*ALL, "small-opens"])
@BOUNDED
@given(ids=st.lists(st.integers(0, 3000), max_size=40))
def test_any_ids_can_be_streamed(name: str, ids: list[int]):
    turn = Turn(codec(name), ids)
    assert joined(turn.pieces([1]), "text") == turn.form.text_of(turn.completed.parsed)


@pytest.mark.parametrize(("wire", "events", "join"), CHANNELS, ids=["chat", "responses", "messages"])
@BOUNDED
@given(text=texts, groups=sizes, has_usage_chunk=st.booleans(), opens=st.booleans())
def test_the_events_of_every_wire_are_its_answer(
    wire: Any, events: Any, join: Any, text: str, groups: list[int], has_usage_chunk: bool, opens: bool
):
    turn = spoken("small-opens" if opens else "small", text)
    body = {"stream_options": {"include_usage": has_usage_chunk}}
    writer = events(turn.completed.head, turn.form, body)
    answer = wire.write_answer(turn.completed, {}, turn.form)
    stream = writer.begin() + writer.keep_alive
    for piece in turn.pieces(groups):
        stream += writer.write_piece(piece)
    assert join(stream + writer.end(answer)) == answer


def test_text_comes_before_the_turn_is_whole():
    chat = codec("small")
    stream = TurnStream(chat, may_call_tools=True)
    found = [
        stream.add((), [token]) for token in chat.tokenizer.encode_trusted(f"<think>\nHm, so.\n</think>\nLook: {CALL}")
    ]
    assert joined([piece for pieces in found for piece in pieces], "thinking") == "Hm, so."
    assert joined([piece for pieces in found for piece in pieces], "text") == "Look:"
    assert len([pieces for pieces in found if pieces]) > 4


def test_tokens_other_than_those_of_the_turn_are_found():
    chat = codec("small")
    stream = TurnStream(chat, may_call_tools=True)
    stream.add((), chat.tokenizer.encode_trusted("Another engine said this."))
    with pytest.raises(StreamDivergedError):
        stream.finish("", "It says that.")
