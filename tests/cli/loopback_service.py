"""The service of ``api_stack`` with engines, also in a thread: commands run without an event loop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

from api_stack import TOKEN, serving

from prorl_gym.api.config import AllowedUrls
from prorl_gym.api.policy_control import EngineRegistry
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.weights.weight_updater import WeightUpdater
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.scheduling.attempt_settler import RetryConfig
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply

__all__ = ["TOKEN", "entered_in_a_thread", "in_a_thread", "served"]

ONE_ATTEMPT = RetryConfig(attempts=1, pause_seconds=0.001)
ENGINES = {f"policy-{index}": f"http://10.0.0.{index}:8000/v1" for index in range(2)}


def _engine(name: str, url: str) -> FakeEngine:
    return FakeEngine(name, lambda _: Reply((2,)))


@asynccontextmanager
async def served(ledger: SqliteLedger | None = None) -> AsyncIterator[str]:
    """Serve on the running loop; give the address."""
    async with EnginePool("policy") as pool:
        for name, url in ENGINES.items():
            pool.add_engine(_engine(name, url))
        updater = WeightUpdater(pool, 1000)
        fleet = EngineRegistry(pool, ENGINES, _engine, AllowedUrls(list(ENGINES.values()), ["http://10.0.0.*:8000/v1"]))
        options: dict[str, Any] = {"weight_updaters": {"policy": updater}, "registries": {"policy": fleet}}
        try:
            async with serving(ledger, ONE_ATTEMPT, pools=[pool], decode=_decode, **options) as one:
                yield one.url
        finally:
            await updater.close()


def _decode(ids: Any) -> str:
    return " ".join(map(str, ids))


@contextmanager
def in_a_thread(ledger: SqliteLedger | None = None) -> Iterator[str]:
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
