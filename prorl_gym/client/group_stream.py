"""Groups assembled from a stream of records.

A group is complete when each of its replicas has ended for good. A member that ended in an infrastructure failure is
replaced; of two that raced, the first with a reward counts. A group with a member that was cancelled and has no
replacement will never be complete, and is dropped; so is one with a damaged record. Where only such groups are left of
a run, ``GroupsDroppedError`` is raised.
"""

import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from prorl_gym.client.record_stream import Acknowledger, RecordStream
from prorl_gym.client.wire_models import DeliveredRecord
from prorl_gym.errors import CancelReason, Cause, ConflictError, FailureKind, ProrlError
from prorl_gym.records import Rollout

_EXTRA_REPLICA_ID = re.compile(r":x[0-9]+$")
"""End of the id of an extra, which races a straggler instead of replacing a failed member."""

_MAX_CLOSED_GROUPS = 1 << 16
"""Groups remembered as over, so that late records of them open no second group."""

_BY_DEMAND = {CancelReason.REDUNDANT, CancelReason.STALE}

_MAX_DOUBTFUL_GROUPS = 64
"""Groups for which only a replacement may still come. The service need not make one, so the oldest are dropped."""


@dataclass(frozen=True, slots=True)
class CompletedGroup:
    """A complete group: every replica has ended for good, and none was cancelled."""

    group_id: str | None
    """``None``: a rollout without a group is one by itself."""
    rollouts: tuple[Rollout, ...]
    """One for each replica, in their order; a replacement has the place of its original."""
    cursor: int
    """Cursor of the record that made it complete: the value for ``Demand.after``."""
    resume_cursor: int
    """Cursor up to which every record belongs to a group that is over: ``stream_groups`` may continue after it."""
    stale: bool = False
    """One of its records is."""

    @property
    def rewards(self) -> list[float]:
        """The rewards that may be learnt from."""
        return [one.reward for one in self.rollouts if one.reward is not None and not one.masked]


class GroupsDroppedError(ProrlError):
    """The run's own demand cancelled groups, and nothing else of the run is pending: no group will come."""

    def __init__(self, run_id: str, group_ids: Sequence[str]) -> None:
        named = ", ".join(group_ids[:5]) + (", ..." if len(group_ids) > 5 else "")
        super().__init__(
            f"run {run_id}: its demand cancelled {len(group_ids)} groups ({named}); nothing else of it is pending.",
            "Demand as many groups as you wait for, and submit the next ones after the demand that they are for.",
        )
        self.group_ids = tuple(group_ids)


@dataclass(slots=True)
class _PartialGroup:
    group_size: int
    first_cursor: int
    """Cursor of its first record."""
    by_replica: dict[int, Rollout] = field(default_factory=dict[int, Rollout])
    replaced: int = 0
    """Replacements for failed members that have ended."""
    stale: bool = False

    def add_record(self, delivered: DeliveredRecord) -> None:
        rollout = delivered.rollout
        self.replaced += rollout.stands_in_for is not None and _EXTRA_REPLICA_ID.search(rollout.rollout_id) is None
        self.stale = self.stale or delivered.stale
        before = self.by_replica.get(rollout.replica)
        from_client = rollout.stands_in_for is None and before is not None and before.stands_in_for is None
        if before is not None and before.rollout_id != rollout.rollout_id and from_client:
            raise ConflictError(
                f"group {rollout.group_id}: {before.rollout_id} and {rollout.rollout_id} are both replica "
                f"{rollout.replica} of it, so it would never be complete.",
                "Submit each rollout of a group with a 'replica' of its own: 0, 1, ... group_size - 1.",
            )
        # The first reward counts; without one, the latest record: the replacement's.
        if before is None or before.score is None:
            self.by_replica[rollout.replica] = rollout

    def may_get_replacement(self, max_replacements: int) -> bool:
        """Return whether a replacement for a failed member may come, with so many allowed.

        The service replaces none that was lost with it or with nodes again and again.
        """
        lost = (FailureKind.SERVICE_RESTARTED, FailureKind.NODE_LOST)
        outcomes = [one.outcome for one in self.by_replica.values()]
        failed = any(one.cause is Cause.INFRASTRUCTURE and one.kind not in lost for one in outcomes)
        return failed and max_replacements > self.replaced

    @property
    def cancel_reasons(self) -> list[CancelReason]:
        """Why places are empty: the reasons of members whose last record is a cancel."""
        return [one.outcome.reason for one in self.by_replica.values() if one.outcome.reason is not None]


