"""Clients of the rollout service: ``Client`` for asyncio, ``SyncClient`` for everybody else.

They need only pydantic and aiohttp, so that they run inside a trainer's own environment. Every call may be repeated
without harm (ids are idempotent, streams resume at a cursor), and the clients do so, for a bounded time, when a
connection breaks or the service is busy.

A name is loaded on first use: the service shares the wire models, and needs no client.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prorl_gym.client.answers import (
        Capacity,
        Damaged,
        Delivered,
        EarlyStopReport,
        EngineAdded,
        EngineStatus,
        Group,
        GroupsStatus,
        LedgerStatus,
        Listed,
        PauseMode,
        PolicyStatus,
        PoolStatus,
        ReadyGroup,
        Status,
        Submission,
        Updated,
    )
    from prorl_gym.client.asynchronous import Client
    from prorl_gym.client.groups import GroupsDroppedError, GroupStream
    from prorl_gym.client.streams import RecordStream
    from prorl_gym.client.synchronous import SyncClient
    from prorl_gym.client.token import DEFAULT_URL, default_state, read_token, token_place
    from prorl_gym.client.transport import LONG_POLL, BusyError, ServiceError

_PUBLIC = {
    "Capacity": "answers",
    "Damaged": "answers",
    "Delivered": "answers",
    "EarlyStopReport": "answers",
    "EngineAdded": "answers",
    "EngineStatus": "answers",
    "Group": "answers",
    "GroupsStatus": "answers",
    "LedgerStatus": "answers",
    "Listed": "answers",
    "PauseMode": "answers",
    "PolicyStatus": "answers",
    "PoolStatus": "answers",
    "ReadyGroup": "answers",
    "Status": "answers",
    "Submission": "answers",
    "Updated": "answers",
    "Client": "asynchronous",
    "GroupsDroppedError": "groups",
    "GroupStream": "groups",
    "RecordStream": "streams",
    "SyncClient": "synchronous",
    "DEFAULT_URL": "token",
    "default_state": "token",
    "read_token": "token",
    "token_place": "token",
    "LONG_POLL": "transport",
    "BusyError": "transport",
    "ServiceError": "transport",
}
"""Public names, each with its module."""

__all__ = [
    "DEFAULT_URL",
    "LONG_POLL",
    "BusyError",
    "Capacity",
    "Client",
    "Damaged",
    "Delivered",
    "EarlyStopReport",
    "EngineAdded",
    "EngineStatus",
    "Group",
    "GroupStream",
    "GroupsDroppedError",
    "GroupsStatus",
    "LedgerStatus",
    "Listed",
    "PauseMode",
    "PolicyStatus",
    "PoolStatus",
    "ReadyGroup",
    "RecordStream",
    "ServiceError",
    "Status",
    "Submission",
    "SyncClient",
    "Updated",
    "default_state",
    "read_token",
    "token_place",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name in _PUBLIC:
        return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
