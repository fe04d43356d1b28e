"""Rollouts with a model behind them: what engines do to a rollout, which it may name, and its bridge to the loop."""

import asyncio
import time

import pytest

from prorl_gym.api.config import ServiceConfig
from prorl_gym.environments.math.environment import MathEnvironment
from prorl_gym.errors import EngineError, FailureKind, TaskError
from prorl_gym.inference.balance.admission import AdmissionOptions
from prorl_gym.inference.balance.engine_pool import EnginePool, PoolOptions
from prorl_gym.inference.balance.health_monitor import FailoverOptions
from prorl_gym.inference.protocol import GenerationRequest
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.records import Message, Rollout, RolloutRequest
from prorl_gym.rollout.protocol import Finished, Job
from prorl_gym.rollout.scheduling.model_source import ModelPolicySource
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.settings import RolloutSettings, resolve_settings
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend

CODEC = load_codec("small")
CALL = '<tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call>'


def job(url: str | None = None, run_seconds: float = 0.3, rollout_id: str = "r") -> Job:
    request = RolloutRequest(
        rollout_id=rollout_id,
        environment="math",
        task={"question": "2+2?", "answer": "4"},
        settings=RolloutSettings(run_seconds=run_seconds),
        inference_url=url,
    )
    return Job(request=request, accepted_at=time.time())


def said(text: str) -> Reply:
    return Reply((*CODEC.tokenizer.encode_trusted(text), CODEC.terminator_id))


async def roll(engine: FakeEngine) -> Rollout:
    """Make one rollout on one engine."""
    async with EnginePool("policy", failover=FailoverOptions(recovery_seconds=0.5)) as pool:
        pool.add_engine(engine)
        runner = InProcessRunner(lambda name: MathEnvironment(), ModelPolicySource(pool, CODEC), EmptyBackend())
        await runner.accept(job())
        return await anext(e.rollout async for e in runner.events() if isinstance(e, Finished))


async def test_a_wait_for_a_dead_engine_is_no_truncation():
    """It is charged to no deadline; when patience is over, the attempt has failed with the engine."""

    def script(request: GenerationRequest) -> Reply | Exception:
        if len(engine.requests) == 1:
            return said(CALL)
        engine.down_error = EngineError(FailureKind.ENGINE_UNREACHABLE, "engine e: cannot connect.")
        return engine.down_error

    engine = FakeEngine("e", script)
    rollout = await roll(engine)
    assert (rollout.outcome.status, rollout.outcome.kind) == ("failed", FailureKind.ENGINE_UNREACHABLE)
    assert rollout.score is None
    assert rollout.sampled_tokens == len(said(CALL).token_ids)


async def test_slow_sampling_is_a_truncation_even_after_a_moment_of_overload():
    def script(request: GenerationRequest) -> Reply | Exception:
        if len(engine.requests) == 1:
            return EngineError(FailureKind.ENGINE_OVERLOADED, "engine e: overloaded.")
        return Reply((10, 11), hold=asyncio.Event())

    engine = FakeEngine("e", script)
    rollout = await roll(engine)
    assert rollout.outcome.status == "truncated"
    assert rollout.score is not None


async def test_a_rollout_pays_for_no_wait_for_admission():
    """With room for one rollout, the second waits far longer than its deadline, and is not truncated."""
    hold = asyncio.Event()

    def script(request: GenerationRequest) -> Reply:
        return Reply(said("4").token_ids, hold=hold) if request.session_id == "first" else said("4")

    engine = FakeEngine("e", script)
    options = PoolOptions(admission=AdmissionOptions(max_live_rollouts=1))
    async with EnginePool("policy", options=options) as pool:
        pool.add_engine(engine)
        runner = InProcessRunner(lambda name: MathEnvironment(), ModelPolicySource(pool, CODEC), EmptyBackend())
        await runner.accept(job(run_seconds=30.0, rollout_id="first"))
        await engine.call_held.wait()
        await runner.accept(job(run_seconds=1.0, rollout_id="second"))
        await asyncio.sleep(1.3)
        assert pool.snapshot().admission.waiting == 1
        hold.set()
        events = runner.events()
        ends = [await anext(e.rollout async for e in events if isinstance(e, Finished)) for _ in range(2)]
        assert pool.snapshot().admission.live == 0
    second = next(rollout for rollout in ends if rollout.rollout_id == "second")
    assert second.outcome.status == "completed"
    assert second.stages["run"].queued >= 1.2
    assert second.stages["run"].seconds < 1.0


