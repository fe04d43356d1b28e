"""Delays between attempts: they double up to a cap, with jitter where callers that failed together must spread out.

Arithmetic only. The light client imports it, which is why no retry library is used.
"""

import random

_MAX_DOUBLINGS = 60
"""More change nothing below any sensible cap, and would overflow a float in the end."""


def backoff_delay(turn: int, *, first: float, longest: float, jitter: float = 0.0) -> float:
    """Return the seconds to wait before the next attempt: ``first * 2**turn``, at most ``longest``.

    ``turn`` counts the delays before. ``jitter`` is the share that is random: with 0.5 it is from the upper half.
    """
    delay = min(longest, first * 2.0 ** min(turn, _MAX_DOUBLINGS))
    return delay * random.uniform(1.0 - jitter, 1.0) if jitter else delay
