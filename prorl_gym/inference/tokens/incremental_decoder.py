"""Text of ids that come one after the other."""

from collections.abc import Collection, Sequence

from prorl_gym.inference.tokens.tokenizer import Tokenizer

_MAX_PENDING = 64
"""Ids that may wait for the rest of a character. A model can sample bytes without end that are no text."""

_BROKEN = "\ufffd"


class IncrementalDecoder:
    """Decodes the ids of one turn as they come: what it returns is, joined, a beginning of the whole text.

    A character may be spread over several ids, and the text of an id may depend on the one before it. So ids are
    decoded together with those since the last id that ended in a whole character.

    Args:
        tokenizer: of the ids.
        end_ids: ids that end a turn and are no part of its text.
    """

    def __init__(self, tokenizer: Tokenizer, end_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._context: list[int] = []
        """Ids whose text has been returned, decoded once more before new ones."""
        self._context_length = 0
        """Characters of their text."""
        self._pending: list[int] = []
        self._has_ended = False

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that new ids complete; empty after the turn has ended."""
        for token in ids:
            self._has_ended = self._has_ended or token in self._end_ids or len(self._pending) >= _MAX_PENDING
            if self._has_ended:
                break
            self._pending.append(token)
        if not self._pending:
            return ""
        text = self._tokenizer.decode([*self._context, *self._pending])
        if text.endswith(_BROKEN):
            return ""
        new, self._context, self._pending = text[self._context_length :], self._pending, []
        self._context_length = len(self._tokenizer.decode(self._context))
        return new
