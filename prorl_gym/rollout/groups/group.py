"""A group of rollouts of one prompt, its positions and replicas, the verdict on it, and the rules of what it needs.

Pure functions of how the rollouts ended and what they do, so that the same records give the same verdict before and
after a restart. ``group_scheduler`` decides by them.
"""

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import attrgetter
from statistics import median

from prorl_gym.client.wire_models import GroupState, RolloutSummary
from prorl_gym.demand import Demand, RedundantHandling
from prorl_gym.errors import CancelReason, Cause, FailureKind
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.protocol import AttemptPosition, Stage

MAX_POSITIONS = 1024
"""Rollouts of a group that are judged, replacements not counted; further ones count as not grouped. Each event costs a
look at its whole group, and a run whose rollouts all bear one group's name must not stall the service."""

_ID_LENGTH = 128

_EXTRA = re.compile(r":x[0-9]+$")

IDENTITY = attrgetter("rollout_id", "run_id", "group_id", "group_size", "environment", "stands_in_for")
"""Returns the first fields of a ``Replica``, of whatever has them."""


@dataclass(slots=True, eq=False)
class Replica:
    """One rollout of a group, with what was decided about it."""

    rollout_id: str
    run_id: str
    group_id: str
    group_size: int
    environment: str
    stands_in_for: str | None = None
    position: AttemptPosition = field(default_factory=AttemptPosition)
    """The owner of the rollout moves it."""
    is_park_requested: bool = False
    is_held: bool = False
    cancel_reason: CancelReason | None = None
    start_version: int | None = None
    """The current policy version when its agent began to sample; ``None`` before."""
    summary: RolloutSummary | None = None
    """How it ended."""

    @property
    def stage(self) -> Stage:
        return self.position.stage

    @property
    def is_live(self) -> bool:
        """Whether it may still bring a reward: it has not ended and is not being stopped."""
        return self.summary is None and self.cancel_reason is None

    @property
    def is_extra(self) -> bool:
        """Whether it races a straggler, rather than replaces one that failed."""
        return self.stands_in_for is not None and is_extra(self.rollout_id)


@dataclass(frozen=True, slots=True)
class Replacement:
    """A rollout to be submitted in another one's place."""

    rollout_id: str
    stands_in_for: str

    def to_request(self, original: RolloutRequest) -> RolloutRequest:
        """Return what to submit: the original under another id.

        Replica and settings stay, and so does the seed. Where sampling follows the seed the replacement draws what the
        original would have drawn, so that nothing can be selected by making it; elsewhere it is a fresh draw.
        """
        return original.model_copy(update={"rollout_id": self.rollout_id, "stands_in_for": self.stands_in_for})


