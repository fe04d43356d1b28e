"""Multiple choice: which option an answer names, by its letter, its text, or both."""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from string import ascii_uppercase

from prorl_gym.environments.stem.spelling import squeezed, unfonted

_LEAD = re.compile(
    r"^\s*(?:(?:so|thus|hence|therefore|final|correct|right|best|the|answer|ans|option|choice|statement|letter|is|it|my)\b"
    r"[\s:,=.*]*)+",
    re.IGNORECASE,
)
_LETTER = re.compile(
    r"^[\s(\[{*]*([A-Za-z])(?![\w'\u2019^_\\])[\s)\]}*]*(?:[.:,;=\u2013\u2014]|-(?=\s+\S)|is\b)?\s*(.*)$", re.DOTALL
)
_TRAILING = re.compile(r"^(.*\S)\s*[(\[]\s*([A-Za-z])\s*[)\]]$", re.DOTALL)
_PRAISE = re.compile(r"\s+is\s+(?:the\s+)?(?:correct|right|true)(?:\s+(?:answer|option|choice|one))?$", re.IGNORECASE)
_QUOTES = ("**", "*", '"', "'", "`")
_ARTICLE = re.compile(r"^(?:the|an?)\s+", re.IGNORECASE)
_BRACKETED = re.compile(r"^\((.*)\)$|^\[(.*)\]$", re.DOTALL)


def chosen(answer: str, options: Sequence[str]) -> int | None:
    """Return the place of the option that an answer names, or ``None`` when it names none or not just one.

    A lone letter names an option by its place even where another option's text is that letter: the prompt asks for
    the letter. A letter with a text counts when the text is that option's.

    Args:
        answer: what was boxed.
        options: as they were shown, the first as (A).
    """
    answer = unicodedata.normalize("NFKC", answer) if len(answer.strip()) == 1 else answer
    text = _PRAISE.sub("", _unquoted(unfonted(answer).rstrip(".! ")).rstrip(". "))
    keys = [squeezed(option) for option in options]
    whole = squeezed(text)
    if len(whole) > 1 and (place := _place(whole, keys)) is not None:
        return place
    bare = _LEAD.sub("", text)
    for letter, words in _letters(bare):
        place = ascii_uppercase.find(letter.upper())
        if place < len(options) and (not words or place in (_place(squeezed(each), keys) for each in _spelt(words))):
            return place
    return _place(squeezed(bare), keys)


def _letters(text: str) -> Iterator[tuple[str, str]]:
    """Yield the letter that a text begins or ends with, and the words beside it."""
    if found := _LETTER.match(text):
        yield found[1], _unbracketed(found[2])
    if found := _TRAILING.match(text):
        yield found[2], found[1]


def _spelt(words: str) -> tuple[str, str]:
    """Return the words beside a letter as they are, and without their article."""
    return words, _ARTICLE.sub("", words)


def _place(key: str, keys: Sequence[str]) -> int | None:
    """Find a key among those of the options: as it is spelt, otherwise regardless of case if that is unambiguous."""
    if not key:
        return None
    for fold in (str, str.casefold):
        places = [place for place, option in enumerate(keys) if fold(option) == fold(key)]
        if len(places) == 1:
            return places[0]
    return None


def _unquoted(text: str) -> str:
    for quote in _QUOTES:
        if len(text) > 2 * len(quote) and text.startswith(quote) and text.endswith(quote):
            text = text[len(quote) : -len(quote)]
    return text


def _unbracketed(text: str) -> str:
    text = text.strip().rstrip(".").strip()
    found = _BRACKETED.match(text)
    return (found[1] or found[2] or "").strip() if found else text
