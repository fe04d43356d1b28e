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


def _spec_key(spec: SandboxSpec) -> Hashable:
    """Return a key that is equal for two specs exactly when one sandbox can serve either."""
    return (
        spec.image,
        spec.workdir,
        tuple(sorted(spec.env.items())),
        spec.mounts,
        spec.limits,
        spec.network,
        spec.egress,
        spec.python_tool,
    )


@dataclass(slots=True)
class _WarmBucket:
    """The warm sandboxes of one spec."""

    spec: SandboxSpec
    target: int
    last_requested: float
    """When a sandbox of this spec was last requested; seconds of a monotonic clock."""
    sandboxes: deque[Sandbox] = field(default_factory=deque[Sandbox])
    starting: int = 0
    """Sandboxes that are being started for this bucket."""

    @property
    def size(self) -> int:
        """Sandboxes that count against the bounds."""
        return len(self.sandboxes) + self.starting

    def pop_all(self) -> list[Sandbox]:
        """Empty the bucket, from which ``start_sandbox`` may still be popping; return what was in it."""
        boxes = list(self.sandboxes)
        self.sandboxes.clear()
        return boxes


class _WarmIndex:
    """Which warm sandboxes to hold: pure bookkeeping, which starts and closes nothing.

    A bucket holds the sandboxes of one spec. Its target grows by one with each request that finds it empty, up to
    ``per_spec``. A bucket without a request for a while is removed. All buckets share ``max_total``: at that size, the
    spec that was requested last evicts from the bucket whose last request is oldest.

    Args:
        per_spec: most warm sandboxes of one spec.
        max_total: most warm sandboxes of all specs together.
    """

    def __init__(self, per_spec: int, max_total: int) -> None:
        self._per_spec = min(per_spec, max_total)
        self._max_total = max_total
        self._buckets: OrderedDict[Hashable, _WarmBucket] = OrderedDict()

    @property
    def size(self) -> int:
        """Warm sandboxes, ready or being started."""
        return sum(bucket.size for bucket in self._buckets.values())

    @property
    def ready_count(self) -> int:
        """Warm sandboxes that could be handed out now."""
        return sum(len(bucket.sandboxes) for bucket in self._buckets.values())

    @property
    def starting_count(self) -> int:
        """Warm sandboxes that are being started."""
        return sum(bucket.starting for bucket in self._buckets.values())

    def record_request(self, spec: SandboxSpec, now: float) -> _WarmBucket:
        """Record a request at time ``now``; return the bucket of its spec, made when missing."""
        key = _spec_key(spec)
        bucket = self._buckets.setdefault(key, _WarmBucket(spec, 0, now))
        bucket.last_requested = now
        self._buckets.move_to_end(key)
        if not bucket.sandboxes:
            bucket.target = min(self._per_spec, max(bucket.target, bucket.size) + 1)
        return bucket

    def raise_target(self, spec: SandboxSpec, count: int, now: float) -> None:
        """Hold at least ``count`` of a spec, within the bounds, as if they had been requested."""
        bucket = self.record_request(spec, now)
        bucket.target = min(self._per_spec, max(bucket.target, count))

    def next_to_fill(self) -> _WarmBucket | None:
        """Return the bucket to start a sandbox for: the latest requested below its target, if the bounds allow it."""
        for bucket in reversed(self._buckets.values()):
            if bucket.size < bucket.target:
                return bucket if self.size < self._max_total or self._least_recent_ready(bucket) else None
        return None

    def pop_evicted(self, bucket: _WarmBucket) -> Sandbox | None:
        """Return a sandbox to close, from the least recently requested bucket, so that ``bucket`` can get one more."""
        other = self._least_recent_ready(bucket) if self.size >= self._max_total else None
        if other is None:
            return None
        other.target = other.size - 1  # the next request of its spec raises it again
        return other.sandboxes.popleft()

    def expire(self, before: float) -> list[Sandbox]:
        """Remove the buckets that were last requested before a time; return their sandboxes."""
        old = [key for key, bucket in self._buckets.items() if bucket.last_requested < before and not bucket.starting]
        return [box for key in old for box in self._buckets.pop(key).pop_all()]

    def clear(self) -> list[Sandbox]:
        """Remove all buckets; return their sandboxes."""
        boxes = [box for bucket in self._buckets.values() for box in bucket.pop_all()]
        self._buckets.clear()
        return boxes

    def _least_recent_ready(self, bucket: _WarmBucket) -> _WarmBucket | None:
        """Return the least recently requested bucket that has a ready sandbox, if ``bucket`` was requested later."""
        oldest = next((other for other in self._buckets.values() if other.sandboxes), None)
        return oldest if oldest is not None and oldest.last_requested < bucket.last_requested else None


