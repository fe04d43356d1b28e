"""What is said around an answer (``The answer is 12``), and mathematics in words."""

import re

from prorl_gym.environments.math import intervals, words
from prorl_gym.environments.math.expressions import read_expression
from prorl_gym.environments.math.forms import Amount, Form, Words
from prorl_gym.environments.math.spelling import untexted

_PREFIX = re.compile(
    r"(?:\\text\s*\{)?\s*(?P<words>[a-zA-Z][a-zA-Z' ]*?)?\s*"
    r"(?:(?P<verb>\b(?:is|are|equals|be|has|have|get|was)(?:\s+(?:exactly|only|just))?)\s*:?|(?<=[a-zA-Z])\s*:(?!\s*\d+$))\s*(?:\\text)?\s*\}?\s+(?P<rest>\S.*)"
)
_PREFIX_WORDS = frozenset(
    "the my our final correct answer answers result value values solution solutions it this so therefore thus hence "
    "there total area volume number probability sum product we x y n minimum maximum of a an desired required length "
    "perimeter distance remainder angle radius ratio expression possible function equation interval set that "
    "domain range".split()
)


def said_in_words(said: str) -> Form | None:
    """Return the mathematics in words; ``None`` leaves them words."""
    match words.meaning(said):
        case "empty":
            return intervals.NOTHING
        case "reals":
            return intervals.EVERYTHING
        case "infinite":
            return Amount(intervals.INFINITY)
        case "undefined":
            return Words("undefined")
        case _:
            pass
    numeral = words.number(said)
    return Amount(read_expression(numeral)) if numeral is not None else None


def without_prefix(text: str) -> str:
    """Return an answer without the words that lead up to it. Words that change its meaning are kept."""
    match = _PREFIX.fullmatch(text) or _PREFIX.fullmatch(" ".join(untexted(text).split()))
    if match is None:
        return text
    if any(word.casefold() not in _PREFIX_WORDS for word in (match["words"] or "").split()):
        return text
    rest = match["rest"].strip()
    return rest.removesuffix("}") if rest.count("}") > rest.count("{") else rest
