"""``prorl-gym gc``: what it says and does."""

import asyncio
import time
from pathlib import Path

import pytest
from sample_records import record
from typer.testing import CliRunner, Result

from prorl_gym.cli.main import app
from prorl_gym.errors import ConfigError, ProrlError
from prorl_gym.records import Rollout, RolloutRequest, Score
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger

DAY = 86400.0


def ended(rollout_id: str, at: float) -> Rollout:
    return record(rollout_id, score=Score(reward=1.0, detail={"text": "x" * 100_000}), accepted_at=at, finished_at=at)


async def fill(path: Path) -> None:
    """Twenty that have expired, one that has not, one that is pending."""
    config = LedgerConfig(path=path, keep_days=10_000)
    ledger = await SqliteLedger.open(config, lambda: time.time() - 15 * DAY)
    names = [f"old{number}" for number in range(20)]
    await ledger.add_rollouts(
        [RolloutRequest(rollout_id=n, environment="noop", task={}) for n in [*names, "new", "open"]]
    )
    for name in names:
        await ledger.finish(ended(name, time.time() - 15 * DAY))
    await ledger.close()
    ledger = await SqliteLedger.open(config)
    await ledger.finish(ended("new", time.time()))
    await ledger.close()


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["gc", *words], catch_exceptions=True)


def test_it_shows_what_it_would_do_and_then_does_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    asyncio.run(fill(path))
    before = path.stat().st_size
    said = run(str(path), "--dry-run").output.splitlines()
    assert said == [
        f"{path}: 20 records would be released (older than 14 days), "
        "0 tombstones would be deleted (older than 30 days).",
        f"{before / (1 << 20):.1f} MiB; 1 pending, 21 kept, 0 tombstones.",
    ]
    assert path.stat().st_size == before
    said = run(str(path)).output.splitlines()
    after = path.stat().st_size
    assert after < before / 5
    assert said == [
        f"{path}: 20 records released (older than 14 days), 0 tombstones deleted (older than 30 days).",
        f"{before / (1 << 20):.1f} MiB before, {after / (1 << 20):.1f} MiB after; 1 pending, 1 kept, 20 tombstones.",
    ]
    assert "0 records released" in run(str(path)).output


def test_a_configuration_names_the_ledger_and_the_age(tmp_path: Path) -> None:
    path = tmp_path / "own.sqlite"
    asyncio.run(fill(path))
    config = tmp_path / "service.yaml"
    config.write_text(
        "inference: {model: m, tokenizer: none, engines: ['http://127.0.0.1:1/v1']}\n"
        f"ledger: {{path: {path}, keep_days: 16}}\n"
    )
    assert f"{path}: 0 records released (older than 16 days)" in run("--config", str(config)).output


def test_a_ledger_in_use_is_left_to_its_service(tmp_path: Path) -> None:
    async def use() -> Result:
        ledger = await SqliteLedger.open(LedgerConfig(path=tmp_path / "l.db"))
        result = await asyncio.to_thread(run, str(tmp_path / "l.db"))
        await ledger.close()
        return result

    error = asyncio.run(use()).exception
    assert isinstance(error, ProrlError)
    assert error.what.startswith(f"{tmp_path}/l.db: another service uses it (process ")
    assert error.fix == "That service collects by itself, at its start and every hour."


@pytest.mark.parametrize("words", [("nowhere.db",), ("a", "--config", "b")])
def test_impossible_options_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    error = run(*words).exception
    assert isinstance(error, ProrlError)
    assert isinstance(error, ConfigError) == (len(words) > 1)
    assert list(tmp_path.iterdir()) == []
