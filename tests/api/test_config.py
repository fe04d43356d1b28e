"""The configuration tree, what is said about mistakes in it, and which engine addresses may join."""

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from prorl_gym.api.build import offered_environments
from prorl_gym.api.config import AllowedUrls, ServiceConfig, UrlPattern
from prorl_gym.api.service_process import bind_socket
from prorl_gym.config import load_config
from prorl_gym.errors import ConfigError, TaskError
from prorl_gym.inference.config import InferenceConfig, normalize_url

LEAST: dict[str, Any] = {"inference": {"engines": ["http://127.0.0.1:1"], "model": "m", "tokenizer": "small"}}


def complaint(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(ServiceConfig, {**LEAST, **changes}, "F")
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runner": {"runs": 3}}, "F: unknown key 'runner.runs'.\nDid you mean 'run'?"),
        ({"runner": {"run": 0}}, "F: 'runner.run' is wrong: Input should be greater than or equal to 1.\nFound 0."),
        (
            {"inference": {}},
            "F: required key 'inference.engines' is missing.\n"
            "Add it: Base URLs of the servers, for example ``http://127.0.0.1:8000/v1``.",
        ),
        (
            {"inference": {"urls": []}},
            "F: unknown key 'inference.urls'.\nValid keys here: "
            + ", ".join(sorted(InferenceConfig.model_fields))
            + ".",
        ),
        (
            {"runs": {"step-7": {"agent": "codx"}}},
            "F: 'runs' is wrong: There is no agent 'codx' (Did you mean 'codex'?).\n"
            "Found {'step-7': {'agent': 'codx'}}.",
        ),
        (
            {"inference_urls": ["file:///etc/passwd"]},
            "F: 'inference_urls' is wrong: an engine's address looks like http://127.0.0.1:8000/v1.\n"
            "Found ['file:///etc/passwd'].",
        ),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], message: str) -> None:
    assert complaint(**changes) == message


def test_unknown_environment_in_the_configuration() -> None:
    with pytest.raises(ConfigError) as caught:
        offered_environments(["mth"])
    assert str(caught.value) == "environments: There is no environment 'mth'.\nDid you mean 'math'?"


@pytest.mark.parametrize(
    ("offered", "name", "known"), [(["math"], "code", "math"), ((), "mtah", "code, math, stem, swe, taskdir")]
)
def test_an_environment_that_is_not_offered(offered: Sequence[str], name: str, known: str) -> None:
    find = offered_environments(offered)
    assert find("math").name == "math"
    with pytest.raises(TaskError) as caught:
        find(name)
    assert str(caught.value) == f"This service does not offer environment '{name}'.\nIt offers: {known}."


def test_an_address_that_is_taken() -> None:
    with bind_socket("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            bind_socket("127.0.0.1", port)
    assert str(caught.value) == (
        f"127.0.0.1:{port}: cannot listen there (Address already in use).\nSet http.port to a free one, or 0."
    )


async def test_answers_do_not_wait_for_acknowledgements() -> None:
    """With Nagle's algorithm, an answer in two packets takes 40 ms longer."""
    off: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        off.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    with bind_socket("127.0.0.1", 0) as listener:
        async with await asyncio.start_server(accepted, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            assert await off
            writer.close()


@pytest.mark.parametrize(
    ("pattern", "url"),
    [
        ("http://10.0.0.*:8000/v1", "http://10.0.0.7:8000/v1"),
        ("http://10.0.*.*:*", "http://10.0.3.4:31000/v1"),
        ("https://*.cluster.lan", "https://gpu-3.cluster.lan/v1"),
        ("https://node-*.lan:443/v1/", "https://NODE-12.lan/v1"),
        ("http://[::1]:*/v1", "http://[::1]:8000/v1"),
    ],
)
def test_a_pattern_fits(pattern: str, url: str) -> None:
    assert UrlPattern.parse(pattern).matches(normalize_url(url))


@pytest.mark.parametrize(
    ("pattern", "url"),
    [
        ("http://10.0.0.*:8000/v1", "http://10.0.0.7:8001/v1"),
        ("http://10.0.0.*:8000/v1", "https://10.0.0.7:8000/v1"),
        ("http://10.0.0.*:8000/v1", "http://10.0.0.7:8000/admin"),
        ("http://10.0.0.*:8000/v1", "http://10.0.0.7.evil.com:8000/v1"),
        ("http://10.0.0.*:8000/v1", "http://10.0.0.evil:8000/v1"),
        ("http://*.cluster.lan/v1", "http://a.b.cluster.lan/v1"),
        ("http://*.cluster.lan/v1", "http://evil.com/x.cluster.lan/v1"),
        ("http://node*.lan:*/v1", "http://node1.lan.evil.com:80/v1"),
        ("http://a.b/v1", "http://axb/v1"),
    ],
)
def test_a_pattern_swallows_no_separator(pattern: str, url: str) -> None:
    assert not UrlPattern.parse(pattern).matches(normalize_url(url))


@pytest.mark.parametrize("pattern", ["*", "http://*/v1", "http://*.*:8000/v1", "http://a/*", "ftp://a", "http://u@a.*"])
def test_what_is_no_pattern(pattern: str) -> None:
    with pytest.raises(ValueError):
        UrlPattern.parse(pattern)


def test_configured_engines_are_always_allowed() -> None:
    allowed = AllowedUrls(["http://127.0.0.1:1/v1"])
    assert "http://127.0.0.1:1/v1" in allowed
    assert "http://127.0.0.1:2/v1" not in allowed
