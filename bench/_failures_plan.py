"""The faults of ``bench failures``: which model calls fail, and how. Fixed beforehand, by the number of a call."""

from dataclasses import dataclass
from enum import StrEnum
from random import Random

SEED = 20261123
SHARE = 0.2
"""Share of the calls that fail, where not all calls of some seconds do."""
OUTAGE_SECONDS = 5.0
OUTAGE_CALL = 4
"""An outage begins with this call."""
CALL_SECONDS = 10.0
"""Longest duration of a call, where a system has a setting for it."""
TURN_TOKENS = 256
"""Most tokens of a turn, where a system has a setting for it: a full turn is over long before ``CALL_SECONDS``."""


class Kind(StrEnum):
    """What an engine does wrong."""

    NONE = "none"
    REFUSED = "refused"
    RESET = "reset"
    ERROR = "error"
    UNAVAILABLE = "unavailable"
    TRUNCATED = "truncated"
    FOREIGN = "foreign"
    ABORT = "abort"
    HANG = "hang"
    SHORT_LOGPROBS = "short_logprobs"
    NAN_LOGPROBS = "nan_logprobs"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of failure, and how often."""

    kind: Kind
    words: str
    share: float = 0.0
    """Of the calls."""
    is_outage: bool = False
    """All calls of ``OUTAGE_SECONDS`` fail."""

    def hits(self, number: int) -> bool:
        """Whether the call of this number, from 0, fails. A repeated call has a number of its own."""
        return Random(f"{SEED}/{self.kind}/{number}").random() < self.share


HEALTHY = Fault(Kind.NONE, "none")
FAULTS = (
    Fault(Kind.REFUSED, "connections refused for 5 s", is_outage=True),
    Fault(Kind.UNAVAILABLE, "HTTP 503 for 5 s", is_outage=True),
    Fault(Kind.RESET, "connection reset, 1 call in 5", SHARE),
    Fault(Kind.ERROR, "HTTP 500, 1 call in 5", SHARE),
    Fault(Kind.TRUNCATED, "half of the JSON, 1 call in 5", SHARE),
    Fault(Kind.FOREIGN, "another JSON object, 1 call in 5", SHARE),
    Fault(Kind.ABORT, "`finish_reason: abort` and half of the text, 1 call in 5", SHARE),
    Fault(Kind.SHORT_LOGPROBS, "one log-prob too few, 1 call in 5", SHARE),
    Fault(Kind.NAN_LOGPROBS, "a log-prob of NaN, 1 call in 5", SHARE),
    Fault(Kind.WEIGHTS, "new weights in the middle"),
    # Last, since some systems are careful with an engine that hung, for a while.
    Fault(Kind.HANG, "no answer at all, 1 call in 10", SHARE / 2),
)
BY_KIND = {fault.kind: fault for fault in (HEALTHY, *FAULTS)}
