"""What a trainer and a dashboard are told about the groups of a run."""

from collections import Counter

from pydantic import Field

from prorl_gym.demand import Demand
from prorl_gym.errors import CancelReason
from prorl_gym.records import Record
from prorl_gym.rollout.groups.book import Book
from prorl_gym.rollout.groups.group import Group, State, informative
from prorl_gym.rollout.groups.posterior import wilson
from prorl_gym.rollout.groups.results import too_old

_LISTED = 1000
"""Ready groups that are named in one report."""


class ReadyGroup(Record):
    """A complete, informative group that the trainer has not used."""

    group_id: str
    cursor: int
    """Of the record that completed it."""
    oldest_version: int | None
    """Policy version of its oldest token."""
    stale: bool
    """It is older than the demand allows."""


class EarlyStopReport(Record):
    """How groups fared whose first rewards foretold the rest."""

    stopped: int
    """Groups that were stopped for it."""
    audited: int
    """Such groups that ran to their end instead, to be counted."""
    audited_informative: int
    """Those among them that turned out informative: stopping them would have been wrong."""
    rate: float | None
    """Share of the audited that were; ``None`` as long as there are none."""
    low: float
    """Lower end of the rate's 95 % interval (Wilson 1927)."""
    high: float
    """Upper end."""


class GroupsStatus(Record):
    """The groups of a run. Counts go back to the oldest rollout of the run that the ledger remembers."""

    run_id: str
    demand: Demand | None = None
    """What the trainer wants; ``None``: nobody asks about groups, and nothing of them is counted."""
    version: int = 0
    """Version of the policy that is current for this run."""
    satisfied: bool = False
    """As many groups are ready as were wanted, so that the others are redundant."""
    wanted: int = 0
    """Ready groups that are wanted past ``demand.after``, spare ones counted."""
    ready: int = 0
    """Ready groups past ``demand.after`` that are not stale."""
    ready_stale: int = 0
    """And those that are."""
    begun: int = 0
    """Groups that have begun and are neither used nor lost: what ``max_staleness`` bounds."""
    waiting: int = 0
    """Groups that have not begun, since ``max_staleness`` bounds how many may."""
    kept: int = 0
    """Groups that are not needed now and kept for a later demand."""
    held: int = 0
    """Rollouts that may not begin."""
    parked: int = 0
    """Agents that are parked."""
    states: dict[State, int] = Field(default_factory=dict[State, int])
    """Groups by state."""
    replaced: int = 0
    """Rollouts made in place of failed ones."""
    extras: int = 0
    """Rollouts made to race stragglers."""
    wasted_tokens: int = 0
    """Sampled in rollouts that were cancelled as redundant or stale."""
    reclaimed_seconds: float = 0.0
    """Estimate of the agents' working time that those cancels saved since this service started: the mean of the
    environment's latest rollouts that got a reward, less what had been worked, never below 0. The true figure cannot
    be known."""
    early_stop: EarlyStopReport | None = None
    """When the demand has ``early_stop``."""
    ready_groups: tuple[ReadyGroup, ...] = ()
    """The ready groups past ``demand.after`` by cursor, at most 1,000."""


def report(book: Book) -> GroupsStatus:
    """Return the status of a run's groups."""
    demand, results = book.demand, book.results
    unused = results.unused(demand.after)
    fresh = results.fresh(demand, book.version)
    replicas = [replica for group in book.groups.values() for replica in group.live()]
    states: Counter[State] = Counter(results.counts)
    states.update(_state(group, demand.epsilon) for group in book.groups.values())
    return GroupsStatus(
        run_id=book.run_id,
        demand=demand,
        version=book.version,
        satisfied=book.satisfied,
        wanted=demand.groups + demand.spare,
        ready=fresh,
        ready_stale=len(unused) - fresh,
        begun=book.begun_unused(),
        waiting=sum(not group.begun and group.stopped is None for group in book.groups.values()),
        kept=sum(group.kept_since is not None and group.stopped is None for group in book.groups.values()),
        held=sum(replica.held for replica in replicas),
        parked=sum(replica.parked for replica in replicas),
        states=dict(states),
        replaced=results.replaced,
        extras=results.extras,
        wasted_tokens=results.wasted_tokens,
        reclaimed_seconds=results.reclaimed_seconds,
        early_stop=_early_stop(book),
        ready_groups=tuple(
            ReadyGroup(
                group_id=settled.group_id,
                cursor=settled.cursor,
                oldest_version=settled.oldest_version,
                stale=too_old(settled.oldest_version, book.version, demand),
            )
            for settled in unused[:_LISTED]
        ),
    )


def _state(group: Group, epsilon: float) -> State:
    """Return the state of a group that is not settled."""
    if group.stopped is not None:
        return "stale" if group.stopped is CancelReason.STALE else "redundant"
    return "informative" if informative(group.rewarded(), epsilon) else "open"


def _early_stop(book: Book) -> EarlyStopReport | None:
    if book.demand.early_stop is None:
        return None
    hits, trials = book.results.audited_informative, book.results.audited
    low, high = wilson(hits, trials)
    return EarlyStopReport(
        stopped=book.results.early_stopped,
        audited=trials,
        audited_informative=hits,
        rate=hits / trials if trials else None,
        low=low,
        high=high,
    )
