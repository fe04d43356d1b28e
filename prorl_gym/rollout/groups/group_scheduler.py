"""Decides about the groups of one run: which begin, which are stopped or kept, which get replacements.

A state machine without an event loop or a clock. ``on_...`` methods record events and mark the groups they touch as
dirty. ``decide`` reviews the dirty groups, oldest first, until none is left, and returns the actions that follow; it
first judges groups of which everything has ended, since each group that is ready may make the others redundant. An
alarm makes a group dirty when time alone changes what is due. The rules are in ``group``, their meaning in
``prorl_gym.demand``.
"""

from bisect import bisect_right, insort
from collections import Counter, deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, islice

from prorl_gym.client.wire_models import GroupsStatus, GroupState, ReadyGroup, RolloutSummary
from prorl_gym.demand import Demand
from prorl_gym.errors import CancelReason
from prorl_gym.rollout.groups.group import (
    IDENTITY,
    Group,
    Replacement,
    Replica,
    StageDurations,
    cancelled_stages,
    failed_permanently,
    is_extra,
    is_informative,
    judge_group,
    max_begun_groups,
    was_unneeded,
)
from prorl_gym.rollout.protocol import Stage

_MAX_LISTED = 1000
"""Ready groups that are named in one report."""

_MAX_REMEMBERED = 100_000
"""Verdicts and ready groups kept in memory; older ones are forgotten."""

_WINDOW = 128
"""Latest complete groups that estimate the informative share: it changes as the policy learns."""
_PRIOR_INFORMATIVE = 8
"""Informative groups added to the estimate as a prior: at first, every group counts as one."""


@dataclass(frozen=True, slots=True, order=True)
class SettledGroup:
    """A group that is judged for good."""

    cursor: int
    """Cursor of the record that completed it."""
    group_id: str
    state: GroupState
    oldest_version: int | None


def is_too_old(oldest: int | None, version: int, demand: Demand) -> bool:
    """Whether a token of this version is further behind the current one than the demand allows."""
    bound = demand.max_staleness
    return bound is not None and oldest is not None and version - oldest > bound


class GroupResults:
    """Verdicts on the groups of one run, and its counts."""

    def __init__(self) -> None:
        self.counts: Counter[GroupState] = Counter()
        self.replaced = 0
        self.extras = 0
        self.wasted_tokens = 0
        self.reclaimed_seconds = 0.0
        self._latest: deque[bool] = deque(maxlen=_WINDOW)
        self.settled: dict[str, SettledGroup] = {}
        """Verdicts by group, the latest ones."""
        self._ready: list[SettledGroup] = []
        self._fresh_key: tuple[int, int | None, int] | None = None
        self._fresh = 0

    def record_verdict(self, group: Group, state: GroupState, ends: list[RolloutSummary]) -> None:
        cursor = max((end.cursor for end in ends), default=0)
        settled = SettledGroup(cursor, group.group_id, state, group.oldest_version())
        self.counts[state] += 1
        self.settled[group.group_id] = settled
        if state in ("ready", "uninformative"):
            self._latest.append(state == "ready")
        if state == "ready":
            self._fresh_key = None
            insort(self._ready, settled)
            del self._ready[:-_MAX_REMEMBERED]
        if len(self.settled) > _MAX_REMEMBERED:
            del self.settled[next(iter(self.settled))]

    def count_replacement(self, replacement: str) -> None:
        if is_extra(replacement):
            self.extras += 1
        else:
            self.replaced += 1

    @property
    def informative_share(self) -> float:
        """Share of groups that are expected to be informative, rather too high than too low."""
        return (sum(self._latest) + _PRIOR_INFORMATIVE) / (len(self._latest) + _PRIOR_INFORMATIVE)

    def unused_ready(self, after: int) -> list[SettledGroup]:
        """Return the ready groups that were completed past a cursor, in that order."""
        return self._ready[bisect_right(self._ready, after, key=lambda settled: settled.cursor) :]

    def count_fresh(self, demand: Demand, version: int) -> int:
        """Count those that a trainer can still use."""
        asked = (demand.after, demand.max_staleness, version)
        if asked != self._fresh_key:  # called after every event, and changes rarely
            self._fresh_key = asked
            unused = self.unused_ready(demand.after)
            self._fresh = sum(not is_too_old(settled.oldest_version, version, demand) for settled in unused)
        return self._fresh


