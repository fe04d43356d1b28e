# SPDX-FileCopyrightText: Copyright (c) 2026 the prorl-gym authors
# SPDX-License-Identifier: Apache-2.0

"""Tool sessions: our environments for any Gym agent with a loop of its own.

``ToolSessions.open`` prepares a row as INIT does, the tools run in leased sandboxes, and ``grade_session`` is EVAL. A
session is closed by its caller, after its grade, or when no call came for as long as its rollout's limits allow.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from prorl_gym.agents.protocol import Artifacts, Tool
from prorl_gym.environments import registry
from prorl_gym.environments.judge import Judge
from prorl_gym.environments.protocol import Environment
from prorl_gym.errors import Cause, FailureKind, NotFoundError, RolloutError, SandboxError, TaskError
from prorl_gym.records import Score
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.protocol import Sandbox, SandboxBackend, SandboxSpec
from prorl_gym.settings import ResolvedSettings, RolloutSettings, resolve_settings
from prorl_gym.thoughts import open_thinking, split_thinking
from prorl_gym.trainers.gym_request import row_settings, row_task
from prorl_gym.trainers.responses_items import declared_tools

_LOG = logging.getLogger(__name__)
_MAX_CLOSED_IDS = 100_000
"""Ids of closed sessions that are kept, to refuse a late seed of one."""
_NO_SETTINGS = RolloutSettings()

RESERVED_ROUTES = {"seed_session", "verify", "close_session", "aggregate_metrics", "mcp"}
"""Routes of the server that are not tools."""


@dataclass(slots=True)
class ToolSession:
    """A row and what its agent, which is none of ours, has done with it."""

    environment: Environment[Any]
    task: Any
    settings: ResolvedSettings
    leases: SandboxLeases
    tools: Mapping[str, Tool]
    artifacts: Artifacts = field(default_factory=Artifacts)
    sandbox_error: RolloutError | None = None
    """Sandbox failure of a tool call, if there was one. Unless the model caused it, no grade is valid."""
    active_calls: int = 0
    """Calls in progress, during which the session does not expire."""
    idle_timer: asyncio.TimerHandle | None = None


class AgentlessLeases(SandboxLeases):
    """Leases without a session: a fresh sandbox must not be graded as the agent's."""

    async def get_agent_sandbox(self, spec: SandboxSpec) -> Sandbox:
        raise session_lost_error()


def session_lost_error() -> SandboxError:
    """Return the error of a grade that needs what a session held."""
    return SandboxError(
        FailureKind.SANDBOX_LOST,
        "the session is gone, and with it what the agent left in its sandbox.",
        "It was closed, idle for too long, or lost with a restart. Seed a new one, and send its cookie with each call.",
    )


async def open_session(
    row: Mapping[str, Any], leases: SandboxLeases, service: RolloutSettings = _NO_SETTINGS
) -> ToolSession:
    """Return a new session for a row.

    The settings of the row and of its environment win over those of the service. Raises ``TaskError``: no such
    environment, or a bad row. Raises ``SandboxError`` if the environment wanted a sandbox at once and got none.
    """
    name = row.get("environment")
    if not isinstance(name, str):
        raise TaskError(FailureKind.BAD_ROW, "row: 'environment' is missing.", "Name one, for example 'math'.")
    environment = registry.get(name)
    settings = resolve_settings(row_settings(row), environment.settings, service)
    task = environment.parse_row(row_task(row))
    episode = await environment.init(task, leases, settings)
    return ToolSession(environment, task, settings, leases, {tool.spec.name: tool for tool in episode.tools})


def check_tools(row: Mapping[str, Any], session: ToolSession) -> None:
    """Refuse a row that declares a tool which cannot be called: its agent would be graded without it.

    Raises ``TaskError``: ``BAD_ROW``, naming the tool.
    """
    name, tools = session.environment.name, session.tools
    if missing := [tool for tool in declared_tools(row) if tool not in tools]:
        what = f"row: it declares the tool '{missing[0]}', and environment '{name}' has {', '.join(tools) or 'none'}."
        fix = "Make the row again with this release, or configure the tool for the service (docs/tools.md)."
        raise TaskError(FailureKind.BAD_ROW, what, fix)
    if hidden := sorted(RESERVED_ROUTES & set(tools)):
        what = f"row: the tool '{hidden[0]}' of environment '{name}' has the name of a route of this server."
        raise TaskError(FailureKind.BAD_ROW, what, "Rename the tool.")


async def grade_session(session: ToolSession, answer: str | None) -> Score:
    """Grade the work of a session's agent; ``answer``, without thoughts, counts when ``finish`` was not called.

    Raises ``RolloutError`` if there is no valid grade.
    """
    if session.sandbox_error is not None and session.sandbox_error.cause is not Cause.POLICY:
        raise session.sandbox_error
    if session.artifacts.answer is None:
        session.artifacts.answer = None if answer is None else split_thinking(open_thinking(answer))[1]
    try:
        async with asyncio.timeout(session.settings.eval_seconds):
            return await session.environment.evaluate(session.task, session.artifacts, session.leases, session.settings)
    except TimeoutError:
        limit = session.settings.eval_seconds
        raise RolloutError(FailureKind.STAGE_TIMEOUT, f"grading took longer than {limit:g} s") from None
    except RolloutError as error:
        explained = await session.leases.diagnose_failure(error)
        if explained.cause is not Cause.POLICY:
            raise explained from None
        return Score(reward=0.0, detail={"why": explained.what})


