"""Decides about the groups of one run: which begin, which are stopped or kept, which get replacements.

A state machine without an event loop or a clock. ``on_...`` methods record events and mark the groups they touch as
dirty. ``decide`` reviews the dirty groups, oldest first, until none is left, and returns the actions that follow; it
first judges groups of which everything has ended, since each group that is ready may make the others redundant. An
alarm makes a group dirty when time alone changes what is due. The rules are in ``group_rules``, their meaning in
``prorl_gym.demand``.
"""

from collections.abc import Container
from heapq import heappop, heappush
from itertools import count, islice

from prorl_gym.client.wire_models import RolloutSummary
from prorl_gym.demand import Demand
from prorl_gym.errors import CancelReason
from prorl_gym.rollout.groups import group_rules
from prorl_gym.rollout.groups.group import (
    Group,
    GroupPosition,
    Replacement,
    Replica,
    failed_permanently,
    judge_group,
    was_unneeded,
)
from prorl_gym.rollout.groups.group_actions import ALL_BUT_EVAL, ALL_STAGES, GroupActions
from prorl_gym.rollout.groups.group_results import GroupResults, is_too_old
from prorl_gym.rollout.groups.group_rules import StageDurations
from prorl_gym.rollout.protocol import Stage


class GroupScheduler:
    """The groups of a run that has a demand.

    Args:
        run_id: the run.
        demand: of the run.
        version: current version of the policy.
    """

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
        """A rollout was accepted.

        Args:
            replica: the rollout.
            before_demand: it was accepted before the demand, which therefore covers it, too. Otherwise a group that
                comes when nothing more is needed waits for the next demand.
        """
        if replica.stands_in_for is not None and replica.rollout_id not in self._replacements:
            self._replacements.add(replica.rollout_id)
            self.results.count_replacement(replica.rollout_id)
        settled = self.results.get(replica.group_id)
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
        """The position of a rollout moved to another stage."""
        replica = self._replicas.get(rollout_id)
        if replica is None:
            return
        stage = replica.stage
        if (replica.position.stage_before, stage) == ("init", "run"):
            self._record_duration(replica.environment, "init", replica.position.seconds_before)
        replica.is_park_requested = False
        if stage == "queue":  # another attempt: it samples anew
            replica.start_version = None
        group = self.groups.get(replica.group_id)
        if group is None:
            return
        position = group.position_of(rollout_id)
        if stage == "run" and position is not None and replica.is_live:  # the first to sample keeps the position
            rivals = [rival for rival in position.live_replicas if rival is not replica]
            losers = [replica] if any(rival.stage == "run" for rival in rivals) else rivals
            self._lost_races += [(loser, CancelReason.REDUNDANT) for loser in losers]
        self._mark_dirty(group)

    def on_parking_changed(self, rollout_id: str) -> None:
        """An agent was parked, or goes on."""
        replica = self._replicas.get(rollout_id)
        group = None if replica is None else self.groups.get(replica.group_id)
        if group is not None:
            self._mark_dirty(group)

    def on_finished(self, member: RolloutSummary, run_seconds: float = 0.0) -> None:
        """A rollout ended.

        Args:
            member: how.
            run_seconds: how long its agent worked.
        """
        replica = self._replicas.pop(member.rollout_id, None)
        self._count_ended_replacement(member)
        self._record_costs(member, replica, run_seconds)
        # After a restart, a record may be the first to show a version.
        self.set_policy_version(member.oldest_version or 0)
        if member.group_id is None or member.evaluation or self.results.get(member.group_id) is not None:
            return
        group = self._get_or_create_group(member.group_id, arrived_after_demand=False)
        if not self._record_end(group, replica, member):
            return
        self._cancel_rivals(group, member)
        self._mark_dirty(group)

    def on_replacement_refused(self, replacement: Replacement, again_at: float | None = None) -> None:
        """A replacement could not be made: never, or not before this time (Unix seconds)."""
        for group in self.groups.values():
            position = group.position_of(replacement.stands_in_for)
            if position is not None:
                break
        else:
            return
        if position.expected_replacement != replacement.rollout_id:
            return
        position.expected_replacement = None
        position.is_given_up = again_at is None
        position.not_before = again_at or 0.0
        self._mark_dirty(group)

    def set_demand(self, demand: Demand) -> None:
        """Replace the demand."""
        if demand.pool != self.demand.pool:
            self.version = 0  # versions of another pool cannot be compared
        self.demand = demand
        for group in self.groups.values():
            group.arrived_after_demand = False
        self.set_policy_version(demand.version or 0)
        self._mark_all_dirty()

    def set_policy_version(self, version: int) -> None:
        """The policy has this version now; an older one changes nothing."""
        if version > self.version:
            self.version = version
            self._mark_all_dirty()

    # --- what follows -------------------------------------------------------------------------------------------

    def settle_rewarded(self, exclude: Container[str] = ()) -> None:
        """Judge the groups of which all rewards are in. It keeps memory small while a long history is replayed.

        Args:
            exclude: not these groups, which have pending rollouts.
        """
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
            self._cancel_lost_races()
            for group in list(self._dirty.values()):
                self._settle(group)  # before the reviews, so that groups that are ready count in them
            self._update_satisfied()
            self._begin_waiting()
            if not self._dirty:
                break
            batch, self._dirty = sorted(self._dirty.values(), key=lambda group: group.arrival), {}
            for group in batch:
                self._review(group, now)
        actions, self._actions = self._actions, GroupActions()
        return actions

    def withdraw_demand(self) -> GroupActions:
        """Return the actions that end the demand: what it keeps of groups that have begun is cancelled.

        Those are the parked agents, and members of their groups. No demand is left that could need them.
        """
        for group in self.groups.values():
            if group.kept_since is not None and group.begun:
                group.stop(CancelReason.REDUNDANT, ALL_BUT_EVAL)
                self._actions.cancel_stopped(group)
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
        settled, group = self.results.get(member.group_id), self.groups.get(member.group_id)
        oldest = member.oldest_version
        if settled is not None:
            oldest = settled.oldest_version
        elif group is not None:
            oldest = group.oldest_version()
        return is_too_old(oldest, self.version, self.demand)

    def count_begun_unused(self) -> int:
        """Count the groups that have begun and are neither used nor lost."""
        return self._under_way() + self.results.count_fresh(self.demand, self.version)

    def _under_way(self) -> int:
        return len(self.groups) - len(self._waiting) - len(self._stopping | self._dormant)

    def _update_satisfied(self) -> None:
        wanted = self.demand.groups + self.demand.spare
        satisfied = self.results.count_fresh(self.demand, self.version) >= wanted
        if satisfied != self.is_satisfied:
            self.is_satisfied = satisfied
            self._mark_all_dirty()

    def _begin_waiting(self) -> None:
        """Let as many waiting groups begin as the demand allows, each as a whole, oldest first."""
        if self.is_satisfied or not self._waiting:
            return
        ready = self.results.count_fresh(self.demand, self.version)
        limit = group_rules.max_begun_groups(self.demand, ready, self.results.informative_share)
        allowed = len(self._waiting) if limit is None else limit - self._under_way()
        for group in list(islice(self._waiting.values(), max(0, allowed))):
            self._begin_group(group)

    def _begin_group(self, group: Group) -> None:
        group.begun = True
        self._waiting.pop(group.group_id, None)
        self._mark_dirty(group)

    def _review(self, group: Group, now: float) -> None:
        """Decide what becomes of a group."""
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
        else:
            self._advance(group, now)
        self._settle(group)
        self._update_dormant(group)
        self._set_alarm(group)

    def _update_dormant(self, group: Group) -> None:
        if group.begun and group.is_dormant and self.groups.get(group.group_id) is group:
            self._dormant.add(group.group_id)
        else:
            self._dormant.discard(group.group_id)

    def _decide_need(self, group: Group, now: float) -> None:
        """Decide whether a group is stopped, kept for later (``kept_since``), or needed. The first rule that holds."""
        policy = self.demand.redundant
        if (lost := group_rules.lost_reason(group)) is not None:
            group.stop(lost, ALL_BUT_EVAL)
        elif is_too_old(group.oldest_version(), self.version, self.demand):
            group.stop(CancelReason.STALE, ALL_STAGES)
        elif not group_rules.has_ungraded_work(group):
            group.kept_since = None
        elif not self.is_satisfied:
            group.kept_since, group.arrived_after_demand = None, False
        elif group.kept_since is not None and now >= group.kept_since + policy.park_seconds:
            group.stop(CancelReason.REDUNDANT, ALL_BUT_EVAL)
        elif group.arrived_after_demand or (policy.run == "park" and group_rules.has_sunk_cost(group, policy)):
            group.kept_since = now if group.kept_since is None else group.kept_since
        elif group_rules.would_cancel_work(group, policy):
            group.stop(CancelReason.REDUNDANT, group_rules.cancelled_stages(policy))

    def _advance(self, group: Group, now: float) -> None:
        """Let a needed group go on, and help it where the infrastructure failed it."""
        self._actions.resume(group.live_replicas())
        for replica in group.live_replicas():
            if replica.start_version is None and replica.stage in ("run", "eval"):
                replica.start_version = self.version
        for due, replacement in group_rules.due_replacements(group, self.demand, self._durations):
            if now >= due:
                self._actions.request_replacement(group, replacement)

    def _settle(self, group: Group) -> None:
        """Judge a group for good once all of it has ended and nothing will be made again."""
        if self.groups.get(group.group_id) is not group:
            return
        if group_rules.may_replace(group, self.demand) and any(
            position.needs_replacement for position in group.positions
        ):
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
            times += [due for due, _ in group_rules.due_replacements(group, self.demand, self._durations)]
        due = min(times, default=None)
        if due is not None and (group.alarm_at is None or due < group.alarm_at):
            group.alarm_at = due
            heappush(self._alarms, (due, next(self._alarm_order), group))

    def _cancel_lost_races(self) -> None:
        losers, self._lost_races = self._lost_races, []
        for replica, reason in losers:
            self._actions.cancel_replicas([replica], reason)

    def _count_ended_replacement(self, member: RolloutSummary) -> None:
        """Count a replacement that nothing but its end has shown; forget one that is counted."""
        if member.stands_in_for is None or member.group_id is None or member.evaluation:
            return
        if member.rollout_id not in self._replacements:
            self.results.count_replacement(member.rollout_id)
        self._replacements.discard(member.rollout_id)

    def _record_end(self, group: Group, replica: Replica | None, member: RolloutSummary) -> bool:
        """Enter into a group how a rollout of it ended.

        Args:
            group: not settled.
            replica: the rollout; ``None``: only its end is known.
            member: how it ended.

        Returns:
            Whether it counts: it is not beyond the group's limit, nor was it cancelled as late and unneeded.
        """
        if replica is None:
            replica = Replica.from_summary(member)
            if not group.has_room_for(replica) or (was_unneeded(member) and group.is_complete_without(replica)):
                return False
            group.add_replica(replica)
        else:
            replica.summary = member
            self._position_of(group, member).on_ended(member)
        return True

    def _cancel_rivals(self, group: Group, member: RolloutSummary) -> None:
        """Cancel those that race for the position of a rollout, unless it failed or was itself cancelled."""
        if not failed_permanently(member) and not was_unneeded(member):
            rivals = self._position_of(group, member).live_replicas
            self._lost_races += [(rival, CancelReason.REDUNDANT) for rival in rivals]

    @staticmethod
    def _position_of(group: Group, member: RolloutSummary) -> GroupPosition:
        position = group.position_of(member.rollout_id)
        assert position is not None
        return position

    def _record_costs(self, member: RolloutSummary, replica: Replica | None, run_seconds: float) -> None:
        """Count what was wasted and saved, and learn how long things take."""
        mean = self._durations.mean(member.environment, "run")
        self.results.count_cancelled(
            member, max(0.0, mean - run_seconds) if mean is not None and replica is not None else 0.0
        )
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
