"""Times of day: ``10:15 a.m.``. A bare ``12:30`` may be a time, and a time is no ratio."""

import math
import re

from prorl_gym.environments.math.forms import Clock
from prorl_gym.environments.math.spelling import untexted

_TIME = re.compile(
    r"(\d{1,2})(?:\s*:\s*(\d\d))?(?:\s*:\s*(\d\d))?\s*(?:([ap])\s*\.?\s*m\s*\.?|(noon|midnight)|(o'?\s*clock))?",
    re.IGNORECASE,
)


def read_clock(text: str) -> Clock | None:
    """Return a time of day, ``None`` when the text is none."""
    match = _TIME.fullmatch(untexted(text).strip())
    if match is None or not any(match.group(2, 4, 5, 6)):
        return None
    hour, minute, second = int(match[1]), int(match[2] or 0), int(match[3] or 0)
    half = match[4].lower() if match[4] else {"noon": "p", "midnight": "a"}.get((match[5] or "").lower())
    if hour > 24 or minute > 59 or second > 59:
        return None
    if half is not None:
        if not 1 <= hour <= 12:
            return None
        return Clock(hour % 12 + (12 if half == "p" else 0), minute, second, has_half=True)
    return Clock(hour, minute, second, has_half=False)


def may_be_ratio(clock: Clock) -> bool:
    """Whether ``3:10`` may also be a ratio: people write those in lowest terms."""
    return not clock.has_half and math.gcd(clock.hour, clock.minute, clock.second) == 1 and clock.minute >= 10


def same_time(one: Clock, other: Clock) -> bool:
    """Whether two times are the same; one without half of the day may be in either."""
    hours = (one.hour - other.hour) % 24
    undecided = (
        one.has_half != other.has_half and max(one.hour * (not one.has_half), other.hour * (not other.has_half)) <= 12
    )
    return (hours == 0 or (undecided and hours == 12)) and (one.minute, one.second) == (other.minute, other.second)
