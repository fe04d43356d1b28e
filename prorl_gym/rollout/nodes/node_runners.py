"""The head's runner: hands attempts to the runners of joined nodes, and their events to the service.

Only the lease decides that a node is lost: without an exchange for ``lease_seconds`` (or when it leaves), every attempt
that it runs ends as ``failed(node_lost)``, which the service retries. What it sends after that ends nothing.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from uuid import uuid4

from pydantic import Field

from prorl_gym import __version__
from prorl_gym.client.wire_models import Capacity, NodesStatus, NodeStatus
from prorl_gym.config import ConfigModel
from prorl_gym.errors import CancelReason, ConflictError, FailureKind, ShuttingDownError
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.balance.members import ChangeSignal
from prorl_gym.records import Outcome, Rollout, RolloutRequest
from prorl_gym.rollout.nodes import wire
from prorl_gym.rollout.nodes.remote_pool import RemoteCalls
from prorl_gym.rollout.nodes.wire import Inbox, Outbox
from prorl_gym.rollout.protocol import (
    AttemptMoved,
    AttemptPosition,
    Finished,
    Job,
    ParkingChanged,
    RunnerEvent,
    StageEntered,
    TurnEnded,
    group_key,
)
from prorl_gym.rollout.scheduling.attempt import terminal_record

_LOG = logging.getLogger(__name__)


class NodesConfig(ConfigModel):
    """Attempts run on nodes (``prorl-gym node``), none in the service's own process."""

    lease_seconds: float = Field(default=30.0, ge=0.5, le=300)
    """A node is lost when it sends nothing for this long, and then ends itself. After a restart of the service, nodes
    have this long to join again with the attempts that they run."""


_IMAGE_KEYS = ("image", "docker_image", "image_name")
"""Columns of a row that may name its image."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as placement sees it."""

    name: str
    free: int
    """Free job slots."""
    queued: int = 0
    """Attempts there that cannot begin INIT yet."""
    images: AbstractSet[str] = frozenset()
    """References of the images it holds."""
    groups: AbstractSet[str] = frozenset()
    """Groups (``group_key``) of the attempts that it runs."""


def choose_node(nodes: Iterable[NodeView], request: RolloutRequest) -> str | None:
    """Return the name of the node for an attempt; ``None``: none has a job slot.

    A group stays on one node while that node has a job slot, since its members start the same sandbox. Otherwise nodes
    that can begin INIT at once go before those with a queue, nodes that hold the task's image before those that would
    fetch it, and the node with the most free job slots wins.
    """
    group, image = group_key(request), image_of(request)

    def rank(node: NodeView) -> tuple[bool, bool, bool, int, str]:
        return (
            not group or group not in node.groups,
            node.queued > 0,
            image is not None and image not in node.images,
            -node.free,
            node.name,
        )

    chosen = min((node for node in nodes if node.free), key=rank, default=None)
    return None if chosen is None else chosen.name


def image_of(request: RolloutRequest) -> str | None:
    """Return the image that the task's row names, if it does."""
    return next((str(request.task[key]) for key in _IMAGE_KEYS if request.task.get(key)), None)


@dataclass(slots=True, eq=False)
class _Assignment:
    """An attempt that a node runs."""

    job: Job
    """Without its task, which the node has."""
    image: str | None
    position: AttemptPosition
    cancel_reason: CancelReason | None = None
    """Why it was cancelled, if it was."""


