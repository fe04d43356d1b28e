"""What is known of the groups of one run, and what follows from it.

A state machine without an event loop: it is fed with what happened, and ``decide`` answers with what is to be done
about it. Time is an argument. The rules themselves are in ``rules``, their meaning in ``prorl_gym.demand``.
"""

from collections.abc import Container
from heapq import heappop, heappush
from itertools import count, islice

from prorl_gym.demand import Demand
from prorl_gym.errors import CancelReason
from prorl_gym.rollout.groups import rules
from prorl_gym.rollout.groups.decisions import BUT_GRADING, EVERYWHERE, Decisions
from prorl_gym.rollout.groups.durations import Durations
from prorl_gym.rollout.groups.group import Group, judge
from prorl_gym.rollout.groups.posterior import in_audit
from prorl_gym.rollout.groups.replica import Replica, StandIn, failed_for_good, was_cut
from prorl_gym.rollout.groups.results import Results, too_old
from prorl_gym.rollout.protocol import Member, Stage


class Book:
    """The groups of a run that has a demand.

    Args:
        run_id: the run.
        demand: what its trainer wants.
        version: current version of the policy.
    """

    def __init__(self, run_id: str, demand: Demand, version: int = 0) -> None:
        self.run_id = run_id
        self.demand = demand
        self.version = max(version, demand.version or 0)
        self.results = Results()
        self.groups: dict[str, Group] = {}
        """Those that are not settled, by age."""
        self.satisfied = False
        """As many groups are ready as were wanted: the others are redundant."""
        self._durations = Durations()
        self._replicas: dict[str, Replica] = {}
        self._waiting: dict[str, Group] = {}
        self._dirty: dict[str, Group] = {}
        self._losers: list[tuple[Replica, CancelReason]] = []
        self._stopping: set[str] = set()
        self._resting: set[str] = set()
        """Groups that go on only if more of them is submitted: they keep no other from beginning."""
        self._stand_ins: set[str] = set()
        """Those that are counted and have not ended: each is counted once, whenever it is first heard of."""
        self._alarms: list[tuple[float, int, Group]] = []
        self._ticket = count()
        self._came = 0
        self._now = Decisions()

    # --- what happened ------------------------------------------------------------------------------------------

    def accepted(self, replica: Replica, *, earlier: bool = False) -> None:
        """A rollout was accepted.

        Args:
            replica: the rollout.
            earlier: before the demand, which therefore speaks of it, too. Otherwise a group that comes when nothing
                more is needed waits for the next demand.
        """
        if replica.stands_in_for is not None and replica.rollout_id not in self._stand_ins:
            self._stand_ins.add(replica.rollout_id)
            self.results.made(replica.rollout_id)
        settled = self.results.get(replica.group_id)
        if settled is not None:
            reason = CancelReason.STALE if settled.state == "stale" else CancelReason.REDUNDANT
            self._losers.append((replica, reason))
            return
        group = self._group(replica.group_id, late=not earlier)
        if replica.cancel is not None and group.is_whole_without(replica):
            return  # it came too late, and a restart while it was being cancelled
        if not group.has_room_for(replica):
            return
        self._replicas[replica.rollout_id] = replica
        group.add(replica)
        self._touch(group)

    def entered(self, rollout_id: str, stage: Stage, at: float) -> None:
        """A rollout entered a stage at this time (Unix seconds)."""
        replica = self._replicas.get(rollout_id)
        if replica is None:
            return
        if (replica.stage, stage) == ("init", "run"):
            self._took(replica, at)
        replica.stage, replica.since = stage, at
        replica.parked = replica.asked_to_park = False
        if stage == "queue":  # another attempt: it samples anew
            replica.version = None
        group = self.groups.get(replica.group_id)
        if group is None:
            return
        slot = group.slot_of(rollout_id)
        if stage == "run" and slot is not None and replica.live:  # who begins to sample first has the place
            rivals = [rival for rival in slot.live if rival is not replica]
            if any(rival.stage == "run" for rival in rivals):
                rivals = [replica]
            self._losers += [(rival, CancelReason.REDUNDANT) for rival in rivals]
        self._touch(group)

    def parked(self, rollout_id: str, parked: bool) -> None:
        """An agent was parked, or goes on."""
        replica = self._replicas.get(rollout_id)
        group = None if replica is None else self.groups.get(replica.group_id)
        if replica is not None and group is not None:
            replica.parked = parked
            self._touch(group)

    def finished(self, member: Member, run_seconds: float = 0.0) -> None:
        """A rollout ended.

        Args:
            member: how.
            run_seconds: how long its agent worked.
        """
        replica = self._replicas.pop(member.rollout_id, None)
        if member.stands_in_for is not None and member.group_id is not None and not member.evaluation:
            if member.rollout_id not in self._stand_ins:
                self.results.made(member.rollout_id)
            self._stand_ins.discard(member.rollout_id)
        self._account(member, replica, run_seconds)
        self.set_version(member.oldest_version or 0)  # a version that sampled is there: a restart may not know it
        if member.group_id is None or member.evaluation or self.results.get(member.group_id) is not None:
            return
        group = self._group(member.group_id, late=False)
        if replica is None:
            replica = Replica.ended(member)
            if not group.has_room_for(replica) or (was_cut(member) and group.is_whole_without(replica)):
                return
            group.add(replica)
        slot = group.slot_of(member.rollout_id)
        assert slot is not None
        if replica.member is None:
            replica.member = member
            slot.ended(member)
        if not failed_for_good(member) and not was_cut(member):
            self._losers += [(rival, CancelReason.REDUNDANT) for rival in slot.live]
        if not group.foretold and rules.foretold(group, self.demand):
            assert self.demand.early_stop is not None
            group.foretold = True
            group.audited = in_audit(self.run_id, group.group_id, self.demand.early_stop.audit)
        self._touch(group)

    def refused(self, stand_in: StandIn, again_at: float | None = None) -> None:
        """A stand-in could not be made: never, or not before this time (Unix seconds)."""
        replica_group = next((g for g in self.groups.values() if g.slot_of(stand_in.stands_in_for)), None)
        slot = None if replica_group is None else replica_group.slot_of(stand_in.stands_in_for)
        if replica_group is None or slot is None or slot.due != stand_in.rollout_id:
            return
        slot.due = None
        slot.given_up = again_at is None
        slot.not_before = again_at or 0.0
        self._touch(replica_group)

    def set_demand(self, demand: Demand) -> None:
        """The trainer wants this from now on."""
        if demand.pool != self.demand.pool:
            self.version = 0  # the other pool's versions say nothing here
        self.demand = demand
        for group in self.groups.values():
            group.late = False
        self.set_version(demand.version or 0)
        self._touch_all()

    def set_version(self, version: int) -> None:
        """The policy has this version now; an older one changes nothing."""
        if version > self.version:
            self.version = version
            self._touch_all()

    # --- what follows -------------------------------------------------------------------------------------------

    def settle_rewarded(self, besides: Container[str] = ()) -> None:
        """Judge the groups of which all rewards are in, to keep a long reading of what has ended small in memory.

        Args:
            besides: not these groups, of which something is still to be told.
        """
        for group in [each for each in self._dirty.values() if each.is_rewarded and each.group_id not in besides]:
            self._settle(group)
            del self._dirty[group.group_id]

    def decide(self, now: float) -> Decisions:
        """Return what is to be done by now (Unix seconds) that was not said before."""
        while self._alarms and self._alarms[0][0] <= now:
            _, _, group = heappop(self._alarms)
            group.alarm = None
            if self.groups.get(group.group_id) is group:
                self._touch(group)
        while True:
            self._stop_losers()
            for group in list(self._dirty.values()):
                self._settle(group)  # first, so that what is ready counts for the others
            self._look_whether_satisfied()
            self._admit()
            if not self._dirty:
                break
            batch, self._dirty = sorted(self._dirty.values(), key=lambda group: group.order), {}
            for group in batch:
                self._review(group, now)
        decisions, self._now = self._now, Decisions()
        return decisions

    def next_tick(self) -> float | None:
        """Return the time (Unix seconds) at which to decide again even if nothing happens."""
        while self._alarms and self.groups.get(self._alarms[0][2].group_id) is not self._alarms[0][2]:
            heappop(self._alarms)
        return self._alarms[0][0] if self._alarms else None

    def is_stale(self, member: Member) -> bool:
        """Whether the group of a rollout is too old to be learnt from; the whole group shares the verdict."""
        if member.evaluation or member.group_id is None:
            return False
        settled, group = self.results.get(member.group_id), self.groups.get(member.group_id)
        oldest = member.oldest_version
        if settled is not None:
            oldest = settled.oldest_version
        elif group is not None:
            oldest = group.oldest_version()
        return too_old(oldest, self.version, self.demand)

    def begun_unused(self) -> int:
        """Count the groups that have begun and are neither used nor lost."""
        return self._under_way() + self.results.fresh(self.demand, self.version)

    def _under_way(self) -> int:
        return len(self.groups) - len(self._waiting) - len(self._stopping | self._resting)

    def _look_whether_satisfied(self) -> None:
        wanted = self.demand.groups + self.demand.spare
        satisfied = self.results.fresh(self.demand, self.version) >= wanted
        if satisfied != self.satisfied:
            self.satisfied = satisfied
            self._touch_all()

    def _admit(self) -> None:
        """Let groups begin, each as a whole, in the order in which they came."""
        if self.satisfied or not self._waiting:
            return
        ready = self.results.fresh(self.demand, self.version)
        limit = rules.places_begun(self.demand, ready, self.results.promise)
        room = len(self._waiting) if limit is None else limit - self._under_way()
        for group in list(islice(self._waiting.values(), max(0, room))):
            self._begin(group)

    def _begin(self, group: Group) -> None:
        group.begun = True
        self._waiting.pop(group.group_id, None)
        self._touch(group)

    def _review(self, group: Group, now: float) -> None:
        """Decide what becomes of a group."""
        if self.groups.get(group.group_id) is not group:
            return
        if group.stopped is None:
            self._judge_need(group, now)
        if group.stopped is not None:
            self._waiting.pop(group.group_id, None)
            self._stopping.add(group.group_id)
            self._now.cut(group)
        elif group.kept_since is not None or not group.begun:
            self._now.keep(group.live())
        else:
            self._serve(group, now)
        self._settle(group)
        self._note_rest(group)
        self._set_alarm(group)

    def _note_rest(self, group: Group) -> None:
        if group.begun and group.rests and self.groups.get(group.group_id) is group:
            self._resting.add(group.group_id)
        else:
            self._resting.discard(group.group_id)

    def _judge_need(self, group: Group, now: float) -> None:
        """Stop a group, or set it aside, or find that it is needed."""
        policy = self.demand.redundant
        if (cut := rules.lost(group)) is not None:
            group.stop(cut, BUT_GRADING)
        elif too_old(group.oldest_version(), self.version, self.demand):
            group.stop(CancelReason.STALE, EVERYWHERE)
        elif not rules.unfinished(group):
            group.kept_since = None
        elif not group.audited and rules.foretold(group, self.demand):
            group.stop(CancelReason.REDUNDANT, BUT_GRADING)
        elif not self.satisfied:
            group.kept_since, group.late = None, False
        elif group.kept_since is not None and now >= group.kept_since + policy.park_seconds:
            group.stop(CancelReason.REDUNDANT, BUT_GRADING)
        elif group.late or (policy.run == "park" and rules.has_sunk_cost(group, policy)):
            group.kept_since = now if group.kept_since is None else group.kept_since
        elif rules.would_lose(group, policy):
            group.stop(CancelReason.REDUNDANT, rules.cut_of(policy))

    def _serve(self, group: Group, now: float) -> None:
        """Let a needed group go on, and help it where the infrastructure failed it."""
        self._now.free(group.live())
        for replica in group.live():
            if replica.version is None and replica.stage in ("run", "eval"):
                replica.version = self.version
        for due, stand_in in rules.stand_ins(group, self.demand, self._durations):
            if now >= due:
                self._now.ask(group, stand_in)

    def _settle(self, group: Group) -> None:
        """Judge a group for good once all of it has ended and nothing will be made again."""
        if self.groups.get(group.group_id) is not group:
            return
        if rules.may_replace(group, self.demand) and any(slot.wants_replacement for slot in group.slots):
            return
        ends = group.ends()
        if ends is None:
            return
        state = judge(ends, group.size, self.demand.epsilon)
        self.results.settle(group, state, ends)
        self._now.stop(group.live(), CancelReason.REDUNDANT)  # rivals of rollouts that have their reward
        self._now.settled.append((group.group_id, state))
        del self.groups[group.group_id]
        self._waiting.pop(group.group_id, None)
        self._stopping.discard(group.group_id)

    def _set_alarm(self, group: Group) -> None:
        """See to it that a group is looked at when time alone changes what is due."""
        if self.groups.get(group.group_id) is not group or group.stopped is not None:
            return
        times: list[float] = []
        if group.kept_since is not None:
            times.append(group.kept_since + self.demand.redundant.park_seconds)
        elif group.begun:
            times += [due for due, _ in rules.stand_ins(group, self.demand, self._durations)]
        due = min(times, default=None)
        if due is not None and (group.alarm is None or due < group.alarm):
            group.alarm = due
            heappush(self._alarms, (due, next(self._ticket), group))

    def _stop_losers(self) -> None:
        losers, self._losers = self._losers, []
        for replica, reason in losers:
            self._now.stop([replica], reason)

    def _account(self, member: Member, replica: Replica | None, run_seconds: float) -> None:
        """Count what was wasted and saved, and learn how long things take."""
        usual = self._durations.mean(member.environment, "run")
        self.results.ended(member, max(0.0, usual - run_seconds) if usual is not None and replica is not None else 0.0)
        if member.reward is None or replica is None:
            return
        if run_seconds > 0:
            self._durations.note(member.environment, "run", run_seconds)
        if replica.stage == "eval":
            self._took(replica, member.finished_at)

    def _took(self, replica: Replica, at: float) -> None:
        if self._durations.note(replica.environment, replica.stage, at - replica.since):
            self._touch_all()  # now it is known what is usual

    def _group(self, group_id: str, *, late: bool) -> Group:
        group = self.groups.get(group_id)
        if group is None:
            self._came += 1
            group = self.groups[group_id] = self._waiting[group_id] = Group(group_id, self._came, late=late)
        return group

    def _touch(self, group: Group) -> None:
        """Look at a group again. One of which something was begun counts as begun."""
        self._dirty[group.group_id] = group
        if not group.begun and any(r.stage != "queue" or r.member is not None for r in group.replicas()):
            group.begun = True
            self._waiting.pop(group.group_id, None)

    def _touch_all(self) -> None:
        self._dirty = dict(self.groups)
