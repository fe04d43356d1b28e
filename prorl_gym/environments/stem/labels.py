"""Words around a quantity: which of them leave it as it is (``5 m/s downward``, ``12 isomers``).

Only known words do: those of the question, those of the gold answer, directions, and a few that say nothing. A word
that scales or denies a number (``tenths``, ``doubled``, ``false``) never does, also where the question has it.
"""

import re
from collections.abc import Iterable

from prorl_gym.environments.math.expressions import FUNCTIONS, GREEK
from prorl_gym.environments.stem import units

FILLERS = frozenset("of to the in a an due from along at with as".split())
"""Words that do not tell labels apart."""

SILENT = frozenset(
    "approximately approx roughly about exactly only total altogether overall net magnitude apart "
    "deep high tall long wide thick away ago old later value answer unit".split()
)
"""Words behind a quantity that say nothing more about it."""

DIRECTIONS = frozenset(
    "up down left right north south east west northeast northwest southeast southwest northerly southerly easterly "
    "westerly inward outward in out forward backward clockwise counterclockwise anticlockwise horizontally vertically "
    "horizontal vertical toward center centre direction side axis page".split()
)

QUANTITIES = frozenset(
    "force speed velocity acceleration mass weight energy work power charge current voltage resistance capacitance "
    "inductance field potential pressure temperature volume density frequency wavelength period time distance length "
    "height width radius diameter area angle momentum torque moment inertia entropy enthalpy heat concentration "
    "molarity molality rate constant yield efficiency number amount magnitude value result answer total average net "
    "final maximum minimum required resulting kinetic potential electric magnetic ph pka it this its".split()
)
"""Names of what is measured: ``The force is 5 N``."""

_COUNTING = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion trillion "
    "quadrillion lakh crore mille milliard googol dozen"
).split()
_PARTS = (
    "half halve third quarter fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
    "fifteenth sixteenth seventeenth eighteenth nineteenth twentieth hundredth thousandth millionth billionth "
    "trillionth ths percent percentage"
).split()
_SCALING = (
    "once twice thrice double doubled triple tripled quadruple quadrupled fold time squared cubed square cubic "
    "factorial minus plus modulo mod base inverse reciprocal negative opposite cube root logarithm "
    "power multiple remainder complement"
).split()
_DENIALS = (
    "and or not never no none nor non nope false untrue wrong incorrect invalid impossible excluded rejected refuted "
    "than less more least most fewer maybe perhaps probably possibly either neither unless but except without between "
    "through isn almost over under until per above below beyond short off ish too plu instead if "
    "error uncertainty tolerance missing remaining larger smaller bigger higher lower greater each"
).split()
_NEVER_NEUTRAL = frozenset((*_COUNTING, *_PARTS, *_SCALING, *_DENIALS, *FUNCTIONS, *map(str.casefold, GREEK))) | {
    word for word in units.PREFIX_WORDS if len(word) > 3
}

_WORD = re.compile(r"[^\W\d_][\w^+\-']*")
_HOW_MANY = re.compile(r"\bhow many\b[^.?!]*", re.IGNORECASE)
_WARD = re.compile(r"(up|down|in|out|north|south|east|west)ward")


def folded(word: str) -> str:
    """Return a word without case, plural s and the ending of a direction; a formula (``NaOH``) as it is."""
    if sum(map(str.isupper, word)) > 1 or any(map(str.isdigit, word)):
        return word
    word = word.casefold().strip("'-")
    word = word.removesuffix("s") if len(word) > 2 else word
    return _WARD.sub(r"\1", word)


def words_of(text: str) -> frozenset[str]:
    """Return the words of a text, folded."""
    return frozenset(map(folded, _WORD.findall(text)))


def counted_in(question: str) -> frozenset[str]:
    """Return the words of a question that may name what a number counts: those after its last ``how many``."""
    asked = _HOW_MANY.findall(question)
    return words_of(asked[-1] if asked else question)


def may_be_neutral(word: str) -> bool:
    """Whether a folded word neither scales nor denies a number."""
    return word not in _NEVER_NEUTRAL


def all_neutral(words: Iterable[str], known: frozenset[str]) -> bool:
    """Whether folded words leave a quantity as it is."""
    return all(word in known or word in SILENT or word in DIRECTIONS for word in words)
