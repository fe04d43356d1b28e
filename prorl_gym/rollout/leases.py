"""What one rollout has borrowed: started when asked for, closed when it ends."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from prorl_gym.environments.judge import Judge
from prorl_gym.errors import Evidence, FailureKind, RolloutError, SandboxError, UnfitImageError, UnusableSandboxError
from prorl_gym.sandbox.loss import HostMemory
from prorl_gym.sandbox.protocol import Sandbox, SandboxBackend, SandboxSpec, loss_of

_LOG = logging.getLogger(__name__)

KeptT = TypeVar("KeptT")

_UNEXPLAINED = Evidence.SANDBOX_LOST_UNEXPLAINED
_STRONGEST = (Evidence.SANDBOX_KILLED_OUTSIDE, _UNEXPLAINED, Evidence.LIMIT_BREACHED)
"""Of several sandboxes of an attempt that are gone, what the policy cannot have done decides."""


class SandboxLeases:
    """Implements ``Leases`` on one backend. Everything handed out is closed by ``close``.

    Args:
        backend: starts the sandboxes.
        asked: told the spec of each sandbox that was started for the agent.
        judge: lent to graders.
    """

    def __init__(
        self,
        backend: SandboxBackend,
        asked: Callable[[SandboxSpec], None] | None = None,
        judge: Judge | None = None,
    ) -> None:
        self._backend = backend
        self._asked = asked
        self._judge = judge
        self._agent: dict[str, asyncio.Task[Sandbox]] = {}
        self._open: list[Sandbox] = []
        self._kept: list[AbstractAsyncContextManager[Any]] = []
        self._starting: set[asyncio.Task[Any]] = set()
        self._closing: asyncio.Task[None] | None = None
        self._memory: HostMemory | None = None
        """Of this host, when the first sandbox was asked for."""

    async def agent(self, spec: SandboxSpec) -> Sandbox:
        """Return the agent's sandbox for this spec; concurrent first calls start one.

        Raises:
            SandboxError: it could not be started; the next call tries again.
        """
        key = repr(spec)  # a spec holds a mapping: it has no hash
        starting = self._agent.get(key)
        if starting is None or (starting.done() and _failed(starting)):
            starting = self._agent[key] = self._start(spec, self._asked)
        # Shielded: of two tools that wait for the same sandbox, one may be cancelled.
        return await asyncio.shield(starting)

    async def clean(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox that the agent has never touched."""
        return await _waited(self._start(spec))

    async def keep(self, resource: AbstractAsyncContextManager[KeptT]) -> KeptT:
        """Enter what is left when the rollout ends."""
        return await _waited(self._track(self._enter(resource), "resource-start"))

    def judge(self) -> Judge | None:
        """Return the service's judge, if it has one."""
        return self._judge

    async def explain(self, error: RolloutError, earlier_losses: int) -> RolloutError:
        """Find the cause of an error that only says what does not work in a sandbox; return any other as it is.

        Args:
            error: struck while the rollout's own payload ran.
            earlier_losses: see ``blame``.
        """
        if isinstance(error, UnfitImageError):
            return await self._explain_image(error)
        if error.kind is not FailureKind.SANDBOX_LOST or error.evidence not in (None, _UNEXPLAINED):
            return error
        known = [error.evidence, *await asyncio.gather(*map(loss_of, self._open))]
        evidence = next((one for one in _STRONGEST if one in known), None)
        if evidence is None and isinstance(error, UnusableSandboxError):
            evidence = Evidence.PAYLOAD_BROKE_SANDBOX
        if evidence is None:
            return error
        if evidence is _UNEXPLAINED and self._memory is not None and HostMemory.now().was_short_since(self._memory):
            evidence = Evidence.SANDBOX_KILLED_OUTSIDE
        return SandboxError.from_evidence(evidence, error.what, error.fix, earlier_losses=earlier_losses)

    async def _explain_image(self, error: UnfitImageError) -> RolloutError:
        """Blame the payload for what works in a sandbox over the same image that it has not run in."""
        for spec in {repr(sandbox.spec): sandbox.spec for sandbox in self._open}.values():
            clean = await self.clean(spec)
            try:
                await (clean.shell() if error.tool == "shell" else clean.python())
            except SandboxError:
                continue
            finally:
                await clean.close()
            return SandboxError.from_evidence(Evidence.PAYLOAD_BROKE_SANDBOX, error.what)
        return error

    def abandon(self) -> None:
        """Begin to ``close``: nobody waits for the result of what still works in them."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="sandboxes-close")

    async def close(self) -> None:
        """Stop what is starting, close what is open. Failures are logged: they must not cost the record. Idempotent."""
        self.abandon()
        assert self._closing is not None
        await self._closing

    async def _close(self) -> None:
        for task in tuple(self._starting):
            task.cancel()
        # What is open need not wait for what is only starting.
        await asyncio.gather(self._close_open(), *self._starting, return_exceptions=True)
        await self._close_open()

    async def _close_open(self) -> None:
        sandboxes, self._open = self._open, []
        kept, self._kept = self._kept, []
        leaving = [resource.__aexit__(None, None, None) for resource in kept]
        closing = [sandbox.close() for sandbox in sandboxes]
        results = await asyncio.gather(*closing, *leaving, return_exceptions=True)
        names = [*(f"sandbox {sandbox.id}" for sandbox in sandboxes), *(type(resource).__name__ for resource in kept)]
        for name, result in zip(names, results, strict=True):
            if isinstance(result, Exception):
                _LOG.error("%s could not be closed", name, exc_info=result)

    def _start(self, spec: SandboxSpec, asked: Callable[[SandboxSpec], None] | None = None) -> asyncio.Task[Sandbox]:
        return self._track(self._begin(spec, asked), "sandbox-start")

    def _track(self, work: Coroutine[Any, Any, KeptT], name: str) -> asyncio.Task[KeptT]:
        if self._closing is not None:
            work.close()
            raise RuntimeError("the rollout has ended: nothing may be started for it")
        task = asyncio.create_task(work, name=name)
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        task.add_done_callback(_failed)  # seen: who waited for it may be gone
        return task

    async def _begin(self, spec: SandboxSpec, asked: Callable[[SandboxSpec], None] | None) -> Sandbox:
        self._memory = self._memory or HostMemory.now()
        sandbox = await self._backend.start(spec)
        self._open.append(sandbox)
        if asked is not None:
            asked(spec)
        return sandbox

    async def _enter(self, resource: AbstractAsyncContextManager[KeptT]) -> KeptT:
        entered = await resource.__aenter__()
        self._kept.append(resource)
        return entered


async def _waited(starting: asyncio.Task[KeptT]) -> KeptT:
    """Wait for a start; who is cancelled meanwhile wants it no more."""
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.cancel()
        raise


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None
