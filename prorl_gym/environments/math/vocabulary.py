"""Words that may stand behind a number without changing it: ``7 ways``, ``7 red marbles``, ``7 cups of flour``.

What is not known here makes an answer unreadable, since ``7 tenths`` and ``7 rejected`` are not 7. Plurals that end in
``s`` are nouns unless they scale, deny or compute.
"""

import re
from collections.abc import Sequence

_NOUNS = frozenset(
    "people person child children man men woman women student boy girl friend player team member fish sheep deer goose "
    "geese mice mouse dice die way solution point line circle triangle rectangle polygon vertex vertices "
    "edge side face axes index indices matrix matrices radius radii focus foci locus loci number integer digit "
    "value tuple sequence subset element divisor permutation combination path "
    "route word letter string code color colour marble ball coin card book page apple orange candy cookie cake pie "
    "pizza slice cup box bag basket bus car truck train bicycle bike ticket seat chair table room house floor story "
    "tile block piece part section unit step move game round turn trip lap mile game point mark vote ticket stamp "
    "pencil pen crayon toy doll tree flower plant seed egg cow horse dog cat bird chicken duck rabbit worker employee "
    "day week month year night century age item object thing case possibility choice option "
    "outcome arrangement configuration coloring function equation intersection region area volume perimeter "
    "length width height distance diagonal bit byte vote cent dollar penny pence quid yuan yen peso ruble "
    "franc krona share stock loaf loaves leaf leaves shelf shelves knife knives wolf wolves foot feet "
    "flour sugar milk water rice juice paint bread butter gold silver money cash cattle staff crew stairs "
    "series species quadrilateral guest customer passenger soldier teacher child sibling brother "
    "sister cousin adult kid baby babies senior junior freshman sophomore "
    "quadrant place position term grade row column".split()
)

_MODIFIERS = frozenset(
    "different distinct possible real integer integral positive whole natural rational ordered unordered unique total "
    "such valid nonzero prime odd even more red blue green yellow black white brown pink purple orange grey gray small "
    "large big tiny full tall old new extra additional remaining equal regular right acute obtuse congruent isosceles "
    "equilateral lattice favourable favorable consecutive complete perfect square cubic linear complex nonnegative "
    "nonempty sq cu "
    "chocolate vanilla strawberry overall dark light male female wooden plastic paper metal glass fresh ripe "
    "initial original final correct smaller larger bigger longer shorter taller older younger faster".split()
)
"""Words that may stand before a noun."""

_ALONE = frozenset({("in", "total"), ("in", "all"), ("total",), ("altogether",), ("more",), ("overall",), ("times",)})

_NO_NOUNS = frozenset(
    "half halves thirds quarter quarters ten tens dozen dozens score scores hundreds thousands millions billions "
    "trillions crores lakhs folds times percents powers exponents factorials reciprocals inverses "
    "negatives opposites doubles couples ones twos threes fours fives sixes sevens eights "
    "nines less plus minus always perhaps sometimes besides unless versus towards afterwards backwards various "
    "fails seems lies means equals misses excludes denies loses lacks does this yes guess mistakes errors typos "
    "exceptions falsehoods myriads zillions googols".split()
)
"""Words that look like plurals or are nouns, and scale, deny or compute."""

_NUMBERS = frozenset(
    "zero one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty sixty seventy "
    "eighty ninety hundred thousand million billion half third quarter none nothing".split()
)
FRACTIONS = {
    "halves": 2, "thirds": 3, "fourths": 4, "fifths": 5, "sixths": 6, "sevenths": 7, "eighths": 8, "ninths": 9,
    "tenths": 10, "elevenths": 11, "twelfths": 12, "hundredths": 100, "thousandths": 1000,
}  # fmt: skip
"""Plurals that divide. ``quarters`` may also be coins."""
_ORDINAL = re.compile(
    r".*(?:third|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|teen|tie|hundred|thousand|million|billion|trillion)th)s?"
)
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")


def is_neutral(words: Sequence[str]) -> bool:
    """Whether words behind a number leave it what it is: a noun, with adjectives and with what it is made of."""
    lowered = [word.casefold() for word in words]
    if tuple(lowered) in _ALONE:
        return True
    if tuple(lowered[-2:]) in (("in", "total"), ("in", "all")):
        lowered = lowered[:-2]
    head, _, made = f" {' '.join(lowered)}".partition(" of ")
    if made and not all(_WORD.fullmatch(word) and not _scales(word) and word != "not" for word in made.split()):
        return False
    *before, noun = head.split() or [""]
    return (not head and bool(made)) or (
        len(lowered) <= 6 and _is_noun(noun) and all(_is_modifier(word) for word in before)
    )


def _is_modifier(word: str) -> bool:
    first, _, second = word.partition("-")
    if first in _NUMBERS and second:
        return second in _NOUNS  # three-digit numbers
    return word in _MODIFIERS or (_is_noun(word) and not word.endswith("s"))


def _is_noun(word: str) -> bool:
    if word in _NO_NOUNS or _scales(word) or not _WORD.fullmatch(word):
        return False
    return word in _NOUNS or (len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")))


def _scales(word: str) -> bool:
    return word in _NUMBERS or word in _NO_NOUNS or _ORDINAL.fullmatch(word) is not None
