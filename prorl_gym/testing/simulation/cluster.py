"""A simulated installation: engines that outlive everything, lives of a head over one ledger file, and nodes."""

import asyncio
import random
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from prorl_gym.errors import EngineError, FailureKind, ProrlError
from prorl_gym.inference.balance.admission import AdmissionOptions
from prorl_gym.inference.balance.cost_policy import CostPolicy
from prorl_gym.inference.balance.engine_pool import EnginePool, PoolOptions
from prorl_gym.inference.balance.health_monitor import FailoverOptions
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult
from prorl_gym.rollout.ledger.writer_thread import LedgerWriter
from prorl_gym.rollout.nodes.config import NodesConfig
from prorl_gym.rollout.nodes.exchange import Outbox
from prorl_gym.rollout.nodes.node import HeadAwayError, Node
from prorl_gym.rollout.nodes.node_runners import NodeRunners
from prorl_gym.rollout.nodes.remote_pool import RemotePool
from prorl_gym.rollout.protocol import Job
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.rollout.service import RolloutService
from prorl_gym.testing.inference.simulated_engine import Hardware, LoopEngine, SimEngine
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend
from prorl_gym.testing.rollout.memory_nodes import HeadRequest, MemoryHead
from prorl_gym.testing.simulation.ledger_checks import break_writes, open_checked_ledger
from prorl_gym.testing.simulation.network import Network
from prorl_gym.testing.simulation.planned_rollouts import (
    GROUP_TOKENS,
    SYSTEM_TOKENS,
    PlannedEnvironment,
    PlannedPolicySource,
    Shape,
    draw_plan,
)
from prorl_gym.testing.virtual_clock import SimulatedProcess

LEASE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Sizes of an installation."""

    nodes: int
    engines: int
    runner: RunnerConfig
    """Of each node."""
    kv_tokens: int
    """Of each engine."""
    shape: Shape


class Life:
    """One life of the head: from a start on the ledger's file to its stop or death."""

    def __init__(self, name: str) -> None:
        self.process = SimulatedProcess(name)
        self.writer: LedgerWriter
        self.pool: EnginePool
        self.policy: CostPolicy
        self.nodes: NodeRunners
        self.service: RolloutService


@dataclass(frozen=True, slots=True, eq=False)
class ClusterNode:
    """One incarnation of a node."""

    process: SimulatedProcess
    runner: InProcessRunner
    node: Node


class RemoteEngine(LoopEngine):
    """A node's connection to a simulated engine, over which it makes and stops calls.

    Args:
        network: between node and engine.
        process: of the node.
        engine: the engine.
        engine_process: its process.
    """

    def __init__(
        self, network: Network, process: SimulatedProcess, engine: LoopEngine, engine_process: SimulatedProcess
    ) -> None:
        super().__init__(engine.sim)
        self._network, self._process, self._engine, self._engine_process = network, process, engine, engine_process

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


