"""Schemes of ``bench groups``: the service's own, and what others do about groups that are not needed.

Each of the others is as its source describes it and granted what costs it nothing: none of them loses time to a slow
cancel, to a refit or to bookkeeping.
"""

from collections.abc import Sequence
from typing import Literal

from _groups_sim import TOOL_SHARE, ActiveGroup, Job, Tasks, Workers, new_group

from prorl_gym.client.wire_models import RolloutSummary
from prorl_gym.demand import Demand, RedundantHandling
from prorl_gym.errors import CancelReason
from prorl_gym.rollout.groups.group import Replica
from prorl_gym.rollout.groups.group_scheduler import GroupActions, GroupScheduler
from prorl_gym.rollout.protocol import AttemptPosition, Stage

Reuse = Literal["lost", "replayed"]
"""What becomes of what was cut. ``replayed``: its tokens are kept, its sandbox is not, so that one is set up again and
its tools run again, which is what an agent needs."""
_RUN = "run"
_AHEAD = 8
"""Batches that the trainer has submitted and that are not settled: they cost nothing before they begin."""


class ServiceScheme:
    """Implements ``Scheme``: the service's own book decides; this only carries out what it says.

    The trainer states its demand when a step begins, and again when it has its batch.
    """

    def __init__(self, workers: Workers, tasks: Tasks, redundant: RedundantHandling | None = None) -> None:
        self._workers, self._tasks = workers, tasks
        setting = workers.setting
        self._demand = Demand(
            groups=setting.batch, max_staleness=setting.staleness, redundant=redundant or RedundantHandling()
        )
        self._book = GroupScheduler(_RUN, self._demand)
        self._jobs: dict[str, Job] = {}
        self._positions: dict[str, AttemptPosition] = {}
        self._open: dict[str, ActiveGroup] = {}
        self._settled: dict[str, ActiveGroup] = {}
        self._came = self._cursor = 0
        self._tick: float | None = None

    def on_step_start(self, version: int) -> None:
        self._set(self._demand.model_copy(update={"version": version}))

    def on_training(self) -> None:
        self._set(self._demand)

    def on_stage_entered(self, job: Job) -> None:
        position = self._positions[job.name]
        if job.state == "parked":
            position.is_parked = True
            self._book.on_parking_changed(job.name)
        else:
            stage: Stage = job.state  # pyright: ignore[reportAssignmentType]  # no other state is reported
            position.enter_stage(stage, self._workers.now)
            self._book.on_stage_entered(job.name)
        self._act()

    def on_reward(self, job: Job) -> None:
        self._end(job)
        self._act()

    def pop_batch(self) -> list[ActiveGroup] | None:
        status = self._book.results
        least = self._workers.version - self._workers.setting.staleness
        ready = status.unused_ready(self._demand.after)
        fresh = [one for one in ready if one.oldest_version is None or one.oldest_version >= least]
        if len(fresh) < self._demand.groups:
            return None
        taken = fresh[: self._demand.groups]
        self._demand = self._demand.model_copy(update={"after": taken[-1].cursor})
        return [self._settled[one.group_id] for one in taken]

    def _set(self, demand: Demand) -> None:
        self._demand = demand
        self._book.set_demand(demand)
        self._act()

    def _submit(self) -> list[Job]:
        fresh: list[Job] = []
        while len(self._open) < _AHEAD * self._demand.groups:
            group = new_group(self._tasks[self._came])
            name = str(self._came)
            self._came += 1
            self._open[name] = group
            for job in group.jobs:
                self._jobs[job.name] = job
                replica = Replica(job.name, _RUN, name, len(group.jobs), "env")
                self._positions[job.name] = replica.position
                self._book.on_accepted(replica)
            fresh += group.jobs
        return fresh

    def _act(self) -> None:
        fresh = self._submit()
        decisions = self._book.decide(self._workers.now)
        held = set(decisions.hold)
        for job in fresh:
            if job.name not in held and job.state == "new":
                self._workers.enqueue(job)
        self._carry_out(decisions)
        tick = self._book.next_decision_at()
        if tick is not None and tick != self._tick:
            self._tick = tick
            self._workers.call_at(tick, self._act)

    def _carry_out(self, decisions: GroupActions) -> None:
        for job in self._found(decisions.hold):
            self._workers.dequeue(job)
        for job in self._found(decisions.release):
            if job.state == "new":
                self._workers.enqueue(job)
        for job in self._found(decisions.park):
            self._workers.park(job)
        for job in self._found(decisions.unpark):
            self._workers.unpark(job)
            self._positions[job.name].is_parked = False
            self._book.on_parking_changed(job.name)
        for reason, ids in decisions.cancel.items():
            for job in self._found(ids):
                self._workers.stop_job(job)
                self._end(job, reason)
        for group_id, state in decisions.settled:
            group = self._open.pop(group_id)
            if state == "ready":
                self._settled[group_id] = group
        if decisions.cancel or decisions.settled:
            self._workers.call_at(self._workers.now, self._act)

    def _found(self, ids: Sequence[str]) -> list[Job]:
        return [self._jobs[name] for name in ids if name in self._jobs]

    def _end(self, job: Job, cut: CancelReason | None = None) -> None:
        self._cursor += 1
        del self._jobs[job.name]
        member = RolloutSummary(
            cursor=self._cursor,
            rollout_id=job.name,
            run_id=_RUN,
            group_id=str(job.group.task.number),
            group_size=len(job.group.jobs),
            replica=0,
            environment="env",
            evaluation=False,
            stands_in_for=None,
            status="completed" if cut is None else "cancelled",
            detail="" if cut is None else cut.value,
            cause=None,
            reward=job.draw.reward if cut is None else None,
            masked=False,
            oldest_version=job.version,
            turns=0,
            sampled_tokens=0,
            accepted_at=0.0,
            finished_at=self._workers.now,
            released=False,
        )
        self._book.on_finished(member, job.spent)


