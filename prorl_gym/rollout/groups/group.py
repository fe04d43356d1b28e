"""A group of rollouts of one prompt, its positions and replicas, and the verdict on it.

The verdict is a pure function of how the rollouts ended, so that the same records give the same verdict before and
after a restart. ``group_scheduler`` decides about what has not ended.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

from prorl_gym.client.wire_models import GroupState, RolloutSummary
from prorl_gym.errors import CancelReason, Cause, FailureKind
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.protocol import AttemptPosition, Stage

MAX_POSITIONS = 1024
"""Rollouts of a group that are looked after, replacements not counted. What is beyond them counts as not grouped: each
event costs a look at its whole group, and a run of which all rollouts bear one group's name must not stall the
service."""

_ID_LENGTH = 128

_EXTRA = re.compile(r":x[0-9]+$")

GroupVerdict = Literal["informative", "uninformative", "redundant", "stale", "short", "ungrouped"]
"""What became of a rollout's group in the end; ``ungrouped``: there is no demand for its run."""


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
    """Where it is. The owner of the rollout moves it."""
    is_park_requested: bool = False
    is_held: bool = False
    cancel_reason: CancelReason | None = None
    start_version: int | None = None
    """The current policy version when its agent began to sample; ``None`` before."""
    summary: RolloutSummary | None = None
    """How it ended."""

    @classmethod
    def from_summary(cls, member: RolloutSummary) -> "Replica":
        """Return the replica of a rollout that is only known by its end."""
        assert member.group_id is not None
        return cls(
            member.rollout_id,
            member.run_id,
            member.group_id,
            member.group_size,
            member.environment,
            member.stands_in_for,
            summary=member,
        )

    @property
    def stage(self) -> Stage:
        """The stage that it entered last."""
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
    """A rollout to be made in another one's place."""

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
        """Add a rollout."""
        self.replicas.append(replica)
        self.open_count += 1
        if replica.summary is not None:
            self.on_ended(replica.summary)

    def on_ended(self, member: RolloutSummary) -> None:
        """One of its rollouts ended."""
        self.open_count -= 1
        self.end = member if self.end is None else max(self.end, member, key=self._precedence)

    def _precedence(self, end: RolloutSummary) -> tuple[int, int]:
        """Return the rank of an end of this position: the first reward, else the latest end that lost no race."""
        if end.reward is not None:
            return 2, -end.cursor
        return (0 if self._may_have_lost_race(end) else 1), end.cursor

    def _may_have_lost_race(self, end: RolloutSummary) -> bool:
        """Whether it was cut for a rival's sake, maybe: then its record may come after the rival's."""
        raced = (replica.stands_in_for for replica in self.replicas if replica.is_extra)
        return was_unneeded(end) and (is_extra(end.rollout_id) or end.rollout_id in raced)

    @property
    def live_replicas(self) -> list[Replica]:
        """Return those that may still bring a reward."""
        return [replica for replica in self.replicas if replica.is_live]

    @property
    def has_reward(self) -> bool:
        """Whether its reward is in."""
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

    def make_failure_replacement(self) -> Replacement:
        """Return the replacement for its failed rollout."""
        end = self.end
        assert end is not None
        number = 1 + sum(replica.stands_in_for is not None and not replica.is_extra for replica in self.replicas)
        return Replacement(replacement_id(self.root_id, "r", number), end.rollout_id)

    def make_extra(self, straggler: Replica) -> Replacement:
        """Return the replacement that races a straggler."""
        number = 1 + sum(replica.is_extra for replica in self.replicas)
        return Replacement(replacement_id(self.root_id, "x", number), straggler.rollout_id)


