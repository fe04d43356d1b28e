"""The tree of a mathematical expression: the output of the parser and the input of every computation."""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Number:
    """A rational number."""

    value: Fraction


@dataclass(frozen=True, slots=True)
class Symbol:
    r"""A variable, a parameter, a named object, or one of the constants ``e``, ``i``, ``\\pi``, ``\\infty``."""

    name: str


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation or a function, by name; one that is not known (``f(2)``) has a name that starts with ``call``."""

    operation: str
    arguments: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class MathVerifyNode:
    """A whole expression in math-verify's grammar."""

    text: str


Node = Number | Symbol | Operation | MathVerifyNode
