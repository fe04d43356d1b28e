# SPDX-FileCopyrightText: Copyright (c) 2026 the prorl-gym authors
# SPDX-License-Identifier: Apache-2.0

"""The rollout service inside this server's process, configured from Gym's configuration."""

from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

from fastapi import FastAPI

from prorl_gym.api.app import create_embedded_app
from prorl_gym.api.build import LoadedService, build_service
from prorl_gym.api.config import ServiceConfig
from prorl_gym.config import load_config
from prorl_gym.environments.judge import Judge
from prorl_gym.errors import ConfigError, FailureKind, SandboxError, ShuttingDownError
from prorl_gym.logs import configure_logging
from prorl_gym.sandbox.protocol import SandboxBackend
from prorl_gym.settings import RolloutSettings


def service_config(engines: str | Sequence[str], model: str, tokenizer: str | None, options: Mapping[str, Any]) -> Any:
    """Return the service's configuration: Gym's own keys win over those below ``service``.

    Raises:
        ConfigError: an unknown or wrong key; or nodes, which could not join a service inside this server.
    """
    if options.get("nodes") is not None:
        raise ConfigError(
            "prorl_rollout.service: nodes cannot join a service inside NeMo Gym.",
            "Leave 'nodes' out, or run 'prorl-gym serve' with it and set the agents' service_url to its address.",
        )
    inference = {
        **options.get("inference", {}),
        "engines": [engines] if isinstance(engines, str) else list(engines),
        "model": model,
        "tokenizer": tokenizer or model,
    }
    return load_config(ServiceConfig, {**options, "inference": inference}, "prorl_rollout.service")


class EmbeddedService:
    """Starts the service and stops it: an async context manager.

    Unless ``state`` or ``ledger`` is configured, the ledger is deleted with this process. Gym does not name runs to its
    servers, so a ledger kept by default would return rollouts of an earlier run, with another policy, to a later one.
    Configure the ledger (``prorl_service.ledger.path``) for a run that outlives its servers.
    """

    def __init__(
        self, engines: str | Sequence[str], model: str, tokenizer: str | None, options: Mapping[str, Any]
    ) -> None:
        self._temporary_state = (
            None if "state" in options or "ledger" in options else TemporaryDirectory(prefix="prorl-gym-")
        )
        if self._temporary_state is not None:
            options = {**options, "state": self._temporary_state.name}
        self._config = service_config(engines, model, tokenizer, options)
        self._built: LoadedService | None = None

    async def __aenter__(self) -> Self:
        configure_logging(self._config.log.level, self._config.log.format)
        self._built = await build_service(self._config)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        built, self._built = self._built, None
        if built is not None:
            await built.close(drain=False)
        if self._temporary_state is not None:
            self._temporary_state.cleanup()

    def create_app(self) -> FastAPI:
        """Return the service's routes for agents.

        Raises:
            ShuttingDownError: the service is not running.
        """
        running = self._require_running()
        return create_embedded_app(running.service, running.render_prompt)

    @property
    def backend(self) -> SandboxBackend:
        """The service's backend of sandboxes.

        Raises:
            SandboxError: the service is not running.
        """
        if self._built is None or self._built.backend is None:  # without nodes, a service that runs has one
            raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, "the rollout service is not running.")
        return self._built.backend

    @property
    def settings(self) -> RolloutSettings:
        """Sampling and limits of the service."""
        return self._config.settings

    @property
    def judge(self) -> Judge | None:
        """The graders' judge; ``None`` when none is configured, or the service is not running."""
        return None if self._built is None else self._built.judge

    def _require_running(self) -> LoadedService:
        if self._built is None:
            raise ShuttingDownError("The rollout service is not running.", "Post the row again when it is back.")
        return self._built
