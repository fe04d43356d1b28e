r"""What sympy prints, in all settings of its printers, is read as the value that was printed.

Not read: ``\log`` and ``log`` as natural logarithms, a dot between thin spaces as a product (``mul_symbol="ldot"``),
a factor behind a folded fraction as divided by (``1 / 2 x``), and a matrix of one number.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prorl_gym.environments.math.answer_equality import is_accepted

sp: Any = import_module("sympy")
X, Y = sp.symbols("x y", real=True)
thorough = settings(max_examples=100, deadline=None, derandomize=True)

RATIONALS = st.builds(sp.Rational, st.integers(-20, 20), st.integers(1, 15))
ROOTS = st.builds(sp.root, st.integers(2, 30).map(sp.Integer), st.sampled_from([2, 3, 4]))
SIMPLE = st.one_of(st.integers(-12, 12).map(sp.Integer), RATIONALS, ROOTS)
CONSTANTS = st.one_of(
    st.sampled_from([sp.pi, sp.E]),
    st.builds(lambda f, p: f(p * sp.pi / 9), st.sampled_from([sp.sin, sp.cos, sp.tan]), st.integers(1, 4)),
    st.builds(lambda f, p: f(sp.Rational(p, 5)), st.sampled_from([sp.asin, sp.acos, sp.atan]), st.integers(1, 4)),
    st.builds(lambda f, n: f(sp.Rational(n, 2)), st.sampled_from([sp.log, sp.exp]), st.integers(3, 20)),
    st.builds(lambda n: sp.factorial(n, evaluate=False), st.integers(2, 9)),
    st.builds(lambda n, k: sp.binomial(n, k, evaluate=False), st.integers(5, 9), st.integers(1, 4)),
)


def combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda a, b: a * b, inner, inner),
        st.builds(lambda a, b: a / b if b != 0 else a, inner, inner),
        st.builds(lambda a, n: a**n if a != 0 else a, inner, st.integers(-2, 3)),
        st.builds(lambda f, a: f(a), st.sampled_from([sp.sqrt, abs]), inner),
    )


def is_real(number: Any) -> bool:
    return bool(number.is_real and number.is_finite)


NUMBERS = st.recursive(st.one_of(SIMPLE, CONSTANTS), combined, max_leaves=4).filter(is_real)
FUNCTIONS = st.recursive(
    st.one_of(SIMPLE, st.sampled_from([X, Y, sp.pi])),
    lambda inner: (
        combined(inner)
        | st.builds(lambda f, a: f(a), st.sampled_from([sp.sin, sp.tan, sp.atan, sp.exp, sp.log, sp.floor]), inner)
    ),
    max_leaves=5,
).filter(lambda formula: formula.free_symbols and not formula.has(sp.zoo, sp.nan, sp.I))

KINDS: dict[str, Callable[[Any, Any], Any]] = {
    "number": lambda a, b: a,
    "complex": lambda a, b: b + a * sp.I,
    "set": lambda a, b: sp.FiniteSet(a, b),
    "tuple": lambda a, b: sp.Tuple(a, b),
    "matrix": lambda a, b: sp.Matrix([[a, b], [b, 1]]),
    "row": lambda a, b: sp.Matrix([[a, b]]),
    "closed": lambda a, b: sp.Interval(a, a + 1 + abs(b)),
    "half open": lambda a, b: sp.Interval.Lopen(a, a + 1 + abs(b)),
    "ray": lambda a, b: sp.Interval.open(a, sp.oo),
    "union": lambda a, b: sp.Union(sp.Interval(-sp.oo, a), sp.Interval.Ropen(a + 1, a + 2 + abs(b))),
    "with a point": lambda a, b: sp.Union(sp.Interval.open(-sp.oo, a), sp.FiniteSet(a + 1)),
    "above": lambda a, b: sp.Gt(X, a),
    "between": lambda a, b: sp.And(sp.Ge(X, a), sp.Lt(X, a + 1 + abs(b))),
    "one of two": lambda a, b: sp.Or(sp.Lt(X, a), sp.Ge(X, a + 1)),
    "line": lambda a, b: sp.Eq(Y, a * X + b),
    "excluded": lambda a, b: sp.Ne(X, a),
}

TYPESET = st.fixed_dictionaries(
    {"ln_notation": st.just(True), "fold_short_frac": st.just(False)},
    optional={
        "inv_trig_style": st.sampled_from(["abbreviated", "full", "power"]),
        "long_frac_ratio": st.integers(1, 3),
        "mat_str": st.sampled_from(["matrix", "pmatrix", "bmatrix", "array", "smallmatrix"]),
        "mat_delim": st.sampled_from(["[", "(", ""]),
        "mul_symbol": st.sampled_from([None, "dot", "times"]),
        "order": st.sampled_from([None, "lex", "grevlex", "rev-lex", "none", "old"]),
        "imaginary_unit": st.sampled_from(["i", "ri", "ti"]),
        "mode": st.sampled_from(["plain", "inline", "equation*"]),
        **dict.fromkeys(
            ("itex", "fold_frac_powers", "fold_func_brackets", "root_notation", "parenthesize_super"), st.booleans()
        ),
    },
)
GOLD_PRINTERS = st.builds(lambda form: lambda value: sp.latex(value, **form), TYPESET)
PRINTERS = GOLD_PRINTERS | st.sampled_from(
    [
        sp.sstr,
        lambda value: sp.sstr(value, order="old"),
        lambda value: sp.latex(value, imaginary_unit="rj", ln_notation=True),
    ]
)
FOLDED_PRINTERS = st.builds(lambda form: lambda value: sp.latex(value, **form | {"fold_short_frac": True}), TYPESET)


@given(
    st.sampled_from(sorted(KINDS)),
    st.tuples(SIMPLE, FOLDED_PRINTERS) | st.tuples(NUMBERS, PRINTERS),
    SIMPLE,
    GOLD_PRINTERS,
)
@thorough
def test_a_printed_value_is_read_as_itself(kind: str, printed: Any, other: Any, gold: Any) -> None:
    one, answer = printed
    value = KINDS[kind](one, other)
    assume(not value.has(sp.log) or "log(" not in answer(value))
    assert is_accepted(gold(value), answer(value))


@given(st.sampled_from(sorted(KINDS)), SIMPLE | NUMBERS, SIMPLE | NUMBERS, SIMPLE, GOLD_PRINTERS, PRINTERS)
@thorough
def test_another_printed_value_is_another_answer(
    kind: str, one: Any, changed: Any, other: Any, gold: Any, answer: Any
) -> None:
    assume(abs((one - changed).evalf(60)) > 1e-40)
    assert not is_accepted(gold(KINDS[kind](one, other)), answer(KINDS[kind](changed, other)))


@given(FUNCTIONS, FUNCTIONS, GOLD_PRINTERS, PRINTERS)
@thorough
def test_printed_formulas_are_equal_where_their_values_are(one: Any, other: Any, gold: Any, answer: Any) -> None:
    assume(not one.has(sp.log) or "log(" not in answer(one))
    assert is_accepted(gold(one), answer(one))
    assert is_accepted(gold(one), answer(sp.expand(one)))
    values = [each.subs({X: sp.Rational(13, 7), Y: sp.Rational(22, 9)}).evalf(60) for each in (one, other)]
    assume(all(map(is_real, values)) and abs(values[0] - values[1]) > 1e-40)
    assert not is_accepted(gold(one), answer(other))
