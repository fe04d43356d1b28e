"""What an answer other than 200 means."""

import json
import re
from typing import Any, cast

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.checks import inside, printable
from prorl_gym.inference.faults import ContextExceeded, EngineOverloaded, ModelMissing
from prorl_gym.inference.http import Answer

_TOO_LONG = re.compile(
    r"maximum context length|context_length_exceeded|(longer than|exceeds) the model's context length"
    r"|cannot be greater than max_model_len"
    # vLLM 0.32 cuts what is asked for to what the prompt leaves room for, and this is what it says when that is none.
    r"|max_tokens must be at least 1, got 0"
)
_LENGTH = re.compile(r"(?:context length (?:is |of |\()|max_model_len=)([1-9][0-9]{0,8})(?: tokens)?\b")

_NO_MODEL = re.compile(r"\bmodel\b.*(does not exist|not[ _]found|is not (served|loaded|available))", re.IGNORECASE)

_FIXES = {
    401: "Name the variable with its key in 'api_key_env'.",
    403: "Name the variable with its key in 'api_key_env'.",
    404: "Check 'engines' (they end in /v1), 'engine' (what kind they are), 'model' (their --served-model-name).",
}


def refusal(address: str, answer: Answer) -> Exception:
    """Return an ``EngineError``, or ``ContextExceeded``."""
    message = error_text(answer.payload)
    if answer.status in (429, 503):
        return EngineOverloaded(address, answer.status, answer.retry_after)
    if answer.status == 400 and _TOO_LONG.search(message):
        found = _LENGTH.search(message)
        return ContextExceeded(int(found[1]) if found else None)
    if answer.status == 404 and _NO_MODEL.search(message):
        return ModelMissing(address, message)
    if answer.status >= 500:
        return EngineError(
            FailureKind.ENGINE_UNREACHABLE,
            f"engine {address}: broke on our request (HTTP {answer.status}: {message}).",
            "Look into the engine's log.",
        )
    return EngineError(
        FailureKind.ENGINE_REFUSED,
        f"engine {address}: refused our request (HTTP {answer.status}: {message}).",
        _FIXES.get(answer.status, "Check 'model' and the sampling settings against the server's."),
    )


def unable(address: str, what: str, fix: str) -> EngineError:
    """Return the error of an adapter whose server has no way to do something."""
    return EngineError(FailureKind.ENGINE_REFUSED, f"engine {address}: {what}.", fix)


def error_text(payload: bytes) -> str:
    """Return the engine's own words, shortened: they end up in records and logs."""
    text = payload[:4096].decode("utf-8", "replace")
    try:
        answer: Any = json.loads(payload[: 1 << 16])
    except (ValueError, RecursionError):
        answer = None  # no JSON: the text itself is the best there is
    for path in (("error", "message"), ("error",), ("message",), ("detail",)):
        found = inside(cast("object", answer), *path)
        if isinstance(found, str):
            text = found
            break
    return printable(text[:4096])[:200] or "no message"
