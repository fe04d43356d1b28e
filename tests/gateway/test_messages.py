"""Anthropic's messages API, as Claude Code speaks it."""

import json
from typing import Any

import pytest
from harness_histories import CALL, SAMPLING, SCHEMA, THOUGHTS, Conversation, codec

from prorl_gym.errors import ConfigError
from prorl_gym.gateway import messages as wire
from prorl_gym.inference.tokens.prompt_builder import PromptOrigin

EDIT = {"name": "Edit", "description": "Edit a file.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
CACHED = {"cache_control": {"type": "ephemeral"}}
ASK: dict[str, Any] = {
    "model": "policy",
    "max_tokens": 32000,
    "stream": True,
    "metadata": {"user_id": "u"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": []},
    "system": [{"type": "text", "text": "You edit files."}, {"type": "text", "text": "cwd: /w", **CACHED}],
    "tools": [EDIT],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<note>n</note>"}, {"type": "text", "text": "Fix /a.py"}]}
    ],
}


def read(**fields: Any):
    return Conversation(wire).read(ASK | fields)


def said(call: Any) -> list[tuple[str, str]]:
    return [(entry.message.role, entry.message.content) for entry in call.entries]


def continued(answer: dict[str, Any], *later: dict[str, Any]) -> dict[str, Any]:
    return ASK | {"messages": [*ASK["messages"], {"role": "assistant", "content": answer["content"]}, *later]}


def result(call_id: str, content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content}


def test_system_and_text_are_read_from_parts():
    assert said(read()) == [("system", "You edit files.\ncwd: /w"), ("user", "<note>n</note>\nFix /a.py")]


def test_a_string_and_one_part_are_the_same():
    for role in ("system", "user"):
        parts = [{"role": role, "content": [{"type": "text", "text": "t", **CACHED}]}]
        assert said(read(messages=parts)) == said(read(messages=[{"role": role, "content": "t"}]))


def test_system_may_be_missing_and_stand_among_the_messages():
    later = [{"role": "user", "content": "q"}, {"role": "system", "content": "New note."}]
    assert said(read(system=None, messages=later)) == [("user", "q"), ("system", "New note.")]


def test_the_rollout_decides_about_sampling():
    assert read(temperature=0.0, top_p=0.1, top_k=3).sampling == SAMPLING
    assert read(max_tokens=7).sampling.max_tokens == 7


def test_tools_are_read_and_hosted_ones_left_out_by_name():
    talk = Conversation(wire)
    call = talk.read(ASK | {"tools": [EDIT, {"type": "web_search_20250305", "name": "web_search"}]})
    function = {"name": "Edit", "description": "Edit a file.", "parameters": SCHEMA}
    assert call.tools == [{"type": "function", "function": function}]
    assert talk.omitted == {"tool web_search": 1}


@pytest.mark.parametrize(
    ("choice", "may_call", "single"),
    [
        (None, True, False),
        ({"type": "auto"}, True, False),
        ({"type": "none"}, False, False),
        ({"type": "any", "disable_parallel_tool_use": True}, True, True),
    ],
)
def test_the_choice_of_tools(choice: Any, may_call: bool, single: bool):
    call = read(tool_choice=choice)
    assert (call.may_call_tools, call.single_tool_call) == (may_call, single)


def test_a_history_with_calls_and_results():
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Look:"},
        {"type": "tool_use", "id": "a", "name": "Edit", "input": {"file_path": "é"}},
        {"type": "tool_use", "id": "b", "name": "Edit", "input": {}},
    ]
    image = {"type": "image", "source": {"type": "base64", "data": "eA=="}}
    results = [
        result("a", [{"type": "text", "text": "1"}, image]) | CACHED,
        result("b", "2") | {"is_error": True},
        {"type": "text", "text": "go on"},
    ]
    talk = Conversation(wire)
    turns = [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    call = talk.read(ASK | {"system": None, "messages": turns})
    turn = call.entries[0].message
    assert turn.content == "<think>\nHm.\n</think>\n\nLook:"
    assert [(c.id, c.name, json.loads(c.arguments)) for c in turn.tool_calls] == [
        ("a", "Edit", {"file_path": "é"}),
        ("b", "Edit", {}),
    ]
    assert said(call)[1:] == [
        ("tool", "1\n[image left out: this model reads text only]"),
        ("tool", "2"),
        ("user", "go on"),
    ]
    assert [entry.message.tool_call_id for entry in call.entries[1:]] == ["a", "b", None]
    assert talk.omitted == {"part image": 1, "part redacted_thinking": 1}


def test_assistant_messages_that_follow_each_other_are_one_turn():
    use = {"type": "tool_use", "id": "a", "name": "Edit", "input": {}}
    call = read(messages=[{"role": "assistant", "content": "Look: "}, {"role": "assistant", "content": [use]}])
    (turn,) = [entry.message for entry in call.entries if entry.is_assistant]
    assert (turn.content, len(turn.tool_calls)) == ("Look: ", 1)


@pytest.mark.parametrize("messages", [None, [], "q", [3], [{"role": "robot", "content": "q"}]])
def test_what_is_no_conversation_is_refused(messages: Any):
    with pytest.raises(ConfigError):
        read(messages=messages)


async def test_an_answer_has_thoughts_text_and_calls():
    answer = await Conversation(wire).answer(ASK, f"{THOUGHTS}Look:\n{CALL}")
    thinking, text, use = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "Read it first.", "signature": ""}
    assert text == {"type": "text", "text": "Look:"}
    assert (use["name"], use["input"]) == ("Edit", {"file_path": "/a.py", "new_string": "é"})
    assert (answer["stop_reason"], answer["role"], answer["type"]) == ("tool_use", "assistant", "message")


@pytest.mark.parametrize(("finish", "reason"), [("stop", "end_turn"), ("length", "max_tokens")])
async def test_why_an_answer_ended(finish: str, reason: str):
    answer = await Conversation(wire).answer(ASK, "It is done.", finish)
    assert answer["stop_reason"] == reason


async def test_an_answer_without_anything_has_an_empty_text():
    assert (await Conversation(wire).answer(ASK, ""))["content"] == [{"type": "text", "text": ""}]


async def test_usage_adds_up_to_what_was_used():
    talk = Conversation(wire)
    usage = (await talk.answer(ASK, "Done."))["usage"]
    assert usage["cache_read_input_tokens"] == 2
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len((await talk.prompt(ASK)).ids)
    assert usage["output_tokens"] == len(codec().tokenizer.encode_trusted("Done.")) + 1


async def test_the_next_call_extends_what_was_sampled():
    talk, text = Conversation(wire), f"{THOUGHTS}Look:\n{CALL}"
    answer = await talk.answer(ASK, text)
    outputs = {"role": "user", "content": [result(answer["content"][-1]["id"], "ok") | CACHED]}
    prompt = await talk.prompt(continued(answer, outputs))
    assert prompt.origin is PromptOrigin.EXTENDED
    seen = [*(await talk.prompt(ASK)).ids, *codec().tokenizer.encode_trusted(text)]
    assert prompt.ids[: len(seen)] == seen
