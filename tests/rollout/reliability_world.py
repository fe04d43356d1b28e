"""One life of a service whose engines, sandboxes and disk fail on command, and which can be killed without a word.

Everything that decides is real: service, dispatcher, runner, groups, engine pool, SQLite. Only what would do the work
is not: engines answer from a script, sandboxes are empty, environments do what their row says.
"""

import asyncio
import random
from collections.abc import Callable
from inspect import isfunction
from pathlib import Path
from typing import Any, cast

from reliability_model import Model

from prorl_gym.environments.protocol import Episode, RunContext
from prorl_gym.errors import EngineError, FailureKind, RolloutError
from prorl_gym.inference.balance.admission import AdmissionOptions
from prorl_gym.inference.balance.engine_pool import EnginePool, PoolOptions
from prorl_gym.inference.balance.health_monitor import FailoverOptions
from prorl_gym.inference.protocol import GenerationRequest
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.turn_log import TurnLog
from prorl_gym.records import Message
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig, LedgerError, LedgerFullError
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.protocol import Job
from prorl_gym.rollout.scheduling.attempt_settler import RetryConfig
from prorl_gym.rollout.scheduling.model_source import ModelPolicySource
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.rollout.service import RolloutService
from prorl_gym.sandbox.protocol import Sandbox, SandboxSpec
from prorl_gym.settings import ResolvedSettings, RolloutSettings
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend, Script, ScriptedEnvironment, environment_lookup

STAGE_SECONDS = 0.15
PARKED = 3
_LOOPS = 2
"""Tasks of a service that run as long as it dispatches."""
_METHODS = {name: one for name, one in vars(SqliteLedger).items() if isfunction(one) and not name.startswith("_")}
_READS = {
    *(SqliteLedger.pending_jobs, SqliteLedger.next_jobs, SqliteLedger.get, SqliteLedger.requests),
    *(SqliteLedger.read_records, SqliteLedger.summaries),
    *(SqliteLedger.list_rollouts, SqliteLedger.analyze, SqliteLedger.list_problems),
    *(SqliteLedger.unacknowledged, SqliteLedger.demands, SqliteLedger.policy_versions, SqliteLedger.usage),
}
_UNHARMED = {SqliteLedger.recover, SqliteLedger.collect_garbage, SqliteLedger.close}
"""Writes that a broken disk does not fail here: no story begins with one, and a life has to end."""
WRITES = {name for name, method in _METHODS.items() if method not in _READS | _UNHARMED}
"""Methods that a broken disk fails: every method of the ledger, also one that is new, that is not named above."""


class MortalLedger:
    """A ledger in a file whose process can die: from then on no call is answered, and none begins.

    ``full`` refuses what is new, ``broken`` everything that writes, as a disk does.
    """

    def __init__(self, inner: SqliteLedger, model: Model) -> None:
        self.inner = inner
        self.dead = False
        self.full = False
        self.broken = False
        self._model = model

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = _METHODS[name]

        async def call(*args: Any, **named: Any) -> Any:
            await self._alive()
            if method is SqliteLedger.cancel:
                self._model.wants_cancelled(args[0])
            if self.broken and name in WRITES:
                self._model.refused(name)
                raise LedgerError("the disk is broken.", "Nothing to do: this is a test.")
            if self.full and method in (SqliteLedger.add_rollouts, SqliteLedger.add_and_begin):
                raise LedgerFullError("the disk is full.", "Nothing to do: this is a test.")
            answer = await getattr(self.inner, name)(*args, **named)
            await self._alive()
            if method is SqliteLedger.finish:
                self._model.wrote(args[0], answer)
            elif method is SqliteLedger.add_rollouts:
                self._model.took(args[0], answer)
            elif method is SqliteLedger.add_and_begin:
                self._model.took(args[0], answer[0])
            elif method is SqliteLedger.cancel:
                self._model.noted_cancel(args[0])
            return answer

        return call

    async def _alive(self) -> None:
        if self.dead:
            await asyncio.get_running_loop().create_future()


class FailingBackend(EmptyBackend):
    """Starts nothing while it is ``down``."""

    def __init__(self) -> None:
        super().__init__(start_ticks=2)
        self.down = False

    async def start_sandbox(self, spec: SandboxSpec) -> Sandbox:
        if self.down:
            raise RolloutError(FailureKind.SANDBOX_UNAVAILABLE, "no sandbox starts.", "Nothing to do: this is a test.")
        return await super().start_sandbox(spec)


class Talker(ScriptedEnvironment):
    """Its agent says something between any two model calls. It may be resumed."""

    def normalize_answer(self, text: str) -> str:
        return text

    async def run(self, task: Script, episode: Episode, context: RunContext) -> None:
        context.artifacts.messages.extend(episode.messages)
        for turn in range(task.turns):
            said = [Message(role="user", content="on")]
            answer = await (
                context.policy.respond(said) if turn else context.policy.start_conversation(episode.messages, ())
            )
            context.artifacts.messages.extend([*(said if turn else ()), Message(role="assistant", content=answer.text)])
        await self._act(task, task.run)


