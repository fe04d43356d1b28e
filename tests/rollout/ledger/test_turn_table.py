"""Logged turns in the ledger's file: what they cost, and what of them may be lost."""

import os
from pathlib import Path

import pytest
from ledger_writer import change, opened, traced
from sample_records import BAD, record

from prorl_gym.errors import FailureKind
from prorl_gym.inference.protocol import GenerationResult, TextTurn
from prorl_gym.inference.tokens.turn_log import LoggedTurn
from prorl_gym.records import Message, Retry, RolloutRequest, ToolCall
from prorl_gym.rollout.ledger import statements
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.ledger.writer_thread import LedgerWriter
from prorl_gym.rollout.protocol import TurnEnded


def turn(text: str) -> LoggedTurn:
    """Return a turn whose numbers have no short decimal form, of an engine that answers in text."""
    said = TextTurn(text, (ToolCall(id="c", name="add", arguments="{}"),))
    logprobs = [-1 / 3, -0.1 - 0.2]
    experts = [[1, 2], [3]]
    sampled = GenerationResult(
        [5, 6], logprobs, "stop", "raw", "e", [3, 4], 0.1, routed_experts=experts, text_turn=said
    )
    answer = Message(role="tool", content=text, tool_call_id="c", name="add")
    return LoggedTurn(prompt="p", calls=(sampled, sampled), answers=(answer,), seconds=1 / 3)


async def begun(ledger: SqliteLedger, rollout_id: str = "r") -> tuple[LoggedTurn, ...]:
    await ledger.add_rollouts([RolloutRequest(rollout_id=rollout_id, environment="noop", task={})])
    return (await ledger.begin_attempt(rollout_id)).turns


async def test_a_turn_is_not_synced_and_all_else_is(tmp_path: Path, ledger: SqliteLedger, writer: LedgerWriter) -> None:
    await begun(ledger)
    mark = (tmp_path / "l.db.mark").read_bytes()
    asked = await traced(writer)
    await ledger.log_turn(TurnEnded(rollout_id="r", attempt=0, number=0, turn=turn("a")))
    assert (tmp_path / "l.db.mark").read_bytes() == mark
    await ledger.fail_attempt("r", Retry(attempt=0, kind=FailureKind.SANDBOX_LOST, stage="run", message="gone"))
    assert int((tmp_path / "l.db.mark").read_bytes()) == int(mark) + 2
    levels = [statement for statement in asked if "synchronous" in statement or statement == "COMMIT"]
    assert levels == ["PRAGMA synchronous = NORMAL", "COMMIT", "PRAGMA synchronous = FULL", "COMMIT"]


async def test_a_power_cut_may_cost_a_turn_and_nothing_else(tmp_path: Path) -> None:
    """The log as it is on the disk after one: without the last commit, which was not synced."""
    path, copy = tmp_path / "l.db", tmp_path / "after"
    copy.mkdir()
    async with opened(path) as ledger:
        await begun(ledger)
        await ledger.log_turn(TurnEnded(rollout_id="r", attempt=0, number=0, turn=turn("a")))
        length = (tmp_path / "l.db-wal").stat().st_size
        await ledger.log_turn(TurnEnded(rollout_id="r", attempt=0, number=1, turn=turn("b")))
        for name in ("l.db", "l.db-wal", "l.db.mark"):
            (copy / name).write_bytes((tmp_path / name).read_bytes())
    os.truncate(copy / "l.db-wal", length)
    async with opened(copy / "l.db") as ledger:
        assert await begun(ledger) == (turn("a"),)


async def test_the_turns_of_a_rollout_have_a_bound(ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statements, "MAX_TURN_BYTES", 2500)
    noise = os.urandom(600).hex()
    await begun(ledger)
    for number, text in enumerate(["a", noise, noise, noise, "b"]):
        await ledger.log_turn(TurnEnded(rollout_id="r", attempt=0, number=number, turn=turn(text)))
    assert await begun(ledger) == (turn("a"), turn(noise), turn(noise))


async def test_a_ledger_over_its_budget_keeps_no_more_turns(path: Path) -> None:
    async with opened(LedgerConfig(path=path, budget_bytes=1 << 20)) as ledger:
        await begun(ledger)
        await begun(ledger, "large")
        await ledger.log_turn(TurnEnded(rollout_id="r", attempt=0, number=0, turn=turn("a")))
        await ledger.log_turn(TurnEnded(rollout_id="large", attempt=0, number=0, turn=turn(os.urandom(1 << 20).hex())))
        assert (await ledger.usage()).full
        await ledger.log_turn(TurnEnded(rollout_id="r", attempt=0, number=1, turn=turn("b")))
        assert await begun(ledger) == (turn("a"),)
        await ledger.finish(record("large", BAD, environment="noop"))
        assert not (await ledger.usage()).full


async def test_what_cannot_be_written_or_read_ends_the_log_there(path: Path) -> None:
    async with opened(path) as ledger:
        await begun(ledger)
        with pytest.raises(ValueError, match="surrogates"):
            await ledger.log_turn(TurnEnded(rollout_id="r", attempt=0, number=0, turn=turn("half a pair: \ud800")))
        for number in range(3):
            await ledger.log_turn(TurnEnded(rollout_id="r", attempt=0, number=number, turn=turn(str(number))))
    change(path, "UPDATE turns SET body = x'00ff' WHERE number = 1")
    async with opened(path) as ledger:
        assert await begun(ledger) == (turn("0"),)


async def test_where_nothing_is_logged_nothing_is_looked_up(ledger: SqliteLedger, writer: LedgerWriter) -> None:
    asked = await traced(writer)
    await begun(ledger)
    await ledger.fail_attempt("r", Retry(attempt=0, kind=FailureKind.SANDBOX_LOST, stage="run", message="gone"))
    await begun(ledger)
    await ledger.finish(record("r", BAD, environment="noop", attempt=1))
    assert len(asked) > 10
    assert [statement for statement in asked if "turns" in statement.split()] == []
