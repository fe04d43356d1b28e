"""Which rollout a posted row means: a new one, or one whose caller went away before it had the answer.

Gym posts ``/run`` once per row and knows no rollout ids. Its client posts the same row again when a connection drops,
and such a twin must meet the rollout that is already being made. On the other hand the same row may rightly be posted
many times: by the next evaluation, by the next epoch, or twice at once by a trainer that stamps no indices. What tells
them apart is the first caller: as long as it is connected, or once it has its answer, an equal row is a new rollout.

Hence the id ``<digest of the whole row, indices included>-<nonce of this process>-<counter>``, and a memory of the
requests whose callers vanished: the first twin takes over the request, with its id and its group. One that nobody
claims within ``patience`` seconds is reported as abandoned, so that it can be cancelled.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from prorl_gym.records import RolloutRequest
from prorl_gym.trainers.gym_rows import Groups, RowDefaults, row_key, to_request


@dataclass(slots=True)
class _Orphan:
    request: RolloutRequest
    expiry: asyncio.TimerHandle


@dataclass(slots=True)
class Posts:
    """Turns posted rows into requests."""

    nonce: str
    """Differs from process to process, so that ids of an earlier run are never met again."""
    defaults: RowDefaults
    groups: Groups
    patience: float
    """Seconds to wait for the twin of a dropped post."""
    on_abandoned: Callable[[RolloutRequest], None]
    _orphans: dict[str, deque[_Orphan]] = field(default_factory=dict[str, deque[_Orphan]])
    _numbers: "count[int]" = field(default_factory=count)

    def claim(self, row: Mapping[str, Any]) -> RolloutRequest:
        """Return the request for a row.

        Raises:
            TaskError: ``BAD_ROW``.
        """
        key = row_key(row)
        orphans = self._orphans.get(key)
        if orphans:
            orphan = orphans.popleft()
            orphan.expiry.cancel()
            if not orphans:
                del self._orphans[key]
            return orphan.request
        return to_request(row, f"{key}-{self.nonce}-{next(self._numbers)}", self.defaults, self.groups)

    def caller_vanished(self, row: Mapping[str, Any], request: RolloutRequest) -> None:
        """Remember a request whose caller went away without the answer."""
        key = row_key(row)
        expiry = asyncio.get_running_loop().call_later(self.patience, self._abandon, key, request)
        self._orphans.setdefault(key, deque()).append(_Orphan(request, expiry))

    def _abandon(self, key: str, request: RolloutRequest) -> None:
        rest = deque(orphan for orphan in self._orphans.get(key, ()) if orphan.request is not request)
        if rest:
            self._orphans[key] = rest
        else:
            self._orphans.pop(key, None)
        self.on_abandoned(request)
