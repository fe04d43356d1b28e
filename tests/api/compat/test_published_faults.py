"""Faults of the published server that its routes could have here, one test each, under their numbers.

The numbers are those of docs/migration.md, which lists all faults and where else they are held off.
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
from compat_support import Published, process, published
from typer.testing import CliRunner

from prorl_gym.api.compat.config import CompatConfig
from prorl_gym.api.config import ServiceConfig
from prorl_gym.cli.main import app
from prorl_gym.client.wire_models import AcceptedRollout
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.scheduling.runner import RunnerConfig
from prorl_gym.settings import RolloutSettings
from prorl_gym.testing.rollout.fake_rollout import ScriptedEnvironment
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger

KEPT = CompatConfig(keep_records=True)


async def record_of(server: Published, result: dict[str, Any]) -> Any:
    return await server.service.result(result["rollout_id"])


async def calling(server: Published, *bodies: dict[str, Any]) -> list["asyncio.Task[tuple[int, Any]]"]:
    """Send these and wait until all of them run."""
    calls = [asyncio.create_task(server.post("/process", body)) for body in bodies]
    await server.until(run=len(calls))
    return calls


async def test_fault_01_exported_tokens_are_those_of_the_rollout() -> None:
    async with published(config=KEPT) as server:
        _, result = await server.post("/process", process(turns=3))
        [segment] = (await record_of(server, result)).segments
    assert [token for message in result["messages"] for token in message["token_ids"]] == segment.token_ids
    mask = [int(m["role"] == "assistant") for m in result["messages"] for _ in m["token_ids"]]
    assert mask == segment.mask


async def test_fault_02_the_reward_is_a_number() -> None:
    async with published() as server:
        _, result = await server.post("/process", process(reward=0.25))
    assert (result["reward"], result["resolved"], result["filter"]) == (0.25, False, False)


async def test_fault_03_and_04_a_grader_that_cannot_grade_gives_no_reward() -> None:
    async with published() as server:
        status, result = await server.post("/process", process(eval="grader_failed"))
    assert (status, result["reward"], result["filter"], result["critical_error"]) == (200, None, True, "eval")
    assert result["messages"]  # what RUN did is kept


async def test_fault_06_the_cap_of_a_turn_is_in_force() -> None:
    async with published(config=KEPT) as server:
        _, result = await server.post("/process", process(sampling={"max_output_tokens": 77}))
        assert (await record_of(server, result)).settings.max_turn_tokens == 77


async def test_fault_07_every_sampled_token_has_its_logprob() -> None:
    async with published() as server:
        _, result = await server.post("/process", process(turns=2))
    spoken = [message for message in result["messages"] if message["role"] == "assistant"]
    assert [len(message["token_ids"]) for message in spoken] == [3, 3]
    assert all(message["logprobs"] == [-0.5] * 3 for message in spoken)


async def test_fault_08_every_sampled_token_has_its_version() -> None:
    async with published() as server:
        _, result = await server.post("/process", process())
    assert result["policy_versions"] == [0]
    assert result["messages"][-1]["policy_versions"] == [0, 0, 0]


class SlowLedger(MemoryLedger):
    """Accepts once the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.go = asyncio.Event()

    async def add_rollouts(self, requests: Sequence[RolloutRequest]) -> list[AcceptedRollout]:
        self.asked.set()
        await self.go.wait()
        return await super().add_rollouts(requests)


async def test_fault_14_a_cancel_that_comes_before_the_job_is_registered_is_not_lost() -> None:
    ledger = SlowLedger()
    async with published(ledger=ledger) as server:
        call = asyncio.create_task(server.post("/process", process("job", run="hang")))
        await ledger.asked.wait()
        cancel = asyncio.create_task(server.post("/cancel", {"job_id": "job"}))
        await server.status()
        ledger.go.set()
        assert (await cancel)[0] == 200
        assert (await call)[1]["critical_error"] == "cancelled"


async def test_fault_14_a_client_that_leaves_before_the_job_is_registered_leaves_no_job() -> None:
    ledger = SlowLedger()
    async with published(ledger=ledger) as server:
        call = asyncio.create_task(server.post("/process", process("job", run="hang")))
        await ledger.asked.wait()
        call.cancel()
        await asyncio.wait({call})
        ledger.go.set()
        await server.until(jobs=0, total=0)


async def test_fault_15_a_worker_that_crashes_is_answered_for_at_once() -> None:
    async with published() as server:
        status, result = await asyncio.wait_for(server.post("/process", process(run="crash")), 10)
    assert (status, result["critical_error"], result["filter"], result["reward"]) == (200, "run", True, None)


async def test_fault_16_the_id_of_a_cancelled_job_works_again() -> None:
    async with published() as server:
        [call] = await calling(server, process("job", run="hang"))
        await server.post("/cancel", {"job_id": "job"})
        await call
        assert (await server.post("/process", process("job")))[1]["success"] is True


