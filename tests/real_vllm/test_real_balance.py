"""Prefix hits of the balancing policies, counted by the servers themselves."""

import asyncio
from collections.abc import Mapping

import pytest
from real_fleet import Figures, Fleet
from real_workload import Rollout, Workload, play

from prorl_gym.inference.balance import make_balance_policy
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.records import EngineLoad

pytestmark = [pytest.mark.vllm, pytest.mark.release, pytest.mark.timeout(400)]

POLICIES = ("round_robin", "least_outstanding", "published", "min_heap", "sticky", "cost")
WORK = Workload()
BLOCK = 128


def findable(rollouts: Mapping[str, Rollout]) -> int:
    """Tokens that one cache for everything, asked one call after the other, would have found: whole blocks only."""
    seen: set[tuple[int, ...]] = set()
    found = 0
    for turn in range(WORK.turns):
        for rollout in rollouts.values():
            length, sampled = rollout.sent[turn], len(rollout.results[turn].token_ids)
            held = [tuple(rollout.ids[:end]) for end in range(BLOCK, length + sampled, BLOCK)]
            found += BLOCK * sum(block in seen for block in held if len(block) < length)  # its last id is computed
            seen.update(held)
    return found


async def loads(fleet: Fleet) -> list[EngineLoad]:
    found = [await engine.read_load() for engine in fleet.opened[-2:]]
    return [load for load in found if load is not None]


async def test_prefix_hits_by_policy(fleet: Fleet, figures: Figures):
    hits, said, counted = {}, {}, {}
    for name in POLICIES:
        for server in fleet.servers:
            await asyncio.to_thread(server.fresh, fleet.policy)
        pool = EnginePool("policy", balance_policy=make_balance_policy(name))
        for engine in fleet.engines():
            pool.add_engine(engine)
        before = await loads(fleet)
        rollouts = await play(pool, WORK)
        after = await loads(fleet)
        asked = sum(b.prefix_queries - a.prefix_queries for a, b in zip(before, after, strict=True))
        found = sum(b.prefix_hits - a.prefix_hits for a, b in zip(before, after, strict=True))
        await pool.close()
        hits[name], counted[name] = found / asked, found
        said[name] = {session: rollout.said for session, rollout in rollouts.items()}
        assert asked == sum(sum(rollout.sent) for rollout in rollouts.values())
        assert found == sum(result.cached_tokens or 0 for rollout in rollouts.values() for result in rollout.results)
        best = findable(rollouts) / asked
        figures[f"prefix hits, {name}"] = (
            f"{100 * hits[name]:.1f}",
            "%",
            f"of prompt tokens; {100 * best:.1f} can be had from one cache, call after call",
        )
    assert all(each == said["cost"] for each in said.values())  # where a call goes changes nothing of what is said
    for name in POLICIES:
        assert counted[name] <= findable(rollouts)
    assert min(hits[name] for name in ("sticky", "cost", "min_heap", "published")) > hits["round_robin"] + 0.03
    assert hits["cost"] >= hits["sticky"] - 0.02
