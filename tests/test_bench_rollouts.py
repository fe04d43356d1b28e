"""``bench peers``: what it refuses, its arithmetic and its rows. Speed is not tested here."""

from pathlib import Path
from typing import Any

import _load as loads
import _rollout_systems as systems
import _rollout_work as work
import peers
import pytest

from prorl_gym.environments.playback import gold_steps
from prorl_gym.environments.protocol import Environment
from prorl_gym.oracle.oracle_policy import load_rows

WORK = work.QUESTION_WORK


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "calls", "complaint"),
    [
        ([1.0, 1.0], 4, ""),
        ([1.0, 0.0], 4, r"1 rewards are not 1 \(2 rollouts were asked for, 2 made\)"),
        ([1.0], 4, r"0 rewards are not 1 \(2 rollouts were asked for, 1 made\)"),
        ([1.0, 1.0], 5, "the engine counted 5 calls, expected 4"),
        ([1.0, 1.0], 3, "the engine counted 3 calls, expected 4"),
    ],
    ids=["right", "a wrong answer", "a lost rollout", "a retried call", "a missing call"],
)
def test_worthless_figures_are_refused(rewards: list[float], calls: int, complaint: str) -> None:
    arm = systems.Arm.of("ours", WORK)
    seen = loads.Seen(1.0, [50.0] * len(rewards), rewards)
    if not complaint:
        peers.check(arm, loads.Load(2), seen, calls)
        return
    with pytest.raises(peers.BenchRefusedError, match=complaint):
        peers.check(arm, loads.Load(2), seen, calls)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_busy_time_leaves_out_idle_waiting_and_guests() -> None:
    stat = "cpu  100 20 30 9000 800 4 6 70 50 0\ncpu0 1 1 1 1 1 1 1 0 0 0\n"
    assert peers.busy_seconds(stat, 100) == 1.6


# --- the engine and the rows ------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_engines_rows_make_the_calls_that_are_expected(tmp_path: Path) -> None:
    async with systems.peers_engine(tmp_path) as (url, pid):
        rows = load_rows([tmp_path / "rows.jsonl"])
        for each in work.WORKS:
            known = rows.find(each.row["question"])
            environment: Environment[Any] = known.environment
            assert environment.name == each.environment and len(gold_steps(environment, known.task)) == each.calls
        machine = peers.Machine(url, pid)
        (floor, *_) = systems.all_systems()
        async with floor.start(systems.Site(url, tmp_path)) as (put,):
            seen = await put(loads.Load(3, callers=3))
        assert seen.rewards == [1.0] * 3 and await machine.calls() == 6
        assert min(seen.latencies) >= WORK.engine_ms
        assert machine.engine() > 0
