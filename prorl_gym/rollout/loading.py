"""The runner of a service that accepts rollouts while the real runner's tokenizer and sandboxes are being loaded."""

from collections.abc import AsyncIterator, Callable, Sequence

from prorl_gym.errors import CancelReason, ShuttingDownError
from prorl_gym.rollout.protocol import Capacity, Finished, Job, Parked, StageEntered


class LoadingRunner:
    """Implements ``Runner``: has no room and nothing in hand. ``RolloutService.begin`` replaces it.

    Args:
        must_offer: raises a ``TaskError`` for an environment that the real one will not have.
    """

    def __init__(self, must_offer: Callable[[str], None]) -> None:
        self._must_offer = must_offer

    def must_offer(self, environment: str) -> None:
        """See ``Runner.must_offer``."""
        self._must_offer(environment)

    async def accept(self, job: Job) -> None:
        """See ``Runner.accept``.

        Raises:
            ShuttingDownError: always.
        """
        raise ShuttingDownError("The runner is not loaded yet.", "Begin rollouts after RolloutService.begin.")

    async def events(self) -> AsyncIterator[StageEntered | Parked | Finished]:
        """See ``Runner.events``."""
        for event in ():
            yield event

    async def cancel(self, rollout_ids: Sequence[str], reason: CancelReason) -> None:
        """See ``Runner.cancel``."""

    async def park(self, rollout_ids: Sequence[str]) -> None:
        """See ``Runner.park``."""

    async def unpark(self, rollout_ids: Sequence[str]) -> None:
        """See ``Runner.unpark``."""

    async def capacity(self) -> Capacity:
        """See ``Runner.capacity``."""
        return Capacity(queued=0, init=0, run=0, eval=0, free=0)

    async def drain(self) -> None:
        """See ``Runner.drain``."""

    async def close(self) -> None:
        """See ``Runner.close``."""
