"""A world without an event loop for the group scheduler: it applies actions, and remembers what a ledger would."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from prorl_gym.client.wire_models import GroupState, RolloutSummary
from prorl_gym.demand import Demand
from prorl_gym.errors import CancelReason, Cause, FailureKind
from prorl_gym.rollout.groups.group import Replica
from prorl_gym.rollout.groups.group_scheduler import GroupActions, GroupScheduler
from prorl_gym.rollout.protocol import AttemptPosition, Stage


@dataclass
class Made:
    """One accepted rollout, as the ledger and a runner know it."""

    rollout_id: str
    group_id: str
    group_size: int
    replica: int
    stands_in_for: str | None
    stage: Stage = "queue"
    held: bool = False
    parked: bool = False
    cancel: CancelReason | None = None
    version: int | None = None
    ended: RolloutSummary | None = None


@dataclass
class World:
    """Drives a book through events; ``settle`` applies what it decides until it has nothing more to say."""

    demand: Demand
    now: float = 1000.0
    version: int = 0
    made: dict[str, Made] = field(default_factory=dict[str, Made])
    positions: dict[str, AttemptPosition] = field(default_factory=dict[str, AttemptPosition])
    members: list[RolloutSummary] = field(default_factory=list[RolloutSummary])
    verdicts: dict[str, GroupState] = field(default_factory=dict[str, GroupState])
    log: list[GroupActions] = field(default_factory=list[GroupActions])
    make_replacements: bool = True
    doubled: list[str] = field(default_factory=list[str])
    """Groups that were judged twice by one book."""

    def __post_init__(self) -> None:
        self.book = GroupScheduler("run", self.demand, self.version)

    # --- events ---------------------------------------------------------------------------------------------------

    def submit(self, group_id: str, size: int = 4, count: int | None = None, start: int = 0) -> list[str]:
        """Accept the rollouts of a group, as one batch."""
        ids = [f"{group_id}.{index}" for index in range(start, start + (size - start if count is None else count))]
        for offset, name in enumerate(ids):
            self._accept(Made(name, group_id, size, start + offset, None))
        self.act()
        return ids

    def _accept(self, made: Made) -> None:
        self.made[made.rollout_id] = made
        self.book.on_accepted(self._replica(made))

    def _replica(self, made: Made) -> Replica:
        replica = Replica(made.rollout_id, "run", made.group_id, made.group_size, "env", made.stands_in_for)
        replica.cancel_reason = made.cancel
        self.positions[made.rollout_id] = replica.position
        return replica

    def enter(self, rollout_id: str, stage: Stage) -> None:
        made = self.made[rollout_id]
        made.stage = stage
        made.parked = False
        if stage == "queue":
            made.version = None
        elif stage == "run" and made.version is None:
            made.version = self.version
        self.positions[rollout_id].enter_stage(stage, self.now)
        self.book.on_stage_entered(rollout_id)
        self.act()

    def run(self, *ids: str) -> None:
        """Bring them to RUN."""
        for name in ids:
            for stage in ("init", "run"):
                if self.made[name].ended is None:
                    self.enter(name, stage)

    def finish(self, rollout_id: str, reward: float = 0.0, *, masked: bool = False, tokens: int = 10) -> None:
        """It ends with a reward."""
        self._end(rollout_id, "completed", "", None, reward, masked, tokens)

    def fail(self, rollout_id: str, kind: FailureKind = FailureKind.SANDBOX_LOST) -> None:
        """It ends by a failure of this kind, for good."""
        cause = Cause.TASK if kind is FailureKind.BAD_ROW else Cause.INFRASTRUCTURE
        self._end(rollout_id, "failed", kind.value, cause, None, True, 0)

    def cancelled(self, rollout_id: str, reason: CancelReason | None = None) -> None:
        """It ends as cancelled."""
        why = reason or self.made[rollout_id].cancel
        assert why is not None
        self._end(rollout_id, "cancelled", why.value, None, None, True, 5)

    def _end(
        self,
        rollout_id: str,
        status: str,
        detail: str,
        cause: Cause | None,
        reward: float | None,
        masked: bool,
        tokens: int,
    ) -> None:
        made = self.made[rollout_id]
        assert made.ended is None, "one record per id"
        made.ended = RolloutSummary(
            cursor=len(self.members) + 1,
            rollout_id=rollout_id,
            run_id="run",
            group_id=made.group_id,
            group_size=made.group_size,
            replica=made.replica,
            environment="env",
            evaluation=False,
            stands_in_for=made.stands_in_for,
            status=status,
            detail=detail,
            cause=cause,
            reward=reward,
            masked=masked,
            oldest_version=made.version,
            turns=1,
            sampled_tokens=tokens,
            accepted_at=0.0,
            finished_at=self.now,
            released=False,
        )
        self.members.append(made.ended)
        self.book.on_finished(made.ended, 10.0 if made.stage in ("run", "eval") else 0.0)
        self.act()

    def want(self, demand: Demand) -> None:
        self.demand = demand
        self.version = max(self.version, demand.version or 0)
        self.book.set_demand(demand)
        self.act()

    def raise_version(self, version: int) -> None:
        self.version = max(self.version, version)
        self.book.set_policy_version(version)
        self.act()

    def wait(self, seconds: float) -> None:
        """Let time pass, with a look at every tick on the way."""
        end = self.now + seconds
        while (tick := self.book.next_decision_at()) is not None and tick <= end:
            self.now = max(self.now, tick)
            self.act()
            again = self.book.next_decision_at()
            assert again is None or again > self.now, "a tick that changes nothing must not come again"
        self.now = end

    # --- what is decided ------------------------------------------------------------------------------------------

    def act(self) -> None:
        decisions = self.book.decide(self.now)
        self.log.append(decisions)
        for name in decisions.hold:
            self.made[name].held = True
        for name in decisions.release:
            self.made[name].held = False
        for reason, ids in decisions.cancel.items():
            for name in ids:
                made = self.made[name]
                assert made.ended is None
                assert made.cancel is None, "told once"
                made.cancel = reason
                self.why_cut(made, reason)
        for name in decisions.park:
            if self.made[name].stage == "run":
                self.made[name].parked = True
                self.positions[name].is_parked = True
                self.book.on_parking_changed(name)
        for name in decisions.unpark:
            if self.made[name].parked:
                self.made[name].parked = False
                self.positions[name].is_parked = False
                self.book.on_parking_changed(name)
        for group_id, state in decisions.settled:
            if group_id in self.verdicts:
                self.doubled.append(group_id)
            self.verdicts[group_id] = state
        if self.make_replacements:
            for replacement in decisions.replacements:
                original = self.made[replacement.stands_in_for]
                if replacement.rollout_id not in self.made:
                    self._accept(
                        Made(
                            replacement.rollout_id,
                            original.group_id,
                            original.group_size,
                            original.replica,
                            original.rollout_id,
                        )
                    )
        if decisions != GroupActions():
            self.act()

    def why_cut(self, made: Made, reason: CancelReason) -> None:
        """Look at every cancel; tests that care about all of them say what they allow."""

    def sweep(self) -> None:
        """Let everything that is being cancelled end."""
        while doomed := [made for made in self.made.values() if made.cancel is not None and made.ended is None]:
            for made in doomed:
                self.cancelled(made.rollout_id)

    def restart(self) -> None:
        """Read the book again from what a ledger remembers."""
        self.book = GroupScheduler("run", self.demand, self.version)
        busy = {made.group_id for made in self.made.values() if made.ended is None}
        for member in self.members:
            self.book.on_finished(member)
            self.book.settle_rewarded(exclude=busy)
        self.verdicts = {}
        for made in self.made.values():
            if made.ended is None:
                made.stage, made.held, made.parked, made.version = "queue", False, False, None
                self.book.on_accepted(self._replica(made))
        self.act()

    # --- looks ----------------------------------------------------------------------------------------------------

    def cancels(self) -> dict[str, CancelReason]:
        return {made.rollout_id: made.cancel for made in self.made.values() if made.cancel is not None}

    def held(self) -> set[str]:
        return {made.rollout_id for made in self.made.values() if made.held and made.ended is None}

    def parked(self) -> set[str]:
        return {made.rollout_id for made in self.made.values() if made.parked and made.ended is None}

    def complete(self, group_id: str, rewards: Sequence[float]) -> None:
        """Submit a group and bring it to its end."""
        for name, reward in zip(self.submit(group_id, len(rewards)), rewards, strict=True):
            self.run(name)
            self.finish(name, reward)
