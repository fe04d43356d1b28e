"""One attempt at one rollout: INIT, RUN, EVAL, and what each way of breaking means.

This file is the failure doctrine of ``prorl_gym.errors`` in code. ``Walk.go`` may raise anything or be cancelled at any
await; ``Walk.conclude`` turns whatever happened into the one terminal record.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from prorl_gym.agents.protocol import Artifacts, Tool
from prorl_gym.environments.protocol import Environment, Episode, RunContext
from prorl_gym.errors import (
    CancelReason,
    Cause,
    FailureKind,
    GraderError,
    Limit,
    LimitReached,
    RolloutError,
)
from prorl_gym.logs import redact
from prorl_gym.records import Message, Outcome, Rollout, Score, Segment
from prorl_gym.rollout.leases import SandboxLeases
from prorl_gym.rollout.passage import Passage, StageExpired
from prorl_gym.rollout.policy_source import PolicySession, PolicySource
from prorl_gym.rollout.protocol import Job, Stage
from prorl_gym.settings import ResolvedSettings, RolloutSettings, resolve

_LOG = logging.getLogger(__name__)

Environments = Callable[[str], Environment[Any]]
"""Finds an environment by name; raises ``TaskError(UNKNOWN_ENVIRONMENT)``."""
SettingsLevels = Callable[[Job], tuple[RolloutSettings, ...]]
"""The levels below the environment's for a job: run, then service."""


