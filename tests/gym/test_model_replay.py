"""An answer can be sent back as it came, on every route; what would make another conversation is refused by name."""

import json
from collections.abc import Callable
from typing import Any

import gym_needed  # noqa: F401
import pytest

pytestmark = pytest.mark.gym

from fastapi.testclient import TestClient  # noqa: E402
from served_model import CALL, QUESTION, figure, result_of, said, served, without_tokens  # noqa: E402

CALC = {"name": "python", "description": "Run.", "parameters": {"type": "object"}}
CHAT = {"messages": [QUESTION], "tools": [{"type": "function", "function": CALC}]}
ITEMS = {"input": [QUESTION], "tools": [{"type": "function", "strict": False, **CALC}]}
ANTHROPIC = {
    "max_tokens": 99,
    "messages": [QUESTION],
    "tools": [{"name": "python", "input_schema": {"type": "object"}}],
}
MORE = {"role": "user", "content": "And 3+3?"}
THOUGHTS = "<think>\nHm.\n</think>\n\n"
SAID = {
    "text": said("It is 4."),
    "call": said(CALL),
    "text and calls": said(f"Let me see.\n{CALL}\n{CALL}"),
    "thoughts and call": said(f"{THOUGHTS}Let me see.\n{CALL}"),
    "cut in its thoughts": said("<think>\nHm", closed=False),
    "spelled tags": said(f"{THOUGHTS}a</think>b<think>"),
}
Keep = Callable[[dict[str, Any]], dict[str, Any]]


def as_it_came(message: dict[str, Any]) -> dict[str, Any]:
    return message


def with_fields_of_a_client(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call | {"index": n, "provider": None} for n, call in enumerate(message.get("tool_calls") or [])]
    return message | {"annotations": [], "name": None, "x_trace": {"a": 1}} | ({"tool_calls": calls} if calls else {})


