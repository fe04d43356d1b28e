"""Opening a service: it accepts rollouts before it has loaded what it needs to begin them.

This module imports little: ``build`` imports and loads the rest (tokenizer, sandboxes) while rollouts are accepted.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prorl_gym.api.config import ServiceConfig
from prorl_gym.api.private import make_private
from prorl_gym.environments import registry
from prorl_gym.environments.protocol import Environment
from prorl_gym.errors import ConfigError, FailureKind, TaskError
from prorl_gym.rollout.attempt import Environments
from prorl_gym.rollout.ledger import SqliteLedger
from prorl_gym.rollout.loading import LoadingRunner
from prorl_gym.rollout.protocol import Ledger
from prorl_gym.rollout.service import RolloutService


@dataclass(frozen=True, slots=True)
class Opened:
    """A service that accepts rollouts; ``build.load`` loads what it needs to begin them."""

    config: ServiceConfig
    service: RolloutService
    ledger: Ledger
    environments: Environments


async def open_service(config: ServiceConfig) -> Opened:
    """Open the ledger and accept rollouts: the part of ``build_service`` that is quick.

    Raises:
        ConfigError: an unknown environment, a state directory that cannot be made.
        LedgerError: the ledger's file cannot be used.
    """
    environments = offered(config.environments)
    ledger = await _open_ledger(config)
    service = RolloutService(ledger, LoadingRunner(_names(config.environments)), config.retry, config.runner.shares)
    try:
        await service.accept()
    except BaseException:
        await ledger.close()
        raise
    return Opened(config, service, ledger, environments)


def offered(names: Sequence[str]) -> Environments:
    """Return a finder of environments that knows only these names (all that are installed, when there are none).

    Raises:
        ConfigError: a name is not installed.
    """
    for name in names:
        try:
            registry.get(name)
        except TaskError as error:
            raise ConfigError(f"environments: {error.what}", error.fix) from None

    must_offer = _names(names)

    def find(name: str) -> Environment[Any]:
        must_offer(name)
        return registry.get(name)

    return find


def _names(names: Sequence[str]) -> Callable[[str], None]:
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
        await asyncio.to_thread(make_private, config.state, "state")
    elif config.ledger.path.parent.is_dir():  # otherwise the ledger says that it is missing
        await asyncio.to_thread(make_private, config.ledger.path.parent, "ledger.path")
    return await SqliteLedger.open(config.ledger_file)
