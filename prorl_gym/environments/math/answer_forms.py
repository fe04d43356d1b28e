"""The forms of a parsed answer."""

from dataclasses import dataclass
from fractions import Fraction

from prorl_gym.environments.math.expressions import Node

Dimension = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class WordAnswer:
    """Words, in one spelling."""

    text: str


@dataclass(frozen=True, slots=True)
class Unit:
    """A product of powers of units. ``dimension`` is ``None`` for a noun."""

    factor: Fraction = Fraction(1)
    dimension: Dimension | None = None
    noun: str = ""


@dataclass(frozen=True, slots=True)
class Amount:
    """A number or an expression, perhaps with a unit."""

    value: Node
    unit: Unit | None = None
    percent: bool = False
    places: int | None = None
    """Digits behind the point of a decimal."""


@dataclass(frozen=True, slots=True)
class AnswerCollection:
    """Items without order: a set, or several answers. Only in a set do duplicates not count."""

    items: tuple["Form", ...]
    is_set: bool


@dataclass(frozen=True, slots=True)
class BracketedTuple:
    """Items with an order, in brackets: a point, a vector, or an interval."""

    items: tuple["Form", ...]
    opening: str
    closing: str


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval of real numbers; a point has both ends equal."""

    low: Node
    high: Node
    closed_low: bool
    closed_high: bool


@dataclass(frozen=True, slots=True)
class RealSet:
    """A set of real numbers: disjoint intervals in ascending order."""

    intervals: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class Equation:
    """``difference = 0``, which was not solved for anything."""

    difference: Node
    is_negated: bool = False
    """With ``!=`` instead."""


@dataclass(frozen=True, slots=True)
class Inequality:
    """``difference > 0``, or ``>= 0``, which was not solved."""

    difference: Node
    strict: bool


@dataclass(frozen=True, slots=True)
class Ordering:
    """Expressions in ascending order: ``f(2) < f(1) < f(4)``."""

    sides: tuple[Node, ...]
    strict: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Labelled:
    """An answer behind a name: ``x = 5``, ``f(x) = x^2``."""

    name: str
    form: "Form"
    difference: Node | None
    """Name minus answer, when both are expressions with variables: the equation of a curve."""
    normal: bool = False
    """Written as ``x - 5 = 0``: the equation of a line, which is ``x = 5`` but not ``5``."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A value for each of several names: ``x = 1, y = 2``, ``x = y = 1``, ``(x, y) = (1, 2)``."""

    names: tuple[str, ...]
    values: tuple["Form", ...]
    is_tuple: bool = False
    """Written as a tuple, whose order counts where only one side has names."""


@dataclass(frozen=True, slots=True)
class Ambiguous:
    r"""An answer with two readings, such as one with two ``\pm``: it equals what each of its readings equals."""

    readings: tuple["Form", ...]


@dataclass(frozen=True, slots=True)
class CombinationOrPoint:
    """``C(6,3)``: a number of ways to choose, or a point with a name, as the other answer requires."""

    count: Amount
    point: "Form"


@dataclass(frozen=True, slots=True)
class Piecewise:
    """A function by cases: on each set of real numbers a formula of one variable."""

    name: str
    cases: tuple[tuple[Node, RealSet], ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A proportion such as ``3:2``."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class TimeOfDay:
    """A time of day, in 24 hours; without ``has_meridiem`` it may be in either half of the day."""

    hour: int
    minute: int
    second: int
    has_meridiem: bool


@dataclass(frozen=True, slots=True)
class BasedNumeral:
    """A numeral in a base other than ten."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class IntegerFamily:
    """An answer with a parameter that runs through the integers, or through the natural numbers."""

    letter: str
    form: "Form"
    domain: str = "Z"


@dataclass(frozen=True, slots=True)
class OptionChoice:
    """The letter of an option and its text: ``(C) 5``."""

    letter: str
    form: "Form"


def based_value(numeral: BasedNumeral) -> Fraction:
    whole, _, fraction = numeral.digits.partition(".")
    return Fraction(int(f"{whole}{fraction}" or "0", numeral.base), numeral.base ** len(fraction))


Form = (
    Ambiguous
    | CombinationOrPoint
    | IntegerFamily
    | OptionChoice
    | Labelled
    | Assignment
    | AnswerCollection
    | BracketedTuple
    | Matrix
    | Piecewise
    | RealSet
    | TimeOfDay
    | Ratio
    | BasedNumeral
    | Equation
    | Inequality
    | Ordering
    | WordAnswer
    | Amount
)
"""The earlier one of two kinds decides how they compare (``answer_equality``)."""
