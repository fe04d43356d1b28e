"""Figures through the service: accuracy on held-out questions, and an account of every rollout."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from audit import LearnError
from tasks import Question

from prorl_gym.client import Client, RolloutSummary
from prorl_gym.errors import Cause
from prorl_gym.records import RolloutRequest
from prorl_gym.settings import RolloutSettings

SECONDS = 300.0


async def accuracy(client: Client, run: str, asked: Sequence[Question], temperature: float) -> float:
    """Return the share of questions that the policy solves.

    Raises:
        LearnError: a rollout has no reward, or they take too long.
    """
    requests = [
        RolloutRequest(
            rollout_id=f"{run}-{place}",
            run_id=run,
            environment=question.environment,
            task=question.row,
            settings=RolloutSettings(temperature=temperature, seed=place, **question.limits()),
            evaluation=True,
        )
        for place, question in enumerate(asked)
    ]
    await client.submit(requests)
    rewards: list[float] = []
    try:
        async with asyncio.timeout(SECONDS), aclosing(client.stream(run, acknowledge=True)) as stream:
            async for delivered in stream:
                rollout = delivered.rollout
                if rollout.reward is None:
                    raise LearnError(f"evaluation: {rollout.rollout_id} has no reward: {rollout.outcome.message}")
                rewards.append(rollout.reward)
                if len(rewards) == len(requests):
                    break
    except TimeoutError:
        raise LearnError(f"evaluation: {len(rewards)} of {len(requests)} rollouts within {SECONDS:g} s") from None
    return sum(rewards) / len(rewards)


@dataclass(frozen=True, slots=True)
class Account:
    """What became of the rollouts of a run."""

    submitted: int
    lost: int
    """Without a terminal record, or ended by a failure of infrastructure."""
    ends: Counter[str]


async def account_of(client: Client, run: str, submitted: Sequence[str]) -> Account:
    """Wait for the end of a run that nothing more is wanted of, and count how its rollouts ended."""
    ended = await _ended(client, run)
    late = (client.result(one, timeout=SECONDS) for one in submitted if one not in ended)
    await asyncio.gather(*late, return_exceptions=True)  # what does not end is counted
    ended = await _ended(client, run)
    missing = len(set(submitted) - set(ended))
    ends = Counter(f"{one.status} {one.detail}".strip() for one in ended.values())
    broken = sum(one.cause is Cause.INFRASTRUCTURE for one in ended.values())
    return Account(len(submitted), missing + broken, ends + Counter({"no record": missing}))


async def _ended(client: Client, run: str) -> dict[str, RolloutSummary]:
    found: dict[str, RolloutSummary] = {}
    before: int | None = 0
    while before is not None:
        page = await client.rollouts(run, limit=1000, before=before)
        found |= {one.rollout_id: one for one in page.rollouts}
        before = page.before
    return found
