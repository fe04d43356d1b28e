"""The model server over a scripted engine."""

import json
from array import array

import gym_needed  # noqa: F401
import pytest

pytestmark = pytest.mark.gym

from nemo_gym.openai_utils import NeMoGymResponse  # noqa: E402
from served_model import ASK, CALL, CODEC, QUESTION, figure, result_of, said, served  # noqa: E402

from prorl_gym.errors import ConfigError, EngineError, FailureKind, Limit, LimitReached  # noqa: E402
from prorl_gym.inference.balance.engine_pool import FailoverOptions  # noqa: E402
from prorl_gym.inference.protocol import ContextExceeded, EngineOverloaded  # noqa: E402
from prorl_gym.routed_experts import parse_routed_experts  # noqa: E402
from prorl_gym.testing.inference.fake_engine import Reply  # noqa: E402


def test_tokens_are_on_the_last_item_of_the_call(monkeypatch: pytest.MonkeyPatch):
    with served(monkeypatch, said(f"Let me see.\n{CALL}")) as (client, _):
        response = client.post("/v1/responses", json=ASK).json()
    NeMoGymResponse.model_validate(response)
    message, call = response["output"]
    assert "generation_token_ids" not in message
    assert json.loads(call["arguments"]) == {"code": "2+2"}
    assert call["generation_token_ids"][-1] == CODEC.terminator_id
    assert len(call["generation_log_probs"]) == len(call["generation_token_ids"])


def test_sampling_is_passed_verbatim(monkeypatch: pytest.MonkeyPatch):
    with served(monkeypatch, said("4"), said("4")) as (client, (engine,)):
        client.post("/v1/responses", json=ASK | {"max_output_tokens": 17})
        client.post("/v1/chat/completions", json={"messages": [QUESTION], "seed": 7})
    first, second = engine.requests
    assert (first.temperature, first.top_p, first.top_k, first.max_tokens) == (0.7, 0.9, -1, 17)
    assert second.seed == 7


def test_cookie_keeps_a_conversation_on_one_engine(monkeypatch: pytest.MonkeyPatch):
    with served(monkeypatch, *[said("4")] * 4, engines=2) as (client, engines):
        for _ in range(4):
            client.post("/v1/responses", json=ASK)
    assert sorted(len(engine.requests) for engine in engines) == [0, 4]


def test_chat_completion_carries_calls_and_tokens(monkeypatch: pytest.MonkeyPatch):
    with served(monkeypatch, said(CALL)) as (client, _):
        choice = client.post("/v1/chat/completions", json={"messages": [QUESTION]}).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "python"
    assert choice["message"]["generation_token_ids"][-1] == CODEC.terminator_id


def test_call_that_cannot_be_read_stays_visible(monkeypatch: pytest.MonkeyPatch):
    broken = '<tool_call>{"name": "python", oops}</tool_call>'
    with served(monkeypatch, said(broken)) as (client, _):
        item = client.post("/v1/responses", json=ASK).json()["output"][0]
    assert broken in item["content"][0]["text"]


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (FailureKind.ENGINE_REFUSED, 424),
        (FailureKind.TEMPLATE_UNSAFE, 400),
        (FailureKind.ENGINE_CONTRACT, 424),
        (FailureKind.ENGINE_TIMEOUT, 504),
        (FailureKind.ENGINE_UNREACHABLE, 503),
    ],
)
def test_failure_of_an_engine_is_a_status(monkeypatch: pytest.MonkeyPatch, kind: FailureKind, status: int):
    failover = FailoverOptions(max_attempts=1)
    with served(monkeypatch, EngineError(kind, "engine e0 refuses."), failover=failover) as (client, _):
        answer = client.post("/v1/responses", json=ASK)
    assert (answer.status_code, "engine e0 refuses." in answer.text) == (status, True)


def test_status_does_not_repeat_a_key(monkeypatch: pytest.MonkeyPatch):
    refusal = EngineError(FailureKind.ENGINE_REFUSED, "engine e0 refuses key-of-the-engines, Bearer abc123456.")
    with served(monkeypatch, refusal, api_key="key-of-the-engines") as (client, _):
        assert client.post("/v1/responses", json=ASK).json()["detail"] == "engine e0 refuses [hidden], Bearer [hidden]"


