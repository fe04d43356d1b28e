"""``prorl-gym submit``: which rows it takes, what it sends, and what it says about bad input."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from prorl_gym.cli.main import app
from prorl_gym.errors import ConfigError
from prorl_gym.records import RolloutRequest


class FakeClient:
    """Stands for the service: remembers what was submitted."""

    sent: list[RolloutRequest]

    def __init__(self, url: str, *, retry_seconds: float) -> None:
        self.url = url

    def __enter__(self) -> "FakeClient":
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, requests: list[RolloutRequest]) -> list[Any]:
        self.sent.extend(requests)
        return requests


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    FakeClient.sent = []
    monkeypatch.setattr("prorl_gym.client.SyncClient", FakeClient)
    return FakeClient


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["submit", *arguments])


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
    result = call(rows(tmp_path, ROW, "", ROW), "--run", "r1", "--group-size", "3")
    assert result.output.split() == [request.rollout_id for request in client.sent]
    assert [(r.run_id, r.replica, r.group_size) for r in client.sent] == [("r1", i, 3) for i in (0, 1, 2, 0, 1, 2)]
    assert len({request.group_id for request in client.sent}) == 2
    assert client.sent[0].task == TASK
    assert [r.row_source for r in client.sent] == [f"{tmp_path}/rows.jsonl:{line}" for line in (1, 1, 1, 3, 3, 3)]


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ({**ROW, "row_source": "train.jsonl:7"}, "row_source", "train.jsonl:7"),
        ({**ROW, "prorl": {"run_id": "theirs"}}, "run_id", "theirs"),
        ({"rollout_id": "mine", "environment": "math", "task": TASK}, "rollout_id", "mine"),
    ],
    ids=["a row", "the block of a Gym row", "a request"],
)
def test_a_line_may_have_fields_of_its_request(
    tmp_path: Path, client: type[FakeClient], line: dict[str, Any], field: str, value: str
) -> None:
    call(rows(tmp_path, line))
    assert [getattr(request, field) for request in client.sent] == [value]


def test_a_line_ends_where_json_lines_end(tmp_path: Path, client: type[FakeClient]) -> None:
    """JSON texts may hold what Python takes for the end of a line too."""
    file = tmp_path / "rows.jsonl"
    row = {**ROW, "task": {**TASK, "question": "one\u2028two\x85three"}}
    file.write_text(json.dumps(row, ensure_ascii=False) + "\r\n", encoding="utf-8", newline="")
    call(str(file))
    assert [request.task["question"] for request in client.sent] == ["one\u2028two\x85three"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "FILE:1: no JSON object (Invalid JSON: EOF while parsing an object at line 1 column 1)."),
        ("[1]", "FILE:1: no JSON object (Input should be an object)."),
        ({"task": {}}, "FILE:1: 'environment' is missing."),
        ({"environment": "math"}, "FILE:1: 'task' is missing."),
        ({"environment": "math", "task": []}, "FILE:1: 'task' is wrong: Input should be a valid dictionary."),
        ({"environment": "math", "task": {}, "settings": {"tempe": 1}}, "FILE:1: unknown key 'settings.tempe'."),
        ({"environment": "maths", "task": TASK}, "FILE:1: There is no environment 'maths'."),
        ({"environment": "math", "task": {}}, "FILE:1: math row without id: required key 'question' is missing."),
        ({"environment": "math", "task": TASK, "seting": {}}, "FILE:1: unknown key 'seting'."),
        ({"environment": "math", "task": TASK, "prorl": {"run": "r"}}, "FILE:1: unknown key 'run'."),
        ("", "FILE: holds no rows."),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, client: type[FakeClient], line: Any, message: str) -> None:
    file = rows(tmp_path, line)
    result = call(file)
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).replace(file, "FILE").splitlines()[0] == message
    assert client.sent == []


def test_nothing_is_sent_when_one_row_is_wrong(tmp_path: Path, client: type[FakeClient]) -> None:
    file = rows(tmp_path, ROW, {**ROW, "environment": "maths"}, {**ROW, "task": {}})
    assert str(call(file).exception).splitlines() == [
        f"{file}:2: There is no environment 'maths'. (Wrong lines: 2.)",
        "Did you mean 'math'?",
    ]
    assert client.sent == []
