"""What load balancing, the fast shell and the clean-up of stale work are worth, switched off one by one.

The real service (dispatcher, runner, groups), the real pool with its balancer and admission, on an event loop with a
virtual clock (``prorl_gym.testing.virtual_clock``); engines and sandboxes are modelled. One small setting is run in
real time with as many real sandboxes as a small machine carries. Each step needs so many informative groups; a figure
is of the rollouts of these per second of rollout. Without clean-up the service is told of no demand and every rollout
is waited for; without balancing each engine gets as many rollouts as the others, with and without the admission that
follows the caches. Seeds are the same for every arm; the interval is that of the mean of the ratios (Student's t, 95
%).
"""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from statistics import mean
from typing import Literal

from _ablation_parts import RoundRobin, TimedToolEnvironment
from _ablation_workload import PUBLISHED, REAL, SEEDS, SWEEP, Plan, Setting, draw
from _report import SHORT, Figure, Report, figure, interval, peer, report

from prorl_gym.demand import Demand
from prorl_gym.inference.balance import CostPolicy
from prorl_gym.inference.balance.admission import AdmissionOptions
from prorl_gym.inference.balance.engine_pool import EnginePool, PoolOptions
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.rollout.service import RolloutService
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxBackend
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.settings import RolloutSettings
from prorl_gym.testing.inference.simulated_engine import Hardware, LoopEngine, SimEngine
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger
from prorl_gym.testing.simulation.planned_rollouts import PlannedPolicySource
from prorl_gym.testing.virtual_clock import run_virtually

Part = Literal["", "load balancing", "load balancing and admission", "fast shell", "clean-up"]
TARGETS: dict[Part, float | None] = {
    "load balancing": 1.48,
    "load balancing and admission": None,
    "fast shell": 1.28,
    "clean-up": 1.23,
}
RUN = "ablation"
_PATIENCE = 86_400.0
"""Virtual seconds of every deadline: nothing is cut off here."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run to make."""

    setting: Setting
    off: Part
    seed: int = 0
    real: bool = False
    """With real sandboxes, in real time."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run, made."""

    seconds: float
    delivered: int
    """Rollouts of the groups that trainers used."""
    ended: int
    utilisation: float
    """Share of the time for which engines worked."""

    @property
    def rate(self) -> float:
        """Rollouts used per second."""
        return self.delivered / self.seconds


class Training:
    """A trainer that wants batch after batch, and the service that it talks to."""

    def __init__(self, job: Job) -> None:
        self._setting, self._off, self._seed, self._real = job.setting, job.off, job.seed, job.real
        self._plans: dict[str, Plan] = {}
        self._open: dict[str, int] = {}
        self._rewards: dict[str, list[float]] = {}
        self._groups = self._ended = self._cursor = 0
        self._moved = asyncio.Event()
        self._problem = ""

    async def run(self) -> RunResult:
        """Make all steps."""
        setting, loop = self._setting, asyncio.get_running_loop()
        balanced = not self._off.startswith("load balancing")
        hardware = Hardware(setting.kv_tokens)
        engines = [
            LoopEngine(SimEngine(f"engine-{n}", hardware, setting.system_tokens, setting.group_tokens))
            for n in range(setting.engines)
        ]
        policy = CostPolicy(clock=loop.time) if balanced else RoundRobin()
        options = PoolOptions(admission=AdmissionOptions(follow_capacity=not self._off.endswith("admission")))
        async with EnginePool("policy", balance_policy=policy, options=options) as pool, self._sandboxes() as backend:
            for engine in engines:
                pool.add_engine(engine)
            service = self._service(pool, backend)
            await service.start()
            began = loop.time()
            for _ in range(setting.steps):
                await self._step(service)
            seconds = loop.time() - began
            used = mean(engine.busy for engine in engines) / seconds
            await service.cancel(runs=[RUN])
            await service.set_demand(RUN, None)
            await service.stop()
        return RunResult(seconds, setting.steps * setting.batch * setting.size, self._ended, used)

    @asynccontextmanager
    async def _sandboxes(self) -> AsyncGenerator[SandboxBackend, None]:
        backend = NamespaceBackend("userns", SandboxConfig()) if self._real else EmptyBackend()
        try:
            yield backend
        finally:
            await backend.close()

    def _service(self, pool: EnginePool, backend: SandboxBackend) -> RolloutService:
        setting = self._setting
        tools = TimedToolEnvironment(self._plans, slow=self._off == "fast shell", real=self._real)
        runner = InProcessRunner(
            lambda name: tools,
            PlannedPolicySource(
                lambda job: self._plans[job.request.rollout_id].turns,
                pool,
                prompt_tokens=setting.system_tokens + setting.group_tokens,
            ),
            backend,
            RunnerConfig(init=setting.init, run=setting.agents, eval=setting.eval),
            RolloutSettings(init_seconds=_PATIENCE, run_seconds=_PATIENCE, eval_seconds=_PATIENCE),
        )
        service = RolloutService(MemoryLedger(), runner)
        service.add_record_observer(self._saw)
        return service

    async def _step(self, service: RolloutService) -> None:
        if self._off != "clean-up":
            await service.set_demand(RUN, Demand(groups=self._setting.batch, after=self._cursor))
        await self._submit(service)
        while not await self._served(service):
            self._moved.clear()
            await self._moved.wait()
            if self._problem:
                raise RuntimeError(self._problem)

    async def _served(self, service: RolloutService) -> bool:
        """Whether the batch is there; with a demand, what is used is told by the next one."""
        if self._off == "clean-up":
            if self._open:
                return False
            whole = [rewards for rewards in self._rewards.values() if len(set(rewards)) > 1]
            self._rewards.clear()
            if len(whole) < self._setting.batch:
                raise RuntimeError("fewer informative groups than a step needs: submit more")
            return True
        ready = service.groups_status(RUN).ready_groups
        if len(ready) < self._setting.batch:
            if not self._open:
                await self._submit(service)
            return False
        self._cursor = ready[self._setting.batch - 1].cursor
        return True

    async def _submit(self, service: RolloutService) -> None:
        """Let as many groups be open as a step begins with."""
        requests: list[RolloutRequest] = []
        while len(self._open) < self._setting.submitted:
            group = f"g{self._groups}"
            self._open[group] = self._setting.size
            for place, plan in enumerate(draw(self._setting, self._seed, self._groups)):
                name = f"{group}-{place}"
                self._plans[name] = plan
                requests.append(
                    RolloutRequest(
                        rollout_id=name,
                        run_id=RUN,
                        group_id=group,
                        group_size=self._setting.size,
                        replica=place,
                        environment="tools",
                        task={"id": name},
                    )
                )
            self._groups += 1
        if requests:
            await service.submit(requests)

    def _saw(self, rollout: Rollout) -> None:
        self._ended += 1
        if rollout.outcome.status == "failed":
            self._problem = f"{rollout.rollout_id} failed: {rollout.outcome.message}"
        assert rollout.group_id is not None
        self._open[rollout.group_id] -= 1
        if not self._open[rollout.group_id]:
            del self._open[rollout.group_id]
        if rollout.reward is not None:
            self._rewards.setdefault(rollout.group_id, []).append(rollout.reward)
        self._moved.set()


