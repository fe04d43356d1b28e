"""Policies that need no model of an engine: by call (``round_robin``, ...) and by rollout (``sticky``, ...).

A sticky policy gives each rollout a home: its calls share a growing prefix, so they go where it is cached.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

from prorl_gym.inference.protocol import CallOutcome, GenerationRequest
from prorl_gym.records import EngineLoad


class Reservations:
    """Counts the places that calls hold on engines: reserved once, released once."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def __getitem__(self, engine: str) -> int:
        return self._counts[engine]

    def reserve(self, engine: str) -> None:
        """Reserve a place."""
        self._counts[engine] += 1

    def release(self, engine: str) -> None:
        """Release a place.

        Raises:
            ValueError: nothing is reserved there.
        """
        if self._counts[engine] < 1:
            raise ValueError(f"no reservation on engine {engine} to return")
        self._counts[engine] -= 1
        if not self._counts[engine]:
            del self._counts[engine]


class _CountingPolicy:
    """Base of all policies here: the calls in flight on each engine."""

    def __init__(self) -> None:
        self.reservations = Reservations()

    def in_flight(self, engine: str) -> int:
        """Return the calls in flight."""
        return self.reservations[engine]

    def observe_load(self, engine: str, load: EngineLoad) -> None:
        """Do nothing: only calls in flight decide."""


class PerCallPolicy(_CountingPolicy):
    """Base of the policies that place every call by itself and remember no rollouts."""

    def release(self, request: GenerationRequest, engine: str, outcome: CallOutcome) -> None:
        """Return the place.

        Raises:
            ValueError: nothing is reserved there.
        """
        self.reservations.release(engine)

    def forget_session(self, session_id: str) -> None:
        """Do nothing: rollouts are not tracked."""

    def invalidate_cache(self, engine: str) -> None:
        """Do nothing: caches are not tracked."""


class RoundRobin(PerCallPolicy):
    """``round_robin``: the engines in turn."""

    def __init__(self) -> None:
        super().__init__()
        self._call_count = 0

    def choose(self, request: GenerationRequest, healthy: Sequence[str]) -> str:
        """Pick the next in turn."""
        engine = healthy[self._call_count % len(healthy)]
        self._call_count += 1
        self.reservations.reserve(engine)
        return engine


class LeastOutstanding(PerCallPolicy):
    """``least_outstanding``: the engine with the fewest of our calls in flight, the first of equals."""

    def choose(self, request: GenerationRequest, healthy: Sequence[str]) -> str:
        """Pick the least busy."""
        engine = min(healthy, key=lambda name: self.reservations[name])
        self.reservations.reserve(engine)
        return engine


class StickyPolicy(_CountingPolicy, ABC):
    """Base of the policies with homes; a subclass picks the home of a rollout without one."""

    def __init__(self) -> None:
        super().__init__()
        self._live: Counter[str] = Counter()
        self._homes: dict[str, str] = {}

    @abstractmethod
    def pick_home(self, healthy: Sequence[str]) -> str:
        """Pick an engine for a rollout that has none."""

    def choose(self, request: GenerationRequest, healthy: Sequence[str]) -> str:
        """Pick the rollout's home, or settle it, and reserve a place."""
        engine = self._homes.get(request.session_id)
        if engine is None or engine not in healthy:
            self.forget_session(request.session_id)
            engine = self.pick_home(healthy)
            self._homes[request.session_id] = engine
            self._live[engine] += 1
        self.reservations.reserve(engine)
        return engine

    def release(self, request: GenerationRequest, engine: str, outcome: CallOutcome) -> None:
        """Return the place; after a failure the rollout gets another home.

        Raises:
            ValueError: nothing is reserved there.
        """
        self.reservations.release(engine)
        if outcome.failed and self._homes.get(request.session_id) == engine:
            self.forget_session(request.session_id)

    def forget_session(self, session_id: str) -> None:
        """Forget a rollout that is over."""
        engine = self._homes.pop(session_id, None)
        if engine is not None:
            self._live[engine] -= 1

    def invalidate_cache(self, engine: str) -> None:
        """Give the engine's rollouts other homes."""
        for session_id in [session for session, home in self._homes.items() if home == engine]:
            self.forget_session(session_id)

    def live_rollouts(self, engine: str) -> int:
        """Rollouts whose home it is."""
        return self._live[engine]


class StickyLeastOutstanding(StickyPolicy):
    """``sticky``: the engine with the fewest calls in flight, among equals the one with the fewest rollouts.

    A rollout that waits for a tool is load too.
    """

    def pick_home(self, healthy: Sequence[str]) -> str:
        """Pick the least busy."""
        return min(healthy, key=lambda name: (self.reservations[name], self._live[name]))


class MinHeap(StickyPolicy):
    """``min_heap``: the engine with the fewest live rollouts; what the published heap would be if it counted down."""

    def pick_home(self, healthy: Sequence[str]) -> str:
        """Pick the one with the fewest rollouts."""
        return min(healthy, key=lambda name: self._live[name])


class PublishedHeap(StickyPolicy):
    """``published``: the engine that was given the fewest rollouts ever. For benches only.

    The rule of the published server: counts never go down, and an engine that joins late starts from zero and is given
    everything until it has caught up.
    """

    def __init__(self) -> None:
        super().__init__()
        self._assigned: Counter[str] = Counter()

    def pick_home(self, healthy: Sequence[str]) -> str:
        """Pick the one that was given the fewest."""
        engine = min(healthy, key=lambda name: self._assigned[name])
        self._assigned[engine] += 1
        return engine