@dataclass(slots=True, eq=False)
class GroupPosition:
    """One place of a group: the rollout that was submitted for it, and those that replace it."""

    root_id: str
    replicas: list[Replica] = field(default_factory=list[Replica])
    expected_replacement: str | None = None
    """Id of a replacement that was requested and is not accepted yet."""
    is_given_up: bool = False
    """Whether a replacement could not be made."""
    not_before: float = 0.0
    """Unix seconds before which no other replacement is requested."""
    end: RolloutSummary | None = None
    """How it ended so far: the first reward, or else the latest end that is not of a lost race."""
    open_count: int = 0
    """Rollouts of it that have not ended."""

    def add_replica(self, replica: Replica) -> None:
        self.replicas.append(replica)
        self.open_count += 1
        if replica.summary is not None:
            self.on_ended(replica.summary)

    def on_ended(self, member: RolloutSummary) -> None:
        self.open_count -= 1
        self.end = member if self.end is None else max(self.end, member, key=self._precedence)

    def _precedence(self, end: RolloutSummary) -> tuple[int, int]:
        """Return the rank of an end of this position: the first reward, else the latest end that lost no race."""
        if end.reward is not None:
            return 2, -end.cursor
        raced = (replica.stands_in_for for replica in self.replicas if replica.is_extra)
        # Cut for a rival's sake, maybe: then its record may come after the rival's.
        may_have_lost_race = was_unneeded(end) and (is_extra(end.rollout_id) or end.rollout_id in raced)
        return (0 if may_have_lost_race else 1), end.cursor

    @property
    def live_replicas(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.is_live]

    @property
    def has_reward(self) -> bool:
        return self.end is not None and self.end.reward is not None

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it is left to end or to come."""
        return self.expected_replacement is None and self.open_count == 0

    @property
    def needs_replacement(self) -> bool:
        """Whether its last rollout fell to the infrastructure and none is in its place."""
        lost = self.is_idle and not self.has_reward and not self.is_given_up
        return lost and self.end is not None and failed_permanently(self.end)

    def straggler(self) -> Replica | None:
        """Return the rollout that an extra replica might race: alone, and in a stage that samples no text."""
        live = self.live_replicas
        if len(live) != 1 or self.expected_replacement is not None or self.is_given_up or self.has_reward:
            return None
        return live[0] if live[0].stage in ("init", "eval") else None

    def make_replacement(self, replaced: str, *, extra: bool) -> Replacement:
        """Return the replacement for a failed rollout of it, or an ``extra`` one that races a straggler."""
        number = 1 + sum(replica.stands_in_for is not None and replica.is_extra == extra for replica in self.replicas)
        return Replacement(replacement_id(self.root_id, "x" if extra else "r", number), replaced)


@dataclass(slots=True, eq=False)
class Group:
    """A group's positions, and what was decided about it as a whole."""

    group_id: str
    arrival: int
    """Rises with the age at which groups came."""
    size: int = 1
    begun: bool = False
    """Its rollouts may begin."""
    arrived_after_demand: bool = False
    """It came after the demand: when nothing more is needed it waits for the next one, instead of being dropped."""
    kept_since: float | None = None
    """Unix seconds since which it is not needed but kept: its agents are parked, the rest waits."""
    stop_reason: CancelReason | None = None
    cancel_stages: frozenset[Stage] = frozenset()
    """Stages in which the rollouts of a stopped group are cancelled."""
    alarm_at: float | None = None
    """Unix seconds at which it is to be looked at again."""
    positions: list[GroupPosition] = field(default_factory=list[GroupPosition])
    position_by_id: dict[str, GroupPosition] = field(default_factory=dict[str, GroupPosition])

    def add_replica(self, replica: Replica) -> None:
        """Add a rollout. A replacement shares the position of its original, in whatever order the two come."""
        self.size = max(self.size, replica.group_size)
        position = self.position_by_id.get(replica.rollout_id)
        target = replica.stands_in_for
        if target is not None:
            other = self.position_by_id.get(target)
            if position is None:
                position = other
            elif other is not None and other is not position:
                self._merge(other, position)
                position = other
        if position is None:
            position = GroupPosition(target or replica.rollout_id)
            self.positions.append(position)
        if target is None:
            position.root_id = replica.rollout_id
        else:
            self.position_by_id.setdefault(target, position)
        if position.expected_replacement == replica.rollout_id:
            position.expected_replacement = None
        self.position_by_id[replica.rollout_id] = position
        position.add_replica(replica)

    @property
    def extra_count(self) -> int:
        """Number of extra replicas, made or requested, that race stragglers."""
        return sum(is_extra(name) for name in self._replacements())

    @property
    def is_rewarded(self) -> bool:
        return len(self.positions) >= self.size and all(position.has_reward for position in self.positions)

    @property
    def is_dormant(self) -> bool:
        """Whether all that came of it has ended, and the rest was not submitted yet, or never will be."""
        return len(self.positions) < self.size and all(
            position.is_idle and not position.needs_replacement for position in self.positions
        )

    def has_room_for(self, replica: Replica) -> bool:
        known = replica.rollout_id in self.position_by_id or replica.stands_in_for in self.position_by_id
        # Requests may name ``stands_in_for`` themselves; the service's own replacements are far fewer than positions.
        return len(self.position_by_id) < 2 * MAX_POSITIONS if known else len(self.positions) < MAX_POSITIONS

    def is_complete_without(self, replica: Replica) -> bool:
        """Whether everything had ended when this rollout came, so that it is none of the group."""
        whole = len(self.positions) >= self.size and all(position.is_idle for position in self.positions)
        return whole and replica.stands_in_for is None and replica.rollout_id not in self.position_by_id

    def replicas(self) -> Iterable[Replica]:
        for position in self.positions:
            yield from position.replicas

    def live_replicas(self) -> list[Replica]:
        return [replica for replica in self.replicas() if replica.is_live]

    def stop(self, reason: CancelReason, cut: frozenset[Stage]) -> None:
        self.stop_reason, self.cancel_stages = reason, cut

    def rewarded_ends(self) -> list[RolloutSummary]:
        return [end for position in self.positions if (end := position.end) is not None and end.reward is not None]

    def ends(self) -> list[RolloutSummary] | None:
        """Return how every place ended; ``None`` while something is still to come, or to be submitted."""
        if len(self.positions) < self.size:
            return None
        ends = [position.end for position in self.positions if position.has_reward or position.is_idle]
        found = [end for end in ends if end is not None]
        return found if len(found) == len(self.positions) else None

    def oldest_version(self) -> int | None:
        """Return the version of its oldest token, sampled or being sampled; ``None`` when there is none."""
        versions = [end.oldest_version for end in self.rewarded_ends()]
        versions += [replica.start_version for replica in self.live_replicas()]
        return min((version for version in versions if version is not None), default=None)

    def lost_reason(self) -> CancelReason | None:
        """Return why a place of the group was cut with nothing left in it: it was stopped, maybe before a restart."""
        ends = [position.end for position in self.positions if position.is_idle and not position.has_reward]
        why = {end.detail for end in ends if end is not None and was_unneeded(end)}
        if not why:
            return None
        return CancelReason.STALE if CancelReason.STALE in why else CancelReason.REDUNDANT

    def has_ungraded_work(self) -> bool:
        """Whether more than grading is left to do: something has not begun, is at work, or will be retried."""
        return self._awaits_replacement() or any(replica.stage != "eval" for replica in self.live_replicas())

    def has_sunk_cost(self, policy: RedundantHandling) -> bool:
        """Whether work was done on it that parking its agents keeps."""
        kept: set[Stage] = {"run", "eval", "init"} if policy.init == "finish" else {"run", "eval"}
        return any(position.has_reward for position in self.positions) or any(
            replica.stage in kept for replica in self.live_replicas()
        )

    def would_cancel_work(self, policy: RedundantHandling) -> bool:
        """Whether stopping a group would keep anything from being made."""
        cut = cancelled_stages(policy)
        return self._awaits_replacement() or any(replica.stage in cut for replica in self.live_replicas())

    def may_replace(self, demand: Demand) -> bool:
        """Whether failed members of a group are still replaced."""
        return self.stop_reason is None and len(self._replacements()) - self.extra_count < demand.replace

    def due_replacements(self, demand: Demand, durations: "StageDurations") -> Iterator[tuple[float, Replacement]]:
        """Yield the replacements that would help a group, each with the Unix seconds from which it is due.

        Replacements that the caller requests between two items count for those that follow.
        """
        for position in self.positions:
            if position.needs_replacement and self.may_replace(demand):
                assert position.end is not None
                yield position.not_before, position.make_replacement(position.end.rollout_id, extra=False)
            elif (stuck := position.straggler()) is not None and self.extra_count < demand.extra:
                usual = durations.median(stuck.environment, stuck.stage)
                if usual is not None:
                    due = stuck.position.since + max(demand.straggler_seconds, demand.straggler_factor * usual)
                    yield max(due, position.not_before), position.make_replacement(stuck.rollout_id, extra=True)

    def _awaits_replacement(self) -> bool:
        return any(
            position.needs_replacement or position.expected_replacement is not None for position in self.positions
        )

    def _replacements(self) -> list[str]:
        made = [replica.rollout_id for replica in self.replicas() if replica.stands_in_for is not None]
        return made + [
            position.expected_replacement for position in self.positions if position.expected_replacement is not None
        ]

    def _merge(self, keep: GroupPosition, other: GroupPosition) -> None:
        for replica in other.replicas:
            keep.add_replica(replica)
        keep.expected_replacement = keep.expected_replacement or other.expected_replacement
        self.positions.remove(other)
        for name, position in self.position_by_id.items():
            if position is other:
                self.position_by_id[name] = keep