def execute(job: Job) -> RunResult:
    """Make a run."""

    async def work() -> RunResult:
        return await Training(job).run()

    return asyncio.run(work()) if job.real else run_virtually(work())


def execute_all(jobs: Sequence[Job]) -> list[RunResult]:
    """Make many, on all cores."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as workers:
        return list(workers.map(execute, jobs))


def gains(setting: Setting, label: str, seeds: Sequence[int], *, aim: bool, real: bool = False) -> list[Figure]:
    """Return what each part is worth in a setting.

    Args:
        setting: what is run.
        label: of the figures.
        seeds: as many runs of each arm.
        aim: there are targets for it.
        real: with real sandboxes and in real time, one after the other.
    """
    parts: tuple[Part, ...] = ("", *TARGETS)
    jobs = [Job(setting, off, seed, real) for off in parts for seed in seeds]
    made = [execute(job) for job in jobs] if real else execute_all(jobs)
    by_part = {off: made[place * len(seeds) : (place + 1) * len(seeds)] for place, off in enumerate(parts)}
    rows: list[Figure] = []
    for part, target in TARGETS.items():
        ratios = [full.rate / less.rate for full, less in zip(by_part[""], by_part[part], strict=True)]
        rows.append(
            figure(
                f"{label}: the full system over one without {part}",
                ratios,
                "x",
                better="higher",
                target=target if aim else None,
                interval=interval(ratios) if len(ratios) > 1 else None,
            )
        )
    if aim:
        full = by_part[""]
        rates = [peer(f"without {part}", [one.rate for one in by_part[part]]) for part in TARGETS]
        used = [peer(f"without {part}", [100 * one.utilisation for one in by_part[part]]) for part in TARGETS]
        rows.append(figure("rollouts used", [one.rate for one in full], "1/s", better="higher", peers=rates))
        busy = [100 * one.utilisation for one in full]
        rows.append(figure("time for which engines work", busy, "%", better="higher", peers=used))
    return rows


def run() -> Report:
    """Measure."""
    if SHORT:
        return report("ablation", gains(replace(PUBLISHED, steps=1, batch=4, submitted=16), "a tenth", [1], aim=True))
    rows = gains(PUBLISHED, "published setting", SEEDS, aim=True)
    for label, setting in SWEEP.items():
        rows += gains(setting, label, SEEDS[:1], aim=False)
    rows += gains(REAL, f"{REAL.agents} real sandboxes, 2 engines", SEEDS[:1], aim=False, real=True)
    return report("ablation", rows)


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
