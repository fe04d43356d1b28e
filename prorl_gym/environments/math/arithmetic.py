"""Evaluates expressions: rational numbers exactly, others with the current precision of mpmath."""

import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from importlib import import_module
from typing import Any

from mpmath import mp as _mp  # pyright: ignore[reportMissingTypeStubs]

from prorl_gym.environments.math.expressions import (
    MathVerifyNode,
    Node,
    Number,
    Operation,
    Symbol,
    UnreadableExpressionError,
    free_symbols,
)

mp: Any = _mp
"""The library has no types."""
_MAX_BITS = 200_000
"""Largest exact power or factorial, in bits."""
_MAX_MAGNITUDE = 1e6
"""Largest natural logarithm of a power that is computed at all."""
_LARGEST_FACTORIAL = 5000
"""Largest number whose factorial or binomial coefficients are computed."""
Value = Any
"""``Fraction``, or a real or complex number of mpmath."""
_CONSTANTS: dict[str, Callable[[], Value]] = {
    "e": lambda: +mp.e, "i": lambda: mp.mpc(0, 1), "\\pi": lambda: +mp.pi, "\\infty": lambda: mp.inf,
}  # fmt: skip
_ARITHMETIC: dict[str, Callable[[Value, Value], Value]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": lambda one, other: one / other,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[[Value], Value]] = {
    "sin": mp.sin, "cos": mp.cos, "tan": mp.tan, "cot": mp.cot, "sec": mp.sec, "csc": mp.csc,
    "arcsin": mp.asin, "arccos": mp.acos, "arctan": mp.atan, "asin": mp.asin, "acos": mp.acos, "atan": mp.atan,
    "arccot": lambda number: mp.pi / 2 - mp.atan(number),
    "arcsec": mp.asec, "arccsc": mp.acsc, "coth": mp.coth, "sech": mp.sech, "csch": mp.csch, "sgn": mp.sign,
    **dict.fromkeys(("arcsinh", "asinh", "arsinh"), mp.asinh),
    **dict.fromkeys(("arccosh", "acosh", "arcosh"), mp.acosh),
    **dict.fromkeys(("arctanh", "atanh", "artanh"), mp.atanh),
    "cis": mp.expj, "sinh": mp.sinh, "cosh": mp.cosh, "tanh": mp.tanh, "ln": mp.log, "exp": mp.exp,
}  # fmt: skip


class UndefinedError(ArithmeticError):
    """The expression has no value here: a division by zero, or none in real numbers."""


def to_mpmath(found: Value) -> Value:
    """Return a value as mpmath's number. Raises ``UndefinedError``: it is not a number."""
    number = mp.mpf(found.numerator) / found.denominator if isinstance(found, Fraction) else found
    if mp.isnan(number):
        raise UndefinedError("not a number")
    return number


def variable_names(node: Node) -> frozenset[str]:
    """Return the names of the variables, also of an expression in math-verify's grammar."""
    if isinstance(node, MathVerifyNode):
        return frozenset(str(symbol) for symbol in _sympy_tree(node.text).free_symbols)
    return free_symbols(node)


def evaluate(node: Node, point: Mapping[str, Fraction] | None = None, real: bool = False) -> Value:
    """Return the value of an expression at a point with the current precision.

    Raises ``UndefinedError``: it has no value, or ``real`` and some part of it is not real; ``OverflowError``: it is
    too large to compute.
    """
    match node:
        case Number(number):
            return number
        case Symbol(name):
            if point is not None and name in point:
                return point[name]
            if name == "i" and real:
                raise UndefinedError("not real")
            return _CONSTANTS[name]()
        case MathVerifyNode(text):
            return _sympy_value(text, point or {})
        case Operation(operation, arguments):
            values = [evaluate(argument, point, real) for argument in arguments]
            if operation.startswith("call "):
                name = operation.removeprefix("call ")
                # A letter that also occurs without brackets is a variable, and a sum in brackets is its other factor.
                is_sum = len(arguments) == 1 and isinstance(arguments[0], Operation)
                factor = (point or {}).get(name) if is_sum else None
                return _placeholder_value(name, values) if factor is None else _apply("*", [factor, *values], real)
            return _apply(operation, values, real)


