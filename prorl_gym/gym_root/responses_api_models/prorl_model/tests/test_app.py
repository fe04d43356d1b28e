# SPDX-FileCopyrightText: Copyright (c) 2026 the prorl-gym authors
# SPDX-License-Identifier: Apache-2.0

"""Token ids in, token ids out. The server's other tests are in prorl-gym's own suite (tests/gym)."""

from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient

from prorl_gym.gym_root.responses_api_models.prorl_model import app
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply

CONFIG = app.ProrlModelConfig(
    name="policy_model",
    host="127.0.0.1",
    port=1,
    entrypoint="app.py",
    base_url="http://127.0.0.1:1/v1",
    model="m",
    tokenizer="small",
)


def test_a_call_continues_from_the_ids_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = load_codec("small")
    ids = (*codec.tokenizer.encode_trusted("4"), codec.terminator_id)
    engine = FakeEngine("e0", lambda request: Reply(ids, "stop"))
    pool = EnginePool("policy")
    pool.add_engine(engine)
    monkeypatch.setattr(app, "build_pool", lambda *args, **options: pool)
    server = app.ProrlModel.model_construct(config=CONFIG, server_client=SimpleNamespace(global_config_dict={}))
    server.model_post_init(None)
    question = {"role": "user", "content": "2+2?"}
    with TestClient(server.setup_webserver()) as client:
        (item,) = client.post("/v1/responses", json={"input": [question]}).json()["output"]
        client.post("/v1/responses", json={"input": [question, item, {"role": "user", "content": "Sure?"}]})
    assert tuple(item["generation_token_ids"]) == ids
    assert len(item["generation_log_probs"]) == len(ids)
    seen = (*item["prompt_token_ids"], *ids)
    assert engine.requests[1].prompt_ids[: len(seen)] == seen
