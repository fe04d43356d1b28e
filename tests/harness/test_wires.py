"""The wires of unmodified programs: nothing that they send beside the conversation ends them."""

import json
from typing import Any

import pytest
from harness_histories import BODIES, CALL, SAMPLING, SCHEMA, THOUGHTS, WIRES, Conversation, codec
from token_codecs import ALL

from prorl_gym.errors import ConfigError
from prorl_gym.harness import wires
from prorl_gym.harness.messages import MESSAGES
from prorl_gym.harness.wires import RESPONSES
from prorl_gym.inference.tokens.prompt_builder import PromptOrigin
from prorl_gym.records import Message, ToolCall

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
    return Conversation(MESSAGES).read(ASK | fields)


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


def test_tools_are_read_and_hosted_ones_left_out_by_name():
    talk = Conversation(MESSAGES)
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
    talk = Conversation(MESSAGES)
    call = talk.read(ASK | {"tool_choice": choice})
    assert talk.omitted == ({"tool_choice any": 1} if single else {})
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
    talk = Conversation(MESSAGES)
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


async def test_an_answer_has_thoughts_text_and_calls():
    answer = await Conversation(MESSAGES).answer(ASK, f"{THOUGHTS}Look:\n{CALL}")
    thinking, text, use = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "Read it first.", "signature": ""}
    assert text == {"type": "text", "text": "Look:"}
    assert (use["name"], use["input"]) == ("Edit", {"file_path": "/a.py", "new_string": "é"})
    assert (answer["stop_reason"], answer["role"], answer["type"]) == ("tool_use", "assistant", "message")


@pytest.mark.parametrize(
    ("said", "finish", "reason"),
    [("It is done.", "stop", "end_turn"), ("It is done.", "length", "max_tokens"), ("", "stop", "end_turn")],
)
async def test_an_answer_of_text_says_why_it_ended(said: str, finish: str, reason: str):
    answer = await Conversation(MESSAGES).answer(ASK, said, finish)
    assert (answer["content"], answer["stop_reason"]) == ([{"type": "text", "text": said}], reason)


async def test_usage_adds_up_to_what_was_used():
    talk = Conversation(MESSAGES)
    usage = (await talk.answer(ASK, "Done."))["usage"]
    assert usage["cache_read_input_tokens"] == 2
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len((await talk.prompt(ASK)).ids)
    assert usage["output_tokens"] == len(codec("small").tokenizer.encode_trusted("Done.")) + 1


async def test_the_next_call_extends_what_was_sampled():
    talk, text = Conversation(MESSAGES), f"{THOUGHTS}Look:\n{CALL}"
    answer = await talk.answer(ASK, text)
    outputs = {"role": "user", "content": [result(answer["content"][-1]["id"], "ok") | CACHED]}
    prompt = await talk.prompt(continued(answer, outputs))
    assert prompt.origin is PromptOrigin.EXTENDED
    seen = [*(await talk.prompt(ASK)).ids, *codec("small").tokenizer.encode_trusted(text)]
    assert prompt.ids[: len(seen)] == seen