@dataclass(slots=True, eq=False)
class Group:
    """What is known of a group, and what was decided about it as a whole."""

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
    _position_by_id: dict[str, GroupPosition] = field(default_factory=dict[str, GroupPosition])

    def add_replica(self, replica: Replica) -> None:
        """Add a rollout. A replacement shares the position of its original, in whatever order the two come."""
        self.size = max(self.size, replica.group_size)
        position = self._position_by_id.get(replica.rollout_id)
        target = replica.stands_in_for
        if target is not None:
            other = self._position_by_id.get(target)
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
            self._position_by_id.setdefault(target, position)
        if position.expected_replacement == replica.rollout_id:
            position.expected_replacement = None
        self._position_by_id[replica.rollout_id] = position
        position.add_replica(replica)

    @property
    def failure_replacement_count(self) -> int:
        """Number of replacements, made or requested, for failed rollouts."""
        return len(self._replacements()) - self.extra_count

    @property
    def extra_count(self) -> int:
        """Number of extra replicas, made or requested, that race stragglers."""
        return sum(is_extra(name) for name in self._replacements())

    @property
    def is_rewarded(self) -> bool:
        """Whether all of its rewards are in."""
        return len(self.positions) >= self.size and all(position.has_reward for position in self.positions)

    @property
    def is_dormant(self) -> bool:
        """Whether all that came of it has ended, and the rest was not submitted yet, or never will be."""
        return len(self.positions) < self.size and all(
            position.is_idle and not position.needs_replacement for position in self.positions
        )

    def has_room_for(self, replica: Replica) -> bool:
        """Whether it is small enough to take a rollout in."""
        known = replica.rollout_id in self._position_by_id or replica.stands_in_for in self._position_by_id
        # Requests may name ``stands_in_for`` themselves; the service's own replacements are far fewer than positions.
        return len(self._position_by_id) < 2 * MAX_POSITIONS if known else len(self.positions) < MAX_POSITIONS

    def is_complete_without(self, replica: Replica) -> bool:
        """Whether everything had ended when this rollout came, so that it is none of the group."""
        whole = len(self.positions) >= self.size and all(position.is_idle for position in self.positions)
        return whole and replica.stands_in_for is None and replica.rollout_id not in self._position_by_id

    def position_of(self, rollout_id: str) -> GroupPosition | None:
        """Return the place of a rollout."""
        return self._position_by_id.get(rollout_id)

    def replicas(self) -> Iterable[Replica]:
        """Yield all of its rollouts."""
        for position in self.positions:
            yield from position.replicas

    def live_replicas(self) -> list[Replica]:
        """Return those that may still bring a reward."""
        return [replica for replica in self.replicas() if replica.is_live]

    def stop(self, reason: CancelReason, cut: frozenset[Stage]) -> None:
        """Stop it: it is not completed."""
        self.stop_reason, self.cancel_stages = reason, cut

    def rewarded_ends(self) -> list[RolloutSummary]:
        """Return the ends that count and have a reward."""
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
        for name, position in self._position_by_id.items():
            if position is other:
                self._position_by_id[name] = keep


def is_informative(ends: Sequence[RolloutSummary], epsilon: float) -> bool:
    """Whether these rewards teach something: two differ, and one of the rollouts may be learnt from.

    Rollouts that are masked for being overlong keep their reward here: trainers normalise by the whole group, so that
    the others get an advantage from it. A group of which every rollout is masked teaches nothing. Once true it stays
    true, whatever else comes in.
    """
    rewards = [end.reward for end in ends if end.reward is not None]
    return bool(rewards) and max(rewards) - min(rewards) > epsilon and not all(end.masked for end in ends)


def judge_group(ends: Sequence[RolloutSummary], size: int, epsilon: float) -> GroupState:
    """Judge a group of which everything has ended.

    Args:
        ends: how each place of the group ended: the rollout that has its reward, or the last that tried.
        size: how many places it should have.
        epsilon: rewards that are no further apart are equal.
    """
    if len(ends) >= size and all(end.reward is not None for end in ends):
        return "ready" if is_informative(ends, epsilon) else "uninformative"
    why = {end.detail for end in ends if end.status == "cancelled"}
    if CancelReason.STALE in why:
        return "stale"
    return "redundant" if CancelReason.REDUNDANT in why else "short"


def failed_permanently(member: RolloutSummary) -> bool:
    """Whether it ended by a fault of the infrastructure that another rollout may be spared.

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
