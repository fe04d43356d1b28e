"""The bench of ``test_runner`` over a node: a head's runner and one node in this process."""

import asyncio
from typing import Any

from test_runner import SMALL, Bench

from prorl_gym.rollout.nodes.config import NodesConfig
from prorl_gym.rollout.nodes.node_runners import NodeRunners
from prorl_gym.rollout.protocol import Finished
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.testing.rollout.fake_rollout import (
    EmptyBackend,
    FakePolicySource,
    ScriptedEnvironment,
    environment_lookup,
)
from prorl_gym.testing.rollout.memory_nodes import MemoryNode


class NodeBench(Bench):
    """As ``Bench``, over one node."""

    def __init__(  # pyright: ignore[reportMissingSuperCall]
        self,
        config: RunnerConfig = SMALL,
        backend: EmptyBackend | None = None,
        environment: ScriptedEnvironment | None = None,
    ) -> None:
        self.backend = backend or EmptyBackend()
        self.policies = FakePolicySource()
        environments = environment_lookup(environment or ScriptedEnvironment())
        self.inner = InProcessRunner(environments, self.policies, self.backend, config)
        self.heads: Any = NodeRunners(NodesConfig(lease_seconds=30), {}, environments, lambda *_: False)
        self.runner: Any = self.heads
        self.member = MemoryNode(
            "n0",
            lambda: self.heads,
            self.inner,
            lease_seconds=30,
            slots=self.inner.snapshot().pools["jobs"].size,
            init_slots=config.init,
        )
        self.events = []
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self.runner.events():
            self.events.append(event)
            if isinstance(event, Finished):
                self.heads.on_settled(event.rollout)

    async def finish(self) -> Any:
        await asyncio.wait_for(self.runner.drain(), 10)
        self.member.node.drain()
        await asyncio.wait_for(self.member.task, 10)
        assert self.member.error is None
        finished = await super().finish()
        assert self.heads.status().nodes == ()
        return finished

    def check_returned(self) -> None:
        assert [pool.busy for pool in self.inner.snapshot().pools.values()] == [0] * 5
        assert (self.backend.sandbox_count, self.policies.open_sessions) == (0, 0)
