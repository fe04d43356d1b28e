"""A rollout of ``math`` whose context is compacted: tools in a real sandbox, its record in every shape, its replay."""

import json
from pathlib import Path
from typing import Any

import pytest

from prorl_gym.environments import registry
from prorl_gym.environments.playback import replay
from prorl_gym.environments.row_format import read_rows
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.protocol import GenerationRequest
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.pages.rollout_page import render_rollout
from prorl_gym.records import SUMMARY_CONTINUATION, SUMMARY_REQUEST, Rollout, RolloutRequest
from prorl_gym.rollout.scheduling.model_source import ModelPolicySource
from prorl_gym.rollout.scheduling.runner import InProcessRunner
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.rollout.service import RolloutService
from prorl_gym.sandbox.protocol import SandboxBackend
from prorl_gym.settings import RolloutSettings
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger
from prorl_gym.trainers.gym_result import to_gym_result
from prorl_gym.trainers.sampled_turns import trained_message_indices
from prorl_gym.trainers.training_sequence import training_sequences

CODEC = load_codec("small")
ROW = next(iter(read_rows(Path(__file__).parents[2] / "environments/prorl_math/data/example.jsonl")))
PRIMES = "sum(n for n in range(2, 2000) if all(n % d for d in range(2, n)))"


def python(code: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': code}})}\n</tool_call>"


SCRIPT = [
    python("total = " + PRIMES),
    python("print('x ' * 400)\ntotal"),  # at its end the context passes the threshold
    python("total"),  # a tool in place of the summary
    "The sum is in the variable total.",
    python("total"),
    "The answer is \\boxed{277050}.",
]


async def roll_out(backend: SandboxBackend, **settings: Any) -> tuple[Rollout, FakeEngine]:
    def reply(_: GenerationRequest) -> Reply:
        text = SCRIPT[len(engine.requests) - 1]
        return Reply((*CODEC.tokenizer.encode_trusted(text), CODEC.terminator_id))

    engine = FakeEngine("e", reply)
    async with EnginePool("policy") as pool:
        pool.add_engine(engine)
        source = ModelPolicySource(pool, CODEC)
        service = RolloutService(MemoryLedger(), InProcessRunner(registry.get, source, backend))
        await service.start()
        limits = RolloutSettings(compact_tokens=400, **settings)
        request = RolloutRequest(rollout_id="r", environment="math", task=dict(ROW.task), settings=limits)
        await service.submit([request])
        rollout = await service.result("r", wait=60)
        await service.stop()
    assert rollout is not None
    return rollout, engine


@pytest.mark.parametrize(("policy", "main", "trained"), [("all", 0, (0, 1)), ("main", 0, (0,)), ("last", 1, (1,))])
async def test_a_compacted_rollout_is_graded_recorded_shown_and_replayed(backend, policy, main, trained):
    rollout, engine = await roll_out(backend, trained_segments=policy)
    assert (rollout.outcome.status, rollout.reward) == ("completed", 1.0)
    assert [(one.cause, one.parent, len(one.generations)) for one in rollout.segments] == [
        ("first", None, 4),
        ("summary", 0, 2),
    ]
    assert (rollout.main_segment, rollout.trained_segments) == (main, trained)
    lengths = [len(request.prompt_ids) for request in engine.requests]
    assert lengths[:4] == sorted(lengths[:4])
    assert lengths[4] < 500 < lengths[3]
    assert rollout.segments[1].shared_tokens >= lengths[0] - 10

    asked = [place for place, message in enumerate(rollout.messages) if message == SUMMARY_REQUEST]
    assert len(asked) == 2
    assert rollout.messages[asked[1] + 2] == SUMMARY_CONTINUATION
    spoken = [place for place, message in enumerate(rollout.messages) if message.role == "assistant"]
    assert trained_message_indices(rollout) == set(spoken)

    sequences = training_sequences(rollout)
    assert [any(one.loss_mask) for one in sequences] == [place in trained for place in (0, 1)]
    result = to_gym_result(rollout, {"responses_create_params": {"input": []}})
    carried = [item for item in result["response"]["output"] if "generation_token_ids" in item]
    own = rollout.segments[main]
    assert [item["generation_token_ids"] for item in carried] == [
        own.token_ids[call.start : call.end] for call in own.generations
    ]
    assert result["mask_sample"] is (policy == "all")
    assert "from segment 1 (summary)" in render_rollout(rollout, CODEC.decode)

    leases = SandboxLeases(backend)
    try:
        again = await replay(registry.get("math"), ROW.task, rollout, leases)
    finally:
        await leases.close()
    assert again.score == rollout.score
    assert [one for one in again.actions if one.recorded != one.replayed] == []
