"""An engine that dies in the middle of a run costs time and nothing else."""

import asyncio
from hashlib import blake2b

import pytest
from token_codecs import codec

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.balance import BalancePolicyName, make_balance_policy
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.balance.health_monitor import FailoverOptions
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult
from prorl_gym.inference.tokens.model_session import ModelSession
from prorl_gym.records import Message
from prorl_gym.settings import RolloutSettings, resolve_settings
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply

ROLLOUTS, TURNS = 24, 5
TASK = [Message(role="user", content="Count.")]
RESULT = [Message(role="tool", content="go on", tool_call_id="c", name="calc")]


def sampled(asked: GenerationRequest) -> Reply:
    """What a model samples is a function of its prompt and the seed."""
    text = f"{asked.seed}/{list(asked.prompt_ids)}".encode()
    return Reply((*(20 + byte % 60 for byte in blake2b(text, digest_size=12).digest()), codec("small").terminator_id))


class Mortal(FakeEngine):
    """Takes a few turns of the loop for each call, and may die within one."""

    def __init__(self, name: str) -> None:
        super().__init__(name, sampled)
        self.served = 0
        self.dies_after: int | None = None

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.served += 1
        for _ in range(1 + self.served % 3):
            await asyncio.sleep(0)
        if self.dies_after is not None and self.served > self.dies_after:
            self.down_error = EngineError(
                FailureKind.ENGINE_UNREACHABLE, f"engine {self.name}: the connection was dropped."
            )
        return await super().generate(request)


async def run(
    policy: BalancePolicyName, dies_after: int | None
) -> tuple[list[tuple[list[int], list[int]]], EnginePool]:
    """Roll out everything; return tokens and mask of each rollout."""
    pool = EnginePool(
        "policy",
        balance_policy=make_balance_policy(policy),
        failover=FailoverOptions(first_probe_seconds=0.001, max_probe_seconds=0.01),
    )
    engines = [Mortal(f"policy-{n}") for n in range(4)]
    engines[1].dies_after = dies_after
    for engine in engines:
        pool.add_engine(engine)

    async def roll(n: int) -> tuple[list[int], list[int]]:
        session = ModelSession(
            pool, codec("small"), resolve_settings(RolloutSettings(seed=7)), rollout_id=f"r{n}", replica=n % 8
        )
        await session.start_conversation(TASK, [])
        for _ in range(TURNS - 1):
            await session.respond(RESULT)
        session.close()
        (segment,) = session.segments()
        return segment.token_ids, segment.mask

    async with pool:
        rollouts = await asyncio.gather(*(roll(n) for n in range(ROLLOUTS)))
    return rollouts, pool


@pytest.mark.parametrize("policy", ["cost", "sticky", "round_robin"])
async def test_no_rollout_is_lost_or_altered(policy: BalancePolicyName):
    calm, _ = await run(policy, None)
    stormy, pool = await run(policy, 3)
    assert pool.failovers > 0
    assert stormy == calm
    assert len({tuple(tokens) for tokens, _ in calm}) == 8, "replicas differ, and by their seed alone"
