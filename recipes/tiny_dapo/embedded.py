"""The whole service on the caller's own event loop, behind the methods of the client that the recipe calls.

Agent loop, sandboxes, ledger and groups are those of ``prorl-gym serve``; there is no other process and no HTTP between
the trainer and its rollouts. Only the engine is a server.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

from prorl_gym.api.build import LoadedService, build_service
from prorl_gym.api.config import ServiceConfig
from prorl_gym.api.policy_control import PolicyController
from prorl_gym.client import Client
from prorl_gym.client.async_client import WeightUpdate
from prorl_gym.client.record_stream import Acknowledger, RecordStream
from prorl_gym.client.wire_models import (
    AcceptedRollout,
    DeliveredRecord,
    GroupsStatus,
    PolicyStatus,
    RolloutListResponse,
)
from prorl_gym.demand import Demand
from prorl_gym.errors import CancelReason
from prorl_gym.records import BatchMismatch, Rollout, RolloutRequest


class EmbeddedClient(Client):
    """A client whose service is part of this process. Use ``embedded_client``.

    Args:
        loaded: the service.
    """

    def __init__(self, loaded: LoadedService) -> None:
        self._loaded, self._service = loaded, loaded.service

    async def __aenter__(self) -> Self:
        """Return itself."""
        return self

    async def close(self) -> None:
        """Do nothing: the service ends with ``embedded_client``."""

    async def submit(self, requests: RolloutRequest | Sequence[RolloutRequest]) -> list[AcceptedRollout]:
        return await self._service.submit([requests] if isinstance(requests, RolloutRequest) else requests)

    async def cancel(
        self,
        rollout_ids: Sequence[str] = (),
        *,
        groups: Sequence[str] = (),
        runs: Sequence[str] = (),
        reason: CancelReason = CancelReason.CLIENT,
    ) -> list[str]:
        return await self._service.cancel(rollout_ids, groups=groups, runs=runs, reason=reason)

    def stream(
        self, run_id: str | None = None, cursor: int = 0, *, follow: bool = True, acknowledge: bool = False
    ) -> RecordStream:
        async def read(after: int) -> AsyncGenerator[DeliveredRecord, None]:
            async for one in self._service.stream(run_id, after, follow=follow):
                yield DeliveredRecord(cursor=one.cursor, rollout=Rollout.model_validate_json(one.record))

        return RecordStream(read, cursor, Acknowledger(None))

    async def rollouts(
        self,
        run_id: str | None = None,
        *,
        group: str | None = None,
        prefix: str | None = None,
        limit: int = 100,
        before: int = 0,
    ) -> RolloutListResponse:
        """See ``Client.rollouts``; the newest page only."""
        newest = await self._service.ledger.summaries(
            run_id, groups=[group] if group else None, prefix=prefix, limit=limit, newest_first=True
        )
        return RolloutListResponse(rollouts=tuple(newest), before=None)

    async def acknowledge(self, run_id: str | None, cursor: int) -> int:
        """Do nothing: records are counted at the end."""
        return 0

    async def report_mismatch(self, run_id: str, version: int, mismatch: BatchMismatch) -> None:
        """Do nothing: there is no dashboard to show it."""

    async def set_demand(self, run_id: str, demand: Demand) -> GroupsStatus:
        return await self._service.set_demand(run_id, demand)

    async def demand(self, run_id: str) -> Demand | None:
        return self._service.groups.demands().get(run_id)

    async def groups(self, run_id: str) -> GroupsStatus:
        return self._service.groups.status(run_id)

    async def policy(self, pool: str = "policy") -> PolicyStatus:
        return PolicyController(self._loaded.pool, self._loaded.weight_updaters[pool]).policy_status()

    @asynccontextmanager
    async def weight_update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, version: int, *, reference: Sequence[float] | None = None, **_: Any
    ) -> AsyncGenerator[WeightUpdate, None]:
        updater = self._loaded.weight_updaters["policy"]
        await updater.pause("abort")
        try:
            yield WeightUpdate(version)
            await updater.update(version, reference_logprobs=reference)
            await self._service.set_policy_version(version)
        finally:
            await updater.resume()


@asynccontextmanager
async def embedded_client(config: dict[str, object]) -> AsyncGenerator[EmbeddedClient, None]:
    """Run a service on this event loop while the context is open."""
    loaded = await build_service(ServiceConfig.model_validate(config))
    try:
        yield EmbeddedClient(loaded)
    finally:
        await loaded.close(drain=False)
