"""A service on fakes behind its real routes on a loopback socket, in a thread: commands run without an event loop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

from quick_server import listening

from prorl_gym.api.app import create_app
from prorl_gym.api.app_context import AppContext
from prorl_gym.api.config import AllowedUrls
from prorl_gym.api.policy_control import EngineRegistry
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.weights.weight_updater import WeightUpdater
from prorl_gym.rollout.protocol import Ledger
from prorl_gym.rollout.scheduling.attempt_settler import RetryConfig
from prorl_gym.rollout.scheduling.runner import InProcessRunner
from prorl_gym.rollout.service import RolloutService
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply
from prorl_gym.testing.rollout.fake_rollout import (
    EmptyBackend,
    FakePolicySource,
    ScriptedEnvironment,
    environment_lookup,
)
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger

TOKEN = "test-token-of-no-worth"
ENGINES = {f"policy-{index}": f"http://10.0.0.{index}:8000/v1" for index in range(2)}


def _engine(name: str, url: str) -> FakeEngine:
    return FakeEngine(name, lambda _: Reply((2,)))


@asynccontextmanager
async def served(ledger: Ledger | None = None) -> AsyncIterator[str]:
    """Serve on the running loop; give the address."""
    runner = InProcessRunner(environment_lookup(ScriptedEnvironment()), FakePolicySource(), EmptyBackend())
    service = RolloutService(ledger or MemoryLedger(), runner, RetryConfig(attempts=1, pause_seconds=0.001))
    await service.start()
    async with AsyncExitStack() as owned:
        pool = await owned.enter_async_context(EnginePool("policy"))
        for name, url in ENGINES.items():
            pool.add_engine(_engine(name, url))
        updater = WeightUpdater(pool, 1000)
        owned.push_async_callback(updater.close)
        fleet = EngineRegistry(pool, ENGINES, _engine, AllowedUrls(list(ENGINES.values()), ["http://10.0.0.*:8000/v1"]))
        context = AppContext.create(
            service,
            pools=[pool],
            weight_updaters={"policy": updater},
            registries={"policy": fleet},
            decode=_decode,
        )
        try:
            async with listening(create_app(context, TOKEN)) as address:
                try:
                    yield address
                finally:
                    service.begin_shutdown()
        finally:
            await service.stop(drain=False)


def _decode(ids: Any) -> str:
    return " ".join(map(str, ids))


@contextmanager
def in_a_thread(ledger: Ledger | None = None) -> Iterator[str]:
    """Serve beside the test; give the address."""
    with entered_in_a_thread(served(ledger)) as address:
        yield address


@contextmanager
def entered_in_a_thread(context: AbstractAsyncContextManager[str]) -> Iterator[str]:
    """Enter a context on an event loop of another thread, for a test that has none; give what it gives."""
    entered, end = Future[str](), threading.Event()

    async def hold() -> None:
        try:
            async with context as address:
                entered.set_result(address)
                await asyncio.to_thread(end.wait)
        except BaseException as error:  # a skip among them
            if entered.done():
                raise
            entered.set_exception(error)

    with ThreadPoolExecutor(1, "loopback-service") as thread:
        held = thread.submit(asyncio.run, hold())
        try:
            yield entered.result(20)
        finally:
            end.set()
        held.result(20)
