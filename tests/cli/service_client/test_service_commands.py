"""The commands that talk to a service, against real routes over fakes: what they do, print and return."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sample_records
from loopback_service import TOKEN, in_a_thread
from typer.testing import CliRunner, Result

from prorl_gym.cli.main import app
from prorl_gym.cli.service_client.show import rollout_report
from prorl_gym.client import SyncClient
from prorl_gym.demand import Demand, RedundantHandling
from prorl_gym.errors import ConfigError
from prorl_gym.records import BatchMismatch, GradedSubmission, Mismatch, RolloutRequest, Score


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with in_a_thread() as address:
        monkeypatch.setenv("PRORL_GYM_URL", address)
        monkeypatch.setenv("PRORL_GYM_TOKEN", TOKEN)
        yield address


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def made(url: str, *requests: RolloutRequest) -> None:
    """Have these done."""
    with SyncClient(url, token=TOKEN) as client:
        client.submit(requests)
        for request in requests:
            client.result(request.rollout_id, timeout=20)


def ask(name: str, *, of: str = "default", group: str | None = None, **task: Any) -> RolloutRequest:
    return RolloutRequest(rollout_id=name, run_id=of, group_id=group, environment="scripted", task=task)


def file_of(tmp_path: Path, *requests: RolloutRequest) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(request.model_dump_json(exclude_defaults=True) + "\n" for request in requests))
    return str(file)


# --- submit, watch, show, cancel ------------------------------------------------------------------------------------


def test_submit_and_wait_prints_ends(url: str, tmp_path: Path) -> None:
    rows = file_of(tmp_path, ask("a"), ask("b", reward=0.5))
    result = call("submit", rows, "--no-check", "--wait")
    assert result.exit_code == 0
    assert re.findall(r"^(\w) scripted completed reward=([\d.]+)", result.output, re.MULTILINE) == [
        ("a", "1"),
        ("b", "0.5"),
    ]


def test_submit_and_wait_lists_rollouts_without_reward(url: str, tmp_path: Path) -> None:
    rows = file_of(tmp_path, ask("a"), ask("b", run="bad_row"))
    result = call("submit", rows, "--no-check", "--wait")
    assert (result.exit_code, result.stderr) == (1, "1 of 2 rollouts ended without a reward\n")


def test_show_prints_the_outcome(url: str, tmp_path: Path) -> None:
    made(url, ask("a", turns=2))
    assert call("show", "a").output.startswith("a scripted completed reward=1 turns=2 tokens=6 attempt=0 seconds=")
    assert json.loads(call("show", "a", "--full").output)["score"]["reward"] == 1.0


def test_show_tells_the_row_and_what_was_graded(url: str, tmp_path: Path) -> None:
    call("submit", file_of(tmp_path, ask("graded", id="row-7", turns=1, run="limit:turns")), "--no-check", "--wait")
    assert call("show", "graded").output.splitlines()[1:] == [
        f"    row: row-7 ({tmp_path}/rows.jsonl:1)",
        "    answer: done",
    ]


def test_what_a_model_wrote_is_shown_without_its_control_characters() -> None:
    rollout = sample_records.record(
        "a",
        submission=GradedSubmission(kind="program", text="\x1b[31mone\ntwo" + "x" * 10_000),
        score=Score(reward=0.0, detail={"why": "wrong output"}, expected="\x1b]0;title\x07", report="failed test 1"),
    )
    row, *shown = rollout_report(rollout).splitlines()[1:]
    assert row == "    why: wrong output"
    assert shown[:4] == ["    expected: \ufffd]0;title\ufffd", "    program: ", "        \ufffd[31mone", shown[3]]
    assert shown[3].startswith("        twoxxx")
    assert shown[4:] == ["        [... --full shows all]", "    report: failed test 1"]


def test_a_unique_prefix_of_an_id_is_enough(url: str) -> None:
    made(url, ask("7f3a01"), ask("7f3a02"), ask("7f"))
    assert call("show", "7f3a02").output.startswith("7f3a02 ")
    assert call("show", "7f").output.startswith("7f "), "a whole id is meant itself"
    error = call("show", "7f3a").exception
    assert isinstance(error, ConfigError)
    assert error.what == "7f3a: is a prefix of several rollouts: 7f3a02, 7f3a01."
    made(url, ask("b1"))
    assert call("show", "b").output.startswith("b1 ")


def test_show_of_what_is_not_finished_and_of_what_never_was(url: str) -> None:
    with SyncClient(url, token=TOKEN) as client:
        client.submit(ask("b", run="hang"))
    for extra in ((), ("--wait", "0.05")):
        result = call("show", "b", *extra)
        assert (result.exit_code, result.output) == (1, "b is not finished\n")
    assert "stranger" in str(call("show", "stranger").exception)


def test_show_writes_a_page(url: str, tmp_path: Path) -> None:
    made(url, ask("a"))
    page = tmp_path / "a.html"
    assert call("show", "a", "--html", str(page)).output == f"{page}\n"
    assert page.read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")
    assert [file.name for file in tmp_path.iterdir()] == ["a.html"]
    error = call("show", "a", "--html", str(tmp_path / "none" / "a.html")).exception
    assert isinstance(error, ConfigError)
    assert "a.html: cannot be written (No such file or directory)." in error.what


def test_watch_in_a_pipe_prints_lines(url: str) -> None:
    made(url, ask("a"))
    made(url, ask("b", run="bad_row"))
    result = call("watch", "--no-follow")
    assert [line.split()[:4] for line in result.output.splitlines()] == [
        ["1", "a", "scripted", "completed"],
        ["2", "b", "scripted", "failed(bad_row)"],
        ["scripted", "bad_row."],
        ["Nothing", "to", "do:", "this"],
    ]
    assert json.loads(call("watch", "--no-follow", "--full", "--cursor", "1").output)["rollout_id"] == "b"


def test_watch_shows_a_table(url: str) -> None:
    members = [ask("a", group="g"), ask("b", group="g", reward=0.0)]
    made(url, *(one.model_copy(update={"group_size": 2, "replica": n}) for n, one in enumerate(members)))
    figures = Mismatch(5, 0.25, 0.1, 0.031, 1.1, 0)
    with SyncClient(url, token=TOKEN) as client:
        client.report_mismatch("default", 7, BatchMismatch(figures, {7: figures}, {"turn 1": figures}, {}))
        client.report_mismatch("other", 9, BatchMismatch(figures, {}, {}, {}))
    result = call("watch", "--no-follow", "--table", "--run", "default")
    expected = {
        "finished": "2",
        "mean reward": "0.500",
        "groups complete": "1, 1 with different rewards",
        "completed": "2",
        "service": "0 queued, 0 running",
        "mismatch": "0.25 nats at version 7, KL 0.031",
    }
    assert expected.items() <= dict(re.findall(r"│ ([a-z ]+?) +│ (.*?) +│", result.output)).items()


def test_watch_says_that_nobody_has_submitted_the_run(url: str) -> None:
    made(url, ask("a", of="train"))
    argv = [sys.executable, "-m", "prorl_gym", "watch", "--run", "trian"]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        assert child.stderr.readline() == (
            "no rollout of run trian was submitted yet: waiting for the first. Runs with finished rollouts: train.\n"
        )
        child.kill()


def test_watch_reports_when_there_is_nothing(url: str) -> None:
    for form in ("--lines", "--table"):
        result = call("watch", "--run", "none", "--no-follow", form)
        assert result.exit_code == 1
        assert result.stderr == "nothing to show: no rollout of run none is finished\n"
    assert call("watch", "--cursor", "3", "--no-follow").exit_code == 0


def test_cancel_by_name_group_and_run(url: str) -> None:
    with SyncClient(url, token=TOKEN) as client:
        client.submit([ask("a", run="hang"), ask("b", group="g"), ask("c", of="other", run="hang")])
        client.result("b", timeout=20)
    result = call("cancel", "a", "b", "--group", "g", "--run", "other")
    assert (result.exit_code, result.stdout.split()) == (0, ["a", "c"])
    assert result.stderr.splitlines() == [
        "nothing to cancel: rollout b is unknown or finished",
        "nothing to cancel: group g is unknown or finished",
    ]
    assert call("cancel", "a").exit_code == 1
    assert isinstance(call("cancel").exception, ConfigError)


# --- what a trainer says --------------------------------------------------------------------------------------------


def test_a_demand_is_set_shown_and_cleared(url: str) -> None:
    made(url, ask("a"))
    shown = call("demand", "default", "--groups", "4", "--spare", "1", "--redundant", "kill").output
    assert "wanted: 5\n" in shown
    with SyncClient(url, token=TOKEN) as client:
        demand = client.demand("default")
    assert demand is not None
    assert (demand.groups, demand.spare, demand.redundant.run, demand.replace) == (4, 1, "kill", 2)
    assert call("demand", "default").output == shown
    assert call("demand", "default", "--clear").output.startswith("run default has no demand: everything")
    assert isinstance(call("demand", "default", "--clear", "--groups", "1").exception, ConfigError)


def test_a_whole_demand_comes_from_a_file(url: str, tmp_path: Path) -> None:
    file = tmp_path / "demand.yaml"
    file.write_text("groups: 2\nredundant: {park_seconds: 60}\n")
    assert "wanted: 2\n" in call("demand", "default", "--file", str(file)).output
    with SyncClient(url, token=TOKEN) as client:
        demand = client.demand("default")
    assert demand is not None
    assert demand.model_dump() == Demand(groups=2, redundant=RedundantHandling(park_seconds=60)).model_dump()
    file.write_text("groups: 2\nmax_stalenes: 1\n")
    assert "max_staleness" in str(call("demand", "default", "--file", str(file)).exception)
    assert isinstance(call("demand", "default", "--file", str(file), "--groups", "1").exception, ConfigError)


def test_a_hold_lasts_until_the_release(url: str) -> None:
    assert call("hold").exit_code == 0
    with SyncClient(url, token=TOKEN) as client:
        client.submit([ask("held")])
        assert client.poll_result("held", wait=0.2) is None
        assert client.status().paused
        assert call("release").exit_code == 0
        assert client.result("held", timeout=20).outcome.status == "completed"


def test_ack_releases_records(url: str) -> None:
    made(url, ask("a"), ask("b"))
    assert call("ack", "default", "1").output == "1 records released\n"
    assert call("ack", "default", "2").output == "1 records released\n"
    assert call("watch", "--no-follow").exit_code == 1


def test_the_policy_is_paused_updated_and_resumed(url: str) -> None:
    assert call("policy", "status").output.startswith("version 0, running, 2 of 2 engines serve it\n")
    assert call("policy", "pause", "--mode", "drain").exit_code == 0
    assert re.match(r"version 0, paused for [56]\d\d s more, ", call("policy", "status").output)
    assert call("policy", "pause", "--expire-seconds", "0").exit_code == 0
    assert "version 0, paused, " in call("policy", "status").output
    assert call("policy", "update", "3").output == "version 3: 2 engines serve it\n"
    assert call("policy", "resume").exit_code == 0
    assert "version 3, running" in call("policy", "status").output


def test_engines_join_and_leave(url: str) -> None:
    assert [line.split()[0] for line in call("engines", "list").output.splitlines()] == ["policy-0", "policy-1"]
    name = call("engines", "add", "http://10.0.0.9:8000/v1").output.strip()
    assert "http://10.0.0.9:8000/v1" in call("engines", "list").output
    assert call("engines", "remove", name).output == f"{name} leaves\n"
    assert "allow" in str(call("engines", "add", "http://203.0.113.1/v1").exception)
    assert call("engines", "remove", "stranger").exception is not None


def test_an_unreachable_service_is_two_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_GYM_TOKEN", TOKEN)
    monkeypatch.setattr("prorl_gym.cli.service_client.service_connection.CONNECT_SECONDS", 0.05)
    error = call("policy", "status", "--url", "http://127.0.0.1:9").exception
    assert str(error).splitlines()[1].startswith("Start it (prorl-gym serve --config FILE)")
