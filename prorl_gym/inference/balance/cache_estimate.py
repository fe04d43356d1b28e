"""Estimate of the engines' prefix caches, in tokens: the content of each, and how much could have been found.

The service makes every call, so it records which prefix each engine last computed for each rollout and group. It cannot
observe evictions; engines evict the least recently used, so the estimate does the same at the same capacity.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from prorl_gym.inference.protocol import GenerationRequest, GenerationResult

_MAX_SESSIONS = 1 << 16
"""Rollouts remembered: not every caller reports the end of one."""


@dataclass(slots=True)
class _Tail:
    """A rollout's own part of its context."""

    tokens: int
    group: str


@dataclass(slots=True)
class _GroupPrompt:
    """A group's first prompt."""

    tokens: int
    users: int = 0


class CacheEstimate:
    """One engine's cache.

    Args:
        capacity: tokens that fit; infinite where it is not known.
    """

    __slots__ = ("_busy_sessions", "capacity", "groups", "idle_sessions", "used")

    def __init__(self, capacity: float = math.inf) -> None:
        self.capacity = capacity
        self.used = 0
        """Tokens estimated to lie there."""
        self.idle_sessions: OrderedDict[str, _Tail] = OrderedDict()
        """Rollouts without a call in flight, the least recently used first."""
        self._busy_sessions: dict[str, _Tail] = {}
        self.groups: dict[str, _GroupPrompt] = {}
        """First prompts that lie there."""

    def cached_tokens(self, session: str, group: str, prompt: int) -> int:
        """Tokens of a prompt that need not be computed."""
        shared = self.groups.get(group)
        tail = self.idle_sessions.get(session)
        found = (shared.tokens if shared else 0) + (tail.tokens if tail else 0)
        return found if found < prompt else prompt

    def begin_call(self, session: str, group: str, prompt: int, shared: int | None = None) -> None:
        """Count the prompt of a call that begins; it is not evicted while the call runs.

        Args:
            session: the rollout.
            group: rollouts of one group share the first prompt.
            prompt: tokens of the whole prompt.
            shared: tokens of the group's first prompt; by default this one is it.
        """
        tail = self._busy_sessions.get(session) or self.idle_sessions.pop(
            session, None
        )  # it is busy where it makes two calls at once
        self._busy_sessions[session] = tail or self._add_session(group, prompt if shared is None else shared)
        self._resize(self._busy_sessions[session], prompt)

    def end_call(self, session: str, context: int) -> None:
        """Release the context of a call that is over; it stays until others need the room."""
        tail = self._busy_sessions.pop(session, None)
        if tail is not None:  # otherwise it was forgotten, or the cache lost, during the call
            self.idle_sessions[session] = tail
            self._resize(tail, context)

    def forget_session(self, session: str) -> None:
        """Remove what a rollout that is over has there."""
        tail = self._busy_sessions.pop(session, None) or self.idle_sessions.pop(session, None)
        if tail is not None:
            self._remove_session(tail)

    def clear(self) -> None:
        """Remove everything."""
        self.idle_sessions.clear()
        self._busy_sessions.clear()
        self.groups.clear()
        self.used = 0

    def _add_session(self, group: str, shared: int) -> _Tail:
        if group:
            if group not in self.groups:  # its first rollout brings the prompt
                self.groups[group] = _GroupPrompt(shared)
                self.used += shared
            self.groups[group].users += 1
        return _Tail(0, group)

    def _resize(self, tail: _Tail, context: int) -> None:
        shared = self.groups[tail.group].tokens if tail.group else 0
        tokens = max(0, context - shared)
        self.used += tokens - tail.tokens
        tail.tokens = tokens
        self._evict()

    def _evict(self) -> None:
        """Shorten what was least recently used, from its end."""
        while self.used > self.capacity and self.idle_sessions:
            session, tail = next(iter(self.idle_sessions.items()))
            cut = min(tail.tokens, self.used - int(self.capacity))
            tail.tokens -= cut
            self.used -= cut
            if not tail.tokens:
                del self.idle_sessions[session]
                self._remove_session(tail)

    def _remove_session(self, tail: _Tail) -> None:
        self.used -= tail.tokens
        shared = self.groups.get(tail.group)
        if shared is not None:
            shared.users -= 1
            if not shared.users:
                self.used -= shared.tokens
                del self.groups[tail.group]


@dataclass(frozen=True, slots=True)
class _SentPrompt:
    """What an engine computed for a rollout."""

    context_tokens: int
    engine: str
    group: str


class PrefixReuse:
    """Counts prompt tokens that large enough prefix caches would have found.

    A prompt's beginning is reusable when the same rollout, or for a first prompt another one of its group, sent it to the
    same engine before: what was computed on another one was never in this cache. Engines report what they found; the difference is what was lost, by which admission adjusts its share.
    """

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        """Of the calls that each engine served."""
        self._sent: OrderedDict[str, _SentPrompt] = OrderedDict()
        self._groups: dict[tuple[str, str], int] = {}
        """Rollouts of a group whose last call an engine served."""

    @property
    def reusable_tokens(self) -> int:
        """Since the start."""
        return self._tokens.total()

    def reusable_tokens_on(self, engines: Iterable[str]) -> int:
        """The same in the calls that these engines served."""
        return sum(self._tokens[engine] for engine in engines)

    def record_call(self, request: GenerationRequest, result: GenerationResult) -> None:
        """Count an answered call."""
        prompt, place = len(request.prompt_ids), (request.group_id, result.engine)
        before = self._sent.get(request.session_id)
        if before is None:
            self._tokens[result.engine] += prompt if place in self._groups else 0
        elif before.engine == result.engine:
            self._tokens[result.engine] += min(before.context_tokens, prompt)
        self.forget_session(request.session_id)
        if request.group_id:
            self._groups[place] = self._groups.get(place, 0) + 1
        self._sent[request.session_id] = _SentPrompt(prompt + len(result.token_ids), result.engine, request.group_id)
        if len(self._sent) > _MAX_SESSIONS:
            self.forget_session(next(iter(self._sent)))

    def forget_session(self, session_id: str) -> None:
        """Forget a rollout that is over. Unknown ones are ignored."""
        sent = self._sent.pop(session_id, None)
        if sent is None or not sent.group:
            return
        place = sent.group, sent.engine
        self._groups[place] -= 1
        if not self._groups[place]:
            del self._groups[place]

    def invalidate_cache(self, engine: str) -> None:
        """Forget what an engine had computed: its cache is lost."""
        for session_id in [session for session, sent in self._sent.items() if sent.engine == engine]:
            self.forget_session(session_id)

    def invalidate_all(self) -> None:
        """Forget everything: the weights have changed."""
        self._sent.clear()
        self._groups.clear()

    @property
    def tracked(self) -> int:
        """Rollouts and groups."""
        return len(self._sent) + len(self._groups)
