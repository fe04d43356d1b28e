"""A node: runs attempts for a head, and ends when it has heard nothing from the head for the length of its lease."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, TypeVar
from uuid import uuid4

from prorl_gym import __version__
from prorl_gym.backoff import backoff_delay
from prorl_gym.errors import CancelReason, FailureKind, ProrlError, ShuttingDownError
from prorl_gym.records import Outcome, Rollout
from prorl_gym.rollout.ledger.encoding import encode_rollout
from prorl_gym.rollout.nodes import wire
from prorl_gym.rollout.nodes.node_runners import without_task
from prorl_gym.rollout.nodes.remote_pool import RemotePool
from prorl_gym.rollout.nodes.wire import Inbox, Outbox
from prorl_gym.rollout.protocol import AttemptMoved, Finished, Job, Runner, StageEntered, TurnEnded
from prorl_gym.rollout.scheduling.attempt import terminal_record

ResultT = TypeVar("ResultT")

_LOG = logging.getLogger(__name__)

_HOLDS_PER_LEASE = 6
"""Requests in a lease that the head holds until it has messages: each one renews the lease."""

PACE_SECONDS = 0.02
"""Shortest time between two requests in one direction: a message of an idle node goes at once, those of a busy one
together."""

_PAUSES_PER_LEASE = 30
"""Longest pause between two requests to a head that cannot be reached."""


class HeadAwayError(ProrlError):
    """The head could not be reached."""


class LeaseExpiredError(ProrlError):
    """The head was not reached for the length of the lease: it retries the node's attempts elsewhere."""


class HeadClient(Protocol):
    """The head's routes for nodes. One attempt each; all but ``leave`` may be repeated after ``HeadAwayError``."""

    async def join(self, body: wire.JoinBody) -> wire.JoinResponse:
        """Raises ``ProrlError``: refused."""
        ...

    async def exchange(self, body: str, seconds: float) -> wire.ExchangeAnswer:
        """Send an ``ExchangeBody`` as JSON; the answer may take so many seconds."""
        ...

    async def leave(self, body: wire.LeaveBody) -> None:
        """Never raises ``HeadAwayError``."""
        ...


@dataclass(slots=True, eq=False)
class _Held:
    """An attempt that runs here."""

    job: Job
    """Without its task."""
    accepting: "asyncio.Task[None]"
    moves: list[AttemptMoved] = field(default_factory=list[AttemptMoved])
    """The last stage that was entered, and the last parking in it: a head that was restarted knows neither."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has ended here."""


