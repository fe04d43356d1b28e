"""Classifies words around a quantity: which of them leave it unchanged (``5 m/s downward``, ``12 isomers``).

Only known words do: those of the question and of the gold answer, directions, and a few neutral ones. A word that
scales or negates a number (``tenths``, ``doubled``, ``false``) never does, even if the question contains it.
"""

import re
from collections.abc import Mapping

from prorl_gym.environments.answers import units
from prorl_gym.environments.answers.number_words import ONES, ORDINALS, TENS
from prorl_gym.environments.math.expressions import FUNCTIONS, GREEK

FILLERS = frozenset("of to the in a an due from along at with as".split())
"""Words that do not distinguish labels."""

NEUTRAL_WORDS = frozenset(
    "approximately approx roughly about exactly only total altogether overall net magnitude apart "
    "deep high tall long wide thick away ago old later value answer unit".split()
)
"""Words after a quantity that do not change it."""

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
"""Names of measured quantities: ``The force is 5 N``."""

_COUNTING = (
    *ONES, *TENS,
    *"hundred thousand million billion trillion quadrillion lakh crore mille milliard googol dozen".split(),
)  # fmt: skip
_PARTS = (
    *ORDINALS[2:],
    *"half halve quarter hundredth thousandth millionth billionth trillionth ths percent percentage".split(),
)
_SCALING = (
    "once twice thrice double doubled triple tripled quadruple quadrupled fold time squared cubed square cubic "
    "factorial minus plus modulo mod base inverse reciprocal negative opposite cube root logarithm "
    "power multiple remainder complement"
).split()
_DENYING = (
    "and or not never no none nor non nope false untrue wrong incorrect invalid impossible excluded rejected refuted "
    "than less more least most fewer maybe perhaps probably possibly either neither unless but except without between "
    "through isn almost over under until per above below beyond short off ish too plu instead if "
    "error uncertainty tolerance missing remaining larger smaller bigger higher lower greater each"
).split()
NEVER_NEUTRAL = frozenset((*_COUNTING, *_PARTS, *_SCALING, *_DENYING, *FUNCTIONS, *map(str.casefold, GREEK))) | {
    word for word in units.PREFIX_WORDS if len(word) > 3
}
"""Words that scale or deny a number."""

EQUALS = re.compile(r"(?<![<>!])=|\\(?:approx|simeq|cong|doteq|equiv)(?![a-zA-Z])|[≈≃≅]")
"""Signs between the parts of a chain."""

_RIVAL_QUANTITIES = [
    re.compile(pattern)
    for pattern in (
        r"(?<![A-Za-z])[pP](?P<member>[hH]|OH|oh|K_?[abw]|K_?sp|I)_?\d?(?![A-Za-z])",
        r"(?<![A-Za-zp])K_?(?P<member>a|b|w|c|p|sp|f|d)_?\d?(?![A-Za-z])",
        r"(?:\\?Delta|Δ)\s*+_?\w?\s*+(?P<member>[GHSU])(?![a-z])",
        r"(?i)\b(?P<member>radius|diameter|circumference)\b",
        r"(?i)\b(?P<member>minimum|maximum|average)\b",
        r"(?i)\b(?P<member>kinetic|potential)\b",
        r"(?i)\b(?P<member>initial|final)\b",
        r"(?i)\b(?P<member>molarity|molality|normality)\b",
        r"(?i)\b(?P<member>mean|median|mode|variance)\b",
        r"(?i)\b(?P<member>frequency|period|wavelength)\b",
        r"(?i)\b(?P<member>voltage|current|resistance)\b",
    )
]
"""Groups of easily confused quantities: an answer that names another member than the question is wrong."""
_SYMBOL_BY_WORD: Mapping[str, str] = {
    "enthalpy": r"\Delta H", "entropy": r"\Delta S", "internal energy": r"\Delta U", "gibbs free energy": r"\Delta G",
    "gibbs energy": r"\Delta G", "free energy": r"\Delta G",
}  # fmt: skip
_QUANTITY_WORD = re.compile(rf"\b(?:{'|'.join(_SYMBOL_BY_WORD)})\b", re.IGNORECASE)
_NUMBERED_SYMBOL = re.compile(r"(?<![A-Za-z\\])(\\?[A-Za-z]+)_(\d)(?!\d)")
_QUANTITY_SYMBOLS = {
    "angular momentum": "L J l", "angular frequency": r"\omega", "angular velocity": r"\omega", "torque": r"\tau M N",
    "angular acceleration": r"\alpha", "wavelength": r"\lambda", "period": r"T P \tau", "frequency": r"f \nu F",
    "momentum": "p P", "energy": r"E K T U V W KE PE Q \epsilon", "acceleration": "a g A", "velocity": "v u V c",
    "speed": "v u V c", "force": "F N T f R", "power": "P", "charge": "q Q", "current": "I i", "resistance": "R r",
    "capacitance": "C", "inductance": "L M", "magnetic field": "B H", "electric field": "E",
}  # fmt: skip
"""Usual symbols of quantities; one that is usual for others only names another quantity."""
_ASKED_QUANTITY = re.compile(rf"\b(?:{'|'.join(_QUANTITY_SYMBOLS)})\b", re.IGNORECASE)
_OWN_SYMBOL = re.compile(r"\s*+(\\?[A-Za-z]+)(?:_(?:\{\w+\}|\w))?\s*+=")
_STANDARD_STATE = re.compile(r"(?<!\s)\s*+\^?\s*+(?:\\(?:circ|ominus|degree)(?![a-zA-Z])|[°⦵⊖])")
_VALUE_START = re.compile(r"[-+~≈\d.]|\\(?:approx|sim)")
_NOT_A_NAME = re.compile(r"[-+*/^<>()\[\]\d]|\\(?:times|cdot|frac|log|ln|sqrt)")
_REQUEST = re.compile(
    r"\b(?:what|how|find|calculate|determine|compute|estimate|give)\b(?:[^.?!]|\.(?=\d))*", re.IGNORECASE
)
_PREPOSITION = re.compile(
    r"\b(?:of|for|if|when|with|given|whose|from|using|at|in|that|where|after|before)\b", re.IGNORECASE
)

