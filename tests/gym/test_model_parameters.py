"""Each parameter of a call is honoured, or refused by name; whatever an agent sends is answered, and finally."""

import json
from typing import Any

import gym_needed  # noqa: F401
import pytest

pytestmark = pytest.mark.gym

from served_model import ASK, CALL, CODEC, QUESTION, result_of, said, served  # noqa: E402

CHAT = {"messages": [QUESTION]}
TOOL = {"type": "function", "name": "python", "description": "Run.", "parameters": {"type": "object"}, "strict": False}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("responses", {"background": True}, "background"),
    ("responses", {"previous_response_id": "resp-1"}, "previous_response_id"),
    ("responses", {"truncation": "auto"}, "truncation"),
    ("responses", {"tool_choice": "required"}, "tool_choice"),
    ("responses", {"text": {"format": {"type": "json_object"}}}, "text.format.type"),
    ("responses", {"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ("responses", {"top_logprobs": 3}, "top_logprobs"),
    ("responses", {"include": ["message.output_text.logprobs"]}, "include"),
    ("responses", {"tools": [{"type": "web_search"}]}, "web_search"),
    ("responses", {"metadata": {"extra_body": '{"top_k": 3}'}}, "extra_body"),
    ("chat/completions", {"n": 2}, "n: 2"),
    ("chat/completions", {"stop": ["\n"]}, "stop"),
    ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format.type"),
    ("chat/completions", {"frequency_penalty": 0.5}, "frequency_penalty"),
    ("chat/completions", {"logit_bias": {"5": 1}}, "logit_bias"),
    ("chat/completions", {"reasoning_effort": "low"}, "reasoning_effort"),
    ("chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    ("chat/completions", {"tool_choice": {"type": "function", "function": {"name": "python"}}}, "tool_choice"),
]


@pytest.fixture(scope="module")
def silent():
    """A server whose engine is never asked."""
    with pytest.MonkeyPatch.context() as patch, served(patch) as (client, _):
        yield client


@pytest.mark.parametrize(("route", "asked", "named"), REFUSED, ids=[named for _, _, named in REFUSED])
def test_what_is_not_supported_is_refused_by_name(silent: Any, route: str, asked: dict[str, Any], named: str):
    answer = silent.post(f"/v1/{route}", json=(ASK if route == "responses" else CHAT) | asked)
    assert answer.status_code == 400
    detail = answer.json()["detail"]
    assert named in detail
    assert len(detail.splitlines()) <= 2


@pytest.mark.parametrize(
    ("route", "asked"),
    [
        ("responses", {"truncation": "disabled", "store": False, "user": "u", "metadata": {"a": "b"}}),
        ("responses", {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "top_logprobs": 0}),
        ("responses", {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}),
        ("chat/completions", {"n": 1, "stop": [], "frequency_penalty": 0.0, "response_format": {"type": "text"}}),
        ("chat/completions", {"top_logprobs": 0, "logprobs": True, "service_tier": "auto", "chat_template_kwargs": {}}),
    ],
)
def test_what_asks_for_nothing_passes(monkeypatch: pytest.MonkeyPatch, route: str, asked: dict[str, Any]):
    with served(monkeypatch, said("4")) as (client, _):
        answer = client.post(f"/v1/{route}", json=(ASK if route == "responses" else CHAT) | asked)
    assert answer.status_code == 200, answer.text


def test_operator_can_have_a_parameter_dropped(monkeypatch: pytest.MonkeyPatch):
    """Also one that Gym does not know: OpenRouter's clients send ``usage``, among them one of mini-swe-agent's."""
    with served(monkeypatch, said("4"), said("4"), ignore_parameters=["reasoning.effort", "usage"]) as (client, _):
        assert client.post("/v1/responses", json=ASK | {"reasoning": {"effort": "low"}}).status_code == 200
        answer = client.post("/v1/chat/completions", json=CHAT | {"usage": {"include": True}})
        assert answer.status_code == 200, answer.text


def test_sampling_can_be_pinned(monkeypatch: pytest.MonkeyPatch):
    pins = {"temperature": 1.0, "top_p": 1.0, "top_k": 5, "max_output_tokens": 9}
    with served(monkeypatch, said("4"), sampling_overrides=pins) as (client, (engine,)):
        client.post("/v1/responses", json=ASK | {"max_output_tokens": 100})
    request = engine.requests[0]
    assert (request.temperature, request.top_p, request.top_k, request.max_tokens) == (1.0, 1.0, 5, 9)


def test_one_call_at_a_time_and_the_conversation_goes_on_exactly(monkeypatch: pytest.MonkeyPatch):
    asked = ASK | {"parallel_tool_calls": False}
    with served(monkeypatch, said(f"{CALL}\n{CALL}"), said("4")) as (client, (engine,)):
        (item,) = client.post("/v1/responses", json=asked).json()["output"]
        client.post("/v1/responses", json=asked | {"input": [QUESTION, item, result_of(item)]})
    seen = (*item["prompt_token_ids"], *item["generation_token_ids"])
    assert engine.requests[1].prompt_ids[: len(seen)] == seen


def test_tool_choice_none_leaves_calls_as_text(monkeypatch: pytest.MonkeyPatch):
    with served(monkeypatch, said(CALL)) as (client, _):
        (item,) = client.post("/v1/responses", json=ASK | {"tools": [TOOL], "tool_choice": "none"}).json()["output"]
    assert item["content"][0]["text"] == CALL


def test_logprobs_of_a_chat_completion(monkeypatch: pytest.MonkeyPatch):
    with served(monkeypatch, said("4")) as (client, _):
        choice = client.post("/v1/chat/completions", json=CHAT | {"logprobs": True}).json()["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert logprobs == choice["message"]["generation_log_probs"]


def test_thoughts_are_an_item_of_their_own(monkeypatch: pytest.MonkeyPatch):
    replies = (said("<think>\nHm.\n</think>\n\nFour."), said("<think>\nHm", closed=False))
    with served(monkeypatch, *replies, uses_reasoning_parser=True) as (client, _):
        response, cut = (client.post("/v1/responses", json=ASK).json() for _ in replies)
    thought, message = response["output"]
    assert (thought["summary"][0]["text"], message["content"][0]["text"]) == ("Hm.", "Four.")
    assert "generation_token_ids" not in thought
    assert message["generation_token_ids"]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    (thought,) = cut["output"]
    assert (thought["type"], cut["incomplete_details"]["reason"]) == ("reasoning", "max_output_tokens")
    assert thought["generation_token_ids"] == list(replies[1].token_ids)


def test_token_information_can_be_left_out(monkeypatch: pytest.MonkeyPatch):
    """The conversation goes on exactly all the same: see ``test_items_go_back``, without tokens."""
    with served(monkeypatch, said(CALL), return_token_id_information=False) as (client, _):
        (item,) = client.post("/v1/responses", json=ASK).json()["output"]
    assert "generation_token_ids" not in item


@pytest.mark.parametrize("body", [{"input": [QUESTION]}, {"messages": [QUESTION]}])
def test_tokenize_returns_the_ids_of_the_next_call(monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]):
    with served(monkeypatch, said("4")) as (client, (engine,)):
        tokenized = client.post("/tokenize", json=body | {"model": "m", "max_output_tokens": 5}).json()
        assert CODEC.decode(client.post("/tokenize", json={"prompt": "a b"}).json()["tokens"]) == "a b"
        client.post("/v1/responses", json=ASK)
    assert tokenized["tokens"] == list(engine.requests[0].prompt_ids)
    assert tokenized["count"] == len(tokenized["tokens"])


@pytest.mark.parametrize("body", [{"messages": "x"}, {"input": [5]}, {}, {"input": []}])
def test_tokenize_of_what_is_no_conversation_is_refused(silent: Any, body: dict[str, Any]):
    assert silent.post("/tokenize", json=body).status_code in (400, 422)


# --- hostile bodies

CALLED = {"type": "function_call", "call_id": "c", "name": "python"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "4"}


def posted(monkeypatch, route, body):
    with served(monkeypatch, said("4"), said("4")) as (client, _):
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        return client.post(f"/v1/{route}", content=payload, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize("depth", [2000, 9000, 20_000, 50_000])
def test_arguments_of_any_depth(monkeypatch, depth):
    deep = '{"a":' * depth + "1" + "}" * depth
    history = [*ASK["input"], {**CALLED, "arguments": deep}, RESULT]
    assert posted(monkeypatch, "responses", ASK | {"input": history}).status_code == 200


@pytest.mark.parametrize("where", ["content", "output", "description"])
def test_half_a_character(monkeypatch, where):
    texts = dict.fromkeys(("content", "output", "description"), "fine") | {where: "HALF"}
    body = {
        "input": [
            {"role": "user", "content": texts["content"]},
            {**CALLED, "arguments": "{}"},
            {**RESULT, "output": texts["output"]},
        ],
        "tools": [
            {"type": "function", "name": "f", "description": texts["description"], "parameters": {}, "strict": False}
        ],
    }
    payload = json.dumps(body).replace("HALF", "\\ud800").encode()
    assert posted(monkeypatch, "responses", payload).status_code == (400 if where == "description" else 200)


NOTHING = [("temperature", "NaN"), ("temperature", "-1"), ("temperature", "1e999")]
NOTHING += [("top_p", "NaN"), ("top_p", "0"), ("top_p", "1.5"), ("max_output_tokens", "0"), ("max_output_tokens", "-1")]


@pytest.mark.parametrize(("key", "value"), NOTHING)
def test_numbers_with_which_nothing_can_be_sampled_are_the_callers_doing(monkeypatch, key, value):
    answer = posted(monkeypatch, "responses", f'{{"input": "q", "{key}": {value}}}'.encode())
    assert answer.status_code == 400
    assert "nothing can be sampled" in answer.text
