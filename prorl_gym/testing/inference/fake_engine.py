"""A scripted engine for tests and for service benches: deterministic, instant, in process."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from prorl_gym.errors import EngineError
from prorl_gym.inference.protocol import EngineHealth, GenerationRequest, GenerationResult
from prorl_gym.records import EngineLoad


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer of the engine to one call."""

    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length", "abort"] | None = None
    """``None``: ``length`` when ``max_tokens`` cuts it, otherwise ``stop``."""
    hold: asyncio.Event | None = None
    """Answer only when this is set, or the call is cancelled; a cancel salvages the first half of the tokens."""
    routed_experts: Any = None


Script = Callable[[GenerationRequest], Reply | Exception]


def scripted_replies(script: Iterable[Reply | Exception]) -> Script:
    """Return a script that gives these answers one after the other."""
    pending = iter(script)
    return lambda request: next(pending)


class FakeEngine:
    """An engine that gives the answers of a script, called once per call; an exception that it returns is raised."""

    def __init__(self, name: str, script: Script, *, max_model_len: int | None = None, version: int = 0) -> None:
        self.name = name
        self.version = version
        self.requests: list[GenerationRequest] = []
        """Every call, its ids copied."""
        self.down_error: EngineError | None = None
        """While it is set, calls and ``health`` fail with it."""
        self.is_hanging = False
        """It samples nothing, although its health is good."""
        self.closed = False
        self.reported_load: EngineLoad | None = None
        """The result of ``read_load``."""
        self.fingerprint: list[float] | None = None
        """The result of ``probe_logprobs``; by default it depends on the version and the ids."""
        self.cache_resets = 0
        """How often the prefix cache was dropped."""
        self.refuses_cache_reset = False
        """The cache cannot be dropped, since blocks are held."""
        self.reports_versions = False
        """The first half of a held call has the version at its start, the rest that at its end."""
        self.call_held = asyncio.Event()
        """Set once a call is held."""
        self._script = script
        self._max_model_len = max_model_len
        self._stop_events: dict[str, asyncio.Event] = {}

    @property
    def in_flight(self) -> int:
        """Calls that are being held."""
        return len(self._stop_events)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.requests.append(replace(request, prompt_ids=tuple(request.prompt_ids)))
        if self.down_error is not None:
            raise self.down_error
        began_with = self.version
        if self.is_hanging:
            await asyncio.Event().wait()
        reply = self._script(request)
        if isinstance(reply, Exception):
            raise reply
        ids, finish = list(reply.token_ids[: request.max_tokens]), reply.finish_reason
        if finish is None:
            finish = "length" if len(ids) < len(reply.token_ids) else "stop"
        if reply.hold is not None and await self._stopped_while_holding(request.request_id, reply.hold):
            ids, finish = ids[: len(ids) // 2], "abort"
        return GenerationResult(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            finish_reason=finish,
            logprob_kind="raw",
            engine=self.name,
            versions=self._versions(began_with, len(ids)),
            seconds=0.0,
            versions_reported=self.reports_versions,
            routed_experts=reply.routed_experts,
        )

    async def cancel(self, request_id: str) -> None:
        if stop := self._stop_events.get(request_id):
            stop.set()

    async def health(self) -> EngineHealth:
        if self.down_error is not None:
            return EngineHealth(ok=False, detail=self.down_error.what)
        return EngineHealth(ok=True, max_model_len=self._max_model_len)

    async def sample_trial(self, seconds: float) -> float:
        if self.down_error is not None:
            raise self.down_error
        if self.is_hanging:
            await asyncio.Event().wait()
        return 0.0

    async def read_load(self) -> EngineLoad | None:
        return self.reported_load

    async def probe_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return log-probs that differ from version to version."""
        if self.down_error is not None:
            raise self.down_error
        if self.fingerprint is not None:
            return list(self.fingerprint)
        return [-1.0 - ((self.version * 7 + token) % 13) / 10 for token in token_ids[1:]]

    async def reset_prefix_cache(self) -> bool:
        if self.down_error is not None:
            raise self.down_error
        self.cache_resets += not self.refuses_cache_reset
        return not self.refuses_cache_reset

    async def close(self) -> None:
        self.closed = True

    def _versions(self, began_with: int, count: int) -> list[int]:
        if not self.reports_versions or self.version == began_with:
            return [began_with] * count
        return [began_with] * (count // 2) + [self.version] * (count - count // 2)

    async def _stopped_while_holding(self, request_id: str, hold: asyncio.Event) -> bool:
        """Wait for ``hold`` or for a cancel; whether it was the cancel."""
        stop = self._stop_events[request_id] = asyncio.Event()
        self.call_held.set()
        waits = [asyncio.create_task(event.wait()) for event in (hold, stop)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._stop_events[request_id]
            for wait in waits:
                wait.cancel()
        return stop.is_set()
