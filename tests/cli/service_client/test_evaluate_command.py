"""``prorl-gym evaluate``: against a service on fakes, and a model behind an address."""

import asyncio
import json
import os
import re
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from killed_service import COMMAND, ENGINE, started
from loopback_service import TOKEN, in_a_thread
from typer.testing import CliRunner, Result

from prorl_gym.cli.demo.stack import descendants
from prorl_gym.cli.main import app
from prorl_gym.cli.temporary_service import temporary_service
from prorl_gym.client import SyncClient
from prorl_gym.environments import registry
from prorl_gym.errors import ConfigError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    entry = EntryPoint(
        "scripted", "prorl_gym.testing.rollout.fake_rollout:ScriptedEnvironment", registry.ENTRY_POINT_GROUP
    )
    monkeypatch.setattr(registry, "installed_plugins", lambda: {"scripted": entry})
    with in_a_thread() as address:
        monkeypatch.setenv("PRORL_GYM_URL", address)
        monkeypatch.setenv("PRORL_GYM_TOKEN", TOKEN)
        yield address
    registry.get.cache_clear()


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["evaluate", *arguments], env={"COLUMNS": "200"})


def rows(tmp_path: Path, *tasks: dict[str, Any]) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return str(file)


def test_the_command_prints_figures(service: str, tmp_path: Path) -> None:
    file = rows(tmp_path, {"id": "good", "reward": 1.0}, {"id": "bad", "reward": 0.0})
    done = call("scripted", file, "--samples", "4", "--k", "1,4", "--temperature", "0.6", "--run", "e1", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["pass_at"]["4"]["value"] == 0.5 and found["pass_at"]["4"]["rows"] == 2
    assert (found["samples"], found["excluded"], found["mean_turns"]) == (8, {}, 1.0)
    assert found["by_row"]["1:good"] == {"samples": 4, "solved": 4, "excluded": 0}


def test_the_rollouts_are_evaluation_with_settings_of_their_own_and_can_be_gone_on_with(
    service: str, tmp_path: Path
) -> None:
    file = rows(tmp_path, {"id": "good", "reward": 1.0})
    for _ in range(2):  # again: the same ids, nothing is made twice
        assert call("scripted", file, "--samples", "2", "--temperature", "0.25", "--run", "e2").exit_code == 0
    with SyncClient(service, token=TOKEN) as client:
        listed = client.rollouts("e2").rollouts
        first = client.request("e2.0.0")
    assert sorted(one.rollout_id for one in listed) == ["e2.0.0", "e2.0.1"]
    assert (first.evaluation, first.settings.temperature, first.group_size) == (True, 0.25, 2)


def test_too_few_samples_are_reported(service: str, tmp_path: Path) -> None:
    file = rows(tmp_path, {"id": "good", "reward": 1.0}, {"id": "torn", "run": "engine_timeout"})
    done = call("scripted", file, "--samples", "2", "--k", "2")
    assert done.exit_code == 1
    assert re.search(r"pass@2\s*│\s*1\.000.*│\s*1\s*│", done.output), done.output
    assert re.search(r"left out: 2 failed\(engine_timeout\)\n  the first: \w+", done.output)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_named(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def interrupted(*_: object) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr(SyncClient, "result", interrupted)
    done = call("scripted", rows(tmp_path, {"id": "good"}))
    assert done.exit_code == 130
    named = re.match(r"run (eval-\w+)\n", done.stderr)
    assert named and f"command with --run {named[1]} goes on" in done.stderr
    assert f"prorl-gym cancel --run {named[1]}`" in done.stderr


def test_a_run_goes_on_with_the_same_options_only(service: str, tmp_path: Path) -> None:
    file = rows(tmp_path, {"id": "good"})
    assert call("scripted", file, "--samples", "2", "--run", "e3").exit_code == 0
    done = call("scripted", file, "--samples", "4", "--run", "e3")
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).splitlines() == [
        "Run e3 was begun with other options or rows.",
        "Give the same ones again, or another --run.",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "x"], "--k 'x': no numbers"),
        (["--k", "9"], "--k 9 needs as many samples"),
        (["--k", "0"], "no numbers"),
        (["--model", "m"], "--model belongs to --base-url"),
        (["--base-url", "http://127.0.0.1:1/v1"], "--base-url needs --model"),
        (["--run", "a b"], "'rollout_id' is wrong|'run_id' is wrong"),
    ],
)
def test_bad_options_are_reported(service: str, arguments: list[str], message: str, tmp_path: Path) -> None:
    done = call("scripted", rows(tmp_path, {"id": "good"}), *arguments)
    assert isinstance(done.exception, ConfigError)
    assert re.search(message, str(done.exception))


