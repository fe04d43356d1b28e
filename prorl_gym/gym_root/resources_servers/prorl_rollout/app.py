"""NeMo Gym resources server that owns the rollout service.

``POST /answers`` and ``POST /rows`` are for our own agent (``gym_root/wire.py``): rows in, Gym results out.
``/seed_session``, the tool routes, ``/verify`` and ``/close_session`` offer the same environments to any other Gym
agent, one tool call at a time.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import PlainTextResponse, StreamingResponse
from nemo_gym.base_resources_server import BaseResourcesServerConfig, BaseVerifyRequest, SimpleResourcesServer
from nemo_gym.server_utils import SESSION_ID_KEY, is_nemo_gym_fastapi_entrypoint
from pydantic import ConfigDict, Field, PrivateAttr

from prorl_gym._gym_compat import REVERIFY_STATELESS, verifier_fixture
from prorl_gym.agents.arguments import BadArguments, check_arguments
from prorl_gym.agents.tools import BashTool, EditorTool, FinishTool, PythonTool, ThinkTool
from prorl_gym.errors import NotFoundError, RolloutError, SandboxError, TaskError, gym_failure_kind
from prorl_gym.gym_root.resources_servers.prorl_rollout.hosted import HostedService
from prorl_gym.gym_root.resources_servers.prorl_rollout.sessions import (
    Session,
    Sessions,
    grade,
    lost_session,
    open_session,
)
from prorl_gym.gym_root.starting import run, told
from prorl_gym.gym_root.wire import Profile, read_batch
from prorl_gym.records import Score
from prorl_gym.rollout.leases import SandboxLeases
from prorl_gym.sandbox.choose import open_backend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import Probe, Sandbox, SandboxBackend, SandboxSpec
from prorl_gym.trainers.gym_items import last_answer

SEEDED = "prorl_seeded"
"""Key of the session cookie: the session was seeded, perhaps by an earlier process of this server."""


class ProrlRolloutConfig(BaseResourcesServerConfig):
    """Configuration of the rollout server."""

    REVERIFY_MODE: ClassVar[Any] = REVERIFY_STATELESS
    engines: str | list[str]
    model: str
    tokenizer: str | None = None
    service: dict[str, Any] = Field(default_factory=dict)
    session_idle_seconds: float | None = None
    """How long a session of another agent lives without a call. By default as long as its rollout's RUN may take
    (``run_seconds`` of the row, else of the environment, else of the service)."""


class VerifyRequest(BaseVerifyRequest):
    """What any agent posts to ``/verify``: the row and the response."""

    model_config = ConfigDict(extra="allow")


class ProrlRolloutServer(SimpleResourcesServer):
    """The rollout service and the tool sessions behind Gym's routes."""

    ray_enabled = False
    config: ProrlRolloutConfig
    _hosted: HostedService = PrivateAttr()
    _sessions: Sessions = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Read the service's configuration; nothing is started yet."""
        super().model_post_init(context)
        self._hosted = HostedService(self.config.engines, self.config.model, self.config.tokenizer, self.config.service)
        self._sessions = Sessions(
            lambda: self._hosted.backend,
            self.config.session_idle_seconds,
            lambda: self._hosted.judge,
            self._hosted.settings,
        )

    def setup_webserver(self) -> FastAPI:
        """Add our routes, and start and stop the service with the server."""
        app = super().setup_webserver()
        app.post("/answers")(self.answers)
        app.post("/rows")(self.rows)
        app.post("/{tool}")(self.tool)  # last: which tools there are is the row's choice
        app.state.hosted = self._hosted
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
            async with inner(app) as state, told(self._hosted):
                yield state
                await self._sessions.close_all()

        app.router.lifespan_context = lifespan
        return app

    # -- the rollout service ------------------------------------------------------------------------------------

    async def answers(self, body: Profile) -> StreamingResponse:
        """Open an agent's channel; the answer is the stream of its rows' answers."""
        channels = self._hosted.channels
        return StreamingResponse(channels.stream(channels.open(body)), media_type="application/octet-stream")

    async def rows(self, request: Request) -> dict[str, str]:
        """Take a batch of rows, and what became of earlier answers."""
        try:
            batch = read_batch(await request.body())
            self._hosted.channels.take(batch)
        except ValueError as error:
            raise HTTPException(422, str(error)) from None
        except NotFoundError as error:
            raise HTTPException(404, str(error)) from None
        return {}

    # -- sessions for other agents ------------------------------------------------------------------------------

    async def seed_session(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        """Open a session for a row. An environment server names it; otherwise it is the cookie's."""
        named = body.get("resources_session_id")
        row: Mapping[str, Any] = body.get("task_data", {}) if named else body
        session_id = named or request.session[SESSION_ID_KEY]
        request.session[SESSION_ID_KEY] = session_id
        try:
            await self._sessions.open(session_id, row)
        except (TaskError, NotFoundError) as error:
            raise HTTPException(409 if isinstance(error, NotFoundError) else 422, str(error)) from None
        except RolloutError as error:
            raise HTTPException(503, str(error)) from None
        request.session[SEEDED] = True
        return {"resources_session_id": named} if named else {}

    def mcp_tools(self, harvested: list[Any], catchall: Any) -> list[Any]:
        """Offer the tools of the built-in environments where Gym exposes them over MCP (``expose_tools_over_mcp``)."""
        built_in = (
            BashTool(_no_sandbox, 1.0),
            PythonTool(_no_sandbox, 1.0),
            EditorTool(_no_sandbox),
            ThinkTool(),
            FinishTool(),
        )
        specs = [tool.spec for tool in built_in]
        return [catchall.tool(spec.name, dict(spec.parameters), spec.description) for spec in specs]

    async def tool(self, request: Request, tool: str, body: dict[str, Any]) -> PlainTextResponse:
        """Run a tool of the session's environment. Whatever goes wrong is text for the model, as Gym wants it."""
        try:
            async with self._sessions.use(request.session[SESSION_ID_KEY]) as session:
                return await _call(session, tool, body)
        except (NotFoundError, RolloutError) as error:
            return PlainTextResponse(str(error), status_code=409)

    async def verify(self, request: Request, body: VerifyRequest) -> dict[str, Any]:
        """Grade with what the session's tools left behind.

        A session that is gone is not graded; an answer that never had one is graded by itself, where its environment
        needs no more than that.

        Raises:
            TaskError: the row is bad, so nothing can be said about any answer.
        """
        session_id = request.session[SESSION_ID_KEY]
        try:
            async with self._sessions.use(session_id) as session:
                answer = await verdict(body, partial(grade, session), session)
        except NotFoundError:
            if request.session.get(SEEDED) or self._sessions.was_closed(session_id):
                return await verdict(body, _lost)
            return await graded_alone(body, self._sessions.leases_without_agent())
        await self._sessions.close(session_id)
        return answer

    async def close_resources_session(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        """Release a session; harmless when it is closed or was never there."""
        session_id = body.get("resources_session_id") or request.session[SESSION_ID_KEY]
        await self._sessions.close(session_id)
        return {"resources_session_id": session_id}


async def _call(session: Session, name: str, arguments: Mapping[str, Any]) -> PlainTextResponse:
    tool = session.tools.get(name)
    if tool is None:
        return PlainTextResponse(f"There is no tool '{name[:40]}' here. Tools: {', '.join(session.tools)}.", 404)
    try:
        observation = await tool(check_arguments(tool.spec, arguments))
    except BadArguments as complaint:
        return PlainTextResponse(str(complaint), status_code=422)
    except SandboxError as error:
        session.lost = await session.leases.explain(error)
        return PlainTextResponse("The sandbox is gone; this tool cannot be used any more.", status_code=503)
    if observation.answer is not None:
        session.artifacts.answer = observation.answer
    return PlainTextResponse(observation.text)


async def verdict(
    body: VerifyRequest, graded: Callable[[str | None], Awaitable[Score]], session: Session | None = None
) -> dict[str, Any]:
    """Return Gym's verify reply; without a valid grade the reply is masked, never a plain 0.

    Args:
        body: the row and the response.
        graded: grades the last answer of the response.
        session: where the agent worked, if there is one.

    Raises:
        TaskError: the row is bad.
    """
    echo = body.model_dump(mode="json")
    reply: dict[str, Any] = {"reward": 0.0, "mask_sample": False, "failure_kind": None, "failure_reason": None}
    try:
        score = await graded(last_answer(echo["response"]["output"]))
    except TaskError:
        raise
    except RolloutError as error:
        reply |= {"mask_sample": True, "failure_kind": gym_failure_kind(error.kind), "failure_reason": str(error)}
    else:
        reply["reward"] = score.reward
        if session is not None and session.lost is not None:  # the model's own doing: named, and graded all the same
            reply |= {"failure_kind": gym_failure_kind(session.lost.kind), "failure_reason": str(session.lost)}
    config = {**(echo.get("instance_config") or {}), "mask_sample": reply["mask_sample"]}
    return echo | reply | {"instance_config": config}


async def graded_alone(body: VerifyRequest, leases: SandboxLeases) -> dict[str, Any]:
    """Grade an answer by its row alone.

    Raises:
        TaskError: the row is bad.
    """

    async def graded(answer: str | None) -> Score:
        return await grade(await open_session(json.loads(body.model_dump_json()), leases), answer)

    try:
        return await verdict(body, graded)
    finally:
        await leases.close()


async def _no_sandbox() -> Sandbox:
    raise lost_session()


async def _lost(answer: str | None) -> Score:
    raise lost_session()


class _WhenNeeded:
    """The best backend of this machine, opened with the first sandbox: most rows are graded without any."""

    name = "auto"

    def __init__(self) -> None:
        self._backend: SandboxBackend | None = None

    async def probe(self) -> Probe:
        return Probe(self.name, True, "not opened yet")

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox.

        Raises:
            SandboxError: this machine has no backend, or the sandbox does not start.
        """
        if self._backend is None:
            self._backend = await open_backend(SandboxConfig())
        return await self._backend.start(spec)

    async def close(self) -> None:
        """Close what was opened. Idempotent."""
        backend, self._backend = self._backend, None
        if backend is not None:
            await backend.close()


class _RowVerifier:
    """What ``gym env test`` exercises: grading by the row alone, without starting the service.

    Here a fresh sandbox does stand for the agent's: the cases are of agents that left nothing in it.
    """

    async def verify(self, body: VerifyRequest) -> dict[str, Any]:
        backend = _WhenNeeded()
        try:
            return await graded_alone(body, SandboxLeases(backend))
        finally:
            await backend.close()


VERIFIER_FIXTURE = verifier_fixture(
    _RowVerifier, VerifyRequest, Path(__file__).parent / "tests" / "verifier_cases.jsonl"
)


if __name__ == "__main__":
    run(ProrlRolloutServer.run_webserver)
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = run(ProrlRolloutServer.run_webserver)
