"""A simulated installation: engines that outlive everything, lives of a head over one ledger file, and nodes."""

import asyncio
import random
import sqlite3
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
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
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.ledger.writer_thread import LedgerWriter
from prorl_gym.rollout.nodes.node import HeadAwayError, Node
from prorl_gym.rollout.nodes.node_runners import NodeRunners, NodesConfig
from prorl_gym.rollout.nodes.remote_pool import RemotePool
from prorl_gym.rollout.nodes.wire import ExchangeAnswer, ExchangeBody, JoinBody, JoinResponse, LeaveBody, Outbox
from prorl_gym.rollout.protocol import Job
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.rollout.service import RolloutService
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend
from simulation.engine import Hardware, LoopEngine, SimEngine
from simulation.network import Network
from simulation.planned_rollouts import (
    GROUP_TOKENS,
    SYSTEM_TOKENS,
    PlannedEnvironment,
    PlannedPolicySource,
    Shape,
    draw_plan,
)
from simulation.virtual_clock import SimulatedProcess

HeadRequest = Callable[[NodeRunners], Coroutine[Any, Any, str]]
"""What a head does for a request; returns the answer as JSON."""

_JOIN_SECONDS = 10.0
"""That the answers to ``join`` and ``leave`` may take."""


class MemoryHead:
    """Implements ``HeadClient`` on ``NodeRunners`` in this process. Every body passes through its JSON."""

    def __init__(self, name: str, carry: Callable[[HeadRequest, float], Awaitable[str]]) -> None:
        self._name = name
        self._carry = carry

    async def join(self, body: JoinBody) -> JoinResponse:
        text = body.model_dump_json()

        async def handle(head: NodeRunners) -> str:
            return head.join(self._name, JoinBody.model_validate_json(text)).model_dump_json()

        return JoinResponse.model_validate_json(await self._carry(handle, _JOIN_SECONDS))

    async def exchange(self, body: str, seconds: float) -> ExchangeAnswer:
        async def handle(head: NodeRunners) -> str:
            return await head.exchange(self._name, ExchangeBody.model_validate_json(body))

        return ExchangeAnswer.model_validate_json(await self._carry(handle, seconds))

    async def leave(self, body: LeaveBody) -> None:
        async def handle(head: NodeRunners) -> str:
            head.leave(self._name, body)
            return ""

        with suppress(HeadAwayError):
            await self._carry(handle, _JOIN_SECONDS)


OnRecord = Callable[[str, int, str], object]
"""Called with id, attempt and status of each record that is written (and may still be rolled back)."""

_TRIGGERS = """
CREATE TEMP TRIGGER sim_second_record BEFORE UPDATE OF cursor ON rollouts WHEN OLD.cursor IS NOT NULL
BEGIN SELECT sim_violation(OLD.rollout_id, 'a second record'); END;

CREATE TEMP TRIGGER sim_attempt_falls BEFORE UPDATE OF attempt ON rollouts
WHEN NEW.attempt <= OLD.attempt OR OLD.cursor IS NOT NULL OR OLD.begun IS NOT NULL
BEGIN SELECT sim_violation(OLD.rollout_id, 'attempt ' || NEW.attempt || ' begins after ' || OLD.attempt); END;

CREATE TEMP TRIGGER sim_attempt_ends BEFORE INSERT ON attempts
WHEN NEW.attempt IS NOT (SELECT begun FROM rollouts WHERE seq = NEW.seq)
BEGIN SELECT sim_violation(NEW.seq, 'attempt ' || NEW.attempt || ' ends and does not run'); END;

CREATE TEMP TRIGGER sim_cancel_undone BEFORE UPDATE OF cancel ON rollouts
WHEN OLD.cancel IS NOT NULL AND NEW.cancel IS NOT OLD.cancel
BEGIN SELECT sim_violation(OLD.rollout_id, 'its cancel changes'); END;

CREATE TEMP TRIGGER sim_record AFTER UPDATE OF cursor ON rollouts WHEN NEW.cursor IS NOT NULL
BEGIN
    SELECT sim_record(
        NEW.rollout_id, json_extract(r.record, '$.attempt'), NEW.attempt, NEW.begun, NEW.cancel,
        o.seq = NEW.seq, o.status, o.cause, o.reward
    ) FROM outcomes o JOIN records r USING (cursor) WHERE o.cursor = NEW.cursor;
END;
"""


