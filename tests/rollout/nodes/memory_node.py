"""Nodes in this process: the real head and the real node, with requests that may be lost, repeated or late."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from simulation.cluster import HeadRequest, MemoryHead

from prorl_gym.errors import ProrlError
from prorl_gym.rollout.nodes.node import HeadAwayError, Node
from prorl_gym.rollout.nodes.node_runners import NodeRunners
from prorl_gym.rollout.nodes.wire import Outbox
from prorl_gym.rollout.protocol import Runner


@dataclass(slots=True)
class Faults:
    """What happens to requests on their way."""

    dice: random.Random = field(default_factory=lambda: random.Random(0))
    lost: float = 0.0
    """Share of requests that never arrive."""
    unanswered: float = 0.0
    """Share of requests that arrive and whose answer is lost."""
    repeated: float = 0.0
    """Share of requests that arrive once more, later."""
    is_cut: bool = False
    """Nothing arrives."""
    _late: set[asyncio.Task[None]] = field(default_factory=set["asyncio.Task[None]"])

    async def carry(self, find_head: Callable[[], NodeRunners | None], handle: HeadRequest, seconds: float) -> str:
        """Make a request of the head that runs now, if one does."""
        if (head := find_head()) is None or self.is_cut or self.dice.random() < self.lost:
            raise HeadAwayError("the request was lost.")
        if self.dice.random() < self.repeated:
            late = asyncio.create_task(self._repeat(find_head, handle))
            self._late.add(late)
            late.add_done_callback(self._late.discard)
        try:
            async with asyncio.timeout(seconds):
                answer = await handle(head)
        except TimeoutError:
            raise HeadAwayError("no answer in time.") from None
        if self.is_cut or self.dice.random() < self.unanswered:
            raise HeadAwayError("the answer was lost.")
        return answer

    async def _repeat(self, find_head: Callable[[], NodeRunners | None], handle: HeadRequest) -> None:
        for _ in range(self.dice.randrange(20)):
            await asyncio.sleep(0)
        if (head := find_head()) is not None and not self.is_cut:
            await handle(head)


class MemoryNode:
    """A node in this process."""

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
    ) -> None:
        network = faults or Faults()
        head = MemoryHead(name, lambda handle, seconds: network.carry(find_head, handle, seconds))
        self.runner = runner
        self.node = Node(
            head,
            runner,
            Outbox(),
            {},
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
