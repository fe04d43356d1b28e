"""Policies that are real models: a session on a pool of engines for each attempt."""

from collections.abc import Mapping

from prorl_gym.agents.policy import ModelPolicy
from prorl_gym.errors import EngineError, FailureKind, TaskError
from prorl_gym.inference.chat import Codec
from prorl_gym.inference.config import normal_url
from prorl_gym.inference.pool import EnginePool
from prorl_gym.inference.session import ModelSession
from prorl_gym.inference.transcript import Thinking
from prorl_gym.records import Segment
from prorl_gym.rollout.protocol import Job
from prorl_gym.settings import ResolvedSettings


class _Session:
    """Implements ``PolicySession``."""

    def __init__(self, session: ModelSession, pool: EnginePool, job: Job) -> None:
        self._session = session
        self._pool = pool
        self._job = job
        self._policy = ModelPolicy(session)

    @property
    def policy(self) -> ModelPolicy:
        return self._policy

    async def failure_at_deadline(self) -> EngineError | None:
        return await self._session.failure_at_deadline()

    async def room(self) -> None:
        if not self._job.request.evaluation:
            await self._pool.room(self._job.request.rollout_id)

    def rest(self) -> None:
        self._pool.rest(self._job.request.rollout_id)

    def hurry(self) -> None:
        self._session.hurry()

    async def close(self) -> None:
        self._session.close()

    def segments(self) -> list[Segment]:
        return self._session.segments()


class ModelPolicySource:
    """Implements ``PolicySource``.

    Args:
        pool: engines of the policy.
        codec: tokenizer and chat template that these engines serve.
        allowed: pools for requests that name their own engine, by address. No other address is ever called.
        thinking: what happens to earlier thoughts at a new user turn. See ``inference.transcript``.
    """

    def __init__(
        self,
        pool: EnginePool,
        codec: Codec,
        allowed: Mapping[str, EnginePool] | None = None,
        *,
        thinking: Thinking = "keep",
    ) -> None:
        self._pool = pool
        self._codec = codec
        self._thinking: Thinking = thinking
        self._allowed = allowed or {}

    def open(self, job: Job, settings: ResolvedSettings) -> _Session:
        """See ``PolicySource.open``.

        Raises:
            TaskError: ``BAD_ROW``, the request names an engine that is not on the allow-list.
        """
        request = job.request
        pool = self._pool_for(request.inference_url)
        session = ModelSession(
            pool,
            self._codec,
            settings,
            rollout_id=request.rollout_id,
            replica=request.replica,
            priority=int(request.evaluation),
            # Runs may name their groups alike: those share no prompt.
            group_id=f"{request.run_id}/{request.group_id}" if request.group_id else "",
            thinking=self._thinking,
        )
        return _Session(session, pool, job)

    def _pool_for(self, url: str | None) -> EnginePool:
        if url is None:
            return self._pool
        pool = self._allowed.get(_normal(url))
        if pool is None:
            raise TaskError(
                FailureKind.BAD_ROW,  # shown from the @ on: what stands before it may be a password
                f"inference_url {url.rpartition('@')[2][:200]!r} is not on the service's allow-list.",
                "Add it to inference_urls in the service's configuration, or leave it out.",
            )
        return pool


def _normal(url: str) -> str:
    """Spell an address as the configuration does; what is no address is on no list."""
    try:
        return normal_url(url)
    except ValueError:
        return ""
