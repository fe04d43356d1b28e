"""Groups of rollouts with several turns, the same in every run: what a trainer sends to a pool."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult
from prorl_gym.testing.inference.engine_conformance import request

SAME = 2e-4
"""Nats by which a log-prob may differ between two ways of computing it in float32."""
FIRST_ID = 16
"""Below it are the tokenizer's control tokens."""


@dataclass(frozen=True)
class Workload:
    """Lengths in tokens. A block of vLLM's prefix cache has 128 on CPU: less of a shared beginning is never found."""

    groups: int = 5
    members: int = 3  # an odd number of rollouts: or round robin over two engines would be sticky by accident
    turns: int = 5
    prompt: int = 400
    sampled: int = 32
    observed: int = 200

    def sessions(self) -> list[tuple[str, str]]:
        return [(f"g{group}", f"g{group}-{member}") for group in range(self.groups) for member in range(self.members)]


@dataclass
class Rollout:
    ids: list[int]
    results: list[GenerationResult] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    """Length of each prompt."""
    turns: int = 0
    """That are complete."""

    @property
    def said(self) -> list[list[int]]:
        return [result.token_ids for result in self.results]


def farthest(some: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


def words(name: str, count: int) -> list[int]:
    draw = random.Random(name)
    return [draw.randrange(FIRST_ID, 4096) for _ in range(count)]


def call(ids: Sequence[int], **changes: Any) -> GenerationRequest:
    return request(**{"prompt_ids": list(ids), "session_id": "s", "max_tokens": 16, "conversation": None, **changes})


async def begin(engine: Any, asked: GenerationRequest) -> asyncio.Task[Any]:
    """Start a call, and return its task when the engine, which has no other, has sampled a token of it."""
    before = await engine.read_load()
    running = asyncio.create_task(engine.generate(asked))
    while not running.done() and (await engine.read_load()).generated == before.generated:
        pass
    return running


async def play(
    pool: EnginePool, work: Workload, *, at_turn: Callable[[int, Rollout], None] = lambda turn, rollout: None
) -> dict[str, Rollout]:
    """Play all rollouts at once and return them by session; ``at_turn`` is called before each turn."""
    done: dict[str, Rollout] = {}

    async def one(group: str, session: str) -> None:
        rollout = done[session] = Rollout(words(group, work.prompt))
        for turn in range(work.turns):
            at_turn(turn, rollout)
            await take(rollout, group, session, turn)
            rollout.ids += words(f"{session}/{turn}", work.observed)
            rollout.turns += 1
        pool.forget_session(session)

    async def take(rollout: Rollout, group: str, session: str, turn: int) -> None:
        """Sample one turn; one that is cut short goes on from the same ids."""
        left = work.sampled
        while left > 0:
            asked = call(
                rollout.ids,
                session_id=session,
                group_id=group,
                max_tokens=left,
                seed=random.Random(f"{session}/{turn}/{left}").getrandbits(60),
            )
            rollout.sent.append(len(rollout.ids))
            result = await pool.generate(asked)
            rollout.results.append(result)
            rollout.ids += result.token_ids
            if result.finish_reason != "abort":
                return
            left -= len(result.token_ids)

    async with asyncio.TaskGroup() as group:
        for name, session in work.sessions():
            group.create_task(one(name, session))
    return done
