"""A ledger that forgets when the process ends: for tests, and for services that may lose everything."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from prorl_gym.demand import Demand
from prorl_gym.errors import CancelReason, FailureKind, NotFoundError, ShuttingDownError
from prorl_gym.records import Retry, Rollout, RolloutRequest
from prorl_gym.rollout.encoding import body_hash, decode_request, encode_request, encode_rollout, member_of
from prorl_gym.rollout.ledger_complaints import conflict, finished, gone, is_over, not_found, over
from prorl_gym.rollout.ledger_file import CancelledRolloutError
from prorl_gym.rollout.protocol import PAGE_SIZE, Accepted, Delivery, Job, LedgerUsage, Member, Pending


@dataclass(slots=True)
class _Row:
    request: RolloutRequest
    digest: str
    accepted_at: float
    attempt: int = 0
    attempts: dict[int, Retry | None] = field(default_factory=dict[int, Retry | None])
    cancel: CancelReason | None = None
    record: Rollout | None = None
    """Also of one that is not kept any more: what ``Member`` tells is read from it."""
    cursor: int = 0
    written_at: float = 0.0
    released_at: float | None = None

    @property
    def retries(self) -> tuple[Retry, ...]:
        return tuple(retry for _, retry in sorted(self.attempts.items()) if retry is not None)

    def job(self) -> Job:
        return Job(request=self.request, attempt=self.attempt, accepted_at=self.accepted_at, retries=self.retries)

    def begin(self) -> Job:
        job = self.job()
        self.attempts[job.attempt] = None
        self.attempt = job.attempt + 1
        return job


class MemoryLedger:
    """``Ledger`` in a dictionary, in the order of acceptance. It has no disk, and so no disk budget.

    Args:
        clock: seconds by which ages are measured.
        keep_days: how long records are kept that nobody acknowledges.
        trace_days: how long ids stay known after that.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, keep_days: float = 14.0, trace_days: float = 30.0
    ) -> None:
        self._clock = clock
        self._keep_seconds = keep_days * 86400
        self._trace_seconds = trace_days * 86400
        self._rows: dict[str, _Row] = {}
        self._finished: dict[int, _Row] = {}
        """By cursor, in rising order."""
        self._cursor = 0
        self._demands: dict[str, Demand] = {}
        self._versions: dict[str, int] = {}
        self._closed = False

    async def accept(self, requests: Sequence[RolloutRequest]) -> list[Accepted]:
        """See ``Ledger.accept``."""
        self._must_be_open()
        fresh: dict[str, _Row] = {}
        answers: list[Accepted] = []
        for request in requests:
            body = encode_request(request)
            known = self._rows.get(request.rollout_id) or fresh.get(request.rollout_id)
            if known is not None and known.digest != body_hash(body):
                raise conflict(request.rollout_id)
            if known is None:
                fresh[request.rollout_id] = _Row(decode_request(body), body_hash(body), time.time())
            answers.append(Accepted(rollout_id=request.rollout_id, duplicate=known is not None))
        self._rows.update(fresh)
        return answers

    async def accept_and_begin(self, requests: Sequence[RolloutRequest]) -> tuple[list[Accepted], list[Job]]:
        """See ``Ledger.accept_and_begin``."""
        answers = await self.accept(requests)
        fresh = dict.fromkeys(answer.rollout_id for answer in answers if not answer.duplicate)
        return answers, [self._rows[rollout_id].begin() for rollout_id in fresh]

    async def pending(self) -> list[Job]:
        """See ``Ledger.pending``."""
        return [row.job() for row in self._rows.values() if row.record is None]

    async def recover(self) -> list[Pending]:
        """See ``Ledger.recover``."""
        return [_recovered(row) for row in self._rows.values() if row.record is None]

    async def jobs(self, rollout_ids: Sequence[str]) -> list[Job]:
        """See ``Ledger.jobs``."""
        rows = [self._rows[rollout_id] for rollout_id in rollout_ids if rollout_id in self._rows]
        return [row.job() for row in rows if row.record is None]

    async def begin(self, rollout_id: str) -> Job:
        """See ``Ledger.begin``."""
        row = self._row(rollout_id)
        if row.record is not None:
            raise finished(rollout_id)
        _close_open(row)  # nobody can have two: whoever had it is gone
        return row.begin()

    async def withdraw(self, rollout_ids: Sequence[str]) -> None:
        """See ``Ledger.withdraw``."""
        self._must_be_open()
        for rollout_id in rollout_ids:
            row = self._rows.get(rollout_id)
            if row is not None and row.record is None:
                row.attempts = {attempt: retry for attempt, retry in row.attempts.items() if retry is not None}

    async def fail_attempt(self, rollout_id: str, retry: Retry) -> None:
        """See ``Ledger.fail_attempt``."""
        row = self._row(rollout_id)
        if row.attempts.get(retry.attempt, retry) is not None:
            raise NotFoundError(f"rollout {rollout_id}: attempt {retry.attempt} has not begun.")
        row.attempts[retry.attempt] = retry

    async def finish(self, rollout: Rollout) -> int | None:
        """See ``Ledger.finish``."""
        row = self._row(rollout.rollout_id)
        if row.record is not None:
            return None
        begun = next((attempt for attempt, retry in row.attempts.items() if retry is None), None)
        if is_over(rollout.attempt, begun, row.attempt):
            raise over(rollout.rollout_id, rollout.attempt)
        if row.cancel is not None and rollout.outcome.status != "cancelled":
            raise CancelledRolloutError(rollout.rollout_id, row.cancel)
        self._cursor += 1
        row.record, row.cursor, row.written_at = rollout, self._cursor, self._clock()
        self._finished[row.cursor] = row
        return row.cursor

    async def get(self, rollout_id: str) -> Rollout | RolloutRequest:
        """See ``Ledger.get``."""
        row = self._row(rollout_id)
        if row.released_at is not None:
            raise gone(rollout_id)
        return row.request if row.record is None else row.record

    async def requests(self, rollout_ids: Sequence[str]) -> list[RolloutRequest]:
        """See ``Ledger.requests``."""
        self._must_be_open()
        rows = [self._rows[rollout_id] for rollout_id in rollout_ids if rollout_id in self._rows]
        return [row.request for row in rows if row.released_at is None]

    async def finished(self, run_id: str | None, after: int, limit: int) -> list[Delivery]:
        """See ``Ledger.finished``."""
        self._must_be_open()
        found: list[Delivery] = []
        size = 0
        for cursor, row in self._finished.items():
            if cursor > after and row.released_at is None and row.record and run_id in (None, row.request.run_id):
                found.append(Delivery(cursor, encode_rollout(row.record)))
                size += len(found[-1].record)
            if len(found) == limit or size >= PAGE_SIZE:
                break
        return found

    async def members(
        self,
        run_id: str | None = None,
        *,
        groups: Sequence[str] | None = None,
        after: int = 0,
        limit: int = 1000,
        newest_first: bool = False,
    ) -> list[Member]:
        """See ``Ledger.members``."""
        self._must_be_open()
        found: list[Member] = []
        for cursor, row in sorted(self._finished.items(), reverse=newest_first):
            past = not after or cursor < after if newest_first else cursor > after
            wanted = run_id in (None, row.request.run_id) and (groups is None or row.request.group_id in groups)
            if past and wanted and row.record is not None and len(found) < limit:
                found.append(
                    member_of(
                        row.request,
                        row.record,
                        cursor,
                        accepted_at=row.accepted_at,
                        released=row.released_at is not None,
                    )
                )
        return found

    async def acknowledge(self, run_id: str | None, cursor: int) -> int:
        """See ``Ledger.acknowledge``."""
        self._must_be_open()
        return self._release(
            [row for at, row in self._finished.items() if at <= cursor and run_id in (None, row.request.run_id)]
        )

    def _release(self, rows: Sequence[_Row]) -> int:
        kept = [row for row in rows if row.released_at is None]
        for row in kept:
            row.released_at = self._clock()
        return len(kept)

    async def set_demand(self, run_id: str, demand: Demand | None) -> None:
        """See ``Ledger.set_demand``."""
        self._must_be_open()
        self._demands.pop(run_id, None)
        if demand is not None:
            self._demands[run_id] = demand

    async def set_version(self, pool: str, version: int) -> None:
        """See ``Ledger.set_version``."""
        self._must_be_open()
        self._versions[pool] = version

    async def versions(self) -> Mapping[str, int]:
        """See ``Ledger.versions``."""
        self._must_be_open()
        return dict(self._versions)

    async def demands(self) -> Mapping[str, Demand]:
        """See ``Ledger.demands``."""
        self._must_be_open()
        return dict(self._demands)

    async def usage(self) -> LedgerUsage:
        """See ``Ledger.usage``."""
        self._must_be_open()
        released = sum(row.released_at is not None for row in self._finished.values())
        pending = len(self._rows) - len(self._finished)
        return LedgerUsage(0, pending, len(self._finished) - released, released, full=False)

    async def collect(self) -> int:
        """See ``Ledger.collect``."""
        self._must_be_open()
        now = self._clock()
        rows = list(self._finished.values())
        expired = self._release([r for r in rows if r.written_at < now - self._keep_seconds])
        for row in rows:
            if row.released_at is not None and row.released_at < now - self._trace_seconds:
                del self._finished[row.cursor], self._rows[row.request.rollout_id]
        return expired

    async def cancel(self, rollout_ids: Sequence[str], reason: CancelReason) -> list[str]:
        """See ``Ledger.cancel``."""
        self._must_be_open()
        rows = {rollout_id: self._rows.get(rollout_id) for rollout_id in rollout_ids}
        noted = {rollout_id: row for rollout_id, row in rows.items() if row is not None and row.record is None}
        for row in noted.values():
            row.cancel = row.cancel or reason
        return list(noted)

    async def close(self) -> None:
        """Refuse everything from now on. Idempotent."""
        self._closed = True

    def _row(self, rollout_id: str) -> _Row:
        self._must_be_open()
        if rollout_id not in self._rows:
            raise not_found(rollout_id)
        return self._rows[rollout_id]

    def _must_be_open(self) -> None:
        if self._closed:
            raise ShuttingDownError("The ledger is closed.")


def _close_open(row: _Row) -> None:
    restarted, message = FailureKind.SERVICE_RESTARTED, "the service was restarted"
    for attempt, retry in row.attempts.items():
        if retry is None:
            row.attempts[attempt] = Retry(attempt=attempt, kind=restarted, stage="unknown", message=message)


def _recovered(row: _Row) -> Pending:
    _close_open(row)
    restarts = sum(retry.kind is FailureKind.SERVICE_RESTARTED for retry in row.retries)
    return Pending(
        rollout_id=row.request.rollout_id,
        run_id=row.request.run_id,
        group_id=row.request.group_id,
        environment=row.request.environment,
        evaluation=row.request.evaluation,
        group_size=row.request.group_size,
        replica=row.request.replica,
        stands_in_for=row.request.stands_in_for,
        cancel=row.cancel,
        failures=len(row.retries) - restarts,
        restarts=restarts,
    )
