"""Simulated nodes: real runners in processes of their own, and the head's runner over them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from prorl_gym.client.wire_models import Capacity
from prorl_gym.errors import CancelReason, EngineError, FailureKind, ShuttingDownError
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult
from prorl_gym.records import Outcome
from prorl_gym.rollout.nodes.placement import NodeView, choose_node, group_key
from prorl_gym.rollout.protocol import Finished, Job, RunnerEvent
from prorl_gym.rollout.scheduling.attempt import terminal_record
from prorl_gym.rollout.scheduling.runner import InProcessRunner
from prorl_gym.testing.simulation.network import Network
from prorl_gym.testing.virtual_clock import SimulatedProcess


class RemotePool:
    """Implements ``SessionPool`` on a node: the head's pool makes the calls.

    Args:
        network: between node and head.
        node: the process of the caller.
        head: the process that has the pool.
        pool: the pool.
    """

    def __init__(self, network: Network, node: SimulatedProcess, head: SimulatedProcess, pool: EnginePool) -> None:
        self._network, self._node, self._head, self._pool = network, node, head, pool

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See ``EnginePool.generate``."""
        try:
            return await self._network.request(
                self._node, self._head, lambda: self._pool.generate(request), cancels=True
            )
        except ConnectionError:
            raise EngineError(FailureKind.ENGINE_UNREACHABLE, "the head did not answer.") from None

    async def wait_for_room(self, session_id: str) -> None:
        """See ``EnginePool.wait_for_room``."""
        try:
            await self._network.request(
                self._node, self._head, lambda: self._pool.wait_for_room(session_id), cancels=True
            )
        except ConnectionError:
            raise EngineError(FailureKind.ENGINE_UNREACHABLE, "the head did not answer.") from None

    def release_slot(self, session_id: str) -> None:
        """See ``EnginePool.release_slot``."""
        self._head.call_later(0.001, self._pool.release_slot, session_id)

    def forget_session(self, session_id: str) -> None:
        """See ``EnginePool.forget_session``."""
        self._head.call_later(0.001, self._pool.forget_session, session_id)


@dataclass(slots=True, eq=False)
class Node:
    """A node as the head knows it."""

    process: SimulatedProcess
    runner: InProcessRunner
    slots: int
    """Jobs that it takes at once."""
    jobs: dict[str, Job] = field(default_factory=dict[str, Job])
    view: NodeView | None = None
    """For placement; ``None`` after ``jobs`` changed."""
    heard_at: float = 0.0
    is_lost: bool = False


