"""Nodes in processes of their own: real runners, channel and remote pools over the simulated network and engines."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from prorl_gym.errors import EngineError, FailureKind, ProrlError
from prorl_gym.inference.protocol import EngineHealth, GenerationRequest, GenerationResult
from prorl_gym.records import EngineLoad
from prorl_gym.rollout.nodes.node import HeadAwayError, Node, NodeOutbox
from prorl_gym.rollout.nodes.node_runners import NodeRunners
from prorl_gym.rollout.nodes.remote_pool import RemotePool
from prorl_gym.rollout.nodes.wire import ExchangeAnswer, ExchangeBody, JoinBody, JoinResponse, LeaveBody
from prorl_gym.rollout.protocol import PolicySource
from prorl_gym.rollout.scheduling.attempt import EnvironmentLookup
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.testing.inference.simulated_engine import LoopEngine
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend
from prorl_gym.testing.simulation.network import Network
from prorl_gym.testing.virtual_clock import SimulatedProcess

ResultT = TypeVar("ResultT")


class Head(Protocol):
    """A running head, as the network knows it."""

    process: SimulatedProcess
    nodes: NodeRunners


class SimulatedHeadClient:
    """Implements ``HeadClient``: the head's routes over the simulated network.

    Args:
        network: between node and head.
        name: of the node.
        process: of the node.
        find_head: returns the head of the moment.
    """

    def __init__(
        self, network: Network, name: str, process: SimulatedProcess, find_head: Callable[[], Head | None]
    ) -> None:
        self._network, self._name, self._process, self._find_head = network, name, process, find_head

    async def join(self, body: JoinBody) -> JoinResponse:
        """See ``HeadClient.join``."""
        text = body.model_dump_json()

        async def handle(nodes: NodeRunners) -> str:
            return nodes.join(self._name, JoinBody.model_validate_json(text)).model_dump_json()

        return JoinResponse.model_validate_json(await self._ask(handle, 10.0))

    async def exchange(self, body: str, seconds: float) -> ExchangeAnswer:
        """See ``HeadClient.exchange``."""

        async def handle(nodes: NodeRunners) -> str:
            return await nodes.exchange(self._name, ExchangeBody.model_validate_json(body))

        return ExchangeAnswer.model_validate_json(await self._ask(handle, seconds))

    async def leave(self, body: LeaveBody) -> None:
        """See ``HeadClient.leave``."""

        async def handle(nodes: NodeRunners) -> None:
            nodes.leave(self._name, body)

        try:
            await self._ask(handle, 10.0)
        except HeadAwayError:
            return

    async def _ask(self, handle: Callable[[NodeRunners], Coroutine[Any, Any, ResultT]], seconds: float) -> ResultT:
        head = self._find_head()
        if head is None:
            raise HeadAwayError("the connection was refused.")
        nodes = head.nodes
        try:
            async with asyncio.timeout(seconds):
                return await self._network.request(self._process, head.process, lambda: handle(nodes))
        except (ConnectionError, TimeoutError):
            raise HeadAwayError("no answer.") from None


class RemoteEngine:
    """Implements ``PoolEngine`` on a node: a connection to a simulated engine.

    Args:
        network: between node and engine.
        process: of the node.
        engine: the engine.
        engine_process: its process.
    """

    def __init__(
        self, network: Network, process: SimulatedProcess, engine: LoopEngine, engine_process: SimulatedProcess
    ) -> None:
        self.version = 0
        self._network, self._process, self._engine, self._engine_process = network, process, engine, engine_process

    @property
    def name(self) -> str:
        """See ``Engine.name``."""
        return self._engine.name

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See ``Engine.generate``."""
        version = self.version
        try:
            result = await self._network.request(
                self._process, self._engine_process, lambda: self._engine.generate(request), cancels=True
            )
        except ConnectionError:
            raise EngineError(FailureKind.ENGINE_UNREACHABLE, f"engine {self.name}: no answer.") from None
        return replace(result, versions=[version] * len(result.token_ids))

    async def cancel(self, request_id: str) -> None:
        """See ``Engine.cancel``."""
        await self._engine.cancel(request_id)

    async def close(self) -> None:
        """See ``Engine.close``."""

    async def health(self) -> EngineHealth:
        """See ``Engine.health``."""
        return await self._engine.health()

    async def sample_trial(self, seconds: float) -> float:
        """See ``Engine.sample_trial``."""
        return await self._engine.sample_trial(seconds)

    async def read_load(self) -> EngineLoad | None:
        """See ``Engine.read_load``."""
        return await self._engine.read_load()

    async def probe_logprobs(self, token_ids: Any) -> list[float]:
        """See ``Engine.probe_logprobs``."""
        return await self._engine.probe_logprobs(token_ids)

    async def reset_prefix_cache(self) -> bool:
        """See ``Engine.reset_prefix_cache``."""
        return await self._engine.reset_prefix_cache()


class SimulatedNode:
    """One incarnation of a node.

    Args:
        process: its process.
        client: reaches the head.
        make_engine: makes a connection to an engine of a name.
        environments: finds an environment by name.
        make_policies: makes the source of policies over the node's pool.
        config: sizes of its runner.
        lease_seconds: of the head.
        on_end: called when it has ended by itself, with the error if it is not one of the expected.
    """

    def __init__(
        self,
        process: SimulatedProcess,
        client: SimulatedHeadClient,
        make_engine: Callable[[str], RemoteEngine],
        environments: EnvironmentLookup,
        make_policies: Callable[[RemotePool], PolicySource],
        config: RunnerConfig,
        lease_seconds: float,
        on_end: Callable[["SimulatedNode", Exception | None], object],
    ) -> None:
        outbox = NodeOutbox()
        self.process = process
        self._on_end = on_end
        self._pool = RemotePool("policy", lambda name, url: make_engine(name), outbox.send)
        self.runner = InProcessRunner(environments, make_policies(self._pool), EmptyBackend(), config)
        jobs = self.runner.snapshot().pools["jobs"].size
        self._node = Node(
            client,
            self.runner,
            outbox,
            {"policy": self._pool},
            lease_seconds=lease_seconds,
            slots=jobs,
            init_slots=config.init,
        )

    async def run(self) -> None:
        """Work until the lease is over or the node was drained; then the process ends, and its sandboxes with it."""
        unexpected: Exception | None = None
        try:
            await self._node.run()
        except ProrlError:
            pass  # its lease is over, or the head refuses it
        except Exception as error:
            unexpected = error
        self._on_end(self, unexpected)
        self.process.kill()

    def drain(self) -> None:
        """Finish what is in hand, then end."""
        self._node.drain()
