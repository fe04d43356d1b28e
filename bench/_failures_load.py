"""Rollouts of ``bench failures``: made all at once, until a limit. What each came to is data, never an error.

Peers' own environments import this module too, so it needs only the standard library.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """One model call of a trajectory, as the system recorded it."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    versions: list[int] | None = None
    """Of the weights that sampled each id; ``None`` where the system has no place for it."""


@dataclass(frozen=True, slots=True)
class Made:
    """What came of one rollout."""

    reward: float | None = None
    mark: str = ""
    """What tells a trainer that it failed, or to compute no loss on it."""
    lost: str = ""
    """Why there is no result at all."""
    is_answered: bool = True
    calls: list[Call] = field(default_factory=list[Call])
    """Empty where the system keeps no token ids."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rollouts that were made at once."""

    made: list[Made]
    seconds: float
    """Until the last answer, or the limit."""


Rollout = Callable[[], Awaitable[Made]]


async def make_batch(count: int, seconds: float, rollout: Rollout) -> Batch:
    """Make rollouts at once; one that raises or is not answered in ``seconds`` is lost."""

    async def one() -> Made:
        try:
            return await rollout()
        except Exception as error:  # whatever a system raises is what its caller gets instead of a result
            return Made(lost=f"{type(error).__name__}: {error}"[:200])

    began = time.perf_counter()
    tasks = [asyncio.create_task(one()) for _ in range(count)]
    done, pending = await asyncio.wait(tasks, timeout=seconds)
    took = time.perf_counter() - began
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending, timeout=5.0)  # a thread cannot be cancelled
    unanswered = Made(lost=f"no answer in {seconds:g} s", is_answered=False)
    return Batch([task.result() for task in tasks if task in done] + [unanswered] * len(pending), took)


def batch_from_json(text: str) -> Batch:
    """Read what ``answer_batches`` printed."""
    value: Any = json.loads(text)
    for one in value["made"]:
        one["calls"] = [Call(**call) for call in one["calls"]]
    return Batch([Made(**one) for one in value["made"]], value["seconds"])


async def answer_batches(rollout: Rollout) -> None:
    """Make every batch that a line of the input asks for; libraries that print do so on standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("ready", file=answers, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(asdict(await make_batch(**json.loads(line), rollout=rollout))), file=answers, flush=True)