@dataclass(slots=True)
class GroupActions:
    """Decisions of the scheduler, each action once: deciding again without an event yields none."""

    release: list[str] = field(default_factory=list[str])
    hold: list[str] = field(default_factory=list[str])
    """Those that do not begin before ``release``."""
    cancel: dict[CancelReason, list[str]] = field(default_factory=dict[CancelReason, list[str]])
    park: list[str] = field(default_factory=list[str])
    unpark: list[str] = field(default_factory=list[str])
    replacements: list[Replacement] = field(default_factory=list[Replacement])
    settled: list[tuple[str, GroupState]] = field(default_factory=list[tuple[str, GroupState]])
    """Groups that are judged now, for good."""

    def suspend(self, replicas: Sequence[Replica]) -> None:
        """Hold what has not begun and park agents. Those in INIT are parked when they come to RUN."""
        for replica in replicas:
            if replica.stage == "queue" and not replica.is_held:
                replica.is_held = True
                self.hold.append(replica.rollout_id)
            elif replica.stage == "run" and not replica.is_park_requested:
                replica.is_park_requested = True
                self.park.append(replica.rollout_id)

    def resume(self, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            if replica.is_park_requested:
                replica.is_park_requested = False
                self.unpark.append(replica.rollout_id)
            if replica.is_held:
                replica.is_held = False
                self.release.append(replica.rollout_id)

    def cancel_replicas(self, replicas: Sequence[Replica], reason: CancelReason) -> None:
        for replica in replicas:
            if replica.is_live:
                replica.cancel_reason = reason
                self.cancel.setdefault(reason, []).append(replica.rollout_id)

    def cancel_stopped(self, group: Group) -> None:
        """Cancel what a stopped group has in the stages where it is cut."""
        if group.stop_reason is not None:
            self.cancel_replicas(
                [replica for replica in group.live_replicas() if replica.stage in group.cancel_stages],
                group.stop_reason,
            )


ALL_STAGES: frozenset[Stage] = frozenset({"queue", "init", "run", "eval"})
ALL_BUT_EVAL: frozenset[Stage] = ALL_STAGES - {"eval"}
"""Rollouts that are being graded are nearly done."""


class GroupScheduler:
    """The groups of a run that has a demand."""

    def __init__(self, run_id: str, demand: Demand, version: int = 0) -> None:
        self.run_id = run_id
        self.demand = demand
        self.version = max(version, demand.version or 0)
        self.results = GroupResults()
        self.groups: dict[str, Group] = {}
        """Groups that are not settled, by age."""
        self.is_satisfied = False
        """As many groups are ready as were wanted: the others are redundant."""
        self._durations = StageDurations()
        self._replicas: dict[str, Replica] = {}
        """Rollouts that have not ended."""
        self._waiting: dict[str, Group] = {}
        """Groups that have not begun, by age."""
        self._dirty: dict[str, Group] = {}
        """Groups to be reviewed by the next ``decide``."""
        self._lost_races: list[tuple[Replica, CancelReason]] = []
        """Rollouts to be cancelled by the next ``decide``: another one has or will have their reward."""
        self._stopping: set[str] = set()
        """Groups that are stopped and have rollouts that have not ended."""
        self._dormant: set[str] = set()
        """Groups that go on only if more of their rollouts are submitted: they keep no other group from beginning."""
        self._replacements: set[str] = set()
        """Replacements that are counted and have not ended: each is counted once."""
        self._alarms: list[tuple[float, int, Group]] = []
        """A heap of Unix seconds, a tie-breaker, and the group to be reviewed then."""
        self._alarm_order = count()
        self._arrivals = 0
        self._actions = GroupActions()

    # --- what happened ------------------------------------------------------------------------------------------

    def on_accepted(self, replica: Replica, *, before_demand: bool = False) -> None:
        """A rollout was accepted. Unless ``before_demand``, a group that is not needed waits for the next demand."""
        if replica.stands_in_for is not None and replica.rollout_id not in self._replacements:
            self._replacements.add(replica.rollout_id)
            self.results.count_replacement(replica.rollout_id)
        settled = self.results.settled.get(replica.group_id)
        if settled is not None:
            reason = CancelReason.STALE if settled.state == "stale" else CancelReason.REDUNDANT
            self._lost_races.append((replica, reason))
            return
        group = self._get_or_create_group(replica.group_id, arrived_after_demand=not before_demand)
        if replica.cancel_reason is not None and group.is_complete_without(replica):
            return  # it came too late, and the service was restarted while it was being cancelled
        if not group.has_room_for(replica):
            return
        self._replicas[replica.rollout_id] = replica
        group.add_replica(replica)
        self._mark_dirty(group)

    def on_stage_entered(self, rollout_id: str) -> None:
        replica = self._replicas.get(rollout_id)
        if replica is None:
            return
        stage = replica.stage
        if (replica.position.stage_before, stage) == ("init", "run"):
            self._record_duration(replica.environment, "init", replica.position.seconds_before)
        replica.is_park_requested = False
        if stage == "queue":  # another attempt: it samples again
            replica.start_version = None
        group = self.groups.get(replica.group_id)
        if group is None:
            return
        position = group.position_by_id.get(rollout_id)
        if stage == "run" and position is not None and replica.is_live:  # the first to sample keeps the position
            rivals = [rival for rival in position.live_replicas if rival is not replica]
            losers = [replica] if any(rival.stage == "run" for rival in rivals) else rivals
            self._lost_races += [(loser, CancelReason.REDUNDANT) for loser in losers]
        self._mark_dirty(group)

    def on_parking_changed(self, rollout_id: str) -> None:
        replica = self._replicas.get(rollout_id)
        group = None if replica is None else self.groups.get(replica.group_id)
        if group is not None:
            self._mark_dirty(group)

    def on_finished(self, member: RolloutSummary, run_seconds: float = 0.0) -> None:
        """A rollout ended, after its agent worked for ``run_seconds``."""
        replica = self._replicas.pop(member.rollout_id, None)
        if member.stands_in_for is not None and member.group_id is not None and not member.evaluation:
            if member.rollout_id not in self._replacements:  # nothing but its end has shown it
                self.results.count_replacement(member.rollout_id)
            self._replacements.discard(member.rollout_id)
        self._record_costs(member, replica, run_seconds)
        # After a restart, a record may be the first to show a version.
        self.set_policy_version(member.oldest_version or 0)
        if member.group_id is None or member.evaluation or self.results.settled.get(member.group_id) is not None:
            return
        group = self._get_or_create_group(member.group_id, arrived_after_demand=False)
        if not self._record_end(group, replica, member):
            return
        if not failed_permanently(member) and not was_unneeded(member):  # it wins the race for its position
            rivals = group.position_by_id[member.rollout_id].live_replicas
            self._lost_races += [(rival, CancelReason.REDUNDANT) for rival in rivals]
        self._mark_dirty(group)

    def on_replacement_refused(self, replacement: Replacement, again_at: float | None = None) -> None:
        """A replacement could not be made: never, or not before this time (Unix seconds)."""
        for group in self.groups.values():
            position = group.position_by_id.get(replacement.stands_in_for)
            if position is not None and position.expected_replacement == replacement.rollout_id:
                position.expected_replacement = None
                position.is_given_up = again_at is None
                position.not_before = again_at or 0.0
                self._mark_dirty(group)

    def set_demand(self, demand: Demand) -> None:
        if demand.pool != self.demand.pool:
            self.version = 0  # versions of another pool cannot be compared
        self.demand = demand
        for group in self.groups.values():
            group.arrived_after_demand = False
        self.set_policy_version(demand.version or 0)
        self._mark_all_dirty()

    def set_policy_version(self, version: int) -> None:
        if version > self.version:
            self.version = version
            self._mark_all_dirty()

    # --- what follows -------------------------------------------------------------------------------------------

    def settle_rewarded(self, exclude: Container[str] = ()) -> None:
        """Judge groups with all rewards and nothing pending: keeps memory small while a long history is replayed."""
        for group in [each for each in self._dirty.values() if each.is_rewarded and each.group_id not in exclude]:
            self._settle(group)
            del self._dirty[group.group_id]

    def decide(self, now: float) -> GroupActions:
        """Return the actions that are due now (Unix seconds), each once."""
        while self._alarms and self._alarms[0][0] <= now:
            _, _, group = heappop(self._alarms)
            group.alarm_at = None
            if self.groups.get(group.group_id) is group:
                self._mark_dirty(group)
        while True:
            losers, self._lost_races = self._lost_races, []
            for replica, reason in losers:
                self._actions.cancel_replicas([replica], reason)
            for group in list(self._dirty.values()):
                self._settle(group)  # before the reviews, so that groups that are ready count in them
            wanted = self.demand.groups + self.demand.spare
            satisfied = self.results.count_fresh(self.demand, self.version) >= wanted
            if satisfied != self.is_satisfied:
                self.is_satisfied = satisfied
                self._mark_all_dirty()
            self._begin_waiting()
            if not self._dirty:
                break
            batch, self._dirty = sorted(self._dirty.values(), key=lambda group: group.arrival), {}
            for group in batch:
                self._review(group, now)
        return self._take_actions()

    def withdraw_demand(self) -> GroupActions:
        """Return the actions that end the demand: parked agents and their groups are cancelled."""
        for group in self.groups.values():
            if group.kept_since is not None and group.begun:
                group.stop(CancelReason.REDUNDANT, ALL_BUT_EVAL)
                self._actions.cancel_stopped(group)
        return self._take_actions()

    def _take_actions(self) -> GroupActions:
        actions, self._actions = self._actions, GroupActions()
        return actions

    def next_decision_at(self) -> float | None:
        """Return the time (Unix seconds) at which to decide again even if nothing happens."""
        while self._alarms and self.groups.get(self._alarms[0][2].group_id) is not self._alarms[0][2]:
            heappop(self._alarms)
        return self._alarms[0][0] if self._alarms else None

    def is_stale(self, member: RolloutSummary) -> bool:
        """Whether the group of a rollout is too old to be learnt from; the whole group shares the verdict."""
        if member.evaluation or member.group_id is None:
            return False
        settled, group = self.results.settled.get(member.group_id), self.groups.get(member.group_id)
        oldest = member.oldest_version
        if settled is not None:
            oldest = settled.oldest_version
        elif group is not None:
            oldest = group.oldest_version()
        return is_too_old(oldest, self.version, self.demand)

    def status(self) -> GroupsStatus:
        """Return the report on the run's groups, for trainers and the dashboard."""
        demand, results = self.demand, self.results
        unused = results.unused_ready(demand.after)
        fresh = results.count_fresh(demand, self.version)
        replicas = [replica for group in self.groups.values() for replica in group.live_replicas()]
        states: Counter[GroupState] = Counter(results.counts)
        states.update(_state(group, demand.epsilon) for group in self.groups.values())
        return GroupsStatus(
            run_id=self.run_id,
            demand=demand,
            version=self.version,
            satisfied=self.is_satisfied,
            wanted=demand.groups + demand.spare,
            ready=fresh,
            ready_stale=len(unused) - fresh,
            begun=self._under_way() + fresh,
            waiting=sum(not group.begun and group.stop_reason is None for group in self.groups.values()),
            kept=sum(group.kept_since is not None and group.stop_reason is None for group in self.groups.values()),
            held=sum(replica.is_held for replica in replicas),
            parked=sum(replica.position.is_parked for replica in replicas),
            states=dict(states.items()),
            replaced=results.replaced,
            extras=results.extras,
            wasted_tokens=results.wasted_tokens,
            reclaimed_seconds=results.reclaimed_seconds,
            ready_groups=tuple(
                ReadyGroup(
                    group_id=settled.group_id,
                    cursor=settled.cursor,
                    oldest_version=settled.oldest_version,
                    stale=is_too_old(settled.oldest_version, self.version, demand),
                )
                for settled in unused[:_MAX_LISTED]
            ),
        )

    def _under_way(self) -> int:
        return len(self.groups) - len(self._waiting) - len(self._stopping | self._dormant)

    def _begin_waiting(self) -> None:
        """Let as many waiting groups begin as the demand allows, each as a whole, oldest first."""
        if self.is_satisfied or not self._waiting:
            return
        ready = self.results.count_fresh(self.demand, self.version)
        limit = max_begun_groups(self.demand, ready, self.results.informative_share)
        allowed = len(self._waiting) if limit is None else limit - self._under_way()
        for group in list(islice(self._waiting.values(), max(0, allowed))):
            group.begun = True
            del self._waiting[group.group_id]
            self._mark_dirty(group)

    def _review(self, group: Group, now: float) -> None:
        if self.groups.get(group.group_id) is not group:
            return
        if group.stop_reason is None:
            self._decide_need(group, now)
        if group.stop_reason is not None:
            self._waiting.pop(group.group_id, None)
            self._stopping.add(group.group_id)
            self._actions.cancel_stopped(group)
        elif group.kept_since is not None or not group.begun:
            self._actions.suspend(group.live_replicas())
        else:  # it goes on, and is helped where the infrastructure failed it
            self._actions.resume(group.live_replicas())
            for replica in group.live_replicas():
                if replica.start_version is None and replica.stage in ("run", "eval"):
                    replica.start_version = self.version
            for due, replacement in group.due_replacements(self.demand, self._durations):
                if now >= due:
                    group.position_by_id[replacement.stands_in_for].expected_replacement = replacement.rollout_id
                    self._actions.replacements.append(replacement)
        self._settle(group)
        if group.begun and group.is_dormant and self.groups.get(group.group_id) is group:
            self._dormant.add(group.group_id)
        else:
            self._dormant.discard(group.group_id)
        self._set_alarm(group)

    def _decide_need(self, group: Group, now: float) -> None:
        """Decide whether a group is stopped, kept for later (``kept_since``), or needed. The first rule that holds."""
        policy = self.demand.redundant
        if (lost := group.lost_reason()) is not None:
            group.stop(lost, ALL_BUT_EVAL)
        elif is_too_old(group.oldest_version(), self.version, self.demand):
            group.stop(CancelReason.STALE, ALL_STAGES)
        elif not group.has_ungraded_work():
            group.kept_since = None
        elif not self.is_satisfied:
            group.kept_since, group.arrived_after_demand = None, False
        elif group.kept_since is not None and now >= group.kept_since + policy.park_seconds:
            group.stop(CancelReason.REDUNDANT, ALL_BUT_EVAL)
        elif group.arrived_after_demand or (policy.run == "park" and group.has_sunk_cost(policy)):
            group.kept_since = now if group.kept_since is None else group.kept_since
        elif group.would_cancel_work(policy):
            group.stop(CancelReason.REDUNDANT, cancelled_stages(policy))

    def _settle(self, group: Group) -> None:
        """Judge a group for good once all of it has ended and nothing will be retried."""
        if self.groups.get(group.group_id) is not group:
            return
        if group.may_replace(self.demand) and any(position.needs_replacement for position in group.positions):
            return
        ends = group.ends()
        if ends is None:
            return
        state = judge_group(ends, group.size, self.demand.epsilon)
        self.results.record_verdict(group, state, ends)
        # Rivals of rollouts that have their reward.
        self._actions.cancel_replicas(group.live_replicas(), CancelReason.REDUNDANT)
        self._actions.settled.append((group.group_id, state))
        del self.groups[group.group_id]
        self._waiting.pop(group.group_id, None)
        self._stopping.discard(group.group_id)

    def _set_alarm(self, group: Group) -> None:
        """Set the alarm of a group for when time alone changes what is due."""
        if self.groups.get(group.group_id) is not group or group.stop_reason is not None:
            return
        times: list[float] = []
        if group.kept_since is not None:
            times.append(group.kept_since + self.demand.redundant.park_seconds)
        elif group.begun:
            times += [due for due, _ in group.due_replacements(self.demand, self._durations)]
        due = min(times, default=None)
        if due is not None and (group.alarm_at is None or due < group.alarm_at):
            group.alarm_at = due
            heappush(self._alarms, (due, next(self._alarm_order), group))

    def _record_end(self, group: Group, replica: Replica | None, member: RolloutSummary) -> bool:
        """Record how a rollout (``None``: only its end is known) of an unsettled group ended; return whether it counts.

        One beyond the group's limit does not, nor one that was cancelled as late and unneeded.
        """
        if replica is None:
            replica = Replica(*IDENTITY(member), summary=member)
            if not group.has_room_for(replica) or (was_unneeded(member) and group.is_complete_without(replica)):
                return False
            group.add_replica(replica)
        else:
            replica.summary = member
            group.position_by_id[member.rollout_id].on_ended(member)
        return True

    def _record_costs(self, member: RolloutSummary, replica: Replica | None, run_seconds: float) -> None:
        """Count what was wasted and saved, and learn how long stages take."""
        mean = self._durations.mean(member.environment, "run")
        if was_unneeded(member):
            self.results.wasted_tokens += member.sampled_tokens
            if mean is not None and replica is not None:
                self.results.reclaimed_seconds += max(0.0, mean - run_seconds)
        if member.reward is None or replica is None:
            return
        if run_seconds > 0:
            self._durations.record(member.environment, "run", run_seconds)
        if replica.stage == "eval":
            self._record_duration(replica.environment, "eval", member.finished_at - replica.position.since)

    def _record_duration(self, environment: str, stage: Stage, seconds: float) -> None:
        if self._durations.record(environment, stage, seconds):
            self._mark_all_dirty()  # the median is known now, so that stragglers can be found

    def _get_or_create_group(self, group_id: str, *, arrived_after_demand: bool) -> Group:
        group = self.groups.get(group_id)
        if group is None:
            self._arrivals += 1
            group = self.groups[group_id] = self._waiting[group_id] = Group(
                group_id, self._arrivals, arrived_after_demand=arrived_after_demand
            )
        return group

    def _mark_dirty(self, group: Group) -> None:
        """Review a group in the next ``decide``. One of which a rollout has begun counts as begun."""
        self._dirty[group.group_id] = group
        if not group.begun and any(r.stage != "queue" or r.summary is not None for r in group.replicas()):
            group.begun = True
            self._waiting.pop(group.group_id, None)

    def _mark_all_dirty(self) -> None:
        self._dirty = dict(self.groups)


def _state(group: Group, epsilon: float) -> GroupState:
    if group.stop_reason is not None:
        return "stale" if group.stop_reason is CancelReason.STALE else "redundant"
    return "informative" if is_informative(group.rewarded_ends(), epsilon) else "open"
