"""Words in answers: answers that are words, words that lead up to an answer, and words behind a number.

Words behind a number may leave it as it is: ``7 ways``, ``7 red marbles``, ``7 cups of flour``. An unknown word makes
an answer unreadable, since ``7 tenths`` and ``7 rejected`` are not 7. Plurals that end in ``s`` are nouns unless
they scale, deny or compute.
"""

import re
from collections.abc import Sequence

from prorl_gym.environments.answers.number_words import ONES, TENS
from prorl_gym.environments.math.answer_text import strip_text_macros
from prorl_gym.environments.math.expressions import FUNCTIONS

_WORDS = re.compile(r"(?:[aA] (?!and\b|nor\b)(?=[^\W\d_]{3}))?[^\W\d_]{2,}(?:[ '\-,]+[^\W\d_]+)*\??")
_DATE = re.compile(
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|"
    r"nov(?:ember)?|dec(?:ember)?)\.? \d{1,2}",
    re.IGNORECASE,
)
_VERDICT = re.compile(r"(yes|no), (?:it|they|there|this|that)(?: (?!(?:yes|no|but)\b)[^\W\d_]++)++")
_ARTICLES = re.compile(r"^(?:(?:the|a|an|on|in|at|exactly)\s+)+", re.IGNORECASE)
LETTER_GROUPS = tuple(map(frozenset, ("abc", "xyz", "pqr", "uvw", "rst", "mnp", "klm")))
"""Letters of variables with a usual order; a word of nothing but these is a product."""

_SPELLINGS = {
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
MEANINGS = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings.split("|")}
"""Mathematical meanings of words, by their spelling."""
_ABBREVIATIONS = {
    "mon": "monday", "tue": "tuesday", "tues": "tuesday", "wed": "wednesday", "thu": "thursday", "thur": "thursday",
    "thurs": "thursday", "fri": "friday", "sat": "saturday", "sun": "sunday", "jan": "january", "feb": "february",
    "mar": "march", "apr": "april", "jun": "june", "jul": "july", "aug": "august", "sep": "september",
    "sept": "september", "oct": "october", "nov": "november", "dec": "december",
}  # fmt: skip

_PREFIX = re.compile(
    r"(?:\\text\s*+\{)?\s*+(?:(?P<words>[a-zA-Z][a-zA-Z' ]*?)(?<!\s)\s*+)?"
    r"(?:(?P<verb>\b(?:is|are|equals|be|has|have|get|was)(?:\s+(?:exactly|only|just))?)(?:\s*+:)?|(?<=[a-zA-Z])\s*+:(?!\s*+\d+$))(?:\s*+\\text)?(?:\s*+\})?\s+(?P<rest>\S.*)"
)
_SPOKEN_LEAD = re.compile(r"\\text ?\{([a-zA-Z' ]+?) ?:? ?\} ?(?=[\d$\\({+-])(.*)")
_SPOKEN_END = re.compile(
    r"(.*[\d)}])(?: ?\\text ?\{| ) ?(?:\((?:the )?(?:minimum|maximum|min|max|total|exact|answer)\)|"
    r"(?:is|are) (?:the|our) (?:(?:final|minimum|maximum|correct|smallest|largest) )?(?:answer|value|result|total)s?)"
    r" ?\.? ?\}?"
)
_SORT = re.compile(
    r"(.+?),? (?:wins(?: the game)?|will win|has a winning strategy|functions?|triangles?|numbers?|integers?)"
)
_NO_SORT = frozenset("no not none neither both all every any each some never nobody".split())
_PREFIX_WORDS = frozenset(
    "the my our final correct answer answers result value values solution solutions it this so therefore thus hence "
    "there total area volume number probability sum product we x y n minimum maximum of a an desired required length "
    "perimeter distance remainder angle radius ratio expression possible function equation interval set that "
    "domain range smallest largest least greatest exactly only is are be equals sum to "
    "day graph winner statement he she they converges diverges".split()
)

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
"""Words that may precede a noun."""
_ALONE = frozenset(
    map(tuple, map(str.split, ("in total", "in all", "total", "altogether", "more", "overall", "times", "left")))
)
_NON_NOUNS = frozenset(
    "half halves thirds quarter quarters ten tens dozen dozens score scores hundreds thousands millions billions "
    "trillions crores lakhs folds times percents powers exponents factorials reciprocals inverses "
    "negatives opposites doubles couples ones twos threes fours fives sixes sevens eights "
    "nines less plus minus always perhaps sometimes besides unless versus towards afterwards backwards various "
    "fails seems lies means equals misses excludes denies loses lacks does this yes guess mistakes errors typos "
    "exceptions falsehoods myriads zillions googols".split()
)
"""Words that look like plurals or are nouns, and scale, deny or compute."""
_NUMBERS = frozenset({*ONES[:13], *TENS, *"hundred thousand million billion half third quarter none nothing".split()})
_ORDINAL = re.compile(
    r".*(?:third|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|teen|tie|hundred|thousand|million|billion|trillion)th)s?"
)
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")


