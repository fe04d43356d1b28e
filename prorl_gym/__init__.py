"""Rollout-as-a-service for reinforcement learning of multi-turn LLM agents.

Public names are loaded on first use: a trainer that imports the client, or a program in a sandbox, loads nothing else.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prorl_gym.client import Client, SyncClient
    from prorl_gym.records import Outcome, Rollout, RolloutRequest
    from prorl_gym.settings import RolloutSettings

__version__ = "0.1.0"

_PUBLIC = {
    "Client": "prorl_gym.client",
    "SyncClient": "prorl_gym.client",
    "Outcome": "prorl_gym.records",
    "Rollout": "prorl_gym.records",
    "RolloutRequest": "prorl_gym.records",
    "RolloutSettings": "prorl_gym.settings",
}

__all__ = ["Client", "Outcome", "Rollout", "RolloutRequest", "RolloutSettings", "SyncClient", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'prorl_gym' has no attribute {name!r}")
