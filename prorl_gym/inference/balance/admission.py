"""Admission: how many rollouts use the engines at once follows what fits into the engines' caches.

``AdmissionState`` decides which rollouts, ``AimdShare`` how many. ``Admission`` lets callers wait on them. A rollout
asks before each of its turns and is never held up within one. No deadline is charged for the wait.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from time import monotonic

from prorl_gym.deadlines import paused_deadline
from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.balance.admission_state import AdmissionState, AimdOptions, AimdShare
from prorl_gym.inference.protocol import GenerationRequest
from prorl_gym.records import EngineLoad


@dataclass(frozen=True, slots=True)
class AdmissionOptions:
    max_live_rollouts: int | None = None
    """Most rollouts at once where engines do not report the size of their caches; ``None``: no limit."""
    follow_capacity: bool = True
    """Follow the reported size of the caches; otherwise ``max_live_rollouts`` always decides."""
    idle_seconds: float = 600.0
    """A rollout without a call for this long loses its slot: not every caller reports a rollout's end."""
    aimd: AimdOptions = field(default_factory=AimdOptions)


@dataclass(frozen=True, slots=True)
class AdmissionSnapshot:
    budget: float
    """Room for live rollouts, in KV tokens; in rollouts when ``in_tokens`` is false."""
    in_tokens: bool
    used: int
    """Room that they fill, in the same unit."""
    live: int
    waiting: int
    arriving: int
    """Rollouts for which there was room and that have made no call yet."""
    sessions: int
    """Rollouts that have made a call and are remembered."""
    suspensions: int
    """Times that a live rollout had to wait, so far."""
    cuts: int
    """Times that the share was cut, so far."""
    waited_seconds: float
    """By all rollouts together, so far."""


@dataclass(slots=True)
class _Session:
    """A rollout that has made a call."""

    shared_tokens: int
    """Tokens of its first prompt, when its group shares it."""
    last_seen: float
    calls: int = 0
    """In flight, or waiting here."""
    is_within_turn: bool = False
    """Its last call was cut short: the next one continues the same turn."""