class Cluster:
    """Engines, nodes and the head of the moment. Make it on the running virtual loop.

    Args:
        config: sizes.
        ledger: path of the ledger's file.
        seed: of everything that is drawn.
    """

    def __init__(self, config: ClusterConfig, ledger: Path, seed: int) -> None:
        self.config = config
        self.complaints: list[str] = []
        """Violated invariants."""
        self.network = Network(random.Random(f"{seed}/network"))
        self.life: Life | None = None
        self.nodes: dict[str, ClusterNode] = {}
        """Those that live, by name."""
        self._ledger = ledger
        self._trace = blake2b(digest_size=16)
        self._begun: set[tuple[str, int]] = set()
        self._heads = 0
        self._dice = random.Random(f"{seed}/cluster")
        self._engine_process = SimulatedProcess("engines")
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_loop_error)
        names = [f"engine-{n}" for n in range(config.engines)]
        hardware = Hardware(config.kv_tokens)
        self.engines = {name: LoopEngine(SimEngine(name, hardware, SYSTEM_TOKENS, GROUP_TOKENS)) for name in names}
        for number in range(config.nodes):
            self.start_node(f"node-{number}")

    @property
    def trace_hash(self) -> str:
        """Digest of everything that happened, with its virtual times."""
        return self._trace.hexdigest()

    def trace(self, *what: object) -> None:
        """Note an event."""
        self._trace.update(repr((round(self._loop.time(), 6), *what)).encode())

    async def start_head(self) -> None:
        """Start the head on the ledger's file."""
        self._heads += 1
        life = Life(f"head-{self._heads}")
        await life.process.spawn(self._start(life))
        self.life = life
        self.trace("head starts")

    async def _start(self, life: Life) -> None:
        ledger, life.writer = await open_checked_ledger(
            self._ledger, self._loop.time, self.complaints.append, self._on_record
        )
        life.policy = CostPolicy(clock=self._loop.time)
        life.pool = EnginePool(
            "policy",
            balance_policy=life.policy,
            failover=FailoverOptions(recovery_seconds=120.0),
            options=PoolOptions(admission=AdmissionOptions()),
        )
        for engine in self.engines.values():
            life.pool.add_engine(engine)
        life.nodes = NodeRunners(
            NodesConfig(lease_seconds=LEASE_SECONDS),
            {"policy": life.pool},
            lambda name: None,
            lambda rollout_id, attempt: life.service.claim_attempt(rollout_id, attempt),
        )
        life.service = RolloutService(ledger, life.nodes, claim_seconds=LEASE_SECONDS)
        life.service.add_settlement_observer(life.nodes.on_settled)
        life.pool.start_scraping()
        await life.service.start()

    def kill_head(self) -> None:
        """SIGKILL to the head."""
        life, self.life = self.life, None
        assert life is not None
        self.trace("head killed")
        life.process.kill()
        life.writer.open_ledger.close()

    async def stop_head(self) -> None:
        """Stop the head as SIGTERM does, and check that nothing is held."""
        life = self.life
        assert life is not None
        await life.process.spawn(life.service.stop())
        self._check_idle(life)
        self.life = None
        await life.process.spawn(life.nodes.release())
        await life.process.spawn(life.pool.close())

    def start_node(self, name: str) -> None:
        """Start a node."""
        self.trace("node starts", name)
        process = SimulatedProcess(name)
        node = self.nodes[name] = process.call(self._make_node, process)
        process.spawn(self._run_node(node))

    def _make_node(self, process: SimulatedProcess) -> ClusterNode:
        config, outbox, environment = self.config, Outbox(), PlannedEnvironment(self.config.shape, self._dice)

        async def carry(handle: HeadRequest, seconds: float) -> str:
            if (life := self.life) is None:
                raise HeadAwayError("the connection was refused.")
            try:
                async with asyncio.timeout(seconds):
                    return await self.network.request(process, life.process, lambda: handle(life.nodes))
            except (ConnectionError, TimeoutError):
                raise HeadAwayError("no answer.") from None

        def connect(engine: str, url: str) -> RemoteEngine:
            return RemoteEngine(self.network, process, self.engines[engine], self._engine_process)

        pool = RemotePool("policy", connect, outbox.send)
        policies = PlannedPolicySource(
            lambda job: draw_plan(config.shape, job.request.task["seed"]).turns,
            pool,
            on_open=lambda job: self._on_begun(job, process),
        )
        runner = InProcessRunner(lambda _: environment, policies, EmptyBackend(), config.runner)
        node = Node(
            MemoryHead(process.name, carry),
            runner,
            outbox,
            {"policy": pool},
            lease_seconds=LEASE_SECONDS,
            slots=runner.snapshot().pools["jobs"].size,
            init_slots=config.runner.init,
        )
        return ClusterNode(process, runner, node)

    async def _run_node(self, node: ClusterNode) -> None:
        """Work until the lease is over or the node was drained; then the process ends, and its sandboxes with it."""
        name = node.process.name
        try:
            await node.node.run()
        except ProrlError:
            pass  # its lease is over, or the head refuses it
        except Exception as error:
            self.complaints.append(f"{name} ends by {error!r}")
        self.trace("node ends", name)
        if self.nodes.get(name) is node:
            del self.nodes[name]
        node.process.kill()

    def kill_node(self, name: str) -> None:
        """SIGKILL to a node."""
        self.trace("node killed", name)
        self.nodes.pop(name).process.kill()

    def break_ledger(self, *, broken: bool) -> None:
        """Let the ledger's disk fail, or work again."""
        if self.life is not None:
            self.trace("ledger broken", broken)
            break_writes(self.life.writer.open_ledger.connection, broken=broken)

    def _check_idle(self, life: Life) -> None:
        """Check that nothing is held once no rollout is in hand."""
        pool, nodes = life.pool.snapshot(), life.nodes.status().nodes
        held = {
            "tasks of the service": life.service.task_count,
            "calls": sum(engine.in_flight for engine in pool.engines),
            "reservations": sum(life.policy.in_flight(name) for name in self.engines),
            "entries of the cost policy": life.policy.tracked,
            "live rollouts": pool.admission.live,
            "waiting rollouts": pool.admission.waiting,
            "arriving rollouts": pool.admission.arriving,
            "sessions": pool.admission.sessions,
            "attempts on nodes": sum(node.in_hand for node in nodes),
            "calls of nodes": sum(node.calls for node in nodes),
        }
        for node in self.nodes.values():
            runner = node.runner.snapshot()
            held[f"attempts of {node.process.name}"] = runner.attempts
            held[f"slots of {node.process.name}"] = sum(each.busy for each in runner.pools.values())
        self.complaints += [f"{count} {what} are still held" for what, count in held.items() if count]

    def _on_begun(self, job: Job, process: SimulatedProcess) -> None:
        key = (job.request.rollout_id, job.attempt)
        self.trace("agent", *key, process.name)
        if key in self._begun:
            self.complaints.append(f"{key[0]}: attempt {key[1]} runs a second time, on {process.name}")
        self._begun.add(key)

    def _on_record(self, rollout_id: str, attempt: int, status: str) -> None:
        self.trace("record", rollout_id, attempt, status)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        message = str(context.get("message"))
        if "never retrieved" not in message and "destroyed" not in message:  # callers were killed
            self.complaints.append(f"{message}: {context.get('exception')!r}")