class Walk:
    """The way of one attempt through the stages. Plain state that its one task changes.

    Args:
        job: what to do.
        passage: its slots.
        leases: sandboxes of this attempt.
        policies: where the policy comes from.
    """

    def __init__(self, job: Job, passage: Passage, leases: SandboxLeases, policies: PolicySource) -> None:
        self.job = job
        self.passage = passage
        self.cancelled: CancelReason | None = None
        self._cancelled_at = 0.0
        self._cancel_seconds: float | None = None
        self._leases = leases
        self._policies = policies
        self._session: PolicySession | None = None
        self._settings: ResolvedSettings | None = None
        self._prompt: tuple[Message, ...] = ()
        self._tools: tuple[Tool, ...] = ()
        self._artifacts = Artifacts()

    def cancel(self, reason: CancelReason) -> None:
        """Nobody wants it any more; its task is to be cancelled next.

        Its processes die at once, beside the engine's call: they need not wait for the last tokens of that.
        """
        self.cancelled = reason
        self._cancelled_at = time.monotonic()
        self.passage.unwanted = True
        self._leases.abandon()
        if self._session is not None:
            self._session.hurry()

    async def go(self, environments: Environments, levels: SettingsLevels) -> tuple[Outcome, Score]:
        """Do the work: return how it ended and the score; every end without a verdict is raised instead."""
        request = self.job.request
        asked = time.monotonic()
        environment = environments(request.environment)
        settings = self._settings = resolve(request.settings, environment.settings, *levels(self.job))
        task = environment.parse(request.task)
        async with AsyncExitStack() as ready:
            await ready.enter_async_context(self.passage.ahead())
            async with self.passage.through("init", settings.init_seconds, asked):
                episode = await environment.init(task, self._leases, settings)
                self._prompt, self._tools = tuple(episode.messages), tuple(episode.tools)
            prepared = time.monotonic()
            async with self.passage.beside_others():
                outcome = await self._run(environment, task, episode, settings, prepared, ready)
                await self._close_session()  # grading needs no engine
                outcome, score = await self._grade(environment, task, settings, outcome)
        return outcome, score

    async def _run(
        self,
        environment: Environment[Any],
        task: Any,
        episode: Episode,
        settings: ResolvedSettings,
        prepared: float,
        ready: AsyncExitStack,
    ) -> Outcome:
        """Let the agent work; return how that ended, unless somebody else than the policy ended it."""
        session = self._session = self._policies.open(self.job, settings)
        try:
            async with self.passage.through("run", settings.run_seconds, prepared, session.room):
                await ready.aclose()  # it no longer waits for RUN: the next one may get ready
                with self.passage.parkable(session) as policy:
                    context = RunContext(policy, self._leases, settings, self._artifacts)
                    await environment.run(task, episode, context)
        except StageExpired:
            if (failure := await session.failure_at_deadline()) is not None:
                raise failure from None
            return Outcome(status="truncated", limit=Limit.TIME)
        except LimitReached as reached:
            return Outcome(status="truncated", limit=reached.limit)
        except RolloutError as error:
            return _broken_by_policy(await self._leases.explain(error, self.job.losses), "run")
        return Outcome(status="completed")

    async def _grade(
        self, environment: Environment[Any], task: Any, settings: ResolvedSettings, outcome: Outcome
    ) -> tuple[Outcome, Score]:
        """Judge what was handed in. What breaks its own grading is worth nothing."""
        async with self.passage.through("eval", settings.eval_seconds, time.monotonic()):
            try:
                score: Any = await environment.evaluate(task, self._artifacts, self._leases, settings)
            except RolloutError as error:
                broken = _broken_by_policy(await self._leases.explain(error, self.job.losses), "eval")
                score = Score(reward=0.0, detail={"why": broken.message})
                return (broken if outcome.status == "completed" else outcome), score
        if not isinstance(score, Score):
            raise GraderError(f"Environment {environment.name}: evaluate returned {type(score).__name__}, not a Score.")
        return outcome, score

    async def conclude(self, work: asyncio.Task[tuple[Outcome, Score]], cleanup_seconds: float) -> Rollout:
        """Release what the attempt holds and write its record. Never raises.

        Args:
            work: the task that ran ``go``; it is done.
            cleanup_seconds: how long the engine's and the sandboxes' release may take before it goes on unattended.
        """
        outcome, score = self._verdict(work)
        await _bounded(self._close_session(), cleanup_seconds, "the policy session")
        await _bounded(self._leases.close(), cleanup_seconds, "the sandboxes")
        if self.cancelled is not None:
            self._cancel_seconds = time.monotonic() - self._cancelled_at
        try:
            return self._record(outcome, score, self._segments())
        except Exception as error:  # an environment filled the record with what does not fit
            _LOG.exception("the record could not be written")
            return self._record(_failed(FailureKind.INTERNAL, self.passage.stage, error), None, [], bare=True)

    def _verdict(self, work: asyncio.Task[tuple[Outcome, Score]]) -> tuple[Outcome, Score | None]:
        error = RuntimeError("the attempt was cancelled by nobody") if work.cancelled() else work.exception()
        if self.cancelled is not None:  # also when it swallowed that: its sandboxes were gone by then
            return Outcome(status="cancelled", reason=self.cancelled, stage=self.passage.stage), None
        match error:
            case None:
                return work.result()
            case RolloutError():
                _LOG.info("attempt failed: %s", error)
                return _failed(error.kind, self.passage.stage, error), None
            case StageExpired():
                _LOG.info("attempt failed: %s", error)
                return _failed(FailureKind.STAGE_TIMEOUT, self.passage.stage, error), None
            case _:
                _LOG.error("attempt broke in %s", self.passage.stage, exc_info=error)
                said = f"{type(error).__name__} in {self.passage.stage}; the service's log has the traceback."
                return _failed(FailureKind.INTERNAL, self.passage.stage, RuntimeError(said)), None

    async def _close_session(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _segments(self) -> list[Segment]:
        return [] if self._session is None else self._session.segments()

    def _record(self, outcome: Outcome, score: Score | None, segments: list[Segment], *, bare: bool = False) -> Rollout:
        return terminal_record(
            self.job,
            outcome,
            score=score,
            segments=segments,
            messages=[] if bare else self._artifacts.messages,
            prompt_messages=0 if bare else _common(self._prompt, self._artifacts.messages),
            tools=[tool.spec.as_function() for tool in self._tools],
            settings=self._settings,
            stages=self.passage.times,
            cancel_seconds=self._cancel_seconds,
        )


def terminal_record(job: Job, outcome: Outcome, **work: Any) -> Rollout:
    """Return the terminal record of a job; ``work`` are the fields of ``Rollout`` that its attempt filled."""
    request = job.request
    return Rollout(
        rollout_id=request.rollout_id,
        attempt=job.attempt,
        run_id=request.run_id,
        group_id=request.group_id,
        group_size=request.group_size,
        replica=request.replica,
        stands_in_for=request.stands_in_for,
        environment=request.environment,
        evaluation=request.evaluation,
        metadata=request.metadata,
        outcome=outcome,
        retries=list(job.retries),
        accepted_at=job.accepted_at,
        finished_at=max(time.time(), job.accepted_at),  # a clock that was set back makes no time pass backwards
        **work,
    )


def _common(prompt: Sequence[Message], messages: Sequence[Message]) -> int:
    """Count the messages that are the prompt's: an environment may be killed before it noted them, or note others."""
    for place, (said, noted) in enumerate(zip(prompt, messages, strict=False)):
        if said != noted:
            return place
    return min(len(prompt), len(messages))


def _failed(kind: FailureKind, stage: Stage, error: BaseException) -> Outcome:
    lines = redact(str(error)).splitlines()[:2]
    return Outcome(
        status="failed",
        kind=kind,
        stage=stage,
        message="\n".join(line[:500] for line in lines),
        evidence=error.evidence if isinstance(error, RolloutError) else None,
    )


def _broken_by_policy(error: RolloutError, stage: Stage) -> Outcome:
    """Return the outcome of an attempt that keeps its score; raise what somebody else than the policy caused."""
    if error.cause is not Cause.POLICY:
        raise error
    return _failed(error.kind, stage, error)


async def _bounded(release: Awaitable[None], seconds: float, what: str) -> None:
    """Wait for a release; past its time, or when it fails, say so and go on."""
    task = asyncio.ensure_future(release)
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        task.cancel()
        _LOG.error("%s could not be released within %g s", what, seconds)
    elif not task.cancelled() and (error := task.exception()) is not None:
        _LOG.error("%s could not be released", what, exc_info=error)
