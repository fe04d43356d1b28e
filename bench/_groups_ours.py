"""Ours: the service's own book (``prorl_gym.rollout.groups``) decides; this only carries out what it says."""

from collections.abc import Sequence

from _groups_sim import ActiveGroup, Job, Workers, new_group
from _groups_workload import Tasks

from prorl_gym.client.wire_models import RolloutSummary
from prorl_gym.demand import Demand, RedundantHandling
from prorl_gym.errors import CancelReason
from prorl_gym.rollout.groups.group import Replica
from prorl_gym.rollout.groups.group_actions import GroupActions
from prorl_gym.rollout.groups.group_scheduler import GroupScheduler
from prorl_gym.rollout.protocol import AttemptPosition, Stage

_RUN = "run"
_AHEAD = 8
"""Batches that the trainer has submitted and that are not settled: they cost nothing before they begin."""


class ServiceScheme:
    """Implements ``Scheme``: a trainer that states its demand when a step begins, and again when it has its batch.

    Args:
        workers: carry it out.
        tasks: what is submitted, in order.
        redundant: what becomes of what is not needed.
    """

    def __init__(
        self,
        workers: Workers,
        tasks: Tasks,
        redundant: RedundantHandling | None = None,
    ) -> None:
        self._workers, self._tasks = workers, tasks
        setting = workers.setting
        self._demand = Demand(
            groups=setting.batch,
            max_staleness=setting.staleness,
            redundant=redundant or RedundantHandling(),
        )
        self._book = GroupScheduler(_RUN, self._demand)
        self._jobs: dict[str, Job] = {}
        self._positions: dict[str, AttemptPosition] = {}
        self._open: dict[str, ActiveGroup] = {}
        self._settled: dict[str, ActiveGroup] = {}
        self._came = self._cursor = 0
        self._tick: float | None = None

    def on_step_start(self, version: int) -> None:
        """See ``Scheme.on_step_start``."""
        self._set(self._demand.model_copy(update={"version": version}))

    def on_training(self) -> None:
        """See ``Scheme.on_training``. The next batch is wished for at once."""
        self._set(self._demand)

    def on_stage_entered(self, job: Job) -> None:
        """See ``Scheme.on_stage_entered``."""
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
        """See ``Scheme.finished``."""
        self._end(job)
        self._act()

    def pop_batch(self) -> list[ActiveGroup] | None:
        """See ``Scheme.pop_batch``."""
        status = self._book.results
        fresh = [one for one in status.unused_ready(self._demand.after) if self._fresh(one.oldest_version)]
        if len(fresh) < self._demand.groups:
            return None
        taken = fresh[: self._demand.groups]
        self._demand = self._demand.model_copy(update={"after": taken[-1].cursor})
        return [self._settled[one.group_id] for one in taken]

    def _fresh(self, oldest: int | None) -> bool:
        return oldest is None or self._workers.version - oldest <= self._workers.setting.staleness

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
