"""Histories that were read before: a program sends its whole history in each call, and most of it is known."""

from collections.abc import Callable, Sequence

from prorl_gym.inference.tokens.prompt_builder import HistoryEntry

_KEPT = 16
"""Histories kept: the last ones of some agents at the same time."""

_Known = tuple[list[object], Sequence[HistoryEntry]]


class HistoryCache:
    """Reads only what a history has beyond one that was read before."""

    def __init__(self) -> None:
        self._known: tuple[_Known, ...] = ()

    def read(
        self, items: list[object], read_items: Callable[[list[object]], Sequence[HistoryEntry]]
    ) -> Sequence[HistoryEntry]:
        """Return the entries of a history.

        Args:
            items: messages or items, as they were sent.
            read_items: reads some; an entry is never made of the assistant's items and those of others.
        """
        kept = self._known  # long bodies are read in threads, several at once
        known = max(filter(lambda one: _continues(items, one), kept), key=_length, default=None)
        entries = read_items(items) if known is None else [*known[1], *read_items(items[len(known[0]) :])]
        self._known = (*(one for one in kept if one is not known), (items, entries))[-_KEPT:]
        return entries


def _continues(items: list[object], known: _Known) -> bool:
    """Whether a history begins with a known one. Where that ends in a turn, the rest may be part of the same turn."""
    before, entries = known
    return bool(entries) and not entries[-1].is_assistant and items[: len(before)] == before


def _length(known: _Known) -> int:
    return len(known[0])
