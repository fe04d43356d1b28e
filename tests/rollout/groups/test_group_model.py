"""Random histories: whatever happens in whatever order, the book keeps its promises, and a restart judges alike."""

from groups_world import Made, World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prorl_gym.client.wire_models import GroupState, RolloutSummary
from prorl_gym.demand import Demand, RedundantHandling
from prorl_gym.errors import CancelReason, FailureKind
from prorl_gym.rollout.protocol import Stage

STAGES: tuple[Stage, ...] = ("queue", "init", "run", "eval")

demands = st.builds(
    Demand,
    groups=st.integers(0, 4),
    spare=st.integers(0, 1),
    max_staleness=st.none() | st.integers(0, 2),
    redundant=st.builds(
        RedundantHandling,
        init=st.sampled_from(["finish", "kill"]),
        run=st.sampled_from(["finish", "park", "kill"]),
        park_seconds=st.sampled_from([5.0, 100.0]),
    ),
    replace=st.just(1),
    extra=st.integers(0, 1),
    straggler_factor=st.just(1.5),
    straggler_seconds=st.just(2.0),
)


class Checked(World):
    """A world that says why each cancel is right, from what it knows itself."""

    def why_cut(self, made: Made, reason: CancelReason) -> None:
        """Every cancel has one of the reasons of ``prorl_gym.demand``."""
        if reason is CancelReason.STALE:
            assert self.is_old(made.group_id) or self.was_cut(made.group_id)
            return
        rivals = [other for other in self.made.values() if self.root(other) == self.root(made) and other is not made]
        assert (
            self.is_satisfied()
            or any(rival.stage in ("run", "eval") or rival.ended is not None for rival in rivals)
            or made.group_id in self.verdicts
            or self.was_cut(made.group_id)
        )

    def root(self, made: Made) -> str:
        while made.stands_in_for is not None:
            made = self.made[made.stands_in_for]
        return made.rollout_id

    def group(self, group_id: str) -> list[Made]:
        return [made for made in self.made.values() if made.group_id == group_id]

    def ends(self, group_id: str) -> list[RolloutSummary]:
        """The ends of a group that have a reward: of each place the first."""
        found: dict[str, RolloutSummary] = {}
        for member in self.members:
            if member.group_id == group_id and member.reward is not None:
                found.setdefault(self.root(self.made[member.rollout_id]), member)
        return list(found.values())

    def is_ready(self, group_id: str) -> bool:
        rewards = [end.reward for end in self.ends(group_id) if end.reward is not None]
        roots = {self.root(made) for made in self.group(group_id)}
        complete = len(rewards) == len(roots) >= max(made.group_size for made in self.group(group_id))
        return complete and max(rewards) - min(rewards) > self.demand.epsilon

    def is_old(self, group_id: str) -> bool:
        bound = self.demand.max_staleness
        versions = [end.oldest_version for end in self.ends(group_id)]
        versions += [made.version for made in self.group(group_id) if made.ended is None]
        return bound is not None and any(v is not None and self.version - v > bound for v in versions)

    def is_satisfied(self) -> bool:
        fresh = 0
        for group_id in {made.group_id for made in self.made.values()}:
            spent = max((end.cursor for end in self.ends(group_id)), default=0) <= self.demand.after
            old = self.demand.max_staleness is not None and any(
                end.oldest_version is not None and self.version - end.oldest_version > self.demand.max_staleness
                for end in self.ends(group_id)
            )
            fresh += self.is_ready(group_id) and not spent and not old
        return fresh >= self.demand.groups + self.demand.spare

    def was_cut(self, group_id: str) -> bool:
        return any(made.cancel is not None for made in self.group(group_id))


