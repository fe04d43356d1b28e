"""Reading products of units: ``kg m/s^2``, ``J mol^{-1} K^{-1}``, ``meters per second squared``."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

from prorl_gym.environments.stem import units
from prorl_gym.environments.stem.magnitude import Reader
from prorl_gym.environments.stem.tokens import Token, Unreadable, tokens
from prorl_gym.environments.stem.units import Flavour, Unit

_POWER_WORDS = {"square": 2.0, "squared": 2.0, "sq": 2.0, "cubic": 3.0, "cubed": 3.0, "cu": 3.0}
_LARGEST_POWER = 24.0
_DEEPEST = 12
_ZERO = {"degree_Celsius": 273.15, "degree_Fahrenheit": 459.67}


@dataclass(frozen=True, slots=True)
class Measure:
    """A product of units, in base units."""

    factor: float = 1.0
    dimension: tuple[tuple[str, float], ...] = ()
    flavours: tuple[tuple[Flavour, float], ...] = ()
    zero: float = 0.0
    """Where the scale begins, in its own unit: a temperature in °C and 273.15 give kelvins."""
    name: str = ""
    """Of a single unit."""
    given: bool = False
    """Whether there is any unit at all."""


@dataclass(frozen=True, slots=True)
class _Factor:
    unit: Unit
    power: float


@dataclass(frozen=True, slots=True)
class Convention:
    """How to read what authors mean in two ways."""

    all_below: bool = True
    """``J/mol K`` is J/(mol K), otherwise (J/mol) K."""
    joined: bool = False
    """``ms^{-1}`` is m s^{-1}, otherwise 1/ms."""


CONVENTIONS = tuple(Convention(all_below, joined) for all_below, joined in product((True, False), (False, True)))


def measure(found: Sequence[Token], convention: Convention) -> tuple[Measure, int]:
    """Read the unit that a row of tokens begins with.

    Args:
        found: what follows the number.
        convention: how to read it where two readings are in use.

    Returns:
        The unit and how many tokens it takes; no unit when there is none.

    Raises:
        Unreadable: a unit that is broken off.
    """
    reader = _Units(found, convention)
    factors = reader.product(outermost=True)
    return _measured(factors), reader.place


def unit_called(text: str) -> Measure | None:
    """Return the unit that a whole text names, or ``None``."""
    try:
        found = tokens(text)
        result, length = measure(found, Convention())
    except Unreadable:
        return None
    return result if result.given and length == len(found) else None


class _Units(Reader):
    def __init__(self, found: Sequence[Token], convention: Convention) -> None:
        super().__init__(found)
        self._convention = convention
        self._below = False
        self._nesting = 0

    def product(self, *, outermost: bool = False) -> list[_Factor]:
        factors: list[_Factor] = []
        below = False
        while True:
            place = self.place
            divides = self.take("/", "per")
            times = not divides and (self.take("*") or self._takes_joint())
            inverted = divides or (self._convention.all_below and below)
            outer, self._below = self._below, self._below or inverted
            more = self._factor()
            self._below = outer
            if more is None:
                self.place = place
                if (divides or times) and not outermost:
                    raise Unreadable("a unit that is broken off")
                return factors
            below = inverted
            factors += [_Factor(each.unit, -each.power if inverted else each.power) for each in more]

    def _factor(self) -> list[_Factor] | None:
        if self._nesting > _DEEPEST:
            raise Unreadable("a unit that nests too deeply")
        self._nesting += 1
        try:
            return self._any_factor()
        finally:
            self._nesting -= 1

    def _any_factor(self) -> list[_Factor] | None:
        if self.at("1") or self._one_over():
            self.place += 1
            self.need("/")
            return _raised(self._factor() or _broken(), -1.0)
        token = self.peek()
        if token is None or token.kind == "number":
            return None
        if token.text in _POWER_WORDS and token.text not in ("squared", "cubed"):
            self.place += 1
            return _raised(self._factor() or _broken(), _POWER_WORDS[token.text])
        if token.text == "frac":
            self.place += 1
            above, below = self._group_of_units(may_be_one=True), self._group_of_units()
            return self._powered([*above, *_raised(below, -1.0)])
        if token.text == "sqrt":
            self.place += 1
            return _raised(self._group_of_units(), 0.5)
        if token.text in ("(", "{"):
            return self._powered(self._group_of_units())
        return self._named(token)

    def _named(self, token: Token) -> list[_Factor] | None:
        if token.kind != "name":
            return None
        following = self.peek(1)
        if following is not None and following.kind == "name" and (unit := units.find(following.text)) is not None:
            if (power_of_ten := units.power_of_ten(token.text)) is not None:
                self.place += 2
                scaled = Unit(unit.name, unit.factor * 10.0**power_of_ten, unit.dimension, unit.flavour)
                return self._powered([_Factor(scaled, 1.0)])
        elif token.text == "in" and following is not None and following.kind == "name":
            return None  # "5 N in total"
        if (factors := self._product_called(token.text)) is not None:
            self.place += 1
            return [*factors[:-1], *self._powered(factors[-1:])]
        unit = units.find(token.text)
        if unit is None:
            return None
        self.place += 1
        return self._powered([_Factor(unit, 1.0)])

    def _product_called(self, name: str) -> list[_Factor] | None:
        """Return the factors of a name that stands for a product: ``kWh``, ``Jmol`` in ``Jmol^{-1}``."""
        if name in units.COMPOUNDS:
            return _compound(units.COMPOUNDS[name])
        if not self._below and not self._is_raised() and not self.at("/", ahead=1):
            return None
        if name in units.EITHER and self._convention.joined and (self._below or self._is_raised(to_negative=True)):
            return _compound(units.EITHER[name])
        symbols = units.run_together(name)
        return [_Factor(unit, 1.0) for symbol in symbols if (unit := units.find(symbol)) is not None] or None

    def _is_raised(self, *, to_negative: bool = False) -> bool:
        """Whether the name that comes next has an exponent."""
        after = [token.text for ahead in (1, 2, 3) if (token := self.peek(ahead)) is not None]
        sign = self.peek(1)
        if after[:1] == ["^"]:
            return not to_negative or "-" in after[1:]
        if sign is None or not sign.glued:
            return False
        return (sign.text == "-" and after[1:2] != [] and after[1].isdigit()) or (
            not to_negative and sign.text.isdigit()
        )

    def _powered(self, factors: list[_Factor]) -> list[_Factor]:
        token, following = self.peek(), self.peek(1)
        if token is not None and token.text in ("squared", "cubed"):
            self.place += 1
            return _raised(factors, _POWER_WORDS[token.text])
        if self.take("^"):
            return _raised(factors, self.exponent())
        begins_another = following is not None and following.glued and following.kind == "name"  # 2h30min
        if token is not None and token.glued and token.kind == "number" and token.text.isdigit():
            return factors if begins_another and len(token.text) > 1 else _raised(factors, self.exponent())  # m2
        signed = token is not None and token.glued and token.text in "+-" and token.kind == "sign"
        if signed and following is not None and following.glued and following.text.isdigit():
            return _raised(factors, self.exponent())  # s-1
        return factors

    def _group_of_units(self, *, may_be_one: bool = False) -> list[_Factor]:
        closing = {"(": ")", "{": "}"}
        opening = self.peek()
        if opening is None or opening.text not in closing:
            raise Unreadable("a unit that is broken off")
        self.place += 1
        one = self.peek()
        if may_be_one and one is not None and one.text == "1" and self.at(closing[opening.text], ahead=1):
            self.place += 1
            factors: list[_Factor] = []
        else:
            factors = self.product() or _broken()
        self.need(closing[opening.text])
        return factors

    def _one_over(self) -> bool:
        token = self.peek()
        return token is not None and token.text == "1" and self.at("/", ahead=1)

    def _takes_joint(self) -> bool:
        """Step over the hyphen of ``kilowatt-hours`` or the point of ``m.s^{-1}``."""
        token, following = self.peek(), self.peek(1)
        found = (
            self.place > 0 and token is not None and following is not None
            and token.text in ("-", ".") and token.glued and following.glued and following.kind == "name"
        )  # fmt: skip
        self.place += found
        return found


@cache
def _compound(written: str) -> list[_Factor]:
    return _Units(tokens(written), Convention()).product()


def _raised(factors: Iterable[_Factor], power: float) -> list[_Factor]:
    if not -_LARGEST_POWER <= power <= _LARGEST_POWER:
        raise Unreadable("a power beyond all measure")
    return [_Factor(each.unit, each.power * power) for each in factors]


def _broken() -> list[_Factor]:
    raise Unreadable("a unit that is broken off")


def _measured(factors: Sequence[_Factor]) -> Measure:
    if not factors:
        return Measure()
    factor = 1.0
    dimension: dict[str, float] = {}
    flavours: dict[Flavour, float] = {}
    for each in factors:
        if abs(each.power) > _LARGEST_POWER:
            raise Unreadable("a power beyond all measure")
        try:
            factor *= each.unit.factor**each.power
        except OverflowError:
            raise Unreadable("a unit beyond all measure") from None
        for name, power in each.unit.dimension:
            dimension[name] = dimension.get(name, 0.0) + power * each.power
        if each.unit.flavour:
            flavours[each.unit.flavour] = flavours.get(each.unit.flavour, 0.0) + each.power
    single = factors[0].unit.name if len(factors) == 1 and factors[0].power == 1 else ""
    return Measure(
        factor=factor,
        dimension=tuple(sorted((name, round(power, 6)) for name, power in dimension.items() if abs(power) > 1e-6)),
        flavours=tuple(sorted((name, round(power, 6)) for name, power in flavours.items() if abs(power) > 1e-6)),
        zero=_ZERO.get(single, 0.0),
        name=single,
        given=True,
    )