async def test_fault_17_live_jobs_of_one_id_do_not_overwrite_each_other() -> None:
    async with published() as server:
        [first] = await calling(server, process("job", run="hang"))
        second = asyncio.create_task(server.post("/process", process("job", run="hang")))
        assert (await server.post("/process", process("job", run="hang", reward=0.0)))[0] == 409
        await server.post("/stop")
        one, two = await first, await second
        assert one == two
        assert one[1]["critical_error"] == "cancelled"


async def test_fault_18_cancelled_is_a_state_and_no_accident() -> None:
    async with published() as server:
        [call] = await calling(server, process("job", run="hang"))
        await server.post("/cancel", {"job_id": "job"})
        status, result = await call
    assert (status, result["critical_error"], result["success"]) == (200, "cancelled", False)
    assert "None" not in result["error"]


async def test_fault_19_a_job_cut_off_in_init_leaves_no_sandbox() -> None:
    async with published() as server:  # which looks for sandboxes at its end
        call = asyncio.create_task(server.post("/process", process("job", init="hang", sandboxes=True)))
        await server.until(init=1)
        await server.post("/cancel", {"job_id": "job"})
        assert (await call)[1]["critical_error"] == "cancelled"


async def test_fault_20_each_control_call_gets_its_own_answer() -> None:
    async with published() as server:
        calls = await calling(server, *(process(f"job-{index}", run="hang") for index in range(8)))
        wanted = [f"job-{index}" if index % 2 else f"never-{index}" for index in range(8)]
        answers = await asyncio.gather(*(server.post("/cancel", {"job_id": name}) for name in wanted))
        assert [status for status, _ in answers] == [404, 200] * 4
        assert all(
            name in answer["error"]["what"] for name, (_, answer) in list(zip(wanted, answers, strict=True))[::2]
        )
        await server.post("/stop")
        assert {(await call)[0] for call in calls} == {200}


async def test_fault_21_blocked_calls_do_not_freeze_the_others() -> None:
    async with published() as server:
        calls = await calling(server, *(process(f"job-{index}", run="hang") for index in range(32)))
        assert (await asyncio.wait_for(server.status(), 5))["jobs"] == 32
        assert (await asyncio.wait_for(server.post("/process", process()), 5))[0] == 200
        assert (await asyncio.wait_for(server.post("/stop"), 10))[1]["cancelled"] == 32
        assert {(await call)[0] for call in calls} == {200}


async def test_fault_23_a_cancel_reaches_what_runs() -> None:
    async with published() as server:  # which looks for open sessions at its end
        await calling(server, process("job", run="hang", sandboxes=True))
        await server.post("/cancel", {"job_id": "job"})
        await server.until(jobs=0, run=0, total=0)


async def test_fault_24_an_error_is_the_one_that_happened() -> None:
    async with published() as server:
        _, result = await server.post("/process", process(run="sandbox_lost"))
    assert result["error"].startswith("scripted sandbox_lost.")
    assert result["outcome"]["kind"] == "sandbox_lost"


async def test_fault_25_time_in_the_queue_is_charged_to_no_deadline() -> None:
    environment = ScriptedEnvironment(settings=RolloutSettings(run_seconds=0.3))
    async with published(environment, runner=RunnerConfig(run=1)) as server:
        calls = [asyncio.create_task(server.post("/process", process(run="hang"))) for _ in range(2)]
        await server.until(run=1, jobs=2)
        _, queued = await server.post("/process", process())
        slow = [(await call)[1] for call in calls]
    assert {(result["critical_error"], result["timing"]["timeout_triggered"]) for result in slow} == {("timeout", True)}
    assert (queued["success"], queued["timing"]["timeout_triggered"]) == (True, False)
    assert queued["timing"]["others_time"] > 0.3


async def test_fault_25_too_much_work_is_refused() -> None:
    async with published(max_pending=1) as server:
        await calling(server, process("job", run="hang"))
        async with server.http.post(server.url + "/process", json=process()) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "5")
        await server.post("/stop")


async def test_fault_27_trajectories_of_a_prompt_go_where_its_prefix_is() -> None:
    async with published(config=KEPT) as server:
        groups: set[str] = set()
        for trajectory in range(3):
            body = process()
            body["instance"]["trajectory_id"] = trajectory
            _, result = await server.post("/process", body)
            groups.add((await record_of(server, result)).group_id)
    assert len(groups) == 1


async def test_fault_31_and_36_a_stop_touches_nothing_but_what_the_port_was_asked_for() -> None:
    async with published() as server:
        other = RolloutRequest(environment="scripted", task={"run": "hang"})
        await server.service.submit([other])
        call = asyncio.create_task(server.post("/process", process("job", run="hang")))
        await server.until(run=2)
        await server.post("/stop")
        await call
        await server.post("/start")
        assert (await server.status())["run"] == 1
        assert await server.service.result(other.rollout_id) is None
        assert (await server.post("/process", process()))[1]["success"] is True


async def test_fault_32_answers_grow_with_the_tokens_not_with_their_square() -> None:
    async with published() as server:
        sizes = [len(json.dumps((await server.post("/process", process(turns=turns)))[1])) for turns in (16, 32, 64)]
    assert (sizes[2] - sizes[1]) < 2.2 * (sizes[1] - sizes[0])


