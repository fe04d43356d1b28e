"""Every failure as an HTTP status.

Clients retry differently: between Gym's own servers a status is final, its OpenAI client retries 404, 408, 429 and 5xx
(without end, when the server is Gym's own), those of OpenAI and LiteLLM 408, 409, 429 and 5xx. So what may pass by
itself is 503 or 504 with ``Retry-After``; what would fail again is 400 (the caller's fault) or 424 (the engines').
"""

from math import ceil

from fastapi import HTTPException

from prorl_gym.errors import ConfigError, EngineError, FailureKind
from prorl_gym.inference.engine_errors import EngineOverloaded
from prorl_gym.logs import redact

RETRY_SECONDS = 1
"""Where no engine named a time: the pool has waited already."""

_MAX_RETRY_SECONDS = 60
"""OpenAI's client ignores longer times."""

_STATUS = {
    FailureKind.ENGINE_UNREACHABLE: 503,
    FailureKind.ENGINE_OVERLOADED: 503,
    FailureKind.ENGINE_TIMEOUT: 504,
    FailureKind.ENGINE_REFUSED: 424,
    FailureKind.ENGINE_CONTRACT: 424,
    FailureKind.TEMPLATE_UNSAFE: 400,  # the template passed the check at the start: it refuses this conversation
}


def http_error(error: ConfigError | EngineError) -> HTTPException:
    """Return the answer to a call that failed, without keys in its text."""
    if isinstance(error, ConfigError):
        return HTTPException(400, redact(str(error)))
    status = _STATUS.get(error.kind, 500)
    headers = {"Retry-After": str(_retry_after_seconds(error))} if status in (503, 504) else None
    return HTTPException(status, redact(str(error)), headers)


def timeout_error(seconds: float) -> HTTPException:
    """Return the answer to a call whose time is up."""
    return HTTPException(
        504,
        f"the call took longer than {seconds:g} s (waits for engines included).\nAdd engines, or raise 'call_seconds'.",
        {"Retry-After": str(RETRY_SECONDS)},
    )


def context_length_error(tokens: int, context: int | None) -> HTTPException:
    """Return the answer to a prompt that leaves no room. Harnesses recognize a full context by this text."""
    known = f" is {context} tokens" if context else " is exceeded"
    return HTTPException(400, f"This model's maximum context length{known}; the messages have {tokens} tokens.")


def status_of(error: BaseException | None) -> int:
    """Return the status that an answer had, for counting."""
    if error is None:
        return 200
    return error.status_code if isinstance(error, HTTPException) else 500


def _retry_after_seconds(error: EngineError) -> int:
    seconds = error.retry_after if isinstance(error, EngineOverloaded) else None
    return RETRY_SECONDS if seconds is None else min(max(ceil(seconds), RETRY_SECONDS), _MAX_RETRY_SECONDS)
