"""Words around a quantity: which of them leave it as it is (``5 m/s downward``, ``12 isomers``).

Only known words do: those of the question, those of the gold answer, directions, and a few that say nothing. A word
that scales or denies a number (``tenths``, ``doubled``, ``false``) never does, also where the question has it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

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

EQUALS = re.compile(r"(?<![<>!])=|\\(?:approx|simeq|cong|doteq|equiv)(?![a-zA-Z])|[≈≃≅]")
"""Signs between the parts of a chain."""

_RIVALS: Sequence[re.Pattern[str]] = tuple(
    map(
        re.compile,
        (
            r"(?<![A-Za-z])[pP](?P<member>[hH]|OH|oh|K_?[abw]|K_?sp|I)_?\d?(?![A-Za-z])",
            r"(?<![A-Za-zp])K_?(?P<member>a|b|w|c|p|sp|f|d)_?\d?(?![A-Za-z])",
            r"(?:\\?Delta|Δ)\s*_?\w?\s*(?P<member>[GHSU])(?![a-z])",
            r"(?i)\b(?P<member>radius|diameter|circumference)\b",
            r"(?i)\b(?P<member>minimum|maximum|average)\b",
            r"(?i)\b(?P<member>kinetic|potential)\b",
            r"(?i)\b(?P<member>initial|final)\b",
            r"(?i)\b(?P<member>molarity|molality|normality)\b",
            r"(?i)\b(?P<member>mean|median|mode|variance)\b",
            r"(?i)\b(?P<member>frequency|period|wavelength)\b",
            r"(?i)\b(?P<member>voltage|current|resistance)\b",
        ),
    )
)
"""Names of which one never stands for another: an answer that names one where another is asked is another answer."""
_IN_WORDS: Mapping[str, str] = {
    "enthalpy": r"\Delta H", "entropy": r"\Delta S", "internal energy": r"\Delta U", "gibbs free energy": r"\Delta G",
    "gibbs energy": r"\Delta G", "free energy": r"\Delta G",
}  # fmt: skip
_SAID_IN_WORDS = re.compile(rf"\b(?:{'|'.join(_IN_WORDS)})\b", re.IGNORECASE)
_NUMBERED = re.compile(r"(?<![A-Za-z\\])(\\?[A-Za-z]+)_(\d)(?!\d)")
_STANDARD = re.compile(r"\s*\^?\s*(?:\\(?:circ|ominus|degree)(?![a-zA-Z])|[°⦵⊖])")
_NAME_END = re.compile(r"[-+~≈\d.]|\\(?:approx|sim)")
_NO_NAME = re.compile(r"[-+*/^<>()\[\]\d]|\\(?:times|cdot|frac|log|ln|sqrt)")
_CLAUSE = re.compile(
    r"\b(?:what|how|find|calculate|determine|compute|estimate|give)\b(?:[^.?!]|\.(?=\d))*", re.IGNORECASE
)
_HEAD_END = re.compile(
    r"\b(?:of|for|if|when|with|given|whose|from|using|at|in|that|where|after|before)\b", re.IGNORECASE
)

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


def names_another(answer: str, gold: str, question: str) -> bool:
    """Whether an answer names its value as another quantity than is asked for: ``pOH = 4.74`` for a pH of 4.74.

    Args:
        answer: what was boxed, without fonts.
        gold: the gold answer, without fonts; where it has a name of this kind, it decides.
        question: what was asked; the first quantities that its last request names decide.
    """
    named = [_names(part) for part in _parts(answer)]
    if not any(named):
        return False
    wanted = [_names(part) for part in _parts(gold)]
    asked = _asked(question)
    for kind in {kind for names in named for kind, _ in names}:
        mine = {name for names in named for name in names if name[0] == kind}
        theirs = {name for names in wanted for name in names if name[0] == kind}
        theirs = theirs or {name for name in asked if name[0] == kind}
        if theirs and not mine & theirs:
            return True
    return False


def _parts(text: str) -> list[str]:
    """Return what stands before each equals sign, and before the value itself, where it is nothing but a name."""
    *before, last = EQUALS.split(text)
    found = _NAME_END.search(_NUMBERED.sub(lambda match: "x" * len(match[0]), last))
    return [part for part in (*before, last[: found.start()] if found else "") if _is_name(part)]


def _is_name(part: str) -> bool:
    for pattern in (_STANDARD, _NUMBERED, *_RIVALS):
        part = pattern.sub(" ", part)
    return _NO_NAME.search(part) is None


def _names(text: str) -> set[tuple[str, str]]:
    """Return the quantities that a text names, each with its kind; a kind has rivals."""
    text = _STANDARD.sub("", re.sub(r"_\{(\w+)\}", r"_\1", text))
    text = _SAID_IN_WORDS.sub(lambda match: _IN_WORDS[match[0].casefold()], text)
    found = {
        (pattern.pattern, match["member"].casefold().replace("_", ""))
        for pattern in _RIVALS
        for match in pattern.finditer(text)
    }
    return found | {(match[1], match[2]) for match in _NUMBERED.finditer(text)}


def _asked(question: str) -> set[tuple[str, str]]:
    """Return what the last request of a question names before it says of what; else what it names first."""
    clauses: list[str] = _CLAUSE.findall(question[-4000:]) or [question[-4000:]]
    pieces = map(_names, _HEAD_END.split(clauses[-1]))
    return next((names for names in pieces if names), set[tuple[str, str]]())
