"""Records for tests."""

from typing import Any

from prorl_gym.client import DeliveredRecord
from prorl_gym.errors import CancelReason, FailureKind
from prorl_gym.records import Outcome, Rollout, Score

CUT = Outcome(status="cancelled", reason=CancelReason.REDUNDANT)
STOPPED = Outcome(status="cancelled", reason=CancelReason.CLIENT)
BROKEN = Outcome(status="failed", kind=FailureKind.SANDBOX_LOST)
LOST = Outcome(status="failed", kind=FailureKind.SERVICE_RESTARTED)
BAD = Outcome(status="failed", kind=FailureKind.BAD_ROW)


def record(name: str, outcome: Outcome | None = None, *, reward: float | None = 1.0, **fields: Any) -> Rollout:
    """Return a record; one that did not complete has no reward."""
    scored = outcome is None and reward is not None
    return Rollout(
        **{
            "rollout_id": name,
            "run_id": "default",
            "group_id": None,
            "group_size": 1,
            "replica": 0,
            "environment": "scripted",
            "outcome": outcome or Outcome(status="completed"),
            "score": Score(reward=reward) if scored and reward is not None else None,
            "accepted_at": 0.0,
            "finished_at": 1.0,
            **fields,
        }
    )


def member(group: str, replica: int, size: int, outcome: Outcome | None = None, **fields: Any) -> Rollout:
    """Return the record of one replica of a group, with the name ``<group><replica>`` unless another one is given."""
    name = fields.pop("name", f"{group}{replica}")
    return record(name, outcome, group_id=group, replica=replica, group_size=size, **fields)


def delivered(*rollouts: Rollout) -> list[DeliveredRecord]:
    """Return them with cursors from 1."""
    return [DeliveredRecord(cursor=cursor, rollout=rollout) for cursor, rollout in enumerate(rollouts, 1)]
