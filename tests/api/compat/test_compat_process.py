"""The published routes do what their clients expect."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from compat_support import ENGINES, TOKEN, Published, process, published

from prorl_gym.api.compat.config import CompatConfig


@pytest.fixture
async def server() -> AsyncIterator[Published]:
    async with published() as made:
        yield made


async def test_a_result_has_every_published_field(server: Published) -> None:
    status, result = await server.post("/process", process("job", turns=2))
    assert status == 200
    assert (result["instance_id"], result["trajectory_id"]) == ("row-1", 0)
    assert (result["resolved"], result["success"], result["finish"], result["filter"]) == (True, True, True, False)
    assert (result["error"], result["critical_error"], result["end_properly"], result["tools"]) == (
        None,
        None,
        True,
        [],
    )
    assert set(result["timing"]) == {
        *("init_time", "run_time", "eval_time", "others_time", "counted_elapsed", "timeout_triggered")
    }
    assert (result["reward"], result["policy_versions"]) == (1.0, [0])
    assert [message["role"] for message in result["messages"]].count("assistant") == 2


async def test_a_job_id_is_optional_and_free_again_after_its_answer(server: Published) -> None:
    for body in (process(), process(), process("job"), process("job"), process("job", reward=0.5)):
        status, result = await server.post("/process", body)
        assert (status, result["success"]) == (200, True)


async def test_cancel_answers_both_calls(server: Published) -> None:
    blocked = asyncio.create_task(server.post("/process", process("job", run="hang", turns=1)))
    await server.until(run=1)
    assert await server.post("/cancel", {"job_id": "job"}) == (200, {"status": "cancelled"})
    status, result = await blocked
    assert (status, result["critical_error"], result["filter"], result["resolved"]) == (200, "cancelled", True, False)
    assert result["reward"] is None
    assert sum(len(message["token_ids"]) for message in result["messages"]) == 4  # what was sampled is kept
    assert await server.post("/cancel", {"job_id": "job"}) == (200, {"status": "ended already"})
    assert (await server.post("/cancel", {"job_id": "never"}))[0] == 404


async def test_hanging_up_cancels(server: Published) -> None:
    calling = asyncio.create_task(server.post("/process", process("job", run="hang")))
    await server.until(jobs=1, run=1)
    calling.cancel()
    await server.until(jobs=0, total=0)


async def test_a_twin_of_a_call_joins_it_and_survives_it(server: Published) -> None:
    body = process("job", run="hang")
    first, second = (asyncio.create_task(server.post("/process", body)) for _ in range(2))
    await server.until(jobs=1, run=1)
    assert (await server.post("/process", process("job", reward=0.0)))[0] == 409
    first.cancel()
    await asyncio.wait({first})
    assert (await server.status())["run"] == 1
    await server.post("/cancel", {"job_id": "job"})
    status, result = await second
    assert (status, result["critical_error"]) == (200, "cancelled")


async def test_stop_cancels_what_this_port_was_asked_for_and_start_takes_work_again(server: Published) -> None:
    blocked = [asyncio.create_task(server.post("/process", process(f"job-{i}", run="hang"))) for i in range(3)]
    await server.until(run=3)
    assert await server.post("/stop") == (200, {"status": "stopped", "cancelled": 3})
    assert {(await one)[1]["critical_error"] for one in blocked} == {"cancelled"}
    assert (await server.post("/process", process()))[0] == 503
    assert (await server.status())["status"] == "stopped"
    assert await server.post("/stop") == (200, {"status": "already stopped", "cancelled": 0})
    assert await server.post("/start") == (200, {"status": "started"})
    assert await server.post("/start") == (200, {"status": "already running"})
    assert (await server.post("/process", process()))[0] == 200


async def test_status_has_both_published_forms(server: Published) -> None:
    status = await server.status()
    assert {"status", "pending_jobs", "running", "jobs", "init", "run", "eval"} <= set(status)
    assert {"init_queue", "run_queue", "eval_queue", "active_init", "active_run", "active_eval", "total"} <= set(status)


async def test_engines_are_added_and_cleared(server: Published) -> None:
    assert await server.post("/clear_llm_server") == (200, {"status": "cleared", "cleared": 2})
    status, answer = await server.post("/process", process())
    assert (status, answer["error"]["fix"]) == (503, "POST /add_llm_server first.")
    for address in (ENGINES[0], ENGINES[0].removesuffix("/v1"), ENGINES[0].removeprefix("http://")):
        assert (await server.post("/add_llm_server", {"address": address}))[0] == 200
    assert (await server.status())["llm_servers"] == 1
    assert (await server.post("/process", process()))[0] == 200
    assert (await server.post("/add_llm_server", {"address": "ftp://127.0.0.1"}))[0] == 422


async def test_an_unknown_source_is_400_and_an_environment_that_is_not_offered_503(server: Published) -> None:
    body = process()
    body["instance"]["data_source"] = "made-up"
    status, answer = await server.post("/process", body)
    assert (status, "made-up" in answer["error"]["what"]) == (400, True)
    del body["instance"]["data_source"]  # the published default is swebench
    status, answer = await server.post("/process", body)
    assert (status, "swe" in answer["error"]["what"]) == (503, True)


async def test_a_bad_row_is_reported_to_its_sender(server: Published) -> None:
    status, answer = await server.post("/process", process(colour="red"))
    assert (status, "colour" in answer["error"]["what"]) == (422, True)
    assert (await server.status())["total"] == 0


async def test_the_longest_wait_ends_in_504_and_a_cancel() -> None:
    async with published(config=CompatConfig(answer_seconds=0.05)) as server:
        status, answer = await server.post("/process", process("job", run="hang"))
        assert (status, "0.05 s" in answer["error"]["what"]) == (504, True)
        await server.until(jobs=0, total=0)


async def test_what_an_earlier_process_left_is_cancelled_at_the_start() -> None:
    async with published() as server:
        call = asyncio.create_task(server.post("/process", process("job", run="hang")))
        await server.until(run=1)
        await server.port.cancel_leftover_jobs()  # as another process on the same ledger would
        assert (await call)[1]["outcome"]["reason"] == "disconnected"


@pytest.mark.parametrize("wrong", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic !!"}])
async def test_without_the_token_there_is_nothing(server: Published, wrong: dict[str, str]) -> None:
    async with aiohttp.ClientSession(headers=wrong) as stranger:
        for path in ("/process", "/stop", "/t/wrong/stop", "/t/", "/docs", "/no"):
            async with stranger.post(server.url + path, data=b"{}") as response:
                assert response.status == 401
                body = await response.text()
                assert "wrong/stop" not in body and "[hidden]" not in body
    assert (await server.status())["running"] is True


async def test_the_token_fits_into_a_base_url(server: Published) -> None:
    host = server.url.removeprefix("http://")
    bases = [f"http://:{TOKEN}@{host}", f"http://{TOKEN}@{host}", f"http://{host}/t/{TOKEN}"]
    async with aiohttp.ClientSession() as plain:
        for base in bases:
            async with plain.get(f"{base}/status") as response:
                assert response.status == 200
        async with plain.get(f"{bases[-1]}/no-such-route") as response:
            text = await response.text()
    assert response.status == 404
    assert TOKEN not in text


async def test_a_page_of_another_site_cannot_use_a_browsers_password(server: Published) -> None:
    assert (await server.post("/stop", headers={"Origin": "http://elsewhere.example"}))[0] == 403


async def test_a_stop_of_the_service_answers_who_waits(server: Published) -> None:
    blocked = asyncio.create_task(server.post("/process", process("job", run="hang")))
    await server.until(run=1)
    server.service.begin_shutdown()
    status, answer = await blocked
    assert (status, answer["error"]["what"]) == (503, "The service is stopping.")


async def test_many_calls_at_once_get_an_answer_each(server: Published) -> None:
    results = await asyncio.gather(*(server.post("/process", process(f"job-{index}")) for index in range(64)))
    assert {status for status, _ in results} == {200}
    assert len({result["rollout_id"] for _, result in results}) == 64