class WarmPool:
    """A ``SandboxBackend`` that hands out sandboxes of another one, warm where it has them.

    Args:
        backend: starts them; closed with the pool.
        per_spec: most warm sandboxes of one spec.
        memory: most bytes for all of them, at ``MEMORY_PER_SANDBOX``.
        idle_seconds: warm sandboxes of a spec without a request for so long are closed.
        warm_up: called with a sandbox before it is put into its bucket; may start its shell.
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
        self._backend = backend
        self._index = _WarmIndex(per_spec, max(1, memory // MEMORY_PER_SANDBOX))
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
    def name(self) -> str:
        """The name of the backend below."""
        return self._backend.name

    @property
    def sandbox_count(self) -> int:
        """How many sandboxes there are, warm ones included; 0 where the backend does not count."""
        return sandbox_count_of(self._backend) or 0

    @property
    def backend(self) -> SandboxBackend:
        """The backend below."""
        return self._backend

    @property
    def ready_count(self) -> int:
        """Warm sandboxes that could be handed out now."""
        return self._index.ready_count

    async def probe(self) -> ProbeResult:
        """Probe the backend below."""
        return await self._backend.probe()

    async def start_sandbox(self, spec: SandboxSpec) -> Sandbox:
        """Return an unused sandbox: a warm one that still lives, at once, else a new one.

        Raises:
            SandboxError: as the backend below.
        """
        if self._closed:
            raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, f"the {self.name} sandbox pool is closed.")
        bucket = self._index.record_request(spec, self._loop.time())
        try:
            while bucket.sandboxes:
                box = bucket.sandboxes.popleft()
                if not box.is_gone:
                    self.hits += 1
                    return box
                self._run_in_background(box.close())
            self.misses += 1
            return await self._backend.start_sandbox(spec)
        finally:
            self._refill()

    def prewarm(self, spec: SandboxSpec, count: int = 1) -> None:
        """Start sandboxes of a spec that will be requested soon, in the background.

        Args:
            spec: what they are started from.
            count: how many, within the pool's bounds.
        """
        self._index.raise_target(spec, count, self._loop.time())
        self._refill()

    async def wait_idle(self) -> None:
        """Wait until nothing is being started or closed in the background."""
        while self._background_tasks:
            await asyncio.wait(set(self._background_tasks))

    async def close(self) -> None:
        """Close all warm sandboxes and the backend below. Idempotent."""
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
            for box in self._index.clear():
                group.create_task(box.close())
        await self._backend.close()

    def _refill(self) -> None:
        """Start what the buckets lack, a few at a time."""
        while not self._closed and self._index.starting_count < _MAX_CONCURRENT_STARTS:
            bucket = self._index.next_to_fill()
            if bucket is None:
                break
            evicted = self._index.pop_evicted(bucket)
            if evicted is not None:
                self._run_in_background(evicted.close())
            bucket.starting += 1
            self._run_in_background(self._warm_one(bucket))
        if self._expiry is None and self._index.size and not self._closed:
            self._expiry = self._loop.call_later(self._idle_seconds, self._expire)

    async def _warm_one(self, bucket: _WarmBucket) -> None:
        """Start one sandbox and put it into its bucket."""
        try:
            box = await self._backend.start_sandbox(bucket.spec)
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
        for box in self._index.expire(self._loop.time() - self._idle_seconds):
            self._run_in_background(box.close())
        self._refill()

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the pool's log context; ``close`` cancels it and waits for it."""
        task = self._loop.create_task(work, context=self._context.copy())
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)
