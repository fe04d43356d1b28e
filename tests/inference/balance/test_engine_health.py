"""An engine that failed comes back when it samples, not when it says that it is well; and not to all calls at once."""

import asyncio
from typing import Any

import pytest
from engine_cases import CASES
from fake_vllm import FakeVllm
from hypothesis import example, given
from hypothesis import strategies as st
from token_codecs import BOUNDED
from virtual_time import virtually

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.balance.health_monitor import FailoverOptions
from prorl_gym.inference.engines.vllm import VllmEngine, VllmOptions
from prorl_gym.inference.protocol import EngineHealth, GenerationRequest, GenerationResult
from prorl_gym.testing.inference.engine_conformance import request
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply

SLOWEST = 8.0
FAILOVER = FailoverOptions(
    max_attempts=2, recovery_seconds=1e6, first_probe_seconds=0.25, max_probe_seconds=SLOWEST, trial_seconds=2.0
)


def fine(_: GenerationRequest) -> Reply:
    return Reply((10, 2))


class Clocked(FakeEngine):
    """Notes when it is tried, in seconds of the loop's clock."""

    def __init__(self, name: str) -> None:
        super().__init__(name, fine)
        self.trials: list[float] = []

    async def sample_trial(self, seconds: float) -> float:
        self.trials.append(asyncio.get_running_loop().time())
        return await super().sample_trial(seconds)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        if self.is_hanging:  # what a timeout of the transport makes of it
            await asyncio.sleep(5.0)
            raise EngineError(FailureKind.ENGINE_TIMEOUT, "engine e: no answer within 5 s.")
        return await super().generate(request)


def pool_of(*engines: FakeEngine) -> EnginePool:
    pool = EnginePool("policy", failover=FAILOVER)
    for engine in engines:
        pool.add_engine(engine)
    return pool


@virtually
async def test_a_hung_engine_whose_health_answers_stays_out() -> None:
    hung, well = Clocked("hung"), Clocked("well")
    hung.is_hanging = True
    async with pool_of(hung, well) as pool:
        for number in range(40):
            assert (await pool.generate(request(session_id=f"s{number}"))).engine == "well"
        await asyncio.sleep(100)
        assert (await hung.health()).ok
        assert pool.healthy == ["well"]
        for number in range(40):
            await pool.generate(request(session_id=f"t{number}"))
        (state, _) = pool.snapshot().engines
        assert state.failures == 1
        assert state.unhealthy_reason == "engine hung: sampled nothing for 2 s."
        assert state.unhealthy_since is not None


@virtually
async def test_trials_come_ever_less_often_and_end_when_it_samples() -> None:
    engine = Clocked("e")
    engine.is_hanging = True
    async with pool_of(engine) as pool:
        call = asyncio.create_task(pool.generate(request()))
        await asyncio.sleep(60)
        gaps = [later - sooner for sooner, later in zip(engine.trials, engine.trials[1:], strict=False)]
        assert gaps == [0.5 + 2, 1 + 2, 2 + 2, 4 + 2, 8 + 2, 8 + 2, 8 + 2]
        engine.is_hanging = False
        assert (await call).token_ids == [10, 2]
        assert pool.healthy == ["e"]


@virtually
async def test_its_calls_come_back_one_by_one() -> None:
    """One that samples when it is tried and hangs under calls costs one call, not all that wait."""
    weak, well = Clocked("weak"), Clocked("well")
    weak.is_hanging = True
    async with pool_of(weak, well) as pool:
        await asyncio.gather(*(pool.generate(request(session_id=f"s{n}")) for n in range(8)))
        weak.is_hanging = False
        await pool.members.changes.wait_for(lambda: len(pool.healthy) == 2)
        weak.is_hanging = True
        failures = pool.snapshot().engines[0].failures
        await asyncio.gather(*(pool.generate(request(session_id=f"t{n}")) for n in range(32)))
        assert pool.snapshot().engines[0].failures == failures + 1


@virtually
async def test_the_only_engine_is_not_held_back() -> None:
    engine = Clocked("e")
    async with pool_of(engine) as pool:
        engine.is_hanging = True
        call = asyncio.create_task(pool.generate(request()))
        await pool.members.changes.wait_for(lambda: not pool.healthy)
        engine.is_hanging = False
        await call
        await asyncio.gather(*(pool.generate(request(session_id=f"t{n}")) for n in range(32)))


AT_ONCE = (FailureKind.ENGINE_UNREACHABLE, FailureKind.ENGINE_OVERLOADED, FailureKind.ENGINE_CONTRACT)


