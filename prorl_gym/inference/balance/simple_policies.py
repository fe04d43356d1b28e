"""Policies that need no model of an engine: by call (``round_robin``, ...) and by rollout (``sticky``, ...).

A sticky policy gives each rollout a home: its calls share a growing prefix, so they go where it is cached.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

from prorl_gym.inference.protocol import CallOutcome, GenerationRequest
from prorl_gym.records import EngineLoad


class PerCallPolicy:
    """Base of all policies: it counts the calls in flight, places every call by itself and remembers no rollouts."""

    def __init__(self) -> None:
        self.reservations: Counter[str] = Counter()
        """Places that calls hold on engines."""

    def in_flight(self, engine: str) -> int:
        return self.reservations[engine]

    def observe_load(self, engine: str, load: EngineLoad) -> None:
        return  # only calls in flight decide

    def release(self, request: GenerationRequest, engine: str, outcome: CallOutcome) -> None:
        if self.reservations[engine] < 1:
            raise ValueError(f"no reservation on engine {engine} to return")
        self.reservations[engine] -= 1
        if not self.reservations[engine]:
            del self.reservations[engine]

    def forget_session(self, session_id: str) -> None:
        return  # rollouts are not tracked

    def invalidate_cache(self, engine: str) -> None:
        return  # caches are not tracked


class RoundRobin(PerCallPolicy):
    """``round_robin``: the engines in turn."""

    def __init__(self) -> None:
        super().__init__()
        self._call_count = 0

    def choose(self, request: GenerationRequest, healthy: Sequence[str]) -> str:
        engine = healthy[self._call_count % len(healthy)]
        self._call_count += 1
        self.reservations[engine] += 1
        return engine


class LeastOutstanding(PerCallPolicy):
    """``least_outstanding``: the engine with the fewest of our calls in flight, the first of equals."""

    def choose(self, request: GenerationRequest, healthy: Sequence[str]) -> str:
        engine = min(healthy, key=lambda name: self.reservations[name])
        self.reservations[engine] += 1
        return engine


class StickyPolicy(PerCallPolicy, ABC):
    """Base of the policies with homes; a subclass picks the home of a rollout without one."""

    def __init__(self) -> None:
        super().__init__()
        self._live: Counter[str] = Counter()
        self._homes: dict[str, str] = {}

    @abstractmethod
    def pick_home(self, healthy: Sequence[str]) -> str:
        """Pick an engine for a rollout that has none."""

    def choose(self, request: GenerationRequest, healthy: Sequence[str]) -> str:
        engine = self._homes.get(request.session_id)
        if engine is None or engine not in healthy:
            self.forget_session(request.session_id)
            engine = self.pick_home(healthy)
            self._homes[request.session_id] = engine
            self._live[engine] += 1
        self.reservations[engine] += 1
        return engine

    def release(self, request: GenerationRequest, engine: str, outcome: CallOutcome) -> None:
        """Return the place; after a failure the rollout gets another home."""
        super().release(request, engine, outcome)
        if outcome.failed and self._homes.get(request.session_id) == engine:
            self.forget_session(request.session_id)

    def forget_session(self, session_id: str) -> None:
        engine = self._homes.pop(session_id, None)
        if engine is not None:
            self._live[engine] -= 1

    def invalidate_cache(self, engine: str) -> None:
        for session_id in [session for session, home in self._homes.items() if home == engine]:
            self.forget_session(session_id)

    def live_rollouts(self, engine: str) -> int:
        return self._live[engine]


class StickyLeastOutstanding(StickyPolicy):
    """``sticky``: the engine with the fewest calls in flight, among equals the one with the fewest rollouts."""

    def pick_home(self, healthy: Sequence[str]) -> str:
        return min(healthy, key=lambda name: (self.reservations[name], self._live[name]))


class MinHeap(StickyPolicy):
    """``min_heap``: the engine with the fewest live rollouts; what the published heap would be if it counted down."""

    def pick_home(self, healthy: Sequence[str]) -> str:
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
        engine = min(healthy, key=lambda name: self._assigned[name])
        self._assigned[engine] += 1
        return engine
