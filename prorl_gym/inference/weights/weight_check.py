"""Whether the engines hold the weights that they should, by the log-probs that they give to a fixed prompt.

Version labels do not show it: an engine that failed to load continues with the old weights under the new name, and one
that was restarted serves the checkpoint it started with. Two rules decide:

- an engine **disagrees** when its log-probs are further than a tolerance from those of the trainer, or, without these,
  from the fleet's median;
- an engine is **stale** when it hardly moved while the others did. One step of training moves log-probs by less than
  the numerics of trainer and engine differ, but the same engine repeats itself closely on the same prompt: so its own
  movement shows what the distance to others hides. With two engines this rule alone can name the wrong one.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from statistics import fmean, median, median_low

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.balance.members import PoolMember

log = logging.getLogger(__name__)

Fingerprint = Sequence[float]
"""Log-probs of the probe's ids but the first, in nats."""

TOLERANCE = 0.1
"""Mean distance in nats. Engines and trainers in bfloat16 with different kernels differ by 0.01 to 0.03 on average;
a wrong layer, head or checkpoint by more than one (1.3 was seen for a stale output head)."""

_PROBE_LENGTH = 48
"""Ids: long enough for the mean to be steady, short enough to cost nothing."""

_MIN_MOVEMENT = 1e-5
"""Mean movement in nats that counts as none: the noise of 32-bit sums."""

_STALE_RATIO = 1 / 8
"""Share of the others' median movement below which an engine is stale."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    problem: str = ""
    """Why it must not serve; empty if it may."""
    fingerprint: Fingerprint | None = None
    """``None``: it cannot return log-probs of a given text, or the problem came first."""


class WeightCheck:
    """Has single engines drop their prefix cache and return a fingerprint.

    ``salted``: calls of each version have prefix caches of their own, so that older ones need not be dropped.
    ``retry_delay`` returns the seconds before the next of ``max_cache_resets`` tries, by the number of the last one.
    """

    def __init__(
        self, token_ids: Sequence[int], salted: bool, max_cache_resets: int, retry_delay: Callable[[int], float]
    ) -> None:
        self._token_ids = token_ids
        self._salted = salted
        self._max_cache_resets = max_cache_resets
        self._retry_delay = retry_delay
        self._warned: set[tuple[PoolMember, str]] = set()

    async def check_engine(self, member: PoolMember, caches_dropped: bool) -> CheckResult:
        """Drop an engine's prefix cache, unless that was done, and read its fingerprint."""
        problem = "" if caches_dropped else await self._drop_prefix_cache(member)
        return CheckResult(problem) if problem else await self.read_fingerprint(member)

    async def read_fingerprint(self, member: PoolMember) -> CheckResult:
        try:
            logprobs = await member.engine.probe_logprobs(self._token_ids)
        except EngineError as error:
            if error.kind is not FailureKind.ENGINE_REFUSED:
                return CheckResult(f"it could not be probed ({error.what})")
            self._warn_once(member, f"cannot show which weights it has and serves unchecked ({error.what})")
            return CheckResult()
        if len(logprobs) != len(self._token_ids) - 1:
            return CheckResult(f"it returned {len(logprobs)} log-probs of a probe of {len(self._token_ids)} ids")
        return CheckResult(fingerprint=logprobs)

    async def _drop_prefix_cache(self, member: PoolMember) -> str:
        """Try until the cache is dropped; return why the engine must not serve, if it is not."""
        problem = "its prefix cache holds older weights' work and could not be dropped"
        # Where salts keep versions apart, calls that hold blocks are not worth waiting for.
        tries = 1 if self._salted and member.in_flight else self._max_cache_resets
        for turn in range(tries):
            try:
                if await member.engine.reset_prefix_cache():
                    return ""
            except EngineError as error:
                problem = f"its prefix cache could not be dropped ({error.what})"
                break
            if turn + 1 < tries:
                await asyncio.sleep(self._retry_delay(turn))
        if not self._salted:
            return problem
        self._warn_once(member, f"keeps older weights' work in its prefix cache: calls are salted ({problem})")
        return ""

    def _warn_once(self, member: PoolMember, what: str) -> None:
        kind = what.partition("(")[0]
        if (member, kind) not in self._warned:
            self._warned.add((member, kind))
            log.warning("engine %s %s", member.name, what)