FUNCTION = {"name": "Edit", "description": "Edit a file.", "parameters": SCHEMA}
SHOWN = [{"type": "function", "function": FUNCTION}]
QUESTION = {"role": "user", "content": "Fix /a.py"}
CHAT: dict[str, Any] = {
    "model": "policy",
    "messages": [QUESTION],
    "tools": [{"type": "function", "function": FUNCTION | {"strict": True}}],
    "temperature": 0.0,
    "reasoning_effort": "high",
    "frequency_penalty": 1.5,
    "extra_body": {"metadata": {"promptId": "p"}},
}
ITEMS: dict[str, Any] = {
    "model": "policy",
    "instructions": "You edit files.",
    "input": [{"type": "message", **QUESTION}],
    "tools": [{"type": "function", "strict": False, **FUNCTION}, {"type": "web_search", "external_web_access": False}],
    "reasoning": {"effort": "medium", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "client_metadata": {"x": "y"},
}


def test_unknown_parameters_are_ignored_and_sampling_is_the_rollouts():
    for wire, body in ((wires.CHAT, CHAT), (wires.RESPONSES, ITEMS)):
        call = Conversation(wire).read(body)
        assert call.sampling == SAMPLING
        assert call.tools == SHOWN


@pytest.mark.parametrize(
    ("wire", "body", "field"),
    [
        (wires.CHAT, CHAT, "max_tokens"),
        (wires.CHAT, CHAT, "max_completion_tokens"),
        (wires.RESPONSES, ITEMS, "max_output_tokens"),
    ],
)
def test_a_program_may_ask_for_fewer_tokens(wire: Any, body: dict[str, Any], field: str):
    asked = {limit: Conversation(wire).read(body | {field: limit}).sampling.max_tokens for limit in (5, 10**9, -1, "x")}
    assert asked == {5: 5, 10**9: 256, -1: 256, "x": 256}


def test_hosted_tools_and_items_are_left_out_by_name():
    talk = Conversation(wires.RESPONSES)
    call = talk.read(ITEMS | {"input": [{"type": "web_search_call", "id": "w"}, QUESTION, 7]})
    assert [entry.message.content for entry in call.entries] == ["You edit files.", "Fix /a.py"]
    assert set(talk.omitted) == {
        *("tool web_search", "item web_search_call", "item of no type"),
        *("parameter client_metadata", "parameter reasoning.effort"),
    }


def test_parts_that_are_no_text_become_notes():
    talk = Conversation(wires.CHAT)
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    call = talk.read(CHAT | {"messages": [{"role": "user", "content": [image, {"type": "text", "text": "?"}]}]})
    assert call.entries[0].message.content == "[image_url left out: this model reads text only]?"
    assert talk.omitted["part image_url"] == 1


@pytest.mark.parametrize(
    ("wire", "fields", "named"),
    [
        *((wires.RESPONSES, {"tools": [{"type": kind}]}, kind) for kind in ("local_shell", "function", "3")),
        (wires.RESPONSES, {"input": [{"type": "local_shell_call", "call_id": "c", "action": {}}]}, "local_shell_call"),
        (
            wires.RESPONSES,
            {"input": [{"type": "shell_call_output", "call_id": "c", "output": []}]},
            "shell_call_output",
        ),
        (wires.CHAT, {"tools": [{"type": "namespace", "name": "db", "tools": []}]}, "'db' of type 'namespace'"),
        (wires.CHAT, {"tools": [*CHAT["tools"], {"type": "custom", "custom": {"name": "Edit"}}]}, "'Edit'"),
        (wires.CHAT, {"tools": {"type": "function"}}, "no list of objects"),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash' of type 'bash_20250124'"),
    ],
)
def test_tools_of_the_program_that_cannot_be_shown_are_refused_by_name(wire: Any, fields: Any, named: str):
    bodies = {"messages": CHAT if wire is wires.CHAT else ASK, "input": ITEMS}
    with pytest.raises(ConfigError, match=named) as refused:
        Conversation(wire).read(bodies[wire.history_key] | fields)
    assert refused.value.fix


PATCH = {"name": "patch", "description": "Change files.", "format": {"syntax": "lark", "definition": "start: X"}}
GROUP = {"type": "namespace", "name": "mcp__db__", "description": "A database.", "tools": [ITEMS["tools"][0]]}
ASKED = {"input": "*** Begin"}


def test_namespaces_and_custom_tools_are_shown_as_functions():
    call = Conversation(wires.RESPONSES).read(ITEMS | {"tools": [GROUP, {"type": "custom", **PATCH}]})
    query, patch = [tool["function"] for tool in call.tools]
    assert query == FUNCTION | {"name": "mcp__db__Edit", "description": "A database.\nEdit a file."}
    assert patch["description"] == "Change files.\nThe input has this form (lark):\nstart: X"
    assert patch["parameters"]["required"] == ["input"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("wire", "body", "tool", "called", "answered"),
    [
        (wires.RESPONSES, ITEMS, GROUP, "mcp__db__Edit", {"type": "function_call", "namespace": "mcp__db__"}),
        (wires.RESPONSES, ITEMS, {"type": "custom", **PATCH}, "patch", {"type": "custom_tool_call", **ASKED}),
        (wires.CHAT, CHAT, {"type": "custom", "custom": PATCH}, "patch", {"custom": {"name": "patch", **ASKED}}),
    ],
    ids=["namespace", "custom", "custom of chat"],
)
async def test_calls_of_them_are_answered_as_the_program_knows_them(
    name: str, wire: Any, body: Any, tool: Any, called: str, answered: Any
):
    talk, asked = Conversation(wire, name), body | {"tools": [tool]}
    turn = Message(
        role="assistant", content="", tool_calls=(ToolCall(id="c", name=called, arguments=json.dumps(ASKED)),)
    )
    chat, shown = talk.codec, [Message(role="user", content="q")]
    whole, opening = (chat.encode_prompt(each, ()) for each in ([*shown, turn], shown))
    written = chat.decode(whole[len(opening) :]).partition(chat.terminator)[0]
    answer = await talk.answer(asked, written)
    items = answer["output"] if wire is wires.RESPONSES else [answer["choices"][0]["message"]]
    call = items[-1] if wire is wires.RESPONSES else items[-1]["tool_calls"][0]
    assert answered.items() <= call.items()
    kind = f"{call['type']}_output" if wire is wires.RESPONSES else "tool"
    output = (
        {"type": kind, "call_id": "c", "output": "ok"} if wire is wires.RESPONSES else {"role": kind, "content": "ok"}
    )
    prompt = await talk.prompt(asked | {wire.history_key: [*asked[wire.history_key], *items, output]})
    assert prompt.origin is PromptOrigin.EXTENDED


def call_on(wire: Any, **fields: Any) -> list[Any]:
    """A question and a call in the form of a wire."""
    if wire is MESSAGES:
        use = {"type": "tool_use", "id": "c", "name": "Edit", **({"input": fields["arguments"]} if fields else {})}
        return [QUESTION, {"role": "assistant", "content": [use]}]
    function = {"name": "Edit", **fields}
    if wire is wires.CHAT:
        return [QUESTION, {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}]
    return [QUESTION, {"type": "function_call", "call_id": "c", **function}]


EVERY = pytest.mark.parametrize("wire", [wires.CHAT, wires.RESPONSES, MESSAGES], ids=["chat", "responses", "messages"])


@EVERY
@pytest.mark.parametrize(
    ("given", "read"),
    [
        *(({"arguments": empty}, "{}") for empty in ("", " ", None)),
        ({}, "{}"),
        ({"arguments": {"old": "é"}}, '{"old": "é"}'),
        ({"arguments": ["a"]}, '["a"]'),
        ({"arguments": '{"old": "a'}, '{"old": "a'),
    ],
)
def test_arguments_are_read_in_every_form(wire: Any, given: dict[str, Any], read: str):
    (call,) = Conversation(wire).read({wire.history_key: call_on(wire, **given)}).entries[-1].message.tool_calls
    assert (call.name, call.arguments) == ("Edit", read)


@EVERY
@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"ok": [1, None]}, '{"ok": [1, null]}'),
        (7, "7"),
        (False, "false"),
        (None, ""),
        ({"type": "text", "text": "t"}, "t"),
    ],
)
def test_contents_are_read_in_every_form(wire: Any, given: Any, read: str):
    outputs = {
        "chat": {"role": "tool", "tool_call_id": "c", "content": given},
        "responses": {"type": "function_call_output", "call_id": "c", "output": given},
        "messages": {"role": "user", "content": [result("c", given)]},
    }
    names = {id(wires.CHAT): "chat", id(wires.RESPONSES): "responses", id(MESSAGES): "messages"}
    talk = Conversation(wire)
    call = talk.read({wire.history_key: [*call_on(wire), outputs[names[id(wire)]]]})
    assert said(call)[-1] == ("tool", read)
    assert talk.omitted == {}


