"""Answers that are words: when two of them are the same, and which words are mathematics."""

import re
from collections.abc import Sequence

from prorl_gym.environments.math.expressions import FUNCTIONS
from prorl_gym.environments.math.spelling import untexted
from prorl_gym.environments.math.vocabulary import FRACTIONS

_WORDS = re.compile(r"(?:[aA] (?=dozen|hundred|thousand))?[^\W\d_]{2,}(?:[ '\-,]+[^\W\d_]+)*\??")
_DATE = re.compile(
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|"
    r"nov(?:ember)?|dec(?:ember)?)\.? \d{1,2}",
    re.IGNORECASE,
)
_ARTICLES = re.compile(r"^(?:(?:the|a|an|on|in|at)\s+)+", re.IGNORECASE)
PRODUCTS = tuple(map(frozenset, ("abc", "xyz", "pqr", "uvw", "rst", "mnp", "klm")))

_MEANINGS = {
    "empty": "no solution|no solutions|no real solution|no real solutions|none|empty set|null set|no roots|"
    "no real roots|there are no solutions|there is no solution|there are no real solutions|no such|"
    "there is no real solution|no value|no values|no such x|no integer solutions|no such values|no such numbers|"
    "no such number exists|no such integers|has no solution|has no solutions|has no real solutions|not possible",
    "undefined": "undefined|does not exist|dne|doesn't exist|limit does not exist|not defined|no limit|is undefined",
    "reals": "all real numbers|all reals|all real|real numbers|all real x|every real number|all real values|reals|"
    "any real number|set of all real numbers|set of real numbers|x is any real number|all real values of x",
    "infinite": "infinitely many|infinitely many solutions|infinite|infinite solutions|infinity|"
    "infinite number of solutions|an infinite number|infinite number|there are infinitely many|infinite many|"
    "there are infinitely many solutions|unbounded",
}
_MEANING = {spelling: name for name, spellings in _MEANINGS.items() for spelling in spellings.split("|")}

_ABBREVIATED = {
    "mon": "monday", "tue": "tuesday", "tues": "tuesday", "wed": "wednesday", "thu": "thursday", "thur": "thursday",
    "thurs": "thursday", "fri": "friday", "sat": "saturday", "sun": "sunday", "jan": "january", "feb": "february",
    "mar": "march", "apr": "april", "jun": "june", "jul": "july", "aug": "august", "sep": "september",
    "sept": "september", "oct": "october", "nov": "november", "dec": "december",
}  # fmt: skip

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split()
_TENS = {
    word: 10 * index for index, word in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)
}
_SIMPLE = {word: number for number, word in enumerate(_ONES)} | _TENS
_ORDINALS = {
    word: index
    for index, word in enumerate("first second third fourth fifth sixth seventh eighth ninth tenth".split(), 1)
}
_FRACTIONS = {
    "half": r"\frac{1}{2}", "one half": r"\frac{1}{2}", "one third": r"\frac{1}{3}", "two thirds": r"\frac{2}{3}",
    "one quarter": r"\frac{1}{4}", "one fourth": r"\frac{1}{4}", "three quarters": r"\frac{3}{4}",
    "three fourths": r"\frac{3}{4}", "one fifth": r"\frac{1}{5}",
}  # fmt: skip
_DOZENS = {"dozen": 12, "half a dozen": 6, "half dozen": 6}


def words(answer: str) -> str | None:
    """Return a plain answer that consists of words (``Tuesday``, ``two doors``) in one spelling, otherwise ``None``.

    Such an answer must not be parsed: as a product of letters, ``lube`` would equal ``blue``.
    """
    text = " ".join(untexted(answer).replace("\\and", "and").replace("\\or", "or").split()).strip(" .!\"'`")
    if _DATE.fullmatch(text):
        month, day = text.casefold().replace(".", "").split()
        return f"{_ABBREVIATED.get(month, month)} {day}"
    if not _WORDS.fullmatch(text) or _formula(text, "\\text" in answer):
        return None
    text = _ARTICLES.sub("", text.casefold().replace("-", " ").replace(" ,", ","))
    return _ABBREVIATED.get(text, text)


def _formula(text: str, marked_as_text: bool) -> bool:
    first = re.split(r"[ ,'\-]", text)[0]
    if first in FUNCTIONS or text in ("pi", "inf"):
        return True
    letters = text.replace(" ", "")
    if marked_as_text or not letters.isascii() or not letters.islower():
        return False
    if re.fullmatch(r"(?:[a-z]{1,3}\s*[,\-]\s*)*[a-z]{1,3}", text) is None:
        return False
    return any(set(letters.replace(",", "").replace("-", "")) <= group for group in PRODUCTS)


def meaning(text: str) -> str | None:
    """Return the name of a mathematical meaning of words: ``empty``, ``undefined``, ``reals``, ``infinite``."""
    return _MEANING.get(text)


def number(text: str) -> str | None:
    """Return small numbers in words (``forty two``, ``one third``) as LaTeX, otherwise ``None``."""
    if text in _FRACTIONS:
        return _FRACTIONS[text]
    if text in _DOZENS:
        return str(_DOZENS[text])
    parts = text.split()
    if parts[:1] in (["minus"], ["negative"]) and (size := number(" ".join(parts[1:]))) is not None:
        return None if size.startswith("-") or parts[1] in _ORDINALS else f"-{size}"
    if len(parts) > 1 and parts[-1] == "dozen" and (count := number(" ".join(parts[:-1]))) is not None:
        return str(12 * int(count)) if count.isdigit() and parts[-2] not in _ORDINALS else None
    if len(parts) == 1 and parts[0] in _ORDINALS:
        return str(_ORDINALS[parts[0]])
    if (
        len(parts) > 1
        and parts[-1] in FRACTIONS
        and (top := number(" ".join(parts[:-1]))) is not None
        and top.isdigit()
    ):
        return rf"\frac{{{top}}}{{{FRACTIONS[parts[-1]]}}}"
    if len(parts) == 1 and parts[0] in _SIMPLE:
        return str(_SIMPLE[parts[0]])
    if len(parts) == 2 and parts[0] in _TENS and 0 < _SIMPLE.get(parts[1], 0) < 10:
        return str(_TENS[parts[0]] + _SIMPLE[parts[1]])
    return _large_number(parts)


def _large_number(parts: Sequence[str]) -> str | None:
    """Return ``two thousand three hundred and five``."""
    for word, scale in (("thousand", 1000), ("hundred", 100)):
        if word not in parts or not _ORDINALS.keys().isdisjoint(parts):
            continue
        at = parts.index(word)
        rest = parts[at + 1 :]
        if not at and rest:
            return None
        count, below = (
            number(" ".join(each)) if each else empty
            for each, empty in ((parts[:at], "1"), (rest[1:] if rest[:1] == ["and"] and rest[1:] else rest, "0"))
        )
        if count is None or below is None or not count.isdigit() or not below.isdigit():
            return None
        return str(scale * int(count) + int(below)) if 0 < int(count) < 1000 and int(below) < scale else None
    return None


def members(text: str) -> list[str] | None:
    """Return the items of a list of words, otherwise ``None``."""
    parts = [part.strip() for part in re.split(r"\s*,\s*(?:and\s+)?|\s+and\s+", text)]
    return parts if len(parts) > 1 and all(parts) else None
