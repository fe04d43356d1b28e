"""How requests and records become bytes: one canonical form, so that equal bodies have equal hashes.

Task rows and model output are hostile: numbers that JSON does not know, endless nesting and half surrogate pairs must
end in a message or a replaced character, never in a lost record.
"""

import hashlib
import json
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from prorl_gym.errors import FailureKind, TaskError
from prorl_gym.records import Rollout, RolloutRequest


def encode_request(request: RolloutRequest) -> str:
    """Return the canonical body: sorted keys, ASCII only.

    Raises:
        TaskError: ``BAD_ROW``, the task holds something that JSON cannot carry.
    """
    try:
        return json.dumps(request.model_dump(), sort_keys=True, separators=(",", ":"), allow_nan=False)
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


def encode_rollout(rollout: Rollout) -> str:
    """Return the record as JSON; characters that UTF-8 cannot carry become U+FFFD."""
    try:
        return rollout.model_dump_json()
    except (PydanticSerializationError, UnicodeEncodeError):
        return json.dumps(_scrubbed(rollout.model_dump(mode="python")), default=str)


def decode_rollout(record: str) -> Rollout:
    """Read a record back; a newer schema is refused."""
    return Rollout.model_validate_json(record)


def _scrubbed(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_scrubbed(key): _scrubbed(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [_scrubbed(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value