def logarithm(node: Node) -> Value:
    """Return the natural logarithm of a positive number, which may be too large to compute. Raises as ``evaluate``."""
    try:
        found = evaluate(node)
    except OverflowError:
        match node:
            case Operation("^", (base, exponent)):
                return to_mpmath(evaluate(exponent)) * logarithm(base)
            case Operation("*", (one, other)):
                return logarithm(one) + logarithm(other)
            case Operation("/", (one, other)):
                return logarithm(one) - logarithm(other)
            case Operation("!", (number,)):
                return mp.loggamma(to_mpmath(evaluate(number)) + 1)
            case _:
                raise
    if not _is_real(found) or found <= 0:
        raise UndefinedError("the logarithm of what is not positive")
    return mp.log(to_mpmath(found))


@lru_cache(maxsize=8)
def _sympy_tree(text: str) -> Any:
    sympy: Any = import_module("sympy")
    grammar: Any = import_module("latex2sympy2_extended")
    try:
        tree: Any = grammar.latex2sympy(text)
    except Exception as error:  # the parser raises exceptions of many types
        raise UnreadableExpressionError(f"{type(error).__name__} in math-verify's grammar") from None
    if not isinstance(tree, sympy.Expr):
        raise UnreadableExpressionError("no expression in math-verify's grammar")
    return tree.subs({sympy.Symbol("i"): sympy.I, sympy.Symbol("e"): sympy.E}).doit()


def _sympy_value(text: str, point: Mapping[str, Fraction]) -> Value:
    sympy: Any = import_module("sympy")
    numbers = {sympy.Symbol(name): sympy.Rational(at.numerator, at.denominator) for name, at in point.items()}
    found = _sympy_tree(text).subs(numbers)
    if found.is_Rational:
        return Fraction(int(found.p), int(found.q))
    found = sympy.N(found, mp.dps + 5)
    if not found.is_number or not found.is_finite:
        raise ArithmeticError("no numerical value")
    real, imaginary = found.as_real_imag()
    number = mp.mpf(str(real))
    return number if imaginary == 0 else mp.mpc(number, mp.mpf(str(imaginary)))


def _placeholder_value(name: str, arguments: list[Value]) -> Fraction:
    """Return a pseudo-random value of an unknown function: the same for the same arguments."""
    spelled = [str(each) if isinstance(each, Fraction) else mp.nstr(to_mpmath(each), 25) for each in arguments]
    digest = blake2b(f"{name}{spelled}".encode(), digest_size=4).digest()
    return Fraction(int.from_bytes(digest), 2**32)


def _apply(operation: str, values: list[Value], real: bool) -> Value:
    first = values[0]
    match operation:
        case "neg":
            return -first
        case "+" | "-" | "*" | "/":
            one, other = values if all(isinstance(each, Fraction) for each in values) else map(to_mpmath, values)
            if operation == "/" and other == 0:
                raise UndefinedError("a division by zero")
            return _ARITHMETIC[operation](one, other)
        case "^":
            return _power(first, values[1], real)
        case "root":
            if not isinstance(first, Fraction) or first == 0:
                raise UndefinedError("an odd root")
            return _power(values[1], 1 / first, real)
        case "abs":
            return abs(first)
        case "degrees":
            return to_mpmath(first) * mp.pi / 180
        case "!":
            return _factorial(first)
        case "gcd" | "lcm" | "max" | "min" | "mod":
            return _apply_operator(operation, values)
        case "conj":
            return first if isinstance(first, Fraction) else mp.conj(first)
        case "gamma":
            return _factorial(first - 1)
        case "!!":
            if not _is_natural(first) or first > _LARGEST_FACTORIAL:
                raise UndefinedError("a double factorial of no small natural number")
            return Fraction(math.prod(range(int(first), 0, -2)))
        case "binom":
            if any(abs(value) > _LARGEST_FACTORIAL for value in values):
                raise OverflowError("a binomial coefficient too large")
            if all(map(_is_natural, values)):
                return Fraction(math.comb(*map(int, values)))
            return mp.binomial(*map(to_mpmath, values))
        case "floor" | "ceil":
            return _round_to_integer(first, up=operation == "ceil")
        case "logarithm" | "lg" | "log":
            base, argument = values if operation == "logarithm" else (Fraction(10), first)
            return _apply_function("ln", argument, real) / _apply_function("ln", base, real)
        case _:
            return _apply_function(operation, first, real)


