"""What users hold is what it was, but for the names that ``renames.json`` lists."""

import json
import re
import sqlite3
from pathlib import Path

import pytest
from golden import DOCUMENTS, ENVIRONMENTS, FOLDER, ROLLOUTS, records, text

from prorl_gym.demand import Demand
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.ledger.encoding import decode_rollout
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger


def renamed(document: str) -> str:
    """Return a committed document with today's names."""
    renames: dict[str, str] = json.loads((FOLDER / "renames.json").read_text(encoding="utf-8"))
    if not renames:
        return document
    old = re.compile("|".join(rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in renames))
    return old.sub(lambda found: renames[found[0]], document)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_it_is_what_it_was(name: str) -> None:
    committed = json.loads(renamed((FOLDER / f"{name}.json").read_text(encoding="utf-8")))
    assert json.loads(text(DOCUMENTS[name]())) == committed, f"meant to change: python tests/golden/golden.py {name}"


@pytest.mark.slow
@pytest.mark.parametrize("environment", ENVIRONMENTS)
async def test_records_are_what_they_were(environment: str) -> None:
    committed = json.loads(renamed((FOLDER / f"{environment}.json").read_text(encoding="utf-8")))
    assert json.loads(text(await records(environment))) == committed


async def test_a_ledger_of_the_last_release_opens(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    with sqlite3.connect(path) as connection:
        connection.executescript((FOLDER / "ledger.sql").read_text(encoding="utf-8"))
    connection.close()
    ledger = await SqliteLedger.open(LedgerConfig(path=path, keep_days=1e5))
    try:
        asked = {one["rollout_id"]: RolloutRequest(environment="scripted", **one) for one in ROLLOUTS}
        assert all(one.duplicate for one in await ledger.add_rollouts(list(asked.values())))
        assert await ledger.demands() == {"run": Demand(groups=1)}
        assert [job.request.rollout_id for job in await ledger.pending_jobs()] == ["pending"]
        read = [decode_rollout(one.record) for one in await ledger.read_records(None, 0, 100)]
    finally:
        await ledger.close()
    rollouts = {one.rollout_id: one for one in read}
    cancelled = rollouts.pop("cancelled")
    assert (cancelled.outcome.status, cancelled.outcome.reason, cancelled.reward) == ("cancelled", "client", None)
    assert {name: one.reward for name, one in rollouts.items()} == {name: 1.0 for name in asked if name != "cancelled"}
    assert [retry.kind for retry in rollouts["lost-once"].retries] == ["sandbox_lost"]
