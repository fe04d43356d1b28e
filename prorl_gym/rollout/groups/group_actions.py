"""Actions of the group scheduler. Their outcomes come back as events."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from prorl_gym.client.wire_models import GroupState
from prorl_gym.errors import CancelReason
from prorl_gym.rollout.groups.group import Group, Replacement, Replica
from prorl_gym.rollout.protocol import Stage


@dataclass(slots=True)
class GroupActions:
    """Each action is returned once: deciding again without an event yields none."""

    release: list[str] = field(default_factory=list[str])
    hold: list[str] = field(default_factory=list[str])
    """Not to begin before ``release``."""
    cancel: dict[CancelReason, list[str]] = field(default_factory=dict[CancelReason, list[str]])
    park: list[str] = field(default_factory=list[str])
    unpark: list[str] = field(default_factory=list[str])
    replacements: list[Replacement] = field(default_factory=list[Replacement])
    settled: list[tuple[str, GroupState]] = field(default_factory=list[tuple[str, GroupState]])
    """Groups that are judged now, for good."""

    def suspend(self, replicas: Sequence[Replica]) -> None:
        """Let what has not begun wait and agents park. Those in INIT are parked when they come to RUN."""
        for replica in replicas:
            if replica.stage == "queue" and not replica.is_held:
                replica.is_held = True
                self.hold.append(replica.rollout_id)
            elif replica.stage == "run" and not replica.is_park_requested:
                replica.is_park_requested = True
                self.park.append(replica.rollout_id)

    def resume(self, replicas: Sequence[Replica]) -> None:
        """Let them begin, or go on."""
        for replica in replicas:
            if replica.is_park_requested:
                replica.is_park_requested = False
                self.unpark.append(replica.rollout_id)
            if replica.is_held:
                replica.is_held = False
                self.release.append(replica.rollout_id)

    def cancel_replicas(self, replicas: Sequence[Replica], reason: CancelReason) -> None:
        """Cancel them."""
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

    def request_replacement(self, group: Group, replacement: Replacement) -> None:
        """Request a replacement."""
        position = group.position_of(replacement.stands_in_for)
        assert position is not None
        position.expected_replacement = replacement.rollout_id
        self.replacements.append(replacement)


ALL_STAGES: frozenset[Stage] = frozenset({"queue", "init", "run", "eval"})
ALL_BUT_EVAL: frozenset[Stage] = ALL_STAGES - {"eval"}
"""What is being graded is nearly done."""
