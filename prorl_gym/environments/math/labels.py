"""When two names in front of an answer are the same: ``f(2) =`` is not ``f(3) =``, but ``|AB| =`` is ``AB =``."""

import re
from collections.abc import Sequence

from prorl_gym.environments.math.expressions import UnreadableError, read_expression
from prorl_gym.environments.math.splitting import is_name
from prorl_gym.environments.math.values import same
from prorl_gym.environments.math.words import PRODUCTS

_FUNCTION = re.compile(r"(?P<letter>[a-zA-Z]'*)(?:\^\{?-1\}?)?\((?P<argument>[a-zA-Z])\)")
_WORD = re.compile(r"[A-Za-z](?=[a-z]*[aeiou])[a-z]{2,}")


def same_name(one: str, other: str) -> bool:
    """Whether two names may name the same thing. A word (``Area``) may name whatever a letter does."""
    if one == other:
        return True
    words = [_WORD.search(re.sub(r"\\[a-zA-Z]+", "", name)) is not None for name in (one, other)]
    if any(words):
        return not all(words) or one.casefold() == other.casefold()
    for function, name in ((one, other), (other, one)):
        match = _FUNCTION.fullmatch(function)
        if match is not None and "'" not in function and is_name(name):
            return name == "y" and match["argument"] != "y"  # f(x) = and y = begin the same answer
    try:
        mine, theirs = (read_expression(name.replace(":", "/")) for name in (one, other))
        return not is_name(one) and not is_name(other) and same(mine, theirs)
    except (UnreadableError, ArithmeticError, ValueError, RecursionError):
        return False


def is_group(names: Sequence[str]) -> bool:
    """Whether names are letters with a usual order, such as ``x`` and ``y``."""
    return any(set(names) <= group for group in PRODUCTS)
