"""The rollout service of this server process: configured from Gym's configuration, started and stopped with it."""

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

from prorl_gym.api.build import Built, build_service
from prorl_gym.api.config import ServiceConfig
from prorl_gym.config import load_config
from prorl_gym.environments.judge import Judge
from prorl_gym.errors import CancelReason, FailureKind, SandboxError, ShuttingDownError
from prorl_gym.gym_root.resources_servers.prorl_rollout.channels import Channels
from prorl_gym.gym_root.resources_servers.prorl_rollout.claims import Claims
from prorl_gym.gym_root.resources_servers.prorl_rollout.undelivered import Undelivered
from prorl_gym.logs import configure
from prorl_gym.records import Message, Rollout, RolloutRequest
from prorl_gym.rollout.insistence import pause
from prorl_gym.rollout.ledger_file import DamagedLedgerError, LedgerError
from prorl_gym.rollout.service import RolloutService
from prorl_gym.sandbox.protocol import SandboxBackend
from prorl_gym.settings import RolloutSettings
from prorl_gym.trainers.gym_items import function_schema

_LOG = logging.getLogger(__name__)

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
"""Seconds before a rollout that the ledger has no room for is submitted again; doubled each time."""

_ACKNOWLEDGE_AFTER = 256
"""Deliveries after which the ledger is told."""

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

    Unless ``state`` or ``ledger`` is configured, the ledger lives and dies with this process. Nothing that Gym
    tells its servers names a run, so a ledger that was kept by default would hand rollouts of yesterday's run,
    made by another policy, to today's. Whoever wants a run to outlive its servers names the ledger
    (``prorl_service.ledger.path``).
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
        self._acknowledging = asyncio.Lock()
        self._to_cancel: dict[CancelReason, list[str]] = {}
        self._canceller: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._deliveries = 0
        kept = self._config.ledger_file.path
        self._undelivered = Undelivered(None if self._state is not None else kept.with_name(f"{kept.name}.undelivered"))
        self._claims = Claims(self._abandoned, lambda rollout_id: self.delivered([rollout_id]))
        self.channels = Channels(self, self._claims)

    async def __aenter__(self) -> Self:
        configure(self._config.log.level, self._config.log.form)
        self._built = await build_service(self._config)
        left = self._claims.found(self._undelivered.open())  # after the build: the ledger's lock is ours now
        if left:
            _LOG.info("%d rollouts of an earlier process wait for their rows", left)
        self._built.service.observe(lambda rollout: self._claims.has_record(rollout.rollout_id))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        await self.channels.close_all()
        self._claims.close()
        built, self._built = self._built, None
        if built is not None:
            if self._tasks:
                await asyncio.wait(tuple(self._tasks))
            await built.close(drain=False)
        self._undelivered.close()
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

    @property
    def settings(self) -> RolloutSettings:
        """Sampling and limits of the service."""
        return self._config.settings

    @property
    def judge(self) -> Judge | None:
        """What graders may ask; ``None`` when none is configured, or the service is not running."""
        return None if self._built is None else self._built.judge

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Accept a batch, all or nothing. A full disk makes it wait: a refusal would end a synchronous training run.

        Raises:
            TaskError: a task is not JSON.
            DamagedLedgerError: nothing can be accepted before somebody repairs the ledger.
            ShuttingDownError: the server stops.
        """
        service = self._running().service
        ids = [request.rollout_id for request in requests]
        self._undelivered.accepted(ids)
        for rollout_id in ids:
            self._waiting.setdefault(rollout_id, None)
        try:
            if await _refusal(service, requests) is not None:
                async with self._first_in_line:  # only the first knocks; the others wait for it, and hold nothing
                    await self._insist(service, requests)
        finally:
            cancelled = {name: reason for name in ids if (reason := self._waiting.pop(name, None)) is not None}
        for reason in set(cancelled.values()):
            await service.cancel([name for name, why in cancelled.items() if why is reason], reason=reason)

    async def result(self, rollout_id: str) -> Rollout:
        """Wait for a record.

        Raises:
            NotFoundError: never accepted, or not kept any more.
            ShuttingDownError: the server stops.
        """
        service = self._running().service
        while self._built is not None:
            rollout = await service.result(rollout_id, _WAIT)
            if rollout is not None:
                return rollout
            self._running()
        raise ShuttingDownError("The rollout service is stopping.", "Post the row again when it is back.")

    async def cancel(self, rollout_ids: Sequence[str], reason: CancelReason) -> None:
        """Stop rollouts; each still gets its record."""
        for rollout_id in self._waiting.keys() & set(rollout_ids):
            self._waiting[rollout_id] = reason
        await self._running().service.cancel(rollout_ids, reason=reason)

    def cancel_later(self, rollout_ids: Sequence[str], reason: CancelReason) -> None:
        """Stop rollouts, without waiting for that; what is named while others are being stopped goes together."""
        if self._built is None or not rollout_ids:
            return
        self._to_cancel.setdefault(reason, []).extend(rollout_ids)
        if self._canceller is None or self._canceller.done():
            self._canceller = self._spawn(self._cancel_gathered())

    def delivered(self, rollout_ids: Sequence[str]) -> None:
        """Gym has the answers of these, or nobody will ask for them again: their records need not be kept."""
        self._undelivered.delivered(rollout_ids)
        self._deliveries += len(rollout_ids)
        if self._deliveries >= _ACKNOWLEDGE_AFTER and self._built is not None:
            self._deliveries = 0
            self._spawn(self._acknowledge(self._built.service))

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[list[int], int]:
        """Return the ids of a first prompt, and the terminator's id."""
        codec = self._running().codec
        return codec.first_prompt(messages, [function_schema(tool) for tool in tools]), codec.terminator_id

    async def _insist(self, service: RolloutService, requests: Sequence[RolloutRequest]) -> None:
        seconds = FIRST_PAUSE
        while (error := await _refusal(service, requests)) is not None:
            _LOG.error("%d rollouts wait to be accepted: %s", len(self._waiting), error)
            await self._acknowledge(service)  # should it be full of what Gym has already
            await pause(self._stopping, seconds)
            self._running()
            seconds = min(2 * seconds, LONGEST_PAUSE)

    async def _cancel_gathered(self) -> None:
        while self._to_cancel and self._built is not None:
            reason, rollout_ids = self._to_cancel.popitem()
            await self.cancel(rollout_ids, reason)

    async def _acknowledge(self, service: RolloutService) -> None:
        try:
            async with self._acknowledging:
                await self._undelivered.acknowledge(service)
        except LedgerError as error:
            _LOG.error("what was delivered cannot be noted now: %s", error)

    def _abandoned(self, rollout_id: str) -> None:
        self.cancel_later([rollout_id], CancelReason.DISCONNECTED)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("a part of the server failed", exc_info=error)

    def _running(self) -> Built:
        if self._built is None:
            raise ShuttingDownError("The rollout service is not running.", "Post the row again when it is back.")
        return self._built


async def _refusal(service: RolloutService, requests: Sequence[RolloutRequest]) -> LedgerError | None:
    """Submit; return why the ledger cannot take it now, if it cannot."""
    try:
        await service.submit(requests)
    except DamagedLedgerError:
        raise
    except LedgerError as error:
        return error
    return None
