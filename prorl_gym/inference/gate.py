"""The gate of a pool: shut while the policy's weights change, so that no call begins meanwhile.

A turn that waits here, or whose call an engine holds back for a pause, is not slow: its deadline stands still.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from prorl_gym.deadlines import Deadline, current_deadline, uncharged
from prorl_gym.inference.changes import Changes
from prorl_gym.inference.members import Member


@dataclass(slots=True, eq=False)
class Flight:
    """A call that an engine is working on."""

    request_id: str
    """The caller's name for it."""
    attempt_id: str
    """The engine's."""
    member: Member
    deadline: Deadline | None
    """That of the rollout's stage."""
    cut: bool = False
    """It was cut short by a pause of ours."""
    spent: float = 0.0
    """Seconds that its deadline had been charged when it began."""

    @property
    def charged(self) -> float:
        """Seconds for which its deadline was charged since it began."""
        return 0.0 if self.deadline is None else self.deadline.spent - self.spent

    def refund(self) -> None:
        """Its engine failed it: no deadline pays for that."""
        if self.deadline is not None:
            self.deadline.refund(self.spent)


class Gate:
    """Lets calls pass, and knows those that are on their way.

    Args:
        changes: announced when it opens.
    """

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._landed = Changes()
        self._flights: dict[str, Flight] = {}
        self._shut = 0
        self._held: list[Deadline] = []

    @property
    def shut(self) -> bool:
        """Whether no call may begin."""
        return self._shut > 0

    @property
    def flights(self) -> list[Flight]:
        """Calls that engines are working on."""
        return list(self._flights.values())

    def find(self, request_id: str) -> Flight | None:
        """Find a call by its caller's name for it."""
        return self._flights.get(request_id)

    async def opened(self, give_up: Callable[[], bool]) -> None:
        """Wait until calls may begin, or the caller's reason to give up; no deadline pays for it."""
        if self.shut:
            with uncharged():
                await self._changes.until(lambda: not self.shut or give_up())

    async def idle(self, member: Member | None = None) -> None:
        """Wait until no call is on its way, or none on that engine."""
        await self._landed.until(lambda: not (self._flights if member is None else member.in_flight))

    @contextmanager
    def flight(self, request_id: str, attempt_id: str, member: Member) -> Generator[Flight, None, None]:
        """A call is on its way for the block."""
        deadline = current_deadline()
        flight = Flight(request_id, attempt_id, member, deadline, spent=0.0 if deadline is None else deadline.spent)
        self._flights[request_id] = flight
        member.in_flight += 1
        try:
            yield flight
        finally:
            member.in_flight -= 1
            del self._flights[request_id]
            self._landed.announce()

    def close(self) -> None:
        """Let no call begin. Each owes one ``open``."""
        self._shut += 1

    def open(self) -> None:
        """Let calls begin, once nobody keeps it shut."""
        self._shut -= 1
        if not self.shut:
            self.release()
            self._changes.announce()

    def hold(self) -> None:
        """Engines hold back the calls that are on their way: until the gate opens, no deadline pays for them."""
        for flight in self.flights:
            if flight.deadline is not None:
                flight.deadline.hold()
                self._held.append(flight.deadline)

    def release(self) -> None:
        """They go on."""
        held, self._held = self._held, []
        for deadline in held:
            deadline.release()