def normalize_words(answer: str) -> str | None:
    """Return a plain answer that consists of words (``Tuesday``, ``two doors``) in one spelling, otherwise ``None``.

    Such an answer must not be parsed: as a product of letters, ``lube`` would equal ``blue``.
    """
    text = " ".join(strip_text_macros(answer).replace("\\and", "and").replace("\\or", "or").split()).strip(" .!\"'`")
    if _DATE.fullmatch(text):
        month, day = text.casefold().replace(".", "").split()
        return f"{_ABBREVIATIONS.get(month, month)} {day}"
    if not _WORDS.fullmatch(text) or _is_formula(text, "\\text" in answer):
        return None
    text = _ARTICLES.sub("", text.casefold().replace("-", " ").replace(" ,", ","))
    text = match[1] if (match := _VERDICT.fullmatch(text)) else text
    return _ABBREVIATIONS.get(text, text)


def strip_sort(answer: str) -> str:
    """Return a word in answer to which of a sort without the sort: ``odd`` for ``an odd function``, ``Alice wins``."""
    said = " ".join(strip_text_macros(answer).split()).strip(" .")
    match = _SORT.fullmatch(_ARTICLES.sub("", said)) if _WORDS.fullmatch(said) else None
    words = match[1].casefold().split() if match is not None else []
    is_sort = 0 < len(words) <= 3 and all(word not in _NO_SORT and not _changes_number(word) for word in words)
    return (
        f"\\text{{{match[1]}}}" if match is not None and is_sort and normalize_words(answer) not in MEANINGS else answer
    )


def split_word_list(text: str) -> list[str] | None:
    parts = [part.strip() for part in re.split(r"(?<!\s)(?:\s*+,\s*+(?:and\s+)?|\s++and\s+)", text)]
    return parts if len(parts) > 1 and all(parts) else None


def strip_prefix(text: str) -> str:
    """Return an answer without the words that lead up to it. Words that change its meaning are kept."""
    text = match[1] if (match := _SPOKEN_END.fullmatch(text)) is not None else text
    if match := _SPOKEN_LEAD.fullmatch(text):
        return match[2] if all(word.casefold() in _PREFIX_WORDS for word in match[1].split()) else text
    match = _PREFIX.fullmatch(text) or _PREFIX.fullmatch(" ".join(strip_text_macros(text).split()))
    if match is None:
        return text
    if any(word.casefold() not in _PREFIX_WORDS for word in (match["words"] or "").split()):
        return text
    rest = match["rest"].strip()
    return rest.removesuffix("}") if rest.count("}") > rest.count("{") else rest


def is_neutral_phrase(words: Sequence[str]) -> bool:
    """Whether words behind a number leave it as it is: a noun, with adjectives and a material."""
    lowered = [word.casefold() for word in words]
    if tuple(lowered) in _ALONE:
        return True
    if tuple(lowered[-2:]) in (("in", "total"), ("in", "all")):
        lowered = lowered[:-2]
    lowered = lowered[:-1] if lowered[-1:] == ["left"] else lowered
    head, _, made = f" {' '.join(lowered)}".partition(" of ")
    if made and not all(_WORD.fullmatch(word) and not _changes_number(word) and word != "not" for word in made.split()):
        return False
    *before, noun = head.split() or [""]
    return (not head and bool(made)) or (
        len(lowered) <= 6 and _is_noun(noun) and all(_is_modifier(word) for word in before)
    )


def _is_formula(text: str, marked_as_text: bool) -> bool:
    first = re.split(r"[ ,'\-]", _ARTICLES.sub("", text))[0]
    if first in FUNCTIONS or text in ("pi", "inf"):
        return True
    letters = text.replace(" ", "")
    if marked_as_text or not letters.isascii() or not letters.islower():
        return False
    if re.fullmatch(r"(?:[a-z]{1,3}\s*+[,\-]\s*+)*[a-z]{1,3}", text) is None:
        return False
    return any(set(letters.replace(",", "").replace("-", "")) <= group for group in LETTER_GROUPS)


def _changes_number(word: str) -> bool:
    return word in _NUMBERS or word in _NON_NOUNS or _ORDINAL.fullmatch(word) is not None


def _is_noun(word: str) -> bool:
    if word in _NON_NOUNS or _changes_number(word) or not _WORD.fullmatch(word):
        return False
    return word in _NOUNS or (len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")))


def _is_modifier(word: str) -> bool:
    first, _, second = word.partition("-")
    if first in _NUMBERS and second:
        return second in _NOUNS  # three-digit numbers
    return word in _MODIFIERS or (_is_noun(word) and not word.endswith("s"))
