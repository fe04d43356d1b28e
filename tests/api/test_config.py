"""The configuration tree, and what is said about mistakes in it."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from prorl_gym.api.build import offered_environments
from prorl_gym.api.config import ServiceConfig
from prorl_gym.api.service_process import bind_socket
from prorl_gym.config import load_config
from prorl_gym.errors import ConfigError, TaskError
from prorl_gym.inference.config import InferenceConfig

LEAST: dict[str, Any] = {"inference": {"engines": ["http://127.0.0.1:1"], "model": "m", "tokenizer": "small"}}


def complaint(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(ServiceConfig, {**LEAST, **changes}, "F")
    return str(caught.value)


def test_defaults_follow_the_state_directory(tmp_path: Path) -> None:
    config = load_config(ServiceConfig, {**LEAST, "state": str(tmp_path)})
    assert (config.ledger_config.path, config.token_file) == (tmp_path / "ledger.sqlite", tmp_path / "token")
    assert (config.http.host, config.inference.engines) == ("127.0.0.1", ["http://127.0.0.1:1/v1"])
    own = load_config(ServiceConfig, {**LEAST, "ledger": {"path": "/data/l.db"}})
    assert own.ledger_config.path == Path("/data/l.db")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runer": {}}, "F: unknown key 'runer'.\nDid you mean 'runner'?"),
        ({"runner": {"runs": 3}}, "F: unknown key 'runner.runs'.\nDid you mean 'run'?"),
        ({"runner": {"run": 0}}, "F: 'runner.run' is wrong: Input should be greater than or equal to 1.\nFound 0."),
        ({"http": {"prot": 1}}, "F: unknown key 'http.prot'.\nDid you mean 'port'?"),
        ({"settings": {"temprature": 1}}, "F: unknown key 'settings.temprature'.\nDid you mean 'temperature'?"),
        (
            {"retry": {"attempts": 0}},
            "F: 'retry.attempts' is wrong: Input should be greater than or equal to 1.\nFound 0.",
        ),
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
            {"ledger": {}},
            "F: required key 'ledger.path' is missing.\n"
            "Add it: SQLite file, on a local disk; created at the first start. Its directory must exist.",
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


def test_an_environment_that_is_not_offered() -> None:
    find = offered_environments(["math"])
    assert find("math").name == "math"
    with pytest.raises(TaskError) as caught:
        find("code")
    assert str(caught.value) == "This service does not offer environment 'code'.\nIt offers: math."


def test_a_service_that_offers_all_names_them() -> None:
    with pytest.raises(TaskError) as caught:
        offered_environments(())("mtah")
    assert str(caught.value) == (
        "This service does not offer environment 'mtah'.\nIt offers: code, math, stem, swe, taskdir."
    )


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
