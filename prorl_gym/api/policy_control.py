"""A trainer's control of each pool over HTTP: pauses, policy versions and engines.

An update is identified by its body: the same body again, after a lost answer, joins the running update or repeats its
result. Another body for the version that is served is refused, as it is for a rollout's id.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal

from prorl_gym.api.config import AllowedUrls
from prorl_gym.api.http.error_responses import ApiError
from prorl_gym.client.wire_models import (
    AdmissionStatus,
    EngineRegistration,
    EngineStatus,
    PauseResponse,
    PolicyStatus,
    PolicyUpdateBody,
    PolicyUpdateResponse,
    PoolStatus,
)
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.balance.members import PoolEngine
from prorl_gym.inference.config import normalize_url
from prorl_gym.inference.weights.weight_updater import Pause, UpdateResult, WeightUpdater
from prorl_gym.logs import redact

_LOG = logging.getLogger(__name__)


class EngineRegistry:
    """The engines of one pool by address: a trainer registers and deregisters them. Without ``make_engine``, none."""

    def __init__(
        self,
        pool: EnginePool,
        urls: Mapping[str, str] | None = None,
        make_engine: Callable[[str, str], PoolEngine] | None = None,
        allowed: AllowedUrls | None = None,
        max_engines: int = 4096,
    ) -> None:
        self._pool = pool
        self._urls = dict(urls or {})
        self._make_engine = make_engine
        self._allowed = allowed or AllowedUrls()
        self._max_engines = max_engines
        self._next_index = len(self._urls)
        self.draining: dict[str, asyncio.Task[None]] = {}
        """Engines that finish their last calls, by name."""

    def url_of(self, name: str) -> str | None:
        return self._urls.get(name)

    def register(self, url: str) -> EngineRegistration:
        """Register an engine, unless it is registered already."""
        [normal] = self._check_urls([url])
        name = self._find(normal) or self._register(normal)
        return EngineRegistration(name=name, url=normal, draining=False)

    def set_engines(self, urls: Sequence[str]) -> None:
        """Replace the engines by these. All or nothing: a refused address changes no engine."""
        wanted = self._check_urls(urls)
        for name in [name for name, url in self._urls.items() if url not in wanted]:
            self.deregister(name)  # no await in between: both changes reach the pool as one
        for url in wanted:
            if self._find(url) is None:
                self._register(url)

    def deregister(self, name: str) -> EngineRegistration:
        """Give an engine no more calls; it is removed when its running calls have ended."""
        if name not in self._pool.engines:
            raise ApiError(404, f"pool {self._pool.name} has no engine '{name[:80]}'.", "GET /v1/policy names them.")
        if name not in self.draining:
            self.draining[name] = asyncio.create_task(self._drain_and_remove(name), name=f"drain {name}")
        return EngineRegistration(name=name, url=self.url_of(name), draining=True)

    async def close(self) -> None:
        """Cancel all waits for draining engines; the pool closes the engines. Idempotent."""
        leaving = list(self.draining.values())
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)

    def _check_urls(self, urls: Sequence[str]) -> list[str]:
        if self._make_engine is None:
            raise ApiError(
                409, f"pool {self._pool.name} takes no other engines.", "Change the service's configuration."
            )
        try:
            normal = list(dict.fromkeys(map(normalize_url, urls)))
        except ValueError as error:
            raise ApiError(422, f"The engine's address is wrong: {error}.") from None
        for url in normal:
            if url not in self._allowed:
                raise ApiError(
                    403, f"The engine {redact(url)[:200]} is not on the allow-list.", "Add it to http.engine_urls."
                )
        if len(normal) > self._max_engines:
            raise ApiError(409, f"pool {self._pool.name} has room for {self._max_engines} engines.", "")
        return normal

    def _find(self, url: str) -> str | None:
        names = (name for name, known in self._urls.items() if known == url and name not in self.draining)
        return next(names, None)

    def _register(self, url: str) -> str:
        assert self._make_engine is not None
        if len(self._urls) - len(self.draining) >= self._max_engines:
            raise ApiError(
                409, f"pool {self._pool.name} has room for {self._max_engines} engines.", "Remove one, then add it."
            )
        name = f"{self._pool.name}-{self._next_index}"  # never reused: records and caches identify engines by name
        self._next_index += 1
        self._urls[name] = url
        self._pool.add_engine(self._make_engine(name, url))
        _LOG.info("pool %s: engine %s (%s) registered", self._pool.name, name, url)
        return name

    async def _drain_and_remove(self, name: str) -> None:
        try:
            await self._pool.drain_engine(name)
            await self._pool.remove_engine(name)
            _LOG.info("pool %s: engine %s left", self._pool.name, name)
        except Exception:
            _LOG.exception("pool %s: engine %s could not be closed", self._pool.name, name)
        finally:
            self.draining.pop(name, None)
        self._urls.pop(name, None)


class PolicyController:
    """One pool. ``on_version`` is called with each version that engines serve from now on, and the pool's name."""

    def __init__(
        self,
        pool: EnginePool,
        updater: WeightUpdater,
        registry: EngineRegistry | None = None,
        on_version: Callable[[int, str], Awaitable[None]] | None = None,
    ) -> None:
        self.pool = pool
        self.registry = registry or EngineRegistry(pool)
        self.updater = updater
        self._on_version = on_version
        self._last_update: tuple[PolicyUpdateBody, asyncio.Task[UpdateResult]] | None = None

    def policy_status(self) -> PolicyStatus:
        return PolicyStatus(pool=self.pool_status(), probe_ids=tuple(self.updater.probe_token_ids))

    def pool_status(self) -> PoolStatus:
        return pool_status(self.pool, self.registry, self.updater.pause_in_force)

    async def update(self, body: PolicyUpdateBody) -> PolicyUpdateResponse:
        """Update the weights; goes on when the caller is cancelled. Raises what ``WeightUpdater.update`` does."""
        if self._last_update is not None and self._last_update[0] != body and not self._last_update[1].done():
            raise ApiError(
                409,
                f"pool {self.pool.name}: the update to version {self._last_update[0].version} is under way.",
                "Wait for it.",
            )
        task = None if self._last_update is None or self._last_update[0] != body else self._last_update[1]
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(self._update(body), name=f"update {self.pool.name}")
            self._last_update = body, task
        updated = await asyncio.shield(task)
        return PolicyUpdateResponse(
            version=updated.version,
            serving=updated.serving,
            quarantined=dict(updated.quarantined),
            unverified=updated.unverified,
            draining=tuple(self.registry.draining),
        )

    async def pause(
        self, mode: Literal["abort", "drain", "keep"], expire_seconds: float | None = None
    ) -> PauseResponse:
        await self.updater.pause(mode, expire_seconds)
        pause = self.updater.pause_in_force
        expires_at = None if pause is None else pause.expires_at
        return PauseResponse(pool=self.pool.name, paused=pause is not None, expires_at=expires_at)

    async def resume(self) -> PauseResponse:
        await self.updater.resume()
        return PauseResponse(pool=self.pool.name, paused=False)

    async def close(self) -> None:
        """Cancel a running update and all drains. Idempotent."""
        if self._last_update is not None and not self._last_update[1].done():
            self._last_update[1].cancel()
            await asyncio.wait({self._last_update[1]})
        await self.registry.close()

    async def _update(self, body: PolicyUpdateBody) -> UpdateResult:
        if body.engines is not None:
            self.registry.set_engines(body.engines)
        updated = await self.updater.update(
            body.version,
            reference_logprobs=body.reference,
            caches_dropped=body.caches_dropped,
            require_pause=body.require_pause,
        )
        if self._on_version is not None:
            await self._on_version(updated.version, self.pool.name)
        return updated


