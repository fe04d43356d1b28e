# SPDX-FileCopyrightText: Copyright (c) 2026 the prorl-gym authors
# SPDX-License-Identifier: Apache-2.0

"""NeMo Gym resources server with the rollout service in its process.

``/service`` has the service's HTTP API, for our own agent. ``/seed_session``, the tool routes, ``/verify`` and
``/close_session`` offer the same environments to any other Gym agent, one tool call at a time.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # until freeze_imports

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Never

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import PlainTextResponse
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    ReverifyMode,
    SimpleResourcesServer,
)
from nemo_gym.server_utils import SESSION_ID_KEY, is_nemo_gym_fastapi_entrypoint
from pydantic import ConfigDict, Field, PrivateAttr
from starlette.routing import Match, Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from prorl_gym._gym_compat import verifier_fixture
from prorl_gym.agents.tool_arguments import BadArguments, check_arguments
from prorl_gym.agents.tools import BashTool, EditorTool, FinishTool, PythonTool, ThinkTool
from prorl_gym.api.app import create_embedded_app
from prorl_gym.api.build import LoadedService, build_service
from prorl_gym.api.config import ServiceConfig
from prorl_gym.config import load_config
from prorl_gym.environments.judge import Judge
from prorl_gym.errors import (
    ConfigError,
    FailureKind,
    NotFoundError,
    RolloutError,
    SandboxError,
    TaskError,
    gym_failure_kind,
)
from prorl_gym.gym_root.resources_servers.prorl_rollout.tool_sessions import (
    ToolSession,
    ToolSessions,
    grade_session,
    open_session,
    session_lost_error,
)
from prorl_gym.gym_root.responses_api_agents.prorl_rollout_agent.service_connection import SERVICE_PATH
from prorl_gym.gym_root.server_start import freeze_imports, run_server, running_service
from prorl_gym.logs import configure_logging
from prorl_gym.records import Score
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.backend_selection import open_backend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import ProbeResult, Sandbox, SandboxBackend, SandboxSpec
from prorl_gym.trainers.responses_items import last_answer

SEEDED_KEY = "prorl_seeded"
"""Key of the session cookie; set when the session was seeded, also by an earlier process of this server."""


class ProrlRolloutConfig(BaseResourcesServerConfig):
    """Configuration of the rollout server."""

    REVERIFY_MODE: ClassVar[ReverifyMode] = ReverifyMode.STATELESS
    engines: str | list[str]
    model: str
    tokenizer: str | None = None
    service: dict[str, Any] = Field(default_factory=dict)
    session_idle_seconds: float | None = None
    """Seconds a session of another agent lives without a call. By default as long as its rollout's RUN may take
    (``run_seconds`` of the row, else of the environment, else of the service)."""


class VerifyRequest(BaseVerifyRequest):
    model_config = ConfigDict(extra="allow")


def service_config(engines: str | Sequence[str], model: str, tokenizer: str | None, options: Mapping[str, Any]) -> Any:
    """Return the service's configuration: Gym's own keys win over those below ``service``.

    Raises ``ConfigError`` for an unknown or wrong key, and for nodes: none could join a service inside this server.
    """
    if options.get("nodes") is not None:
        raise ConfigError(
            "prorl_rollout.service: nodes cannot join a service inside NeMo Gym.",
            "Leave 'nodes' out, or run 'prorl-gym serve' with it and set the agents' service_url to its address.",
        )
    inference = {
        **options.get("inference", {}),
        "engines": [engines] if isinstance(engines, str) else list(engines),
        "model": model,
        "tokenizer": tokenizer or model,
    }
    return load_config(ServiceConfig, {**options, "inference": inference}, "prorl_rollout.service")


class EmbeddedService:
    """The rollout service inside this server's process, configured from Gym's configuration.

    Unless ``state`` or ``ledger`` is configured, the ledger is deleted with this process. Gym does not name runs to its
    servers, so a ledger kept by default would return rollouts of an earlier run, with another policy, to a later one.
    Configure the ledger (``prorl_service.ledger.path``) for a run that outlives its servers.
    """

    def __init__(
        self, engines: str | Sequence[str], model: str, tokenizer: str | None, options: Mapping[str, Any]
    ) -> None:
        self._temporary_state = (
            None if "state" in options or "ledger" in options else TemporaryDirectory(prefix="prorl-gym-")
        )
        if self._temporary_state is not None:
            options = {**options, "state": self._temporary_state.name}
        self.config = service_config(engines, model, tokenizer, options)
        self._built: LoadedService | None = None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[FastAPI]:
        """Run the service; provides its routes for agents."""
        configure_logging(self.config.log.level, self.config.log.format)
        try:
            self._built = built = await build_service(self.config)
            try:
                yield create_embedded_app(built.service, built.render_prompt)
            finally:
                self._built = None
                await built.close(drain=False)
        finally:
            if self._temporary_state is not None:
                self._temporary_state.cleanup()

    @property
    def backend(self) -> SandboxBackend:
        """The service's backend of sandboxes. Raises ``SandboxError`` if the service is not running."""
        if self._built is None or self._built.backend is None:  # without nodes, a service that runs has one
            raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, "the rollout service is not running.")
        return self._built.backend

    @property
    def judge(self) -> Judge | None:
        """The graders' judge; ``None`` when none is configured, or the service is not running."""
        return None if self._built is None else self._built.judge


