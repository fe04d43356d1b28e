"""The HTTP routes, over a real socket and a service on fakes."""

import asyncio
import json
import logging
import os
import stat
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from api_stack import TOKEN, Served, ask, serving

from prorl_gym.api.build import build_service, load_or_create_token
from prorl_gym.api.config import ServiceConfig
from prorl_gym.client.wire_models import AcceptedRollout
from prorl_gym.errors import ConfigError
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.ledger.ledger_config import DiskFullError, LedgerFullError
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(max_body_bytes=20_000, max_pending=5) as made:
        yield made


async def test_answers_grow_with_the_tokens_not_with_their_square(served: Served) -> None:
    sizes: list[int] = []
    for turns in (16, 32, 64):
        await served.ask("POST", "/v1/rollouts", ask(f"turns-{turns}", turns=turns))
        _, answer = await served.ask("GET", f"/v1/rollouts/turns-{turns}?wait=10")
        assert answer["rollout"]["outcome"]["status"] == "completed"
        sizes.append(len(json.dumps(answer)))
    assert (sizes[2] - sizes[1]) < 2.2 * (sizes[1] - sizes[0])


async def test_groups_and_runs_together_mean_stream_groups_these_runs(served: Served) -> None:
    rows = [
        ask(f"{run}-{group}", run="hang") | {"run_id": run, "group_id": group} for run in ("x", "y") for group in "gh"
    ]
    await served.ask("POST", "/v1/rollouts", rows)
    assert await served.ask("POST", "/v1/cancel", {"runs": ["x"], "groups": ["g"]}) == (200, {"cancelled": ["x-g"]})
    assert await served.ask("POST", "/v1/cancel", {"groups": ["g"]}) == (200, {"cancelled": ["y-g"]})
    assert await served.ask("POST", "/v1/cancel", {"runs": ["x"]}) == (200, {"cancelled": ["x-h"]})


