"""The model server over scripted engines, or over whatever builds its pool."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gym_needed  # noqa: F401
import pytest
from fastapi.testclient import TestClient

import prorl_gym.gym_root.responses_api_models.prorl_model.app as model_app
from prorl_gym.inference.balance.engine_pool import EnginePool, FailoverOptions
from prorl_gym.inference.protocol import GenerationRequest
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply

CODEC = load_codec("small")
CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "2+2"}}\n</tool_call>'
QUESTION = {"role": "user", "content": "2+2?"}
ASK = {"input": [QUESTION], "temperature": 0.7, "top_p": 0.9}
TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts")

Script = Callable[[GenerationRequest], Reply | Exception]


def said(text: str, *, closed: bool = True) -> Reply:
    ids = CODEC.tokenizer.encode_trusted(text)
    return Reply((*ids, CODEC.terminator_id) if closed else tuple(ids), "stop" if closed else "length")


def without_tokens(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in TOKEN_FIELDS}


def result_of(item: dict[str, Any], output: str = "4") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": item["call_id"], "output": output}


class Client:
    """NeMo Gym's server client, as far as building the app needs it."""

    global_config_dict: dict[str, Any] = {}  # noqa: RUF012


def model_server(**options: Any) -> Any:
    fields = {"base_url": ["http://127.0.0.1:1/v1"], "model": "m", "tokenizer": "small", **options}
    config = model_app.ProrlModelConfig(name="policy_model", host="127.0.0.1", port=1, entrypoint="app.py", **fields)
    server = model_app.ProrlModel.model_construct(config=config, server_client=Client())
    server.model_post_init(None)
    return server


@contextmanager
def served(
    monkeypatch: pytest.MonkeyPatch,
    *replies: Reply | Exception,
    script: Script | None = None,
    engines: int = 1,
    failover: FailoverOptions | None = None,
    **options: Any,
) -> Iterator[tuple[TestClient, list[FakeEngine]]]:
    pending = iter(replies)
    fakes = [FakeEngine(f"e{i}", script or (lambda request: next(pending))) for i in range(engines)]

    def build(name: str, config: Any, **rest: Any) -> EnginePool:
        pool = EnginePool(name, failover=failover)
        for fake in fakes:
            pool.add_engine(fake)
        return pool

    monkeypatch.setattr(model_app, "build_pool", build)
    with TestClient(model_server(**options).setup_webserver()) as client:
        yield client, fakes


def figure(client: TestClient, line: str) -> float:
    """Return one figure of the metrics page."""
    page = client.get("/metrics").text
    return next(float(found.rpartition(" ")[2]) for found in page.splitlines() if found.startswith(f"{line} "))