def is_informative(ends: Sequence[RolloutSummary], epsilon: float) -> bool:
    """Whether these rewards teach something: two differ, and one of the rollouts may be learnt from.

    Rollouts that are masked for being overlong keep their reward here: trainers normalise by the whole group, so that
    the others get an advantage from it. A group of which every rollout is masked teaches nothing. Once true it stays
    true, whatever else comes in.
    """
    rewards = [end.reward for end in ends if end.reward is not None]
    return bool(rewards) and max(rewards) - min(rewards) > epsilon and not all(end.masked for end in ends)


def judge_group(ends: Sequence[RolloutSummary], size: int, epsilon: float) -> GroupState:
    """Judge a group of ``size`` places by how each of them ended: by its reward, or by the last that tried."""
    if len(ends) >= size and all(end.reward is not None for end in ends):
        return "ready" if is_informative(ends, epsilon) else "uninformative"
    why = {end.detail for end in ends if end.status == "cancelled"}
    if CancelReason.STALE in why:
        return "stale"
    return "redundant" if CancelReason.REDUNDANT in why else "short"


def failed_permanently(member: RolloutSummary) -> bool:
    """Whether it ended by an infrastructure fault that another rollout may be spared.

    One that was lost with the service or with nodes again and again is not: it may be what brings them down.
    """
    return (
        member.status == "failed"
        and member.cause is Cause.INFRASTRUCTURE
        and member.detail not in (FailureKind.SERVICE_RESTARTED.value, FailureKind.NODE_LOST.value)
    )


