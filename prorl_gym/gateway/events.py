"""Server-sent events: what the streams of all wires have in common."""

import json
from collections.abc import Mapping
from typing import Any, Protocol

from prorl_gym.gateway.turn_stream import Piece

KEEP_ALIVE_COMMENT = b": keep-alive\n\n"
"""A comment, which readers of events ignore."""


class EventWriter(Protocol):
    """Writes one answer as events. Joined by the rules of its wire, they are the answer that is not streamed."""

    keep_alive: bytes
    """Sent while nothing else is."""

    def begin(self) -> bytes:
        """Return the events before anything is sampled."""
        ...

    def write_piece(self, piece: Piece) -> bytes:
        """Return the events of a piece of thoughts or text. All thoughts come before all text."""
        ...

    def end(self, answer: Mapping[str, Any]) -> bytes:
        """Return the events after all pieces; ``answer``: as the wire's ``write_answer`` gives it."""
        ...

    def fail(self, message: str) -> bytes:
        """Return the events that end a stream whose answer will not come."""
        ...


def encode_event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Return one event; ``name``: its type, where a wire names it."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def error_body(message: str) -> dict[str, Any]:
    """Return an error as the clients of all wires read it, in an event or as an answer."""
    return {"type": "error", "error": {"type": "api_error", "code": "server_error", "message": message}}
