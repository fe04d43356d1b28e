r"""Cutting a quantity into tokens: ``3 \times 10^{8}\,\mathrm{m/s}`` becomes numbers, signs and names."""

import re
from dataclasses import dataclass
from typing import Literal

from prorl_gym.environments.stem.spelling import unfonted

# ruff: noqa: RUF001 - look-alike signs are what this file is about


class Unreadable(ValueError):
    """The text is no single quantity; the message says why, without quoting it."""


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of a quantity."""

    kind: Literal["number", "name", "sign"]
    text: str
    glued: bool
    """Nothing stands between it and the token before."""


_REWRITTEN = {
    re.compile(pattern): text
    for pattern, text in {
        r"(?<![\\^_}])(?<!frac)(?<!sqrt)\{\s*\}": " ",  # {}^\circ
        r"\\(?:times|cdot|ast)(?![a-zA-Z])|[×·⋅∙∗•]": " * ",
        r"\*\*": "^",
        r"(?<=[\d.)}])\s*[xX]\s*(?=10\s*\^|10\s*\()": " * ",
        r"\\div(?![a-zA-Z])|[÷∕⁄]": " / ",
        r"\\[dtc]?frac\s*(\d)\s*(\d)": r" frac {\1}{\2}",
        r"\\[dtc]?frac\s*(\d)(?=\s*\{)": r" frac {\1}",
        r"\\sqrt\s*(\d)": r" sqrt {\1}",
        r"\\log_\{?10\}?|\\lg(?![a-zA-Z])": " lg ",
        r"\\[dtc]?frac(?![a-zA-Z])": " frac ",
        r"\\sqrt(?![a-zA-Z])|√": " sqrt ",
        r"\\pi(?![a-zA-Z])|π": " π ",
        r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?:s)?(?![a-zA-Z])|\\circ(?![a-zA-Z])|º|˚": "°",
        r"℃|\\degreeCelsius(?![a-zA-Z])|\\celsius(?![a-zA-Z])": "°C",
        r"℉": "°F",
        r"°\s*(?=[CFK](?![A-Za-z]))": " °",
        r"\b[Dd]eg(?:ree)?s?\.?\s+(?:C|[Cc]elsius|[Cc]entigrade)\b|\b[Cc]entigrade\b|°\s*[Cc]elsius\b": " °C ",
        r"\b[Dd]eg(?:ree)?s?\.?\s+(?:F|[Ff]ahrenheit)\b|°\s*[Ff]ahrenheit\b": " °F ",
        r"\\(?:ohm|Omega|upOmega)(?![a-zA-Z])": "Ω",
        r"\\(?:mu|upmu|textmu|micro)(?![a-zA-Z])\s*|µ": "μ",
        r"\\(?:AA|angstrom)(?![a-zA-Z])": "Å",
        r"\bpercent(?:age)?[ -]points?\b": " pp ",
        r"(?i:\bparts per million\b)": " ppm ",
        r"(?i:\bparts per billion\b)": " ppb ",
        r"\bper cent\b": " percent ",
        r"(?i:\bnautical miles?\b)": " nmi ",
        r"\b(?:sq\.?|square|cu\.?|cubic)\s+units?\b": " units ",
        r"\\percent(?![a-zA-Z])|\\%|％": "%",
        r"\\ell(?![a-zA-Z])": "ℓ",
        r"\\pm(?![a-zA-Z])|\+/-|\+-": "±",
        r"\\(?:approx|simeq|cong|sim|doteq|approxeq)(?![a-zA-Z])|≃|≅|∼": "≈",
        r"\^\s*\{?\s*\\prime\s*\}?": "′",
        r"\\(?=[A-Za-z])": " ",
    }.items()
}
_TOKEN = re.compile(
    r"""
    (?P<space>\s+)
    |(?P<number>(?:\d{1,3}(?:(?:,|\{,\}|[ ]+(?=\d{3}(?!\d)))\d{3})+(?!\d)(?:\.\d+)?|\d+\{,\}\d+
            |\d+\.\d{3}(?:[ ]+\d{3})*[ ]+\d{1,3}(?![\d./^:])|\d+\.?\d*|\.\d+)
        (?:[eE][+-]?\d+(?![A-Za-z\d]))?)
    |(?P<name>°[CFK]?(?![A-Za-z])|[A-Za-zΑ-Ωα-ωÅℓΩÅ]+(?:2O(?![a-z\d]))?|[%‰′″])
    |(?P<sign>[-+*/^(){}±≈=,;:<>≤≥\[\]|_'?!.~&$€£"])
    """,
    re.VERBOSE,
)


def tokens(text: str) -> list[Token]:
    """Cut a text.

    Raises:
        Unreadable: a character that belongs to no quantity.
    """
    text = unfonted(text)
    for pattern, written in _REWRITTEN.items():
        text = pattern.sub(written, text)
    found: list[Token] = []
    place, glued = 0, False
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise Unreadable("a character that belongs to no quantity")
        place = match.end()
        if match.lastgroup == "space":
            glued = False
            continue
        kind: Literal["number", "name", "sign"] = "number" if match["number"] else "name" if match["name"] else "sign"
        found.append(Token(kind, match.group(), glued))
        glued = True
    return found


def number(text: str) -> float:
    """Return the value of a number token."""
    if "{,}" in text and not re.fullmatch(r"\d{1,3}(?:\{,\}\d{3})+(?:\.\d+)?", text):
        text = text.replace("{,}", ".")  # a decimal comma
    return float(re.sub(r"[,{} ]", "", text))
