import pytest

from prorl_gym.config import load_config
from prorl_gym.errors import ConfigError
from prorl_gym.inference.config import InferenceConfig, build_pool
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


def test_an_engine_is_named_once():
    with pytest.raises(ConfigError, match="named twice"):
        load_config(InferenceConfig, {**RIGHT, "engines": ["http://h:1", "http://h:1/v1"]})


def test_a_misspelt_key_is_corrected():
    with pytest.raises(ConfigError) as caught:
        load_config(InferenceConfig, {**RIGHT, "max_model_length": 5}, "conf.yaml")
    assert str(caught.value) == "conf.yaml: unknown key 'max_model_length'.\nDid you mean 'max_model_len'?"


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
