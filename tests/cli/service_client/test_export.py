"""``prorl-gym export``: what is chosen, how each format spells it, and that no half file is left."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sample_records
from loopback_service import TOKEN, in_a_thread
from typer.testing import CliRunner, Result

from prorl_gym.cli.main import app
from prorl_gym.cli.service_client.show import rejection_reason
from prorl_gym.client import SyncClient
from prorl_gym.errors import CancelReason, ConfigError, FailureKind, Limit
from prorl_gym.records import Message, Outcome, Rollout, RolloutRequest, Score, ToolCall
from prorl_gym.settings import SERVICE_DEFAULTS, RolloutSettings, resolve_settings
from prorl_gym.trainers.sampled_turns import to_chat

TASKS: dict[str, dict[str, Any]] = {
    "good": {"turns": 2},
    "half": {"reward": 0.5},
    "bad": {"run": "bad_row"},
    "long": {"run": "limit:turns"},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with in_a_thread() as address, SyncClient(address, token=TOKEN) as client:
        requests = [RolloutRequest(rollout_id=name, environment="scripted", task=task) for name, task in TASKS.items()]
        for request in requests:  # one by one, so that they stand in this order
            client.submit(request)
            client.result(request.rollout_id, timeout=20)
        yield address


@pytest.fixture
def export(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PRORL_GYM_URL", url)
    monkeypatch.setenv("PRORL_GYM_TOKEN", TOKEN)
    out = tmp_path / "out.jsonl"

    def call(*arguments: str) -> tuple[Result, list[Any]]:
        result = CliRunner().invoke(app, ["export", "--out", str(out), *arguments])
        assert [file.name for file in tmp_path.iterdir()] in (["out.jsonl"], [])
        return result, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []

    return call


def test_an_export_replaces_a_file_only_by_force(export: Any, tmp_path: Path) -> None:
    kept = tmp_path / "out.jsonl"
    kept.write_text('"mine"\n')
    result, lines = export()
    assert isinstance(result.exception, ConfigError)
    assert result.exception.fix == "Take another --out, or --force to replace it."
    assert lines == ["mine"]
    result, lines = export("--force")
    assert (result.exit_code, len(lines)) == (0, len(TASKS))


def test_records_are_exported_whole(export: Any) -> None:
    result, lines = export()
    assert result.stderr == "4 of 4 rollouts of run default written; go on with --cursor 4\n"
    assert [Rollout.model_validate(line).rollout_id for line in lines] == ["good", "half", "bad", "long"]


def test_rewards_choose(export: Any) -> None:
    result, lines = export("--min-reward", "1")
    assert [line["rollout_id"] for line in lines] == ["good", "long"]
    assert result.stderr == (
        "2 of 4 rollouts of run default written (1 left out: reward too low, 1 left out: no reward); "
        "go on with --cursor 4\n"
    )


def test_chats_leave_out_what_was_cut_short(export: Any) -> None:
    result, lines = export("--format", "sft")
    assert [line["rollout_id"] for line in lines] == ["good", "half"]
    assert lines[0]["messages"] == [
        {"role": "user", "content": "go", "train": False},
        {"role": "assistant", "content": "done", "train": True},
        {"role": "assistant", "content": "done", "train": True},
    ]
    assert "1 left out: truncated" in result.stderr
    _, lines = export("--force", "--format", "sft", "--overlong", "--mask-key", "weight", "--cursor", "2")
    assert [line["rollout_id"] for line in lines] == ["long"]
    assert lines[-1]["messages"][-1] == {"role": "assistant", "content": "done", "weight": 1}


def test_tokens_are_exported_by_segment(export: Any) -> None:
    _, lines = export("--format", "tokens", "--min-reward", "1")
    assert lines == [
        {
            "rollout_id": "good",
            "run_id": "default",
            "group_id": None,
            "group_size": 1,
            "replica": 0,
            "environment": "scripted",
            "stands_in_for": None,
            "reward": 1.0,
            "masked": False,
            "segment": 0,
            "segments": 1,
            "token_ids": [1, 2, 3, 4, 1, 2, 3, 4],
            "mask": [0, 1, 1, 1, 0, 1, 1, 1],
            "logprobs": [0.0, -0.5, -0.5, -0.5, 0.0, -0.5, -0.5, -0.5],
            "policy_versions": [-1, 0, 0, 0, -1, 0, 0, 0],
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "logprob_kind": "raw",
            "parent": None,
            "shared_tokens": 0,
            "cause": "first",
            "rewrites": [],
            "trained": True,
        }
    ]


def test_nothing_to_write_leaves_what_was_there(export: Any) -> None:
    export("--min-reward", "1")
    result, lines = export("--force", "--cursor", "4")
    assert (result.exit_code, result.stderr) == (1, "0 of 0 rollouts of run default written; go on with --cursor 4\n")
    assert len(lines) == 2


# --- which, and how, in the small -----------------------------------------------------------------------------------


def record(outcome: Outcome, score: Score | None = None, **fields: Any) -> Rollout:
    return sample_records.record("r", outcome, score=score, **fields)


DONE = Outcome(status="completed")
LONG = Outcome(status="truncated", limit=Limit.TIME)


@pytest.mark.parametrize(
    ("rollout", "reason"),
    [
        (record(DONE, Score(reward=1.0)), ""),
        (record(DONE, Score(reward=0.4)), "reward too low"),
        (record(LONG, Score(reward=1.0)), "truncated"),
        (record(Outcome(status="failed", kind=FailureKind.ENGINE_TIMEOUT)), "no reward"),
        (record(Outcome(status="cancelled", reason=CancelReason.STALE)), "no reward"),
        (record(Outcome(status="failed", kind=FailureKind.SANDBOX_LIMIT), Score(reward=1.0)), ""),
    ],
)
def test_which_are_left_out(rollout: Rollout, reason: str) -> None:
    assert rejection_reason(rollout, "sft", 0.5, include_overlong=False) == reason
    assert rejection_reason(rollout, "jsonl", None, include_overlong=False) == ""


def test_masked_ones_come_when_asked_for() -> None:
    settings = resolve_settings(RolloutSettings(mask_overlong=(Limit.TIME,)), SERVICE_DEFAULTS)
    masked = record(LONG, Score(reward=1.0), settings=settings)
    assert masked.masked
    assert rejection_reason(masked, "tokens", 1.0, include_overlong=False) == "truncated"
    assert rejection_reason(masked, "tokens", 1.0, include_overlong=True) == ""


def said(role: Any, content: str, **more: Any) -> Message:
    return Message(role=role, content=content, **more)


def test_chats_train_only_what_the_policy_said_and_meant() -> None:
    call = ToolCall(id="c1", name="python", arguments='{"code": "1"}')
    messages = [
        said("system", "s"),
        said("user", "example"),
        said("assistant", "few-shot"),
        said("user", "question"),
        said("assistant", "hm", tool_calls=(call,)),
        said("tool", "1", tool_call_id="c1", name="python"),
        said("assistant", "half a call"),
        said("user", "That is not JSON."),
        said("assistant", "one"),
    ]
    tools = [{"type": "function", "function": {"name": "python"}}]
    chat = to_chat(record(DONE, Score(reward=1.0), messages=messages, prompt_messages=4, tools=tools))
    assert [place for place, message in enumerate(chat["messages"]) if message["train"]] == [4, 8]
    assert chat["messages"][4]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "python", "arguments": '{"code": "1"}'}}
    ]
    assert chat["messages"][5] == {
        "role": "tool",
        "content": "1",
        "tool_call_id": "c1",
        "name": "python",
        "train": False,
    }
    assert chat["tools"] == tools
    older = to_chat(record(DONE, Score(reward=1.0), messages=messages[3:]), "weight")
    assert [message["weight"] for message in older["messages"]] == [0, 1, 0, 0, 0, 1]