class ProrlRolloutServer(SimpleResourcesServer):
    """The rollout service and the tool sessions behind Gym's routes."""

    ray_enabled: ClassVar[bool] = False
    config: ProrlRolloutConfig
    _service: EmbeddedService = PrivateAttr()
    _sessions: ToolSessions = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        self._service = EmbeddedService(
            self.config.engines, self.config.model, self.config.tokenizer, self.config.service
        )
        self._sessions = ToolSessions(
            lambda: self._service.backend,
            self.config.session_idle_seconds,
            lambda: self._service.judge,
            self._service.config.settings,
        )

    def setup_webserver(self) -> FastAPI:
        """Return the app with our routes; the service starts and stops with the server."""
        app = super().setup_webserver()
        app.post("/{tool}")(self.call_tool)  # last: the row decides which tools there are
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
            async with inner(app) as state, running_service(self._service.running()) as routes:
                app.middleware_stack = _mount_first(routes, app.middleware_stack or app.router)
                freeze_imports()
                yield state
                await self._sessions.close_all()

        app.router.lifespan_context = lifespan
        return app

    # -- sessions for other agents ------------------------------------------------------------------------------

    async def seed_session(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        """Open a session for a row, under the id that an environment server gives, otherwise the cookie's."""
        given_id = body.get("resources_session_id")
        row: Mapping[str, Any] = body.get("task_data", {}) if given_id else body
        session_id = given_id or request.session[SESSION_ID_KEY]
        request.session[SESSION_ID_KEY] = session_id
        try:
            await self._sessions.open(session_id, row)
        except (TaskError, NotFoundError) as error:
            raise HTTPException(409 if isinstance(error, NotFoundError) else 422, str(error)) from None
        except RolloutError as error:
            raise HTTPException(503, str(error)) from None
        request.session[SEEDED_KEY] = True
        return {"resources_session_id": given_id} if given_id else {}

    def mcp_tools(self, harvested: list[Any], catchall: Any) -> list[Any]:
        """Return the tools of the built-in environments for Gym's MCP server (``expose_tools_over_mcp``)."""
        built_in = (
            BashTool(_raise_session_lost, 1.0),
            PythonTool(_raise_session_lost, 1.0),
            EditorTool(_raise_session_lost),
            ThinkTool(),
            FinishTool(),
        )
        specs = [tool.spec for tool in built_in]
        return [catchall.tool(spec.name, dict(spec.parameters), spec.description) for spec in specs]

    async def call_tool(self, request: Request, tool: str, body: dict[str, Any]) -> PlainTextResponse:
        """Answer with the observation of a tool call. Every error is text for the model, as Gym requires."""
        try:
            async with self._sessions.acquire_session(request.session[SESSION_ID_KEY]) as session:
                called = session.tools.get(tool)
                if called is None:
                    names = ", ".join(session.tools)
                    return PlainTextResponse(f"There is no tool '{tool[:40]}' here. Tools: {names}.", 404)
                try:
                    observation = await called(check_arguments(called.spec, body))
                except BadArguments as error:
                    return PlainTextResponse(str(error), status_code=422)
                except SandboxError as error:
                    session.sandbox_error = await session.leases.diagnose_failure(error)
                    return PlainTextResponse("The sandbox is gone; this tool cannot be used any more.", status_code=503)
                if observation.answer is not None:
                    session.artifacts.answer = observation.answer
                return PlainTextResponse(observation.text)
        except (NotFoundError, RolloutError) as error:
            return PlainTextResponse(str(error), status_code=409)

    async def verify(self, request: Request, body: VerifyRequest) -> dict[str, Any]:
        """Grade the answer and what the session's tools changed; close the session.

        A session that is gone is not graded. An answer that never had one is graded by its row, where the environment
        needs no more. Raises ``TaskError`` if the row is bad, so no answer can be graded.
        """
        session_id = request.session[SESSION_ID_KEY]
        try:
            async with self._sessions.acquire_session(session_id) as session:
                answer = await verify_reply(body, partial(grade_session, session), session)
        except NotFoundError:
            if request.session.get(SEEDED_KEY) or self._sessions.was_closed(session_id):
                return await verify_reply(body, _raise_session_lost)
            return await grade_without_session(body, self._sessions.agentless_leases())
        await self._sessions.close(session_id)
        return answer

    async def close_resources_session(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        """Release a session. Idempotent; unknown ids are ignored."""
        session_id = body.get("resources_session_id") or request.session[SESSION_ID_KEY]
        await self._sessions.close(session_id)
        return {"resources_session_id": session_id}


def _mount_first(service: ASGIApp, others: ASGIApp) -> ASGIApp:
    """Return the service's routes next to the stack of all others.

    A route of the app would be called through Gym's middlewares (sessions, exceptions, cancellation). They cost each
    call five tasks and a signed cookie, and the service has no use for them.
    """
    mount = Mount(SERVICE_PATH, service)

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        match, found = mount.matches(scope)
        if match is Match.FULL:
            await mount.handle({**scope, **found}, receive, send)
        else:
            await others(scope, receive, send)

    return dispatch


async def verify_reply(
    body: VerifyRequest, grade_answer: Callable[[str | None], Awaitable[Score]], session: ToolSession | None = None
) -> dict[str, Any]:
    """Return Gym's verify reply; without a valid grade the reply is masked, never a plain 0.

    ``grade_answer`` grades the last answer of the response. Raises ``TaskError`` if the row is bad.
    """
    echo = body.model_dump(mode="json")
    reply: dict[str, Any] = {"reward": 0.0, "mask_sample": False, "failure_kind": None, "failure_reason": None}
    try:
        score = await grade_answer(last_answer(echo["response"]["output"]))
    except TaskError:
        raise
    except RolloutError as error:
        reply |= {"mask_sample": True, "failure_kind": gym_failure_kind(error.kind), "failure_reason": str(error)}
    else:
        reply["reward"] = score.reward
        if session is not None and session.sandbox_error is not None:  # the model caused it, so the grade is valid
            reply |= {
                "failure_kind": gym_failure_kind(session.sandbox_error.kind),
                "failure_reason": str(session.sandbox_error),
            }
    config = {**(echo.get("instance_config") or {}), "mask_sample": reply["mask_sample"]}
    return echo | reply | {"instance_config": config}


async def grade_without_session(body: VerifyRequest, leases: SandboxLeases) -> dict[str, Any]:
    """Grade an answer by its row alone. Raises ``TaskError`` if the row is bad."""

    async def graded(answer: str | None) -> Score:
        return await grade_session(await open_session(json.loads(body.model_dump_json()), leases), answer)

    try:
        return await verify_reply(body, graded)
    finally:
        await leases.close()


async def _raise_session_lost(*_: Any) -> Never:
    raise session_lost_error()


class _LazyBackend:
    """The best backend of this machine, opened with the first sandbox: most rows are graded without any."""

    name = "auto"

    def __init__(self) -> None:
        self._backend: SandboxBackend | None = None

    async def probe(self) -> ProbeResult:
        return ProbeResult(self.name, True, "not opened yet")

    async def start_sandbox(self, spec: SandboxSpec) -> Sandbox:
        if self._backend is None:
            self._backend = await open_backend(SandboxConfig())
        return await self._backend.start_sandbox(spec)

    async def close(self) -> None:
        if self._backend is not None:
            await self._backend.close()


class RowVerifier:
    """Grades by the row alone, without the service, for ``gym env test``.

    A fresh sandbox takes the place of the agent's: in the test cases the agent left nothing in it.
    """

    async def verify(self, body: VerifyRequest) -> dict[str, Any]:
        """Return Gym's verify reply. Raises ``TaskError`` if the row is bad."""
        backend = _LazyBackend()
        try:
            return await grade_without_session(body, SandboxLeases(backend))
        finally:
            await backend.close()


VERIFIER_FIXTURE = verifier_fixture(
    RowVerifier, VerifyRequest, Path(__file__).parent / "tests" / "verifier_cases.jsonl"
)


if __name__ == "__main__":
    run_server(ProrlRolloutServer.run_webserver)
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = run_server(ProrlRolloutServer.run_webserver)
