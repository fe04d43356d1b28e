"""The gate of a pool: closed while the policy's weights change, so that no call begins.

A turn that waits here, or whose call an engine holds back during a pause, is not slow: its deadline is paused.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from prorl_gym.deadlines import Deadline, current_deadline
from prorl_gym.inference.balance.members import ChangeSignal, PoolMember
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult


class CallExecutor(Protocol):
    """Makes the calls that a pool has placed, in place of the pool's own engines."""

    async def generate(self, member: PoolMember, request: GenerationRequest) -> GenerationResult: ...

    async def cancel(self, request_id: str, *, by_pause: bool) -> None: ...


@dataclass(slots=True, eq=False)
class InFlightCall:
    request_id: str
    """Given by the caller."""
    attempt_id: str
    """Given to the engine."""
    member: PoolMember
    deadline: Deadline | None
    """Deadline of the rollout's stage."""
    is_cut_short: bool = False
    """It was cut short by a pause of ours."""
    charged_at_start: float = 0.0
    """Seconds that its deadline had been charged when it began."""
    executor: CallExecutor | None = None
    """Makes the call; ``None``: the member's engine."""

    async def stop(self) -> None:
        """Stop the call at its engine, which keeps what it sampled."""
        if self.executor is None:
            await self.member.engine.cancel(self.attempt_id)
        else:
            await self.executor.cancel(self.attempt_id, by_pause=self.is_cut_short)

    @property
    def charged_seconds(self) -> float:
        """Seconds for which its deadline was charged since it began."""
        return 0.0 if self.deadline is None else self.deadline.charged_seconds - self.charged_at_start

    def refund_deadline(self) -> None:
        """Charge the deadline nothing for a call that its engine failed."""
        if self.deadline is not None:
            self.deadline.refund(self.charged_at_start)


class CallGate:
    """Lets calls begin, and tracks those in flight. ``changes`` is notified when it opens."""

    def __init__(self, changes: ChangeSignal) -> None:
        self._changes = changes
        self._call_ended = ChangeSignal()
        self._calls: dict[str, InFlightCall] = {}
        self._close_count = 0
        self._paused_deadlines: list[Deadline] = []

    @property
    def is_closed(self) -> bool:
        return self._close_count > 0

    @property
    def calls(self) -> list[InFlightCall]:
        return list(self._calls.values())

    def find_call(self, request_id: str) -> InFlightCall | None:
        return self._calls.get(request_id)

    async def wait_until_idle(self, member: PoolMember | None = None) -> None:
        await self._call_ended.wait_for(lambda: not (self._calls if member is None else member.in_flight))

    @contextmanager
    def track_call(
        self, request_id: str, attempt_id: str, member: PoolMember, executor: CallExecutor | None = None
    ) -> Generator[InFlightCall, None, None]:
        deadline = current_deadline()
        flight = InFlightCall(
            request_id,
            attempt_id,
            member,
            deadline,
            charged_at_start=0.0 if deadline is None else deadline.charged_seconds,
            executor=executor,
        )
        self._calls[request_id] = flight
        member.in_flight += 1
        try:
            yield flight
        finally:
            member.in_flight -= 1
            del self._calls[request_id]
            self._call_ended.notify_all()

    def close(self) -> None:
        """Let no call begin. Every ``close`` needs one ``open``."""
        self._close_count += 1

    def open(self) -> None:
        """Undo one ``close``; calls may begin after the last."""
        self._close_count -= 1
        if not self.is_closed:
            held, self._paused_deadlines = self._paused_deadlines, []
            for deadline in held:
                deadline.resume()
            self._changes.notify_all()

    def pause_deadlines(self) -> None:
        """Pause the deadlines of calls in flight, which engines hold back until the gate opens."""
        for flight in self.calls:
            if flight.deadline is not None:
                flight.deadline.pause()
                self._paused_deadlines.append(flight.deadline)
