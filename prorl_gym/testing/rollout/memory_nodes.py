"""Nodes in this process: the real head and the real node, with requests that may be lost, repeated or late."""

import asyncio
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from prorl_gym.errors import ProrlError
from prorl_gym.rollout.nodes.node import HeadAwayError, Node, NodeOutbox
from prorl_gym.rollout.nodes.node_runners import NodeRunners
from prorl_gym.rollout.nodes.remote_pool import RemotePool
from prorl_gym.rollout.nodes.wire import ExchangeAnswer, ExchangeBody, JoinBody, JoinResponse, LeaveBody
from prorl_gym.rollout.protocol import Runner


@dataclass(slots=True)
class Faults:
    """What happens to requests on their way."""

    dice: random.Random
    lost: float = 0.0
    """Share of requests that never arrive."""
    unanswered: float = 0.0
    """Share of requests that arrive and whose answer is lost."""
    repeated: float = 0.0
    """Share of requests that arrive once more, later."""
    is_cut: bool = False
    """Nothing arrives."""


class MemoryHead:
    """Implements ``HeadClient`` on ``NodeRunners`` in this process. Every body passes through its JSON.

    Args:
        name: of the node.
        find_head: returns the head that runs now; ``None``: there is none.
        faults: of the network.
    """

    def __init__(self, name: str, find_head: Callable[[], NodeRunners | None], faults: Faults | None = None) -> None:
        self._name = name
        self._find_head = find_head
        self._faults = faults or Faults(random.Random(0))
        self._late: set[asyncio.Task[str]] = set()

    async def join(self, body: JoinBody) -> JoinResponse:
        """See ``HeadClient.join``."""
        self._send()
        answer = self._head().join(self._name, JoinBody.model_validate_json(body.model_dump_json()))
        self._receive()
        return JoinResponse.model_validate_json(answer.model_dump_json())

    async def exchange(self, body: str, seconds: float) -> ExchangeAnswer:
        """See ``HeadClient.exchange``."""
        self._send()
        if self._faults.dice.random() < self._faults.repeated:
            late = asyncio.create_task(self._repeat(body))
            self._late.add(late)
            late.add_done_callback(self._late.discard)
        try:
            async with asyncio.timeout(seconds):
                answer = await self._head().exchange(self._name, ExchangeBody.model_validate_json(body))
        except TimeoutError:
            raise HeadAwayError("no answer in time.") from None
        self._receive()
        return ExchangeAnswer.model_validate_json(answer)

    async def leave(self, body: LeaveBody) -> None:
        """See ``HeadClient.leave``."""
        with suppress(HeadAwayError):
            self._head().leave(self._name, body)

    async def _repeat(self, body: str) -> str:
        for _ in range(self._faults.dice.randrange(20)):
            await asyncio.sleep(0)
        return await self._head().exchange(self._name, ExchangeBody.model_validate_json(body))

    def _head(self) -> NodeRunners:
        head = self._find_head()
        if head is None or self._faults.is_cut:
            raise HeadAwayError("the head is away.")
        return head

    def _send(self) -> None:
        if self._faults.dice.random() < self._faults.lost:
            raise HeadAwayError("the request was lost.")

    def _receive(self) -> None:
        if self._faults.is_cut or self._faults.dice.random() < self._faults.unanswered:
            raise HeadAwayError("the answer was lost.")


class MemoryNode:
    """A node in this process.

    Args:
        name: of the node.
        find_head: see ``MemoryHead``.
        runner: makes the attempts.
        lease_seconds: as in the head's configuration.
        slots: most attempts in hand.
        init_slots: most attempts in INIT.
        faults: of the network.
        outbox: that of the pools.
        pools: by name.
    """

    def __init__(
        self,
        name: str,
        find_head: Callable[[], NodeRunners | None],
        runner: Runner,
        *,
        lease_seconds: float,
        slots: int,
        init_slots: int,
        faults: Faults | None = None,
        outbox: NodeOutbox | None = None,
        pools: Mapping[str, RemotePool] | None = None,
    ) -> None:
        head = MemoryHead(name, find_head, faults)
        self.runner = runner
        self.node = Node(
            head,
            runner,
            outbox or NodeOutbox(),
            pools or {},
            lease_seconds=lease_seconds,
            slots=slots,
            init_slots=init_slots,
        )
        self.error: ProrlError | None = None
        """What ended it."""
        self.task = asyncio.create_task(self._run())

    async def kill(self) -> None:
        """End it without a word to the head, and everything that it has in hand."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            await self.node.run()
        except ProrlError as error:
            self.error = error
        finally:
            await self.runner.close()
