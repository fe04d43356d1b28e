"""The published routes over HTTP."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from pydantic import TypeAdapter
from starlette.responses import JSONResponse, RedirectResponse, Response

from prorl_gym import __version__
from prorl_gym.api import openapi
from prorl_gym.api.answers import Refusal, install
from prorl_gym.api.body import parse_body, read_body
from prorl_gym.api.compat import examples
from prorl_gym.api.compat.auth import CompatAuth
from prorl_gym.api.compat.port import CompatPort
from prorl_gym.api.compat.wire import AddressRequest, CancelRequest, ProcessRequest
from prorl_gym.api.contract import GUARDED, WITH_BODY, answers, body
from prorl_gym.api.guard import SameSite

_PROCESS = TypeAdapter(ProcessRequest)
_CANCEL = TypeAdapter(CancelRequest)
_ADDRESS = TypeAdapter(AddressRequest)

_DESCRIPTION = """The routes of the published ProRL rollout server, for trainers that were written for it.

What differs, field by field, and how to move on to `/v1`: docs/migration.md. These routes will not grow.
"""

_TAGS = [
    {"name": "jobs", "description": "Make a rollout and wait for it; cancel it."},
    {"name": "service", "description": "The brackets around a training step."},
    {"name": "engines", "description": "Which of the configured engines serve."},
]

_HUNG_UP = 499
"""What nobody reads: the client has closed the connection."""


def create_compat_app(port: CompatPort, token: str, *, max_body_bytes: int = 64 << 20) -> FastAPI:
    """Return the routes.

    Args:
        port: what they talk to.
        token: every route asks for it (see ``CompatAuth``).
        max_body_bytes: of one request.
    """
    app = FastAPI(
        title="prorl-gym: routes of the published server",
        version=__version__,
        description=_DESCRIPTION,
        openapi_tags=_TAGS,
        openapi_url=None,  # ``openapi.install`` answers it
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    install(app)
    app.add_middleware(SameSite)
    app.add_middleware(CompatAuth, token=token)
    _add_jobs(app.router, port, max_body_bytes)
    _add_control(app.router, port)
    _add_engines(app.router, port, max_body_bytes)
    openapi.install(app, (ProcessRequest, CancelRequest, AddressRequest))
    return app


def _add_jobs(routes: APIRouter, port: CompatPort, limit: int) -> None:
    @routes.post(
        "/process",
        tags=["jobs"],
        openapi_extra=body(ProcessRequest, examples.PROCESS),
        responses=answers(
            examples.RESULT, (*GUARDED, *WITH_BODY, 400, 409, 429, 503, 504), "It ended, one way or other."
        ),
    )
    async def process(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Make one rollout; answers when it has ended. Hanging up cancels it."""
        asked = parse_body(await read_body(request, limit), _PROCESS)
        return await _unless_gone(request, port.process(asked), port.config.answer_seconds)

    @routes.post(
        "/cancel",
        tags=["jobs"],
        openapi_extra=body(CancelRequest, examples.CANCEL),
        responses=answers(examples.CANCELLED, (*GUARDED, *WITH_BODY, 404)),
    )
    async def cancel(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Cancel a /process that is under way; it answers with what there is."""
        return JSONResponse(await port.cancel(parse_body(await read_body(request, limit), _CANCEL).job_id))


def _add_control(routes: APIRouter, port: CompatPort) -> None:
    @routes.post("/start", tags=["service"], responses=answers(examples.STARTED, GUARDED))
    async def start() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Take calls of /process again. Harmless when they are taken."""
        return JSONResponse(await port.open())

    @routes.post("/stop", tags=["service"], responses=answers(examples.STOPPED, GUARDED))
    async def stop() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Cancel what this port was asked for, and take no more calls until /start. The service goes on."""
        return JSONResponse(await port.stop())

    @routes.get("/status", tags=["service"], responses=answers(examples.STATUS, GUARDED))
    async def status() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Return what is going on."""
        return JSONResponse(await port.status())

    @routes.get("/docs", include_in_schema=False)
    async def docs() -> Response:  # pyright: ignore[reportUnusedFunction]
        return RedirectResponse("openapi.json")  # relative: the token may stand before it


def _add_engines(routes: APIRouter, port: CompatPort, limit: int) -> None:
    @routes.post(
        "/add_llm_server",
        tags=["engines"],
        openapi_extra=body(AddressRequest, examples.ADDRESS),
        responses=answers(examples.ADDED, (*GUARDED, *WITH_BODY, 409)),
    )
    async def add(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Let an engine serve that the configuration allows."""
        return JSONResponse(port.add_llm_server(parse_body(await read_body(request, limit), _ADDRESS).address))

    @routes.post("/clear_llm_server", tags=["engines"], responses=answers(examples.CLEARED, (*GUARDED, 409)))
    async def clear() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Let no engine serve; calls under way are finished."""
        return JSONResponse(port.clear_llm_servers())


async def _unless_gone(request: Request, work: Coroutine[Any, Any, dict[str, Any]], seconds: float | None) -> Response:
    """Answer with what the work returns; cut it off when the client hangs up or the time is over.

    Raises:
        Refusal: 504.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_hung_up(request))
    try:
        await asyncio.wait({working, leaving}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
    if not working.cancelled():
        return JSONResponse(working.result())
    if leaving.done() and not leaving.cancelled():
        return Response(status_code=_HUNG_UP)
    raise Refusal(504, f"There was no result within {seconds} s.", "Raise http.compat.answer_seconds, or leave it out.")


async def _hung_up(request: Request) -> None:
    """Return when the client has closed the connection; the body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
