"""Estimate of the engines' prefix caches, in tokens: the content of each, and how much could have been found.

The service makes every call, so it records which prefix each engine last computed for each rollout and group. It cannot
observe evictions; engines evict the least recently used, so the estimate does the same at the same capacity.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from prorl_gym.inference.protocol import GenerationRequest

_LARGEST_BLOCK = 128
"""Tokens: a cache finds whole blocks only, of 1 (SGLang) to 128 (vLLM on CPU), and computes at least the last one."""

_MAX_SESSIONS = 1 << 16
"""Rollouts remembered: not every caller reports the end of one."""


@dataclass(slots=True)
class _Tail:
    """A rollout's own part of its context."""

    tokens: int
    group: str


@dataclass(slots=True)
class _GroupPrompt:
    tokens: int
    users: int = 0


class CacheEstimate:
    """One engine's cache of ``capacity`` tokens; infinite where that is not known."""

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
        """Count the prompt of a call that begins; it is not evicted while the call runs."""
        # It is busy where it makes two calls at once.
        tail = self._busy_sessions.get(session) or self.idle_sessions.pop(session, None)
        if tail is None:
            if group:
                if group not in self.groups:  # its first rollout brings the prompt
                    self.groups[group] = _GroupPrompt(prompt if shared is None else shared)
                    self.used += self.groups[group].tokens
                self.groups[group].users += 1
            tail = _Tail(0, group)
        self._busy_sessions[session] = tail
        self._resize(tail, prompt)

    def end_call(self, session: str, context: int) -> None:
        """Release the context of a call that is over; it stays until others need the room."""
        tail = self._busy_sessions.pop(session, None)
        if tail is not None:  # otherwise it was forgotten, or the cache lost, during the call
            self.idle_sessions[session] = tail
            self._resize(tail, context)

    def forget_session(self, session: str) -> None:
        tail = self._busy_sessions.pop(session, None) or self.idle_sessions.pop(session, None)
        if tail is not None:
            self._remove_session(tail)

    def clear(self) -> None:
        self.idle_sessions.clear()
        self._busy_sessions.clear()
        self.groups.clear()
        self.used = 0

    def _resize(self, tail: _Tail, context: int) -> None:
        shared = self.groups[tail.group].tokens if tail.group else 0
        tokens = max(0, context - shared)
        self.used += tokens - tail.tokens
        tail.tokens = tokens
        # Shorten what was least recently used, from its end.
        while self.used > self.capacity and self.idle_sessions:
            session, oldest = next(iter(self.idle_sessions.items()))
            cut = min(oldest.tokens, self.used - int(self.capacity))
            oldest.tokens -= cut
            self.used -= cut
            if not oldest.tokens:
                del self.idle_sessions[session]
                self._remove_session(oldest)

    def _remove_session(self, tail: _Tail) -> None:
        self.used -= tail.tokens
        shared = self.groups.get(tail.group)
        if shared is not None:
            shared.users -= 1
            if not shared.users:
                self.used -= shared.tokens
                del self.groups[tail.group]


class GroupPrompts:
    """Lengths of the first prompts that groups share: the shortest prompt that any rollout of a group has sent."""

    def __init__(self) -> None:
        self._groups: dict[str, tuple[int, set[str]]] = {}
        """Length, and the rollouts that are known."""
        self._group_of: dict[str, str] = {}

    def observe_prompt(self, session: str, group: str, prompt: int) -> int:
        """Return the length of the prompt that a rollout shares with its group; 0 without a group."""
        if not group:
            return 0
        known, members = self._groups.get(group) or (prompt, set[str]())
        members.add(session)
        self._group_of[session] = group
        shared = min(known, prompt)
        self._groups[group] = shared, members
        return shared

    def forget_session(self, session: str) -> None:
        group = self._group_of.pop(session, "")
        if group:
            members = self._groups[group][1]
            members.discard(session)
            if not members:
                del self._groups[group]

    @property
    def tracked(self) -> int:
        return len(self._groups) + len(self._group_of)


class PrefixReuse:
    """Counts prompt tokens that large enough prefix caches would have found.

    These are what an engine computed before of the same rollout, or of its group's first prompt; what another engine
    computed was never in this cache. Engines report what they found. The difference is what was lost, by which
    admission adjusts its share. Both are counted when a call begins: counted when it ends, what few calls find would be
    compared with what many had sent a minute before.
    """

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        """In the calls of each engine."""
        self._caches: dict[str, CacheEstimate] = {}
        """Without bounds."""
        self._home: OrderedDict[str, str] = OrderedDict()
        """The engine of each rollout's last call; the rollout that called last is the last."""
        self._prompts = GroupPrompts()

    @property
    def reusable_tokens(self) -> int:
        return self._tokens.total()

    def reusable_tokens_on(self, engines: Iterable[str]) -> int:
        """Return the same in the calls that these engines were given."""
        return sum(self._tokens[engine] for engine in engines)

    def begin_call(self, request: GenerationRequest, engine: str) -> None:
        session, group, prompt = request.session_id, request.group_id, len(request.prompt_ids)
        if self._home.get(session) != engine:
            self.forget_context(session)
        cache = self._caches.setdefault(engine, CacheEstimate())
        self._tokens[engine] += cache.cached_tokens(session, group, prompt - 1) // _LARGEST_BLOCK * _LARGEST_BLOCK
        cache.begin_call(session, group, prompt, self._prompts.observe_prompt(session, group, prompt))
        self._home[session] = engine
        self._home.move_to_end(session)
        if len(self._home) > _MAX_SESSIONS:
            self.forget_session(next(iter(self._home)))

    def end_call(self, request: GenerationRequest, engine: str, sampled: int) -> None:
        if self._home.get(request.session_id) == engine and engine in self._caches:
            self._caches[engine].end_call(request.session_id, len(request.prompt_ids) + sampled)

    def forget_context(self, session_id: str) -> None:
        """Forget what was computed for a rollout: its engine may have dropped it."""
        cache = self._caches.get(self._home.pop(session_id, ""))
        if cache is not None:
            cache.forget_session(session_id)

    def forget_session(self, session_id: str) -> None:
        self.forget_context(session_id)
        self._prompts.forget_session(session_id)

    def invalidate_cache(self, engine: str) -> None:
        self._caches.pop(engine, None)

    def invalidate_all(self) -> None:
        self._caches.clear()

    @property
    def tracked(self) -> int:
        return len(self._home) + self._prompts.tracked
