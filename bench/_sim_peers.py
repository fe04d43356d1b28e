"""Policies of other routers, as far as they can be told without their code: for ``bench balance`` only."""

import bisect
import random
from collections.abc import Sequence
from hashlib import blake2b

from prorl_gym.inference.balance.cache_estimate import CacheEstimate
from prorl_gym.inference.balance.simple_policies import PerCallPolicy
from prorl_gym.inference.protocol import CallOutcome, GenerationRequest


class ConsistentHash(PerCallPolicy):
    """A ring of 160 virtual nodes per engine, by rollout: vllm-router's and SkyRL's, blind to load."""

    def __init__(self) -> None:
        super().__init__()
        self._rings: dict[tuple[str, ...], list[tuple[int, str]]] = {}

    def choose(self, request: GenerationRequest, healthy: Sequence[str]) -> str:
        """Pick the next engine on the ring."""
        ring = self._rings.get(tuple(healthy))
        if ring is None:
            ring = sorted((_hash(f"{name}/{node}"), name) for name in healthy for node in range(160))
            self._rings[tuple(healthy)] = ring
        place = bisect.bisect(ring, (_hash(request.session_id), ""))
        engine = ring[place % len(ring)][1]
        self.reservations.reserve(engine)
        return engine


class PowerOfTwo(PerCallPolicy):
    """The less busy of two engines drawn at random, for every call."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(0)

    def choose(self, request: GenerationRequest, healthy: Sequence[str]) -> str:
        """Draw two."""
        engine = min(self._random.sample(healthy, min(2, len(healthy))), key=lambda name: self.reservations[name])
        self.reservations.reserve(engine)
        return engine


class CacheAware(PerCallPolicy):
    """Longest known prefix, unless loads differ too much: the rule and thresholds of vllm-router and SGLang's gateway.

    Their tree of characters is replaced by what it stands for, exact knowledge of which engine computed which prefix,
    which can only help them.

    Args:
        threshold: share of the prompt that must be known to follow it.
        absolute: calls by which the busiest engine must exceed the least busy one,
        relative: and the factor, for the load to decide alone.
    """

    def __init__(self, threshold: float = 0.5, absolute: int = 32, relative: float = 1.1) -> None:
        super().__init__()
        self._threshold, self._absolute, self._relative = threshold, absolute, relative
        self._caches: dict[str, CacheEstimate] = {}

    def choose(self, request: GenerationRequest, healthy: Sequence[str]) -> str:
        """Follow the prefix, or the load."""
        busiest = max(self.reservations[name] for name in healthy)
        idlest = min(healthy, key=lambda name: self.reservations[name])
        least, prompt = self.reservations[idlest], len(request.prompt_ids)
        engine = idlest
        if not (busiest - least > self._absolute and busiest > self._relative * least):
            known = max(healthy, key=lambda name: self._known(name, request, prompt))
            if self._known(known, request, prompt) > self._threshold * prompt:
                engine = known
        self._caches.setdefault(engine, CacheEstimate()).begin_call(request.session_id, request.group_id, prompt)
        self.reservations.reserve(engine)
        return engine

    def release(self, request: GenerationRequest, engine: str, outcome: CallOutcome) -> None:
        """Remember the whole context."""
        super().release(request, engine, outcome)
        self._caches[engine].end_call(request.session_id, len(request.prompt_ids) + outcome.sampled_tokens)

    def forget_session(self, session_id: str) -> None:
        """Drop it from the history."""
        for cache in self._caches.values():
            cache.forget_session(session_id)

    def invalidate_cache(self, engine: str) -> None:
        """Drop the engine's history."""
        self._caches.pop(engine, None)

    def _known(self, engine: str, request: GenerationRequest, prompt: int) -> int:
        cache = self._caches.get(engine)
        return cache.cached_tokens(request.session_id, request.group_id, prompt) if cache else 0


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
