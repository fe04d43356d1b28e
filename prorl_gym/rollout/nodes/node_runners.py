"""The head's runner: hands attempts to the runners of joined nodes, and their events to the service.

Only the lease decides that a node is lost: without an exchange for ``lease_seconds`` (or when it leaves), every attempt
that it has in hand ends as ``failed(node_lost)``, which the service makes again. What it sends after that ends nothing.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import uuid4

from prorl_gym import __version__
from prorl_gym.client.wire_models import Capacity, NodesStatus, NodeStatus
from prorl_gym.errors import CancelReason, ConflictError, FailureKind, ShuttingDownError
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.balance.members import ChangeSignal
from prorl_gym.records import Outcome, Rollout
from prorl_gym.rollout.ledger.encoding import decode_rollout
from prorl_gym.rollout.nodes.config import NodesConfig
from prorl_gym.rollout.nodes.exchange import Inbox, Outbox
from prorl_gym.rollout.nodes.placement import NodeView, choose_node, group_key, image_of
from prorl_gym.rollout.nodes.remote_calls import RemoteCalls
from prorl_gym.rollout.nodes.wire import (
    MUST_JOIN,
    AttemptFinished,
    CancelSent,
    ExchangeAnswer,
    ExchangeBody,
    JobSent,
    JoinBody,
    JoinResponse,
    LeaveBody,
    NodeDraining,
    ParkSent,
    Settled,
    UpMessage,
    encode_page,
)
from prorl_gym.rollout.protocol import (
    AttemptMoved,
    AttemptPosition,
    Finished,
    Job,
    ParkingChanged,
    RunnerEvent,
    StageEntered,
    TurnEnded,
)
from prorl_gym.rollout.scheduling.attempt import terminal_record

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Assignment:
    """An attempt that a node has in hand."""

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
    """Of the event loop's clock."""
    outbox: Outbox = field(default_factory=Outbox)
    inbox: Inbox[UpMessage] = field(default_factory=Inbox[UpMessage])
    assignments: dict[str, _Assignment] = field(default_factory=dict[str, _Assignment])
    """By rollout."""
    groups: Counter[str] = field(default_factory=Counter[str])
    """Attempts in hand by group."""
    stages: Counter[str] = field(default_factory=Counter[str])
    """Attempts in hand that are not parked, by stage."""
    working: int = 0
    """Attempts in hand that are not parked."""
    images: set[str] = field(default_factory=set[str])
    """Images that attempts there have started sandboxes from."""
    is_draining: bool = False
    is_over: bool = False
    """It was lost or has left."""
    calls: RemoteCalls = field(init=False)

    def assign(self, assignment: _Assignment) -> None:
        """Count an attempt."""
        self.assignments[assignment.job.request.rollout_id] = assignment
        self._count(assignment, 1)
        if (group := group_key(assignment.job.request)) is not None:
            self.groups[group] += 1

    def unassign(self, rollout_id: str) -> None:
        """Uncount an attempt that is over."""
        assignment = self.assignments.pop(rollout_id)
        self._count(assignment, -1)
        if (group := group_key(assignment.job.request)) is not None:
            self.groups[group] -= 1
            if not self.groups[group]:
                del self.groups[group]

    def move(self, assignment: _Assignment, event: AttemptMoved) -> None:
        """Update the position of an attempt."""
        self._count(assignment, -1)
        if isinstance(event, ParkingChanged):
            assignment.position.is_parked = event.is_parked
        else:
            assignment.position.enter_stage(event.stage, event.at)
            if event.stage == "run" and assignment.image is not None:
                self.images.add(assignment.image)
        self._count(assignment, 1)

    @property
    def view(self) -> NodeView:
        """As placement sees it."""
        return NodeView(self.name, self.free, self.queued, self.images, self.groups.keys())

    @property
    def free(self) -> int:
        """Attempts that it would take now."""
        return 0 if self.is_draining else max(0, self.slots - self.working)

    @property
    def queued(self) -> int:
        """Attempts that cannot begin INIT yet; those on their way to it count."""
        stages = self.stages
        return max(0, self.working - max(self.init_slots, stages["init"]) - stages["run"] - stages["eval"])

    @property
    def parked(self) -> int:
        """Parked attempts."""
        return len(self.assignments) - self.working

    def _count(self, assignment: _Assignment, change: int) -> None:
        if not assignment.position.is_parked:
            self.stages[assignment.position.stage] += change
            self.working += change


