"""Where a rollout gets its policy from. The runner knows only this; which engines stand behind it is wiring."""

from typing import Protocol

from prorl_gym.agents.protocol import Policy
from prorl_gym.errors import RolloutError
from prorl_gym.records import Segment
from prorl_gym.rollout.protocol import Job
from prorl_gym.settings import ResolvedSettings


class PolicySession(Protocol):
    """The policy of one attempt, with the tokens behind it."""

    @property
    def policy(self) -> Policy:
        """What the agent loop talks to."""
        ...

    async def failure_at_deadline(self) -> RolloutError | None:
        """Return why RUN's deadline says nothing about the policy, if its engines kept it from answering."""
        ...

    async def room(self) -> None:
        """Wait until it makes sense to begin: an agent that engines have no room for would hold its slot for nothing.

        Evaluation does not wait: it goes before what waits already.
        """
        ...

    def rest(self) -> None:
        """Give up its place on the engines until the next call: the agent is parked. No call is under way."""
        ...

    def hurry(self) -> None:
        """Nobody wants the rollout any more: its end is not to wait long for the last tokens of the call under way."""
        ...

    async def close(self) -> None:
        """Cancel the engine call that is under way, keep what it sampled, forget the session. Idempotent."""
        ...

    def segments(self) -> list[Segment]:
        """Return every token so far, complete after ``close``. Also after a failure or a cancel."""
        ...


class PolicySource(Protocol):
    """Makes sessions."""

    def open(self, job: Job, settings: ResolvedSettings) -> PolicySession:
        """Return a fresh session for this attempt; nothing is sent yet.

        Raises:
            RolloutError: the request asks for an engine that it may not use.
        """
        ...
