"""One of two servers is killed in the middle of a run."""

import pytest
from real_fleet import Figures, Fleet
from real_workload import Rollout, Workload, play

from prorl_gym.inference.balance import make_balance_policy
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.balance.health_monitor import FailoverOptions

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

WORK = Workload(turns=4, sampled=64, observed=100)


def pool_of(fleet: Fleet) -> EnginePool:
    pool = EnginePool(
        "policy", balance_policy=make_balance_policy("cost"), failover=FailoverOptions(recovery_seconds=5)
    )
    for engine in fleet.engines():
        pool.add_engine(engine)
    return pool


async def test_no_rollout_is_lost_or_altered_when_a_server_is_killed(fleet: Fleet, figures: Figures):
    async with pool_of(fleet) as pool:
        undisturbed = await play(pool, WORK)

    def kill_in_the_middle(turn: int, rollout: Rollout) -> None:
        """Kill it in the middle of a rollout that it served: by then it has not only been asked, but has answered."""
        served = turn == WORK.turns // 2 and rollout.results[-1].engine == "vllm-1"
        if served and fleet.servers[1].alive:
            fleet.servers[1].kill()

    async with pool_of(fleet) as pool:
        disturbed = await play(pool, WORK, at_turn=kill_in_the_middle)
        failovers, left = pool.failovers, pool.healthy
    assert left == ["vllm-0"]
    assert failovers > 0
    assert {s: r.ids for s, r in disturbed.items()} == {s: r.ids for s, r in undisturbed.items()}
    assert all(rollout.turns == WORK.turns for rollout in disturbed.values())
    served = {result.engine for rollout in disturbed.values() for result in rollout.results}
    assert served == {"vllm-0", "vllm-1"}
    figures["rollouts lost or altered by a killed server"] = (
        0,
        f"of {len(disturbed)}",
        f"{failovers} calls were made again on the other one; ids compared with an undisturbed run",
    )
