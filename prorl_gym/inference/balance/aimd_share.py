"""The share of the engines' KV memory that live rollouts may fill, found by AIMD. Plain data: no clock, no event loop.

Additive increase, multiplicative decrease, as in TCP's congestion control (Chiu and Jain 1989), finds a shared capacity
that is not known. Beyond its capacity an engine with a prefix cache does not refuse calls: it evicts what waiting
rollouts have cached, computes it again at their next turn, and preempts running calls. So the signals are preemptions,
and prompt tokens that had been computed before and were computed again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from statistics import fmean

from prorl_gym.records import EngineLoad


@dataclass(frozen=True, slots=True)
class AimdOptions:
    """Shares are of an engine's KV capacity."""

    initial_share: float = 0.85
    min_share: float = 0.1
    max_share: float = 1.5
    """Above 1, since rollouts of a group share their prompts and not every estimate is too low."""
    increase: float = 0.02
    """Added after each update without a sign of overload while the share is used up."""
    decrease_factor: float = 0.85
    """Factor after an update with a sign of overload."""
    cooldown_seconds: float = 20.0
    """Time between two cuts: the effect of one shows when rollouts come to their next turns."""
    max_recomputed: float = 0.05
    """Share of reusable prompt tokens that, computed again, calls for a cut."""
    low_recomputed: float = 0.02
    """The same below which the share may grow."""
    memory: float = 0.9
    """Weight of what came before, at each look: few calls end between two of them."""
    full_usage: float = 0.95
    """Share of the cache that running calls hold on an engine beyond which nothing is added."""


class AimdShare:
    """A share for each engine, updated from its metrics; that of the fleet is their mean.

    One share for all would be cut whenever any engine is overloaded, and of many engines one always is.

    Args:
        options: see there.
    """

    def __init__(self, options: AimdOptions | None = None) -> None:
        self._options = options or AimdOptions()
        self.share = self._options.initial_share
        """Of the fleet."""
        self.cuts = 0
        """Times that an engine's share was cut."""
        self._shares: dict[str, float] = {}
        self._cooldown_until: dict[str, float] = {}
        self._last_loads: dict[str, EngineLoad] = {}
        self._last_reusable = 0
        self._found = self._could = 0.0
        """Prompt tokens that were found, and that could have been, in the last looks."""

    def update_share(self, loads: Mapping[str, EngineLoad], reusable: int, *, is_used_up: bool, now: float) -> float:
        """Update the shares from the metrics of all engines; return that of the fleet.

        Args:
            loads: by name, of the engines that show metrics. A new one begins with the fleet's share.
            reusable: prompt tokens sent to these engines so far, in all calls together, that had been part of an
                earlier call of the same rollout or group: what a large enough cache would have found.
            is_used_up: rollouts wait for a larger share; otherwise none is raised.
            now: in seconds, of any clock that does not go back.
        """
        recomputed = self._recomputed_share(loads, reusable)
        options, before = self._options, self._last_loads
        self._shares = {name: self._shares.get(name, self.share) for name in loads}
        self._cooldown_until = {name: self._cooldown_until.get(name, -inf) for name in loads}
        for name, load in loads.items():
            preempted = name in before and load.preemptions > before[name].preemptions
            if preempted or recomputed > options.max_recomputed:
                if now >= self._cooldown_until[name]:
                    self.cuts += 1
                    self._shares[name] = max(options.min_share, self._shares[name] * options.decrease_factor)
                    self._cooldown_until[name] = now + options.cooldown_seconds
            elif is_used_up and recomputed < options.low_recomputed and not self._is_crowded(load):
                self._shares[name] = min(options.max_share, self._shares[name] + options.increase)
        self._last_loads = dict(loads)
        self._last_reusable = reusable
        if loads:
            self.share = fmean(self._shares.values())
        return self.share

    def _recomputed_share(self, loads: Mapping[str, EngineLoad], reusable: int) -> float:
        """Share of what could have been found in the caches since the last look, and was not."""
        if loads.keys() != self._last_loads.keys():  # a new engine's counters do not cover the whole time
            return 0.0
        news = [(load, self._last_loads[name]) for name, load in loads.items()]
        found = sum(load.prefix_hits - before.prefix_hits for load, before in news)
        asked = sum(load.prefix_queries - before.prefix_queries for load, before in news)
        could = reusable - self._last_reusable
        # A restarted engine counts from zero; some engines have no such counters.
        if could < 0 or asked < 0 or found < 0:
            self._found = self._could = 0.0
            return 0.0
        keep = self._options.memory
        self._found, self._could = keep * self._found + found, keep * self._could + could
        return max(0.0, 1.0 - self._found / self._could) if self._could and asked else 0.0

    def _is_crowded(self, load: EngineLoad) -> bool:
        return load.waiting > 0 and load.kv_usage > self._options.full_usage
