"""Policies that are real models: a session on a pool of engines for each attempt."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from prorl_gym.agents.protocol import ToolSpec
from prorl_gym.errors import EngineError, FailureKind, TaskError
from prorl_gym.inference.config import normalize_url
from prorl_gym.inference.protocol import AssistantTurn
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.harness_session import HarnessSession
from prorl_gym.inference.tokens.model_session import ModelSession
from prorl_gym.inference.tokens.rollout_session import RolloutIdentity, SamplingPool
from prorl_gym.inference.tokens.transcript import ThinkingMode
from prorl_gym.inference.tokens.turn_log import TurnLog
from prorl_gym.records import Message, Segment
from prorl_gym.rollout.protocol import Job, group_key
from prorl_gym.settings import ResolvedSettings

SessionT = TypeVar("SessionT", ModelSession, HarnessSession)


class PolicyPool(SamplingPool, Protocol):
    """The part of an ``EnginePool`` that the policies of attempts use."""

    async def wait_for_room(self, session_id: str) -> None:
        """Wait until the engines have room for another rollout. See ``EnginePool``."""
        ...

    def release_slot(self, session_id: str) -> None:
        """The rollout makes no call for a while. See ``EnginePool``."""
        ...


class ModelPolicy:
    """Implements ``Policy`` on a model session, which records every token."""

    def __init__(self, session: ModelSession) -> None:
        self._session = session

    async def start_conversation(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> AssistantTurn:
        return await self._session.start_conversation(messages, [tool.as_function() for tool in tools])

    async def respond(self, messages: Sequence[Message]) -> AssistantTurn:
        return await self._session.respond(messages)


class _Session(Generic[SessionT]):
    """Implements ``AttemptSession`` over a session on a pool."""

    def __init__(self, session: SessionT, pool: PolicyPool, job: Job) -> None:
        self.model_session = session
        self._pool = pool
        self._job = job

    async def failure_at_deadline(self) -> EngineError | None:
        return await self.model_session.failure_at_deadline()

    async def wait_for_room(self) -> None:
        if not self._job.request.evaluation:
            await self._pool.wait_for_room(self._job.request.rollout_id)

    def release_engine_slot(self) -> None:
        self._pool.release_slot(self._job.request.rollout_id)

    def mark_cancelled(self) -> None:
        self.model_session.mark_cancelled()

    async def close(self) -> None:
        self.model_session.close()

    def segments(self) -> list[Segment]:
        return self.model_session.segments()


class _ModelPolicySession(_Session[ModelSession]):
    """Implements ``PolicySession``."""

    def __init__(self, session: ModelSession, pool: PolicyPool, job: Job) -> None:
        super().__init__(session, pool, job)
        self.policy = ModelPolicy(session)


class ModelPolicySource:
    """Implements ``PolicySource``; makes the sessions of agent programs too.

    ``codec`` is the tokenizer and chat template that the engines of ``pool`` serve. ``pools_by_url`` are pools for
    requests that name their own engine, by address; no other address is ever called. For ``thinking`` see
    ``inference.tokens.transcript``.
    """

    def __init__(
        self,
        pool: PolicyPool,
        codec: ChatCodec,
        pools_by_url: Mapping[str, PolicyPool] | None = None,
        *,
        thinking: ThinkingMode = "keep",
    ) -> None:
        self._pool = pool
        self.codec = codec
        self._thinking: ThinkingMode = thinking
        self._pools_by_url = pools_by_url or {}

    def open_session(
        self, job: Job, settings: ResolvedSettings, turn_log: TurnLog | None = None
    ) -> _ModelPolicySession:
        """See ``PolicySource.open_session``. Raises ``TaskError`` (``BAD_ROW``): the engine is not allowed."""
        pool = self._pool_for(job.request.inference_url)
        session = ModelSession(pool, self.codec, settings, **self._identity(job), turn_log=turn_log)
        return _ModelPolicySession(session, pool, job)

    def open_harness_session(self, job: Job, settings: ResolvedSettings) -> _Session[HarnessSession]:
        """Return a fresh session that records an agent program's calls. Raises as ``open_session``."""
        pool = self._pool_for(job.request.inference_url)
        return _Session(HarnessSession(pool, self.codec, settings, **self._identity(job)), pool, job)

    def _identity(self, job: Job) -> RolloutIdentity:
        request = job.request
        return {
            "rollout_id": request.rollout_id,
            "replica": request.replica,
            "priority": int(request.evaluation),
            "group_id": group_key(request),
            "thinking": self._thinking,
        }

    def _pool_for(self, url: str | None) -> PolicyPool:
        if url is None:
            return self._pool
        pool = None
        with suppress(ValueError):  # what is no address is on no list
            pool = self._pools_by_url.get(normalize_url(url))
        if pool is None:
            raise TaskError(
                FailureKind.BAD_ROW,  # shown from the @ on: before it may be a password
                f"inference_url {url.rpartition('@')[2][:200]!r} is not on the service's allow-list.",
                "Add it to inference_urls in the service's configuration, or leave it out.",
            )
        return pool
