"""A policy update in the middle of a run, and one of the two engines does not get it."""

import asyncio

import pytest
from real_fleet import Figures, Fleet
from real_server import VOCAB
from real_workload import SAME, Rollout, Workload, play

from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.engines.vllm import VllmEngine
from prorl_gym.inference.weights.weight_updater import UpdateResult, WeightUpdater

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

WORK = Workload(turns=3, sampled=96, observed=100)


async def update_one_engine_only(fleet: Fleet, updater: WeightUpdater) -> UpdateResult:
    await updater.pause("abort")
    await asyncio.to_thread(fleet.servers[0].reload, fleet.checkpoints.random(2))
    updated = await updater.update(1)
    await updater.resume()
    return updated


async def off(rollout: Rollout, engine: VllmEngine, version: int) -> tuple[float, int]:
    """Return how far the log-probs of one version's tokens are from what an engine computes for these ids."""
    logprobs, gap, count = await engine.probe_logprobs(rollout.ids), 0.0, 0
    for sent, result in zip(rollout.sent, rollout.results, strict=True):
        for place, (logprob, label) in enumerate(zip(result.logprobs, result.versions, strict=True), sent):
            if label == version:
                gap, count = max(gap, abs(logprobs[place - 1] - logprob)), count + 1
    return gap, count


async def test_a_stale_engine_is_quarantined_and_no_token_lies_about_its_weights(fleet: Fleet, figures: Figures):
    updating: asyncio.Task[UpdateResult] | None = None
    async with EnginePool("policy") as pool:
        new, old = fleet.engines()
        for engine in (new, old):
            pool.add_engine(engine)
        updater = WeightUpdater(pool, VOCAB)

        def update_in_the_middle(turn: int, rollout: Rollout) -> None:
            nonlocal updating
            if turn == 1 and updating is None:
                updating = asyncio.create_task(update_one_engine_only(fleet, updater))

        rollouts = await play(pool, WORK, at_turn=update_in_the_middle)
        assert updating is not None
        updated = await updating
        assert updated.serving == ("vllm-0",)
        assert list(updated.quarantined) == ["vllm-1"]
        assert "stale" in updated.quarantined["vllm-1"]
        results = [result for rollout in rollouts.values() for result in rollout.results]
        assert all(rollout.turns == WORK.turns for rollout in rollouts.values())
        assert {result.engine for result in results if 1 in result.versions} == {"vllm-0"}

        checks = [
            await off(rollout, engine, version)
            for rollout in rollouts.values()
            for engine, version in ((old, 0), (new, 1))
        ]
        gap = max(each for each, _ in checks)
        assert sum(count for _, count in checks) == sum(len(result.token_ids) for result in results)
        assert gap < SAME

        await asyncio.to_thread(fleet.servers[1].reload, fleet.checkpoints.random(2))
        async with asyncio.timeout(60):
            await pool.members.changes.wait_for(lambda: pool.healthy == ["vllm-0", "vllm-1"])
        await updater.close()
    salvaged = [len(result.token_ids) for result in results if result.finish_reason == "abort"]
    figures["an engine that missed an update"] = (
        "quarantined",
        "",
        f"{updated.quarantined['vllm-1']}; let in again after a reload",
    )
    figures["turns cut by the update"] = (
        len(salvaged),
        "turns",
        f"{sum(salvaged)} tokens of them salvaged; every rollout went on from the same ids and ended",
    )
    figures["tokens that lie about their weights"] = (
        0,
        f"of {sum(len(result.token_ids) for result in results)}",
        f"log-probs of each version's tokens against that version's weights differ by {gap:.1e} nats at most",
    )
