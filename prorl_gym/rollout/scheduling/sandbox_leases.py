"""Sandboxes and resources of one attempt: started on first use, closed when it ends."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from prorl_gym.environments.judge import Judge
from prorl_gym.errors import Evidence, FailureKind, RolloutError, SandboxError, UnfitImageError, UnusableSandboxError
from prorl_gym.rollout.scheduling.eager_task import start_eagerly
from prorl_gym.sandbox.protocol import Mount, Sandbox, SandboxBackend, SandboxSpec, loss_evidence_of

_LOG = logging.getLogger(__name__)

ResourceT = TypeVar("ResourceT")

_UNEXPLAINED = Evidence.SANDBOX_LOST_UNEXPLAINED
_BY_STRENGTH = (Evidence.SANDBOX_KILLED_OUTSIDE, _UNEXPLAINED, Evidence.LIMIT_BREACHED)
"""Where several sandboxes of an attempt are gone, evidence that the policy cannot have caused decides."""
_STALL_PERCENT = 10.0
"""Percent of the last minute in which all processes of this host waited for memory."""


@dataclass(frozen=True, slots=True)
class MemoryPressure:
    """Memory pressure on this host at one time."""

    oom_kills: int
    """Processes that the kernel's OOM killer has killed since boot."""
    stall_percent: float
    """Percent of the last minute in which all processes waited for memory."""

    @classmethod
    def read(cls) -> "MemoryPressure":
        """Read it from ``/proc``. Figures that the kernel does not report are 0."""
        kills = next((line.split()[1] for line in _lines("/proc/vmstat") if line.startswith("oom_kill ")), "0")
        full = next((line for line in _lines("/proc/pressure/memory") if line.startswith("full ")), "")
        stalled = next((field.partition("=")[2] for field in full.split() if field.startswith("avg60=")), "0")
        return cls(int(kills), float(stalled))

    def was_short_since(self, before: "MemoryPressure") -> bool:
        """Whether this host was short of memory since then, or is."""
        return self.oom_kills > before.oom_kills or self.stall_percent >= _STALL_PERCENT


