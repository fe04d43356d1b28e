"""Tool sessions: our environments for any Gym agent that brings its own loop.

``open`` prepares a row as INIT would; the tools then work on leased sandboxes; ``grade`` is EVAL. A session is closed
by its caller, when it is graded, or when no call came for as long as its rollout's limits allow.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from prorl_gym.agents.loop import without_thoughts
from prorl_gym.agents.protocol import Artifacts, Tool
from prorl_gym.environments import registry
from prorl_gym.environments.judge import Judge
from prorl_gym.environments.protocol import Environment
from prorl_gym.errors import Cause, FailureKind, NotFoundError, RolloutError, SandboxError, TaskError
from prorl_gym.records import Score
from prorl_gym.rollout.leases import SandboxLeases
from prorl_gym.sandbox.protocol import Sandbox, SandboxBackend, SandboxSpec
from prorl_gym.settings import ResolvedSettings, RolloutSettings, resolve
from prorl_gym.trainers.gym_items import declared_tools
from prorl_gym.trainers.gym_rows import settings_of, task_of

_LOG = logging.getLogger(__name__)
_CLOSED_REMEMBERED = 100_000  # enough to meet a late seed of any session that could still be on its way
_NO_SETTINGS = RolloutSettings()

RESERVED = {"seed_session", "verify", "close_session", "aggregate_metrics", "answers", "rows", "mcp"}
"""Routes of the server that are no tools."""


@dataclass(slots=True)
class Session:
    """One row being worked on by an agent that is not ours."""

    environment: Environment[Any]
    task: Any
    settings: ResolvedSettings
    leases: SandboxLeases
    tools: Mapping[str, Tool]
    artifacts: Artifacts = field(default_factory=Artifacts)
    lost: RolloutError | None = None
    """The sandbox failure that struck a tool call, if one did. Unless the model caused it, no grade says anything."""
    users: int = 0
    """Calls that are being served. The session does not expire under them."""
    expiry: asyncio.TimerHandle | None = None


class NoAgentLeases(SandboxLeases):
    """Leases without a session: no agent has worked in a sandbox, and a fresh one must not pass for its own."""

    async def agent(self, spec: SandboxSpec) -> Sandbox:
        """Refuse.

        Raises:
            SandboxError: always.
        """
        raise lost_session()


def lost_session() -> SandboxError:
    """Return the error of a grade that needs what a session held."""
    return SandboxError(
        FailureKind.SANDBOX_LOST,
        "the session is gone, and with it what the agent left in its sandbox.",
        "It was closed, idle for too long, or lost with a restart. Seed a new one, and send its cookie with each call.",
    )


async def open_session(
    row: Mapping[str, Any], leases: SandboxLeases, service: RolloutSettings = _NO_SETTINGS
) -> Session:
    """Prepare a row.

    Args:
        row: as Gym has it.
        leases: give the sandboxes.
        service: sampling and limits of the service; the row and its environment win over them.

    Raises:
        TaskError: no such environment, or a bad row.
        SandboxError: the environment wanted a sandbox at once and got none.
    """
    name = row.get("environment")
    if not isinstance(name, str):
        raise TaskError(FailureKind.BAD_ROW, "row: 'environment' is missing.", "Name one, for example 'math'.")
    environment = registry.get(name)
    settings = resolve(settings_of(row), environment.settings, service)
    task = environment.parse(task_of(row))
    episode = await environment.init(task, leases, settings)
    return Session(environment, task, settings, leases, {tool.spec.name: tool for tool in episode.tools})


def check_tools(row: Mapping[str, Any], session: Session) -> None:
    """Refuse a row whose tools cannot all be called: its agent would be graded without them.

    Raises:
        TaskError: ``BAD_ROW``, naming the tool.
    """
    name, tools = session.environment.name, session.tools
    if missing := [tool for tool in declared_tools(row) if tool not in tools]:
        what = f"row: it declares the tool '{missing[0]}', and environment '{name}' has {', '.join(tools) or 'none'}."
        fix = "Make the row again with this release, or configure the tool for the service (docs/tools.md)."
        raise TaskError(FailureKind.BAD_ROW, what, fix)
    if hidden := sorted(RESERVED & set(tools)):
        what = f"row: the tool '{hidden[0]}' of environment '{name}' has the name of a route of this server."
        raise TaskError(FailureKind.BAD_ROW, what, "Rename the tool.")


async def grade(session: Session, answer: str | None) -> Score:
    """Grade what the session's agent did; ``answer``, without thoughts, counts when ``finish`` was not called.

    Raises:
        RolloutError: there is no valid grade.
    """
    if session.lost is not None and session.lost.cause is not Cause.POLICY:
        raise session.lost
    if session.artifacts.answer is None:
        session.artifacts.answer = None if answer is None else without_thoughts(answer)
    try:
        async with asyncio.timeout(session.settings.eval_seconds):
            return await session.environment.evaluate(session.task, session.artifacts, session.leases, session.settings)
    except TimeoutError:
        limit = session.settings.eval_seconds
        raise RolloutError(FailureKind.STAGE_TIMEOUT, f"grading took longer than {limit:g} s") from None
    except RolloutError as error:
        explained = await session.leases.explain(error)
        if explained.cause is not Cause.POLICY:
            raise explained from None
        return Score(reward=0.0, detail={"why": explained.what})


class Sessions:
    """The open sessions of this server, by id. One event loop.

    Args:
        backend: where sandboxes come from, asked for at the first session.
        idle_seconds: how long a session lives without a call; ``None``: as long as its rollout's RUN may take.
        judge: what graders may ask, asked for at each session.
        settings: sampling and limits of the service.
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
        self._opening: dict[str, asyncio.Task[Session]] = {}
        self._closed: dict[str, None] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def leases(self) -> SandboxLeases:
        """Return fresh leases on this server's sandboxes, and its judge."""
        return SandboxLeases(self._backend(), judge=self._judge())

    def leases_without_agent(self) -> SandboxLeases:
        """Return leases for grading an answer that was given without a session."""
        return NoAgentLeases(self._backend(), judge=self._judge())

    def was_closed(self, session_id: str) -> bool:
        """Whether a session of this id was closed, by its caller or for being idle."""
        return session_id in self._closed

    async def open(self, session_id: str, row: Mapping[str, Any]) -> None:
        """Open the session of this id, at the first call.

        Raises:
            NotFoundError: it was closed before; a late seed must not bring it back.
            RolloutError: see ``open_session`` and ``check_tools``.
        """
        if session_id in self._closed:
            raise NotFoundError(f"session {session_id} is already closed.", "Seed a new one.")
        if session_id not in self._opening:
            opening = asyncio.create_task(self._open(session_id, row), name="session-open")
            self._opening[session_id] = opening
        async with self.use(session_id):
            return

    async def _open(self, session_id: str, row: Mapping[str, Any]) -> Session:
        """Open a session, whoever still waits for it; one that cannot be opened leaves nothing behind."""
        leases = self.leases()
        try:
            session = await open_session(row, leases, self._settings)
            check_tools(row, session)
        except BaseException:
            self._opening.pop(session_id, None)
            await leases.close()
            raise
        self._wait(session_id, session)
        return session

    @asynccontextmanager
    async def use(self, session_id: str) -> AsyncIterator[Session]:
        """Lend an open session to one call; it does not expire meanwhile.

        Raises:
            NotFoundError: never seeded, or closed.
            RolloutError: it could not be opened.
        """
        opening = self._opening.get(session_id)
        if opening is None:
            raise NotFoundError("this session was never seeded, or is closed.", "POST the row to /seed_session first.")
        session = await asyncio.shield(opening)
        session.users += 1
        try:
            yield session
        finally:
            session.users -= 1
            self._wait(session_id, session)

    async def close(self, session_id: str) -> None:
        """Close a session and its sandboxes; unknown ids only keep a late seed out. Idempotent."""
        self._closed[session_id] = None
        if len(self._closed) > _CLOSED_REMEMBERED:
            del self._closed[next(iter(self._closed))]
        opening = self._opening.pop(session_id, None)
        if opening is None:
            return
        try:
            session = await asyncio.shield(opening)
        except Exception:
            return  # it never opened, has cleaned up behind itself, and whoever seeded it was told why
        if session.expiry is not None:
            session.expiry.cancel()
        await session.leases.close()

    async def close_all(self) -> None:
        """Close everything: the server stops."""
        await asyncio.gather(*(self.close(key) for key in tuple(self._opening)), return_exceptions=True)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _wait(self, session_id: str, session: Session) -> None:
        """Begin to wait for the next call, as long as the session may be idle."""
        if session.expiry is not None:
            session.expiry.cancel()
        seconds = session.settings.run_seconds if self._idle_seconds is None else self._idle_seconds
        loop = asyncio.get_running_loop()
        session.expiry = loop.call_later(seconds, self._expire, session_id, session)

    def _expire(self, session_id: str, session: Session) -> None:
        if session.users:
            return  # the call that is being served begins to wait again
        _LOG.warning("session %s had no call for too long: closing it", session_id)
        task = asyncio.get_running_loop().create_task(self.close(session_id))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
