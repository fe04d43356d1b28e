"""Workers, rollouts and a trainer, on a virtual clock. What is begun and stopped is up to a scheme (``_groups_*``).

A worker-second is a slot of RUN for a second in which it works, or in which the trainer waits for rollouts: until then
nothing else may have it. While the trainer trains, an idle worker is free for others and is counted for no scheme.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from _groups_workload import TURN_SECONDS, Draw, Setting, Task

JobState = Literal["new", "init", "ready", "run", "parked", "graded", "eval", "done", "gone"]


@dataclass(slots=True, eq=False)
class Job:
    """One rollout."""

    name: str
    group: "ActiveGroup"
    draw: Draw
    state: JobState = "new"
    left: float = 0.0
    """Seconds of RUN that are still to be done."""
    since: float = 0.0
    """When it entered the stage it is in."""
    version: int | None = None
    """The policy's when it began to sample."""
    epoch: int = 0
    """What was planned for an earlier one does not happen any more."""
    spent: float = 0.0
    """Seconds of RUN that it has used."""
    to_park: bool = False

    @property
    def live(self) -> bool:
        """Whether it may still get a reward."""
        return self.state not in ("done", "gone")


@dataclass(slots=True, eq=False)
class ActiveGroup:
    """A group under way."""

    task: Task
    jobs: list[Job] = field(default_factory=list[Job])

    @property
    def complete(self) -> bool:
        """Whether all rewards are in."""
        return all(job.state == "done" for job in self.jobs)

    @property
    def oldest(self) -> int | None:
        """The version of its oldest token."""
        return min((job.version for job in self.jobs if job.version is not None), default=None)


class Scheme(Protocol):
    """Decides what is begun and what is stopped."""

    def on_step_start(self, version: int) -> None:
        """The trainer waits for a batch, at this version of the policy. Told at the start of each step."""
        ...

    def on_training(self) -> None:
        """The trainer has its batch, and trains."""
        ...

    def on_stage_entered(self, job: Job) -> None:
        """A rollout entered INIT, RUN or EVAL, was parked, or goes on."""
        ...

    def on_reward(self, job: Job) -> None:
        """A rollout has its reward."""
        ...

    def pop_batch(self) -> list[ActiveGroup] | None:
        """Return the batch, once there is one. Asked after everything that happens while the trainer waits."""
        ...


@dataclass(slots=True)
class Result:
    """What one run showed."""

    seconds: float = 0.0
    worker_seconds: float = 0.0
    busy: float = 0.0
    """Worker-seconds in which something ran."""
    delivered: list[Task] = field(default_factory=list[Task])
    behind: list[int] = field(default_factory=list[int])
    """Versions between each delivered group's oldest token and the step that used it."""
    waits: list[float] = field(default_factory=list[float])
    """Seconds that the trainer waited, per step."""
    most_parked: int = 0

    @property
    def rate(self) -> float:
        """Informative groups per 1000 worker-seconds."""
        return 1000 * len(self.delivered) / self.worker_seconds