@BOUNDED
@given(st.lists(st.tuples(st.sampled_from(["hang", "answer", *AT_ONCE]), st.integers(1, 40)), min_size=1, max_size=12))
@example([*[("hang", 1)] * 7, ("answer", 112), ("hang", 1)])
@virtually
async def test_the_back_off_follows_its_model(moves: list[tuple[str | FailureKind, int]]) -> None:
    """The rest after the n-th failure that is not forgiven is ``first * 2 ** n``, bounded; 16 answers forgive one.

    One that fails calls at once after it has answered some costs little, which does not count: one engine may be all
    there is.
    """
    engine, loop = Clocked("e"), asyncio.get_running_loop()
    relapses = answered = 0
    async with pool_of(engine) as pool:
        for move, count in moves:
            if move == "answer":
                for _ in range(count):
                    await pool.generate(request())
                    answered += 1
                    relapses -= relapses > 0 and answered % 16 == 0
                continue
            engine.is_hanging = move == "hang"
            engine.down_error = EngineError(move, "e fails") if move in AT_ONCE else None
            call = asyncio.create_task(pool.generate(request()))
            await pool.members.changes.wait_for(lambda: not pool.healthy)
            out, engine.is_hanging, engine.down_error = loop.time(), False, None
            await call
            assert loop.time() - out == min(0.25 * 2**relapses, SLOWEST)
            relapses += move == "hang" or not answered
            answered = 1  # the call itself was answered in the end
        assert pool.healthy == ["e"]


of_every_server = pytest.mark.parametrize("name", [name for name in CASES if name != "fake"])


@of_every_server
async def test_a_trial_samples(name: str) -> None:
    async with CASES[name]() as case:
        case.set_reply([10, 2])
        assert await case.engine.sample_trial(5.0) >= 0.0
        body: dict[str, Any] = case.server.bodies[-1]
        most = body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
        assert most <= 16


@of_every_server
async def test_a_trial_of_an_engine_that_hangs_fails(name: str) -> None:
    async with CASES[name]() as case:
        case.hold_calls()
        assert (await case.engine.health()).ok
        with pytest.raises(EngineError) as caught:
            await case.engine.sample_trial(0.2)
        assert caught.value.kind is FailureKind.ENGINE_TIMEOUT


async def test_a_trial_samples_as_calls_do() -> None:
    """Some servers refuse other settings than those of the training."""
    async with FakeVllm(ids=[10, 2]) as server:
        engine = VllmEngine("e", server.url, VllmOptions(model="m", vocab_size=100))
        await engine.generate(request(temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=(2, 3)))
        await engine.sample_trial(5.0)
        await engine.close()
    call, trial = server.bodies
    keys = ("temperature", "top_p", "top_k", "stop_token_ids")
    assert [call[key] for key in keys] == [trial[key] for key in keys]


class Unlisted(FakeEngine):
    """Its list lacks the model, which it may serve all the same."""

    async def health(self) -> EngineHealth:
        return EngineHealth(ok=True, unlisted_model="engine e: does not list model 'm' but other.")


async def test_a_list_that_lacks_the_model_is_only_a_hint() -> None:
    async with pool_of(Unlisted("e", fine)) as pool:
        assert (await pool.check_health())["e"].ok
        assert (await pool.generate(request())).token_ids == [10, 2]
        assert pool.unavailable_reason == ""


async def test_calls_wait_for_an_engine_that_has_the_model(caplog: pytest.LogCaptureFixture) -> None:
    """However many they are, and for longer than patience with engines that fail."""
    models = {"data": [{"id": "other", "max_model_len": 64}]}
    failover = FailoverOptions(recovery_seconds=0.05, first_probe_seconds=0.01, max_probe_seconds=0.02)
    async with FakeVllm(models=models, mode=404, ids=[10, 2]) as server:
        server.error = "The model `m` does not exist."
        pool = EnginePool("policy", failover=failover)
        pool.add_engine(VllmEngine("e", server.url, VllmOptions(model="m", vocab_size=100)))
        calls = [asyncio.create_task(pool.generate(request(session_id=f"s{n}"))) for n in range(20)]
        await pool.members.changes.wait_for(lambda: bool(pool.unavailable_reason))
        beginning = asyncio.create_task(pool.wait_for_room("later"))
        await asyncio.sleep(0.5)
        assert not any(call.done() for call in (*calls, beginning))
        seen = pool.snapshot()
        assert seen.waiting_rollouts == 21
        assert seen.unavailable_reason.startswith("no engine of pool policy has the model: engine http://127.0.0.1")
        assert "does not list model 'm' but other." in seen.unavailable_reason
        assert len([line for line in caplog.messages if "rollouts wait" in line]) == 1
        server.models, server.mode = None, "ok"
        async with asyncio.timeout(10):
            assert [(await call).token_ids for call in calls] == [[10, 2]] * 20
            await beginning
        assert (pool.snapshot().waiting_rollouts, pool.snapshot().unavailable_reason) == (0, "")
        await pool.close()


async def test_another_engine_that_has_the_model_serves_at_once() -> None:
    async with FakeVllm(mode=404) as without:
        without.error = "The model `m` does not exist."
        pool = EnginePool("policy", failover=FailoverOptions(max_attempts=1, first_probe_seconds=10.0))
        pool.add_engine(VllmEngine("e", without.url, VllmOptions(model="m", vocab_size=100)))
        pool.add_engine(FakeEngine("with", fine))
        assert (await pool.generate(request())).engine == "with"
        assert pool.unavailable_reason == ""
        await pool.close()


@virtually
async def test_without_any_engine_calls_wait_for_one() -> None:
    async with EnginePool("policy", failover=FailoverOptions(recovery_seconds=0.01)) as pool:
        call = asyncio.create_task(pool.generate(request()))
        await asyncio.sleep(3600)
        assert pool.unavailable_reason == "no engine of pool policy has the model: it has no engines."
        pool.add_engine(FakeEngine("e", fine))
        assert (await call).token_ids == [10, 2]
