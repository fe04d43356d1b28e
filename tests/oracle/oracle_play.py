"""Oracles on real ports, and sessions that talk to them."""

from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from pathlib import Path

import pytest

from prorl_gym.inference.config import InferenceConfig, build_pool
from prorl_gym.inference.tokens.model_session import ModelSession
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.oracle.oracle_policy import OraclePolicy
from prorl_gym.oracle.oracle_server import OracleOptions, OracleServer, serve_oracle
from prorl_gym.settings import RolloutSettings, resolve_settings

QWEN = Path(__file__).parents[2].parent / "shared" / "tokenizers" / "qwen"
NO_QWEN = f"normal outside CI: to have it, put Qwen's tokenizer files and templates into {QWEN}"
TOKENIZERS = [
    "small",
    pytest.param(
        str(QWEN),
        id="qwen",
        marks=pytest.mark.skipif(not QWEN.is_dir(), reason=NO_QWEN),
    ),
]


@cache
def loaded(name):
    return load_codec(name)


@asynccontextmanager
async def playing(codec, rows, count=1, solve_rate=1.0):
    """``count`` oracles, and a pool over them."""
    async with AsyncExitStack() as stack:
        urls = []
        for _ in range(count):
            player = OraclePolicy(codec, rows, solve_rate=solve_rate, seed=3)
            server = OracleServer(codec, player, OracleOptions())
            urls.append(await stack.enter_async_context(serve_oracle(server, "127.0.0.1", 0)))
        config = InferenceConfig(engines=urls, model="oracle", tokenizer="small", wait_seconds=1)
        yield await stack.enter_async_context(build_pool("policy", config, vocab_size=codec.vocab_size))


def session(pool, codec, rollout_id="r", replica=0, **settings):
    chosen = {"seed": 5, "max_tokens": 16384, "max_turn_tokens": 2048, **settings}
    resolved = resolve_settings(RolloutSettings(**chosen))
    return ModelSession(pool, codec, resolved, rollout_id=rollout_id, replica=replica)
