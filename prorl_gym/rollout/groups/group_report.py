"""The report on the groups of a run, for trainers and the dashboard."""

from collections import Counter

from prorl_gym.client.wire_models import GroupsStatus, GroupState, ReadyGroup
from prorl_gym.errors import CancelReason
from prorl_gym.rollout.groups.group import Group, is_informative
from prorl_gym.rollout.groups.group_results import is_too_old
from prorl_gym.rollout.groups.group_scheduler import GroupScheduler

_MAX_LISTED = 1000
"""Ready groups that are named in one report."""


def groups_status(scheduler: GroupScheduler) -> GroupsStatus:
    """Return the status of a run's groups."""
    demand, results = scheduler.demand, scheduler.results
    unused = results.unused_ready(demand.after)
    fresh = results.count_fresh(demand, scheduler.version)
    replicas = [replica for group in scheduler.groups.values() for replica in group.live_replicas()]
    states: Counter[GroupState] = Counter(results.counts)
    states.update(_state(group, demand.epsilon) for group in scheduler.groups.values())
    return GroupsStatus(
        run_id=scheduler.run_id,
        demand=demand,
        version=scheduler.version,
        satisfied=scheduler.is_satisfied,
        wanted=demand.groups + demand.spare,
        ready=fresh,
        ready_stale=len(unused) - fresh,
        begun=scheduler.count_begun_unused(),
        waiting=sum(not group.begun and group.stop_reason is None for group in scheduler.groups.values()),
        kept=sum(group.kept_since is not None and group.stop_reason is None for group in scheduler.groups.values()),
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
                stale=is_too_old(settled.oldest_version, scheduler.version, demand),
            )
            for settled in unused[:_MAX_LISTED]
        ),
    )


def _state(group: Group, epsilon: float) -> GroupState:
    """Return the state of a group that is not settled."""
    if group.stop_reason is not None:
        return "stale" if group.stop_reason is CancelReason.STALE else "redundant"
    return "informative" if is_informative(group.rewarded_ends(), epsilon) else "open"
