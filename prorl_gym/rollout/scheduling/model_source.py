"""Policies that are real models: a session on a pool of engines for each attempt."""

from collections.abc import Mapping
from typing import Protocol

from prorl_gym.agents.model_policy import ModelPolicy
from prorl_gym.errors import EngineError, FailureKind, TaskError
from prorl_gym.gateway.rollout_gateway import RolloutGateway
from prorl_gym.inference.config import normalize_url
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.harness_session import HarnessSession
from prorl_gym.inference.tokens.model_session import ModelSession
from prorl_gym.inference.tokens.rollout_session import RolloutIdentity, SamplingPool
from prorl_gym.inference.tokens.transcript import ThinkingMode
from prorl_gym.inference.tokens.turn_log import TurnLog
from prorl_gym.records import Segment
from prorl_gym.rollout.protocol import Job
from prorl_gym.settings import ResolvedSettings


class PolicyPool(SamplingPool, Protocol):
    """What the policies of attempts need of an ``EnginePool``."""

    async def wait_for_room(self, session_id: str) -> None:
        """Wait until the engines have room for another rollout. See ``EnginePool``."""
        ...

    def release_slot(self, session_id: str) -> None:
        """The rollout makes no call for a while. See ``EnginePool``."""
        ...


class _Session:
    """Implements ``AttemptSession`` over a session on a pool."""

    def __init__(self, session: ModelSession | HarnessSession, pool: PolicyPool, job: Job) -> None:
        self._session = session
        self._pool = pool
        self._job = job

    async def failure_at_deadline(self) -> EngineError | None:
        return await self._session.failure_at_deadline()

    async def wait_for_room(self) -> None:
        if not self._job.request.evaluation:
            await self._pool.wait_for_room(self._job.request.rollout_id)

    def release_engine_slot(self) -> None:
        self._pool.release_slot(self._job.request.rollout_id)

    def mark_cancelled(self) -> None:
        self._session.mark_cancelled()

    async def close(self) -> None:
        self._session.close()

    def segments(self) -> list[Segment]:
        return self._session.segments()


class _ModelPolicySession(_Session):
    """Implements ``PolicySession``."""

    def __init__(self, session: ModelSession, pool: PolicyPool, job: Job) -> None:
        super().__init__(session, pool, job)
        self.policy = ModelPolicy(session)


class _HarnessGatewaySession(_Session):
    """Implements ``GatewaySession``."""

    def __init__(
        self, session: HarnessSession, codec: ChatCodec, settings: ResolvedSettings, pool: PolicyPool, job: Job
    ) -> None:
        super().__init__(session, pool, job)
        self.gateway = RolloutGateway(session, codec, settings)


class ModelPolicySource:
    """Implements ``PolicySource`` and ``GatewaySource``.

    Args:
        pool: engines of the policy.
        codec: tokenizer and chat template that these engines serve.
        pools_by_url: pools for requests that name their own engine, by address. No other address is ever called.
        thinking: what happens to earlier thoughts at a new user turn. See
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
        self._codec = codec
        self._thinking: ThinkingMode = thinking
        self._pools_by_url = pools_by_url or {}

    def open_session(
        self, job: Job, settings: ResolvedSettings, turn_log: TurnLog | None = None
    ) -> _ModelPolicySession:
        """See ``PolicySource.open_session``.

        Raises:
            TaskError: ``BAD_ROW``, the request names an engine that is not on the allow-list.
        """
        pool = self._pool_for(job.request.inference_url)
        session = ModelSession(pool, self._codec, settings, **self._identity(job), turn_log=turn_log)
        return _ModelPolicySession(session, pool, job)

    def open_gateway(self, job: Job, settings: ResolvedSettings) -> _HarnessGatewaySession:
        """See ``GatewaySource.open_gateway``. Raises as ``open_session``."""
        pool = self._pool_for(job.request.inference_url)
        session = HarnessSession(pool, self._codec, settings, **self._identity(job))
        return _HarnessGatewaySession(session, self._codec, settings, pool, job)

    def _identity(self, job: Job) -> RolloutIdentity:
        request = job.request
        return {
            "rollout_id": request.rollout_id,
            "replica": request.replica,
            "priority": int(request.evaluation),
            # Runs may name their groups alike: those share no prompt.
            "group_id": f"{request.run_id}/{request.group_id}" if request.group_id else "",
            "thinking": self._thinking,
        }

    def _pool_for(self, url: str | None) -> PolicyPool:
        if url is None:
            return self._pool
        pool = self._pools_by_url.get(_normalized(url))
        if pool is None:
            raise TaskError(
                FailureKind.BAD_ROW,  # shown from the @ on: before it may be a password
                f"inference_url {url.rpartition('@')[2][:200]!r} is not on the service's allow-list.",
                "Add it to inference_urls in the service's configuration, or leave it out.",
            )
        return pool


def _normalized(url: str) -> str:
    """Spell an address as the configuration does; what is no address is on no list."""
    try:
        return normalize_url(url)
    except ValueError:
        return ""
