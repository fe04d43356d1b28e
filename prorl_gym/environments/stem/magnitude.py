r"""Reading numbers: ``1.5 \times 10^{-3}``, ``\frac{3}{4}``, ``2\sqrt{3}``, ``(5.2 \pm 0.1)``, ``2 1/2``.

Sums are read where they cannot be taken for a range: ``5-6`` is no number.
"""

import math
from collections.abc import Callable, Sequence

from prorl_gym.environments.stem.tokens import Token, Unreadable, number

_DEEPEST = 16
_COUNTS = {"dozen": 12.0, "hundred": 1e2, "thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}
_CONSTANTS = {"π": math.pi, "e": math.e}
_FUNCTIONS: dict[str, Callable[[float], float]] = {
    "sqrt": math.sqrt,
    "ln": math.log,
    "lg": math.log10,
    "exp": math.exp,
}
_CLOSING = {"(": ")", "{": "}"}


class Reader:
    """A place in a row of tokens.

    Args:
        found: what is read.
    """

    def __init__(self, found: Sequence[Token]) -> None:
        self._tokens = found
        self.place = 0
        self._depth = 0
        self.spread = 0.0
        """Largest uncertainty that was read, relative to its number."""

    def peek(self, ahead: int = 0) -> Token | None:
        """Return the next token, or one further ahead; ``None`` past the end."""
        place = self.place + ahead
        return self._tokens[place] if place < len(self._tokens) else None

    def at(self, *texts: str, ahead: int = 0) -> bool:
        """Whether one of these signs or names comes next."""
        token = self.peek(ahead)
        return token is not None and token.kind != "number" and token.text in texts

    def take(self, *texts: str) -> bool:
        """Step over one of these signs or names if it comes next."""
        found = self.at(*texts)
        self.place += found
        return found

    def need(self, text: str) -> None:
        """Step over a sign.

        Raises:
            Unreadable: another one comes next.
        """
        if not self.take(text):
            raise Unreadable("brackets that do not match")

    def magnitude(self) -> float:
        """Read a number with its uncertainty, which does not count, and words such as ``million``.

        Raises:
            Unreadable: none comes next, or something that may be a range.
        """
        value = self._sum(outermost=True)
        while (token := self.peek()) is not None and token.text.casefold() in _COUNTS:
            value *= _COUNTS[token.text.casefold()]
            self.place += 1
        if self.take("±"):
            self._spread_by(value, self._sum(outermost=True))
        return _finite(value)

    def exponent(self) -> float:
        """Read what follows a ``^``."""
        sign = self._signs()
        if (token := self.peek()) is not None and token.kind == "number":
            self.place += 1
            return sign * number(token.text)
        if self.at("{", "("):
            return sign * self._group()
        raise Unreadable("an exponent that is no number")

    def _spread_by(self, value: float, uncertainty: float) -> None:
        self.spread = max(self.spread, abs(uncertainty / value) if value else 0.0)

    def _sum(self, *, outermost: bool = False) -> float:
        start = self.place
        value, plain = self._signs() * self._product(), self.place - start <= 2
        while self.at("+", "-"):
            minus = self.at("-")
            self.place += 1
            start = self.place
            other = self._product()
            if outermost and plain and self.place - start == 1:
                raise Unreadable("a range or an unfinished computation")
            value += -other if minus else other
        return value

    def _signs(self) -> float:
        sign = 1.0
        if self.at("-", "+"):
            sign = -1.0 if self.at("-") else 1.0
            self.place += 1
        return sign

    def _product(self) -> float:
        value, last = self._power()
        while True:
            place = self.place
            operator = "*" if self.take("*") else "/" if self.take("/") else ""
            try:
                factor, kind = self._power()
            except Unreadable:
                self.place = place  # a unit begins here, or what is left over is nothing
                return value
            if operator == "/":
                value = _divided(value, factor)
            elif operator == "*":
                value *= factor
            elif last == "number" and kind == "number":
                if self._is_mixed(value):
                    return value + factor / self._denominator()
                if factor == 1 and self.at("/"):  # 5 1/s
                    return value
                raise Unreadable("two numbers")
            elif last == "number" and kind == "fraction" and value == int(value) and 0 < factor < 1:
                value += factor  # a mixed number
            elif kind == "number":
                raise Unreadable("a number behind a bracket")
            else:
                value *= factor
            last = kind

    def _is_mixed(self, value: float) -> bool:
        after = self.peek(1)
        return self.at("/") and after is not None and after.kind == "number" and value == int(value)

    def _denominator(self) -> float:
        self.need("/")
        token = self.peek()
        assert token is not None
        self.place += 1
        return number(token.text) or math.nan

    def _power(self) -> tuple[float, str]:
        value, kind = self._atom()
        if self.take("^"):
            return _powered(value, self.exponent()), "power"
        return value, kind

    def _atom(self) -> tuple[float, str]:
        token = self.peek()
        if token is None:
            raise Unreadable("no number")
        if token.kind == "number":
            self.place += 1
            if "." in token.text:
                self._take_uncertainty()
            return number(token.text), "number"
        if token.text in _CONSTANTS and token.kind == "name":
            self.place += 1
            return _CONSTANTS[token.text], "constant"
        place = self.place
        try:
            if self.take("frac"):
                return _divided(self._argument(), self._argument()), "fraction"
            for name, function in _FUNCTIONS.items():
                if self.take(name):
                    return _applied(function, self._argument()), "root"
            if self.at("(", "{"):
                return self._group(), "group"
        except Unreadable:
            self.place = place
            raise
        raise Unreadable("no number")

    def _take_uncertainty(self) -> None:
        """Step over the digits of ``5.213(4)``."""
        bracket, digits, closing = self.peek(), self.peek(1), self.peek(2)
        found = (
            bracket is not None and digits is not None and closing is not None
            and bracket.glued and bracket.text == "(" and digits.kind == "number" and digits.text.isdigit()
            and closing.text == ")"
        )  # fmt: skip
        self.place += 3 * found

    def _argument(self) -> float:
        r"""Read what a function is of: a group, a number or a constant (``\ln 2``)."""
        if self.at("{", "("):
            return self._group()
        token = self.peek()
        if token is not None and token.kind == "number":
            self.place += 1
            return number(token.text)
        if token is not None and token.text in _CONSTANTS:
            self.place += 1
            return _CONSTANTS[token.text]
        raise Unreadable("no number")

    def _group(self) -> float:
        opening = self.peek()
        assert opening is not None
        if self._depth >= _DEEPEST:
            raise Unreadable("brackets nest too deeply")
        self.place += 1
        self._depth += 1
        try:
            value = self._sum()
            if self.take("±"):
                self._spread_by(value, self._sum())
        finally:
            self._depth -= 1
        self.need(_CLOSING[opening.text])
        return value


def _divided(value: float, divisor: float) -> float:
    if divisor == 0:
        raise Unreadable("a division by zero")
    return value / divisor


def _applied(function: Callable[[float], float], argument: float) -> float:
    try:
        return function(argument)
    except (OverflowError, ValueError):
        raise Unreadable("a number beyond all measure") from None


def _powered(base: float, exponent: float) -> float:
    try:
        value = math.pow(base, exponent)
    except (OverflowError, ValueError):
        raise Unreadable("a number beyond all measure") from None
    return _finite(value)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise Unreadable("a number beyond all measure")
    return value