@dataclass(slots=True, eq=False)
class _Node:
    """A joined node: one incarnation under one name."""

    name: str
    incarnation: str
    slots: int
    init_slots: int
    last_seen: float
    """By the event loop's clock."""
    outbox: Outbox = field(default_factory=Outbox)
    inbox: Inbox[wire.UpMessage] = field(default_factory=Inbox[wire.UpMessage])
    assignments: dict[str, _Assignment] = field(default_factory=dict[str, _Assignment])
    """By rollout."""
    groups: Counter[str] = field(default_factory=Counter[str])
    """Attempts by group."""
    stages: Counter[str] = field(default_factory=Counter[str])
    """Attempts that are not parked, by stage."""
    working: int = 0
    """Attempts that are not parked."""
    images: set[str] = field(default_factory=set[str])
    """Images that attempts there have started sandboxes from."""
    is_draining: bool = False
    is_over: bool = False
    """It was lost or has left."""
    calls: RemoteCalls = field(init=False)

    def assign(self, assignment: _Assignment) -> None:
        self.assignments[assignment.job.request.rollout_id] = assignment
        self._count(assignment, 1)
        if group := group_key(assignment.job.request):
            self.groups[group] += 1

    def unassign(self, rollout_id: str) -> None:
        assignment = self.assignments.pop(rollout_id)
        self._count(assignment, -1)
        if group := group_key(assignment.job.request):
            self.groups[group] -= 1
            if not self.groups[group]:
                del self.groups[group]

    def move(self, assignment: _Assignment, event: AttemptMoved) -> None:
        self._count(assignment, -1)
        if isinstance(event, ParkingChanged):
            assignment.position.is_parked = event.is_parked
        else:
            assignment.position.enter_stage(event.stage, event.at)
            if event.stage == "run" and assignment.image is not None:
                self.images.add(assignment.image)
        self._count(assignment, 1)

    @property
    def free(self) -> int:
        """Attempts that it would accept now."""
        return 0 if self.is_draining else max(0, self.slots - self.working)

    @property
    def queued(self) -> int:
        """Attempts that cannot begin INIT yet; those on their way to it count."""
        stages = self.stages
        return max(0, self.working - max(self.init_slots, stages["init"]) - stages["run"] - stages["eval"])

    @property
    def parked(self) -> int:
        return len(self.assignments) - self.working

    def _count(self, assignment: _Assignment, change: int) -> None:
        if not assignment.position.is_parked:
            self.stages[assignment.position.stage] += change
            self.working += change


