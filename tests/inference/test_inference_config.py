import pytest

from prorl_gym.config import load_config
from prorl_gym.errors import ConfigError
from prorl_gym.inference.config import InferenceConfig, build_pool, pool_engine_factory
from prorl_gym.inference.engines.chat_prefix import ChatPrefixEngine
from prorl_gym.inference.engines.openai import OpenAIEngine
from prorl_gym.inference.engines.sglang import SglangEngine
from prorl_gym.inference.engines.vllm import VllmEngine
from prorl_gym.logs import redact

RIGHT = {"engines": ["http://127.0.0.1:8000/v1"], "model": "m", "tokenizer": "small"}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000/v1"),
        ("https://host/prefix/v1", "https://host/prefix/v1"),
        ("http://[::1]:8000/v1", "http://[::1]:8000/v1"),
    ],
)
def test_addresses_are_made_uniform(given, kept):
    assert load_config(InferenceConfig, {**RIGHT, "engines": [given]}).engines == [kept]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("127.0.0.1:8000", "looks like http://127.0.0.1:8000/v1"),
        ("ftp://host/v1", "looks like http://127.0.0.1:8000/v1"),
        ("http:///v1", "looks like http://127.0.0.1:8000/v1"),
        ("http://me:secret@host/v1", "use api_key_env"),
        ("http://host/v1?key=secret", "use api_key_env"),
        ("http://host:port/v1", "Port could not be cast"),
    ],
)
def test_what_is_no_address_is_refused(url, reason):
    with pytest.raises(ConfigError, match="'engines' is wrong") as caught:
        load_config(InferenceConfig, {**RIGHT, "engines": [url]}, "conf.yaml")
    assert reason in caught.value.what


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"engines": ["http://h:1", "http://h:1/v1"]}, "named twice"),
        ({"engines": ["http://h:1", "http://h:2"], "balance": "pass_through"}, "pass_through is for one address"),
        ({"balance": "best"}, "'balance' is wrong: .*'published' or 'pass_through'"),
        ({"engine": "triton"}, "'engine' is wrong: Input should be 'vllm', 'sglang', 'chat_prefix' or"),
        ({"max_model_length": 5}, "unknown key 'max_model_length'.\nDid you mean 'max_model_len'?"),
    ],
)
def test_what_makes_no_pool_is_refused(keys, reason):
    with pytest.raises(ConfigError, match=reason):
        load_config(InferenceConfig, {**RIGHT, **keys}, "conf.yaml")


async def test_a_pool_is_built_with_its_engines(monkeypatch):
    monkeypatch.setenv("ENGINE_KEY", "secret-of-engines")
    config = load_config(
        InferenceConfig, {**RIGHT, "engines": ["http://h:1", "http://h:2"], "api_key_env": "ENGINE_KEY"}
    )
    pool = build_pool("judge", config, vocab_size=10, version=3)
    assert pool.engines == ["judge-0", "judge-1"]
    assert pool.version == 3
    assert "secret" not in repr(config)
    assert redact("401: secret-of-engines") == "401: [hidden]"
    await pool.close()


def test_a_refused_address_is_shown_without_its_password():
    with pytest.raises(ConfigError, match="no user, password") as caught:
        load_config(InferenceConfig, {**RIGHT, "engines": ["http://user:pass@h:1"]})
    assert "pass@" not in str(caught.value)
    assert "@h:1" in str(caught.value)


def test_a_key_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv("ENGINE_KEY", raising=False)
    config = load_config(InferenceConfig, {**RIGHT, "api_key_env": "ENGINE_KEY"})
    with pytest.raises(ConfigError, match="environment variable ENGINE_KEY"):
        build_pool("policy", config, vocab_size=10)


KINDS = {
    "vllm": (VllmEngine, "raw"),
    "sglang": (SglangEngine, "processed"),
    "chat_prefix": (ChatPrefixEngine, "processed"),
    "openai": (OpenAIEngine, None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_engine_has_the_logprobs_of_its_servers(kind):
    engine_type, logprobs = KINDS[kind]
    config = load_config(InferenceConfig, {**RIGHT, "engine": kind})
    make = pool_engine_factory("policy", config, vocab_size=10, encode=lambda text: [1])
    engine = make("e", "http://h:1/v1")
    assert type(engine) is engine_type
    assert engine.logprob_kind == logprobs


async def test_text_needs_a_tokenizer():
    config = load_config(InferenceConfig, {**RIGHT, "engine": "openai"})
    with pytest.raises(ConfigError, match="engine: openai is for pools with a tokenizer"):
        build_pool("judge", config, vocab_size=10)


async def test_a_pool_is_built_as_it_is_configured():
    keys = {
        "balance": "pass_through",
        "live_rollouts": 7,
        "admission": "fixed",
        "scrape_seconds": 2,
        "salt_cache": False,
    }
    async with build_pool("policy", load_config(InferenceConfig, {**RIGHT, **keys}), vocab_size=10) as pool:
        options = pool.options
    assert (options.is_router, options.scrape_interval_seconds, options.salt_cache) == (True, 2, False)
    assert (options.admission.max_live_rollouts, options.admission.follow_capacity) == (7, False)


async def test_salts_are_for_engines_that_know_them():
    for kind, salted in (("vllm", True), ("sglang", True), ("chat_prefix", True), ("openai", False)):
        config = load_config(InferenceConfig, {**RIGHT, "engine": kind})
        async with build_pool("policy", config, vocab_size=10, encode=lambda text: [1]) as pool:
            assert pool.options.salt_cache is salted


@pytest.mark.parametrize("key", ["secret-of-engines\n", "two words", "secret…"])
def test_a_key_that_no_header_can_carry_is_refused_without_being_shown(monkeypatch, key):
    monkeypatch.setenv("ENGINE_KEY", key)
    config = load_config(InferenceConfig, {**RIGHT, "api_key_env": "ENGINE_KEY"})
    with pytest.raises(ConfigError, match=r"ENGINE_KEY .* newline") as caught:
        build_pool("policy", config, vocab_size=10)
    assert key.strip() not in str(caught.value)