def _power(base: Value, exponent: Value, real: bool) -> Value:
    if base == 0 and (not _is_real(exponent) or exponent <= 0):
        raise UndefinedError("a power of zero")
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        exact = _exact_power(base, exponent)
        if exact is not None:
            return exact
    if _is_real(base) and base < 0:
        if isinstance(exponent, Fraction) and exponent.denominator % 2:  # real roots of odd order
            size = _power(-base, exponent, real)
            return -size if exponent.numerator % 2 else size
        if real:
            raise UndefinedError("not real")
    one, other = to_mpmath(base), to_mpmath(exponent)
    if mp.isinf(one) or mp.isinf(other):
        raise UndefinedError("a power of infinity")
    if one != 0 and abs(other) * (abs(mp.log(abs(one))) + 4) > _MAX_MAGNITUDE:
        raise OverflowError("a power too large")
    return mp.power(one, other)


def _is_real(found: Value) -> bool:
    return not isinstance(found, mp.mpc)


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator == 1:
        if size > 1 and size * abs(exponent.numerator) > _MAX_BITS:
            if size * abs(exponent.numerator) > _MAX_MAGNITUDE * 10:
                raise OverflowError("a power too large")
            return None
        return base**exponent.numerator
    if base < 0 or exponent.denominator > 64 or size * abs(exponent.numerator) > _MAX_BITS:
        return None
    roots = [_exact_root(part, exponent.denominator) for part in (base.numerator, base.denominator)]
    return Fraction(*roots) ** exponent.numerator if None not in roots else None  # pyright: ignore[reportCallIssue, reportArgumentType]


def _exact_root(number: int, index: int) -> int | None:
    low, high = 0, 1 << (number.bit_length() // index + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**index <= number else (low, middle - 1)
    return low if low**index == number else None


def _factorial(number: Value) -> Value:
    if abs(number) > _LARGEST_FACTORIAL:
        raise OverflowError("a factorial too large")
    return Fraction(math.factorial(int(number))) if _is_natural(number) else mp.factorial(to_mpmath(number))


def _is_natural(found: Value) -> bool:
    return isinstance(found, Fraction) and found.denominator == 1 and found >= 0


def _apply_operator(operation: str, values: list[Value]) -> Value:
    if operation in ("max", "min"):
        if not all(map(_is_real, values)):
            raise UndefinedError("not real")
        return (max if operation == "max" else min)(values, key=to_mpmath)
    if not all(isinstance(each, Fraction) and each.denominator == 1 for each in values):
        raise UndefinedError("no integers")
    numbers = [int(each) for each in values]
    if operation == "mod":
        if numbers[1] <= 0:
            raise UndefinedError("no modulus")
        return Fraction(numbers[0] % numbers[1])
    return Fraction((math.gcd if operation == "gcd" else math.lcm)(*numbers))


def _round_to_integer(found: Value, *, up: bool) -> Fraction:
    if not _is_real(found):
        raise UndefinedError("not real")
    if isinstance(found, Fraction):
        return Fraction(math.ceil(found) if up else math.floor(found))
    if mp.isinf(found) or abs(found) > 1e30:
        raise OverflowError("too large")
    return Fraction(int(mp.ceil(found) if up else mp.floor(found)))


def _apply_function(name: str, argument: Value, real: bool) -> Value:
    if name == "cbrt":
        return _power(argument, Fraction(1, 3), real)
    number = to_mpmath(argument)
    if mp.isinf(number) or abs(number) > _MAX_MAGNITUDE:
        if name != "ln":
            raise OverflowError("an argument too large")
    if name == "ln" and number == 0:
        raise UndefinedError("the logarithm of zero")
    if name not in _FUNCTIONS:
        raise UnreadableExpressionError(f"\\{name} is not known")
    found = _FUNCTIONS[name](number)
    if abs(found) > mp.mpf(10) ** (mp.dps // 2) and name in ("tan", "cot", "sec", "csc"):
        raise UndefinedError("a pole")
    if real and not _is_real(found):
        raise UndefinedError("not real")
    return found
