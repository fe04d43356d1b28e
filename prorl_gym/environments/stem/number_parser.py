r"""Cuts a quantity into tokens and parses the number that it begins with.

``1.5 \times 10^{-3}``, ``\frac{3}{4}``, ``2\sqrt{3}``, ``(5.2 \pm 0.1)`` and ``2 1/2`` are numbers. Sums are read where
they cannot be taken for a range: ``5-6`` is no number.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from prorl_gym.environments.stem.text_normalization import strip_fonts

# ruff: noqa: RUF001 - look-alike signs are what this file is about

_REWRITES = {
    re.compile(pattern): text
    for pattern, text in {
        r"(?<![\\^_}])(?<!frac)(?<!sqrt)\{\s*+\}": " ",  # {}^\circ
        r"\\(?:times|cdot|ast)(?![a-zA-Z])|[×·⋅∙∗•]": " * ",
        r"\*\*": "^",
        r"(?<=[\d.)}])\s*+[xX]\s*+(?=10\s*+\^|10\s*+\()": " * ",
        r"\\div(?![a-zA-Z])|[÷∕⁄]": " / ",
        r"\\[dtc]?frac\s*+(\d)\s*+(\d)": r" frac {\1}{\2}",
        r"\\[dtc]?frac\s*+(\d)(?=\s*+\{)": r" frac {\1}",
        r"\\sqrt\s*+(\d)": r" sqrt {\1}",
        r"\\log_\{?10\}?|\\lg(?![a-zA-Z])": " lg ",
        r"\\[dtc]?frac(?![a-zA-Z])": " frac ",
        r"\\sqrt(?![a-zA-Z])|√": " sqrt ",
        r"\\pi(?![a-zA-Z])|π": " π ",
        r"\^\s*+\{?\s*+\\(?:circ|degree)\s*+\}?|\\degree(?:s)?(?![a-zA-Z])|\\circ(?![a-zA-Z])|º|˚": "°",
        r"℃|\\degreeCelsius(?![a-zA-Z])|\\celsius(?![a-zA-Z])": "°C",
        r"℉": "°F",
        r"°\s*+(?=[CFK](?![A-Za-z]))": " °",
        r"\b[Dd]eg(?:ree)?s?\.?\s+(?:C|[Cc]elsius|[Cc]entigrade)\b|\b[Cc]entigrade\b|°\s*+[Cc]elsius\b": " °C ",
        r"\b[Dd]eg(?:ree)?s?\.?\s+(?:F|[Ff]ahrenheit)\b|°\s*+[Ff]ahrenheit\b": " °F ",
        r"\\(?:ohm|Omega|upOmega)(?![a-zA-Z])": "Ω",
        r"\\(?:mu|upmu|textmu|micro)(?![a-zA-Z])\s*+|µ": "μ",
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
        r"\^\s*+\{?\s*+\\prime\s*+\}?": "′",
        r"\\(?=[A-Za-z])": " ",
    }.items()
}
_TOKEN = re.compile(
    r"""
    (?P<space>\s+)
    |(?P<number>(?:\d{1,3}(?:(?:,|\{,\}|[ ]+(?=\d{3}(?!\d)))\d{3})+(?!\d)(?:\.\d+)?|\d+\{,\}\d+
            |\d+\.\d{3}(?:[ ]+\d{3})*[ ]+\d{1,3}(?![\d./^:])|\d++\.?\d*|\.\d+)
        (?:[eE][+-]?\d+(?![A-Za-z\d]))?)
    |(?P<name>°[CFK]?(?![A-Za-z])|[A-Za-zΑ-Ωα-ωÅℓΩÅ]+(?:2O(?![a-z\d]))?|[%‰′″])
    |(?P<sign>[-+*/^(){}±≈=,;:<>≤≥\[\]|_'?!.~&$€£"])
    """,
    re.VERBOSE,
)
_MAX_DEPTH = 16
_MULTIPLIERS = {"dozen": 12.0, "hundred": 1e2, "thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}
_CONSTANTS = {"π": math.pi, "e": math.e}
_FUNCTIONS: dict[str, Callable[[float], float]] = {"sqrt": math.sqrt, "ln": math.log, "lg": math.log10, "exp": math.exp}
_CLOSING = {"(": ")", "{": "}"}


class UnreadableQuantityError(ValueError):
    """The text is no single quantity; the message is the reason, without a quotation."""


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of a quantity."""

    kind: Literal["number", "name", "sign"]
    text: str
    is_adjacent: bool
    """It follows the token before without a space."""


def tokenize(text: str) -> list[Token]:
    """Return the tokens of a text. Raises ``UnreadableQuantityError``: a character belongs to no quantity."""
    text = strip_fonts(text)
    for pattern, written in _REWRITES.items():
        text = pattern.sub(written, text)
    tokens: list[Token] = []
    place, is_adjacent = 0, False
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise UnreadableQuantityError("a character that belongs to no quantity")
        place = match.end()
        if match.lastgroup == "space":
            is_adjacent = False
            continue
        kind: Literal["number", "name", "sign"] = "number" if match["number"] else "name" if match["name"] else "sign"
        tokens.append(Token(kind, match.group(), is_adjacent))
        is_adjacent = True
    return tokens


def number_value(text: str) -> float:
    if "{,}" in text and not re.fullmatch(r"\d{1,3}(?:\{,\}\d{3})+(?:\.\d+)?", text):
        text = text.replace("{,}", ".")  # a decimal comma
    return float(re.sub(r"[,{} ]", "", text))


class NumberParser:
    """Reads numbers from the tokens of a quantity. Its methods raise ``UnreadableQuantityError``."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tokens
        self.position = 0
        self._depth = 0
        self.spread = 0.0
        """Largest uncertainty that was read, relative to its number."""

    def peek(self, ahead: int = 0) -> Token | None:
        """Return the next token, or one further ahead; ``None`` past the end."""
        place = self.position + ahead
        return self._tokens[place] if place < len(self._tokens) else None

    def is_next(self, *texts: str, ahead: int = 0) -> bool:
        """Whether one of these signs or names comes next."""
        token = self.peek(ahead)
        return token is not None and token.kind != "number" and token.text in texts

    def accept(self, *texts: str) -> bool:
        """Step over one of these signs or names if it comes next."""
        is_next = self.is_next(*texts)
        self.position += is_next
        return is_next

    def expect(self, text: str) -> None:
        """Step over a closing bracket or a slash, which must come next."""
        if not self.accept(text):
            raise UnreadableQuantityError("brackets that do not match")

    def parse_magnitude(self) -> float:
        """Return the number that comes next, times words such as ``million``; its uncertainty goes to ``spread``."""
        value = self._sum(outermost=True)
        while (token := self.peek()) is not None and token.text.casefold() in _MULTIPLIERS:
            value *= _MULTIPLIERS[token.text.casefold()]
            self.position += 1
        if self.accept("±"):
            self._widen_spread(value, self._sum(outermost=True))
        return _finite(value)

    def parse_exponent(self) -> float:
        """Return the exponent that comes next, behind its ``^``."""
        sign = self._sign()
        if (token := self.peek()) is not None and token.kind == "number":
            self.position += 1
            return sign * number_value(token.text)
        if self.is_next("{", "("):
            return sign * self._group()
        raise UnreadableQuantityError("an exponent that is no number")

    def _widen_spread(self, value: float, uncertainty: float) -> None:
        self.spread = max(self.spread, abs(uncertainty / value) if value else 0.0)

    def _sum(self, *, outermost: bool = False) -> float:
        start = self.position
        value, plain = self._sign() * self._product(), self.position - start <= 2
        while self.is_next("+", "-"):
            sign = self._sign()
            start = self.position
            other = self._product()
            if outermost and plain and self.position - start == 1:
                raise UnreadableQuantityError("a range or an unfinished computation")
            value += sign * other
        return value

    def _sign(self) -> float:
        if self.accept("-"):
            return -1.0
        self.accept("+")
        return 1.0

    def _product(self) -> float:
        value, last = self._power()
        while True:
            place = self.position
            operator = "*" if self.accept("*") else "/" if self.accept("/") else ""
            try:
                factor, kind = self._power()
            except UnreadableQuantityError:
                self.position = place  # a unit begins here, or what is left over is nothing
                return value
            if operator == "/":
                value = _divided(value, factor)
            elif operator == "*":
                value *= factor
            elif last == "number" and kind == "number":
                below = self.peek(1)
                if self.is_next("/") and below is not None and below.kind == "number" and value == int(value):
                    self.position += 2  # a mixed number
                    return value + factor / (number_value(below.text) or math.nan)
                if factor == 1 and self.is_next("/"):  # 5 1/s
                    return value
                raise UnreadableQuantityError("two numbers")
            elif last == "number" and kind == "fraction" and value == int(value) and 0 < factor < 1:
                value += factor  # a mixed number
            elif kind == "number":
                raise UnreadableQuantityError("a number behind a bracket")
            else:
                value *= factor
            last = kind

    def _power(self) -> tuple[float, str]:
        value, kind = self._atom()
        if self.accept("^"):
            return _finite(_applied(math.pow, value, self.parse_exponent())), "power"
        return value, kind

    def _atom(self) -> tuple[float, str]:
        token = self.peek()
        if token is None:
            raise UnreadableQuantityError("no number")
        if token.kind == "number":
            self.position += 1
            if "." in token.text:
                self._skip_uncertainty()
            return number_value(token.text), "number"
        if token.text in _CONSTANTS and token.kind == "name":
            self.position += 1
            return _CONSTANTS[token.text], "constant"
        place = self.position
        try:
            if self.accept("frac"):
                return _divided(self._argument(), self._argument()), "fraction"
            for name, function in _FUNCTIONS.items():
                if self.accept(name):
                    return _applied(function, self._argument()), "root"
            if self.is_next("(", "{"):
                return self._group(), "group"
        except UnreadableQuantityError:
            self.position = place
            raise
        raise UnreadableQuantityError("no number")

    def _skip_uncertainty(self) -> None:
        """Step over the digits of ``5.213(4)``."""
        bracket, digits, closing = self.peek(), self.peek(1), self.peek(2)
        is_uncertainty = (
            bracket is not None and digits is not None and closing is not None
            and bracket.is_adjacent and bracket.text == "(" and digits.kind == "number" and digits.text.isdigit()
            and closing.text == ")"
        )  # fmt: skip
        self.position += 3 * is_uncertainty

    def _argument(self) -> float:
        r"""Read the argument of a function: a group, a number or a constant (``\ln 2``)."""
        if self.is_next("{", "("):
            return self._group()
        token = self.peek()
        if token is not None and token.kind == "number":
            self.position += 1
            return number_value(token.text)
        if token is not None and token.text in _CONSTANTS:
            self.position += 1
            return _CONSTANTS[token.text]
        raise UnreadableQuantityError("no number")

    def _group(self) -> float:
        opening = self.peek()
        assert opening is not None
        if self._depth >= _MAX_DEPTH:
            raise UnreadableQuantityError("brackets nest too deeply")
        self.position += 1
        self._depth += 1
        try:
            value = self._sum()
            if self.accept("±"):
                self._widen_spread(value, self._sum())
        finally:
            self._depth -= 1
        self.expect(_CLOSING[opening.text])
        return value


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise UnreadableQuantityError("a number too large")
    return value


def _divided(value: float, divisor: float) -> float:
    if divisor == 0:
        raise UnreadableQuantityError("a division by zero")
    return value / divisor


def _applied(function: Callable[..., float], *arguments: float) -> float:
    try:
        return function(*arguments)
    except (OverflowError, ValueError):
        raise UnreadableQuantityError("a number too large") from None
