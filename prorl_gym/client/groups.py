"""Groups put together again out of a stream of records.

A group is complete when each of its replicas has ended for good. What the service does about trouble in a group shows
in its records, and is undone here: a member that ended in an infrastructure failure gives its place to its stand-in;
of two that raced, the first with a reward counts. A group with a member that was cancelled and has no stand-in will
never be complete, and is forgotten; so is one with a damaged record. Where only such groups are left of a run,
``GroupsDroppedError`` says that nothing more comes.
"""

import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from prorl_gym.client.answers import Delivered, Group
from prorl_gym.client.streams import Acknowledger, RecordStream
from prorl_gym.errors import CancelReason, Cause, ConflictError, FailureKind, ProrlError
from prorl_gym.records import Rollout

_EXTRA = re.compile(r":x[0-9]+$")
"""What the id of a stand-in ends with that was made to race a straggler, not to replace one that failed."""

_OVER = 1 << 16
"""Groups remembered as over, so that what comes late of them makes no second one."""

_BY_DEMAND = {CancelReason.REDUNDANT, CancelReason.STALE}

_DOUBTFUL = 64
"""Groups of which nothing but a stand-in may still come. The service need not make one, so the oldest are forgotten."""


class GroupsDroppedError(ProrlError):
    """The run's own demand cancelled groups, and nothing else of the run is under way: no group will come.

    Args:
        run_id: of the run.
        group_ids: of the groups that were cancelled and not reported before.
    """

    def __init__(self, run_id: str, group_ids: Sequence[str]) -> None:
        named = ", ".join(group_ids[:5]) + (", ..." if len(group_ids) > 5 else "")
        super().__init__(
            f"run {run_id}: its demand cancelled {len(group_ids)} groups ({named}); nothing else of it is under way.",
            "Demand as many groups as you wait for, and submit the next ones after the demand that they are for.",
        )
        self.group_ids = tuple(group_ids)


@dataclass(slots=True)
class _Open:
    size: int
    first: int
    """Cursor of its first record."""
    places: dict[int, Rollout] = field(default_factory=dict[int, Rollout])
    replaced: int = 0
    """Stand-ins for failed members that have ended."""
    stale: bool = False

    def take(self, delivered: Delivered) -> None:
        rollout = delivered.rollout
        self.replaced += rollout.stands_in_for is not None and _EXTRA.search(rollout.rollout_id) is None
        self.stale = self.stale or delivered.stale
        before = self.places.get(rollout.replica)
        if before is not None and before.rollout_id != rollout.rollout_id and _both_asked_for(before, rollout):
            raise ConflictError(
                f"group {rollout.group_id}: {before.rollout_id} and {rollout.rollout_id} are both replica "
                f"{rollout.replica} of it, so it would never be complete.",
                "Submit each rollout of a group with a 'replica' of its own: 0, 1, ... group_size - 1.",
            )
        # The first reward stands; without one, the latest word: the stand-in's.
        if before is None or before.score is None:
            self.places[rollout.replica] = rollout

    def awaits(self, replace: int) -> bool:
        """Tell whether a stand-in for a failed member may come, when the service makes so many."""
        return replace > self.replaced and any(_may_be_replaced(one) for one in self.places.values())

    @property
    def cancelled(self) -> list[CancelReason]:
        """Why places are empty: the reasons of those whose last word is a cancel."""
        return [one.outcome.reason for one in self.places.values() if one.outcome.reason is not None]


