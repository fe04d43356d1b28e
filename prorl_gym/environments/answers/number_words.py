"""Numbers in words, as answers write them: ``forty two``, ``one third``, ``two thousand three hundred and five``."""

from collections.abc import Sequence

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
ORDINALS: Sequence[str] = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth "
    "sixteenth seventeenth eighteenth nineteenth twentieth"
).split()
DIVISORS = {
    "halves": 2, **{f"{ordinal}s": place for place, ordinal in enumerate(ORDINALS[2:12], 3)}, "hundredths": 100,
    "thousandths": 1000,
}  # fmt: skip
"""Plurals that divide. ``quarters`` is not among them, since it may also name coins."""

_SIMPLE = {word: number for number, word in enumerate(ONES)} | {word: 10 * at for at, word in enumerate(TENS, 2)}
_SPOKEN_ORDINALS = {word: place for place, word in enumerate(ORDINALS[:10], 1)}
_FRACTIONS = {
    "half": r"\frac{1}{2}", "one half": r"\frac{1}{2}", "one third": r"\frac{1}{3}", "two thirds": r"\frac{2}{3}",
    "one quarter": r"\frac{1}{4}", "one fourth": r"\frac{1}{4}", "three quarters": r"\frac{3}{4}",
    "three fourths": r"\frac{3}{4}", "one fifth": r"\frac{1}{5}",
}  # fmt: skip
_DOZENS = {"dozen": 12, "half a dozen": 6, "half dozen": 6}


def ordinal_suffix(number: int) -> str:
    """Return the suffix of a number as an ordinal: ``st`` of 21st, ``th`` of 12th."""
    return "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")


def number_from_words(text: str) -> str | None:
    """Return a number in lower-case words as LaTeX, otherwise ``None``."""
    if text in _FRACTIONS:
        return _FRACTIONS[text]
    if text in _DOZENS:
        return str(_DOZENS[text])
    parts = text.split()
    if text in ORDINALS[2:]:
        return None  # a third is also a part
    if len(parts) == 1 and (number := _SPOKEN_ORDINALS.get(parts[0], _SIMPLE.get(parts[0]))) is not None:
        return str(number)
    if len(parts) < 2:
        return _large_number(parts)
    before, last = " ".join(parts[:-1]), parts[-1]
    if parts[0] in ("minus", "negative") and (size := number_from_words(" ".join(parts[1:]))) is not None:
        return None if size.startswith("-") or parts[1] in _SPOKEN_ORDINALS else f"-{size}"
    if last == "dozen" and (count := number_from_words(before)) is not None:
        return str(12 * int(count)) if count.isdigit() and parts[-2] not in _SPOKEN_ORDINALS else None
    if last in DIVISORS and (top := number_from_words(before)) is not None and top.isdigit():
        return rf"\frac{{{top}}}{{{DIVISORS[last]}}}"
    if before in TENS and 0 < _SIMPLE.get(last, 0) < 10:
        return str(_SIMPLE[before] + _SIMPLE[last])
    return _large_number(parts)


def _large_number(parts: Sequence[str]) -> str | None:
    for word, scale in (("thousand", 1000), ("hundred", 100)):
        if word not in parts or not _SPOKEN_ORDINALS.keys().isdisjoint(parts):
            continue
        at = parts.index(word)
        rest = parts[at + 1 :]
        if not at and rest:
            return None
        count, below = (
            number_from_words(" ".join(each)) if each else empty
            for each, empty in ((parts[:at], "1"), (rest[1:] if rest[:1] == ["and"] and rest[1:] else rest, "0"))
        )
        if count is None or below is None or not count.isdigit() or not below.isdigit():
            return None
        return str(scale * int(count) + int(below)) if 0 < int(count) < 1000 and int(below) < scale else None
    return None