def without_ids_and_null(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item as Codex's client sends it back: without its id, and texts without annotations."""
    kept = {key: value for key, value in item.items() if value is not None and key not in ("id", "status", "phase")}
    if item["type"] == "message":
        kept["content"] = [{"type": part["type"], "text": part["text"]} for part in item["content"]]
    return kept


def results(message: dict[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls") or []
    return [{"role": "tool", "tool_call_id": call["id"], "name": "python", "content": "4"} for call in calls]


def posted(client: TestClient, route: str, body: dict[str, Any]) -> Any:
    answer = client.post(f"/v1/{route}", json=body)
    assert answer.status_code == 200, answer.text
    return answer


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def streamed_message(text: str) -> dict[str, Any]:
    """Put a chat message together as clients of OpenAI do."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    for chunk in events(text):
        for choice in chunk["choices"]:
            for key in ("content", "reasoning_content"):
                if choice["delta"].get(key):
                    message[key] = (message.get(key) or "") + choice["delta"][key]
            message.setdefault("tool_calls", []).extend(choice["delta"].get("tool_calls", []))
    return message if message["tool_calls"] else {key: message[key] for key in message if key != "tool_calls"}


Talk = Callable[[TestClient], None]
"""One call and the next one, which sends back what the first was answered."""


def not_extended(monkeypatch: pytest.MonkeyPatch, talk: Talk, *, apart: bool) -> list[str]:
    """Return the answers after which the next prompt does not begin with what was sampled on."""
    replies = [reply for first in SAID.values() for reply in (first, said("6"))]
    lost: list[str] = []
    with served(monkeypatch, *replies, uses_reasoning_parser=apart) as (client, (engine,)):
        for what, reply in SAID.items():
            client.cookies.clear()
            talk(client)
            first, second = engine.requests[-2:]
            seen = (*first.prompt_ids, *reply.token_ids)
            if second.prompt_ids[: len(seen)] != seen:
                lost.append(what)
    return lost


APART = pytest.mark.parametrize("apart", [False, True], ids=["thoughts in the text", "thoughts apart"])
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@APART
@STREAM
@pytest.mark.parametrize("keep", [as_it_came, with_fields_of_a_client, without_tokens])
def test_a_chat_answer_goes_back(monkeypatch: pytest.MonkeyPatch, stream: bool, keep: Keep, apart: bool):
    def talk(client: TestClient) -> None:
        answer = posted(client, "chat/completions", CHAT | {"stream": stream})
        message = streamed_message(answer.text) if stream else answer.json()["choices"][0]["message"]
        messages = [QUESTION, keep(message), *results(message), MORE]
        posted(client, "chat/completions", CHAT | {"messages": messages, "stream": stream})

    assert not_extended(monkeypatch, talk, apart=apart) == []


@APART
@STREAM
@pytest.mark.parametrize("keep", [as_it_came, without_ids_and_null, without_tokens])
def test_items_go_back(monkeypatch: pytest.MonkeyPatch, stream: bool, keep: Keep, apart: bool):
    def talk(client: TestClient) -> None:
        answer = posted(client, "responses", ITEMS | {"stream": stream})
        done = [event for event in events(answer.text) if event["type"] == "response.output_item.done"]
        output = [event["item"] for event in done] if stream else answer.json()["output"]
        outputs = [result_of(item) for item in output if item["type"] == "function_call"]
        given = [QUESTION, *(keep(item) for item in output), *outputs, MORE]
        posted(client, "responses", ITEMS | {"input": given, "stream": stream})

    assert not_extended(monkeypatch, talk, apart=apart) == []


@APART
def test_an_anthropic_answer_goes_back(monkeypatch: pytest.MonkeyPatch, apart: bool):
    def talk(client: TestClient) -> None:
        content = posted(client, "messages", ANTHROPIC).json()["content"]
        called = [block["id"] for block in content if block["type"] == "tool_use"]
        outputs = [{"type": "tool_result", "tool_use_id": call_id, "content": "4"} for call_id in called]
        answered = {"role": "user", "content": [*outputs, {"type": "text", "text": "And 3+3?"}]}
        messages = [QUESTION, {"role": "assistant", "content": content}, answered]
        posted(client, "messages", ANTHROPIC | {"messages": messages})

    assert not_extended(monkeypatch, talk, apart=apart) == []


ASKED = {
    "role": "assistant",
    "content": "x",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "python", "arguments": "{}"}}],
}
SILENT = {"name": "n", "id": "m", "refusal": None, "tool_calls": None, "x": [1]}
"""Fields that say nothing to the model."""
SPOKEN = [{"role": role, "content": "x"} for role in ("system", "developer", "user", "assistant")]
SPOKEN.append({"role": "tool", "content": "x", "tool_call_id": "c"})
SAME_MESSAGES = [
    *((message | SILENT, message) for message in SPOKEN),
    ({"role": "assistant", "content": None, "refusal": "No."}, {"role": "assistant", "content": "No."}),
]


@pytest.mark.parametrize("messages", SAME_MESSAGES)
def test_messages_that_say_the_same_give_the_same_prompt(monkeypatch: pytest.MonkeyPatch, messages: Any):
    with served(monkeypatch, said("4"), said("4")) as (client, (engine,)):
        for message in messages:
            posted(client, "chat/completions", CHAT | {"messages": [QUESTION, ASKED, message, MORE]})
    first, second = engine.requests
    assert first.prompt_ids == second.prompt_ids


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "chat/completions",
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        "function_call",
    ),
    ("chat/completions", {"role": "assistant", "content": "x", "audio": {"id": "a"}}, "audio"),
    ("chat/completions", {"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}, "image_url"),
    ("chat/completions", {"role": "assistant", "content": [IMAGE]}, "image_url"),
    ("chat/completions", {"role": "user", "content": "x", "images": ["AAAA"]}, "images"),
    ("chat/completions", {"role": "user", "content": "x", "tool_calls": [{"id": "c"}]}, "tool_calls"),
    ("chat/completions", {"role": "function", "name": "f", "content": "x"}, "function"),
    (
        "chat/completions",
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}}]},
        "calls of functions",
    ),
    ("responses", {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}, "input_image"),
    (
        "responses",
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}},
        "web_search_call",
    ),
    (
        "responses",
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "n"},
        "namespace",
    ),
]


@pytest.mark.parametrize(("route", "message", "named"), REFUSED)
def test_what_would_make_another_conversation_is_refused(
    monkeypatch: pytest.MonkeyPatch, route: str, message: dict[str, Any], named: str
):
    key = "messages" if route == "chat/completions" else "input"
    with served(monkeypatch) as (client, _):
        answer = client.post(f"/v1/{route}", json={key: [QUESTION, message, MORE]})
        assert (answer.status_code, f"{key}[1]" in answer.text, named in answer.text) == (400, True, True), answer.text
        assert len(answer.json()["detail"].splitlines()) <= 2
        counted = "chat_completions" if key == "messages" else "responses"
        assert figure(client, f'prorl_model_calls_total{{route="{counted}",status="400"}}') == 1


def test_a_part_that_the_anthropic_route_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch):
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
    with served(monkeypatch) as (client, _):
        answer = client.post("/v1/messages", json={"messages": [{"role": "user", "content": [document]}]})
    assert (answer.status_code, "document" in answer.text) == (400, True)
