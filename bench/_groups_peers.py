"""What others do about groups that are not needed, each as its source describes it and granted what costs it nothing.

None of them loses time to a slow cancel, to a refit or to bookkeeping.
"""

from typing import Literal

from _groups_sim import ActiveGroup, Job, Workers, new_group
from _groups_workload import TOOL_SHARE, Tasks

Reuse = Literal["lost", "replayed", "kept"]


class _Peer:
    """What all of them share: the order of the prompts, and the groups that are complete."""

    def __init__(self, workers: Workers, tasks: Tasks) -> None:
        self.workers, self.setting = workers, workers.setting
        self._tasks, self._came = tasks, 0
        self.open: dict[int, ActiveGroup] = {}
        self.ready: list[ActiveGroup] = []

    def on_training(self) -> None:
        """Nothing is begun for it."""

    def on_stage_entered(self, job: Job) -> None:
        """Nothing is decided by it."""

    def on_reward(self, job: Job) -> None:
        """Keep the group when it is complete and teaches something."""
        group = job.group
        if group.complete and self.open.pop(group.task.number, None) is not None and group.task.informative:
            self.ready.append(group)

    def begin_group(self) -> None:
        """Begin the next prompt's group."""
        group = new_group(self._tasks[self._came])
        self._came += 1
        self.open[group.task.number] = group
        for job in group.jobs:
            self.workers.enqueue(job)

    def drop_group(self, group: ActiveGroup) -> None:
        """Stop a group for good."""
        for job in group.jobs:
            if job.live:
                self.workers.stop_job(job)
        self.open.pop(group.task.number, None)

    def pop_groups(self) -> list[ActiveGroup] | None:
        """Return a batch of what is ready, the first that were."""
        if len(self.ready) < self.setting.batch:
            return None
        taken, self.ready = self.ready[: self.setting.batch], self.ready[self.setting.batch :]
        return taken


class WaitForAll(_Peer):
    """Implements ``Scheme``: rounds of whole batches; what is informative counts, what is too much is discarded.

    Synchronous dynamic sampling as in DAPO (arXiv:2503.14476) and NeMo-RL.

    Args:
        workers: carry it out.
        tasks: what is submitted, in order.
        many: groups of a round, in batches.
    """

    def __init__(self, workers: Workers, tasks: Tasks, many: float) -> None:
        super().__init__(workers, tasks)
        self._round = max(1, round(many * self.setting.batch))

    def on_step_start(self, version: int) -> None:
        """See ``Scheme.on_step_start``."""
        self.ready.clear()
        self._begin_round()

    def pop_batch(self) -> list[ActiveGroup] | None:
        """See ``Scheme.pop_batch``."""
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

    Args:
        workers: carry it out.
        tasks: what is submitted, in order.
        many: groups that are begun at once, in batches; and again whenever too few are left for a whole one.
        reuse: of what was cut. ``replayed``: its tokens are kept, its sandbox is not, so that one is set up anew and
            its tools run again, which is what an agent needs; ``kept``: the sandbox is kept too, at no cost.
    """

    def __init__(self, workers: Workers, tasks: Tasks, many: float, reuse: Reuse) -> None:
        super().__init__(workers, tasks)
        self._many = max(1, round(many * self.setting.batch))
        self._reuse: Reuse = reuse
        self._partial: list[ActiveGroup] = []

    def on_step_start(self, version: int) -> None:
        """See ``Scheme.on_step_start``."""
        self._fill()

    def on_reward(self, job: Job) -> None:
        """See ``Scheme.on_reward``."""
        super().on_reward(job)
        if self.workers.waiting:
            self._fill()

    def pop_batch(self) -> list[ActiveGroup] | None:
        """See ``Scheme.pop_batch``."""
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
                self.workers.enqueue(job, done=done, again=done * TOOL_SHARE if self._reuse == "replayed" else 0.0)
        if group.complete:
            del self.open[group.task.number]
            if group.task.informative:
                self.ready.append(group)


class DropStale(_Peer):
    """Implements ``Scheme``: so many groups are always under way; those that become too old are dropped.

    The trainer takes what is ready, and work goes on while it trains: prime-rl, and NeMo-RL's windowed controller.

    Args:
        workers: carry it out.
        tasks: what is submitted, in order.
        many: groups under way, in batches.
        buffer: no group is begun while so many batches are ready.
    """

    def __init__(self, workers: Workers, tasks: Tasks, many: float, buffer: float) -> None:
        super().__init__(workers, tasks)
        self._many = max(1, round(many * self.setting.batch))
        self._most = round(buffer * self.setting.batch)

    def on_step_start(self, version: int) -> None:
        """See ``Scheme.on_step_start``."""
        self.ready = [group for group in self.ready if not self._stale(group)]
        for group in list(self.open.values()):
            if self._stale(group):
                self.drop_group(group)
        self._fill()

    def on_training(self) -> None:
        """See ``Scheme.on_training``."""
        self._fill()

    def on_reward(self, job: Job) -> None:
        """See ``Scheme.on_reward``."""
        super().on_reward(job)
        self._fill()

    def pop_batch(self) -> list[ActiveGroup] | None:
        """See ``Scheme.pop_batch``."""
        return self.pop_groups()

    def _stale(self, group: ActiveGroup) -> bool:
        return group.oldest is not None and self.workers.version - group.oldest > self.setting.staleness

    def _fill(self) -> None:
        while len(self.open) < self._many and len(self.ready) < self._most:
            self.begin_group()
