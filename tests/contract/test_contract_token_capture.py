"""Gym's own capture of token ids over our model server: what it files is what the engines saw and sampled."""

from pathlib import Path
from typing import Any

import gym_needed  # noqa: F401
import pytest
from fastapi.testclient import TestClient
from served_model import ASK, CALL, TOKEN_FIELDS, Client, result_of, said, served, without_tokens

from prorl_gym.testing.inference.fake_engine import FakeEngine

store = pytest.importorskip("nemo_gym.token_id_capture.store", reason="needs NeMo Gym 0.7")
consumer = pytest.importorskip("nemo_gym.token_id_capture.consumer")

pytestmark = pytest.mark.gym

ROUTE = "/ng-rollout/3-0/training-token-capture/v1"
Calls = list[tuple[list[int], list[int], list[float]]]
TRIPLE = TOKEN_FIELDS[:3]


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Gym's configuration, with capture on; returns the directory that it files records in."""
    block = {"token_id_capture": {"enabled": True, "all_agents": True, "dir": str(tmp_path)}}
    monkeypatch.setattr(Client, "global_config_dict", block)
    return tmp_path


def engine_calls(engine: FakeEngine, *replies: Any) -> Calls:
    pairs = zip(engine.requests, replies, strict=True)
    return [(list(asked.prompt_ids), list(one.token_ids), [-0.5] * len(one.token_ids)) for asked, one in pairs]


def captured(folder: Path) -> Calls:
    entries = store.TokenCaptureStore(folder).freeze_now("3-0").entries
    return [(one.prompt_token_ids, one.generation_token_ids, one.generation_log_probs) for one in entries]


def rebuilt(folder: Path) -> dict[str, Any]:
    found = consumer.trajectories_for_rollout("3-0", [folder])
    assert found is not None
    return found


def tell_responses(client: TestClient, *, with_ids: bool) -> list[dict[str, Any]]:
    """Two turns of an agent; return the last item of each, which carries the ids."""
    first = client.post(f"{ROUTE}/responses", json=ASK).json()["output"]
    kept = first if with_ids else [without_tokens(item) for item in first]
    history = [*ASK["input"], *kept, result_of(first[-1])]
    second = client.post(f"{ROUTE}/responses", json=ASK | {"input": history}).json()["output"]
    return [first[-1], second[-1]]


@pytest.mark.parametrize("with_ids", [True, False], ids=["an agent that returns ids", "one that keeps text"])
def test_records_are_those_of_the_engine_and_rebuild_one_growing_sequence(
    capturing: Path, monkeypatch: pytest.MonkeyPatch, with_ids: bool
):
    replies = (said(f"Let me see.\n{CALL}"), said("It is 4."))
    with served(monkeypatch, *replies) as (client, [engine]):
        ours = tell_responses(client, with_ids=with_ids)
    calls = engine_calls(engine, *replies)
    assert calls[1][0][: len(calls[0][0]) + len(calls[0][1])] == [*calls[0][0], *calls[0][1]]
    assert captured(capturing) == calls
    found = rebuilt(capturing)
    assert (found["mask_sample"], found.get("error")) == (False, None)
    items = [item for item in found["rebuilt_response"]["output"] if item.get("generation_token_ids")]
    fields = [tuple(item[key] for key in TRIPLE) for item in items]
    assert fields == calls == [tuple(item[key] for key in TRIPLE) for item in ours]


def test_an_edited_history_is_two_sequences_for_both(capturing: Path, monkeypatch: pytest.MonkeyPatch):
    replies = (said("It is 5."), said("It is 4."))
    with served(monkeypatch, *replies) as (client, [engine]):
        first = client.post(f"{ROUTE}/responses", json=ASK).json()["output"]
        text = {"role": "assistant", "content": "It is 3."}
        client.post(f"{ROUTE}/responses", json=ASK | {"input": [*ASK["input"], text, {"role": "user", "content": "?"}]})
    assert first
    assert captured(capturing) == engine_calls(engine, *replies)
    assert rebuilt(capturing)["mask_sample"] is True


def test_chat_completions_are_filed_alike(capturing: Path, monkeypatch: pytest.MonkeyPatch):
    replies = (said("It is 4."), said("Yes."))
    with served(monkeypatch, *replies) as (client, [engine]):
        messages: list[dict[str, Any]] = [{"role": "user", "content": "2+2?"}]
        for _ in replies:
            answer = client.post(f"{ROUTE}/chat/completions", json={"messages": messages}).json()
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "Sure?"}]
    assert captured(capturing) == engine_calls(engine, *replies)
    assert rebuilt(capturing)["mask_sample"] is False
