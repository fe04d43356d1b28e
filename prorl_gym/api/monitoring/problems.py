"""What keeps rollouts from being made, in one line for the status, the pages and the log."""

import logging
from collections.abc import Sequence

from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.rollout.service import RolloutService

_LOG = logging.getLogger(__name__)


def pool_problem(pools: Sequence[EnginePool]) -> str:
    """Return why the first pool that samples nothing does not; empty if all do. The cause follows the first colon."""
    return next(filter(None, (pool.problem for pool in pools)), "")


def find_problem(service: RolloutService, pools: Sequence[EnginePool]) -> str:
    """Return what keeps rollouts from being made, its cause and what to do, in one line; empty if nothing does."""
    return service.problem or pool_problem(pools)


class ProblemLog:
    """Logs a line when a problem begins, changes or ends."""

    def __init__(self) -> None:
        self._last = ""

    def report(self, problem: str) -> None:
        """Report the problem there is now; empty: there is none."""
        if problem and problem != self._last:
            _LOG.warning("%s", problem)
        elif self._last and not problem:
            _LOG.info("over: %s", self._last.partition(":")[0])
        self._last = problem