@pytest.mark.parametrize("is_error", [False, True])
def test_full_context_is_an_empty_incomplete_answer_or_an_error_that_harnesses_know(
    monkeypatch: pytest.MonkeyPatch, is_error: bool
):
    full = LimitReached(Limit.TOKENS)
    with served(monkeypatch, full, propagate_context_overflow_errors=is_error) as (client, _):
        answer = client.post("/v1/responses", json=ASK)
    if is_error:
        assert (answer.status_code, "maximum context length" in answer.json()["detail"]) == (400, True)
    else:
        assert answer.json()["incomplete_details"] == {"reason": "max_output_tokens"}
        assert "generation_token_ids" not in answer.json()["output"][0]


def test_turn_that_an_engine_aborts_goes_on_from_its_tokens_and_its_experts_are_put_together(
    monkeypatch: pytest.MonkeyPatch,
):
    whole = said("one two three").token_ids
    with served(monkeypatch, Reply(whole)) as (client, (engine,)):
        client.post("/v1/responses", json=ASK)
    prompt, length = len(engine.requests[0].prompt_ids), len(engine.requests[0].prompt_ids) + len(whole)
    replies = (
        Reply(whole[:2], "abort", routed_experts=[[[1]]] * (prompt + 1)),
        Reply(whole[2:], routed_experts=[[[2]]] * (length - 1)),
    )
    with served(monkeypatch, *replies) as (client, (engine,)):
        response = client.post("/v1/responses", json=ASK | {"max_output_tokens": 9}).json()
    (item,) = response["output"]
    assert (response["incomplete_details"], item["generation_token_ids"]) == (None, list(whole))
    first, second = engine.requests
    assert second.prompt_ids == first.prompt_ids + whole[:2]
    assert (first.max_tokens, second.max_tokens) == (9, 7)
    found = parse_routed_experts(item["routed_experts"], length)
    assert found is not None
    # The token before the abort is run by the second call; the last one by none, so its row is padding.
    assert list(array("i", found.data)) == [1] * (prompt + 1) + [2] * (len(whole) - 2) + [0]


def test_engine_with_a_smaller_context_is_asked_for_less(monkeypatch: pytest.MonkeyPatch):
    with served(monkeypatch, ContextExceeded(1000), said("4")) as (client, (engine,)):
        response = client.post("/v1/responses", json=ASK).json()
    assert response["output"][0]["generation_token_ids"] == list(said("4").token_ids)
    assert engine.requests[1].max_tokens == 1000 - len(engine.requests[1].prompt_ids)


def test_unknown_inference_key_names_the_nearest(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="Did you mean 'attempts'"):
        with served(monkeypatch, inference={"atempts": 2}):
            pass


@pytest.mark.parametrize(("asked", "seconds"), [(7.2, "8"), (None, "1"), (900.0, "60")])
def test_overload_answers_how_long_to_wait(monkeypatch: pytest.MonkeyPatch, asked: float | None, seconds: str):
    overload = EngineOverloaded("http://127.0.0.1:1/v1", 429, asked)
    with served(monkeypatch, overload, failover=FailoverOptions(max_attempts=1)) as (client, _):
        answer = client.post("/v1/responses", json=ASK)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, seconds)


def test_history_that_was_changed_is_counted_and_said(monkeypatch: pytest.MonkeyPatch):
    with served(monkeypatch, said(CALL), said("4")) as (client, _):
        (item,) = client.post("/v1/responses", json=ASK).json()["output"]
        changed = ASK | {"input": [{"role": "user", "content": "A summary."}, item, result_of(item)]}
        answer = client.post("/v1/responses", json=changed).json()
        assert figure(client, 'prorl_model_prompts_total{origin="changed"}') == 1
    assert answer["metadata"]["prorl_new_segment"] == "changed"
    assert answer["output"][0]["generation_token_ids"]


def test_rollout_in_the_address_is_the_session(monkeypatch: pytest.MonkeyPatch):
    with served(monkeypatch, said("4"), said("4")) as (client, (engine,)):
        for _ in range(2):
            client.cookies.clear()
            client.post("/ng-rollout/r7/v1/responses", json=ASK)
    assert [request.session_id for request in engine.requests] == ["r7", "r7"]


def test_an_answer_has_its_usage_and_policy_version(monkeypatch: pytest.MonkeyPatch):
    with served(monkeypatch, said("4")) as (client, (engine,)):
        engine.version = 3
        answer = client.post("/v1/responses", json=ASK).json()
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (len(engine.requests[0].prompt_ids), 2)
    assert answer["metadata"]["prorl_policy_version"] == "3"