class Node:
    """One incarnation of a node. ``outbox`` goes to the head, also for the ``pools``; the lease is the head's."""

    def __init__(
        self,
        head: HeadClient,
        runner: Runner,
        outbox: Outbox,
        pools: Mapping[str, RemotePool],
        *,
        lease_seconds: float,
        slots: int,
        init_slots: int,
    ) -> None:
        self.incarnation = uuid4().hex
        self._head = head
        self._runner = runner
        self._outbox = outbox
        self._pools = pools
        self._lease_seconds = lease_seconds
        self._slots = slots
        self._init_slots = init_slots
        self._inbox: Inbox[wire.DownMessage] = Inbox()
        self._epoch = ""
        self._held: dict[tuple[str, int], _Held] = {}
        """Running attempts, by rollout and number."""
        self._unsettled: dict[tuple[str, int], tuple[_Held, wire.AttemptFinished]] = {}
        """Attempts that ended and are not in the head's ledger yet."""
        self._lease = asyncio.timeout(None)
        """Expires some time after the sending of the last request that was answered."""
        self._is_draining = asyncio.Event()
        self._all_settled = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Join, work, leave after ``drain``. Raises ``LeaseExpiredError``, or ``ProrlError`` if the head refuses it."""
        try:
            async with self._lease:
                async with asyncio.TaskGroup() as group:
                    background = [group.create_task(self._keep_session()), group.create_task(self._forward_events())]
                    await self._is_draining.wait()
                    self._outbox.send(wire.NodeDraining())
                    await self._runner.drain()
                    while self._held or self._unsettled:
                        self._all_settled.clear()
                        await self._all_settled.wait()
                    for task in background:
                        task.cancel()
                await self.leave()
        except TimeoutError:
            raise LeaseExpiredError(
                f"The head was not reached for {self._lease_seconds:g} s: {len(self._held)} attempts are given up.",
                "Start the node again when the head is back.",
            ) from None
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def drain(self) -> None:
        """Take no more attempts, finish those that run, then leave. Idempotent."""
        self._is_draining.set()

    async def leave(self) -> None:
        """Leave now: what runs here is retried elsewhere."""
        await self._head.leave(wire.LeaveBody(incarnation=self.incarnation))

    # --- its session with the head ------------------------------------------------------------------------------

    async def _keep_session(self) -> None:
        while True:
            await self._join()
            async with asyncio.TaskGroup() as group:
                exchanging = [
                    group.create_task(self._exchange_messages(hold_seconds=seconds))
                    for seconds in (0.0, self._lease_seconds / _HOLDS_PER_LEASE)
                ]
                # Not by an error: before Python 3.13, a group that fails loses a cancel that comes at the same time.
                await asyncio.wait(exchanging, return_when=asyncio.FIRST_COMPLETED)
                for task in exchanging:
                    task.cancel()
            _LOG.info("the head does not know this node: joining again")

    async def _join(self) -> None:
        # What is sent from now on belongs to the new session; what went before is told by the body, or sent again.
        self._outbox.restart()
        self._inbox = Inbox()
        held = [*self._held.values(), *(ended for ended, _ in self._unsettled.values())]
        body = wire.JoinBody(
            incarnation=self.incarnation,
            release=__version__,
            slots=self._slots,
            init_slots=self._init_slots,
            in_hand=tuple(wire.JobSent.of(one.job) for one in held),
        )
        answer = await self._repeat(lambda: self._head.join(body))
        self._epoch = answer.epoch
        _LOG.info("joined the head with %d running attempts, %d of them over", len(held), len(answer.cancelled))
        self._spawn(self._cancel(wire.CancelSent(rollouts=answer.cancelled, reason=CancelReason.SHUTDOWN)))
        for moved in chain.from_iterable(one.moves for one in held):
            self._outbox.send(moved)
        for _, finished in self._unsettled.values():
            self._outbox.send(finished)
        if self._is_draining.is_set():
            self._outbox.send(wire.NodeDraining())
        for name, pool in self._pools.items():
            pool.on_joined(answer.max_model_lens.get(name))

    async def _exchange_messages(self, *, hold_seconds: float) -> None:
        """Send messages (without a hold) or receive them (with one), until the head asks to join again."""

        async def exchange() -> wire.ExchangeAnswer:
            first, messages = (1, []) if hold_seconds else self._outbox.page()
            page = wire.ExchangeBody(
                incarnation=self.incarnation,
                epoch=self._epoch,
                acknowledged=self._inbox.acknowledged,
                first=first,
                hold_seconds=hold_seconds,
            )
            return await self._head.exchange(wire.encode_page(page, messages), hold_seconds + self._lease_seconds / 3)

        loop = asyncio.get_running_loop()
        sent_at = 0.0
        while True:
            if not hold_seconds:
                await self._outbox.not_empty.wait()
            await asyncio.sleep(max(0.0, sent_at + PACE_SECONDS - loop.time()))
            sent_at = loop.time()
            answer = await self._repeat(exchange)
            if answer.must_join:
                return
            self._outbox.acknowledge(answer.acknowledged)
            for message in self._inbox.accept(answer.first, answer.messages):
                self._handle(message)

    async def _repeat(self, request: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Make a request until the head answers; that renews the lease."""
        failures = 0
        while True:
            sent_at = asyncio.get_running_loop().time()
            try:
                result = await request()
            except HeadAwayError as error:
                if not failures:
                    _LOG.warning("the head cannot be reached: %s", error.what)
                    self._set_head_away(is_away=True)
                await asyncio.sleep(backoff_delay(failures, first=0.1, longest=self._lease_seconds / _PAUSES_PER_LEASE))
                failures += 1
                continue
            if not self._lease.expired():
                self._lease.reschedule(max(sent_at + self._lease_seconds, self._lease.when() or 0.0))
            self._set_head_away(is_away=False)
            return result

    def _set_head_away(self, *, is_away: bool) -> None:
        for pool in self._pools.values():
            pool.set_head_away(is_away=is_away)

    # --- its attempts -------------------------------------------------------------------------------------------

    def _handle(self, message: wire.DownMessage) -> None:
        match message:
            case wire.JobSent():
                job = message.to_job()
                held = _Held(without_task(job), self._spawn(self._accept(job)))
                self._held[job.request.rollout_id, job.attempt] = held
            case wire.Settled():
                self._unsettled.pop((message.rollout_id, message.attempt), None)
                self._all_settled.set()
            case wire.CancelSent():
                self._spawn(self._cancel(message))
            case wire.ParkSent():
                park = self._runner.park if message.park else self._runner.unpark
                self._spawn(park(message.rollouts))
            case _:
                for pool in self._pools.values():
                    pool.handle(message)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, job: Job) -> None:
        rollout_id = job.request.rollout_id
        for held in [held for (one, number), held in self._held.items() if one == rollout_id and number < job.attempt]:
            await held.over.wait()  # it is cancelled: the head gave it up
        try:
            await self._runner.accept(job)
        except ShuttingDownError as error:
            refused = Outcome(status="failed", kind=FailureKind.NODE_LOST, stage="queue", message=error.what)
            self._report_end(terminal_record(job, refused))

    async def _cancel(self, message: wire.CancelSent) -> None:
        chosen = set(message.rollouts)
        accepting = [
            held.accepting
            for (rollout_id, _), held in self._held.items()
            if rollout_id in chosen and not held.accepting.done()
        ]
        if accepting:  # otherwise at once: in the order of the messages
            await asyncio.wait(accepting)
        await self._runner.cancel(message.rollouts, message.reason)

    async def _forward_events(self) -> None:
        async for event in self._runner.events():
            if isinstance(event, Finished):
                self._report_end(event.rollout)
                continue
            if isinstance(event, TurnEnded):
                with suppress(ValueError):  # it holds half a surrogate pair, which the ledger would not keep either
                    self._outbox.send(event)
                continue
            held = self._held[event.rollout_id, event.attempt]
            held.moves = [event] if isinstance(event, StageEntered) else [*held.moves[:1], event]
            self._outbox.send(event)

    def _report_end(self, rollout: Rollout) -> None:
        finished = wire.AttemptFinished(
            rollout_id=rollout.rollout_id, attempt=rollout.attempt, record=encode_rollout(rollout)
        )
        key = rollout.rollout_id, rollout.attempt
        held = self._held.pop(key)
        held.over.set()
        self._unsettled[key] = held, finished
        self._outbox.send(finished)
