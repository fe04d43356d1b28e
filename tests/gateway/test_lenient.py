"""Chat completions and Responses of unmodified programs: nothing that they send beside the conversation ends them."""

from typing import Any

import pytest
from harness_histories import CALL, SAMPLING, SCHEMA, THOUGHTS, Conversation

from prorl_gym.errors import ConfigError
from prorl_gym.gateway import chat_completions, responses
from prorl_gym.inference.tokens.prompt_builder import PromptOrigin

EDIT = {"name": "Edit", "description": "Edit a file.", "parameters": SCHEMA}
SHOWN = [{"type": "function", "function": EDIT}]
QUESTION = {"role": "user", "content": "Fix /a.py"}
CHAT: dict[str, Any] = {
    "model": "policy",
    "messages": [QUESTION],
    "tools": [{"type": "function", "function": EDIT | {"strict": True}}],
    "temperature": 0.0,
    "reasoning_effort": "high",
    "frequency_penalty": 1.5,
    "extra_body": {"metadata": {"promptId": "p"}},
}
ITEMS: dict[str, Any] = {
    "model": "policy",
    "instructions": "You edit files.",
    "input": [{"type": "message", **QUESTION}],
    "tools": [{"type": "function", "strict": False, **EDIT}, {"type": "web_search", "external_web_access": False}],
    "reasoning": {"effort": "medium", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "client_metadata": {"x": "y"},
}


def test_unknown_parameters_are_ignored_and_sampling_is_the_rollouts():
    for wire, body in ((chat_completions, CHAT), (responses, ITEMS)):
        call = Conversation(wire).read(body)
        assert call.sampling == SAMPLING
        assert call.tools == SHOWN


@pytest.mark.parametrize(
    ("wire", "body", "field"),
    [
        (chat_completions, CHAT, "max_tokens"),
        (chat_completions, CHAT, "max_completion_tokens"),
        (responses, ITEMS, "max_output_tokens"),
    ],
)
def test_a_program_may_ask_for_fewer_tokens(wire: Any, body: dict[str, Any], field: str):
    asked = {limit: Conversation(wire).read(body | {field: limit}).sampling.max_tokens for limit in (5, 10**9, -1, "x")}
    assert asked == {5: 5, 10**9: 256, -1: 256, "x": 256}


def test_hosted_tools_and_items_are_left_out_by_name():
    talk = Conversation(responses)
    call = talk.read(ITEMS | {"input": [{"type": "web_search_call", "id": "w"}, QUESTION, 7]})
    assert [entry.message.content for entry in call.entries] == ["You edit files.", "Fix /a.py"]
    assert talk.omitted == {"tool web_search": 1, "item web_search_call": 1, "item of no type": 1}


def test_parts_that_are_no_text_become_notes():
    talk = Conversation(chat_completions)
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    call = talk.read(CHAT | {"messages": [{"role": "user", "content": [image, {"type": "text", "text": "?"}]}]})
    assert call.entries[0].message.content == "[image_url left out: this model reads text only]?"
    assert talk.omitted == {"part image_url": 1}


@pytest.mark.parametrize("tool", [{"type": "function"}, {"type": "function", "name": "x", "function": 5}, {"type": 3}])
def test_tools_that_are_none_are_left_out(tool: dict[str, Any]):
    talk = Conversation(chat_completions)
    names = [shown["function"]["name"] for shown in talk.read(CHAT | {"tools": [tool]}).tools]
    assert names == [tool["name"]] if "name" in tool else sum(talk.omitted.values()) == 1


@pytest.mark.parametrize(
    ("wire", "body"),
    [
        (chat_completions, {}),
        (chat_completions, {"messages": []}),
        (chat_completions, {"messages": ["q"]}),
        (chat_completions, {"messages": [{"role": "robot", "content": "q"}]}),
        (responses, {"input": 3}),
        (responses, {"input": []}),
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
    talk = Conversation(chat_completions)
    message = (await talk.answer(CHAT, f"{THOUGHTS}Look:\n{CALL}"))["choices"][0]["message"]
    output = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "name": "Edit", "content": "ok"}
    prompt = await talk.prompt(CHAT | {"messages": [QUESTION, keep(message), output]})
    assert prompt.origin is PromptOrigin.EXTENDED


async def test_a_history_of_codex_extends_what_was_sampled():
    talk = Conversation(responses)
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
