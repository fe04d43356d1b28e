"""``prorl-gym replay`` in real sandboxes: its exit codes, and what it shows of a difference."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback_service import TOKEN, in_a_thread
from sample_records import record
from typer.testing import CliRunner

from prorl_gym.cli.main import app
from prorl_gym.environments import registry
from prorl_gym.environments.playback import gold_steps, play_script
from prorl_gym.environments.row_format import DiskRow, read_rows
from prorl_gym.errors import ConfigError, SandboxError, TaskError
from prorl_gym.records import Message, Rollout, RolloutRequest
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.backend_selection import open_backend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.settings import resolve_settings
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger

pytestmark = pytest.mark.slow

ROWS = Path(__file__).parents[3] / "environments" / "prorl_math" / "data" / "example.jsonl"


def with_a_tool() -> DiskRow:
    return next(row for row in read_rows(ROWS) if any(step.tool for step in gold_steps("math", row.task)))


async def played(row: DiskRow, sandbox: SandboxConfig) -> Rollout:
    """Return the record of the row's gold trajectory."""
    environment = registry.get("math")
    backend = await open_backend(sandbox)
    leases = SandboxLeases(backend)
    try:
        found = await play_script(environment, row.task, gold_steps(environment, row.task), leases)
    finally:
        await leases.close()
        await backend.close()
    return record(
        "good",
        environment="math",
        score=found.score,
        messages=found.artifacts.messages,
        prompt_messages=len(found.episode.messages),
        settings=resolve_settings(environment.settings),
    )


def tampered(rollout: Rollout, name: str, role: str, text: str) -> Rollout:
    """Return it with another last message of a role."""
    place = max(place for place, message in enumerate(rollout.messages) if message.role == role)
    messages = list(rollout.messages)
    messages[place] = Message.model_validate({**messages[place].model_dump(), "content": text, "tool_calls": ()})
    return rollout.model_copy(update={"rollout_id": name, "messages": messages})


async def remembered(row: DiskRow, *rollouts: Rollout) -> MemoryLedger:
    ledger = MemoryLedger()
    names = [*(rollout.rollout_id for rollout in rollouts)]
    requests = [RolloutRequest(rollout_id=name, environment="math", task=dict(row.task)) for name in names]
    await ledger.add_rollouts(requests)
    for rollout in rollouts:
        await ledger.begin_attempt(rollout.rollout_id)
        await ledger.finish(rollout)
    return ledger


@pytest.fixture(scope="module")
def replay() -> Iterator[Any]:
    row, backend = with_a_tool(), ["--backend", "userns"]
    try:
        good = asyncio.run(played(row, SandboxConfig(backend="userns")))
    except SandboxError:
        backend = ["--backend", "local", "--allow-unsafe-local"]
        good = asyncio.run(played(row, SandboxConfig(backend="local", allow_unsafe_local=True)))
    records = (
        good,
        tampered(good, "answers", "tool", "\x1b[31msomething else"),
        tampered(good, "reward", "assistant", "I give up."),
        good.model_copy(update={"rollout_id": "theirs", "environment": "theirs"}),
    )
    with in_a_thread(asyncio.run(remembered(row, *records))) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRORL_GYM_URL", url)
        patch.setenv("PRORL_GYM_TOKEN", TOKEN)
        yield lambda *arguments: CliRunner().invoke(app, ["replay", *arguments, *backend])


def test_what_was_recorded_comes_again(replay: Any) -> None:
    result = replay("good")
    assert result.exit_code == 0, result.output
    assert result.output.endswith(" answers, 0 differ; reward was 1, is 1\n")


def test_other_answers_are_shown_harmlessly(replay: Any) -> None:
    result = replay("answers")
    assert result.exit_code == 3
    assert "-\ufffd[31msomething else" in result.output.splitlines()
    assert ": recorded" in result.output
    assert " 1 differ; reward was 1, is 1\n" in result.output


def test_another_reward_is_reported(replay: Any) -> None:
    result = replay("reward")
    assert (result.exit_code, result.output.splitlines()[-1].partition("; ")[2]) == (1, "reward was 1, is 0")


@pytest.mark.default
def test_what_cannot_be_replayed_is_said(replay: Any) -> None:
    assert isinstance(replay("theirs").exception, TaskError)
    assert "stranger" in str(replay("stranger").exception)


def test_sandboxes_come_from_a_configuration(replay: Any, tmp_path: Path) -> None:
    config = tmp_path / "service.yaml"
    config.write_text(
        "inference: {engines: ['http://127.0.0.1:1'], model: m, tokenizer: small}\nsandbox: {backend: x}\n"
    )
    error = replay("good", "--config", str(config)).exception
    assert isinstance(error, ConfigError)
    assert "sandbox.backend" in str(error)
