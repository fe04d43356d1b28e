# SPDX-FileCopyrightText: Copyright (c) 2026 the prorl-gym authors
# SPDX-License-Identifier: Apache-2.0

"""Assigns a rollout to each row that Gym posts: a new one, or the orphan of an equal row.

Gym knows no rollout ids. It posts an equal row either to repeat a request whose answer it did not get (a dropped
connection, a restart, ``gym eval run --resume``) or for another sample (the next epoch, a prompt posted many times).
Only delivery tells the two apart: an equal row gets the oldest *orphan*, a rollout that was accepted, whose answer was
not delivered and for which no caller waits. Without one it gets a new rollout.

The id ``<row digest>-<agent>-<nonce>-<counter>`` lets a restarted agent find its orphans among the rollouts that are
not acknowledged. One case is not covered: a caller that received an answer and died before it stored it posts the row
again and gets another rollout, as in the next epoch.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from uuid import uuid4

from prorl_gym.client import UnacknowledgedRollout
from prorl_gym.records import RolloutRequest

ORPHAN_TTL_SECONDS = 24 * 3600.0
"""Seconds for which the record of an orphan is kept for its row."""


@dataclass(slots=True, eq=False)
class RowClaim:
    """The rollout of a posted row, or of an orphan."""

    row_digest: str
    rollout_id: str
    run_id: str = ""
    request: RolloutRequest | None = None
    """Request of this process; ``None`` for a new rollout or one that an earlier process submitted."""
    submission: "asyncio.Future[None] | None" = None
    """Done when the service has accepted the request; ``None`` where there is no request."""
    is_orphan: bool = False
    """Set when the claim was taken from the orphans."""
    is_finished: bool = False
    """Whether the rollout has its record."""
    timer: asyncio.TimerHandle | None = None
    """Ends an orphan."""


@dataclass(slots=True)
class RowDeduplicator:
    """The orphans of one agent. Needs an event loop; ``close`` at the end.

    An orphan without a record is cancelled when no equal row comes in time, so that a dropped ``/run`` cancels its
    rollout. One with a record is kept for long, since it costs nothing.

    Args:
        agent: its name.
        on_abandoned: called with the id of an orphan without a record for which no row came.
        on_expired: called with the id of an orphan with a record for which no row came.
        orphan_ttl_seconds: seconds for which an orphan with a record is kept.
    """

    agent: str
    on_abandoned: Callable[[str], None]
    on_expired: Callable[[str], None]
    orphan_ttl_seconds: float = ORPHAN_TTL_SECONDS
    _orphans: dict[str, dict[str, RowClaim]] = field(default_factory=dict[str, dict[str, RowClaim]])
    """By the row's digest and by id, oldest first."""
    _orphans_by_id: dict[str, RowClaim] = field(default_factory=dict[str, RowClaim])
    _nonce: str = field(default_factory=lambda: uuid4().hex[:8])
    _counter: "count[int]" = field(default_factory=count)

    def claim_rollout(self, row_digest: str) -> RowClaim:
        """Return the rollout of a row with this digest: its oldest orphan, or a new one."""
        orphans = self._orphans.get(row_digest)
        if not orphans:
            return RowClaim(row_digest, self._new_id(row_digest))
        claim = next(iter(orphans.values()))
        self._remove_orphan(claim)
        if claim.timer is not None:
            claim.timer.cancel()
        claim.is_orphan = True
        return claim

    def assign_new_rollout(self, claim: RowClaim) -> None:
        """Give a claim another rollout, when the service does not know the one it had."""
        claim.rollout_id, claim.is_orphan, claim.is_finished = self._new_id(claim.row_digest), False, False
        claim.request = claim.submission = None

    def add_orphan(self, claim: RowClaim, grace_seconds: float) -> None:
        """Add the rollout of a caller that left without the answer.

        Args:
            claim: of its row.
            grace_seconds: seconds until a rollout without a record is cancelled.
        """
        self._orphans.setdefault(claim.row_digest, {})[claim.rollout_id] = claim
        self._orphans_by_id[claim.rollout_id] = claim
        self._start_timer(claim, grace_seconds)

    def mark_finished(self, rollout_id: str) -> None:
        """Keep an orphan that has its record now; other rollouts are ignored."""
        claim = self._orphans_by_id.get(rollout_id)
        if claim is not None and not claim.is_finished:
            claim.is_finished, claim.request = True, None  # the record has what is needed of the request
            self._start_timer(claim, 0.0)

    def restore_orphans(self, rollouts: Iterable[UnacknowledgedRollout]) -> int:
        """Add what an earlier process of this agent submitted and did not acknowledge; return how many there are.

        They are kept like those with a record: the callers that lost that process need time to come back.
        """
        restored = 0
        for rollout in rollouts:
            digest, *rest = rollout.rollout_id.split("-")
            if len(rest) == 3 and rest[0] == self._agent_digest:
                restored += 1
                self.add_orphan(RowClaim(digest, rollout.rollout_id, rollout.run_id, is_finished=True), 0.0)
        return restored

    def close(self) -> None:
        """Stop the timers."""
        for claim in self._orphans_by_id.values():
            if claim.timer is not None:
                claim.timer.cancel()

    @property
    def _agent_digest(self) -> str:
        return hashlib.blake2b(self.agent.encode(), digest_size=4).hexdigest()

    def _new_id(self, row_digest: str) -> str:
        return f"{row_digest}-{self._agent_digest}-{self._nonce}-{next(self._counter)}"

    def _start_timer(self, claim: RowClaim, grace_seconds: float) -> None:
        if claim.timer is not None:
            claim.timer.cancel()
        seconds, on_end = (
            (self.orphan_ttl_seconds, self.on_expired) if claim.is_finished else (grace_seconds, self.on_abandoned)
        )
        claim.timer = asyncio.get_running_loop().call_later(seconds, self._end_orphan, claim, on_end)

    def _end_orphan(self, claim: RowClaim, on_end: Callable[[str], None]) -> None:
        self._remove_orphan(claim)
        on_end(claim.rollout_id)

    def _remove_orphan(self, claim: RowClaim) -> None:
        del self._orphans_by_id[claim.rollout_id]
        del self._orphans[claim.row_digest][claim.rollout_id]
        if not self._orphans[claim.row_digest]:
            del self._orphans[claim.row_digest]