class NodeRunners:
    """Implements ``Runner`` over nodes, and answers their requests. On the event loop on which it is made.

    ``pools`` serve the model calls of nodes, by name; ``require_environment`` raises a ``TaskError`` for one that the
    service does not offer; ``claim_attempt`` is that of ``RolloutService``.
    """

    def __init__(
        self,
        config: NodesConfig,
        pools: Mapping[str, EnginePool],
        require_environment: Callable[[str], object],
        claim_attempt: Callable[[str, int], bool],
    ) -> None:
        self.epoch = uuid4().hex
        """Names this head's process."""
        self._config = config
        self._pools = pools
        self._require_environment = require_environment
        self._claim_attempt = claim_attempt
        self._nodes: dict[str, _Node] = {}
        self._node_of: dict[str, _Node] = {}
        """Node that runs an attempt at this rollout."""
        self._unsettled: dict[tuple[str, int], _Node] = {}
        """Node that waits until the end of this attempt is in the ledger."""
        self._events: asyncio.Queue[RunnerEvent | None] = asyncio.Queue()
        self._events_ended = False
        self._changes = ChangeSignal()
        """A job slot or a node became free, or an attempt ended."""
        self._is_draining = False
        self._is_released = False
        self._joined = 0
        self._lost = 0
        self._tasks: set[asyncio.Task[None]] = set()

    # --- the service --------------------------------------------------------------------------------------------

    def require_environment(self, environment: str) -> None:
        self._require_environment(environment)

    async def accept(self, job: Job) -> None:
        """See ``Runner.accept``. Raises ``ConflictError``: another attempt at this rollout is running."""
        await self._changes.wait_for(lambda: self._is_draining or any(node.free for node in self._nodes.values()))
        if self._is_draining:
            raise ShuttingDownError("The runner is draining and takes no more work.", "Submit to another service.")
        rollout_id = job.request.rollout_id
        if rollout_id in self._node_of:
            raise ConflictError(f"rollout {rollout_id} is already running.")
        views = [
            NodeView(node.name, node.free, node.queued, node.images, node.groups.keys())
            for node in self._nodes.values()
            if node.free
        ]
        name = choose_node(views, job.request)
        assert name is not None, "it waited for a free node, and nothing has run since"
        node = self._node_of[rollout_id] = self._nodes[name]
        node.assign(_Assignment(without_task(job), image_of(job.request), AttemptPosition(job.attempt)))
        node.outbox.send(wire.JobSent.of(job))

    async def events(self) -> AsyncIterator[RunnerEvent]:
        while (event := await self._events.get()) is not None:
            yield event

    async def cancel(self, rollout_ids: Sequence[str], reason: CancelReason) -> None:
        for node, ids in self._by_node(rollout_ids):
            for rollout_id in ids:
                assignment = node.assignments[rollout_id]
                assignment.cancel_reason = assignment.cancel_reason or reason
            node.outbox.send(wire.CancelSent(rollouts=ids, reason=reason))

    async def park(self, rollout_ids: Sequence[str]) -> None:
        for node, ids in self._by_node(() if self._is_draining else rollout_ids):
            node.outbox.send(wire.ParkSent(rollouts=ids, park=True))

    async def unpark(self, rollout_ids: Sequence[str]) -> None:
        for node, ids in self._by_node(rollout_ids):
            node.outbox.send(wire.ParkSent(rollouts=ids, park=False))

    async def capacity(self) -> Capacity:
        nodes = self._nodes.values()
        stages = sum((node.stages for node in nodes), Counter[str]())
        return Capacity(
            queued=sum(node.queued for node in nodes),
            init=stages["init"],
            run=stages["run"],
            eval=stages["eval"],
            parked=sum(node.parked for node in nodes),
            free=0 if self._is_draining else sum(node.free for node in nodes),
        )

    async def drain(self) -> None:
        self._is_draining = True
        self._changes.notify_all()
        await self.unpark(tuple(self._node_of))
        await self._changes.wait_for(lambda: not self._node_of)
        if not self._events_ended:
            self._events_ended = True
            self._events.put_nowait(None)

    async def close(self) -> None:
        """See ``Runner.close``. Does not wait for the nodes: the answers to their next requests stop them."""
        self._is_draining = True
        await self.cancel(tuple(self._node_of), CancelReason.SHUTDOWN)
        for rollout_id, node in tuple(self._node_of.items()):
            self._end(node, rollout_id, "The service stops.")
        await self.drain()

    def on_settled(self, rollout: Rollout) -> None:
        """Let the node drop the record of an attempt whose end is in the ledger."""
        node = self._unsettled.pop((rollout.rollout_id, rollout.attempt), None)
        if node is not None:
            node.outbox.send(wire.Settled(rollout_id=rollout.rollout_id, attempt=rollout.attempt))

    def status(self) -> NodesStatus:
        now = asyncio.get_running_loop().time()
        return NodesStatus(
            joined=self._joined,
            lost=self._lost,
            nodes=tuple(
                NodeStatus(
                    name=node.name,
                    slots=node.slots,
                    in_hand=len(node.assignments),
                    parked=node.parked,
                    calls=node.calls.count,
                    draining=node.is_draining,
                    silent_seconds=round(now - node.last_seen, 3),
                )
                for node in self._nodes.values()
            ),
        )

    async def release(self) -> None:
        """Refuse nodes from now on: answer their requests at once, and withdraw their model calls. After ``drain``."""
        self._is_released = True
        for node in self._nodes.values():
            node.is_over = True
            node.outbox.not_empty.set()
        calls = [node.calls.close() for node in self._nodes.values()]
        self._nodes.clear()
        await asyncio.gather(*calls, *self._tasks)

    # --- the nodes ----------------------------------------------------------------------------------------------

    def join(self, name: str, body: wire.JoinBody) -> wire.JoinResponse:
        """Let a node join; adopt its attempts that are still open. Raises ``ConflictError``: another release."""
        if self._is_released:
            raise ShuttingDownError("The service has stopped.", "Join again when it is back.")
        if body.release != __version__:
            raise ConflictError(
                f"node {name} runs prorl-gym {body.release}, this service {__version__}.", "Install the same release."
            )
        loop = asyncio.get_running_loop()
        node = self._nodes.get(name)
        if node is not None and node.incarnation != body.incarnation:
            self._lose(node, "another process joined under its name")
            node = None
        if node is None:  # otherwise the answer to its first request was lost
            node = self._nodes[name] = _Node(name, body.incarnation, body.slots, body.init_slots, loop.time())
            node.calls = RemoteCalls(self._pools, node.outbox.send)
            self._joined += 1
            loop.call_later(self._config.lease_seconds, self._check_lease, node)
        node.last_seen = loop.time()
        in_hand = [held.to_job() for held in body.in_hand]
        over = [job.request.rollout_id for job in in_hand if not self._adopt(node, job)]
        adopted = len(node.assignments)
        _LOG.info("node %s joined: %d slots, %d running attempts adopted", name, node.slots, adopted)
        self._changes.notify_all()
        return wire.JoinResponse(
            epoch=self.epoch,
            cancelled=tuple(over),
            max_model_lens={pool: one.max_model_len for pool, one in self._pools.items()},
        )

    async def exchange(self, name: str, body: wire.ExchangeBody) -> str:
        """Process the messages of a node; return the answer (``ExchangeAnswer``) as JSON."""
        node = self._nodes.get(name)
        if node is None or body.epoch != self.epoch or node.incarnation != body.incarnation:
            return wire.MUST_JOIN
        node.last_seen = asyncio.get_running_loop().time()
        node.outbox.acknowledge(body.acknowledged)
        for message in node.inbox.accept(body.first, body.messages):
            self._handle(node, message)
        first, texts = 1, list[str]()
        if body.hold_seconds:
            try:
                async with asyncio.timeout(body.hold_seconds):
                    await node.outbox.not_empty.wait()
            except TimeoutError:
                pass
            first, texts = node.outbox.page()
        page = wire.ExchangeAnswer(must_join=node.is_over, acknowledged=node.inbox.acknowledged, first=first)
        return wire.encode_page(page, texts)

    def leave(self, name: str, body: wire.LeaveBody) -> None:
        """Let a node leave: what it runs is lost. Unknown ones are ignored."""
        node = self._nodes.get(name)
        if node is not None and node.incarnation == body.incarnation:
            self._lose(node, "it left")

    def _adopt(self, node: _Node, job: Job) -> bool:
        """Whether the node continues an attempt."""
        rollout_id = job.request.rollout_id
        known = node.assignments.get(rollout_id)
        if known is not None:
            return known.job.attempt == job.attempt
        if self._is_draining or rollout_id in self._node_of or not self._claim_attempt(rollout_id, job.attempt):
            return False
        self._node_of[rollout_id] = node
        node.assign(_Assignment(job, None, AttemptPosition(job.attempt)))
        return True

    def _handle(self, node: _Node, message: wire.UpMessage) -> None:
        match message:
            case wire.AttemptFinished():
                self._on_finished(node, message)
            case StageEntered() | ParkingChanged():
                assignment = node.assignments.get(message.rollout_id)
                if assignment is not None and assignment.job.attempt == message.attempt:
                    node.move(assignment, message)
                    self._events.put_nowait(message)
                    if isinstance(message, ParkingChanged):
                        self._changes.notify_all()
            case TurnEnded():
                self._events.put_nowait(message)
            case wire.NodeDraining():
                _LOG.info("node %s drains: %d running attempts", node.name, len(node.assignments))
                node.is_draining = True
            case _:
                node.calls.handle(message)

    def _on_finished(self, node: _Node, message: wire.AttemptFinished) -> None:
        assignment = node.assignments.get(message.rollout_id)
        if (message.rollout_id, message.attempt) in self._unsettled:
            return
        if assignment is None or assignment.job.attempt != message.attempt:  # this attempt was over before
            node.outbox.send(wire.Settled(rollout_id=message.rollout_id, attempt=message.attempt))
            return
        try:
            record = Rollout.model_validate_json(message.record)
            if (record.rollout_id, record.attempt) != (message.rollout_id, message.attempt):
                raise ValueError(f"it is the record of attempt {record.attempt} of {record.rollout_id}")
        except ValueError as error:  # nothing accepted is lost, whatever its node writes
            _LOG.error("node %s: the record of %s cannot be used: %s", node.name, message.rollout_id, error)
            what = f"node {node.name} wrote a record that cannot be read ({type(error).__name__})."
            stage = assignment.position.stage
            outcome = Outcome(status="failed", kind=FailureKind.INTERNAL, stage=stage, message=what)
            record = terminal_record(assignment.job, outcome)
        self._unsettled[message.rollout_id, message.attempt] = node
        self._forget(node, message.rollout_id)
        self._events.put_nowait(Finished(rollout=record))

    def _end(self, node: _Node, rollout_id: str, message: str) -> None:
        """End an attempt that its node does not end: as cancelled, if it was, and otherwise as lost."""
        assignment = node.assignments[rollout_id]
        stage, reason = assignment.position.stage, assignment.cancel_reason
        outcome = (
            Outcome(status="failed", kind=FailureKind.NODE_LOST, stage=stage, message=message)
            if reason is None
            else Outcome(status="cancelled", reason=reason, stage=stage)
        )
        self._forget(node, rollout_id)
        self._events.put_nowait(Finished(rollout=terminal_record(assignment.job, outcome)))

    def _forget(self, node: _Node, rollout_id: str) -> None:
        node.unassign(rollout_id)
        del self._node_of[rollout_id]
        self._changes.notify_all()

    def _check_lease(self, node: _Node) -> None:
        loop = asyncio.get_running_loop()
        left = node.last_seen + self._config.lease_seconds - loop.time()
        if self._nodes.get(node.name) is node:
            if left > 0:
                loop.call_later(left, self._check_lease, node)
            else:
                self._lose(node, f"it sent nothing for {self._config.lease_seconds:g} s")

    def _lose(self, node: _Node, reason: str) -> None:
        """End every attempt that a node runs, withdraw its model calls, and forget it."""
        in_hand = list(node.assignments)
        self._lost += reason != "it left" or bool(in_hand)
        _LOG.log(
            logging.WARNING if in_hand else logging.INFO,
            "node %s is gone (%s), with %d running attempts",
            *(node.name, reason, len(in_hand)),
        )
        del self._nodes[node.name]
        node.is_over = True
        node.outbox.not_empty.set()  # answers the request that is held
        message = f"Node {node.name} is gone: {reason}."
        for rollout_id in in_hand:
            self._end(node, rollout_id, message)
        closing = asyncio.create_task(node.calls.close())
        self._tasks.add(closing)
        closing.add_done_callback(self._tasks.discard)

    def _by_node(self, rollout_ids: Iterable[str]) -> list[tuple[_Node, tuple[str, ...]]]:
        chosen: dict[str, list[str]] = {}
        for rollout_id in rollout_ids:
            if (node := self._node_of.get(rollout_id)) is not None:
                chosen.setdefault(node.name, []).append(rollout_id)
        return [(self._nodes[name], tuple(ids)) for name, ids in chosen.items()]


def without_task(job: Job) -> Job:
    """Return a job without its task and earlier turns: enough for a record, and nothing to run."""
    return job.model_copy(update={"request": job.request.model_copy(update={"task": {}}), "turns": ()})
