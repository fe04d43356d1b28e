r"""Whether an answer was worked out, or is the question again: ``\gcd(12, 18)`` is worth 6, but says nothing."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import cast

from prorl_gym.environments.math import spelling
from prorl_gym.environments.math.expressions import OPERATORS, Apply, Foreign
from prorl_gym.environments.math.forms import Amount, Form, Labelled, Reals, Selection

_FORMULA = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_COMPUTES = re.compile(
    r"[+*!^]|(?<=.)-|\\(?:times|cdot|div|binom|sqrt|log|ln|sin|cos|tan|choose|pm)(?![a-zA-Z])|[CP]\("
)
_UNSOLVED = re.compile(r"\||-[a-df-hj-zA-Z]")
"""What makes a condition on a variable one to be solved: ``|x| < 2``, ``-x > 1``."""


def evaluated(golds: Sequence[tuple[str, Form | None]], answer: str, found: Form | None, question: str) -> bool:
    r"""Whether an answer says more than the question does.

    It does not when its value still holds an operator (``\sum``, ``\int``, ``\gcd`` ...) and no gold answer holds
    one, or when it is, sign for sign, a formula of the question that leaves something to compute, and no gold answer
    is. What stands before an equals sign is not the value.

    Args:
        golds: the gold answers, as they are written and as they are read.
        answer: what was boxed.
        found: the same as it is read.
        question: what was asked; empty where it is not known.
    """
    if _has_operator(found) and not any(_has_operator(form) for _, form in golds):
        return False
    match found:
        case Amount() | Selection():
            leaves = _COMPUTES
        case Labelled(_, Reals()):
            leaves = _UNSOLVED
        case _:
            return True
    key = _key(answer)
    if leaves.search(key) is None or any(_key(gold) == key for gold, _ in golds):
        return True
    return not any(key == _key(next(filter(None, groups))) for groups in _FORMULA.findall(question))


def _key(text: str) -> str:
    return spelling.key(spelling.plain(text))


def _has_operator(form: Form | None) -> bool:
    return next(_operators(form), None) is not None


def _operators(form: Form | None) -> Iterator[str]:
    left: list[object] = [form]  # no recursion: a tower of powers is deeper than the stack
    while left:
        part = left.pop()
        match part:
            case Foreign(text):
                yield text
            case Apply(operation) if operation in OPERATORS:
                yield operation
            case Labelled(_, inner):
                left.append(inner)  # its name is not part of the value
            case tuple():
                left.extend(cast(tuple[object, ...], part))
            case _ if is_dataclass(part):
                left.extend(getattr(part, field.name) for field in fields(part))
            case _:
                pass