class Groups(RuleBasedStateMachine):
    """Submits, moves, ends, cancels, restarts, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.came = 0

    @initialize(demand=demands)
    def begin(self, demand: Demand) -> None:
        self.world = Checked(demand)

    def pick(self, data: st.DataObject) -> Made | None:
        live = [made for made in self.world.made.values() if made.ended is None]
        return data.draw(st.sampled_from(live)) if live else None

    @rule(size=st.integers(1, 4), missing=st.sampled_from([0, 0, 0, 1]))
    def submit(self, size: int, missing: int) -> None:
        self.came += 1
        self.world.submit(f"g{self.came}", size, count=max(1, size - missing))

    @rule(data=st.data())
    def submit_more(self, data: st.DataObject) -> None:
        if self.came:
            group_id = f"g{data.draw(st.integers(1, self.came))}"
            size, there = self.world.group(group_id)[0].group_size, self.originals(group_id)
            if there < size or group_id in self.world.verdicts:  # the rest of it, or too late
                self.world.submit(group_id, size, count=1, start=there)

    @rule(data=st.data(), steps=st.integers(1, 12))
    def move(self, data: st.DataObject, steps: int) -> None:
        for _ in range(steps):
            made = self.pick(data)
            if made is None or made.parked or (made.held and made.stage == "queue") or made.cancel is not None:
                continue
            after = STAGES.index(made.stage) + 1
            if after < len(STAGES):
                self.world.enter(made.rollout_id, STAGES[after])
            else:
                self.world.finish(made.rollout_id, data.draw(st.sampled_from([0.0, 0.0, 1.0])))

    @rule(data=st.data())
    def attempt_fails(self, data: st.DataObject) -> None:
        made = self.pick(data)
        if made is not None and made.stage != "queue" and made.cancel is None:
            self.world.enter(made.rollout_id, "queue")

    @rule(data=st.data(), kind=st.sampled_from([FailureKind.SANDBOX_LOST, FailureKind.BAD_ROW]))
    def fails_for_good(self, data: st.DataObject, kind: FailureKind) -> None:
        made = self.pick(data)
        if made is not None and made.cancel is None:  # otherwise the dispatcher makes it a cancelled one
            self.world.fail(made.rollout_id, kind)

    @rule(data=st.data())
    def client_cancels(self, data: st.DataObject) -> None:
        made = self.pick(data)
        if made is not None and made.cancel is None:
            self.world.cancelled(made.rollout_id, CancelReason.CLIENT)

    @rule(data=st.data())
    def one_cancel_arrives_too_late(self, data: st.DataObject) -> None:
        doomed = [made for made in self.world.made.values() if made.ended is None and made.cancel is not None]
        doomed = [made for made in doomed if made.stage != "queue"]  # no runner has those
        if doomed:
            self.world.finish(data.draw(st.sampled_from(doomed)).rollout_id, 1.0)

    @rule()
    def cancels_arrive(self) -> None:
        self.world.sweep()

    @rule(demand=demands, used=st.booleans())
    def want(self, demand: Demand, used: bool) -> None:
        after = len(self.world.members) if used else self.world.demand.after
        self.world.want(demand.model_copy(update={"after": after}))

    @rule()
    def new_version(self) -> None:
        self.world.raise_version(self.world.version + 1)

    @rule(seconds=st.sampled_from([1.0, 3.0, 50.0]))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule()
    def restart(self) -> None:
        before = dict(self.world.verdicts)
        self.world.restart()
        for group_id, state in before.items():
            # No record says that a failed rollout was not replaced because its group was not needed just then.
            replaced = state == "short" and group_id in self.world.book.groups
            assert replaced or self.world.verdicts[group_id] == state

    @invariant()
    def nothing_is_judged_twice(self) -> None:
        assert self.world.doubled == []

    @invariant()
    def verdicts_are_those_of_the_records(self) -> None:
        for group_id, state in self.world.verdicts.items():
            assert (state == "ready") == self.ready_when_judged(group_id, state)

    def ready_when_judged(self, group_id: str, state: GroupState) -> bool:
        """Late members of a judged group are none of it."""
        if state == "ready":
            rewards = [end.reward for end in self.world.ends(group_id) if end.reward is not None]
            return max(rewards) - min(rewards) > self.world.demand.epsilon
        late = any(made.cancel is not None and made.stage == "queue" for made in self.world.group(group_id))
        return not late and self.world.is_ready(group_id)

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        world = self.world
        status = world.book.status()
        assert status.satisfied == world.is_satisfied()
        if not status.satisfied:
            assert status.kept == 0
            assert status.parked == 0
            if world.demand.max_staleness is None:
                assert status.held == 0
        if status.kept:
            assert world.book.next_decision_at() is not None

    @invariant()
    def asking_again_yields_nothing(self) -> None:
        decisions = self.world.book.decide(self.world.now)
        assert not (decisions.cancel or decisions.hold or decisions.release or decisions.park or decisions.replacements)

    def originals(self, group_id: str) -> int:
        return sum(made.stands_in_for is None for made in self.world.group(group_id))

    def teardown(self) -> None:
        """Whatever is left can be brought to an end, and then every whole group has its verdict."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.want(Demand(groups=1000, after=len(world.members), replace=1))
        for group_id in {made.group_id for made in world.made.values()}:
            if group_id not in world.verdicts:
                world.submit(group_id, world.group(group_id)[0].group_size, start=self.originals(group_id))
        for _ in range(50):
            world.sweep()
            left = [made for made in world.made.values() if made.ended is None]
            if not left:
                break
            assert not any(made.held or made.parked for made in left)
            for made in left:
                if made.ended is None and made.cancel is None:
                    world.finish(made.rollout_id, 1.0)
        assert world.book.status().states.get("open", 0) == world.book.status().states.get("informative", 0) == 0
        assert set(world.verdicts) == {made.group_id for made in world.made.values()}


TestGroups = Groups.TestCase
TestGroups.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
