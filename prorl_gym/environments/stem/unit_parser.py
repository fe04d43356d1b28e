"""Parses products of units: ``kg m/s^2``, ``J mol^{-1} K^{-1}``, ``meters per second squared``."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import product

from prorl_gym.environments.answers import units
from prorl_gym.environments.answers.units import QuantityKind, Unit
from prorl_gym.environments.stem.number_parser import NumberParser, Token, UnreadableQuantityError, tokenize

_POWER_WORDS = {"square": 2.0, "squared": 2.0, "sq": 2.0, "cubic": 3.0, "cubed": 3.0, "cu": 3.0}
_MAX_POWER = 24.0
_MAX_DEPTH = 12
_ZERO_POINTS = {"degree_Celsius": 273.15, "degree_Fahrenheit": 459.67}


@dataclass(frozen=True, slots=True)
class UnitProduct:
    """A product of units, in base units."""

    factor: float = 1.0
    dimension: tuple[tuple[str, float], ...] = ()
    kinds: tuple[tuple[QuantityKind, float], ...] = ()
    zero_point: float = 0.0
    """Offset that is added to a number on this scale before it is converted: 273.15 for °C."""
    name: str = ""
    """Name of a single unit; empty for a product."""
    is_given: bool = False
    """Whether there is any unit at all."""


@dataclass(frozen=True, slots=True)
class Convention:
    """A reading of spellings that authors use in two ways."""

    slash_covers_rest: bool = True
    """``J/mol K`` is J/(mol K), otherwise (J/mol) K."""
    splits_prefix: bool = False
    """``ms^{-1}`` is m s^{-1}, otherwise 1/ms."""


def parse_units(tokens: Sequence[Token], convention: Convention) -> tuple[UnitProduct, int]:
    """Return the unit that a sequence of tokens begins with, and its length in tokens.

    Raises ``UnreadableQuantityError``: a unit that is broken off.
    """
    parser = _UnitParser(tokens, convention)
    factors = parser.parse_product(outermost=True)
    return _multiply(factors), parser.position


def unit_named(text: str) -> UnitProduct | None:
    """Return the unit that a whole text names, or ``None``."""
    try:
        tokens = tokenize(text)
        unit, length = parse_units(tokens, Convention())
    except UnreadableQuantityError:
        return None
    return unit if unit.is_given and length == len(tokens) else None


@dataclass(frozen=True, slots=True)
class _Factor:
    unit: Unit
    power: float


class _UnitParser(NumberParser):
    def __init__(self, tokens: Sequence[Token], convention: Convention) -> None:
        super().__init__(tokens)
        self._convention = convention
        self._in_denominator = False
        self._nesting = 0

    def parse_product(self, *, outermost: bool = False) -> list[_Factor]:
        factors: list[_Factor] = []
        after_slash = False
        while True:
            place = self.position
            divides = self.accept("/", "per")
            times = not divides and (self.accept("*") or self._accept_joint())
            inverted = divides or (self._convention.slash_covers_rest and after_slash)
            outer, self._in_denominator = self._in_denominator, self._in_denominator or inverted
            more = self._factor()
            self._in_denominator = outer
            if more is None:
                self.position = place
                if (divides or times) and not outermost:
                    raise UnreadableQuantityError("a unit that is broken off")
                return factors
            after_slash = inverted
            factors += [_Factor(each.unit, -each.power if inverted else each.power) for each in more]

    def _factor(self) -> list[_Factor] | None:
        if self._nesting > _MAX_DEPTH:
            raise UnreadableQuantityError("a unit that nests too deeply")
        self._nesting += 1
        try:
            return self._nested_factor()
        finally:
            self._nesting -= 1

    def _nested_factor(self) -> list[_Factor] | None:
        token = self.peek()
        if token is not None and token.text == "1" and self.is_next("/", ahead=1):
            self.position += 2
            return _raised(self._factor() or _raise_unreadable(), -1.0)
        if token is None or token.kind == "number":
            return None
        if token.text in _POWER_WORDS and token.text not in ("squared", "cubed"):
            self.position += 1
            return _raised(self._factor() or _raise_unreadable(), _POWER_WORDS[token.text])
        if token.text == "frac":
            self.position += 1
            above, below = self._group_of_units(may_be_one=True), self._group_of_units()
            return self._powered([*above, *_raised(below, -1.0)])
        if token.text == "sqrt":
            self.position += 1
            return _raised(self._group_of_units(), 0.5)
        if token.text in ("(", "{"):
            return self._powered(self._group_of_units())
        return self._named(token)

    def _named(self, token: Token) -> list[_Factor] | None:
        if token.kind != "name":
            return None
        following = self.peek(1)
        if following is not None and following.kind == "name" and (unit := units.find_unit(following.text)) is not None:
            if (power_of_ten := units.PREFIX_WORDS.get(token.text)) is not None:
                self.position += 2
                scaled = Unit(unit.name, unit.factor * Fraction(10) ** power_of_ten, unit.dimension, unit.kind)
                return self._powered([_Factor(scaled, 1.0)])
        elif token.text == "in" and following is not None and following.kind == "name":
            return None  # "5 N in total"
        if (factors := self._product_called(token.text)) is not None:
            self.position += 1
            return [*factors[:-1], *self._powered(factors[-1:])]
        unit = units.find_unit(token.text)
        if unit is None:
            return None
        self.position += 1
        return self._powered([_Factor(unit, 1.0)])

    def _product_called(self, name: str) -> list[_Factor] | None:
        """Return the factors of a name that is a product: ``kWh``, ``Jmol`` in ``Jmol^{-1}``."""
        if name in units.COMPOUNDS:
            return _compound(units.COMPOUNDS[name])
        if not self._in_denominator and not self._is_raised() and not self.is_next("/", ahead=1):
            return None
        if (
            name in units.AMBIGUOUS_PRODUCTS
            and self._convention.splits_prefix
            and (self._in_denominator or self._is_raised(to_negative=True))
        ):
            return _compound(units.AMBIGUOUS_PRODUCTS[name])
        symbols = units.split_unit_product(name)
        return [_Factor(unit, 1.0) for symbol in symbols if (unit := units.find_unit(symbol)) is not None] or None

    def _is_raised(self, *, to_negative: bool = False) -> bool:
        """Whether the name that comes next has an exponent."""
        after = [token.text for ahead in (1, 2, 3) if (token := self.peek(ahead)) is not None]
        sign = self.peek(1)
        if after[:1] == ["^"]:
            return not to_negative or "-" in after[1:]
        if sign is None or not sign.is_adjacent:
            return False
        return (sign.text == "-" and after[1:2] != [] and after[1].isdigit()) or (
            not to_negative and sign.text.isdigit()
        )

    def _powered(self, factors: list[_Factor]) -> list[_Factor]:
        token, following = self.peek(), self.peek(1)
        if token is not None and token.text in ("squared", "cubed"):
            self.position += 1
            return _raised(factors, _POWER_WORDS[token.text])
        if self.accept("^"):
            return _raised(factors, self.parse_exponent())
        begins_another = following is not None and following.is_adjacent and following.kind == "name"  # 2h30min
        if token is not None and token.is_adjacent and token.kind == "number" and token.text.isdigit():
            return factors if begins_another and len(token.text) > 1 else _raised(factors, self.parse_exponent())  # m2
        signed = token is not None and token.is_adjacent and token.text in "+-" and token.kind == "sign"
        if signed and following is not None and following.is_adjacent and following.text.isdigit():
            return _raised(factors, self.parse_exponent())  # s-1
        return factors

    def _group_of_units(self, *, may_be_one: bool = False) -> list[_Factor]:
        closing = {"(": ")", "{": "}"}
        opening = self.peek()
        if opening is None or opening.text not in closing:
            raise UnreadableQuantityError("a unit that is broken off")
        self.position += 1
        one = self.peek()
        if may_be_one and one is not None and one.text == "1" and self.is_next(closing[opening.text], ahead=1):
            self.position += 1
            factors: list[_Factor] = []
        else:
            factors = self.parse_product() or _raise_unreadable()
        self.expect(closing[opening.text])
        return factors

    def _accept_joint(self) -> bool:
        """Step over the hyphen of ``kilowatt-hours`` or the point of ``m.s^{-1}``."""
        token, following = self.peek(), self.peek(1)
        is_joint = (
            self.position > 0 and token is not None and following is not None
            and token.text in ("-", ".") and token.is_adjacent and following.is_adjacent and following.kind == "name"
        )  # fmt: skip
        self.position += is_joint
        return is_joint


def _raised(factors: Iterable[_Factor], power: float) -> list[_Factor]:
    if not -_MAX_POWER <= power <= _MAX_POWER:
        raise UnreadableQuantityError("a power too large")
    return [_Factor(each.unit, each.power * power) for each in factors]


def _raise_unreadable() -> list[_Factor]:
    raise UnreadableQuantityError("a unit that is broken off")


@cache
def _compound(written: str) -> list[_Factor]:
    return _UnitParser(tokenize(written), Convention()).parse_product()


def _multiply(factors: Sequence[_Factor]) -> UnitProduct:
    if not factors:
        return UnitProduct()
    factor = 1.0
    dimension: dict[str, float] = {}
    kinds: dict[QuantityKind, float] = {}
    for each in factors:
        if abs(each.power) > _MAX_POWER:
            raise UnreadableQuantityError("a power too large")
        try:
            factor *= each.unit.factor**each.power
        except OverflowError:
            raise UnreadableQuantityError("a unit too large") from None
        for name, power in each.unit.dimension:
            dimension[name] = dimension.get(name, 0.0) + power * each.power
        if each.unit.kind:
            kinds[each.unit.kind] = kinds.get(each.unit.kind, 0.0) + each.power
    single = factors[0].unit.name if len(factors) == 1 and factors[0].power == 1 else ""
    return UnitProduct(
        factor=factor,
        dimension=tuple(sorted((name, round(power, 6)) for name, power in dimension.items() if abs(power) > 1e-6)),
        kinds=tuple(sorted((name, round(power, 6)) for name, power in kinds.items() if abs(power) > 1e-6)),
        zero_point=_ZERO_POINTS.get(single, 0.0),
        name=single,
        is_given=True,
    )


CONVENTIONS = tuple(Convention(*choices) for choices in product((True, False), (False, True)))
