"""Workers of graders without processes."""

from collections.abc import Callable, Mapping
from typing import Any

from prorl_gym.environments.worker_pool import WorkerError


class InlineWorkers:
    """A pool that calls its function right here."""

    def __init__(self, function: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        self._function = function

    async def call(self, body: Mapping[str, Any], *, cpu_seconds: float) -> Mapping[str, Any]:
        return self._function(body)


class ScriptedWorkers:
    """A pool whose requests end as given, one after another."""

    def __init__(self, *outcomes: WorkerError | Mapping[str, Any]) -> None:
        self._outcomes = list(outcomes)
        self.requests: list[Mapping[str, Any]] = []

    async def call(self, body: Mapping[str, Any], *, cpu_seconds: float) -> Mapping[str, Any]:
        self.requests.append(body)
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, WorkerError):
            raise outcome
        return outcome