async def open_checked_ledger(
    path: Path, clock: Callable[[], float], complain: Callable[[str], object], on_record: OnRecord
) -> tuple[SqliteLedger, LedgerWriter]:

    def check_record(
        rollout_id: str,
        attempt: int,
        next_attempt: int,
        begun: int | None,
        cancel: str | None,
        is_its_own: int,
        status: str,
        cause: str | None,
        reward: float | None,
    ) -> None:
        if not is_its_own:
            complain(f"{rollout_id}: its cursor is another's")
        if attempt != begun and (attempt < next_attempt or (begun is not None and status != "cancelled")):
            complain(f"{rollout_id}: a record of attempt {attempt}, which is over (running: {begun})")
        if cancel is not None and status != "cancelled":
            complain(f"{rollout_id}: {status} after its cancel was remembered")
        if reward is not None and (status == "cancelled" or cause in ("infrastructure", "task")):
            complain(f"{rollout_id}: a reward from {status}, {cause}")
        on_record(rollout_id, attempt, status)

    def note_violation(name: str | int, what: str) -> None:
        complain(f"{name}: {what}")

    writer = await LedgerWriter.open(LedgerConfig(path=path), clock)
    connection = writer.open_ledger.connection
    connection.create_function("sim_violation", 2, note_violation)
    connection.create_function("sim_record", 9, check_record)
    connection.executescript(_TRIGGERS)
    return SqliteLedger(writer, clock), writer


def break_writes(connection: sqlite3.Connection, *, broken: bool) -> None:
    """Let every statement that changes the file fail, as a broken disk does, or let them work again."""
    changes = {sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE}

    def authorize(action: int, *_: str | None) -> int:
        return sqlite3.SQLITE_DENY if action in changes else sqlite3.SQLITE_OK

    connection.set_authorizer(authorize if broken else None)


LEASE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    nodes: int
    engines: int
    runner: RunnerConfig
    kv_tokens: int
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
    process: SimulatedProcess
    runner: InProcessRunner
    node: Node


class RemoteEngine(LoopEngine):
    """A node's connection to a simulated engine, over which it makes and stops calls."""

    def __init__(
        self, network: Network, process: SimulatedProcess, engine: LoopEngine, engine_process: SimulatedProcess
    ) -> None:
        super().__init__(engine.sim)
        self._network, self._process, self._engine, self._engine_process = network, process, engine, engine_process

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        version = self.version
        try:
            result = await self._network.request(
                self._process, self._engine_process, lambda: self._engine.generate(request), cancels=True
            )
        except ConnectionError:
            raise EngineError(FailureKind.ENGINE_UNREACHABLE, f"engine {self.name}: no answer.") from None
        return replace(result, versions=[version] * len(result.token_ids))

    async def cancel(self, request_id: str) -> None:
        await self._engine.cancel(request_id)


class Cluster:
    """Engines, nodes and the head of the moment. Make it on the running virtual loop."""

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
        return self._trace.hexdigest()

    def trace(self, *what: object) -> None:
        self._trace.update(repr((round(self._loop.time(), 6), *what)).encode())

    async def start_head(self) -> None:
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
        life.service.settlement_observers.append(life.nodes.on_settled)
        life.pool.start_scraping()
        await life.service.start()

    def kill_head(self) -> None:
        life, self.life = self.life, None
        assert life is not None
        self.trace("head killed")
        life.process.kill()
        life.writer.open_ledger.close()

    async def stop_head(self) -> None:
        life = self.life
        assert life is not None
        await life.process.spawn(life.service.stop())
        self._check_idle(life)
        self.life = None
        await life.process.spawn(life.nodes.release())
        await life.process.spawn(life.pool.close())

    def start_node(self, name: str) -> None:
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
            slots=runner.pools.by_name["jobs"].size,
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
        self.trace("node killed", name)
        self.nodes.pop(name).process.kill()

    def break_ledger(self, *, broken: bool) -> None:
        if self.life is not None:
            self.trace("ledger broken", broken)
            break_writes(self.life.writer.open_ledger.connection, broken=broken)

    def _check_idle(self, life: Life) -> None:
        pool, nodes = life.pool.snapshot(), life.nodes.status().nodes
        held = {
            "tasks of the service": len(life.service.tasks),
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
            held[f"attempts of {node.process.name}"] = len(node.runner.attempts)
            held[f"slots of {node.process.name}"] = sum(each.busy for each in node.runner.pools.by_name.values())
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
