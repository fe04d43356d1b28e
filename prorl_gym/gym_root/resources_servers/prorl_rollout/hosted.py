"""The rollout service of this server process: configured from Gym's configuration, started and stopped with it."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

from prorl_gym.api.build import Built, build_service
from prorl_gym.api.config import ServiceConfig
from prorl_gym.config import load_config
from prorl_gym.errors import CancelReason, FailureKind, SandboxError, ShuttingDownError
from prorl_gym.logs import configure
from prorl_gym.records import Message, Rollout, RolloutRequest
from prorl_gym.rollout.insistence import pause
from prorl_gym.rollout.ledger_file import DamagedLedgerError, LedgerError
from prorl_gym.rollout.service import RolloutService
from prorl_gym.sandbox.protocol import SandboxBackend
from prorl_gym.trainers.gym_items import function_schema

_LOG = logging.getLogger(__name__)

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
"""Seconds before a rollout that the ledger has no room for is submitted again; doubled each time."""

_WAIT = 3600.0
"""Seconds of one wait for a record; then it is asked for again."""


def service_config(engines: str | Sequence[str], model: str, tokenizer: str | None, rest: Mapping[str, Any]) -> Any:
    """Return the service's configuration: Gym's own keys win over those below ``service``.

    Raises:
        ConfigError: an unknown or wrong key.
    """
    inference = {
        **rest.get("inference", {}),
        "engines": [engines] if isinstance(engines, str) else list(engines),
        "model": model,
        "tokenizer": tokenizer or model,
    }
    return load_config(ServiceConfig, {**rest, "inference": inference}, "prorl_rollout.service")


class HostedService:
    """Owns the service while the server runs. An async context manager.

    Unless ``state`` or ``ledger`` is configured, the ledger lives and dies with this process: the ids of a Gym run
    carry a nonce of its agents' processes, so nobody could ask a later one for them.
    """

    def __init__(
        self, engines: str | Sequence[str], model: str, tokenizer: str | None, rest: Mapping[str, Any]
    ) -> None:
        self._state = None if "state" in rest or "ledger" in rest else TemporaryDirectory(prefix="prorl-gym-")
        if self._state is not None:
            rest = {**rest, "state": self._state.name}
        self._config = service_config(engines, model, tokenizer, rest)
        self._built: Built | None = None
        self._stopping = asyncio.Event()
        self._first_in_line = asyncio.Lock()
        self._waiting: dict[str, CancelReason | None] = {}
        """Rollouts that are not accepted yet, and for those that were cancelled meanwhile the reason."""

    async def __aenter__(self) -> Self:
        configure(self._config.log.level, self._config.log.form)
        self._built = await build_service(self._config)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        built, self._built = self._built, None
        if built is not None:
            await built.close(drain=False)
        if self._state is not None:
            self._state.cleanup()

    @property
    def backend(self) -> SandboxBackend:
        """Where sandboxes come from.

        Raises:
            SandboxError: the service is not running.
        """
        if self._built is None:
            raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, "the rollout service is not running.")
        return self._built.backend

    async def roll_out(self, request: RolloutRequest) -> Rollout:
        """Accept a rollout and wait for its record; the same request again waits for the same one.

        A full disk makes it wait, too: a refusal would end a synchronous training run.

        Raises:
            ConflictError: the id was used for another request.
            DamagedLedgerError: nothing can be accepted before somebody repairs the ledger.
            ShuttingDownError: the server stops.
        """
        service = self._running().service
        await self._submit(service, request)
        while self._built is not None:
            rollout = await service.result(request.rollout_id, _WAIT)
            if rollout is not None:
                return rollout
            self._running()
        raise ShuttingDownError("The rollout service is stopping.", "Post the row again when it is back.")

    async def cancel(self, rollout_ids: Sequence[str], reason: CancelReason) -> None:
        """Stop rollouts; each still gets its record."""
        for rollout_id in self._waiting.keys() & set(rollout_ids):
            self._waiting[rollout_id] = reason
        await self._running().service.cancel(rollout_ids, reason=reason)

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[list[int], int]:
        """Return the ids of a first prompt, and the terminator's id."""
        codec = self._running().codec
        return codec.first_prompt(messages, [function_schema(tool) for tool in tools]), codec.terminator_id

    async def _submit(self, service: RolloutService, request: RolloutRequest) -> None:
        """Submit until it works; a cancel that comes meanwhile is made good."""
        self._waiting.setdefault(request.rollout_id, None)
        try:
            if await _refusal(service, request) is not None:
                async with self._first_in_line:  # only the first knocks; the others wait for it, and hold nothing
                    await self._insist(service, request)
        finally:
            reason = self._waiting.pop(request.rollout_id, None)
        if reason is not None:
            await service.cancel([request.rollout_id], reason=reason)

    async def _insist(self, service: RolloutService, request: RolloutRequest) -> None:
        seconds = FIRST_PAUSE
        while (error := await _refusal(service, request)) is not None:
            _LOG.error("%d rollouts wait to be accepted: %s", len(self._waiting), error)
            await pause(self._stopping, seconds)
            self._running()
            seconds = min(2 * seconds, LONGEST_PAUSE)

    def _running(self) -> Built:
        if self._built is None:
            raise ShuttingDownError("The rollout service is not running.", "Post the row again when it is back.")
        return self._built


async def _refusal(service: RolloutService, request: RolloutRequest) -> LedgerError | None:
    """Submit; return why the ledger cannot take it now, if it cannot."""
    try:
        await service.submit([request])
    except DamagedLedgerError:
        raise
    except LedgerError as error:
        return error
    return None