def thinking(seed: int) -> Callable[[GenerationRequest], Reply]:
    """Return an engine's script: answers, some of them after a while."""
    dice = random.Random(seed)

    def answer(request: GenerationRequest) -> Reply:
        pause = dice.choice([0.0, 0.0, 0.001, 0.015])
        hold = asyncio.Event() if pause else None
        if hold is not None:
            asyncio.get_running_loop().call_later(pause, hold.set)
        return Reply((10, 11, 12), hold=hold)

    return answer


class WatchedSource(ModelPolicySource):
    """Tells whose agent begins."""

    def __init__(self, pool: EnginePool, codec: ChatCodec, model: Model) -> None:
        super().__init__(pool, codec)
        self._model = model

    def open_session(self, job: Job, settings: ResolvedSettings, turn_log: TurnLog | None = None) -> Any:
        self._model.began(job.request.rollout_id)
        return super().open_session(job, settings, turn_log)


class World:
    """One life: from a start on what the ledger's file holds to a stop, or to sudden death."""

    def __init__(self, ledger: MortalLedger, codec: ChatCodec, model: Model) -> None:
        self.ledger = ledger
        self.backend = FailingBackend()
        self.engines = [FakeEngine(f"engine-{n}", thinking(n)) for n in range(2)]
        self.pool = EnginePool(
            "policy",
            failover=FailoverOptions(recovery_seconds=0.03, first_probe_seconds=0.001, max_probe_seconds=0.005),
            options=PoolOptions(admission=AdmissionOptions(max_live_rollouts=3)),
        )
        for engine in self.engines:
            self.pool.add_engine(engine)
        limits = RolloutSettings(
            init_seconds=STAGE_SECONDS, run_seconds=STAGE_SECONDS, eval_seconds=STAGE_SECONDS, resume=True
        )
        self.runner = InProcessRunner(
            environment_lookup(Talker("one", limits), Talker("two", limits)),
            WatchedSource(self.pool, codec, model),
            self.backend,
            RunnerConfig(queue=3, init=2, ready=1, run=5, eval=2, parked=PARKED, cleanup_seconds=1),
        )
        self.service = RolloutService(
            cast("SqliteLedger", ledger),
            self.runner,
            RetryConfig(pause_seconds=0.001, longest_pause_seconds=0.004, restarts=1000, ledger_pause_seconds=0.005),
            {"two": 2.0},
        )
        self.at_work: dict[str, None] = {}
        """Rollouts that the runner has had, without a record."""
        self._is_serving = False
        self.service.stage_observers.append(lambda event: self.at_work.setdefault(event.rollout_id))
        self.service.record_observers.append(lambda rollout: self.at_work.pop(rollout.rollout_id, None))

    @classmethod
    async def open(cls, path: Path, codec: ChatCodec, model: Model) -> "World":
        """Open a file; nothing is served before ``begin``."""
        inner = await SqliteLedger.open(LedgerConfig(path=path))
        return cls(MortalLedger(inner, model), codec, model)

    async def begin(self) -> None:
        """Serve."""
        self.pool.start_scraping()
        await self.service.start()
        self._is_serving = True

    def repair(self) -> None:
        """Everything works again."""
        self.ledger.full = self.ledger.broken = False
        self.backend.down = False
        for engine in self.engines:
            engine.down_error = None
        self.service.release_dispatch()

    def kill_engine(self, number: int) -> None:
        self.engines[number].down_error = EngineError(FailureKind.ENGINE_UNREACHABLE, f"engine-{number}: is dead.")

    async def stop(self, *, drain: bool) -> None:
        """End as SIGTERM does."""
        self._is_serving = False
        async with asyncio.timeout(60):
            await self.service.stop(drain=drain)
            await self.pool.close()

    async def die(self) -> None:
        """End as SIGKILL does: no further call returns or writes anything; the file is what was committed."""
        self.ledger.dead = True
        await _end_other_tasks()
        stopping = asyncio.create_task(self.service.stop(drain=False))  # its timers would outlive its tasks
        await asyncio.wait({stopping}, timeout=0.01)  # the dead ledger lets it write nothing
        await _end_other_tasks()
        await self.ledger.inner.close()

    def held(self) -> dict[str, int]:
        """What is taken and was not given back; empty when all of it was."""
        engines, pools = self.pool.snapshot(), self.runner.pools.by_name
        counts = {
            "entries": self.service.pending,
            "attempts": len(self.runner.attempts),
            "tasks of the runner": len(self.runner.supervisors),
            **{f"slots of {name}": pool.busy for name, pool in pools.items()},
            **{f"waits for {name}": pool.waiting for name, pool in pools.items()},
            "sandboxes": self.backend.sandbox_count,
            "calls": sum(engine.in_flight for engine in engines.engines),
            "sessions of engines": engines.admission.sessions,
            "live at engines": engines.admission.live,
            "waiting for engines": engines.admission.waiting,
            "tasks": len(self.service.tasks) - (_LOOPS if self._is_serving else 0),
        }
        return {name: count for name, count in counts.items() if count}


async def _end_other_tasks() -> None:
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=10)