class Workers:
    """The stages of one service: FIFO, with slots, and a bound on what is prepared ahead."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.now = 0.0
        self.version = 0
        self.parked = 0
        self.result = Result()
        self.waiting = False
        self._free = {"init": setting.init, "run": setting.run, "eval": setting.eval}
        self._init: deque[Job] = deque()
        self._run: deque[Job] = deque()
        self._eval: deque[Job] = deque()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ticket = 0
        self._tell: Scheme | None = None

    def set_scheme(self, scheme: Scheme) -> None:
        """Tell this scheme what happens."""
        self._tell = scheme

    # --- what schemes do ----------------------------------------------------------------------------------------

    def enqueue(self, job: Job, *, done: float = 0.0, again: float = 0.0) -> None:
        """Let a rollout stand in line.

        Args:
            job: new, or cut before.
            done: seconds of its RUN that are kept.
            again: seconds of RUN that have to be spent once more first.
        """
        job.left = job.draw.run - done + again
        job.state, job.to_park = "new", False
        job.epoch += 1
        self._init.append(job)

    def stop_job(self, job: Job) -> None:
        """Stop a rollout for good, or until it is begun again."""
        if job.state == "run":
            self._stop_running(job)
        elif job.state in ("init", "eval"):
            self._free[job.state] += 1
        elif job.state == "parked":
            self.parked -= 1
        for line in (self._init, self._run, self._eval):
            if job in line:
                line.remove(job)
        job.state = "gone"
        job.epoch += 1

    def dequeue(self, job: Job) -> None:
        """Take one that has not begun out of the line; ``enqueue`` puts it there again."""
        if job in self._init:
            self._init.remove(job)

    def park(self, job: Job) -> None:
        """Let an agent stop before its next model call. It keeps its sandbox."""
        job.to_park = True
        if job.state == "ready" and job.version is not None:  # it was to go on, and stands in line for that
            self._run.remove(job)
            job.state = "parked"
            self.parked += 1
        self._after(TURN_SECONDS / 2, self._parks, job)

    def unpark(self, job: Job) -> None:
        """Let it go on, before those that have not begun."""
        job.to_park = False
        if job.state == "parked":
            self.parked -= 1
            job.state = "ready"
            self._run.appendleft(job)

    def call_at(self, when: float, act: Callable[[], None]) -> None:
        """Do something later."""
        self._ticket += 1
        heapq.heappush(self._events, (max(when, self.now), self._ticket, act))

    # --- time ---------------------------------------------------------------------------------------------------

    def grant_slots(self) -> None:
        """Give free slots to who waits for them."""
        while self._run and self._free["run"]:
            job = self._run.popleft()
            goes_on, job.version = job.version is not None, self.version if job.version is None else job.version
            self._enter(job, "run", job.left, self._ran, tell=not goes_on)
        while self._eval and self._free["eval"]:
            job = self._eval.popleft()
            self._enter(job, "eval", job.draw.eval, self._graded)
        while self._init and self._free["init"] and len(self._run) < self.setting.init:
            job = self._init.popleft()
            self._enter(job, "init", job.draw.init, self._prepared)

    def step(self) -> None:
        """Go on to the next thing that happens.

        Raises:
            RuntimeError: nothing will ever happen: a scheme waits for what it did not begin.
        """
        if not self._events:
            raise RuntimeError(f"stuck at {self.now:.0f} s")
        when, _, act = heapq.heappop(self._events)
        passed, busy = when - self.now, self.setting.run - self._free["run"]
        self.result.busy += passed * busy
        self.result.worker_seconds += passed * (self.setting.run if self.waiting else busy)
        self.now = when
        act()

    def _enter(
        self,
        job: Job,
        stage: Literal["init", "run", "eval"],
        seconds: float,
        then: Callable[[Job], None],
        *,
        tell: bool = True,
    ) -> None:
        assert self._tell is not None
        self._free[stage] -= 1
        job.state, job.since = stage, self.now
        self._after(seconds, then, job)
        if tell:
            self._tell.on_stage_entered(job)

    def _after(self, seconds: float, act: Callable[[Job], None], job: Job) -> None:
        epoch = job.epoch

        def planned() -> None:
            if job.epoch == epoch:
                act(job)

        self.call_at(self.now + seconds, planned)

    def _prepared(self, job: Job) -> None:
        self._free["init"] += 1
        job.state = "ready"
        self._run.append(job)

    def _ran(self, job: Job) -> None:
        self._stop_running(job)
        job.state = "graded"
        self._eval.append(job)

    def _graded(self, job: Job) -> None:
        assert self._tell is not None
        self._free["eval"] += 1
        job.state = "done"
        self._tell.on_reward(job)

    def _parks(self, job: Job) -> None:
        if job.state == "run" and job.to_park:
            assert self._tell is not None
            self._stop_running(job)
            job.epoch += 1
            job.state = "parked"
            self.parked += 1
            self.result.most_parked = max(self.result.most_parked, self.parked)
            self._tell.on_stage_entered(job)

    def _stop_running(self, job: Job) -> None:
        self._free["run"] += 1
        job.left -= self.now - job.since
        job.spent += self.now - job.since


def simulate(workers: Workers, scheme: Scheme, train: float) -> Result:
    """Make all steps of a training run.

    Args:
        workers: fresh ones.
        scheme: what is compared.
        train: seconds that a step's training takes.
    """
    workers.set_scheme(scheme)
    result, setting = workers.result, workers.setting
    began = 0.0

    def wish() -> None:
        nonlocal began
        began, workers.waiting = workers.now, True
        scheme.on_step_start(workers.version)

    def trained() -> None:
        workers.version += 1
        wish()

    wish()
    while True:
        if workers.waiting and (batch := scheme.pop_batch()) is not None:
            result.waits.append(workers.now - began)
            result.delivered += [group.task for group in batch]
            result.behind += [workers.version - (group.oldest or 0) for group in batch]
            workers.waiting = False
            if len(result.waits) == setting.steps:
                result.seconds = workers.now
                return result
            workers.call_at(workers.now + train, trained)
            scheme.on_training()
            continue
        workers.grant_slots()
        workers.step()


def new_group(task: Task) -> ActiveGroup:
    """Return a fresh group."""
    group = ActiveGroup(task)
    group.jobs = [Job(f"{task.number}-{place}", group, draw) for place, draw in enumerate(task.members)]
    return group