class GroupAssembler:
    """Assembles groups. Memory is bounded by the groups that are incomplete."""

    def __init__(self, used_cursor: int = 0) -> None:
        self._used_cursor = used_cursor
        self._partial: OrderedDict[tuple[str, str], _PartialGroup] = OrderedDict()
        self._doubtful: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._closed: OrderedDict[tuple[str, str], None] = OrderedDict()
        self.cursor = 0
        """Cursor of the last record."""
        self._dropped: OrderedDict[str, None] = OrderedDict()

    @property
    def has_only_dropped(self) -> bool:
        """Whether groups were cancelled by the run's demand, and nothing is left that may become complete."""
        return bool(self._dropped or self._doubtful) and self._partial.keys() <= self._doubtful.keys()

    def pop_dropped(self) -> list[str]:
        """Return the groups that the demand cancelled, each once; they are over."""
        for key in list(self._doubtful):
            self._dropped[key[1]] = None
            self._close(key)
        dropped, self._dropped = list(self._dropped), OrderedDict()
        return dropped

    @property
    def resume_cursor(self) -> int:
        """Cursor up to which every record belongs to a group that is over."""
        oldest = next(iter(self._partial.values()), None)  # in the order of their first records
        return self.cursor if oldest is None else oldest.first_cursor - 1

    def add_record(self, delivered: DeliveredRecord, max_replacements: int = 0) -> CompletedGroup | None:
        """Add the next record of the stream; return the group that it completes, if it does.

        ``max_replacements``: how many members of a group the service replaces after infrastructure failures.
        """
        rollout, self.cursor = delivered.rollout, delivered.cursor
        if rollout.group_id is None:
            alone = CompletedGroup(None, (rollout,), self.cursor, self.resume_cursor, delivered.stale)
            return None if delivered.damaged else self._unless_used(alone)
        key = (rollout.run_id, rollout.group_id)
        if key in self._closed:
            return None
        group = self._partial.setdefault(key, _PartialGroup(rollout.group_size, self.cursor))
        if delivered.damaged:
            self._close(key)
            return None
        group.add_record(delivered)
        if len(group.by_replica) < group.group_size:
            return None
        if group.cancel_reasons or group.may_get_replacement(max_replacements):
            self._close_or_doubt(key, group)
            return None
        self._close(key)
        members = tuple(group.by_replica[replica] for replica in sorted(group.by_replica))
        complete = CompletedGroup(rollout.group_id, members, self.cursor, self.resume_cursor, group.stale)
        return self._unless_used(complete)

    def _unless_used(self, group: CompletedGroup) -> CompletedGroup | None:
        return None if group.cursor <= self._used_cursor else group

    def _close_or_doubt(self, key: tuple[str, str], group: _PartialGroup) -> None:
        """End a group that will never be complete; keep one for a while whose replacement may be pending."""
        reasons = group.cancel_reasons
        lost_race = all(reason is CancelReason.REDUNDANT for reason in reasons) and len(reasons) < len(group.by_replica)
        if not lost_race:
            if reasons and set(reasons) <= _BY_DEMAND:
                self._note_dropped(key[1])
            self._close(key)
            return
        self._doubtful[key] = None
        if len(self._doubtful) > _MAX_DOUBTFUL_GROUPS:
            oldest = next(iter(self._doubtful))
            self._note_dropped(oldest[1])
            self._close(oldest)

    def _note_dropped(self, group_id: str) -> None:
        self._dropped[group_id] = None
        if len(self._dropped) > _MAX_CLOSED_GROUPS:
            self._dropped.popitem(last=False)

    def _close(self, key: tuple[str, str]) -> None:
        del self._partial[key]
        self._doubtful.pop(key, None)
        self._closed[key] = None
        if len(self._closed) > _MAX_CLOSED_GROUPS:
            self._closed.popitem(last=False)


class GroupStream(AsyncIterator[CompletedGroup]):
    """Yields groups as they become complete: the stream of ``Client.stream_groups``.

    A read may be cancelled, or raise, and nothing is lost: the next read continues. Groups that were complete at
    ``used_cursor`` are left out. ``is_run_over`` tells whether nothing of the run is pending and no record follows a
    cursor; ``None``: never.
    """

    def __init__(
        self,
        records: RecordStream,
        used_cursor: int,
        fetch_max_replacements: Callable[[], Awaitable[int]],
        acknowledger: Acknowledger,
        run_id: str = "",
        is_run_over: Callable[[int], Awaitable[bool]] | None = None,
    ) -> None:
        self._run_id = run_id
        self._is_run_over = is_run_over
        self._records = records
        self._assembler = GroupAssembler(used_cursor)
        self._fetch_max_replacements = fetch_max_replacements
        self._max_replacements = 0
        self._acknowledger = acknowledger
        self._unprocessed: DeliveredRecord | None = None
        """Read, and not yet added."""

    async def __anext__(self) -> CompletedGroup:
        while True:
            if self._unprocessed is None:
                await self._acknowledger.mark_received(self._assembler.resume_cursor)
                if (
                    self._is_run_over
                    and self._assembler.has_only_dropped
                    and await self._is_run_over(self._assembler.cursor)
                ):
                    raise GroupsDroppedError(self._run_id, self._assembler.pop_dropped())
                try:
                    self._unprocessed = await self._records.read_next()
                except StopAsyncIteration:
                    await self._acknowledger.flush()
                    raise
            if self._unprocessed.rollout.outcome.cause is Cause.INFRASTRUCTURE:
                self._max_replacements = await self._fetch_max_replacements()  # seldom, and it may have changed
            delivered, self._unprocessed = self._unprocessed, None
            group = self._assembler.add_record(delivered, self._max_replacements)
            if group is not None:
                return group

    async def aclose(self) -> None:
        """Close the connection. Idempotent."""
        await self._records.aclose()