class SimulatedNodes:
    """Implements ``Runner`` over simulated nodes, with leases.

    Args:
        head: the process of this object.
        lease_seconds: time without a message after which a node is lost.
        on_forgotten: called with the id of each rollout whose attempt a node took with it.
    """

    def __init__(self, head: SimulatedProcess, lease_seconds: float, on_forgotten: Callable[[str], object]) -> None:
        self._head = head
        self._lease_seconds = lease_seconds
        self._on_forgotten = on_forgotten
        self._nodes: dict[str, Node] = {}
        self._events: asyncio.Queue[RunnerEvent | None] = asyncio.Queue()
        self._has_room = asyncio.Event()
        self._idle = asyncio.Event()
        self._is_draining = False

    def join(self, node: Node) -> None:
        """Add a node."""
        node.heard_at = asyncio.get_running_loop().time()
        self._nodes[node.process.name] = node
        node.process.spawn(self._report(node))
        node.process.spawn(self._renew(node))
        self._head.spawn(self._watch(node))
        self._has_room.set()

    def require_environment(self, environment: str) -> None:
        """See ``Runner.require_environment``."""

    async def accept(self, job: Job) -> None:
        """See ``Runner.accept``."""
        while (name := choose_node([_view(node) for node in self._nodes.values()], job.request)) is None:
            self._has_room.clear()
            await self._has_room.wait()
            if self._is_draining:
                raise ShuttingDownError("The runner is draining and takes no more work.")
        node = self._nodes[name]
        node.jobs[job.request.rollout_id], node.view = job, None
        node.process.call_later(0.001, self._start, node, job)

    async def events(self) -> AsyncIterator[RunnerEvent]:
        """See ``Runner.events``."""
        while (event := await self._events.get()) is not None:
            yield event

    async def cancel(self, rollout_ids: Sequence[str], reason: CancelReason) -> None:
        """See ``Runner.cancel``."""
        await self._each(rollout_ids, lambda node, ids: node.runner.cancel(ids, reason))

    async def park(self, rollout_ids: Sequence[str]) -> None:
        """See ``Runner.park``."""
        await self._each(rollout_ids, lambda node, ids: node.runner.park(ids))

    async def unpark(self, rollout_ids: Sequence[str]) -> None:
        """See ``Runner.unpark``."""
        await self._each(rollout_ids, lambda node, ids: node.runner.unpark(ids))

    async def capacity(self) -> Capacity:
        """See ``Runner.capacity``."""
        held = sum(len(node.jobs) for node in self._nodes.values())
        free = sum(max(0, node.slots - len(node.jobs)) for node in self._nodes.values())
        return Capacity(queued=0, init=0, run=held, eval=0, free=0 if self._is_draining else free)

    async def drain(self) -> None:
        """See ``Runner.drain``."""
        self._is_draining = True
        self._has_room.set()
        while any(node.jobs for node in self._nodes.values()):
            self._idle.clear()
            await self._idle.wait()
        self._events.put_nowait(None)

    async def close(self) -> None:
        """See ``Runner.close``."""
        await self.cancel([name for node in self._nodes.values() for name in node.jobs], CancelReason.SHUTDOWN)
        await self.drain()

    async def _each(self, rollout_ids: Sequence[str], act: Callable[[Node, list[str]], object]) -> None:
        for node in self._nodes.values():
            if ids := [name for name in rollout_ids if name in node.jobs]:
                node.process.call_later(0.002, lambda node=node, ids=ids: node.process.spawn(act(node, ids)))  # type: ignore[arg-type]

    # --- on the node ------------------------------------------------------------------------------------------------

    def _start(self, node: Node, job: Job) -> None:
        node.process.spawn(node.runner.accept(job))

    async def _report(self, node: Node) -> None:
        async for event in node.runner.events():
            self._head.call_later(0.001, self._on_event, node, event)

    async def _renew(self, node: Node) -> None:
        while True:
            self._head.call_later(0.001, self._on_heartbeat, node)
            await asyncio.sleep(self._lease_seconds / 3)

    # --- on the head ------------------------------------------------------------------------------------------------

    def _on_event(self, node: Node, event: RunnerEvent) -> None:
        if node.is_lost:
            return
        self._on_heartbeat(node)
        if isinstance(event, Finished):
            job = node.jobs.get(event.rollout.rollout_id)
            if job is None or job.attempt != event.rollout.attempt:
                return
            del node.jobs[event.rollout.rollout_id]
            node.view = None
            self._has_room.set()
            self._idle.set()
        self._events.put_nowait(event)

    def _on_heartbeat(self, node: Node) -> None:
        if not node.is_lost:
            node.heard_at = asyncio.get_running_loop().time()

    async def _watch(self, node: Node) -> None:
        loop = asyncio.get_running_loop()
        while (rest := node.heard_at + self._lease_seconds - loop.time()) > 0:
            await asyncio.sleep(rest)
        node.is_lost = True
        del self._nodes[node.process.name]
        node.process.kill()  # its own lease is over as well
        for job in node.jobs.values():
            self._on_forgotten(job.request.rollout_id)
            lost = Outcome(status="failed", kind=FailureKind.INTERNAL, stage="run", message="the node was lost")
            self._events.put_nowait(Finished(rollout=terminal_record(job, lost)))
        node.jobs.clear()
        self._idle.set()


def _view(node: Node) -> NodeView:
    if node.view is not None:
        return node.view
    used = len(node.jobs)
    groups = {key for job in node.jobs.values() if (key := group_key(job.request)) is not None}
    capacity = Capacity(queued=0, init=0, run=used, eval=0, free=max(0, node.slots - used))
    node.view = NodeView(node.process.name, capacity, groups=groups)
    return node.view