class ToolSessions:
    """The open sessions of this server, by id. One event loop.

    ``backend`` and ``judge`` are called for each session. A session lives for ``idle_seconds`` without a call, or, with
    ``None``, as long as its rollout's RUN may take.
    """

    def __init__(
        self,
        backend: Callable[[], SandboxBackend],
        idle_seconds: float | None,
        judge: Callable[[], Judge | None] = lambda: None,
        settings: RolloutSettings = _NO_SETTINGS,
    ) -> None:
        self._backend = backend
        self._judge = judge
        self._settings = settings
        self._idle_seconds = idle_seconds
        self._session_tasks: dict[str, asyncio.Task[ToolSession]] = {}
        self._closed_ids: dict[str, None] = {}
        self._close_tasks: set[asyncio.Task[None]] = set()

    def agentless_leases(self) -> SandboxLeases:
        """Return leases to grade an answer without a session."""
        return AgentlessLeases(self._backend(), judge=self._judge())

    def was_closed(self, session_id: str) -> bool:
        """Whether a session of this id was closed, by its caller or because it was idle."""
        return session_id in self._closed_ids

    async def open(self, session_id: str, row: Mapping[str, Any]) -> None:
        """Open the session of this id, at the first call.

        Raises ``NotFoundError`` if it was closed before: a late seed must not open it again. Raises ``RolloutError`` as
        ``open_session`` and ``check_tools`` do.
        """
        if session_id in self._closed_ids:
            raise NotFoundError(f"session {session_id} is already closed.", "Seed a new one.")
        if session_id not in self._session_tasks:
            self._session_tasks[session_id] = asyncio.create_task(self._open(session_id, row), name="session-open")
        async with self.acquire_session(session_id):
            return

    async def _open(self, session_id: str, row: Mapping[str, Any]) -> ToolSession:
        """Return a new session; if it cannot be opened, nothing of it remains. Runs on when its first caller leaves."""
        leases = SandboxLeases(self._backend(), judge=self._judge())
        try:
            session = await open_session(row, leases, self._settings)
            check_tools(row, session)
        except BaseException:
            self._session_tasks.pop(session_id, None)
            await leases.close()
            raise
        self._restart_idle_timer(session_id, session)
        return session

    @asynccontextmanager
    async def acquire_session(self, session_id: str) -> AsyncGenerator[ToolSession]:
        """Give one call an open session, which does not expire during it.

        Raises ``NotFoundError``: never seeded, or closed. Raises ``RolloutError`` if it could not be opened.
        """
        opening = self._session_tasks.get(session_id)
        if opening is None:
            raise NotFoundError("this session was never seeded, or is closed.", "POST the row to /seed_session first.")
        session = await asyncio.shield(opening)
        session.active_calls += 1
        try:
            yield session
        finally:
            session.active_calls -= 1
            self._restart_idle_timer(session_id, session)

    async def close(self, session_id: str) -> None:
        """Close a session and its sandboxes; a later seed of this id, known or not, is refused. Idempotent."""
        self._closed_ids[session_id] = None
        if len(self._closed_ids) > _MAX_CLOSED_IDS:
            del self._closed_ids[next(iter(self._closed_ids))]
        opening = self._session_tasks.pop(session_id, None)
        if opening is None:
            return
        try:
            session = await asyncio.shield(opening)
        except Exception:
            return  # it did not open; the call that seeded it gets the error
        if session.idle_timer is not None:
            session.idle_timer.cancel()
        await session.leases.close()

    async def close_all(self) -> None:
        """Close all sessions when the server stops."""
        await asyncio.gather(*(self.close(key) for key in tuple(self._session_tasks)), return_exceptions=True)
        await asyncio.gather(*self._close_tasks, return_exceptions=True)

    def _restart_idle_timer(self, session_id: str, session: ToolSession) -> None:
        if session.idle_timer is not None:
            session.idle_timer.cancel()
        seconds = session.settings.run_seconds if self._idle_seconds is None else self._idle_seconds
        loop = asyncio.get_running_loop()
        session.idle_timer = loop.call_later(seconds, self._expire, session_id, session)

    def _expire(self, session_id: str, session: ToolSession) -> None:
        if session.active_calls:
            return  # the call in progress restarts the timer
        _LOG.warning("session %s had no call for too long: closing it", session_id)
        task = asyncio.get_running_loop().create_task(self.close(session_id))
        self._close_tasks.add(task)
        task.add_done_callback(self._close_tasks.discard)