def test_calls_of_the_form_before_tools_are_read():
    given = [{"role": "assistant", "function_call": {"name": "Edit", "arguments": "{}"}}]
    given.append({"role": "function", "name": "Edit", "content": "ok"})
    turn, output = [entry.message for entry in Conversation(wires.CHAT).read({"messages": given}).entries]
    assert [(call.name, call.arguments) for call in turn.tool_calls] == [("Edit", "{}")]
    assert (output.role, output.content) == ("tool", "ok")


def test_the_items_of_a_turn_are_one_turn_in_any_order():
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    question, call = call_on(wires.RESPONSES)
    output = {"type": "function_call_output", "call_id": "c", "output": "ok"}
    one, other = (
        [entry.message for entry in Conversation(wires.RESPONSES).read({"input": [question, *turn, output]}).entries]
        for turn in ([call, text], [text, call])
    )
    assert one == other
    assert [message.role for message in one] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("wire", "body"),
    [
        (wires.CHAT, {}),
        (wires.CHAT, {"messages": []}),
        (wires.CHAT, {"messages": ["q"]}),
        (wires.CHAT, {"messages": [{"role": "robot", "content": "q"}]}),
        (wires.RESPONSES, {"input": 3}),
        (wires.RESPONSES, {"input": []}),
        (MESSAGES, {}),
        (MESSAGES, {"messages": []}),
        (MESSAGES, {"messages": "q"}),
        (MESSAGES, {"messages": [3]}),
        (MESSAGES, {"messages": [{"role": "robot", "content": "q"}]}),
    ],
)
def test_what_is_no_conversation_is_refused(wire: Any, body: dict[str, Any]):
    with pytest.raises(ConfigError):
        Conversation(wire).read(body)


