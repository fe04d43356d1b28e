"""``prorl-gym submit|show|watch|cancel``: what they send and what they say about bad input."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from prorl_gym.cli import serve, submit
from prorl_gym.errors import CancelReason, ConfigError, FailureKind
from prorl_gym.records import Outcome, Rollout, RolloutRequest, Score


class FakeClient:
    """Stands for the service: remembers what was submitted."""

    sent: list[RolloutRequest]
    records: dict[str, Rollout]

    def __init__(self, url: str) -> None:
        self.url = url

    def __enter__(self) -> "FakeClient":
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, requests: list[RolloutRequest]) -> list[Any]:
        self.sent.extend(requests)
        return requests

    def look(self, rollout_id: str) -> Rollout | None:
        return self.records.get(rollout_id)

    def result(self, rollout_id: str, timeout: float) -> Rollout:
        if rollout_id not in self.records:
            raise TimeoutError
        return self.records[rollout_id]

    def stream(self, run: str | None, cursor: int, *, follow: bool) -> Iterator[tuple[int, Rollout]]:
        yield from list(enumerate(self.records.values(), 1))[cursor:]

    def cancel(self, ids: list[str], *, groups: list[str], runs: list[str]) -> list[str]:
        return [name for name in ids if name != "gone"] + [f"of-{name}" for name in (*groups, *runs) if name != "none"]


def record(rollout_id: str, outcome: Outcome, score: Score | None = None) -> Rollout:
    return Rollout(
        rollout_id=rollout_id,
        run_id="default",
        group_id=None,
        group_size=1,
        replica=0,
        environment="math",
        outcome=outcome,
        score=score,
        accepted_at=0.0,
        finished_at=1.0,
    )


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    FakeClient.sent = []
    FakeClient.records = {
        "good": record("good", Outcome(status="completed"), Score(reward=0.5)),
        "bad": record("bad", Outcome(status="failed", kind=FailureKind.BAD_ROW, message="no question")),
        "gone": record("gone", Outcome(status="cancelled", reason=CancelReason.CLIENT)),
    }
    monkeypatch.setattr("prorl_gym.client.SyncClient", FakeClient)
    return FakeClient


def call(*arguments: str) -> Any:
    app = typer.Typer()
    submit.register(app)
    serve.register(app)
    return CliRunner().invoke(app, arguments)


def rows(tmp_path: Path, *lines: Any) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(file)


TASK = {"question": "What is 6*7?", "answer": "42"}
ROW: dict[str, Any] = {
    "responses_create_params": {"input": []},
    "agent_ref": {"name": "x"},
    "environment": "math",
    "task": TASK,
    "_ng_task_index": 0,
}


def test_gym_rows_become_groups(tmp_path: Path, client: type[FakeClient]) -> None:
    result = call("submit", rows(tmp_path, ROW, "", ROW), "--run", "r1", "--group-size", "3")
    assert result.output.split() == [request.rollout_id for request in client.sent]
    assert [(r.run_id, r.replica, r.group_size) for r in client.sent] == [("r1", i, 3) for i in (0, 1, 2, 0, 1, 2)]
    assert len({request.group_id for request in client.sent}) == 2
    assert client.sent[0].task == TASK


def test_requests_keep_their_ids(tmp_path: Path, client: type[FakeClient]) -> None:
    call("submit", rows(tmp_path, {"rollout_id": "mine", "environment": "math", "task": TASK}))
    assert [request.rollout_id for request in client.sent] == ["mine"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "FILE:1: no JSON object (Invalid JSON: EOF while parsing an object at line 1 column 1)."),
        ("[1]", "FILE:1: no JSON object (Input should be an object)."),
        ({"task": {}}, "FILE:1: 'environment' is missing."),
        ({"environment": "math"}, "FILE:1: 'task' is missing."),
        ({"environment": "math", "task": []}, "FILE:1: 'task' is wrong: Input should be a valid dictionary."),
        (
            {"environment": "math", "task": {}, "settings": {"tempe": 1}},
            "FILE:1: unknown key 'settings.tempe'.",
        ),
        ({"environment": "maths", "task": TASK}, "FILE:1: There is no environment 'maths'."),
        ({"environment": "math", "task": {}}, "FILE:1: math row without id: required key 'question' is missing."),
        ({"environment": "math", "task": TASK, "seting": {}}, "FILE:1: unknown key 'seting'."),
        ({"environment": "math", "task": TASK, "prorl": {"run": "r"}}, "FILE:1: unknown key 'run'."),
        ("", "FILE: holds no rows."),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, client: type[FakeClient], line: Any, message: str) -> None:
    file = rows(tmp_path, line)
    result = call("submit", file)
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).replace(file, "FILE").splitlines()[0] == message
    assert client.sent == []


def test_nothing_is_sent_when_one_row_is_wrong(tmp_path: Path, client: type[FakeClient]) -> None:
    file = rows(tmp_path, ROW, {**ROW, "environment": "maths"}, {**ROW, "task": {}})
    assert str(call("submit", file).exception).splitlines() == [
        f"{file}:2: There is no environment 'maths'. (Wrong lines: 2.)",
        "Did you mean 'math'?",
    ]
    assert client.sent == []


def test_environment_of_the_service_only(tmp_path: Path, client: type[FakeClient]) -> None:
    call("submit", "--no-check", rows(tmp_path, {"environment": "theirs", "task": {"q": 1}}))
    assert [request.environment for request in client.sent] == ["theirs"]


def test_prorl_block_of_a_gym_row_counts(tmp_path: Path, client: type[FakeClient]) -> None:
    call("submit", rows(tmp_path, {**ROW, "prorl": {"run_id": "theirs"}}))
    assert [request.run_id for request in client.sent] == ["theirs"]


def test_show(client: type[FakeClient]) -> None:
    assert call("show", "good").output == ("good math completed reward=0.5 turns=0 tokens=0 attempt=0 seconds=0.00\n")
    assert call("show", "bad").output.splitlines() == [
        "bad math failed(bad_row) reward=- turns=0 tokens=0 attempt=0 seconds=0.00",
        "    no question",
    ]
    assert json.loads(call("show", "gone", "--full").output)["outcome"]["reason"] == "client"
    for missing in (call("show", "other"), call("show", "other", "--wait", "1")):
        assert (missing.exit_code, missing.output) == (1, "other is not finished\n")


def test_watch_from_a_cursor(client: type[FakeClient]) -> None:
    output = call("watch", "--cursor", "1", "--no-follow").output
    assert [line.split()[:2] for line in output.splitlines() if "reward" in line] == [
        ["2", "bad"],
        ["3", "gone"],
    ]


def test_cancel_needs_a_name(client: type[FakeClient]) -> None:
    assert isinstance(call("cancel").exception, ConfigError)
    assert call("cancel", "a", "--group", "g", "--run", "r").output.split() == ["a", "of-g", "of-r"]


def test_cancel_says_when_there_is_nothing_to_cancel(client: type[FakeClient]) -> None:
    result = call("cancel", "gone", "--group", "none", "--run", "none")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines() == [
        "nothing to cancel: rollout gone is unknown or finished",
        "nothing to cancel: group none is unknown or finished",
        "nothing to cancel: run none is unknown or finished",
    ]
    assert call("cancel", "gone", "a").exit_code == 0


def test_watch_says_when_there_is_nothing(client: type[FakeClient]) -> None:
    client.records = {}
    result = call("watch", "--run", "none", "--no-follow")
    assert (result.exit_code, result.stderr) == (1, "nothing to show: no rollout of run none is finished\n")
    assert call("watch", "--cursor", "3", "--no-follow").exit_code == 0


def test_help_tells_where_the_token_comes_from() -> None:
    assert "PRORL_GYM_TOKEN_FILE" in call("watch", "--help").output


def test_serve_names_a_bad_configuration(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("inference: {engines: ['http://127.0.0.1:1'], model: m, tokenizer: small}\nrunner: {rnu: 1}\n")
    result = call("serve", "--config", str(file))
    assert str(result.exception) == f"{file}: unknown key 'runner.rnu'.\nDid you mean 'run'?"
