"""Texts of tools that work on the host: without secrets, bounded, and without control characters.

Secrets are read from the environment when they are used, and kept out of every text.
"""

import base64
import json
import os
from urllib.parse import quote, quote_plus

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.logs import register_secret

_REDACTED = "[hidden]"
_MIN_LENGTH = 8


class Secret:
    """The value of an environment variable of the service. Neither its text nor its repr shows it."""

    def __init__(self, variable: str) -> None:
        self.variable = variable

    def __repr__(self) -> str:
        return f"Secret({self.variable!r})"

    def value(self) -> str:
        """Return it, and redact it in logs from now on.

        Raises ``SandboxError`` (``SANDBOX_UNAVAILABLE``: not the agent's fault) where it is not set, or as short as an
        ordinary word.
        """
        found = os.environ.get(self.variable, "").strip()
        if len(found) < _MIN_LENGTH:
            why = "is not set" if not found else f"is shorter than {_MIN_LENGTH} characters"
            raise SandboxError(
                FailureKind.SANDBOX_UNAVAILABLE,
                f"A tool needs the environment variable {self.variable}, which {why}.",
                "Set it where the service starts. It is not passed to sandboxes, records or logs.",
            )
        for form in _encodings(found):
            register_secret(form)
        return found

    def redact(self, text: str) -> str:
        """Return a text in which the value, as it is or in a usual encoding, is replaced."""
        found = os.environ.get(self.variable, "").strip()
        if len(found) >= _MIN_LENGTH:
            for form in _encodings(found):
                text = text.replace(form, _REDACTED)
        return text


def redact_secrets(text: str, secrets: "tuple[Secret, ...]") -> str:
    for secret in secrets:
        text = secret.redact(text)
    return text


def _encodings(value: str) -> list[str]:
    """Return the spellings in which a server may echo it, the longest first: one may hold another."""
    raw = value.encode()
    spelt = {value, quote(value, safe=""), quote(value), quote_plus(value), json.dumps(value)[1:-1], raw.hex()}
    # Inside a longer text that is encoded as a whole, the secret begins at one of three offsets.
    for offset in range(3):
        encoded = base64.b64encode(b"\0" * offset + raw).decode().rstrip("=")
        inner = encoded[-(-offset * 8 // 6) : len(encoded) - (1 if (offset + len(raw)) % 3 else 0)]
        spelt |= {inner, inner.translate(str.maketrans("+/", "-_"))}
    return sorted((form for form in spelt if len(form) >= _MIN_LENGTH), key=len, reverse=True)


def shorten(text: str, characters: int) -> str:
    """Return a text of at most about so many characters: head and tail, with a mark of what was left out."""
    if len(text) <= characters:
        return text
    head, tail = characters - characters // 4, characters // 4
    left_out = len(text) - head - tail
    return f"{text[:head]}\n[... {left_out} characters left out ...]\n{text[len(text) - tail :]}"


def printable_text(text: str) -> str:
    """Return a text without control characters, and without lone surrogates, which no record can hold."""
    text = text.replace("\r\n", "\n").encode("utf-8", "replace").decode("utf-8")
    return "".join(letter if letter in "\n\t" or (letter >= " " and letter != "\x7f") else "\ufffd" for letter in text)