def as_mini_swe_agent(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call | {"index": place} for place, call in enumerate(message["tool_calls"])]
    return message | {"tool_calls": calls, "function_call": None, "provider_specific_fields": {"refusal": None}}


def as_openhands(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "reasoning_content"} | {
        "content": [{"type": "text", "text": message["content"]}]
    }


@pytest.mark.parametrize("keep", [as_mini_swe_agent, as_openhands])
async def test_chat_histories_extend_what_was_sampled(keep: Any):
    talk = Conversation(wires.CHAT)
    message = (await talk.answer(CHAT, f"{THOUGHTS}Look:\n{CALL}"))["choices"][0]["message"]
    output = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "name": "Edit", "content": "ok"}
    prompt = await talk.prompt(CHAT | {"messages": [QUESTION, keep(message), output]})
    assert prompt.origin is PromptOrigin.EXTENDED


@pytest.mark.parametrize("kind", ["chat", "responses", "messages"])
@pytest.mark.parametrize(
    "text",
    [
        *("<think>\nNot closed", f"<think>So {CALL}", "</think>", "It is `</think>`.", f"{THOUGHTS}`</think>`</think>"),
        *(f"{THOUGHTS}<think>More.</think>Done.", "<think></think>\n<think>More.</think>Done.", f"{THOUGHTS}<think>No"),
    ],
)
async def test_thoughts_of_any_shape_come_back_as_they_were(kind: str, text: str):
    wire, body = {"chat": (wires.CHAT, CHAT), "responses": (wires.RESPONSES, ITEMS), "messages": (MESSAGES, ASK)}[kind]
    talk = Conversation(wire)
    answer, key = await talk.answer(body, text), wire.history_key
    turns = {
        "chat": lambda: [answer["choices"][0]["message"]],
        "responses": lambda: answer["output"],
        "messages": lambda: [{"role": "assistant", "content": answer["content"]}],
    }
    prompt = await talk.prompt(body | {key: [*body[key], *turns[kind](), {"role": "user", "content": "Go on."}]})
    seen = [*(await talk.prompt(body)).ids, *codec("small").tokenizer.encode_trusted(text)]
    assert (prompt.origin, prompt.ids[: len(seen)]) == (PromptOrigin.EXTENDED, seen)


async def test_a_history_of_codex_extends_what_was_sampled():
    talk = Conversation(wires.RESPONSES)
    thinking, said, call = (await talk.answer(ITEMS, f"{THOUGHTS}Look:\n{CALL}"))["output"]
    back = [
        thinking | {"content": None, "encrypted_content": None},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": said["content"][0]["text"]}],
        },
        call | {"id": "fc_1"},
        {"type": "function_call_output", "call_id": call["call_id"], "output": "Chunk ID: 1\nok"},
    ]
    prompt = await talk.prompt(ITEMS | {"input": [*ITEMS["input"], *back]})
    assert prompt.origin is PromptOrigin.EXTENDED


@pytest.mark.parametrize("name", WIRES)
def test_parameters_without_a_meaning_here_are_left_out_by_name(name: str):
    talk = Conversation(WIRES[name])
    talk.read(BODIES[name] | {"metadata": {"user_id": "u"}, "temperature": 0.1, "some_mode": "fast", "no_mode": None})
    assert talk.omitted == {"parameter some_mode": 1}


def test_fields_of_items_without_a_meaning_here_are_left_out_by_name():
    talk = Conversation(RESPONSES)
    talk.read({"input": [{"role": "user", "content": "q", "status": "completed", "mood": "good"}]})
    assert talk.omitted == {"item.mood": 1}


@pytest.mark.parametrize("kept", ["previous_response_id", "conversation", "prompt"])
def test_a_conversation_that_only_the_provider_has_is_refused(kept: str):
    with pytest.raises(ConfigError, match=f"'{kept}' is not supported"):
        Conversation(RESPONSES).read(BODIES["responses"] | {kept: "resp_1"})
