"""Clients of the rollout service: ``Client`` for asyncio, ``SyncClient`` without it.

They need only pydantic and aiohttp, so that they run inside a trainer's own environment. Every call may be repeated
without harm (ids are idempotent, streams resume at a cursor), and the clients do so, for a bounded time, when a
connection breaks or the service is busy.

A name is loaded on first use: the service shares the wire models and needs no client.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prorl_gym.client.async_client import Client, WeightUpdate
    from prorl_gym.client.group_stream import CompletedGroup, GroupsDroppedError, GroupStream
    from prorl_gym.client.record_stream import DamagedRecord, RecordStream
    from prorl_gym.client.service_credentials import DEFAULT_URL, default_state_dir, read_token, token_source
    from prorl_gym.client.sync_client import SyncClient
    from prorl_gym.client.transport import LONG_POLL_SECONDS, BusyError, ServiceError
    from prorl_gym.client.wire_models import (
        AcceptedRollout,
        Capacity,
        DeliveredRecord,
        EngineRegistration,
        EngineStatus,
        GroupsStatus,
        LedgerStatus,
        MismatchReport,
        PauseMode,
        PauseNotice,
        PolicyStatus,
        PolicyUpdateResponse,
        PoolStatus,
        ReadyGroup,
        RolloutListResponse,
        RolloutSummary,
        ServiceStatus,
        Unacknowledged,
        UnacknowledgedRollout,
    )

_NAMES_BY_MODULE = {
    "async_client": ("Client", "WeightUpdate"),
    "group_stream": ("CompletedGroup", "GroupsDroppedError", "GroupStream"),
    "record_stream": ("DamagedRecord", "RecordStream"),
    "service_credentials": ("DEFAULT_URL", "default_state_dir", "read_token", "token_source"),
    "sync_client": ("SyncClient",),
    "transport": ("LONG_POLL_SECONDS", "BusyError", "ServiceError"),
}
"""Public names that are not wire models, by module."""

__all__ = [
    "DEFAULT_URL",
    "LONG_POLL_SECONDS",
    "AcceptedRollout",
    "BusyError",
    "Capacity",
    "Client",
    "CompletedGroup",
    "DamagedRecord",
    "DeliveredRecord",
    "EngineRegistration",
    "EngineStatus",
    "GroupStream",
    "GroupsDroppedError",
    "GroupsStatus",
    "LedgerStatus",
    "MismatchReport",
    "PauseMode",
    "PauseNotice",
    "PolicyStatus",
    "PolicyUpdateResponse",
    "PoolStatus",
    "ReadyGroup",
    "RecordStream",
    "RolloutListResponse",
    "RolloutSummary",
    "ServiceError",
    "ServiceStatus",
    "SyncClient",
    "Unacknowledged",
    "UnacknowledgedRollout",
    "WeightUpdate",
    "default_state_dir",
    "read_token",
    "token_source",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name in __all__:
        module = next((module for module, names in _NAMES_BY_MODULE.items() if name in names), "wire_models")
        return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
