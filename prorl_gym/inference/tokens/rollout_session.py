"""The model calls of one rollout: what the sessions of the built-in loop and of harnesses have in common.

None of a stopped call's tokens is lost, and whose fault a missing answer is.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, Required, TypedDict, Unpack
from uuid import uuid4

from prorl_gym.errors import EngineError, Evidence, FailureKind, LimitReached, TaskError, blame
from prorl_gym.inference.balance.call_gate import InFlightCall
from prorl_gym.inference.balance.members import PoolMember
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.transcript import ThinkingMode, TurnPrompt
from prorl_gym.inference.tokens.turn import derive_seed
from prorl_gym.settings import ResolvedSettings

log = logging.getLogger(__name__)

_SALVAGE_SECONDS = 2.0
"""Longest wait of a stopped rollout for the tokens of its call in flight: those before a deadline are graded."""

_CANCELLED_SALVAGE_SECONDS = 0.1
"""The same for a cancelled rollout: a healthy engine returns them at its next step."""

_RUN_SECONDS_FIX = (
    "Raise 'run_seconds', add engines, or start them so that stopped calls keep tokens (docs/engines.md)."
)


class SamplingPool(Protocol):
    """The methods of an ``EnginePool`` that a session needs; see there."""

    @property
    def max_model_len(self) -> int | None: ...
    async def generate(self, request: GenerationRequest) -> GenerationResult: ...
    async def cancel(self, request_id: str) -> bool: ...
    def find_call(self, request_id: str) -> InFlightCall | None: ...
    async def may_have_sampled(self, member: PoolMember, max_tokens: int, seconds: float) -> bool: ...
    def forget_session(self, session_id: str) -> None: ...


class RolloutIdentity(TypedDict, total=False):
    rollout_id: Required[str]
    """The session id towards engines; calls of one rollout meet the same one."""
    replica: int
    """Position in the group, part of the seed."""
    priority: int
    """Higher is served first by engines that can."""
    group_id: str
    """Rollouts of one group share their first prompt; empty if it is not shared."""
    thinking: ThinkingMode
    """Treatment of earlier thoughts at a new user turn. See ``transcript``."""


class RolloutSession:
    """The model, for one rollout: its calls, several of which may be in flight, and its place on an engine."""

    def __init__(
        self, pool: SamplingPool, codec: ChatCodec, settings: ResolvedSettings, **identity: Unpack[RolloutIdentity]
    ) -> None:
        self._pool = pool
        self._codec = codec
        self._settings = settings
        self._rollout_id = identity["rollout_id"]
        self._replica = identity.get("replica", 0)
        self._priority = identity.get("priority", 0)
        self._group_id = identity.get("group_id", "")
        self._thinking: ThinkingMode = identity.get("thinking", "keep")
        ends = (codec.terminator_id, *sorted(codec.end_ids), *settings.stop_token_ids)
        self._stop_token_ids = tuple(dict.fromkeys(ends))
        self._turn_count: int = 0
        self._sampled_count = 0
        self._unanswered_call: tuple[PoolMember, int, float] | None = None
        """Engine, ``max_tokens`` and seconds of the call that a cancel ended before any of its tokens came."""
        self._salvage_seconds = _SALVAGE_SECONDS

    @property
    def turns(self) -> int:
        """Turns so far, those under way included."""
        return self._turn_count

    async def failure_at_deadline(self) -> EngineError | None:
        """Return the engine's failure that kept the policy from answering a call that was given up, if there is one.

        A call without an answer is the policy's if its engine can have been sampling for it all the time. A rollout
        without a single token does not count against the policy.
        """
        slow = self._unanswered_call is None or await self._pool.may_have_sampled(*self._unanswered_call)
        verdict = blame(Evidence.CALL_IN_PROGRESS if slow and self._sampled_count else Evidence.CALL_UNANSWERED)
        if verdict.kind is None:
            return None
        if self._unanswered_call is None:
            return EngineError(verdict.kind, "no token was sampled in all the time of RUN.", _RUN_SECONDS_FIX)
        member, _, seconds = self._unanswered_call
        why = "no token was sampled in all the time of RUN" if slow else "the engine was not at work on it"
        return EngineError(
            verdict.kind,
            f"engine {member.name}: a call had no answer after {seconds:.1f} s: {why}.",
            _RUN_SECONDS_FIX if slow else "Look into the engine's log: it hangs, or has lost the call.",
        )

    def mark_cancelled(self) -> None:
        """Wait less for the tokens of calls in flight: the rollout was cancelled."""
        self._salvage_seconds = _CANCELLED_SALVAGE_SECONDS

    def close(self) -> None:
        """Free the rollout's place on an engine. Idempotent."""
        self._pool.forget_session(self._rollout_id)

    def _request(self, prompt: TurnPrompt, turn: int, sampled: int, max_tokens: int) -> GenerationRequest:
        """Return the request of a call; ``sampled``: tokens that its turn has already."""
        return GenerationRequest(
            request_id=uuid4().hex,
            session_id=self._rollout_id,
            prompt_ids=prompt.ids,
            max_tokens=max_tokens,
            temperature=self._settings.temperature,
            top_p=self._settings.top_p,
            top_k=self._settings.top_k,
            stop_token_ids=self._stop_token_ids,
            seed=derive_seed(self._settings.seed, self._replica, turn, sampled),
            priority=self._priority,
            group_id=self._group_id,
            conversation=self._codec.rewrite_conversation(prompt.conversation),
            prompt_ids_json=prompt.ids_json,
        )

    async def _sample(
        self, turn: int, request: GenerationRequest, on_result: Callable[[GenerationResult], list[int]]
    ) -> GenerationResult:
        """Make one call; ``on_result`` takes what came, of a cancelled call too, and returns the ids that are kept.

        Raises ``EngineError``: no engine could answer.
        """
        call = asyncio.create_task(self._pool.generate(request), name=f"turn {turn} of {self._rollout_id}")
        try:
            result = await asyncio.shield(call)
        except asyncio.CancelledError:
            flight, sampled = self._pool.find_call(request.request_id), self._sampled_count
            seconds = 0.0 if flight is None else flight.charged_seconds
            await self._salvage(call, request, on_result)
            if flight is not None and self._sampled_count == sampled:
                self._unanswered_call = flight.member, request.max_tokens, seconds
            raise
        self._report(result, on_result)
        return result

    def _report(self, result: GenerationResult, on_result: Callable[[GenerationResult], list[int]]) -> None:
        """Count and hand on what a call sampled; a replayed call comes here only."""
        self._sampled_count += len(on_result(result))

    async def _salvage(
        self,
        call: asyncio.Task[GenerationResult],
        request: GenerationRequest,
        on_result: Callable[[GenerationResult], list[int]],
    ) -> None:
        """Keep what the engine sampled before the call was cancelled; bounded, and raises nothing."""
        try:
            async with asyncio.timeout(self._salvage_seconds):
                # A call may have been answered just before the cancel: no engine has it then.
                if call.done() or await self._pool.cancel(request.request_id):
                    self._report(await asyncio.shield(call), on_result)
        except (TimeoutError, EngineError, LimitReached) as error:
            log.debug("rollout %s: nothing salvaged of a call: %r", self._rollout_id, error)
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    @property
    def context_limit(self) -> int:
        """Longest segment in tokens: the settings' limit, or the engine's context if that is smaller."""
        return min(self._settings.max_tokens, self._pool.max_model_len or self._settings.max_tokens)

    def _prompt_too_long_error(self, length: int | str) -> TaskError:
        return TaskError(
            FailureKind.PROMPT_TOO_LONG,
            f"the first prompt has {length} tokens and leaves no room in {self.context_limit}.",
            "Raise 'max_tokens', serve the model with a longer context, or drop the row.",
        )
