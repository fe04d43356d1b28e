"""The share of the engines' KV memory that live rollouts may fill, found by AIMD. Plain data: no clock, no event loop.

Additive increase, multiplicative decrease, as in TCP's congestion control (Chiu and Jain 1989), finds a shared capacity
that is not known. Beyond its capacity an engine with a prefix cache does not refuse calls: it evicts what waiting
rollouts have cached, computes it again at their next turn, and preempts running calls. So the signals are preemptions,
and prompt tokens that had been computed before and were computed again.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from prorl_gym.records import EngineLoad


@dataclass(frozen=True, slots=True)
class AimdOptions:
    """Shares are of the fleet's KV capacity."""

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
    max_recomputed: float = 0.25
    """Share of reusable prompt tokens that, computed again, calls for a cut."""
    low_recomputed: float = 0.12
    """The same below which the share may grow."""
    full_usage: float = 0.95
    """Share of the cache that running calls hold on an engine beyond which nothing is added."""


class AimdShare:
    """The share, updated from the engines' metrics.

    Args:
        options: see there.
    """

    def __init__(self, options: AimdOptions | None = None) -> None:
        self._options = options or AimdOptions()
        self.share = self._options.initial_share
        self.cuts = 0
        """Times that the share was cut."""
        self._last_loads: dict[str, EngineLoad] = {}
        self._last_reusable = 0
        self._cooldown_until = float("-inf")

    def update_share(self, loads: Mapping[str, EngineLoad], reusable: int, *, is_used_up: bool, now: float) -> float:
        """Update the share from the metrics of all engines; return it.

        Args:
            loads: by name, of the engines that show metrics.
            reusable: prompt tokens sent to these engines so far, in all calls together, that had been part of an
                earlier call of the same rollout or group: what a large enough cache would have found.
            is_used_up: rollouts wait for a larger share; otherwise it is not raised.
            now: in seconds, of any clock that does not go back.
        """
        preempted = any(
            load.preemptions > self._last_loads[name].preemptions
            for name, load in loads.items()
            if name in self._last_loads
        )
        recomputed = self._recomputed_share(loads, reusable)
        options = self._options
        if preempted or recomputed > options.max_recomputed:
            if now >= self._cooldown_until:
                self.cuts += 1
                self.share = max(options.min_share, self.share * options.decrease_factor)
                self._cooldown_until = now + options.cooldown_seconds
        elif is_used_up and recomputed < options.low_recomputed and not self._is_crowded(loads):
            self.share = min(options.max_share, self.share + options.increase)
        self._last_loads = dict(loads)
        self._last_reusable = reusable
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
        if could <= 0 or asked <= 0 or found < 0:
            return 0.0
        return max(0.0, 1.0 - found / could)

    def _is_crowded(self, loads: Mapping[str, EngineLoad]) -> bool:
        return any(load.waiting > 0 and load.kv_usage > self._options.full_usage for load in loads.values())
