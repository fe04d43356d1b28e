"""What a client was promised by a service, and what it was then told: the two must fit, over any number of lives."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prorl_gym.client.wire_models import AcceptedRollout
from prorl_gym.errors import Cause, FailureKind, cause_of
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.protocol import Delivery

EVERYTHING = ""
"""The reader of all runs."""


def is_hopeless(request: RolloutRequest, *, ran_through: bool) -> bool:
    """Whether every attempt fails by something that is not the policy's doing.

    Args:
        request: what it is to do.
        ran_through: its agent came to the end of its script. Where time cut it short it did not meet what is there.
    """
    actions = [request.task.get(stage, "ok") for stage in ("init", "run", "eval") if ran_through or stage != "run"]
    bad = any(action in set(FailureKind) and cause_of(FailureKind(action)) is not Cause.POLICY for action in actions)
    return (bad or "crash" in actions) and not request.task.get("flaky")


@dataclass
class Reader:
    """Reads a stream over all lives, from where it was."""

    cursor: int = 0
    seen: set[str] = field(default_factory=set[str])


@dataclass
class Model:
    """What clients know, and what happens behind their backs."""

    promised: dict[str, RolloutRequest] = field(default_factory=dict[str, RolloutRequest])
    """Rollouts that were reported to a client as accepted."""
    in_doubt: list[list[RolloutRequest]] = field(default_factory=list[list[RolloutRequest]])
    """Batches whose answer the client has not got."""
    written: set[str] = field(default_factory=set[str])
    """Ids whose ``finish`` was answered with a cursor."""
    records: dict[str, str] = field(default_factory=dict[str, str])
    """As they were delivered."""
    rollouts: dict[str, Rollout] = field(default_factory=dict[str, Rollout])
    readers: dict[str, Reader] = field(default_factory=lambda: {EVERYTHING: Reader()})
    released: dict[str, int] = field(default_factory=dict[str, int])
    """Up to which cursor what was acknowledged, by run."""
    released_ids: set[str] = field(default_factory=set[str])
    """Rollouts that were acknowledged one by one."""
    refused_writes: set[str] = field(default_factory=set[str])
    """Methods of the ledger that a broken disk failed."""
    cancelled: set[str] = field(default_factory=set[str])
    """Whose cancel was answered."""
    wished: set[str] = field(default_factory=set[str])
    """Rollouts that were to be cancelled, also by a group's demand."""
    durably_cancelled: set[str] = field(default_factory=set[str])
    must_be_cancelled: set[str] = field(default_factory=set[str])
    """Cancelled in an earlier life, in which they did not end."""
    verdicts: dict[tuple[str, str], set[str]] = field(default_factory=dict[tuple[str, str], set[str]])
    complaints: list[str] = field(default_factory=list[str])
    """What was seen where raising would not be heard."""

    # --- behind the client's back ---------------------------------------------------------------------------------

    def wrote(self, rollout: Rollout, cursor: int | None) -> None:
        if cursor is None:
            return
        if rollout.rollout_id in self.written:
            self.complaints.append(f"{rollout.rollout_id}: a second record was taken")
        self.written.add(rollout.rollout_id)

    def took(self, requests: Sequence[RolloutRequest], answers: Sequence[AcceptedRollout]) -> None:
        for request, answer in zip(requests, answers, strict=True):
            if request.stands_in_for is not None and not answer.duplicate:
                self.promised[request.rollout_id] = request  # the service itself is the client

    def wants_cancelled(self, ids: Sequence[str]) -> None:
        self.wished.update(ids)

    def noted_cancel(self, ids: Sequence[str]) -> None:
        self.durably_cancelled.update(ids)

    def began(self, rollout_id: str) -> None:
        if rollout_id in self.cancelled:
            self.complaints.append(f"{rollout_id}: its agent begins after its cancel was answered")

    def refused(self, write: str) -> None:
        self.refused_writes.add(write)

    # --- answers to the client ------------------------------------------------------------------------------------

    def accepted(self, requests: Sequence[RolloutRequest], answers: Sequence[AcceptedRollout]) -> None:
        for request, answer in zip(requests, answers, strict=True):
            assert answer.rollout_id == request.rollout_id
            assert answer.duplicate == (request.rollout_id in self.promised), request.rollout_id
            self.promised[request.rollout_id] = request

    def delivered(self, run_id: str, delivery: Delivery) -> None:
        """A record comes by a stream: of a run, or of all."""
        reader = self.readers.setdefault(run_id, Reader())
        assert delivery.cursor > reader.cursor, f"cursor {delivery.cursor} after {reader.cursor}"
        reader.cursor = delivery.cursor
        rollout_id = json.loads(delivery.record)["rollout_id"]
        assert rollout_id not in reader.seen, f"{rollout_id} came twice"
        reader.seen.add(rollout_id)
        if rollout_id in self.records:
            assert self.records[rollout_id] == delivery.record, f"{rollout_id}: its record changed"
            return
        self.records[rollout_id] = delivery.record
        rollout = self.rollouts[rollout_id] = Rollout.model_validate_json(delivery.record)
        self.check(rollout, json.loads(delivery.record))

    def check(self, rollout: Rollout, raw: dict[str, Any]) -> None:
        """A record on its own: honest about what it is."""
        name, outcome = rollout.rollout_id, rollout.outcome
        request = self.promised.get(name) or self._doubtful(name) or self.promised[str(rollout.stands_in_for)]
        if outcome.status == "cancelled" or outcome.cause in (Cause.INFRASTRUCTURE, Cause.TASK):
            assert raw["score"] is None, f"{name}: a reward from {outcome}"
        if outcome.status == "cancelled":
            assert name in self.wished, f"{name}: cancelled without a request ({outcome.reason})"
        if rollout.reward is not None:
            assert rollout.reward == request.task["reward"], f"{name}: not its reward"
            hopeless = is_hopeless(request, ran_through=outcome.status != "truncated")
            assert not hopeless, f"{name}: a reward where nothing could be measured"
        if name in self.must_be_cancelled:
            assert outcome.status == "cancelled", f"{name} was cancelled before a restart and ended as {outcome}"
        if outcome.status == "failed" and outcome.cause is Cause.INFRASTRUCTURE:
            tried = sum(retry.kind is not FailureKind.SERVICE_RESTARTED for retry in rollout.retries)
            assert tried == 2, f"{name}: given up after {tried + 1} attempts"
        attempts = [retry.attempt for retry in rollout.retries]
        assert attempts == sorted(set(attempts)), f"{name}: attempts {attempts}"
        assert rollout.attempt not in attempts

    def judged(self, run_id: str, group_id: str, verdict: str) -> None:
        self.verdicts.setdefault((run_id, group_id), set()).add(verdict)

    def survived(self, pending: set[str], known: set[str]) -> None:
        """Another life begins, and this is what the ledger remembers.

        Args:
            pending: rollouts that still have no record.
            known: those of the doubtful ones that it knows.
        """
        for batch in self.in_doubt:
            ids = {request.rollout_id for request in batch}
            assert ids <= known or not ids & (known - set(self.promised)), "half of a batch"
            if ids <= known:
                self.promised.update({request.rollout_id: request for request in batch})
        self.in_doubt.clear()
        missing = set(self.promised) - pending - self.written - set(self.records)
        self.written |= missing  # a record whose commit was not reported; the streams have to show it
        self.must_be_cancelled |= self.durably_cancelled & pending
        self.cancelled -= pending - self.durably_cancelled  # a broken disk could not remember these
        assert not self.written & pending, "a finished one is owed again"

    def settled(self) -> None:
        """Nothing is pending, and every reader has read to the end."""
        assert self.complaints == []
        assert set(self.promised) <= set(self.records), f"lost: {sorted(set(self.promised) - set(self.records))[:5]}"
        strangers = {name for name in set(self.records) - set(self.promised) if ":" not in name}
        assert not strangers, f"never accepted: {sorted(strangers)[:5]}"
        groups: dict[tuple[str, str], set[float]] = {}
        for rollout in self.rollouts.values():
            if rollout.group_id is not None and rollout.reward is not None:
                groups.setdefault((rollout.run_id, rollout.group_id), set()).add(rollout.reward)
        for key, verdicts in self.verdicts.items():
            assert not {"ready", "uninformative"} <= verdicts, f"{key}: {verdicts}"
            if "ready" in verdicts:
                assert len(groups[key]) > 1, f"{key}: ready by {groups[key]}"
            if "uninformative" in verdicts:
                assert len(groups[key]) == 1, f"{key}: uninformative by {groups[key]}"

    def _doubtful(self, rollout_id: str) -> RolloutRequest | None:
        return next((one for batch in self.in_doubt for one in batch if one.rollout_id == rollout_id), None)
