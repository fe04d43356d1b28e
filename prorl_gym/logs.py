"""Structured logs: one JSON object per line, carrying which rollout, group, run, attempt and stage it is about.

The identity travels in a context variable, so that every package's ordinary ``logging`` calls carry it without knowing.
Secrets never reach a line: registered values and everything that looks like a credential are replaced.
"""

import json
import logging
import re
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, TextIO

_context: ContextVar[dict[str, str | int] | None] = ContextVar("prorl_log_fields", default=None)
_secrets: set[str] = set()

_CREDENTIAL = re.compile(
    r"(?i)(\b(?:bearer|basic)\s+|\b(?:api[_-]?key|authorization|password|secret|token)\b[\"']?\s*[=:]\s*[\"']?)"
    r"(?!bearer\b|basic\b)[^\s\"',;&)}\]]{6,}"
)
_API_KEY = re.compile(r"\b(?:sk|hf|nvapi|ghp|glpat)[-_][A-Za-z0-9_\-]{12,}")
_URL_USERINFO = re.compile(r"(\b[a-z][a-z0-9+.\-]{0,15}://)[^\s/\"'<>]+@", re.IGNORECASE)
_REDACTED = "[hidden]"
_MAX_MESSAGE_CHARS = 16_384
"""Characters of one message: a hostile answer quoted in an error must not fill the disk."""


@contextmanager
def log_context(**fields: str | int | None) -> Generator[None, None, None]:
    """Add identity to every log line of the block, and of tasks that are started in it. ``None`` is left out."""
    known = {name: value for name, value in fields.items() if value is not None}
    token = _context.set({**(_context.get() or {}), **known})
    try:
        yield
    finally:
        _context.reset(token)


def current_log_context() -> dict[str, str | int]:
    return dict(_context.get() or {})


def register_secret(value: str) -> None:
    """Hide this text in every later line. Very short texts are ignored: they would hide ordinary words."""
    if len(value) >= 8:
        _secrets.add(value)


def redact(text: str) -> str:
    """Return the text without registered secrets and without what looks like a credential."""
    for secret in _secrets:
        text = text.replace(secret, _REDACTED)
    text = _URL_USERINFO.sub(lambda found: f"{found[1]}{_REDACTED}@", text)
    return _API_KEY.sub(_REDACTED, _CREDENTIAL.sub(lambda found: found[1] + _REDACTED, text))


class JsonFormatter(logging.Formatter):
    """One line of JSON per record: time (Unix seconds), level, logger, message, identity, event, traceback.

    ``event`` is the message's facts for machines: a flat mapping that the caller gave as ``extra={"event": ...}``.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact(_truncated(record.getMessage())),
            **current_log_context(),
        }
        event: Mapping[str, object] | None = getattr(record, "event", None)
        if event is not None:
            line["event"] = {name: redact(fact) if isinstance(fact, str) else fact for name, fact in event.items()}
        if record.exc_info:
            line["traceback"] = redact(_truncated(self.formatException(record.exc_info)))
        return json.dumps(line, ensure_ascii=True, default=str)


class PlainFormatter(logging.Formatter):
    """For people at a terminal: time, level, identity in brackets, message."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        who = " ".join(f"{name}={value}" for name, value in current_log_context().items())
        text = f"{clock} {record.levelname.lower():7} {_truncated(record.getMessage())}{f' [{who}]' if who else ''}"
        if record.exc_info:
            text += "\n" + _truncated(self.formatException(record.exc_info))
        # Text that quotes others drives no terminal, and does not look like a line of its own.
        shown = (letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in redact(text))
        return "".join(shown).replace("\n", "\n    ")


LogFormat = Literal["auto", "json", "plain"]


def configure_logging(level: str = "info", log_format: LogFormat = "auto", stream: TextIO | None = None) -> None:
    """Send the process's logs to one stream in one form. Replaces what was configured before.

    ``log_format``: ``json`` for machines, ``plain`` for people; ``auto``: plain if the stream is a terminal.
    """
    output = stream or sys.stderr
    is_plain = output.isatty() if log_format == "auto" else log_format == "plain"
    handler = logging.StreamHandler(output)
    handler.setFormatter(PlainFormatter() if is_plain else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _truncated(text: str) -> str:
    cut = len(text) - _MAX_MESSAGE_CHARS
    return text if cut <= 0 else text[:_MAX_MESSAGE_CHARS] + f"... ({cut} characters left out)"