def pool_status(pool: EnginePool, registry: EngineRegistry | None = None, pause: Pause | None = None) -> PoolStatus:
    seen = pool.snapshot()
    admission = seen.admission
    engines = tuple(
        EngineStatus(
            name=engine.name,
            url=None if registry is None else registry.url_of(engine.name),
            serves=engine.is_serving,
            unhealthy_reason=engine.unhealthy_reason,
            unhealthy_since=engine.unhealthy_since,
            quarantine=engine.quarantine_reason,
            draining=engine.draining,
            version=engine.version,
            in_flight=engine.in_flight,
            calls=engine.calls,
            failures=engine.failures,
            sampled_tokens=engine.sampled_tokens,
            hit_rate=engine.cache_hit_rate,
            load=engine.load,
        )
        for engine in seen.engines
    )
    return PoolStatus(
        name=seen.name,
        version=seen.version,
        paused=seen.paused,
        pause_expires_at=None if pause is None else pause.expires_at,
        failovers=seen.failovers,
        unavailable_reason=seen.unavailable_reason,
        waiting_rollouts=seen.waiting_rollouts,
        admission=AdmissionStatus(
            budget=admission.budget if math.isfinite(admission.budget) else None,
            in_tokens=admission.in_tokens,
            filled=admission.used,
            live=admission.live,
            waiting=admission.waiting,
        ),
        engines=engines,
    )
