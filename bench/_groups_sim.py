"""Workers, rollouts and a trainer, on a virtual clock, and the workload of ``bench groups``.

What is begun and stopped is up to a scheme (``_groups_schemes``). A worker-second is a slot of RUN for a second in
which it works, or in which the trainer waits for rollouts: until then nothing else may have it. While the trainer
trains, an idle worker is free for others and is counted for no scheme.

The workload is drawn once per seed, the same groups for every arm. Most groups teach nothing (all fail, or all pass),
most rollouts are short and a few are ten times as long, and those that fail take longer: the shape of agents on
repositories. Seconds and sizes are those of the published batch (32 groups of 8). It was committed before the first
measurement; what is measured does not choose it.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Literal, Protocol

SEEDS = (1, 2, 3, 4, 5)
TURN_SECONDS = 10.0
"""Between two model calls: an agent that is to be parked goes on for so long at most."""
TOOL_SHARE = 0.4
"""Of RUN: what has to be done again to bring a fresh sandbox to where a lost one was."""

_PASS_RATES = ((0.4, 0.1, 3.0), (0.3, 3.0, 0.1), (0.3, 1.5, 1.5))
"""Share of the prompts, alpha and beta: mostly failed, mostly passed, in between."""
_LONGEST = 3600.0


@dataclass(frozen=True, slots=True)
class Setting:
    """A workload's shape, the workers and the trainer."""

    batch: int = 32
    size: int = 8
    steps: int = 12
    init: int = 64
    run: int = 256
    eval: int = 64
    staleness: int = 2
    tail: float = 0.8
    """Spread of the rollouts of one prompt (sigma of a log-normal distribution)."""
    stuck: float = 0.03
    """Share of the rollouts that take four times as long."""
    train: float = 1.0
    """Seconds of training over the seconds in which all workers, never idle, make one batch without loss."""


MAIN = Setting()


@dataclass(frozen=True, slots=True)
class Draw:
    """What one rollout will turn out to be. Seconds."""

    init: float
    run: float
    eval: float
    reward: float


@dataclass(frozen=True, slots=True)
class Task:
    number: int
    members: tuple[Draw, ...]

    @property
    def informative(self) -> bool:
        """Whether its rewards differ."""
        return len({member.reward for member in self.members}) > 1


class Tasks:
    """The endless groups of a seed: the n-th is the same for every scheme and at every time."""

    def __init__(self, setting: Setting, seed: int | str) -> None:
        self._setting = setting
        self._seed = seed

    def __getitem__(self, number: int) -> Task:
        setting = self._setting
        rng = random.Random(f"{self._seed}/{number}")
        _, alpha, beta = rng.choices(_PASS_RATES, [share for share, _, _ in _PASS_RATES])[0]
        rate, scale = rng.betavariate(alpha, beta), 120.0 * rng.lognormvariate(0.0, 0.5)
        return Task(number, tuple(self._member(rng, rate, scale, setting) for _ in range(setting.size)))

    @staticmethod
    def _member(rng: random.Random, rate: float, scale: float, setting: Setting) -> Draw:
        reward = float(rng.random() < rate)
        longer = (1.0 if reward else 1.3) * (4.0 if rng.random() < setting.stuck else 1.0)
        run = min(_LONGEST, scale * longer * rng.lognormvariate(0.0, setting.tail))
        return Draw(10.0 * rng.lognormvariate(0.0, 0.5), run, 20.0 * rng.lognormvariate(0.0, 0.8), reward)


class Population:
    """What would be delivered if nothing were ever stopped, from groups that no arm sees."""

    def __init__(self, setting: Setting, groups: int = 4000) -> None:
        tasks = Tasks(setting, "population")
        self._tasks = [tasks[number] for number in range(groups)]

    @cached_property
    def informative(self) -> list[Task]:
        """Those that teach something."""
        return [task for task in self._tasks if task.informative]

    @cached_property
    def work(self) -> float:
        """Seconds of RUN per informative group, the others' included."""
        return sum(member.run for task in self._tasks for member in task.members) / len(self.informative)


@cache
def train_seconds(setting: Setting) -> float:
    return setting.train * setting.batch * Population(setting).work / setting.run


JobState = Literal["new", "init", "ready", "run", "parked", "graded", "eval", "done", "gone"]


@dataclass(slots=True, eq=False)
class Job:
    name: str
    group: "ActiveGroup"
    draw: Draw
    state: JobState = "new"
    left: float = 0.0
    """Seconds of RUN that are still to be done."""
    since: float = 0.0
    version: int | None = None
    epoch: int = 0
    """What was planned for an earlier one does not happen any more."""
    spent: float = 0.0
    to_park: bool = False

    @property
    def live(self) -> bool:
        return self.state not in ("done", "gone")


@dataclass(slots=True, eq=False)
class ActiveGroup:
    task: Task
    jobs: list[Job] = field(default_factory=list[Job])

    @property
    def complete(self) -> bool:
        return all(job.state == "done" for job in self.jobs)

    @property
    def oldest(self) -> int | None:
        """The version of its oldest token."""
        return min((job.version for job in self.jobs if job.version is not None), default=None)


class Scheme(Protocol):
    """Decides what is begun and what is stopped."""

    def on_step_start(self, version: int) -> None:
        """Called at the start of each step: the trainer waits for a batch, at this version of the policy."""
        ...

    def on_training(self) -> None: ...

    def on_stage_entered(self, job: Job) -> None:
        """Called when a rollout entered INIT, RUN or EVAL, was parked, or goes on."""
        ...

    def on_reward(self, job: Job) -> None: ...

    def pop_batch(self) -> list[ActiveGroup] | None:
        """Return the batch, once there is one. Called after everything that happens while the trainer waits."""
        ...


@dataclass(slots=True)
class Result:
    seconds: float = 0.0
    worker_seconds: float = 0.0
    busy: float = 0.0
    """Worker-seconds in which something ran."""
    delivered: list[Task] = field(default_factory=list[Task])
    behind: list[int] = field(default_factory=list[int])
    """Versions between each delivered group's oldest token and the step that used it."""
    waits: list[float] = field(default_factory=list[float])
    most_parked: int = 0

    @property
    def rate(self) -> float:
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
        self.scheme: Scheme | None = None

    # --- what schemes do ----------------------------------------------------------------------------------------

    def enqueue(self, job: Job, *, done: float = 0.0, again: float = 0.0) -> None:
        """Let a rollout stand in line."""
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
        """Have an agent stop before its next model call. It keeps its sandbox."""
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
        assert self.scheme is not None
        self._free[stage] -= 1
        job.state, job.since = stage, self.now
        self._after(seconds, then, job)
        if tell:
            self.scheme.on_stage_entered(job)

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
        assert self.scheme is not None
        self._free["eval"] += 1
        job.state = "done"
        self.scheme.on_reward(job)

    def _parks(self, job: Job) -> None:
        if job.state == "run" and job.to_park:
            assert self.scheme is not None
            self._stop_running(job)
            job.epoch += 1
            job.state = "parked"
            self.parked += 1
            self.result.most_parked = max(self.result.most_parked, self.parked)
            self.scheme.on_stage_entered(job)

    def _stop_running(self, job: Job) -> None:
        self._free["run"] += 1
        job.left -= self.now - job.since
        job.spent += self.now - job.since


def simulate(workers: Workers, scheme: Scheme, train: float) -> Result:
    """Make all steps of a training run."""
    workers.scheme = scheme
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
    group = ActiveGroup(task)
    group.jobs = [Job(f"{task.number}-{place}", group, draw) for place, draw in enumerate(task.members)]
    return group
