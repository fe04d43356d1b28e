"""A trainer that knows the published routes only trains on ours."""

import asyncio
import signal
from pathlib import Path

import pytest
from compat_support import ENGINES, TOKEN, published
from killed_service import ENGINE, SERVING, announcement, configure, place, started
from published_trainer import Trainer

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.client import SyncClient, read_token
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.row_format import read_rows
from prorl_gym.records import Score
from prorl_gym.settings import ResolvedSettings
from prorl_gym.testing.rollout.fake_rollout import Script, ScriptedEnvironment

ROOT = Path(__file__).parents[3]


class Alternating(ScriptedEnvironment):
    """Rewards of 0 and 1 in turn; rows with a reward of 0 never succeed."""

    graded = 0

    async def evaluate(self, task: Script, artifacts: Artifacts, leases: Leases, settings: ResolvedSettings) -> Score:
        await super().evaluate(task, artifacts, leases, settings)
        self.graded += 1
        return Score(reward=task.reward * (self.graded % 2))


async def test_on_fakes() -> None:
    rows = [{"id": f"row-{index}", "turns": 1 + index % 3, "reward": float(index % 3 > 0)} for index in range(9)]
    instances = [{"data_source": "scripted", "instance_id": row["id"], "task": row} for row in rows]
    async with published(Alternating()) as server:
        host = server.url.removeprefix("http://")
        trainer = Trainer(f"http://{host}/t/{TOKEN}", ENGINES, instances, {"temperature": 1.0, "max_iterations": 4})
        steps = await trainer.train(steps=3, batch=3)
        await server.until(jobs=0, total=0)
    assert [len(step) for step in steps] == [3, 3, 3]
    samples = [sample for step in steps for group in step for sample in group]
    assert all(sample.ids == [1, 2, 3, 4] * (len(sample.ids) // 4) for sample in samples)
    assert all(sample.loss_mask == [0, 1, 1, 1] * (len(sample.ids) // 4) for sample in samples)
    assert not any(sample.masked for sample in samples)
    assert trainer.dropped > 0
    assert trainer.cancelled


@pytest.mark.slow
def test_on_a_real_service_with_the_oracle() -> None:
    oracle = ["engine", "oracle", "--port", "0", "--seed", "3", "--solve-rate", "0.5"]
    with place() as ground, started(oracle, ENGINE) as (_, engine):
        serve = [*configure(ground, engine, compat={"port": 0, "keep_records": True}), "--compat"]
        with started(serve, SERVING) as (service, main):
            routes = announcement(service, r"published routes on (http://[\d.:]+)")[1]
            token = read_token(ground / "state" / "token")
            base = routes.replace("http://", f"http://:{token}@")
            trainer = Trainer(base, [engine], instances(), {"temperature": 1.0, "seed": 1}, n=4)
            steps = asyncio.run(trainer.train(steps=2, batch=2))
            with SyncClient(main, token=token) as client:
                assert client.status().running == 0
                everything = [one.rollout for one in client.stream("published-routes", follow=False)]
            service.send_signal(signal.SIGTERM)
            log, _ = service.communicate(timeout=30)
    assert [[len(group) for group in step] for step in steps] == [[4, 4], [4, 4]]
    for step in steps:
        for group in step:
            assert {sample.resolved for sample in group} == {True, False}
            assert all(sum(sample.loss_mask) > 0 for sample in group)
            first = {tuple(sample.ids[: sample.loss_mask.index(1)]) for sample in group}
            assert len(first) == 1  # one prompt
    assert token not in log
    # What the trainer put together is what the service has: the sequence that the engine was sent and sampled.
    kept = {tuple(segment.token_ids): segment for one in everything for segment in one.segments}
    for sample in (sample for step in steps for group in step for sample in group):
        segment = kept[tuple(sample.ids)]
        assert (sample.loss_mask, sample.logprobs) == (segment.mask, segment.logprobs)
    assert {tool["function"]["name"] for one in everything for tool in one.tools} == {"python", "finish"}


def instances() -> list[dict[str, object]]:
    """Rows as verl's datasets have them: nothing of ours but the question and the gold answer."""
    rows = [row.task for row in read_rows(ROOT / "environments/prorl_math/data/example.jsonl")]
    return [
        {
            "data_source": "deepscaler",
            "instance_id": row["id"],
            "prompt": [{"role": "user", "content": row["question"]}],
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        }
        for row in rows
    ]
