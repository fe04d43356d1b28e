"""The routes that people's pages ask: lists, aggregates and problems, from the ledger alone."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from api_stack import Served, ask, serving

from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(await SqliteLedger.open(LedgerConfig(path=tmp_path / "ledger.sqlite"))) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def eight(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Served]]:
    """Services over each kind of ledger with eight finished rollouts, for tests that only read."""
    ledger = LedgerConfig(path=tmp_path_factory.mktemp("eight") / "ledger.sqlite")
    async with serving(await SqliteLedger.open(ledger)) as on_disk, serving(MemoryLedger()) as in_memory:
        both = [on_disk, in_memory]
        for each in both:
            await finish_eight(each)
        yield both


def member(name: str, group: str, replica: int, run_id: str = "r", **task: Any) -> dict[str, Any]:
    return ask(name, id=group, **task) | {"run_id": run_id, "group_id": group, "group_size": 2, "replica": replica}


async def finish(served: Served, *rows: dict[str, Any]) -> None:
    """Submit rollouts one after the other, so that their cursors are in this order."""
    for row in rows:
        await served.ask("POST", "/v1/rollouts", row)
        await served.ask("GET", f"/v1/rollouts/{row['rollout_id']}?wait=10")


async def finish_eight(served: Served) -> None:
    await finish(
        served,
        member("a0", "easy", 0, reward=1.0),
        member("a1", "easy", 1, reward=1.0),
        member("b0", "hard", 0, reward=0.0),
        member("b1", "hard", 1, reward=0.0),
        member("c0", "mixed", 0, reward=0.5),
        member("c1", "mixed", 1, reward=0.0),
        member("d0", "broken", 0, run="bad_row"),
        member("e0", "other", 0, "s", reward=1.0),
    )


async def listed(served: Served, query: str) -> list[str]:
    status, answer = await served.ask("GET", f"/v1/rollouts?{query}")
    assert status == 200, answer
    return [one["rollout_id"] for one in answer["pending"] or answer["rollouts"]]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", "e0 d0 c1 c0 b1 b0 a1 a0"),
        ("descending=false&limit=3", "a0 a1 b0"),
        ("offset=2&limit=2", "c1 c0"),
        ("run=s", "e0"),
        ("run=r&reward=above", "c0 a1 a0"),
        ("reward=zero", "c1 b1 b0"),
        ("reward=none", "d0"),
        ("status=failed", "d0"),
        ("detail=bad_row", "d0"),
        ("problem=mixed&reward=zero", "c1"),
        ("text=MIX", "c1 c0"),
        ("prefix=b", "b1 b0"),
        ("environment=none", ""),
        ("run=r&sort=reward", "a1 a0 c0 c1 b1 b0 d0"),
        ("run=r&sort=reward&descending=false", "c1 b1 b0 c0 a1 a0 d0"),
        ("sort=rollout&descending=false&limit=2", "a0 a1"),
        ("sort=problem&descending=false&limit=2", "d0 a1"),
        ("sort=outcome&limit=1", "d0"),
        ("state=waiting", ""),
    ],
)
async def test_finished_rollouts_are_filtered_and_sorted(eight: list[Served], query: str, expected: str) -> None:
    assert [await listed(each, query) for each in eight] == [expected.split()] * 2


async def test_counts_are_of_all_that_match(served: Served) -> None:
    await finish_eight(served)
    await served.ask("POST", "/v1/rollouts", member("f0", "open", 0, run="hang"))
    _, answer = await served.ask("GET", "/v1/rollouts?limit=1")
    assert answer["counts"]["finished"] == 8
    assert answer["counts"]["waiting"] + answer["counts"]["running"] == 1
    _, answer = await served.ask("GET", "/v1/rollouts?limit=1&reward=zero")
    assert answer["counts"] == {"waiting": 0, "running": 0, "finished": 3}


async def test_what_runs_and_what_waits_is_listed_with_its_place(served: Served) -> None:
    await served.ask("POST", "/v1/rollouts", [member("a0", "g", 0, run="hang"), member("a1", "g", 1, run="hang")])
    while not await listed(served, "state=running&prefix=a0"):
        pass
    await served.ask("POST", "/v1/hold")
    await served.ask("POST", "/v1/rollouts", [member(f"b{i}", "h", i, "s", run="hang") for i in range(2)])
    _, running = await served.ask("GET", "/v1/rollouts?state=running&run=r&sort=rollout&descending=false")
    assert {one["place"] for one in running["pending"]} <= {"init", "run"}
    assert running["pending"][0]["since"] >= running["pending"][0]["accepted_at"]
    _, waiting = await served.ask("GET", "/v1/rollouts?state=waiting&sort=took")
    assert [(one["rollout_id"], one["place"]) for one in waiting["pending"]] == [("b0", "queue"), ("b1", "queue")]
    assert waiting["counts"]["waiting"] == 2
    assert await listed(served, "state=waiting&sort=rollout&descending=true") == ["b1", "b0"]
    assert await listed(served, "state=waiting&reward=zero") == []


async def test_rewards_are_given_by_version_and_causes_by_reason(eight: list[Served]) -> None:
    for each in eight:
        _, answer = await each.ask("GET", "/v1/analysis")
        assert answer["finished"] == 8
        assert (answer["runs"], answer["environments"]) == (["s", "r"], ["scripted"])
        points = {one["run_id"]: (one["count"], one["solved"], one["mean"]) for one in answer["rewards"]}
        assert points == {"r": (6, 3, pytest.approx(2.5 / 6)), "s": (1, 1, 1.0)}
        ends = [(one["status"], one["detail"], one["zero"], one["count"], one["rollout_id"]) for one in answer["ends"]]
        assert ends == [("completed", "", True, 3, "c1"), ("failed", "bad_row", False, 1, "d0")]
        assert set(answer["spreads"]) >= {"took", "turns", "tokens"}
        took = answer["spreads"]["took"]
        assert 0 <= took["p50"] <= took["p90"] <= took["max"]
        _, one = await each.ask("GET", "/v1/analysis?run=s&reward=zero")
        assert (one["finished"], one["rewards"], one["ends"], one["spreads"]) == (0, [], [], {})
        assert one["runs"] == ["s", "r"]


async def test_a_problem_that_is_never_solved_comes_first(eight: list[Served]) -> None:
    for each in eight:
        _, answer = await each.ask("GET", "/v1/problems?order=worst")
        names = [one["problem"] for one in answer["problems"]]
        assert names == ["hard", "mixed", "easy", "other", "broken"]
        assert (answer["total"], answer["never_solved"], answer["always_solved"]) == (5, 1, 2)
        hard = answer["problems"][0]
        assert (hard["count"], hard["rewarded"], hard["solved"], hard["mean"]) == (2, 2, 0, 0.0)
        assert [(one["rollout_id"], one["reward"]) for one in hard["members"]] == [("b0", 0.0), ("b1", 0.0)]
        _, page = await each.ask("GET", "/v1/problems?order=problem&limit=2&offset=1")
        assert [one["problem"] for one in page["problems"]] == ["easy", "hard"]


async def test_a_restart_shows_the_same(tmp_path: Path) -> None:
    config = LedgerConfig(path=tmp_path / "ledger.sqlite")
    answers: list[list[Any]] = []
    for start in range(2):
        async with serving(await SqliteLedger.open(config)) as served:
            if not start:
                await finish_eight(served)
            answers.append([await served.ask("GET", f"/v1/{path}") for path in ("analysis", "problems", "rollouts")])
    assert answers[0] == answers[1]