class Admission:
    """Admission of one pool. ``clock`` counts seconds."""

    def __init__(
        self, name: str, options: AdmissionOptions | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        self._name = name
        self._options = options or AdmissionOptions()
        self._clock = clock
        self._share = AimdShare(self._options.aimd)
        self._state = AdmissionState(
            inf if self._options.max_live_rollouts is None else self._options.max_live_rollouts
        )
        self._in_tokens = False
        self._sessions: dict[str, _Session] = {}
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}
        self._waited_seconds = 0.0
        self._arriving: set[str] = set()
        self._room_queue: OrderedDict[asyncio.Future[None], str] = OrderedDict()
        """Rollouts that wait for room, the first first."""
        self._closed = False

    async def wait_for_room(self, session_id: str) -> None:
        """Wait until a new rollout would be admitted.

        Nothing is reserved. The rollout counts as arriving until its first call, or until it is forgotten.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._room_queue[waiter] = session_id
        self._give_room()
        try:
            await waiter
        except asyncio.CancelledError:
            if self._room_queue.pop(waiter, None) is None:  # there was room for it, in this moment
                self._arriving.discard(session_id)
                self._give_room()
            raise

    async def begin_call(self, request: GenerationRequest) -> bool:
        """Wait until the rollout of this call is live; whether it was at once.

        Every ``begin_call`` needs one ``end_call``, even if it raises. Raises ``EngineError`` (``ENGINE_UNREACHABLE``):
        the pool is closed, or was closed during the wait.
        """
        if self._closed:
            raise self._closed_error()
        session_id = request.session_id
        self._arriving.discard(session_id)
        session = self._sessions.get(session_id)
        if session is None:
            shared = len(request.prompt_ids) if request.group_id and self._in_tokens else 0
            session = self._sessions[session_id] = _Session(shared, self._clock())
        session.calls += 1
        if session.is_within_turn:
            session.is_within_turn = False
            return True
        is_granted = self._state.request_turn(
            session_id,
            max(0, len(request.prompt_ids) - session.shared_tokens) if self._in_tokens else 1,
            priority=request.priority,
            group=request.group_id if session.shared_tokens else "",
            shared=session.shared_tokens,
        )
        if is_granted:
            self._wake_admitted()
            return True
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(session_id, []).append(waiter)
        self._wake_admitted()
        began = self._clock()
        try:
            with paused_deadline():
                await waiter
        finally:
            self._waited_seconds += self._clock() - began
            self._remove_waiter(session_id, waiter)
        return False

    def end_call(self, session_id: str, *, cut_short: bool) -> None:
        """End a call, of a turn that the next one continues if it was ``cut_short``. The rollout keeps its slot."""
        session = self._sessions.get(session_id)
        if session is not None:  # otherwise it was forgotten during the call
            session.calls -= 1
            session.last_seen = self._clock()
            session.is_within_turn = cut_short

    def release_slot(self, session_id: str) -> None:
        """Free the slot of a rollout without a call in flight; it asks again ahead of later rollouts."""
        self._arriving.discard(session_id)
        session = self._sessions.get(session_id)
        if session is not None and not session.calls:
            session.is_within_turn = False
            self._state.release_slot(session_id)
        self._wake_admitted()

    def forget_session(self, session_id: str) -> None:
        """Forget a rollout that is over. Ignored for unknown rollouts, and for those that wait."""
        self._arriving.discard(session_id)
        if all(waiter.done() for waiter in self._waiters.get(session_id, ())):
            self._sessions.pop(session_id, None)
            self._state.remove_session(session_id)
            self._wake_admitted()

    def observe_loads(self, loads: Mapping[str, EngineLoad], reusable: int, serving_engines: int) -> None:
        """Update the budget from the metrics, by engine. ``reusable``: see ``AimdShare.update_share``."""
        share = self._share.update_share(loads, reusable, is_used_up=self._state.waiting > 0, now=self._clock())
        capacities = [load.kv_capacity for load in loads.values() if load.kv_capacity is not None]
        if capacities and self._options.follow_capacity:
            self._in_tokens = True
            # Engines that report no capacity count as average.
            self._state.budget = share * serving_engines * sum(capacities) / len(capacities)
        late = self._clock() - self._options.idle_seconds
        idle = [name for name, each in self._sessions.items() if not each.calls and each.last_seen < late]
        for session_id in idle:  # they may begin again as new ones
            del self._sessions[session_id]
            self._state.remove_session(session_id)
        self._wake_admitted()

    def close(self) -> None:
        """Fail all calls that wait, and those that begin later."""
        self._closed = True
        waiters, self._waiters = self._waiters, {}
        for session_waiters in waiters.values():
            for waiter in session_waiters:
                if not waiter.done():
                    waiter.set_exception(self._closed_error())
        self._give_room()

    def snapshot(self) -> AdmissionSnapshot:
        state = self._state
        return AdmissionSnapshot(
            budget=state.budget,
            in_tokens=self._in_tokens,
            used=state.used,
            live=state.live,
            waiting=state.waiting,
            arriving=len(self._arriving),
            sessions=len(self._sessions),
            suspensions=state.suspensions,
            cuts=self._share.cuts,
            waited_seconds=self._waited_seconds,
        )

    def _wake_admitted(self) -> None:
        for session_id in self._state.admit():
            for waiter in self._waiters.get(session_id, ()):
                if not waiter.done():
                    waiter.set_result(None)
        self._give_room()

    def _give_room(self) -> None:
        """Wake as many rollouts as there is room for, in the order in which they came."""
        while self._room_queue and (self._closed or self._state.has_room(len(self._arriving))):
            waiter, session_id = self._room_queue.popitem(last=False)
            if not waiter.done():  # otherwise it was cancelled
                self._arriving.add(session_id)
                waiter.set_result(None)

    def _closed_error(self) -> EngineError:
        return EngineError(FailureKind.ENGINE_UNREACHABLE, f"pool {self._name}: it was closed.", "Start the service.")

    def _remove_waiter(self, session_id: str, waiter: asyncio.Future[None]) -> None:
        waiters = self._waiters.get(session_id, [])
        if waiter in waiters:  # otherwise ``close`` has ended them all
            waiters.remove(waiter)
        if waiters:
            return
        self._waiters.pop(session_id, None)
        # If it was admitted in the moment of the cancel, it keeps its slot until it is forgotten.
        if waiter.cancelled():
            self.forget_session(session_id)