def was_unneeded(member: RolloutSummary) -> bool:
    """Whether the service cancelled it because its group was not needed, or not any more."""
    return member.status == "cancelled" and member.detail in (CancelReason.REDUNDANT.value, CancelReason.STALE.value)


def is_extra(replacement: str) -> bool:
    """Whether the id of a replacement is that of an extra replica."""
    return _EXTRA.search(replacement) is not None


def replacement_id(root: str, kind: str, number: int) -> str:
    """Return the id of a replacement: always the same for the same rollout, kind (``r``, ``x``) and number."""
    tail = f":{kind}{number}"
    if len(root) + len(tail) > _ID_LENGTH:
        digest = blake2b(root.encode(), digest_size=8).hexdigest()
        root = f"{root[: _ID_LENGTH - len(tail) - len(digest) - 1]}.{digest}"
    return root + tail


_WINDOW = 64
"""Latest durations that count: conditions change with the policy and the machine."""

_MIN_SAMPLES = 5
"""Fewer give no median."""

_MAX_WINDOWS = 1000
"""Environments times stages that are remembered: their names come from requests."""


class StageDurations:
    """Medians and means of the latest durations, in seconds."""

    def __init__(self) -> None:
        self._windows: dict[tuple[str, Stage], deque[float]] = {}

    def record(self, environment: str, stage: Stage, seconds: float) -> bool:
        """Add a duration; return whether the median has just become known."""
        key = (environment, stage)
        if key not in self._windows and len(self._windows) >= _MAX_WINDOWS:
            del self._windows[next(iter(self._windows))]
        window = self._windows.setdefault(key, deque(maxlen=_WINDOW))
        window.append(max(0.0, seconds))
        return len(window) == _MIN_SAMPLES

    def median(self, environment: str, stage: Stage) -> float | None:
        window = self._windows.get((environment, stage), ())
        return median(window) if len(window) >= _MIN_SAMPLES else None

    def mean(self, environment: str, stage: Stage) -> float | None:
        window = self._windows.get((environment, stage), ())
        return sum(window) / len(window) if window else None


def max_begun_groups(demand: Demand, ready: int, informative_share: float) -> int | None:
    """Return how many groups may be under way; ``None``: as many as there are.

    The capacity law of AReaL (Fu et al. 2025, arXiv:2505.24298, section 5.1) counted in groups; never fewer than the
    demand needs at once. It bounds the ``ready`` groups, which wait to be used. Of the groups under way only the
    informative share will become ready: counted as if all would, they would leave workers idle.
    """
    if demand.max_staleness is None:
        return None
    most = max((demand.max_staleness + 1) * demand.groups, demand.groups + demand.spare)
    return max(0, math.ceil((most - ready) / informative_share))


def cancelled_stages(policy: RedundantHandling) -> frozenset[Stage]:
    """Return the stages in which members of a redundant group that is not kept are cancelled."""
    cut: set[Stage] = {"queue"}
    if policy.init == "kill":
        cut.add("init")
    if policy.run != "finish":
        cut.add("run")
    return frozenset(cut)