def make_probe_token_ids(vocab_size: int) -> list[int]:
    """Return the ids of the probe: the same for the same vocabulary, spread over all of it."""
    digests = (blake2b(f"prorl-gym probe {place}".encode(), digest_size=8).digest() for place in range(_PROBE_LENGTH))
    return [int.from_bytes(digest, "big") % vocab_size for digest in digests]


def find_invalid_engines(
    now: Mapping[str, Fingerprint],
    before: Mapping[str, Fingerprint],
    *,
    reference_logprobs: Fingerprint | None = None,
    tolerance: float = TOLERANCE,
) -> dict[str, str]:
    """Return the engines that must not serve, by name, and why.

    ``now`` are fingerprints after the update, ``before`` those before it, of the engines that had one, and
    ``reference_logprobs`` what the trainer computes for the same ids.
    """
    wrong = find_stale_engines(now, before, reference_logprobs)
    rest = {name: probe for name, probe in now.items() if name not in wrong}
    if reference_logprobs is not None:
        far = {name: mean_distance(probe, reference_logprobs) for name, probe in rest.items()}
        reference_name = "the trainer"
    elif len(rest) == 2:  # there is no median of one: only the other rule can name the wrong one
        one, other = rest
        far = dict.fromkeys(rest, mean_distance(rest[one], rest[other]))
        reference_name = "the only other engine, and there is no reference that shows which one is right"
    else:
        middle = median_fingerprint(list(rest.values())) if rest else []
        far = {name: mean_distance(probe, middle) for name, probe in rest.items()}
        reference_name = "the other engines"
    return wrong | {
        name: f"its log-probs are {gap:.3g} nats away from {reference_name} (tolerance {tolerance:g})"
        for name, gap in far.items()
        if not gap <= tolerance
    }


def find_stale_engines(
    now: Mapping[str, Fingerprint], before: Mapping[str, Fingerprint], reference_logprobs: Fingerprint | None = None
) -> dict[str, str]:
    """Return the engines that did not move while the others did, by name, and the reason.

    One that has arrived at the reference need not move: it was started with the new weights.
    """
    moved = {name: mean_distance(probe, before[name]) for name, probe in now.items() if name in before}
    found: dict[str, str] = {}
    for name, own in moved.items():
        others = [movement for other, movement in moved.items() if other != name]
        # Most of the fleet may have failed to load: then those that did not move at all are stale, however many.
        theirs = 0.0 if not others else max(others) if own <= _MIN_MOVEMENT else median_low(others)
        if theirs <= _MIN_MOVEMENT or own >= _STALE_RATIO * theirs:
            continue
        if reference_logprobs is None or mean_distance(now[name], reference_logprobs) >= _STALE_RATIO * theirs:
            found[name] = f"its weights are stale: its log-probs moved by {own:.3g} nats, the others' by {theirs:.3g}"
    return found


def changed_weights_reason(now: Fingerprint, accepted: Fingerprint, before: Fingerprint | None) -> str:
    """Return why an engine that came back has other weights than before; empty if it has the same.

    The same engine with the same weights repeats itself far more closely than one step of training moves it. It was
    ``accepted`` for this version with one fingerprint, and had the one ``before`` with the version before.
    """
    step = 0.0 if before is None else mean_distance(accepted, before)
    bound = step / 2 if step > _MIN_MOVEMENT else TOLERANCE
    gap = mean_distance(now, accepted)
    return "" if gap <= bound else f"it came back with other weights: its log-probs are {gap:.3g} nats away from before"


def has_moved(now: Fingerprint, before: Fingerprint) -> bool:
    """Whether an engine's log-probs have changed at all."""
    return mean_distance(now, before) > _MIN_MOVEMENT


def mean_distance(one: Fingerprint, other: Fingerprint) -> float:
    """Return the mean distance in nats. Raises ``ValueError``: they are of different lengths."""
    return fmean(abs(a - b) for a, b in zip(one, other, strict=True))


def median_fingerprint(fingerprints: Sequence[Fingerprint]) -> list[float]:
    return [median(place) for place in zip(*fingerprints, strict=True)]