async def test_a_silent_stream_beats(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_gym.api.routes.rollouts.HEARTBEAT_SECONDS", 0.01)
    async with served.http.get(served.url + "/v1/stream") as response:
        assert await response.content.readline() == b"\n"
        await served.ask("POST", "/v1/rollouts", ask("a"))
        while (line := await response.content.readline()) == b"\n":
            pass
        assert json.loads(line)["rollout"]["rollout_id"] == "a"


async def test_a_stream_waits_while_the_disk_fails(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, fails = served.service.ledger.read_records, iter([True, True])

    async def read_records(*arguments: Any) -> Any:
        if next(fails, False):
            raise DiskFullError("l.sqlite: the disk is full.", "Free space.")
        return await read(*arguments)

    monkeypatch.setattr("prorl_gym.api.routes.rollouts.DISK_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(served.service.ledger, "read_records", read_records)
    await served.ask("POST", "/v1/rollouts", ask("a"))
    async with served.http.get(served.url + "/v1/stream") as response:
        assert [await response.content.readline() for _ in range(2)] == [b"\n", b"\n"]
        assert json.loads(await response.content.readline())["rollout"]["rollout_id"] == "a"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_disk_that_fails_is_logged_once(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*arguments: Any) -> Any:
        raise DiskFullError("l.sqlite: the disk is full.", "Free space.")

    monkeypatch.setattr(served.service.ledger, "unacknowledged", fail)
    assert [(await served.ask("GET", "/v1/unacknowledged"))[0] for _ in range(5)] == [503] * 5
    assert len([record for record in caplog.records if "disk is full" in record.message]) == 1


async def test_a_client_that_cuts_its_body_is_no_error(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    _, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
    fields = ("Host: x", f"Authorization: Bearer {TOKEN}", "Content-Type: application/json", "Content-Length: 100")
    writer.write("\r\n".join(("POST /v1/rollouts HTTP/1.1", *fields, "", "[")).encode())
    await writer.drain()
    writer.close()
    async with asyncio.timeout(10):
        while "the client left" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_the_name_of_the_scheme_has_no_case(served: Served) -> None:
    assert (await served.ask("GET", "/v1/status", headers={"Authorization": f"bearer {TOKEN}"}))[0] == 200


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}])
async def test_the_token_is_always_required(served: Served, header: dict[str, str]) -> None:
    async with aiohttp.ClientSession(headers=header) as stranger:
        for path in ("/v1/status", "/metrics", "/v1/history", "/v1/rollouts/a", "/no", "/livez/../metrics", "/docs/x"):
            async with stranger.get(served.url + path) as response:
                assert response.status == 401
                assert (await response.json())["error"]["what"] == "The bearer token is missing or wrong."


async def test_health_needs_no_token_and_shows_no_data(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it count all that is pending, as the whole status does: strangers must not be able to ask for that."""
    monkeypatch.delattr("prorl_gym.rollout.service.RolloutService.status")
    async with aiohttp.ClientSession() as stranger:
        for path, expected in (("/livez", {"live": True}), ("/readyz", {"ready": True})):
            async with stranger.get(served.url + path) as response:
                assert (response.status, await response.json()) == (200, expected)
        served.service.begin_shutdown()
        async with stranger.get(served.url + "/readyz") as response:
            assert (response.status, await response.json()) == (503, {"ready": False})


HUGE = 10**40
ROLLOUTS = "/v1/rollouts"
SURROGATE = b'{"environment":"scripted","task":{"id":"\\ud800"}}'
BAD = [
    ("POST", ROLLOUTS, ask("a") | {"group_size": HUGE}, 422, "The field 'group_size' of the body is wrong"),
    ("POST", ROLLOUTS, ask("a") | {"metadata": {"k": "x" * 5000}}, 422, "The field 'metadata.k' of the body"),
    ("POST", ROLLOUTS, ask("a") | {"environment": "e" * 129}, 422, "The field 'environment' of the body"),
    ("POST", "/v1/cancel", {"runs": ["a b"]}, 422, "The field 'runs.0' of the body is wrong"),
    ("POST", "/v1/ack", {"cursor": HUGE}, 422, "The field 'cursor' of the body is wrong"),
    ("PUT", "/v1/policy", {"version": HUGE}, 422, "The field 'version' of the body is wrong"),
    ("PUT", "/v1/policy", {"version": 1}, 404, "This service has no pool 'policy'."),
    ("PUT", "/v1/runs/r/demand", {"groups": -1}, 422, "The field 'groups' of the body is wrong"),
    ("PUT", "/v1/runs/a%20b/demand", {"groups": 1}, 422, "The parameter 'run' is wrong"),
    ("GET", "/v1/rollouts?limit=1001", None, 422, "The parameter 'limit' is wrong"),
    ("POST", ROLLOUTS, b"{", 422, "The body is wrong: Invalid JSON: EOF while parsing an object at line 1 column 1."),
    ("POST", ROLLOUTS, {"environment": "x"}, 422, "The field 'task' of the body is wrong: Field required."),
    ("POST", ROLLOUTS, [ask("../etc")], 422, "The field '0.rollout_id' of the body is wrong: String should match"),
    ("POST", ROLLOUTS, b"x" * 30_000, 413, "The body is larger than 20000 bytes."),
    ("POST", ROLLOUTS, b"[" * 10_000, 422, "recursion limit exceeded"),
    ("POST", ROLLOUTS, b'{"environment":"scripted","task":{"x":NaN}}', 422, "its task is not JSON"),
    ("POST", ROLLOUTS, SURROGATE, 422, "unexpected end of hex escape"),
    ("POST", ROLLOUTS, b'{"environment":"scripted","task":{"id":1%s}}' % (b"0" * 5000), 422, "out of range"),
    ("POST", ROLLOUTS, b"\xff", 422, "The body is wrong: Invalid JSON"),
    ("POST", ROLLOUTS, {"environment": "made-up", "task": {}}, 422, "There is no environment 'made-up'."),
    ("POST", "/v1/cancel", {"rollout": ["a"]}, 422, "The field 'rollout' of the body is wrong: Extra inputs"),
    ("GET", "/v1/rollouts?sort=body", None, 422, "The parameter 'sort' is wrong"),
    ("GET", "/v1/rollouts?state=gone", None, 422, "The parameter 'state"),
    ("GET", "/v1/rollouts?before=3&sort=took", None, 422, "before"),
    ("GET", "/v1/problems?order=x", None, 422, "The parameter 'order' is wrong"),
    ("GET", "/v1/analysis?reward=2", None, 422, "The parameter 'reward' is wrong"),
    ("GET", "/v1/rollouts/stranger", None, 404, "rollout stranger was never accepted."),
    ("GET", "/v1/rollouts/a?wait=99", None, 422, "The parameter 'wait' is wrong"),
    ("GET", f"/v1/stream?cursor={2**63}", None, 422, "The parameter 'cursor' is wrong"),
    ("GET", f"/v1/stream?cursor={'9' * 5000}", None, 422, "The parameter 'cursor' is wrong"),
    ("GET", "/v2/rollouts", None, 404, "GET /v2/rollouts: Not Found."),
    ("DELETE", ROLLOUTS, None, 405, "DELETE /v1/rollouts: Method Not Allowed."),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "what"), BAD, ids=lambda value: str(value)[:30])
async def test_bad_requests(served: Served, method: str, path: str, body: Any, status: int, what: str) -> None:
    answered, answer = await served.ask(method, path, body)
    assert answered == status
    assert set(answer["error"]) - {"kind"} == {"what", "fix"}
    assert what in answer["error"]["what"]
    assert "Traceback" not in json.dumps(answer)


async def test_a_demand_without_measure_is_kept_and_returned(served: Served) -> None:
    demand = {"groups": HUGE, "after": HUGE, "version": HUGE, "max_staleness": HUGE}
    status, _ = await served.ask("PUT", "/v1/runs/r/demand", demand)
    assert status in (200, 422)
    for path in ("/v1/status", "/v1/runs/r/groups", "/v1/rollouts"):
        assert (await served.ask("GET", path))[0] == 200
    async with served.http.get(served.url + "/metrics") as response:
        assert response.status == 200


async def test_a_full_service_answers_when_to_retry(served: Served) -> None:
    await served.ask("POST", "/v1/rollouts", [ask(f"r{i}", run="hang") for i in range(5)])
    async with served.http.post(served.url + "/v1/rollouts", data=json.dumps(ask("more"))) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "5")
        assert (await response.json())["error"]["what"] == "5 rollouts are pending already."


@pytest.mark.parametrize(
    ("error", "status", "seconds"), [(LedgerFullError, 429, "30"), (DiskFullError, 503, "5")], ids=["budget", "disk"]
)
async def test_a_ledger_without_room_answers_when_to_retry(error: Any, status: int, seconds: str) -> None:
    class Full(MemoryLedger):
        async def add_rollouts(self, requests: Sequence[RolloutRequest]) -> list[AcceptedRollout]:
            raise error("There is no room.", "Acknowledge records.")

    async with serving(Full()) as served:
        async with served.http.post(served.url + "/v1/rollouts", data=json.dumps(ask("a"))) as response:
            assert (response.status, response.headers["Retry-After"]) == (status, seconds)
            assert (await response.json())["error"]["fix"] == "Acknowledge records."


async def test_a_body_with_too_large_a_length_is_refused_before_it_is_sent(served: Served) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = ("POST /v1/rollouts HTTP/1.1", "Host: x", f"Authorization: Bearer {TOKEN}", "Content-Length: 999999999999")
    writer.write(("\r\n".join(head) + "\r\n\r\n").encode())
    assert b" 413 " in await asyncio.wait_for(reader.readline(), 10)
    writer.close()


async def test_a_stopping_service_refuses(served: Served) -> None:
    served.service.begin_shutdown()
    status, answer = await served.ask("POST", "/v1/rollouts", ask("a"))
    assert (status, answer["error"]["what"]) == (503, "The service takes no more work.")


async def test_a_defect_shows_no_traceback(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken() -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(served.service, "status", broken)
    status, answer = await served.ask("GET", "/v1/status")
    assert (status, answer["error"]["what"]) == (500, "The service is at fault.")


def test_token_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "state" / "token"
    token = load_or_create_token(path)
    assert len(token) >= 40
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert load_or_create_token(path) == token


def test_token_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    load_or_create_token(path)
    os.chmod(path, 0o644)
    with pytest.raises(ConfigError) as caught:
        load_or_create_token(path)
    assert str(caught.value) == (f"{path}: other users may read the token.\nchmod 600 {path}, and make a new token.")


def test_token_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_or_create_token(tmp_path / "token")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to another user"):
        load_or_create_token(tmp_path / "token")


def test_state_that_a_group_may_write_to_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o770)
    load_or_create_token(tmp_path / "token")
    assert "may write to it" in caplog.text


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o703])
def test_state_that_every_user_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        load_or_create_token(tmp_path / "token")
    assert str(caught.value) == (
        f"state: every user may write to {tmp_path}.\n"
        f"chmod go-w {tmp_path}, or set 'state' to a directory of this user's."
    )
    assert not (tmp_path / "token").exists()


async def test_a_ledger_where_every_user_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)
    config = ServiceConfig.model_validate(
        {
            "inference": {"engines": ["http://127.0.0.1:1"], "model": "m", "tokenizer": "small"},
            "state": tmp_path,
            "ledger": {"path": tmp_path / "open" / "ledger.sqlite"},
        }
    )
    with pytest.raises(ConfigError, match=r"ledger\.path: every user may write to"):
        await build_service(config)


def test_token_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "token").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_or_create_token(tmp_path / "token")
    assert not (tmp_path / "elsewhere").exists()
