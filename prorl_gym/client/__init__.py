"""Clients of the rollout service: ``Client`` for asyncio, ``SyncClient`` for everybody else.

They need only pydantic and aiohttp, so that they run inside a trainer's own environment. Every call may be repeated
without harm (ids are idempotent, streams resume at a cursor), and the clients do so, for a bounded time, when a
connection breaks or the service is busy.
"""

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