class _Peer:
    """What all of them share: the order of the prompts, and the groups that are complete."""

    def __init__(self, workers: Workers, tasks: Tasks) -> None:
        self.workers, self.setting = workers, workers.setting
        self._tasks, self._came = tasks, 0
        self.open: dict[int, ActiveGroup] = {}
        self.ready: list[ActiveGroup] = []

    def on_training(self) -> None: ...

    def on_stage_entered(self, job: Job) -> None: ...

    def on_reward(self, job: Job) -> None:
        group = job.group
        if group.complete and self.open.pop(group.task.number, None) is not None and group.task.informative:
            self.ready.append(group)

    def begin_group(self) -> None:
        group = new_group(self._tasks[self._came])
        self._came += 1
        self.open[group.task.number] = group
        for job in group.jobs:
            self.workers.enqueue(job)

    def pop_groups(self) -> list[ActiveGroup] | None:
        if len(self.ready) < self.setting.batch:
            return None
        taken, self.ready = self.ready[: self.setting.batch], self.ready[self.setting.batch :]
        return taken


class WaitForAll(_Peer):
    """Implements ``Scheme``: rounds of whole batches; what is informative counts, what is too much is discarded.

    Synchronous dynamic sampling as in DAPO (arXiv:2503.14476) and NeMo-RL.
    """

    def __init__(self, workers: Workers, tasks: Tasks, many: float) -> None:
        super().__init__(workers, tasks)
        self._round = max(1, round(many * self.setting.batch))

    def on_step_start(self, version: int) -> None:
        self.ready.clear()
        self._begin_round()

    def pop_batch(self) -> list[ActiveGroup] | None:
        if self.open:
            return None
        batch = self.pop_groups()
        if batch is None:
            self._begin_round()
        return batch

    def _begin_round(self) -> None:
        for _ in range(self._round):
            self.begin_group()


class BatchFull(_Peer):
    """Implements ``Scheme``: more is begun than is wanted, and all that runs is cut when the batch is full.

    slime's over-sampling, and APRIL (arXiv:2509.18521) with its reuse of partial rollouts: these come first in the
    next step, whatever version began them.
    """

    def __init__(self, workers: Workers, tasks: Tasks, many: float, reuse: Reuse) -> None:
        super().__init__(workers, tasks)
        self._many = max(1, round(many * self.setting.batch))
        self._reuse: Reuse = reuse
        self._partial: list[ActiveGroup] = []

    def on_step_start(self, version: int) -> None:
        self._fill()

    def on_reward(self, job: Job) -> None:
        super().on_reward(job)
        if self.workers.waiting:
            self._fill()

    def pop_batch(self) -> list[ActiveGroup] | None:
        batch = self.pop_groups()
        if batch is not None:
            self._cut_all()
        return batch

    def _fill(self) -> None:
        while len(self.open) + len(self.ready) < self.setting.batch:
            for _ in range(self._many):
                if self._partial:
                    self._go_on(self._partial.pop(0))
                else:
                    self.begin_group()

    def _cut_all(self) -> None:
        groups, self.open = list(self.open.values()), {}
        for group in groups:
            for job in group.jobs:
                if job.live and (self._reuse == "lost" or job.state not in ("graded", "eval")):
                    self.workers.stop_job(job)
        if self._reuse != "lost":
            self._partial += groups

    def _go_on(self, group: ActiveGroup) -> None:
        self.open[group.task.number] = group
        for job in group.jobs:
            if job.state == "gone":
                done = job.draw.run - job.left if job.version is not None else 0.0
                self.workers.enqueue(job, done=done, again=done * TOOL_SHARE)
        if group.complete:
            del self.open[group.task.number]
            if group.task.informative:
                self.ready.append(group)


class DropStale(_Peer):
    """Implements ``Scheme``: so many groups are always under way; those that become too old are dropped.

    The trainer takes what is ready, and work goes on while it trains: prime-rl, and NeMo-RL's windowed controller.
    """

    def __init__(self, workers: Workers, tasks: Tasks, many: float, buffer: float) -> None:
        super().__init__(workers, tasks)
        self._many = max(1, round(many * self.setting.batch))
        self._most = round(buffer * self.setting.batch)

    def on_step_start(self, version: int) -> None:
        self.ready = [group for group in self.ready if not self._stale(group)]
        for group in list(self.open.values()):
            if self._stale(group):
                for job in group.jobs:
                    if job.live:
                        self.workers.stop_job(job)
                del self.open[group.task.number]
        self._fill()

    def on_training(self) -> None:
        self._fill()

    def on_reward(self, job: Job) -> None:
        super().on_reward(job)
        self._fill()

    def pop_batch(self) -> list[ActiveGroup] | None:
        return self.pop_groups()

    def _stale(self, group: ActiveGroup) -> bool:
        return group.oldest is not None and self.workers.version - group.oldest > self.setting.staleness

    def _fill(self) -> None:
        while len(self.open) < self._many and len(self.ready) < self._most:
            self.begin_group()
