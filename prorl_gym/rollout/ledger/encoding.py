"""Encoding of requests and records: one canonical form, so that equal bodies have equal hashes.

Task rows and model output are hostile: numbers that JSON does not have, deep nesting and unpaired surrogates must end
in a message or a replaced character, never in a lost record.
"""

import json
import re
import zlib
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from prorl_gym.records import Outcome, Rollout, RolloutRequest

_SURROGATE = re.compile("[\ud800-\udfff]")
_INT64_MAX = 2**63 - 1
"""SQLite's integers end there."""


def decode_request(body: str) -> RolloutRequest:
    return RolloutRequest.model_validate(json.loads(body))


def describe_decode_error(error: ValueError | RecursionError) -> str:
    """Return why a stored body is refused, in one line that quotes nothing of it: tasks hold gold answers."""
    if isinstance(error, ValidationError):
        first = error.errors(include_input=False, include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return f"not JSON: {error}" if isinstance(error, json.JSONDecodeError) else type(error).__name__


def checksum(text: str) -> int:
    """Return the CRC-32 by which damage to a stored record is noticed."""
    return zlib.crc32(text.encode("utf-8", "replace"))


def encode_rollout(rollout: Rollout) -> str:
    """Return the record as JSON; characters that UTF-8 cannot carry become U+FFFD."""
    try:
        return rollout.model_dump_json()
    except (PydanticSerializationError, UnicodeEncodeError):
        return json.dumps(_replace_surrogates_in(rollout.model_dump(mode="python")), default=str)


def outcome_detail(outcome: Outcome) -> str:
    """Return the word that goes with the status: which limit, failure or reason; empty for a completed one."""
    return str(outcome.limit or outcome.kind or outcome.reason or "")


def replace_surrogates(text: str) -> str:
    """Replace what UTF-8 cannot carry (half surrogate pairs) by U+FFFD."""
    return _SURROGATE.sub("\ufffd", text)


def clamp_int64(number: int) -> int:
    """Return the nearest number that a database can hold; Python's and JSON's have no end."""
    return max(-_INT64_MAX, min(number, _INT64_MAX))


def _replace_surrogates_in(value: Any) -> Any:
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, dict):
        return {_replace_surrogates_in(key): _replace_surrogates_in(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [_replace_surrogates_in(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value
