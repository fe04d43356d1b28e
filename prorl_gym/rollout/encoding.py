"""How requests and records become bytes: one canonical form, so that equal bodies have equal hashes.

Task rows and model output are hostile: numbers that JSON does not know, endless nesting and half surrogate pairs must
end in a message or a replaced character, never in a lost record.
"""

import hashlib
import json
import zlib
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from prorl_gym.errors import FailureKind, TaskError
from prorl_gym.records import Outcome, Rollout, RolloutRequest
from prorl_gym.rollout.protocol import Member

_LARGEST = 2**63 - 1
"""SQLite's integers end there."""


def encode_request(request: RolloutRequest) -> str:
    """Return the canonical body: sorted keys, ASCII only, nothing that is as by default.

    So a field that a later release adds does not make another body of one that does not use it.

    Raises:
        TaskError: ``BAD_ROW``, the task holds something that JSON cannot carry.
    """
    try:
        return json.dumps(
            request.model_dump(exclude_defaults=True), sort_keys=True, separators=(",", ":"), allow_nan=False
        )
    except (ValueError, TypeError, RecursionError, PydanticSerializationError) as error:
        raise TaskError(
            FailureKind.BAD_ROW,
            f"rollout {request.rollout_id}: its task is not JSON ({error}).",
            "Use only objects, lists, text, booleans, null and finite numbers.",
        ) from None


def decode_request(body: str) -> RolloutRequest:
    """Read a canonical body back."""
    return RolloutRequest.model_validate(json.loads(body))


def unreadable(error: ValueError | RecursionError) -> str:
    """Say why a stored body is refused, in one line that quotes nothing of it: tasks hold gold answers."""
    if isinstance(error, ValidationError):
        first = error.errors(include_input=False, include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return f"not JSON: {error}" if isinstance(error, json.JSONDecodeError) else type(error).__name__


def body_hash(body: str) -> str:
    """Return the hash by which a repeated submission is recognised."""
    return hashlib.sha256(body.encode("ascii")).hexdigest()


def checksum(text: str) -> int:
    """Return the CRC-32 by which damage to a stored record is noticed."""
    return zlib.crc32(text.encode("utf-8", "replace"))


def encode_rollout(rollout: Rollout) -> str:
    """Return the record as JSON; characters that UTF-8 cannot carry become U+FFFD."""
    try:
        return rollout.model_dump_json()
    except (PydanticSerializationError, UnicodeEncodeError):
        return json.dumps(_scrubbed(rollout.model_dump(mode="python")), default=str)


def decode_rollout(record: str) -> Rollout:
    """Read a record back; a newer schema is refused."""
    return Rollout.model_validate_json(record)


def outcome_detail(outcome: Outcome) -> str:
    """Return the word that goes with the status: which limit, failure or reason; empty for a completed one."""
    return str(outcome.limit or outcome.kind or outcome.reason or "")


def member_of(
    request: RolloutRequest | Rollout, rollout: Rollout, cursor: int, *, accepted_at: float, released: bool
) -> Member:
    """Return what is kept of a finished rollout beside its record.

    Args:
        request: says who it is; a record does as well.
        rollout: says how it ended.
        cursor: of the record.
        accepted_at: Unix seconds.
        released: whether the record is not kept any more.
    """
    return Member(
        cursor=cursor,
        rollout_id=request.rollout_id,
        run_id=request.run_id,
        group_id=request.group_id,
        group_size=request.group_size,
        replica=request.replica,
        environment=request.environment,
        evaluation=request.evaluation,
        stands_in_for=request.stands_in_for,
        status=rollout.outcome.status,
        detail=outcome_detail(rollout.outcome),
        cause=rollout.outcome.cause,
        reward=rollout.reward,
        masked=rollout.masked,
        oldest_version=rollout.oldest_version,
        turns=rollout.turns,
        sampled_tokens=rollout.sampled_tokens,
        accepted_at=accepted_at,
        finished_at=rollout.finished_at,
        released=released,
    )


def printable(text: str) -> str:
    """Return the text with what UTF-8 cannot carry (half surrogate pairs) replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")


def clipped(number: int) -> int:
    """Return the nearest number that a database can hold; Python's and JSON's have no end."""
    return max(-_LARGEST, min(number, _LARGEST))


def _scrubbed(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {_scrubbed(key): _scrubbed(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [_scrubbed(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value