class GroupBook:
    """Puts groups together. Memory is bounded by the groups that are under way.

    Args:
        used: groups that were complete at this cursor are not given again.
    """

    def __init__(self, used: int = 0) -> None:
        self._used = used
        self._open: OrderedDict[tuple[str, str], _Open] = OrderedDict()
        self._doubtful: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._over: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._cursor = 0
        self._dropped: OrderedDict[str, None] = OrderedDict()

    @property
    def cursor(self) -> int:
        """Cursor of the last record."""
        return self._cursor

    @property
    def has_dropped(self) -> bool:
        """Whether groups were cancelled by the run's demand, and nothing is left that may become complete."""
        return bool(self._dropped or self._doubtful) and self._open.keys() <= self._doubtful.keys()

    def report_dropped(self) -> list[str]:
        """Return the groups that the demand cancelled, each once; they are over."""
        for key in list(self._doubtful):
            self._dropped[key[1]] = None
            self._end(key)
        dropped, self._dropped = list(self._dropped), OrderedDict()
        return dropped

    @property
    def resume(self) -> int:
        """Cursor up to which every record belongs to a group that is over."""
        oldest = next(iter(self._open.values()), None)  # in the order of their first records
        return self._cursor if oldest is None else oldest.first - 1

    def add(self, delivered: Delivered, replace: int = 0) -> Group | None:
        """Take the next record; return the group that it completes, if it does.

        Args:
            delivered: in the order of the stream.
            replace: how many members of a group the service makes again after infrastructure failures.
        """
        rollout, self._cursor = delivered.rollout, delivered.cursor
        if rollout.group_id is None:
            return (
                None
                if delivered.damaged
                else self._given(Group(None, (rollout,), self._cursor, self.resume, delivered.stale))
            )
        key = (rollout.run_id, rollout.group_id)
        if key in self._over:
            return None
        if delivered.damaged:
            self._open.setdefault(key, _Open(rollout.group_size, self._cursor))
            self._end(key)
            return None
        group = self._open.setdefault(key, _Open(rollout.group_size, self._cursor))
        group.take(delivered)
        if len(group.places) < group.size:
            return None
        if group.cancelled or group.awaits(replace):
            self._doubt(key, group)
            return None
        self._end(key)
        members = tuple(group.places[replica] for replica in sorted(group.places))
        return self._given(Group(rollout.group_id, members, self._cursor, self.resume, group.stale))

    def _given(self, group: Group) -> Group | None:
        return None if group.cursor <= self._used else group

    def _doubt(self, key: tuple[str, str], group: _Open) -> None:
        """End a group that will never be complete; keep one for a while that may have a stand-in under way."""
        reasons = group.cancelled
        lost_race = all(reason is CancelReason.REDUNDANT for reason in reasons) and len(reasons) < len(group.places)
        if not lost_race:
            if reasons and set(reasons) <= _BY_DEMAND:
                self._drop(key[1])
            self._end(key)
            return
        self._doubtful[key] = None
        if len(self._doubtful) > _DOUBTFUL:
            oldest = next(iter(self._doubtful))
            self._drop(oldest[1])
            self._end(oldest)

    def _drop(self, group_id: str) -> None:
        self._dropped[group_id] = None
        if len(self._dropped) > _OVER:
            self._dropped.popitem(last=False)

    def _end(self, key: tuple[str, str]) -> None:
        del self._open[key]
        self._doubtful.pop(key, None)
        self._over[key] = None
        if len(self._over) > _OVER:
            self._over.popitem(last=False)


class GroupStream:
    """Groups as they become complete. What ``Client.groups_of`` gives.

    A wait for the next one may be cancelled, or end with an error, and nothing is lost: the next wait goes on.

    Args:
        records: of one run.
        used: groups that were complete at this cursor are left out.
        replacements: asks how many members of a group the service makes again.
        acknowledger: is told of the records of groups that are over when the next group is asked for.
        run_id: the run.
        is_over: asks whether nothing of the run is under way and no record follows a cursor; ``None``: never.
    """

    def __init__(
        self,
        records: RecordStream,
        used: int,
        replacements: Callable[[], Awaitable[int]],
        acknowledger: Acknowledger,
        run_id: str = "",
        is_over: Callable[[int], Awaitable[bool]] | None = None,
    ) -> None:
        self._run_id = run_id
        self._is_over = is_over
        self._records = records
        self._book = GroupBook(used)
        self._replacements = replacements
        self._replace = 0
        self._acknowledger = acknowledger
        self._held: Delivered | None = None
        """Read, and not yet in the book."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Group:
        while True:
            if self._held is None:
                await self._acknowledger.received(self._book.resume)
                if self._is_over and self._book.has_dropped and await self._is_over(self._book.cursor):
                    raise GroupsDroppedError(self._run_id, self._book.report_dropped())
                self._held = await self._next()
            if self._held.rollout.outcome.cause is Cause.INFRASTRUCTURE:
                self._replace = await self._replacements()  # seldom, and it may have changed
            delivered, self._held = self._held, None
            group = self._book.add(delivered, self._replace)
            if group is not None:
                return group

    async def aclose(self) -> None:
        """Close the connection. Idempotent."""
        await self._records.aclose()

    async def _next(self) -> Delivered:
        try:
            return await self._records.read()
        except StopAsyncIteration:
            await self._acknowledger.flush()
            raise


def _both_asked_for(*rollouts: Rollout) -> bool:
    """Tell whether the client submitted all of them: the service made none of them for another."""
    return all(rollout.stands_in_for is None for rollout in rollouts)


def _may_be_replaced(rollout: Rollout) -> bool:
    """Tell whether the service may make it again: not if it was lost with the service again and again."""
    return rollout.outcome.cause is Cause.INFRASTRUCTURE and rollout.outcome.kind is not FailureKind.SERVICE_RESTARTED