async def test_no_more_agents_begin_than_engines_have_room_for():
    """With a hundred slots of RUN and room for two rollouts, all others stay outside, but one that waits."""
    most = 0

    def script(request: GenerationRequest) -> Reply:
        nonlocal most
        most = max(most, runner.pools.by_name["run"].busy)
        return said(CALL) if len(request.prompt_ids) < 300 else said("4")

    config = RunnerConfig(queue=40, init=1, run=100)
    async with EnginePool("policy", options=PoolOptions(admission=AdmissionOptions(max_live_rollouts=2))) as pool:
        pool.add_engine(FakeEngine("e", script))
        source = ModelPolicySource(pool, CODEC)
        runner = InProcessRunner(lambda name: MathEnvironment(), source, EmptyBackend(), config)
        for number in range(30):
            await runner.accept(job(run_seconds=30.0, rollout_id=f"r{number}"))
        async with asyncio.timeout(20):
            await runner.drain()
        ends = [event.rollout async for event in runner.events() if isinstance(event, Finished)]
    assert {rollout.outcome.status for rollout in ends} == {"completed"}
    assert len(ends) == 30
    assert 2 <= most <= 4


async def test_a_parked_agent_leaves_its_place_on_the_engines_to_others():
    """With room for one rollout, the second is made while the first is parked, which then goes on from its tokens."""
    hold = asyncio.Event()

    def script(request: GenerationRequest) -> Reply:
        if len(engine.requests) == 1:
            return Reply(said(CALL).token_ids, hold=hold)
        return said("4")

    engine = FakeEngine("e", script)
    async with EnginePool("policy", options=PoolOptions(admission=AdmissionOptions(max_live_rollouts=1))) as pool:
        pool.add_engine(engine)
        config = RunnerConfig(run=1)
        runner = InProcessRunner(lambda name: MathEnvironment(), ModelPolicySource(pool, CODEC), EmptyBackend(), config)
        await runner.accept(job(run_seconds=30.0, rollout_id="first"))
        await engine.call_held.wait()
        await runner.park(["first"])
        await runner.accept(job(run_seconds=30.0, rollout_id="second"))
        hold.set()
        ends = (event.rollout async for event in runner.events() if isinstance(event, Finished))
        assert (await anext(ends)).rollout_id == "second"
        assert (await runner.capacity()).parked == 1
        await runner.unpark(["first"])
        first = await anext(ends)
        assert pool.snapshot().admission.live == 0
    assert (first.rollout_id, first.outcome.status, first.turns) == ("first", "completed", 2)
    assert len(first.segments) == 1


async def test_stream_groups_two_runs_share_no_prompt():
    engine = FakeEngine("e", lambda request: said("4"))
    async with EnginePool("policy") as pool:
        pool.add_engine(engine)
        source = ModelPolicySource(pool, CODEC)
        for run, group in (("a", "g"), ("a", "g"), ("b", "g"), ("b", None)):
            one = job(rollout_id=f"{run}{group}")
            request = one.request.model_copy(update={"run_id": run, "group_id": group})
            session = source.open_session(one.model_copy(update={"request": request}), resolve_settings())
            await session.policy.start_conversation([Message(role="user", content="2+2?")], [])
            await session.close()
    first, sibling, other, alone = (request.group_id for request in engine.requests)
    assert first == sibling != other
    assert alone == ""


@pytest.mark.parametrize("spelling", ["http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/"])
def test_engine_on_the_allow_list_may_be_named_in_any_spelling(spelling: str):
    config = ServiceConfig.model_validate(
        {
            "inference": {"engines": ["http://h:1"], "model": "m", "tokenizer": "small"},
            "inference_urls": ["http://h:8000"],
        }
    )
    named = EnginePool("named")
    source = ModelPolicySource(EnginePool("policy"), CODEC, dict.fromkeys(config.inference_urls, named))
    source.open_session(job(spelling), resolve_settings())
    for other in ("http://h:8001", "h:8000", "http://user:pass@h:8000", ""):
        with pytest.raises(TaskError, match="allow-list"):
            source.open_session(job(other), resolve_settings())


@pytest.mark.parametrize("secret", ["user:pass", "user:p@ss", "user:pa/ss", "user:pass" * 50])
def test_refused_address_is_shown_without_its_password(secret: str):
    source = ModelPolicySource(EnginePool("policy"), CODEC)
    with pytest.raises(TaskError, match="'h:8000/v1' is not on the service's allow-list") as caught:
        source.open_session(job(f"http://{secret}@h:8000/v1"), resolve_settings())
    assert secret not in str(caught.value)
    assert "pass" not in str(caught.value)
