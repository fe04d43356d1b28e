"""A deadline that an engine's hang reaches is no measurement; one that the policy reaches by itself is."""

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from aiohttp import web
from fake_vllm import FakeVllm, completion

from prorl_gym.environments.math.environment import MathEnvironment
from prorl_gym.errors import FailureKind
from prorl_gym.inference.balance import BalancePolicyName, make_balance_policy
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.balance.health_monitor import FailoverOptions
from prorl_gym.inference.engines.vllm import VllmEngine, VllmOptions
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.scheduling.attempt_settler import RetryConfig
from prorl_gym.rollout.scheduling.model_source import ModelPolicySource
from prorl_gym.rollout.scheduling.runner import InProcessRunner
from prorl_gym.rollout.service import RolloutService
from prorl_gym.settings import RolloutSettings
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger

pytestmark = pytest.mark.slow

CODEC = load_codec("small")
FAILOVER = FailoverOptions(recovery_seconds=20.0, first_probe_seconds=0.01, max_probe_seconds=0.05, trial_seconds=0.5)


Hang = Literal["", "silent", "drips", "half"]


@dataclass
class HangingVllm(FakeVllm):
    """Answers with ``ids``, and from some call on with nothing that is of use; its other routes answer all the time."""

    hang: Hang = ""
    healthy_calls: int = 0
    """Calls that it answers before it hangs."""
    lost: int = 0
    """Calls after these that get no answer, though the engine samples."""
    can_abort: bool = False
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        await super().__aexit__()

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        number = len(self.bodies)
        if self.hang and number >= self.healthy_calls:
            return await self._hang(request, await self.remember(request))
        if self.healthy_calls <= number < self.healthy_calls + self.lost:
            await self.remember(request)
            await self._over.wait()
        return await super()._completions(request)

    async def _hang(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse()
        if self.hang != "silent":
            await response.prepare(request)
        if self.hang == "half":
            await response.write(web.json_response(completion(body, self.ids, "r")).body[:40])  # type: ignore[index]
        while self.hang == "drips" and not self._over.is_set():
            await response.write(b" ")
            await asyncio.wait([asyncio.ensure_future(self._over.wait())], timeout=0.05)
        await self._over.wait()
        return response


@dataclass
class SlowVllm(FakeVllm):
    """Samples a token of every call in each ``step`` seconds, and never ends a turn by itself."""

    step: float = 0.01
    quick_calls: int = 0
    """Calls that it answers with ``ids`` at its pace, before the policy babbles."""
    counts: bool = True
    """Its metrics page tells how much it sampled."""
    stalls_trials: bool = False
    """A trial waits behind what is being sampled."""
    sampled: int = 0

    def routes(self, app: web.Application) -> None:
        super().routes(app)
        self._served = 0

    async def _completions(self, request: web.Request) -> web.Response:
        body = await self.remember(request)
        is_trial = body["max_tokens"] <= 16
        self._served += not is_trial
        wanted = body["max_tokens"] if is_trial or self._served > self.quick_calls else len(self.ids)
        stop = self._stops[f"cmpl-{request.headers['X-Request-Id']}-0"] = asyncio.Event()
        if is_trial and self.stalls_trials:
            await stop.wait()
        count = 0
        while count < wanted and not stop.is_set():
            await asyncio.sleep(self.step)
            count += 1
            self.sampled += 1
        ids = self.ids if wanted == len(self.ids) else [10] * count
        answer = completion(body, ids, "r")
        if stop.is_set():
            answer["choices"][0]["finish_reason"] = "abort"
        return web.json_response(answer)

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self.counts:
            return web.Response(status=404)
        return web.Response(text=f"vllm:num_requests_running 1\nvllm:generation_tokens_total {self.sampled}\n")


class Deaf:
    """A process that was stopped: connections are made by the kernel, and nothing is ever read."""

    def __enter__(self) -> str:
        self._listener = socket.create_server(("127.0.0.1", 0))
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"

    def __exit__(self, *_: object) -> None:
        self._listener.close()


def text(words: str) -> list[int]:
    return [*CODEC.tokenizer.encode_trusted(words), CODEC.terminator_id]


ANSWER = text("\\boxed{4}")
CALL = text('<tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call>')


def asked(rollout_id: str = "r", run_seconds: float = 0.6, max_turn_tokens: int | None = None) -> RolloutRequest:
    return RolloutRequest(
        rollout_id=rollout_id,
        environment="math",
        task={"question": "2+2?", "answer": "4"},
        settings=RolloutSettings(run_seconds=run_seconds, max_turn_tokens=max_turn_tokens),
    )


@asynccontextmanager
async def pool_of(urls: Sequence[str], policy: BalancePolicyName = "cost") -> AsyncGenerator[EnginePool]:
    options = VllmOptions(model="m", vocab_size=CODEC.vocab_size)
    async with EnginePool("policy", balance_policy=make_balance_policy(policy), failover=FAILOVER) as pool:
        for number, url in enumerate(urls):
            pool.add_engine(VllmEngine(f"e{number}", url, options))
        yield pool


@asynccontextmanager
async def service_on(pool: EnginePool, attempts: int = 1) -> AsyncGenerator[RolloutService]:
    runner = InProcessRunner(lambda name: MathEnvironment(), ModelPolicySource(pool, CODEC), EmptyBackend())
    service = RolloutService(MemoryLedger(), runner, RetryConfig(attempts=attempts, pause_seconds=0.001))
    await service.start()
    try:
        yield service
    finally:
        await service.stop(drain=False)


async def result(service: RolloutService, rollout_id: str = "r") -> Rollout:
    rollout = await service.result(rollout_id, wait=60.0)
    assert rollout is not None
    return rollout


async def roll(*urls: str, attempts: int = 1) -> Rollout:
    """Make one rollout."""
    async with pool_of(urls) as pool, service_on(pool, attempts) as service:
        await service.submit([asked()])
        return await result(service)


def is_blamed_on_the_engine(rollout: Rollout) -> bool:
    return rollout.outcome.kind is FailureKind.ENGINE_TIMEOUT and rollout.score is None


@pytest.mark.parametrize("hang", ["silent", "drips", "half"])
async def test_an_engine_that_hangs_gives_no_reward(hang: Hang) -> None:
    async with HangingVllm(hang=hang) as server:
        assert is_blamed_on_the_engine(await roll(server.url))


async def test_a_stopped_process_gives_no_reward() -> None:
    with Deaf() as url:
        assert is_blamed_on_the_engine(await roll(url))


@pytest.mark.default
async def test_a_hang_in_the_middle_of_a_rollout_gives_no_reward_and_keeps_its_tokens() -> None:
    async with HangingVllm(ids=CALL, hang="silent", healthy_calls=1) as server:
        rollout = await roll(server.url)
    assert is_blamed_on_the_engine(rollout)
    assert rollout.sampled_tokens == len(CALL)
    assert rollout.outcome.message is not None
    assert "engine e0: a call had no answer after 0." in rollout.outcome.message


@pytest.mark.parametrize("policy", [pytest.param("cost", marks=pytest.mark.slow), "min_heap"])
async def test_with_two_engines_all_rollouts_end_well_and_the_hung_one_is_left_alone(policy: BalancePolicyName) -> None:
    async with HangingVllm(hang="silent") as hung, HangingVllm(ids=ANSWER) as well:
        async with pool_of([hung.url, well.url], policy) as pool, service_on(pool, attempts=3) as service:
            await service.submit([asked(f"r{number}", run_seconds=1.5) for number in range(6)])
            ends = [await result(service, f"r{number}") for number in range(6)]
            seen = len([body for body in hung.bodies if body["max_tokens"] > 16])
            await service.submit([asked(f"again{number}", run_seconds=1.5) for number in range(6)])
            ends += [await result(service, f"again{number}") for number in range(6)]
            assert pool.healthy == ["e1"]
        assert seen == len([body for body in hung.bodies if body["max_tokens"] > 16])
    assert {(rollout.outcome.status, rollout.reward) for rollout in ends} == {("completed", 1.0)}


async def test_a_call_that_a_well_engine_has_lost_gives_no_reward() -> None:
    async with HangingVllm(ids=CALL, healthy_calls=3, lost=1) as server:
        async with pool_of([server.url]) as pool, service_on(pool) as service:
            await service.submit([asked(run_seconds=3.0, max_turn_tokens=32)])
            rollout = await result(service)
            assert pool.healthy == ["e0"]
    assert is_blamed_on_the_engine(rollout)
    assert rollout.sampled_tokens == 3 * len(CALL)


@pytest.mark.default
async def test_what_a_slow_policy_did_is_measured() -> None:
    """Its tokens are handed out when the deadline stops the call."""
    async with SlowVllm() as server:
        rollout = await roll(server.url)
    assert (rollout.outcome.status, rollout.outcome.limit) == ("truncated", "time")
    assert rollout.reward == 0.0
    assert rollout.sampled_tokens > 5


@pytest.mark.parametrize(("counts", "stalls"), [(False, False), (True, True)], ids=["by a trial", "by its counters"])
async def test_what_a_slow_policy_did_is_measured_where_no_tokens_are_handed_out(counts: bool, stalls: bool) -> None:
    server = SlowVllm(ids=CALL, quick_calls=1, can_abort=False, counts=counts, stalls_trials=stalls)
    async with server, pool_of([server.url]) as pool, service_on(pool) as service:
        await service.submit([asked(run_seconds=len(CALL) * 0.01 + 1.0)])
        babbling = asyncio.create_task(keep_busy(server))
        rollout = await result(service)
        babbling.cancel()
        assert pool.healthy == ["e0"]
    assert (rollout.outcome.status, rollout.outcome.limit) == ("truncated", "time")
    assert rollout.reward == 0.0


async def test_a_turn_that_outlasts_the_time_of_a_call_measures_nothing() -> None:
    """At the engine's pace it cannot have ended: another engine would need as long, and this one is well."""
    server = SlowVllm(ids=CALL, quick_calls=1, can_abort=False)
    seconds = 2 * len(CALL) * server.step + 1.0
    async with server, pool_of([]) as pool, service_on(pool) as service:
        options = VllmOptions(model="m", vocab_size=CODEC.vocab_size, request_seconds=seconds)
        pool.add_engine(VllmEngine("e0", server.url, options))
        await service.submit([asked(run_seconds=60.0)])
        rollout = await result(service)
        assert (pool.healthy, pool.failovers) == (["e0"], 0)
    assert is_blamed_on_the_engine(rollout)
    assert "At its pace" in (rollout.outcome.message or "")


async def keep_busy(server: SlowVllm) -> None:
    """What other calls of the engine do to its counters."""
    while True:
        await asyncio.sleep(server.step)
        server.sampled += 1


async def test_a_run_without_a_token_measures_nothing() -> None:
    async with SlowVllm(can_abort=False) as server:
        rollout = await roll(server.url)
    assert is_blamed_on_the_engine(rollout)
    assert rollout.outcome.message is not None
    assert "no token was sampled in all the time of RUN" in rollout.outcome.message


async def test_engines_that_are_removed_while_their_calls_hang_and_come_back() -> None:
    """All are deregistered: the rollout waits, at no cost to its deadline, until there is one again."""
    async with HangingVllm(hang="silent") as hung, HangingVllm(ids=ANSWER) as well:
        async with pool_of([hung.url]) as pool, service_on(pool) as service:
            await service.submit([asked(run_seconds=1.2)])
            async with asyncio.timeout(10):
                while not hung.bodies:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await pool.remove_engine("e0")
            began = time.monotonic()
            assert await service.result("r", wait=1.5) is None
            assert pool.snapshot().waiting_rollouts == 1
            pool.add_engine(VllmEngine("new", well.url, VllmOptions(model="m", vocab_size=CODEC.vocab_size)))
            rollout = await result(service)
            assert time.monotonic() - began < 20
    assert (rollout.outcome.status, rollout.reward) == ("completed", 1.0)