_WORD = re.compile(r"[^\W\d_][\w^+\-']*")
_HOW_MANY = re.compile(r"\bhow many\b[^.?!]*", re.IGNORECASE)
_WARD = re.compile(r"(up|down|in|out|north|south|east|west)ward")


def fold_word(word: str) -> str:
    """Return a word without case, plural s and the ending of a direction; a formula (``NaOH``) as it is."""
    if sum(map(str.isupper, word)) > 1 or any(map(str.isdigit, word)):
        return word
    word = word.casefold().strip("'-")
    word = word.removesuffix("s") if len(word) > 2 else word
    return _WARD.sub(r"\1", word)


def folded_words(text: str) -> frozenset[str]:
    return frozenset(map(fold_word, _WORD.findall(text)))


def counted_words(question: str) -> frozenset[str]:
    """Return the words of a question that may name the counted thing: those after its last ``how many``."""
    asked = _HOW_MANY.findall(question)
    return folded_words(asked[-1] if asked else question)


def names_other_quantity(answer: str, gold: str, question: str) -> bool:
    """Whether an answer names another quantity than asked for: ``pOH = 4.74`` for a pH of 4.74. All without fonts.

    If the gold answer names such a quantity, that one decides, otherwise the first that the last request of the
    question names.
    """
    clauses: list[str] = _REQUEST.findall(question[-4000:]) or [question[-4000:]]
    if "=" not in gold and _has_other_symbol(answer, clauses[-1], question):
        return True
    in_answer = {name for part in _named_parts(answer) for name in _named_quantities(part)}
    if not in_answer:
        return False
    in_gold = {name for part in _named_parts(gold) for name in _named_quantities(part)}
    pieces = map(_named_quantities, _PREPOSITION.split(clauses[-1]))
    in_question = next((names for names in pieces if names), set[tuple[str, str]]())
    for kind in {kind for kind, _ in in_answer}:
        given, gold_names, question_names = (
            {name for name in names if name[0] == kind} for names in (in_answer, in_gold, in_question)
        )
        wanted = gold_names or question_names
        if wanted and given.isdisjoint(wanted):
            return True
    return False


def _has_other_symbol(answer: str, request: str, question: str) -> bool:
    """Whether an answer begins with the symbol of another quantity than asked for, which the question does not use."""
    own, asked = _OWN_SYMBOL.match(answer), _ASKED_QUANTITY.search(_PREPOSITION.split(request)[0])
    if own is None or asked is None or re.search(rf"(?<![A-Za-z\\]){re.escape(own[1])}(?![A-Za-z])", question):
        return False
    is_known = any(own[1] in symbols.split() for symbols in _QUANTITY_SYMBOLS.values())
    return is_known and own[1] not in _QUANTITY_SYMBOLS[asked[0].casefold()].split()


def _named_quantities(text: str) -> set[tuple[str, str]]:
    """Return the quantities that a text names, each with its kind; a kind has rivals."""
    text = _STANDARD_STATE.sub("", re.sub(r"_\{(\w+)\}", r"_\1", text))
    text = _QUANTITY_WORD.sub(lambda match: _SYMBOL_BY_WORD[match[0].casefold()], text)
    found = {
        (pattern.pattern, match["member"].casefold().replace("_", ""))
        for pattern in _RIVAL_QUANTITIES
        for match in pattern.finditer(text)
    }
    return found | {(match[1], match[2]) for match in _NUMBERED_SYMBOL.finditer(text)}


def _named_parts(text: str) -> list[str]:
    """Return the names before each equals sign, and before the value itself."""
    *before, last = EQUALS.split(text)
    found = _VALUE_START.search(_NUMBERED_SYMBOL.sub(lambda match: "x" * len(match[0]), last))
    return [part for part in (*before, last[: found.start()] if found else "") if _is_only_a_name(part)]


def _is_only_a_name(part: str) -> bool:
    for pattern in (_STANDARD_STATE, _NUMBERED_SYMBOL, *_RIVAL_QUANTITIES):
        part = pattern.sub(" ", part)
    return _NOT_A_NAME.search(part) is None
