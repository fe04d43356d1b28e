"""Changes of spelling, order and form that must not change the math grader's verdict, and some that must.

What ``test_sympy_printers`` prints (numbers, polynomials, intervals) is not repeated here.
"""

# ruff: noqa: RUF001 - look-alike signs are among what is tested

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from random import Random

from grader_corpus import MathExample, extract_answer, read_corpus
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prorl_gym.environments.math.answer_equality import is_accepted, is_equal
from prorl_gym.environments.math.expressions import MATH_VERIFY_COMMANDS

CORPUS = Path(__file__).parents[1] / "corpora" / "math_seen.jsonl"

# Sums and integrals cost a library import; the corpus test has them.
PAIRS = [
    (pair.gold, answer)
    for pair in read_corpus(CORPUS, MathExample)
    if (answer := extract_answer(pair)) is not None and not MATH_VERIFY_COMMANDS.search(pair.gold + answer)
]

quick = settings(max_examples=25, deadline=None, derandomize=True)


def replaced(pattern: str, by: str) -> Callable[[str], str]:
    return lambda text: re.sub(pattern, lambda _: by, text)


def sized(text: str) -> str:
    """Put \\left and \\right before the brackets of a text where they pair."""
    if text.count("(") != text.count(")") or re.search(r"[\[\]]|\\left", text):
        return text
    return text.replace("(", r"\left(").replace(")", r"\right)")


def braced(text: str) -> str:
    """Put braces around a text whose own are whole."""
    return f"{{{text}}}" if text and text.count("{") == text.count("}") and "$" not in text else text


SPELLINGS: dict[str, Callable[[str], str]] = {
    "dfrac": replaced(r"\\[dt]?frac(?![a-zA-Z])", r"\dfrac"),
    "tfrac": replaced(r"\\[dt]?frac(?![a-zA-Z])", r"\tfrac"),
    "sized brackets": sized,
    "unicode pi": replaced(r"\\pi(?![a-zA-Z])", "π"),
    "unicode minus": replaced("-", "−"),
    "unicode infinity": replaced(r"\\infty(?![a-zA-Z])", "∞"),
    "unicode at most": replaced(r"\\leq?(?![a-zA-Z])", "≤"),
    "unicode at least": replaced(r"\\geq?(?![a-zA-Z])", "≥"),
    "unicode union": replaced(r"\\cup(?![a-zA-Z])", "∪"),
    "slanted": replaced(r"\\geq?(?![a-zA-Z])", r"\geqslant"),
    "spaces around plus": replaced(r"(?<![\^{(\[,eE])\+", " + "),
    "thin spaces around equals": replaced(r"(?<![<>!])=", r"\,=\,"),
    "dollar signs": lambda text: text if "$" in text else f"${text}$",
    "outer spaces": lambda text: f"  {text} \n",
    "closing full stop": lambda text: f"{text}.",
    "mathrm": replaced(r"\\text(?=\{)", r"\mathrm"),
    "display style": lambda text: f"\\displaystyle {text}",
    "outer braces": braced,
}


@given(st.sampled_from(PAIRS), st.lists(st.sampled_from(sorted(SPELLINGS)), min_size=1, max_size=3))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_spelling_does_not_change_the_verdict(pair: tuple[str, str], names: list[str]):
    gold, answer = pair
    for name in names:
        answer = SPELLINGS[name](answer)
    assert is_accepted(gold, answer) == is_accepted(*pair)
    assert is_equal(answer, gold) == is_equal(*pair)


@given(st.lists(st.fractions(-50, 50, max_denominator=12), min_size=1, max_size=5, unique=True), st.randoms())
@quick
def test_sets_have_no_order_and_no_duplicates(members: list[Fraction], chance: Random):
    shuffled = [*members, chance.choice(members)]
    chance.shuffle(shuffled)
    one, other = (rf"\{{{', '.join(map(spelled, items))}\}}" for items in (members, shuffled))
    assert is_equal(one, other)
    changed = rf"\{{{', '.join(map(spelled, [*members[1:], members[0] + 101]))}\}}"
    assert not is_equal(one, changed)
    assert not is_equal(one, rf"\{{{', '.join(map(spelled, [*members, Fraction(101)]))}\}}")


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=5, unique=True), st.randoms())
@quick
def test_answers_have_no_order_and_tuples_have_one(members: list[int], chance: Random):
    shuffled = list(members)
    chance.shuffle(shuffled)
    assert is_equal(", ".join(map(str, members)), r" \text{ and } ".join(map(str, shuffled)))
    assert is_equal(f"({', '.join(map(str, members))})", f"({','.join(map(str, shuffled))})") == (shuffled == members)


@given(st.integers(1, 9), st.integers(-(10**6), 10**6).filter(bool), st.sampled_from("abs root floor max".split()))
@quick
@example(1, 10**6, "abs")
@example(1, -999_983, "floor")
def test_a_branch_is_seen_wherever_it_begins(slope: int, shift: int, kind: str):
    inner = f"{slope}x-{shift}" if shift > 0 else f"{slope}x+{-shift}"
    formula, same, others = {
        "abs": (f"|{inner}|", rf"\sqrt{{({inner})^2}}", (inner, f"-({inner})")),
        "root": (rf"\sqrt{{({inner})^2}}", f"|{inner}|", (inner, f"-({inner})")),
        "floor": (rf"\lfloor {inner} \rfloor", rf"-\lceil -({inner}) \rceil", (inner, rf"\lceil {inner} \rceil - 1")),
        "max": (rf"\max(0, {inner})", rf"\frac{{|{inner}|+{inner}}}{{2}}", (inner, r"0 \cdot x")),
    }[kind]
    assert is_equal(formula, same)
    assert [other for other in others if is_equal(formula, other)] == []


