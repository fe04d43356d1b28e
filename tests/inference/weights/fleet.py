"""Engines whose tokens show which weights sampled them, and a pool with a updater over some of them."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Self

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.balance.engine_pool import EnginePool, PoolOptions
from prorl_gym.inference.balance.health_monitor import FailoverOptions
from prorl_gym.inference.balance.members import PoolMember
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult
from prorl_gym.inference.weights.weight_updater import UpdateResult, WeightUpdateOptions, WeightUpdater
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply

_BASE = 1000


class Weighted(FakeEngine):
    """Samples a token per turn of the event loop, with whatever weights it then has."""

    def __init__(self, name: str, *, reports_versions: bool = False) -> None:
        super().__init__(name, lambda _: Reply(()))
        self.reports_versions = reports_versions
        self.weights = 0
        """What is really loaded; ``version`` is only what the pool says."""
        self.frozen = asyncio.Event()
        self.frozen.set()
        self.deaf = False
        self.misses = 0
        """Words to stop that are lost."""
        self.held_for = 0
        """Resets that fail before one works."""
        self.mute = False
        self._stopped: dict[str, bool] = {}

    @staticmethod
    def weights_of(token: int) -> int:
        return token // _BASE

    @property
    def busy(self) -> int:
        return len(self._stopped)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.requests.append(replace(request, prompt_ids=tuple(request.prompt_ids)))
        version, ids = self.version, list[int]()
        self._stopped[request.request_id] = False
        try:
            while len(ids) < request.max_tokens and not self._stopped[request.request_id]:
                if self.down_error is not None:
                    raise self.down_error
                ids.append(self.weights * _BASE + (sum(request.prompt_ids) + 31 * len(ids)) % _BASE)
                await asyncio.sleep(0)
                await self.frozen.wait()
        finally:
            stopped = self._stopped.pop(request.request_id)
        return GenerationResult(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            finish_reason="abort" if stopped and len(ids) < request.max_tokens else "length",
            logprob_kind="raw",
            engine=self.name,
            versions=[self.weights_of(token) for token in ids] if self.reports_versions else [version] * len(ids),
            seconds=0.0,
            versions_reported=self.reports_versions,
        )

    async def cancel(self, request_id: str) -> None:
        """Stop after the token at hand."""
        if self.misses:
            self.misses -= 1
        elif request_id in self._stopped and not self.deaf:
            self._stopped[request_id] = True

    async def probe_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        if self.down_error is not None:
            raise self.down_error
        if self.mute:
            raise EngineError(FailureKind.ENGINE_REFUSED, f"engine {self.name}: has no log-probs of prompts.")
        noise = len(self.name) * 1e-4
        return [-1.0 - ((self.weights * 7 + token) % 13) / 10 - noise for token in token_ids[1:]]

    async def reset_prefix_cache(self) -> bool:
        if self.held_for:
            self.held_for -= 1
            return False
        return await super().reset_prefix_cache()


class Fleet:
    def __init__(
        self,
        count: int,
        *,
        reports_versions: bool = False,
        salted: bool = False,
        options: WeightUpdateOptions | None = None,
    ) -> None:
        self.engines = [Weighted(f"engine-{n}", reports_versions=reports_versions) for n in range(count)]
        self.pool = EnginePool(
            "policy",
            failover=FailoverOptions(recovery_seconds=0.5, first_probe_seconds=0.001, max_probe_seconds=0.01),
            options=PoolOptions(salt_cache=salted),
        )
        for engine in self.engines:
            self.pool.add_engine(engine)
        self.updater = WeightUpdater(
            self.pool, 500, options or WeightUpdateOptions(first_retry_seconds=0.001, max_retry_seconds=0.01)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.updater.close()
        await self.pool.close()

    def load(self, weights: int, only: Iterable[int] | None = None) -> None:
        for n in range(len(self.engines)) if only is None else only:
            self.engines[n].weights = weights

    async def pause_and_load(self, weights: int, only: Iterable[int] | None = None) -> None:
        await self.updater.pause()
        self.load(weights, only)

    async def update(self, version: int) -> UpdateResult:
        await self.pause_and_load(version)
        try:
            return await self.updater.update(version)
        finally:
            await self.updater.resume()

    def state(self, name: str) -> PoolMember:
        return next(one for one in self.pool.snapshot().engines if one.name == name)

    async def serving(self, count: int) -> None:
        await self.until(lambda: len(self.pool.healthy) == count)

    async def until(self, fact: Callable[[], bool]) -> None:
        """Wait for something that the background does, with an end for the case that it does not."""
        async with asyncio.timeout(10):
            while not fact():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
