"""One attempt at one rollout: INIT, RUN, EVAL, and the outcome of each way to fail.

The rules are those of ``prorl_gym.errors``. ``Attempt.run_stages`` may raise anything or be cancelled at any await;
``Attempt.finalize`` turns whatever happened into the one terminal record.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager, nullcontext
from functools import partial
from itertools import takewhile
from typing import Any

from prorl_gym.agents.protocol import Artifacts, AssistantTurn, Tool, ToolSpec
from prorl_gym.environments.protocol import Environment, Episode, RunContext, SupportsReplay
from prorl_gym.errors import (
    CancelReason,
    Cause,
    FailureKind,
    GraderError,
    Limit,
    LimitReached,
    RolloutError,
    TaskError,
)
from prorl_gym.inference.tokens.turn_log import LoggedTurn, ReplayDivergedError, TurnLog
from prorl_gym.logs import redact
from prorl_gym.records import (
    GradedSubmission,
    Message,
    Outcome,
    Rollout,
    RolloutRequest,
    Score,
    Segment,
    StageTime,
    row_id_of,
)
from prorl_gym.rollout.protocol import AgentPrograms, AttemptSession, Job, PolicySource, Stage, TurnEnded
from prorl_gym.rollout.scheduling.eager_task import start_eagerly
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.rollout.scheduling.stage_pools import AttemptSlots, StageTimeout, WorkStage
from prorl_gym.settings import ResolvedSettings, RolloutSettings, resolve_settings

_LOG = logging.getLogger(__name__)

EnvironmentLookup = Callable[[str], Environment[Any]]
"""Finds an environment by name; raises ``TaskError(UNKNOWN_ENVIRONMENT)``."""


class Attempt:
    """One attempt. ``start`` it, then await ``finalize``. ``programs`` are agents that its settings may name."""

    def __init__(
        self,
        job: Job,
        slots: AttemptSlots,
        leases: SandboxLeases,
        policies: PolicySource,
        programs: AgentPrograms | None = None,
    ) -> None:
        self.job = job
        self.slots = slots
        self.cancel_reason: CancelReason | None = None
        self._stages: asyncio.Task[tuple[Outcome, Score]] | None = None
        self._cancelled_at = 0.0
        self._cancel_seconds: float | None = None
        self._leases = leases
        self._policies = policies
        self._programs = programs
        self._session: AttemptSession | None = None
        self._settings: ResolvedSettings | None = None
        self._prompt: tuple[Message, ...] = ()
        self._tools: tuple[Tool, ...] = ()
        self._artifacts = Artifacts()
        self._turn_log: TurnLog | None = None
        """``None``: it is not to be resumed."""
        self._resume_refused = ""
        self._begun_at: float | None = None
        self._has_reached_grading = False

    def start(self, environments: EnvironmentLookup, levels: Sequence[RolloutSettings]) -> None:
        """Start the stages. ``levels`` are the settings below the environment's: the run's, then the service's."""
        self._begun_at = max(time.time(), self.job.accepted_at)
        name = f"rollout-{self.job.request.rollout_id}"
        self._stages = asyncio.create_task(self.run_stages(environments, levels), name=name)

    def cancel(self, reason: CancelReason) -> None:
        """Cancel the stages. Idempotent. Its processes die at once, and do not wait for the engine's last tokens."""
        if self.cancel_reason is not None or self._stages is None or self._stages.done():
            return
        self.cancel_reason = reason
        self._cancelled_at = time.monotonic()
        self.slots.is_cancelled = True
        self._leases.begin_close()
        if self._session is not None:
            self._session.mark_cancelled()
        self._stages.cancel()

    async def run_stages(
        self, environments: EnvironmentLookup, levels: Sequence[RolloutSettings]
    ) -> tuple[Outcome, Score]:
        """Run INIT, RUN and EVAL; return outcome and score. An end without a verdict is raised."""
        request = self.job.request
        asked = time.monotonic()
        environment = environments(request.environment)
        settings = self._settings = resolve_settings(request.settings, environment.settings, *levels)
        task = environment.parse_row(request.task)
        if settings.agent:
            self._leases.mount_for_agent(self._require_programs(settings).mounts_of(settings.agent))
        try:
            return await self._run_once(environment, task, settings, asked)
        except ReplayDivergedError as error:
            _LOG.warning("the logged turns cannot be resumed: %s", error)
            self._resume_refused = error.what
            self.job = self.job.model_copy(update={"turns": ()})
            await self._close_session()
            await self._leases.close()
            self._session, self._leases, self._artifacts = None, self._leases.make_fresh(), Artifacts()
        return await self._run_once(environment, task, settings, time.monotonic())

    async def _run_once(
        self, environment: Environment[Any], task: Any, settings: ResolvedSettings, asked: float
    ) -> tuple[Outcome, Score]:
        """Run the stages, after the turns that the job brings; raise ``ReplayDivergedError`` where these do not fit."""
        async with AsyncExitStack() as prepared_slot:
            await prepared_slot.enter_async_context(self.slots.hold_prepared_slot())
            async with self.slots.hold_stage("init", settings.init_seconds, asked):
                episode = await environment.init(task, self._leases, settings)
                if not settings.agent:  # a program brings prompt and tools of its own
                    self._prompt, self._tools = tuple(episode.messages), tuple(episode.tools)
            prepared = time.monotonic()
            async with self.slots.hold_payload_lock():
                outcome = await self._run_agent(environment, task, episode, settings, prepared, prepared_slot)
                if self._turn_log is not None:
                    self._turn_log.require_replayed()
                await self._close_session()  # grading needs no engine
                outcome, score = await self._grade(environment, task, settings, outcome)
        return outcome, score

    async def _run_agent(
        self,
        environment: Environment[Any],
        task: Any,
        episode: Episode,
        settings: ResolvedSettings,
        prepared: float,
        prepared_slot: AsyncExitStack,
    ) -> Outcome:
        """Run the agent; return its outcome. An end that the policy did not cause is raised."""
        log = None
        if settings.resume and not settings.agent and isinstance(environment, SupportsReplay):
            log = TurnLog(self.job.turns, self._report_turn, environment.normalize_answer)
        self._turn_log = log
        session, make_context = self._open_session(environment, settings, log)
        self._session = session
        try:
            async with self.slots.hold_stage("run", settings.run_seconds, prepared, session.wait_for_room):
                await prepared_slot.aclose()  # this attempt no longer waits for RUN: the next one may be prepared
                with make_context() as context:
                    await environment.run(task, episode, context)
                    if log is not None:
                        log.end()
        except StageTimeout:
            if (failure := await session.failure_at_deadline()) is not None:
                raise failure from None
            return Outcome(status="truncated", limit=Limit.TIME)
        except LimitReached as reached:
            return Outcome(status="truncated", limit=reached.limit)
        except RolloutError as error:
            return await self._policy_failure(error, "run")
        return Outcome(status="completed")

    def _open_session(
        self, environment: Environment[Any], settings: ResolvedSettings, log: TurnLog | None
    ) -> tuple[AttemptSession, Callable[[], AbstractContextManager[RunContext]]]:
        """Return the session, and what makes the context in which its agent runs.

        An agent program is not parked: its own calls time out.
        """
        make_context = partial(RunContext, leases=self._leases, settings=settings, artifacts=self._artifacts)
        if settings.agent:
            served, agent = self._require_programs(settings).open_agent(self.job, settings)
            return served, lambda: nullcontext(make_context(_NoPolicy(environment.name), agent=agent))
        session = self._policies.open_session(self.job, settings, log)

        @contextmanager
        def parkable() -> Generator[RunContext]:
            with self.slots.parkable(session) as policy:
                yield make_context(policy)

        return session, parkable

    def _require_programs(self, settings: ResolvedSettings) -> AgentPrograms:
        if self._programs is None:
            what = f"Agent '{settings.agent}' is a program, and this service runs none."
            raise TaskError(FailureKind.BAD_ROW, what, "Leave the setting 'agent' empty.")
        return self._programs

    def _report_turn(self, number: int, turn: LoggedTurn) -> None:
        rollout_id, attempt = self.job.request.rollout_id, self.job.attempt
        self.slots.on_event(TurnEnded(rollout_id=rollout_id, attempt=attempt, number=number, turn=turn))

    async def _grade(
        self, environment: Environment[Any], task: Any, settings: ResolvedSettings, outcome: Outcome
    ) -> tuple[Outcome, Score]:
        """Grade the artifacts. An answer that breaks its own grading gets reward 0."""
        async with self.slots.hold_stage("eval", settings.eval_seconds, time.monotonic()):
            self._has_reached_grading = True
            try:
                score: Any = await environment.evaluate(task, self._artifacts, self._leases, settings)
            except RolloutError as error:
                broken = await self._policy_failure(error, "eval")
                score = Score(reward=0.0, detail={"why": broken.message})
                return (broken if outcome.status == "completed" else outcome), score
        if not isinstance(score, Score):
            raise GraderError(f"Environment {environment.name}: evaluate returned {type(score).__name__}, not a Score.")
        return outcome, score

    async def _policy_failure(self, error: RolloutError, stage: Stage) -> Outcome:
        """Return the outcome of an attempt that keeps its score; raise an error that the policy did not cause."""
        diagnosed = await self._leases.diagnose_failure(error, self.job.unexplained_losses)
        if diagnosed.cause is not Cause.POLICY:
            raise diagnosed
        return _failed_outcome(diagnosed.kind, stage, diagnosed)

    async def finalize(self, cleanup_seconds: float) -> Rollout:
        """Wait for the stages, release what the attempt holds and return its record. Never raises.

        The engine's and the sandboxes' release each go on unattended after ``cleanup_seconds``.
        """
        work = self._stages
        assert work is not None
        try:
            await asyncio.wait({work})
        finally:
            work.cancel()  # only when the loop itself is torn down; otherwise it is done
        outcome, score = self._final_outcome(work)
        await _release_within(self._close_session(), cleanup_seconds, "the policy session")
        await _release_within(self._leases.close(), cleanup_seconds, "the sandboxes")
        if self.cancel_reason is not None:
            self._cancel_seconds = time.monotonic() - self._cancelled_at
        try:
            segments = [] if self._session is None else self._session.segments()
            return self._record(outcome, score, segments)
        except Exception as error:  # an environment filled the record with what does not fit
            _LOG.exception("the record could not be written")
            broken = _failed_outcome(FailureKind.INTERNAL, self.slots.position.stage, error)
            return self._record(broken, None, [], bare=True)

    def _final_outcome(self, work: asyncio.Task[tuple[Outcome, Score]]) -> tuple[Outcome, Score | None]:
        error = RuntimeError("the attempt was cancelled without a reason") if work.cancelled() else work.exception()
        stage = self.slots.position.stage
        if self.cancel_reason is not None:  # also when it swallowed that: its sandboxes were gone by then
            return Outcome(status="cancelled", reason=self.cancel_reason, stage=stage), None
        if error is None:
            return work.result()
        if isinstance(error, RolloutError | StageTimeout):
            _LOG.info("attempt failed: %s", error)
            kind = error.kind if isinstance(error, RolloutError) else FailureKind.STAGE_TIMEOUT
            return _failed_outcome(kind, stage, error), None
        _LOG.error("attempt broke in %s", stage, exc_info=error)
        said = f"{type(error).__name__} in {stage}; the service's log has the traceback."
        return _failed_outcome(FailureKind.INTERNAL, stage, RuntimeError(said)), None

    async def _close_session(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _record(self, outcome: Outcome, score: Score | None, segments: list[Segment], *, bare: bool = False) -> Rollout:
        messages = [] if bare else self._artifacts.messages
        prompt_messages = 0 if bare else self._artifacts.prompt_messages
        if prompt_messages is None:  # an environment may be killed before it noted them, or note others
            pairs = zip(self._prompt, messages, strict=False)
            prompt_messages = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        submission = self._artifacts.submission
        if submission is None and self._artifacts.answer is not None:
            submission = GradedSubmission(text=self._artifacts.answer)
        return terminal_record(
            self.job,
            outcome,
            score=score,
            segments=segments,
            messages=messages,
            prompt_messages=prompt_messages,
            tools=[tool.spec.as_function() for tool in self._tools],
            settings=self._settings,
            stages=self._stage_times(),
            resumed_turns=0 if self._turn_log is None else self._turn_log.replayed_count,
            resume_refused=self._resume_refused,
            agent_log=self._artifacts.log,
            cancel_seconds=self._cancel_seconds,
            submission=submission if self._has_reached_grading and not bare else None,
            begun_at=self._begun_at,
        )

    def _stage_times(self) -> dict[WorkStage, StageTime]:
        """Return the stages' times; a replay is set-up, and counts as INIT's."""
        log, times = self._turn_log, dict(self.slots.stage_times)
        if log is None or "run" not in times:
            return times
        init, run = times["init"], times["run"]
        replay, worked = (run.seconds, 0.0) if log.is_replaying else (log.replay_seconds, run.seconds)
        times["init"] = StageTime(queued=init.queued, seconds=init.seconds + replay)
        times["run"] = StageTime(queued=run.queued - log.replay_seconds, seconds=worked)
        return times


class _NoPolicy:
    """Implements ``Policy`` for an agent program: an environment that calls it runs a loop of its own."""

    def __init__(self, environment: str) -> None:
        self._environment = environment

    async def start_conversation(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> AssistantTurn:
        return await self.respond(messages)

    async def respond(self, messages: Sequence[Message]) -> AssistantTurn:
        what = f"Environment '{self._environment}' runs a loop of its own: it takes no agent program."
        raise TaskError(
            FailureKind.BAD_ROW, what, "Call context.run_agent(episode) in its 'run', or leave 'agent' empty."
        )


_SAME_FIELDS = RolloutRequest.model_fields.keys() & Rollout.model_fields.keys() - {"settings"}
"""Fields that a record takes from its request."""


def terminal_record(job: Job, outcome: Outcome, **work: Any) -> Rollout:
    """Return the terminal record of a job; ``work`` are the fields of ``Rollout`` that its attempt filled."""
    request = job.request
    same = {name: getattr(request, name) for name in _SAME_FIELDS}
    return Rollout(
        **same,
        attempt=job.attempt,
        row_id=row_id_of(request.task),
        outcome=outcome,
        retries=list(job.retries),
        accepted_at=job.accepted_at,
        finished_at=max(time.time(), job.accepted_at),  # a clock that was set back makes no time pass backwards
        **work,
    )


def _failed_outcome(kind: FailureKind, stage: Stage, error: BaseException) -> Outcome:
    lines = redact(str(error)).splitlines()[:2]
    return Outcome(
        status="failed",
        kind=kind,
        stage=stage,
        message="\n".join(line[:500] for line in lines),
        evidence=error.evidence if isinstance(error, RolloutError) else None,
    )


async def _release_within(release: Coroutine[Any, Any, None], seconds: float, what: str) -> None:
    """Wait for a release; log one that fails or takes longer."""
    task = start_eagerly(release)
    if not task.done():
        await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        task.cancel()
        _LOG.error("%s could not be released within %g s", what, seconds)
    elif not task.cancelled() and (error := task.exception()) is not None:
        _LOG.error("%s could not be released", what, exc_info=error)