async def test_fault_33_nothing_is_remembered_for_ever() -> None:
    ledger = MemoryLedger()
    async with published(ledger=ledger, max_ended=3) as server:
        for index in range(5):
            await server.post("/process", process(f"job-{index}"))
        answers = [(await server.post("/cancel", {"job_id": f"job-{index}"}))[0] for index in range(5)]
        assert answers == [404, 404, 200, 200, 200]
        async with asyncio.timeout(10):
            while (await ledger.usage()).kept:  # noqa: ASYNC110 - an acknowledgement raises no event
                await asyncio.sleep(0.005)


async def test_fault_34_every_route_asks_for_the_token() -> None:
    async with published() as server, aiohttp.ClientSession() as stranger:
        calls = [("GET", "/status"), ("GET", "/openapi.json")]
        calls += [("POST", f"/{name}") for name in ("process", "cancel", "start", "stop")]
        calls += [("POST", "/add_llm_server"), ("POST", "/clear_llm_server")]
        for method, path in calls:
            async with stranger.request(method, server.url + path) as response:
                assert (path, response.status) == (path, 401)


async def test_fault_35_no_request_makes_the_service_call_an_address() -> None:
    async with published() as server:
        for address in ("http://10.0.0.1/v1", "http://169.254.169.254/latest", "http://user:pw@127.0.0.1:9001/v1"):
            status, answer = await server.post("/add_llm_server", {"address": address})
            assert status in (403, 422)
            assert "pw" not in json.dumps(answer)
        assert (await server.status())["llm_servers"] == 2


async def test_fault_35_and_38_a_key_in_the_body_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    async with published(config=KEPT) as server:
        _, result = await server.post("/process", process(sampling={"api_key": "the-secret", "base_url": "http://x"}))
        record = (await record_of(server, result)).model_dump_json()
    assert "the-secret" not in record + json.dumps(result) + caplog.text


async def test_fault_37_a_request_configures_nothing_but_its_sampling() -> None:
    sampling = {"custom_tokenizer": "/etc", "log_completions": True, "log_completions_folder": "/tmp/x", "timeout": 1}
    async with published(config=KEPT) as server:
        body = process(sampling={**sampling, "temperature": 0.5})
        body["instance"]["instance_id"] = "../../etc/passwd"
        _, result = await server.post("/process", body)
        settings = (await record_of(server, result)).settings
    assert (result["success"], result["instance_id"], settings.temperature) == (True, "../../etc/passwd", 0.5)
    assert settings.run_seconds == 1800.0


HOSTILE = [
    *(b"", b"{", b"[]", b"null", b"\xff", b"[" * 20_000, b'{"instance": 3}', b'{"instance": {}}'),
    b'{"instance": {"data_source": 3}}',
    b'{"instance": {"data_source": "scripted", "task": {"reward": NaN}}}',
    b'{"instance": {"data_source": "scripted", "task": {"id": "\\ud800"}}}',
    b'{"instance": {"data_source": "scripted", "task": {"id": 1' + b"0" * 5000 + b"}}}",
    b'{"instance": {"data_source": "scripted", "task": {}}, "sampling_params": {"top_p": "x"}}',
    b'{"instance": {"data_source": "scripted", "task": {}}, "sampling_params": {"seed": 1' + b"0" * 5000 + b"}}",
    b'{"instance": {"data_source": "deepscaler", "prompt": 3}}',
    b'{"instance": {"data_source": "scripted", "task": {}}, "job_id": ""}',
    b'{"instance": {"x": "' + b"x" * 40_000 + b'"}}',
]


async def test_fault_38_a_client_never_sees_a_traceback() -> None:
    async with published(max_body_bytes=30_000) as server:
        for body in HOSTILE:
            status, answer = await server.post("/process", body)
            assert 400 <= status < 500 or status == 503, body[:100]
            assert set(answer["error"]) - {"kind"} == {"what", "fix"}
            assert "Traceback" not in json.dumps(answer)


async def test_fault_38_a_defect_is_reported_without_a_traceback() -> None:
    async with published() as server:
        _, result = await server.post("/process", process(run="crash"))
    assert "Traceback" not in json.dumps(result)
    assert "traceback" not in result


@pytest.mark.parametrize(("words", "expected"), [([], None), (["--compat"], 8006), (["--compat", "False"], "usage")])
def test_fault_39_a_switch_has_no_text_that_could_mean_its_opposite(
    words: list[str], expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[ServiceConfig] = []

    async def serve(config: ServiceConfig, *_: Any) -> None:
        served.append(config)

    monkeypatch.setattr("prorl_gym.api.service_process.serve", serve)
    monkeypatch.setattr("prorl_gym.logs.configure_logging", Mock())
    file = tmp_path / "service.yaml"
    file.write_text("inference: {engines: [http://127.0.0.1:1/v1], model: m, tokenizer: small}\n")
    ended = CliRunner().invoke(app, ["serve", "--config", str(file), *words])
    if expected == "usage":
        assert (ended.exit_code, served) == (2, [])
    else:
        [config] = served
        assert (config.http.compat.port if config.http.compat else None) == expected
