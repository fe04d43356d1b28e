"""Opening a service: its state directory, its token, and a ledger that accepts rollouts.

Rollouts are accepted before what they need to begin is loaded. This module imports little: ``build`` imports and loads
the rest (tokenizer, sandboxes) after that.
"""

import asyncio
import logging
import os
import secrets
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prorl_gym.api.config import ServiceConfig
from prorl_gym.client import read_token
from prorl_gym.environments import registry
from prorl_gym.environments.protocol import Environment
from prorl_gym.errors import ConfigError, FailureKind, TaskError
from prorl_gym.rollout.intake import LoadingRunner
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.protocol import Ledger
from prorl_gym.rollout.scheduling.attempt import EnvironmentLookup
from prorl_gym.rollout.service import RolloutService

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AcceptingService:
    """A service that accepts rollouts; ``build.load_service`` loads what it needs to begin them."""

    config: ServiceConfig
    service: RolloutService
    ledger: Ledger
    environments: EnvironmentLookup


async def open_service(config: ServiceConfig) -> AcceptingService:
    """Open the ledger and accept rollouts: the part of ``build_service`` that is quick.

    Raises:
        ConfigError: an unknown environment, a state directory that cannot be made.
        LedgerError: the ledger's file cannot be used.
    """
    environments = offered_environments(config.environments)
    ledger = await _open_ledger(config)
    service = RolloutService(
        ledger,
        LoadingRunner(_environment_check(config.environments)),
        config.retry,
        config.runner.shares,
        claim_seconds=None if config.nodes is None else config.nodes.lease_seconds,
    )
    try:
        await service.start_accepting()
    except BaseException:
        await ledger.close()
        raise
    return AcceptingService(config, service, ledger, environments)


def offered_environments(names: Sequence[str]) -> EnvironmentLookup:
    """Return a lookup of environments with these names only (of all installed ones, if none is given).

    Raises:
        ConfigError: a name is not installed.
    """
    for name in names:
        try:
            registry.get(name)
        except TaskError as error:
            raise ConfigError(f"environments: {error.what}", error.fix) from None

    must_offer = _environment_check(names)

    def find(name: str) -> Environment[Any]:
        must_offer(name)
        return registry.get(name)

    return find


def _environment_check(names: Sequence[str]) -> Callable[[str], None]:
    """Return the check of a name alone, which imports no environment."""

    def must_offer(name: str) -> None:
        known = names or registry.names()
        if name not in known:
            raise TaskError(
                FailureKind.UNKNOWN_ENVIRONMENT,
                f"This service does not offer environment '{name[:80]}'.",
                f"It offers: {', '.join(known)}.",
            )

    return must_offer


async def _open_ledger(config: ServiceConfig) -> SqliteLedger:
    if config.ledger is None:
        await asyncio.to_thread(_make_private_directory, config.state, "state")
    elif config.ledger.path.parent.is_dir():  # otherwise opening the ledger reports that it is missing
        await asyncio.to_thread(_make_private_directory, config.ledger.path.parent, "ledger.path")
    return await SqliteLedger.open(config.ledger_config)


def load_or_create_token(path: Path) -> str:
    """Return the bearer token in this file, readable by its owner only; make both at the first start.

    Raises:
        ConfigError: the file cannot be made, is not this user's alone, or other users can write to its directory.
    """
    _make_private_directory(path.parent, "state")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: the token file cannot be made ({error.strerror}).", "Set 'state' to a writable directory."
        ) from None
    token = secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")
    return token


def _make_private_directory(directory: Path, key: str) -> None:
    """Make a directory for this user alone, or check that no other user can put files into it.

    What lies there decides what the service believes.

    Args:
        directory: of a token or a ledger.
        key: of the configuration, for messages.

    Raises:
        ConfigError: it cannot be made, or every user may write to it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise ConfigError(
            f"{key}: {directory} cannot be made ({error.strerror}).", f"Set '{key}' to a writable directory."
        ) from None
    if found.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"{key}: every user may write to {directory}.",
            f"chmod go-w {directory}, or set '{key}' to a directory of this user's.",
        )
    # A group may consist of this user alone, and the root of a container owns none of its volumes.
    if found.st_mode & stat.S_IWGRP:
        _LOG.warning("%s: the group of %s may write to it: chmod g-w, unless you trust its members", key, directory)
    if found.st_uid not in (os.geteuid(), 0):
        _LOG.warning("%s: %s belongs to another user (%d), who can replace its files", key, directory, found.st_uid)
