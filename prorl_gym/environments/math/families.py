r"""Answers with an integer in them: ``\frac{\pi}{4} + k\pi``, ``x \equiv 3 \pmod 7``, as sets of progressions."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from prorl_gym.environments.math.arithmetic import inexact, mp, value
from prorl_gym.environments.math.expressions import Apply, Node, Number, Symbol, UnreadableError, substitute, symbols
from prorl_gym.environments.math.forms import Amount, Family, Form, Labelled, Piece, Reals, Row, Several
from prorl_gym.environments.math.spelling import untexted
from prorl_gym.environments.math.splitting import is_name, normal_name
from prorl_gym.environments.math.values import constant_equal, rational

PARAMETER = "\\psi"
"""The integer of a residue class, which has no letter of its own."""

DIGITS = 80
MOST_RESIDUES = 240

_CONGRUENCE = re.compile(
    r"(?:(?P<name>[^=<>,]*?)\s*\\equiv)?\s*(?P<residues>[^=<>]*?)\s*"
    r"(?:\\pmod|(?P<infix>\\b?mod|\\text\s*\{\s*\(?mod\s*\}?|\(\s*(?:\\b?mod|\\text\s*\{\s*mod\s*\}|mod(?![a-z]))|mod(?![a-z])))"
    r"\s*[{(]?\s*(?P<modulus>\d+)\s*(?:[)}]\s*)*"
)

_WHEN = r"(?:(?:for|if|iff|if and only if|when|whenever|exactly when|precisely when|only if)\s+)?"
_LEAD = rf"{_WHEN}(?:(?:all|any|every|an?)\s+)?"
_NAMED = r"(?P<name>[a-zA-Z])\s*"
_VERB = r"(?:\b(?:is|are|must be|has to be|be)\s+(?P<negated>not\s+)?)"
_NOUNS = r"(?:\s+(?:integers?|numbers?|values?(?:\s+of)?))?"
_IN_WORDS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"{_LEAD}{_NAMED}{_VERB}?(?:an?\s+)?(?P<parity>odd|even){_NOUNS}",
        rf"{_LEAD}(?P<parity>odd|even){_NOUNS}(?:\s+(?P<name>[a-zA-Z]))?",
        rf"{_LEAD}{_NAMED}{_VERB}(?:divisible\s+by|an?\s+(?:integer\s+)?multiple\s+of)\s+(?P<modulus>\d{{1,3}})",
        rf"{_LEAD}(?:integer\s+)?multiples?\s+of\s+(?P<modulus>\d{{1,3}})",
        rf"(?P<modulus>\d{{1,3}})\s*(?:\||\\mid|divides)\s*{_NAMED}",
    )
)

Progression = tuple[Node, Node]
"""Start and step."""


def read_congruence(text: str, read: Callable[[str], Form]) -> Family | None:
    r"""Return ``x \equiv 1, 4 \pmod 5`` or ``3 \pmod 5`` as a family; ``17 \bmod 5`` is an operation, and none."""
    match = _CONGRUENCE.fullmatch(text)
    if match is None or "mod" in match["residues"] or "\\equiv" in match["residues"]:
        return None
    if match["name"] is None and match["infix"] and not match["infix"].startswith("("):
        return None
    if match["name"] is not None and not is_name(match["name"]):
        raise UnreadableError("a congruence to be solved")
    form = read(match["residues"])
    return _classes(match["name"], form.items if isinstance(form, Several) else (form,), int(match["modulus"]))


def read_worded(text: str) -> Family | None:
    """Return ``n is odd``, ``all even integers`` or ``n is divisible by 3`` as a family, ``None`` for all else."""
    text = " ".join(untexted(text).split()).strip(" .")
    match = next((found for pattern in _IN_WORDS if (found := pattern.fullmatch(text))), None)
    if match is None:
        return None
    found = match.groupdict()
    modulus = int(found.get("modulus") or 2)
    residues = {int((found.get("parity") or "").casefold() == "odd")}
    if found.get("negated"):
        residues = set(range(modulus)) - residues
    if not 2 <= modulus <= MOST_RESIDUES:
        raise UnreadableError("a class of too many residues, or of all numbers")
    return _classes(found.get("name"), [Amount(Number(Fraction(residue))) for residue in sorted(residues)], modulus)


def _classes(name: str | None, residues: Sequence[Form], modulus: int) -> Family:
    step = Apply("*", (Number(Fraction(modulus)), Symbol(PARAMETER)))
    several = Several(tuple(_shifted(item, step) for item in residues), is_set=True)
    return Family(PARAMETER, several if name is None else Labelled(normal_name(name), several, None))


def _shifted(item: Form, step: Node) -> Amount:
    if (
        not isinstance(item, Amount)
        or item.unit is not None
        or (found := rational(item.value)) is None
        or found.denominator != 1
    ):
        raise UnreadableError("a residue that is no integer")
    return Amount(Apply("+", (item.value, step)))


def parameter(form: Form) -> str | None:
    r"""Return the letter of a formula that may be a family whose integer was not introduced, such as ``2k\\pi``."""
    inner = form.form if isinstance(form, Labelled) else form
    items = inner.items if isinstance(inner, Several) else (inner,)
    letters = frozenset[str]().union(*(symbols(item.value) for item in items if isinstance(item, Amount)))
    return next(iter(letters)) if len(letters) == 1 and letters <= frozenset("knmlj") else None


def same_family(one: Family, other: Family) -> bool | None:
    """Whether two families are the same set of numbers, ``None`` where they are no progressions."""
    if one.domain != "Z" or other.domain != "Z":
        return None
    names = [family.form.name for family in (one, other) if isinstance(family.form, Labelled)]
    if len(set(names)) > 1:
        return False
    mine, theirs = _progressions(one.form, one.letter), _progressions(other.form, other.letter)
    return None if mine is None or theirs is None else _same_sets(mine, theirs)


def renamed(family: Family) -> Form | None:
    """Return the answer of a family with a common letter for its integer, ``None`` when it is more than formulas."""
    match family.form:
        case Amount(node, unit, percent):
            return Amount(substitute(node, family.letter, Symbol(PARAMETER)), unit, percent)
        case Labelled(name, inner, _):
            form = renamed(Family(family.letter, inner, family.domain))
            return None if form is None else Labelled(name, form, None)
        case Several(items, is_set):
            found = [renamed(Family(family.letter, item, family.domain)) for item in items]
            return None if None in found else Several(tuple(each for each in found if each is not None), is_set)
        case Row(items, opening, closing):
            found = [renamed(Family(family.letter, item, family.domain)) for item in items]
            return None if None in found else Row(tuple(each for each in found if each is not None), opening, closing)
        case Reals(pieces):
            ends = [
                Piece(
                    substitute(piece.low, family.letter, Symbol(PARAMETER)),
                    substitute(piece.high, family.letter, Symbol(PARAMETER)),
                    piece.closed_low,
                    piece.closed_high,
                )
                for piece in pieces
            ]
            return Reals(tuple(ends))
        case _:
            return None


def _progressions(form: Form, letter: str) -> list[Progression] | None:
    match form:
        case Labelled(_, inner):
            return _progressions(inner, letter)
        case Several(items):
            found = [_progressions(item, letter) for item in items]
            return None if None in found else [each for progressions in found for each in progressions or ()]
        case Amount(node, None, False) if symbols(node) <= {letter}:
            if (linear := _linear(node, letter)) is not None:
                return [linear]
            halves = [_linear(substitute(node, letter, _doubled(letter, rest)), letter) for rest in (0, 1)]
            return None if None in halves else [half for half in halves if half is not None]
        case _:
            return None


def _doubled(letter: str, rest: int) -> Node:
    return Apply("+", (Apply("*", (Number(Fraction(2)), Symbol(letter))), Number(Fraction(rest))))


def _linear(node: Node, letter: str) -> Progression | None:
    """Return start and step, where a formula of an integer is linear in it."""

    def at(index: int) -> Node:
        return substitute(node, letter, Number(Fraction(index)))

    start = at(0)
    step = Apply("-", (at(1), start))
    steps = (Apply("+", (start, Apply("*", (Number(Fraction(index)), step)))) for index in (2, 3, -1, 7, -4))
    if all(constant_equal(at(index), expected) for index, expected in zip((2, 3, -1, 7, -4), steps, strict=True)):
        return start, step
    return None


def _same_sets(mine: list[Progression], theirs: list[Progression]) -> bool:
    """Whether two unions of progressions are the same, by their residues for a common multiple of all steps."""
    with mp.workdps(DIGITS):
        sizes = [
            [(inexact(value(start)), abs(inexact(value(step)))) for start, step in each] for each in (mine, theirs)
        ]
        steps = [step for each in sizes for _, step in each if step != 0]
        if not steps:
            return False
        unit = steps[0]
        shares = [_fraction(step / unit) for step in steps]
        if None in shares:
            return False
        known = [share for share in shares if share is not None]
        period = (
            unit * math.lcm(*(share.numerator for share in known)) / math.gcd(*(share.denominator for share in known))
        )
        left, right = (list(_residues(each, period)) for each in sizes)
        if max(len(left), len(right)) > MOST_RESIDUES:
            raise UnreadableError("progressions with too many residues")
        return all(any(_congruent(a, b, period) for b in right) for a in left) and all(
            any(_congruent(a, b, period) for a in left) for b in right
        )


def _residues(progressions: list[tuple[Any, Any]], period: Any) -> Iterator[Any]:
    for start, step in progressions:
        if step == 0:
            raise UnreadableError("a constant beside a progression")
        for index in range(min(int(mp.nint(period / step)), MOST_RESIDUES + 1)):
            yield start + index * step


def _fraction(ratio: Any) -> Fraction | None:
    found = Fraction(str(mp.nstr(ratio, 30))).limit_denominator(1000)
    return found if abs(ratio - mp.mpf(found.numerator) / found.denominator) < mp.mpf(10) ** (-DIGITS // 2) else None


def _congruent(one: Any, other: Any, period: Any) -> bool:
    turns = (one - other) / period
    return abs(turns - mp.nint(turns)) < mp.mpf(10) ** (-DIGITS // 2)
