"""Warm sandboxes: started before they are requested, handed out once, never reused.

A sandbox that ran a payload is closed, and another is started in the background. The pool knows the specs that were
requested or prewarmed.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

from prorl_gym.errors import FailureKind, RolloutError, SandboxError
from prorl_gym.sandbox.cancellation import run_shielded
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import ProbeResult, Sandbox, SandboxBackend, SandboxSpec, sandbox_count_of

log = logging.getLogger(__name__)

MEMORY_PER_SANDBOX = 16 << 20
"""Bytes of memory charged for a warm sandbox: an idle one has 6 to 16 MB, its shell included."""

_MAX_CONCURRENT_STARTS = 2


def with_warm_pool(backend: SandboxBackend, config: SandboxConfig) -> SandboxBackend:
    """Return the backend with a pool before it, as configured. Closing the pool closes the backend."""
    if config.warm == 0:
        return backend
    warm_up = _open_shell if config.warm_shell else None
    return WarmPool(backend, per_spec=config.warm, memory=config.warm_memory, warm_up=warm_up)


async def _open_shell(box: Sandbox) -> None:
    """Start the shell. An image without bash fails at the first request for one."""
    try:
        await box.shell()
    except SandboxError as error:
        if error.kind is not FailureKind.IMAGE_BROKEN:
            raise


@dataclass(slots=True)
class _WarmBucket:
    """The warm sandboxes of one spec."""

    spec: SandboxSpec
    target: int = 0
    last_requested: float = 0.0
    """When a sandbox of this spec was last requested; seconds of a monotonic clock."""
    sandboxes: deque[Sandbox] = field(default_factory=deque[Sandbox])
    starting: int = 0
    """Sandboxes that are being started for this bucket."""

    @property
    def size(self) -> int:
        return len(self.sandboxes) + self.starting

    def pop_all(self) -> list[Sandbox]:
        """Empty the bucket, from which ``start_sandbox`` may still be popping; return what was in it."""
        boxes = list(self.sandboxes)
        self.sandboxes.clear()
        return boxes


class WarmPool:
    """A ``SandboxBackend`` that hands out sandboxes of another one, warm where it has them; closes it.

    ``per_spec`` sandboxes of one spec are kept warm, and ``memory`` bytes for all of them, at ``MEMORY_PER_SANDBOX``.
    Those of a spec without a request for ``idle_seconds`` are closed. ``warm_up`` is called with a sandbox before it is
    put into its bucket; it may start its shell.

    The target of a bucket grows by one with each request that finds it empty. Once there is memory for no more, the
    spec that was requested last evicts from the bucket whose last request is oldest.
    """

    def __init__(
        self,
        backend: SandboxBackend,
        *,
        per_spec: int,
        memory: int = 1 << 30,
        idle_seconds: float = 900.0,
        warm_up: Callable[[Sandbox], Awaitable[object]] | None = None,
    ) -> None:
        self.name = backend.name
        self.backend = backend
        self._max_total = max(1, memory // MEMORY_PER_SANDBOX)
        self._per_spec = min(per_spec, self._max_total)
        self._buckets: OrderedDict[Hashable, _WarmBucket] = OrderedDict()
        self._idle_seconds = idle_seconds
        self._warm_up = warm_up
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        self._background_tasks: set[asyncio.Task[None]] = set()
        self._expiry: asyncio.TimerHandle | None = None
        self._closed = False
        self.hits = 0
        """Starts that were served from a bucket."""
        self.misses = 0
        """Starts that had to wait for a new sandbox."""

    @property
    def sandbox_count(self) -> int:
        """Number of sandboxes, including warm ones; 0 where the backend does not count."""
        return sandbox_count_of(self.backend) or 0

    @property
    def ready_count(self) -> int:
        """Warm sandboxes that could be handed out now."""
        return sum(len(bucket.sandboxes) for bucket in self._buckets.values())

    @property
    def _size(self) -> int:
        """Warm sandboxes, ready or being started."""
        return sum(bucket.size for bucket in self._buckets.values())

    async def probe(self) -> ProbeResult:
        return await self.backend.probe()

    async def start_sandbox(self, spec: SandboxSpec) -> Sandbox:
        """Return an unused sandbox: a warm one that still lives, at once, else a new one."""
        if self._closed:
            raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, f"the {self.name} sandbox pool is closed.")
        bucket = self._record_request(spec)
        try:
            while bucket.sandboxes:
                box = bucket.sandboxes.popleft()
                if not box.is_gone:
                    self.hits += 1
                    return box
                self._run_in_background(box.close())
            self.misses += 1
            return await self.backend.start_sandbox(spec)
        finally:
            self._refill()

    def prewarm(self, spec: SandboxSpec, count: int = 1) -> None:
        """Start ``count`` sandboxes of a spec, within the pool's bounds, in the background."""
        bucket = self._record_request(spec)
        bucket.target = min(self._per_spec, max(bucket.target, count))
        self._refill()

    async def wait_idle(self) -> None:
        """Wait until nothing is being started or closed in the background."""
        while self._background_tasks:
            await asyncio.wait(set(self._background_tasks))

    async def close(self) -> None:
        self._closed = True
        await run_shielded(self._close())

    async def _close(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        for task in self._background_tasks:
            task.cancel()
        if self._background_tasks:
            await asyncio.wait(set(self._background_tasks))
        async with asyncio.TaskGroup() as group:
            for bucket in self._buckets.values():
                for box in bucket.pop_all():
                    group.create_task(box.close())
        await self.backend.close()

    def _record_request(self, spec: SandboxSpec) -> _WarmBucket:
        """Record a request; return the bucket of its spec, made when missing."""
        env = tuple(sorted(spec.env.items()))  # equal for two specs exactly when one sandbox can serve either
        key = (spec.image, spec.workdir, env, spec.mounts, spec.limits, spec.network, spec.egress, spec.python_tool)
        bucket = self._buckets.setdefault(key, _WarmBucket(spec))
        bucket.last_requested = self._loop.time()
        self._buckets.move_to_end(key)
        if not bucket.sandboxes:
            bucket.target = min(self._per_spec, max(bucket.target, bucket.size) + 1)
        return bucket

    def _refill(self) -> None:
        """Start sandboxes for buckets below their targets, the latest requested first, a few at a time."""
        while not self._closed and sum(one.starting for one in self._buckets.values()) < _MAX_CONCURRENT_STARTS:
            bucket = next((one for one in reversed(self._buckets.values()) if one.size < one.target), None)
            if bucket is None or (self._size >= self._max_total and not self._evict_for(bucket)):
                break
            bucket.starting += 1
            self._run_in_background(self._warm_one(bucket))
        if self._expiry is None and self._size and not self._closed:
            self._expiry = self._loop.call_later(self._idle_seconds, self._expire)

    def _evict_for(self, bucket: _WarmBucket) -> bool:
        """Close a sandbox of the least recently requested bucket that has one, if ``bucket`` was requested later."""
        oldest = next((other for other in self._buckets.values() if other.sandboxes), None)
        if oldest is None or oldest.last_requested >= bucket.last_requested:
            return False
        oldest.target = oldest.size - 1  # the next request of its spec raises it again
        self._run_in_background(oldest.sandboxes.popleft().close())
        return True

    async def _warm_one(self, bucket: _WarmBucket) -> None:
        try:
            box = await self.backend.start_sandbox(bucket.spec)
            try:
                if self._warm_up is not None:
                    await self._warm_up(box)
            except BaseException:
                await box.close()
                raise
            bucket.sandboxes.append(box)
        except (RolloutError, OSError) as error:
            bucket.target = 0  # the next request tries again, and raises the error
            log.warning("a warm sandbox over %s could not be started: %s", bucket.spec.image, error)
        finally:
            bucket.starting -= 1
            self._refill()

    def _expire(self) -> None:
        self._expiry = None
        before = self._loop.time() - self._idle_seconds
        old = [key for key, bucket in self._buckets.items() if bucket.last_requested < before and not bucket.starting]
        for box in [box for key in old for box in self._buckets.pop(key).pop_all()]:
            self._run_in_background(box.close())
        self._refill()

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the pool's log context; ``close`` cancels it and waits for it."""
        task = self._loop.create_task(work, context=self._context.copy())
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)
