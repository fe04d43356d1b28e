"""Load for ``node_head_cost``: nodes whose rollouts only wait and call; the protocol, the head and HTTP are real."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import uuid4

from prorl_gym.api.node_process import HttpHead
from prorl_gym.client.transport import Transport
from prorl_gym.client.wire_models import Capacity
from prorl_gym.errors import CancelReason
from prorl_gym.inference.protocol import GenerationRequest
from prorl_gym.records import Outcome, Score
from prorl_gym.rollout.nodes.exchange import Outbox
from prorl_gym.rollout.nodes.node import Node
from prorl_gym.rollout.nodes.remote_pool import RemotePool
from prorl_gym.rollout.protocol import Finished, Job, RunnerEvent, StageEntered
from prorl_gym.rollout.scheduling.attempt import terminal_record
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply
from prorl_gym.testing.rollout.fake_rollout import FakePolicySource, FakeSession

PROMPT = tuple(range(1000))
TOKENS = tuple(range(100))


class WaitingEngine(FakeEngine):
    """Answers after a delay."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__(name, lambda _: Reply(TOKENS))
        self._seconds = seconds

    async def generate(self, request: GenerationRequest) -> Any:
        await asyncio.sleep(self._seconds)
        self.requests.clear()
        return await super().generate(request)


class CallingRunner:
    """Implements ``Runner``: an attempt is a number of model calls, and a small record of always the same size."""

    def __init__(self, pool: RemotePool, calls: int) -> None:
        self._pool = pool
        self._calls = calls
        self._events: asyncio.Queue[RunnerEvent] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        session = FakeSession(FakePolicySource())
        session._turns = 3  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001
        self._segments = session.segments()

    async def accept(self, job: Job) -> None:
        task = asyncio.create_task(self._run(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, job: Job) -> None:
        rollout_id = job.request.rollout_id
        for stage in ("queue", "init", "run"):
            self._move(job, stage)
        await self._pool.wait_for_room(rollout_id)
        for turn in range(self._calls):
            await self._pool.generate(
                GenerationRequest(
                    request_id=uuid4().hex,
                    session_id=rollout_id,
                    prompt_ids=PROMPT * (turn + 1),
                    max_tokens=100,
                    temperature=1.0,
                    top_p=1.0,
                    top_k=-1,
                    stop_token_ids=(),
                )
            )
        self._pool.forget_session(rollout_id)
        self._move(job, "eval")
        ended = terminal_record(job, Outcome(status="completed"), score=Score(reward=1.0), segments=self._segments)
        self._events.put_nowait(Finished(rollout=ended))

    def _move(self, job: Job, stage: Any) -> None:
        moved = StageEntered(rollout_id=job.request.rollout_id, attempt=job.attempt, stage=stage, at=time.time())
        self._events.put_nowait(moved)

    async def events(self) -> AsyncIterator[RunnerEvent]:
        while True:
            yield await self._events.get()

    async def cancel(self, rollout_ids: Sequence[str], reason: CancelReason) -> None: ...

    async def park(self, rollout_ids: Sequence[str]) -> None: ...

    async def unpark(self, rollout_ids: Sequence[str]) -> None: ...

    async def capacity(self) -> Capacity:
        return Capacity(queued=0, init=0, run=0, eval=0, free=1)

    async def drain(self) -> None: ...

    async def close(self) -> None: ...

    def require_environment(self, environment: str) -> None: ...


async def run_nodes(url: str, token: str, count: int, slots: int, calls: int, seconds: float) -> None:
    """Run nodes until cancelled.

    Args:
        url: of the head.
        token: of the head.
        count: nodes.
        slots: of each.
        calls: of each rollout.
        seconds: that each call takes.
    """

    async def run_one(number: int) -> None:
        outbox = Outbox()
        pool = RemotePool("policy", lambda name, _: WaitingEngine(name, seconds), outbox.send)
        transport = Transport(url, token, "its caller", 10.0, 0.2)
        head = HttpHead(transport, f"n{number}")
        runner: Any = CallingRunner(pool, calls)
        node = Node(head, runner, outbox, {"policy": pool}, lease_seconds=30, slots=slots, init_slots=slots)
        try:
            await node.run()
        finally:
            await transport.close()

    await asyncio.gather(*map(run_one, range(count)))
