"""A turn while it is sampled: the thoughts and the text of the answer, as far as they are certain."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.tokenizer import IncrementalDecoder
from prorl_gym.inference.toolcalls.turn_parsing import length_before_tag
from prorl_gym.thoughts import BEGUN_THINKING, THINK_CLOSE, THINK_OPEN

PieceKind = Literal["thinking", "text"]


@dataclass(frozen=True, slots=True)
class Piece:
    kind: PieceKind
    text: str


class StreamDivergedError(Exception):
    """The streamed text is no beginning of the answer: the engine's tokens are not those that it reported."""


class TurnStream:
    """Reads a turn token by token. All pieces of a kind, joined, are that part of the parsed turn.

    Whatever may still become something else is kept back: half a character, what may begin a call or a tag, blanks
    that may be at the end. Calls are no pieces: they come with the whole turn.
    """

    def __init__(self, codec: ChatCodec, *, may_call_tools: bool) -> None:
        self._codec = codec
        self._may_call_tools = may_call_tools
        self._decoder = IncrementalDecoder(codec.tokenizer, codec.end_ids)
        self._written = ""
        self._text_start: int | None = None
        """Where the text begins, once the thoughts are over."""
        self._closed_length = 0
        """Length of the thoughts that are closed, which others may follow."""
        self._plain_length = 0
        """Length of what stays thoughts, then of the text that stays text: see ``ToolParser.plain_length``."""
        self._sent: dict[PieceKind, str] = {"thinking": "", "text": ""}

    def add(self, prompt: Sequence[int], ids: Sequence[int]) -> list[Piece]:
        """Add new ids, sampled after a prompt; return the pieces that they complete."""
        new = self._decoder.add(ids)
        if not new:
            return []
        self._written = (self._written or self._codec.opened_thinking(prompt)) + new
        pieces = self._thinking_pieces() if self._text_start is None else []
        return pieces if self._text_start is None else [*pieces, *self._text_pieces(self._text_start)]

    def finish(self, thinking: str, text: str) -> list[Piece]:
        """Return what is missing of the whole turn. Raises ``StreamDivergedError``: what came is not its beginning."""
        return [*self._rest("thinking", thinking), *self._rest("text", text)]

    def _thinking_pieces(self) -> list[Piece]:
        """Return new thoughts, and find where they end."""
        while (begun := BEGUN_THINKING.match(self._written, self._closed_length)) is not None:
            self._plain_length = length_before_tag(self._written, max(self._plain_length, begun.end()), THINK_CLOSE)
            if not self._written.startswith(THINK_CLOSE, self._plain_length):
                break
            self._closed_length = self._plain_length + len(THINK_CLOSE)
        thoughts = self._written[: self._plain_length].strip().removeprefix(THINK_OPEN)
        if begun is None and not THINK_OPEN.startswith(self._written[self._closed_length :].lstrip()):
            self._text_start, self._plain_length = self._closed_length, 0
        return self._new_pieces("thinking", thoughts)

    def _text_pieces(self, start: int) -> list[Piece]:
        text = self._written[start:]
        if self._may_call_tools:
            self._plain_length = self._codec.parser.plain_length(text, self._plain_length)
            text = text[: self._plain_length]
        return self._new_pieces("text", text)

    def _new_pieces(self, kind: PieceKind, text: str) -> list[Piece]:
        """Return what is new in a part, without blanks around it: later ones may make those at its end part of it."""
        new = text.strip()[len(self._sent[kind]) :]
        self._sent[kind] += new
        return [Piece(kind, new)] if new else []

    def _rest(self, kind: PieceKind, whole: str) -> list[Piece]:
        if not whole.startswith(self._sent[kind]):
            raise StreamDivergedError
        rest = whole[len(self._sent[kind]) :]
        self._sent[kind] = whole
        return [Piece(kind, rest)] if rest else []