FORMULAS = [
    "x^2+3x", r"\frac{x}{x+1}", r"\sin x", "2^{x}", r"|x-3|", r"\ln(x^2+1)", "x>2", "x^2+y^2=1", "f(1)=x+1",
    r"1 \le x < 4", r"x \ne 3", r"x \equiv 1 \pmod 4", r"x = \frac{\pi}{3}+2k\pi, k\in\mathbb{Z}", "x_1+x_2",
    r"\begin{cases} x & x>0 \\ 0 & x \le 0 \end{cases}", "x=1, y=2", "(x+1)(x-2)", "x+2y<3", r"\sqrt{x}+x!",
]  # fmt: skip


@given(st.sampled_from(FORMULAS), st.sampled_from("tzu"))
@quick
def test_another_variable_is_another_answer(formula: str, letter: str):
    renamed = re.sub(r"(?<![a-zA-Z\\])x", letter, formula)
    assert is_equal(formula, formula)
    assert not is_equal(formula, renamed)
    assert not is_equal(renamed, formula)


@given(st.fractions(-3, 3, max_denominator=12), st.sampled_from([1, 2, 3]), st.integers(-5, 5), st.integers(2, 4))
@quick
def test_a_family_starts_anywhere_and_has_one_step(start: Fraction, step: int, turns: int, factor: int):
    family = rf"{spelled(start)}\pi+{step}k\pi, k\in\mathbb{{Z}}"
    shifted = rf"{spelled(start + step * turns)}\pi+{step}n\pi, n\in\mathbb{{Z}}"
    assert is_equal(family, shifted)
    parts = ", ".join(rf"{spelled(start + step * at)}\pi+{step * factor}k\pi" for at in range(factor))
    assert is_equal(family, rf"{parts}, k\in\mathbb{{Z}}")
    assert not is_equal(family, rf"{spelled(start + Fraction(step, 2))}\pi+{step}k\pi, k\in\mathbb{{Z}}")
    assert not is_equal(family, rf"{spelled(start)}\pi+{step * factor}k\pi, k\in\mathbb{{Z}}")


@given(st.integers(-20, 20), st.integers(2, 30), st.integers(-4, 4))
@quick
def test_a_residue_class_has_many_names(residue: int, modulus: int, turns: int):
    shifted = residue + turns * modulus
    names = (rf"x \equiv {shifted} \pmod{{{modulus}}}", rf"x = {modulus}k + ({shifted}), k \in \mathbb{{Z}}")
    for name in names:
        assert is_equal(rf"x \equiv {residue} \pmod{{{modulus}}}", name)
        assert not is_equal(rf"x \equiv {residue + 1} \pmod{{{modulus}}}", name)
        assert not is_equal(str(residue), name)


@given(st.integers(0, 23), st.integers(0, 59))
@quick
def test_a_time_is_no_ratio_and_no_number(hour: int, minute: int):
    time = f"{hour}:{minute:02}"
    half = "a.m." if hour < 12 else "p.m."
    assert is_equal(time, rf"{hour % 12 or 12}:{minute:02} \text{{ {half}}}")
    assert not is_equal(time, rf"\frac{{{hour}}}{{{minute or 1}}}")
    assert not is_equal(time, f"{hour}.{minute:02}")
    assert not is_equal(time, f"{hour}:{(minute + 1) % 60:02}")


@given(st.lists(st.integers(-9, 9).filter(bool), min_size=3, max_size=3), st.integers(2, 9))
@quick
def test_an_inequality_times_a_constant(numbers: list[int], factor: int):
    a, b, c = numbers

    def spelled_with(scale: int) -> str:
        return f"({a * scale})x+({b * scale})y"

    assert is_equal(f"{spelled_with(1)}<{c}", f"{spelled_with(factor)}<{c * factor}")
    assert is_equal(f"{spelled_with(1)}<{c}", f"{spelled_with(-factor)}>{-c * factor}")
    assert not is_equal(f"{spelled_with(1)}<{c}", f"{spelled_with(-factor)}<{-c * factor}")
    assert not is_equal(f"{spelled_with(1)}<{c}", f"{spelled_with(factor)}<{c * factor + 1}")


TOKENS = [
    *"0123456789xyniek+-*/^_=<>()[]{}|!.,;:%$ '&½°²",
    *r"\frac \sqrt \{ \} \pm \cup \le \pi \infty \text{cm} \text{or} \in \sin \log \overline \left \setminus".split(),
    *r"\begin{pmatrix} \end{pmatrix} \\ \mathbb{R} {,} \ldots \circ km no million".split(),
    *(" and ", " or ", "\\", "\x00", "🤖", "٣"),
]  # fmt: skip


@given(*[st.lists(st.sampled_from(TOKENS), max_size=14).map("".join)] * 2)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_text_gets_a_symmetric_verdict(one: str, other: str):
    assert is_equal(one, other) is is_equal(other, one)
    assert isinstance(is_accepted(one, other), bool)


def spelled(number: Fraction) -> str:
    if number.denominator == 1:
        return str(number.numerator)
    sign = "-" if number < 0 else ""
    return rf"{sign}\frac{{{abs(number.numerator)}}}{{{number.denominator}}}"