class NodeRunners:
    """Implements ``Runner`` over nodes, and answers their requests. On the event loop on which it is made.

    Args:
        config: see there.
        pools: for model calls of nodes, by name.
        require_environment: raises a ``TaskError`` for an environment that the service does not offer.
        claim_attempt: see ``RolloutService.claim_attempt``.
    """

    def __init__(
        self,
        config: NodesConfig,
        pools: Mapping[str, EnginePool],
        require_environment: Callable[[str], object],
        claim_attempt: Callable[[str, int], bool],
    ) -> None:
        self.epoch = uuid4().hex
        """Of this head's process."""
        self._config = config
        self._pools = pools
        self._require_environment = require_environment
        self._claim_attempt = claim_attempt
        self._nodes: dict[str, _Node] = {}
        self._node_of: dict[str, _Node] = {}
        """Node that has an attempt at this rollout in hand."""
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
        """See ``Runner.require_environment``."""
        self._require_environment(environment)

    async def accept(self, job: Job) -> None:
        """See ``Runner.accept``. Waits until a node has a job slot.

        Raises:
            ShuttingDownError: it is draining.
            ConflictError: another attempt at this rollout is in hand.
        """
        await self._changes.wait_for(lambda: self._is_draining or any(node.free for node in self._nodes.values()))
        if self._is_draining:
            raise ShuttingDownError("The runner is draining and takes no more work.", "Submit to another service.")
        rollout_id = job.request.rollout_id
        if rollout_id in self._node_of:
            raise ConflictError(f"rollout {rollout_id} is in hand already.")
        name = choose_node((node.view for node in self._nodes.values() if node.free), job.request)
        assert name is not None, "it waited for a free node, and nothing has run since"
        node = self._node_of[rollout_id] = self._nodes[name]
        node.assign(_Assignment(without_task(job), image_of(job.request), AttemptPosition(job.attempt)))
        node.outbox.send(JobSent.of(job))

    async def events(self) -> AsyncIterator[RunnerEvent]:
        """See ``Runner.events``."""
        while (event := await self._events.get()) is not None:
            yield event

    async def cancel(self, rollout_ids: Sequence[str], reason: CancelReason) -> None:
        """See ``Runner.cancel``."""
        for node, ids in self._by_node(rollout_ids):
            for rollout_id in ids:
                assignment = node.assignments[rollout_id]
                assignment.cancel_reason = assignment.cancel_reason or reason
            node.outbox.send(CancelSent(rollouts=ids, reason=reason))

    async def park(self, rollout_ids: Sequence[str]) -> None:
        """See ``Runner.park``."""
        for node, ids in self._by_node(() if self._is_draining else rollout_ids):
            node.outbox.send(ParkSent(rollouts=ids, park=True))

    async def unpark(self, rollout_ids: Sequence[str]) -> None:
        """See ``Runner.unpark``."""
        for node, ids in self._by_node(rollout_ids):
            node.outbox.send(ParkSent(rollouts=ids, park=False))

    async def capacity(self) -> Capacity:
        """See ``Runner.capacity``. Over all nodes."""
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
        """See ``Runner.drain``."""
        self._is_draining = True
        self._changes.notify_all()
        await self.unpark(tuple(self._node_of))
        await self._changes.wait_for(lambda: not self._node_of)
        if not self._events_ended:
            self._events_ended = True
            self._events.put_nowait(None)

    async def close(self) -> None:
        """See ``Runner.close``. Does not wait for the nodes: they are told to stop when they ask next."""
        self._is_draining = True
        await self.cancel(tuple(self._node_of), CancelReason.SHUTDOWN)
        for rollout_id, node in tuple(self._node_of.items()):
            self._end(node, rollout_id, "The service stops.")
        await self.drain()

    def on_settled(self, rollout: Rollout) -> None:
        """The end of an attempt is in the ledger: its node may drop the record."""
        node = self._unsettled.pop((rollout.rollout_id, rollout.attempt), None)
        if node is not None:
            node.outbox.send(Settled(rollout_id=rollout.rollout_id, attempt=rollout.attempt))

    def status(self) -> NodesStatus:
        """Report the nodes."""
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

    def join(self, name: str, body: JoinBody) -> JoinResponse:
        """Let a node join; adopt the attempts that it has in hand and that are still open.

        Raises:
            ConflictError: it runs another release.
            ShuttingDownError: the service has stopped.
        """
        if self._is_released:
            raise ShuttingDownError("The service has stopped.", "Join again when it is back.")
        if body.release != __version__:
            raise ConflictError(
                f"node {name} runs prorl-gym {body.release}, this service {__version__}.", "Install the same release."
            )
        node = self._nodes.get(name)
        if node is not None and node.incarnation != body.incarnation:
            self._lose(node, "another process joined under its name")
            node = None
        if node is None:  # otherwise the answer to its first request was lost
            node = self._add_node(name, body)
        node.last_seen = asyncio.get_running_loop().time()
        in_hand = [held.to_job() for held in body.in_hand]
        over = [job.request.rollout_id for job in in_hand if not self._adopt(node, job)]
        adopted = len(node.assignments)
        _LOG.info("node %s joined: %d slots, %d attempts in hand adopted", name, node.slots, adopted)
        self._changes.notify_all()
        return JoinResponse(
            epoch=self.epoch,
            cancelled=tuple(over),
            max_model_lens={pool: one.max_model_len for pool, one in self._pools.items()},
        )

    async def exchange(self, name: str, body: ExchangeBody) -> str:
        """Process the messages of a node; return the answer (``ExchangeAnswer``) as JSON."""
        node = self._nodes.get(name)
        if node is None or body.epoch != self.epoch or node.incarnation != body.incarnation:
            return MUST_JOIN
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
        page = ExchangeAnswer(must_join=node.is_over, acknowledged=node.inbox.acknowledged, first=first)
        return encode_page(page, texts)

    def leave(self, name: str, body: LeaveBody) -> None:
        """Let a node leave: what it has in hand is lost. Unknown ones are ignored."""
        node = self._nodes.get(name)
        if node is not None and node.incarnation == body.incarnation:
            self._lose(node, "it left")

    def _add_node(self, name: str, body: JoinBody) -> _Node:
        loop = asyncio.get_running_loop()
        node = self._nodes[name] = _Node(name, body.incarnation, body.slots, body.init_slots, loop.time())
        node.calls = RemoteCalls(self._pools, node.outbox.send)
        self._joined += 1
        loop.call_later(self._config.lease_seconds, self._check_lease, node)
        return node

    def _adopt(self, node: _Node, job: Job) -> bool:
        """Whether the node goes on with an attempt."""
        rollout_id = job.request.rollout_id
        known = node.assignments.get(rollout_id)
        if known is not None:
            return known.job.attempt == job.attempt
        if self._is_draining or rollout_id in self._node_of or not self._claim_attempt(rollout_id, job.attempt):
            return False
        self._node_of[rollout_id] = node
        node.assign(_Assignment(job, None, AttemptPosition(job.attempt)))
        return True

    def _handle(self, node: _Node, message: UpMessage) -> None:
        match message:
            case AttemptFinished():
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
            case NodeDraining():
                _LOG.info("node %s drains: %d attempts in hand", node.name, len(node.assignments))
                node.is_draining = True
            case _:
                node.calls.handle(message)

    def _on_finished(self, node: _Node, message: AttemptFinished) -> None:
        assignment = node.assignments.get(message.rollout_id)
        if (message.rollout_id, message.attempt) in self._unsettled:
            return
        if assignment is None or assignment.job.attempt != message.attempt:  # this attempt was over before
            node.outbox.send(Settled(rollout_id=message.rollout_id, attempt=message.attempt))
            return
        self._unsettled[message.rollout_id, message.attempt] = node
        self._forget(node, message.rollout_id)
        self._events.put_nowait(Finished(rollout=decode_rollout(message.record)))

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
        """End every attempt that a node has in hand, withdraw its model calls, and forget it."""
        in_hand = list(node.assignments)
        self._lost += reason != "it left" or bool(in_hand)
        _LOG.log(
            logging.WARNING if in_hand else logging.INFO,
            "node %s is gone (%s), with %d attempts in hand",
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