class SandboxLeases:
    """Implements ``Leases``; ``close`` closes all. ``on_agent_sandbox`` is called for each start for the agent."""

    def __init__(
        self,
        backend: SandboxBackend,
        on_agent_sandbox: Callable[[SandboxSpec], None] | None = None,
        judge: Judge | None = None,
    ) -> None:
        self._backend = backend
        self._on_agent_sandbox = on_agent_sandbox
        self._judge = judge
        self._agent_mounts: tuple[Mount, ...] = ()
        self._agent_sandboxes: dict[str, asyncio.Task[Sandbox]] = {}
        self._open_sandboxes: list[Sandbox] = []
        self._contexts: list[AbstractAsyncContextManager[Any]] = []
        self._starts: set[asyncio.Task[Any]] = set()
        self._close_task: asyncio.Task[None] | None = None
        self._host_memory: MemoryPressure | None = None
        """Memory pressure of this host when the first sandbox was requested."""

    def make_fresh(self) -> "SandboxLeases":
        fresh = SandboxLeases(self._backend, self._on_agent_sandbox, self._judge)
        fresh.mount_for_agent(self._agent_mounts)
        return fresh

    def mount_for_agent(self, mounts: Sequence[Mount]) -> None:
        """Mount these in the agent's sandboxes, next to what their specs name. Call before the first is started."""
        self._agent_mounts = tuple(mounts)

    async def get_agent_sandbox(self, spec: SandboxSpec) -> Sandbox:
        """Return the agent's sandbox for this spec; concurrent first calls start one. Retry a ``SandboxError``."""
        spec = replace(spec, mounts=(*spec.mounts, *self._agent_mounts)) if self._agent_mounts else spec
        key = repr(spec)  # a spec holds a mapping: it has no hash
        starting = self._agent_sandboxes.get(key)
        if starting is None or (starting.done() and _failed(starting)):
            work = self._start_sandbox(spec, self._on_agent_sandbox)
            starting = self._agent_sandboxes[key] = self._spawn_start(work, "sandbox-start")
        # Shielded: of two tools that wait for the same sandbox, one may be cancelled.
        return await asyncio.shield(starting)

    async def start_clean_sandbox(self, spec: SandboxSpec) -> Sandbox:
        return await _await_start(self._spawn_start(self._start_sandbox(spec), "sandbox-start"))

    async def enter_context(self, resource: AbstractAsyncContextManager[ResourceT]) -> ResourceT:
        return await _await_start(self._spawn_start(self._enter_context(resource), "resource-start"))

    def get_judge(self) -> Judge | None:
        return self._judge

    async def diagnose_failure(self, error: RolloutError, earlier_losses: int = 0) -> RolloutError:
        """Find the cause of an error that only names what does not work in a sandbox with the rollout's payload."""
        if isinstance(error, UnfitImageError):
            return await self._diagnose_image(error)
        if error.kind is not FailureKind.SANDBOX_LOST or error.evidence not in (None, _UNEXPLAINED):
            return error
        known = [error.evidence, *await asyncio.gather(*map(loss_evidence_of, self._open_sandboxes))]
        evidence = next((one for one in _BY_STRENGTH if one in known), None)
        if evidence is None and isinstance(error, UnusableSandboxError):
            evidence = Evidence.PAYLOAD_BROKE_SANDBOX
        if evidence is None:
            return error
        if (
            evidence is _UNEXPLAINED
            and self._host_memory is not None
            and MemoryPressure.read().was_short_since(self._host_memory)
        ):
            evidence = Evidence.SANDBOX_KILLED_OUTSIDE
        return SandboxError.from_evidence(evidence, error.what, error.fix, earlier_losses=earlier_losses)

    async def _diagnose_image(self, error: UnfitImageError) -> RolloutError:
        """Blame the payload for what works in a sandbox over the same image that it has not run in."""
        for spec in {repr(sandbox.spec): sandbox.spec for sandbox in self._open_sandboxes}.values():
            clean = await self.start_clean_sandbox(spec)
            try:
                await (clean.shell() if error.tool == "shell" else clean.python())
            except SandboxError:
                continue
            finally:
                await clean.close()
            return SandboxError.from_evidence(Evidence.PAYLOAD_BROKE_SANDBOX, error.what)
        return error

    def begin_close(self) -> asyncio.Task[None]:
        if self._close_task is None:
            self._close_task = start_eagerly(self._close(), name="sandboxes-close")
        return self._close_task

    async def close(self) -> None:
        """Stop what is starting, close what is open. Failures are logged: they must not cost the record. Idempotent."""
        await self.begin_close()

    async def _close(self) -> None:
        for task in tuple(self._starts):
            task.cancel()
        if self._starts:  # what is open need not wait for what is only starting
            await asyncio.gather(self._close_open(), *self._starts, return_exceptions=True)
        await self._close_open()

    async def _close_open(self) -> None:
        sandboxes, self._open_sandboxes = self._open_sandboxes, []
        kept, self._contexts = self._contexts, []
        if not sandboxes and not kept:
            return
        leaving = [resource.__aexit__(None, None, None) for resource in kept]
        closing = [sandbox.close() for sandbox in sandboxes]
        results = await asyncio.gather(*closing, *leaving, return_exceptions=True)
        names = [*(f"sandbox {sandbox.id}" for sandbox in sandboxes), *(type(resource).__name__ for resource in kept)]
        for name, result in zip(names, results, strict=True):
            if isinstance(result, Exception):
                _LOG.error("%s could not be closed", name, exc_info=result)

    def _spawn_start(self, work: Coroutine[Any, Any, ResourceT], name: str) -> asyncio.Task[ResourceT]:
        if self._close_task is not None:
            work.close()
            raise RuntimeError("the rollout has ended: nothing may be started for it")
        task = asyncio.create_task(work, name=name)
        self._starts.add(task)
        task.add_done_callback(self._starts.discard)
        task.add_done_callback(_failed)  # retrieves the exception: its waiter may be cancelled
        return task

    async def _start_sandbox(
        self, spec: SandboxSpec, on_started: Callable[[SandboxSpec], None] | None = None
    ) -> Sandbox:
        self._host_memory = self._host_memory or MemoryPressure.read()
        sandbox = await self._backend.start_sandbox(spec)
        self._open_sandboxes.append(sandbox)
        if on_started is not None:
            on_started(spec)
        return sandbox

    async def _enter_context(self, resource: AbstractAsyncContextManager[ResourceT]) -> ResourceT:
        entered = await resource.__aenter__()
        self._contexts.append(resource)
        return entered


async def _await_start(starting: asyncio.Task[ResourceT]) -> ResourceT:
    """Wait for a start; cancel it when the wait is cancelled."""
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.cancel()
        raise


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().splitlines()
    except OSError:
        return []