def test_a_bad_row_is_reported_before_anything_is_sent(service: str, tmp_path: Path) -> None:
    done = call("scripted", rows(tmp_path, {"id": "good"}, {"nonsense": 1}))
    assert isinstance(done.exception, ConfigError) and "rows.jsonl:2" in str(done.exception)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_model_behind_an_address_is_evaluated_by_a_service_of_its_own(tmp_path: Path) -> None:
    with started(["engine", "oracle", "--port", "0", "--model", "m"], ENGINE) as (_, address):
        math = str(ROOT / "environments" / "prorl_math" / "data" / "example.jsonl")
        own = ["--base-url", address, "--model", "m", "--engine", "vllm", "--tokenizer", "small"]
        command = [*COMMAND, "evaluate", "math", math, "--samples", "2", "--k", "1,2", *own]
        env = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
        done = subprocess.run(
            [*command, "--json"], env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=150
        )
        assert done.returncode == 0, done.stderr + done.stdout
        found = json.loads(done.stdout)
        assert found["pass_at"]["1"] == {"value": 1.0, "low": pytest.approx(0.5655, abs=1e-3), "high": 1.0, "rows": 5}
        assert not list(tmp_path.iterdir()), "nothing is left of its service"


@pytest.mark.slow
@pytest.mark.timeout(200)
async def test_a_text_only_server_is_evaluated_too(tmp_path: Path) -> None:
    """Every second answer is right: pass@1 is a half. Nothing but text comes back."""
    said: list[str] = []

    async def complete(request: web.Request) -> web.Response:
        answer = "Fewer words: \\boxed{42}." if len(said) % 2 else "I do not know."
        if "6*7?" in await request.text():  # the other call is the trial at the start of the service
            said.append(answer)
        message = {"role": "assistant", "content": answer}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
        body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        return web.json_response(body)

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 8192}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as server:
        file = rows(tmp_path, {"id": "m", "question": "6*7?", "answer": "42"})
        own = ["--base-url", str(server.make_url("/v1")), "--model", "m", "--tokenizer", "small"]
        child = await asyncio.create_subprocess_exec(
            *[*COMMAND, "evaluate", "math", file, "--samples", "4", "--k", "1,2", "--json", *own],
            *["--max-model-len", "8192", "--temperature", "0.6"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )
        out, errors = await child.communicate()
    assert child.returncode == 0, (out + errors).decode()
    found = json.loads(out)
    assert found["pass_at"]["1"]["value"] == 0.5
    assert found["pass_at"]["2"]["value"] == pytest.approx(1 - 1 / 6)
    assert found["samples"] == len(said) == 4


@pytest.mark.slow
@pytest.mark.timeout(100)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_its_own_service_ends_with_it(tmp_path: Path, number: signal.Signals, code: int) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    file = rows(tmp_path, {"id": "m", "question": "6*7?", "answer": "42"})
    with socket.create_server(("127.0.0.1", 0)) as engine:  # takes connections, never answers
        engine.settimeout(60)
        own = ["--base-url", f"http://127.0.0.1:{engine.getsockname()[1]}/v1", "--model", "m", "--tokenizer", "small"]
        command = [*COMMAND, "evaluate", "math", file, "--max-model-len", "8192", *own]
        env = {**os.environ, "TMPDIR": str(temporary)}
        evaluate = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        services: list[int] = []
        try:
            engine.accept()[0].close()  # by the service: it runs
            services = [os.pidfd_open(seen.pid) for seen in descendants(evaluate.pid)]
            evaluate.send_signal(number)
            evaluate.communicate(timeout=60)
            assert services and all(select.select([service], [], [], 30)[0] for service in services)
        finally:
            for service in services:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(service, signal.SIGKILL)
                os.close(service)
            evaluate.kill()
            evaluate.communicate()
    assert evaluate.returncode == code
    assert number == signal.SIGKILL or not list(temporary.iterdir()), "nothing is left of its service"


@pytest.mark.slow
def test_the_tokenizer_of_a_model_is_asked_for(tmp_path: Path) -> None:
    file = rows(tmp_path, {"id": "m", "question": "6*7?", "answer": "42"})
    done = call("math", file, "--base-url", "http://127.0.0.1:9/v1", "--model", "m")
    assert re.search(r"tokenizer 'm'.*--tokenizer DIR", str(done.exception))


@pytest.mark.slow
def test_a_service_that_does_not_start_reports_why() -> None:
    with (
        pytest.raises(ConfigError, match=r"^The service does not start: unknown key 'inference"),
        temporary_service({"inference": {"modl": 1}}),
    ):
        pass
