r"""Formulas with a constant of integration: ``\\ln|x| + C`` is ``\\ln|2x| + c``."""

from collections.abc import Iterator

from prorl_gym.environments.math.expressions import Apply, Node, Number, Symbol, substitute, symbols
from prorl_gym.environments.math.points import points
from prorl_gym.environments.math.values import is_real_at, same

_VARIABLES = frozenset("stuvwxyz\\theta")


def same_but_constant(left: Node, right: Node) -> bool:
    """Whether two formulas end with a constant of integration and differ by a number only."""
    names = symbols(left) | symbols(right)
    if "C" not in names:
        return False
    one, other = (_without(node, "C" if "C" in symbols(node) else "c") for node in (left, right))
    if one is None or other is None or not symbols(one) | symbols(other) <= _VARIABLES or not symbols(one):
        return False
    start = next((at for at in points(one, other) if is_real_at(one, at) and is_real_at(other, at)), None)
    if start is None:
        return False
    shifted: list[Node] = []
    for node in (one, other):
        there = node
        for name, number in start.items():
            there = substitute(there, name, Number(number))
        shifted.append(Apply("-", (node, there)))
    return same(*shifted)


def _without(node: Node, constant: str) -> Node | None:
    """Return a sum without its term ``+ C``, ``None`` when it has none or the letter stands elsewhere too."""
    terms = list(_terms(node))
    rest = [term for term in terms if term != Symbol(constant)]
    if len(rest) != len(terms) - 1 or not rest or any(constant in symbols(term) for term in rest):
        return None
    total = rest[0]
    for term in rest[1:]:
        total = Apply("+", (total, term))
    return total


def _terms(node: Node) -> Iterator[Node]:
    match node:
        case Apply("+", (left, right)):
            yield from _terms(left)
            yield from _terms(right)
        case Apply("-", (left, right)):
            yield from _terms(left)
            yield Apply("neg", (right,))
        case _:
            yield node
