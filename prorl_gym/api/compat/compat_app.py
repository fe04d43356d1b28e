"""The published routes over HTTP."""

import asyncio
import base64
import binascii
import hmac
from collections.abc import Coroutine
from typing import Any

from fastapi import FastAPI, Request
from pydantic import TypeAdapter
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from prorl_gym import __version__
from prorl_gym.api.compat import compat_examples as examples
from prorl_gym.api.compat.compat_service import CompatService
from prorl_gym.api.compat.requests import AddressRequest, CancelJobRequest, ProcessRequest
from prorl_gym.api.http.error_responses import ApiError, error_response, install_error_handlers
from prorl_gym.api.http.json_bodies import read_json
from prorl_gym.api.http.middleware import BodyLimit, CrossSiteGuard
from prorl_gym.api.http.openapi import JsonBody, describe, install_openapi

_PROCESS = TypeAdapter(ProcessRequest)
_CANCEL = TypeAdapter(CancelJobRequest)
_ADDRESS = TypeAdapter(AddressRequest)

_DESCRIPTION = """The routes of the published ProRL rollout server, for trainers that were written for it.

What differs, field by field, and how to move on to `/v1`: docs/migration.md. These routes will not grow.
"""

_TAGS = [
    {"name": "jobs", "description": "Make a rollout and wait for it; cancel it."},
    {"name": "service", "description": "The brackets around a training step."},
    {"name": "engines", "description": "Which of the configured engines serve."},
]

_CLIENT_CLOSED_REQUEST = 499
"""Status of an answer that is never read: the client has closed the connection."""

_TOKEN_PATH_PREFIX = "/t/"


def create_compat_app(service: CompatService, token: str, *, max_body_bytes: int = 64 << 20) -> FastAPI:
    """Return the routes.

    Args:
        service: does the work.
        token: required by every route (see ``CompatAuth``).
        max_body_bytes: of one request.
    """
    app = FastAPI(
        title="prorl-gym: routes of the published server",
        version=__version__,
        description=_DESCRIPTION,
        openapi_tags=_TAGS,
        openapi_url=None,  # ``install_openapi`` answers it
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    install_error_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(CrossSiteGuard)
    app.add_middleware(CompatAuth, token=token)
    _add_routes(app, service)
    install_openapi(app, (ProcessRequest, CancelJobRequest, AddressRequest))
    return app


def _add_routes(routes: FastAPI, service: CompatService) -> None:
    @routes.post(
        "/process",
        **describe(
            "jobs",
            None,
            examples.RESULT,
            errors=(400, 409, 429, 503, 504),
            description="It ended, one way or other.",
            body=JsonBody(ProcessRequest, examples.PROCESS),
        ),
    )
    async def process(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Make one rollout; answers when it has ended. Closing the connection cancels it."""
        body = await read_json(request, _PROCESS)
        return await _run_until_disconnect(request, service.process(body), service.config.answer_seconds)

    @routes.post(
        "/cancel",
        **describe("jobs", None, examples.CANCELLED, errors=(404,), body=JsonBody(CancelJobRequest, examples.CANCEL)),
    )
    async def cancel(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Cancel a running /process; it answers with what there is."""
        return JSONResponse(await service.cancel((await read_json(request, _CANCEL)).job_id))

    @routes.post("/start", **describe("service", None, examples.STARTED))
    async def start() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Accept calls of /process again. Harmless when they are accepted."""
        return JSONResponse(await service.start_accepting())

    @routes.post("/stop", **describe("service", None, examples.STOPPED))
    async def stop() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Cancel all calls of this port, and accept no more until /start. The service goes on."""
        return JSONResponse(await service.stop_accepting())

    @routes.get("/status", **describe("service", None, examples.STATUS))
    async def status() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Return what the service is doing."""
        return JSONResponse(await service.status())

    @routes.get("/docs", include_in_schema=False)
    async def docs() -> Response:  # pyright: ignore[reportUnusedFunction]
        return RedirectResponse("openapi.json")  # relative: the token may be in the path before it

    @routes.post(
        "/add_llm_server",
        **describe("engines", None, examples.ADDED, errors=(409,), body=JsonBody(AddressRequest, examples.ADDRESS)),
    )
    async def add(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Let an engine serve that the configuration allows."""
        return JSONResponse(service.add_llm_server((await read_json(request, _ADDRESS)).address))

    @routes.post("/clear_llm_server", **describe("engines", None, examples.CLEARED, errors=(409,)))
    async def clear() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Let no engine serve; running calls are finished."""
        return JSONResponse(service.clear_llm_servers())


async def _run_until_disconnect(
    request: Request, work: Coroutine[Any, Any, dict[str, Any]], seconds: float | None
) -> Response:
    """Answer with what the work returns; cut it off when the client disconnects or the time is over.

    Raises:
        ApiError: 504.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_wait_for_disconnect(request))
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
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    raise ApiError(
        504, f"There was no result within {seconds} s.", "Raise http.compat.answer_seconds, or leave it out."
    )


async def _wait_for_disconnect(request: Request) -> None:
    """Return when the client has closed the connection; the body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def has_compat_token(scope: Scope, token: bytes) -> bool:
    """Return whether a request carries the token, in a header or in its path."""
    given = _token_in_path(scope)[0] if scope["path"].startswith(_TOKEN_PATH_PREFIX) else _tokens_in_header(scope)
    return any([hmac.compare_digest(one, token) for one in given])  # a list: all are compared


class CompatAuth:
    """ASGI middleware that refuses requests without the token, and removes a token from the path.

    Trainers written for the published server send no token. Where they take a base URL, it can carry one:
    ``http://:TOKEN@host:8006`` (HTTP clients turn that into Basic authentication) or ``http://host:8006/t/TOKEN``.

    Args:
        app: what is protected.
        token: the secret.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if not has_compat_token(scope, self._token):
            answer = error_response(
                401,
                "The token is missing or wrong.",
                "Give the content of the service's token file in the base URL, as its password or as the path "
                "/t/TOKEN; or in the Authorization header, after 'Bearer'.",
                headers={"WWW-Authenticate": 'Bearer, Basic realm="prorl-gym"'},
            )
            await answer(scope, receive, send)
            return
        if scope["path"].startswith(_TOKEN_PATH_PREFIX):
            scope = _token_in_path(scope)[1]
        await self._app(scope, receive, send)


def _token_in_path(scope: Scope) -> tuple[list[bytes], Scope]:
    """Return the token in the path, and the request without it: errors and logs name paths."""
    given, _, rest = scope["path"].removeprefix(_TOKEN_PATH_PREFIX).partition("/")
    path = "/" + rest
    return [given.encode(errors="replace")], {**scope, "path": path, "raw_path": path.encode(errors="replace")}


def _tokens_in_header(scope: Scope) -> list[bytes]:
    """Return what may be the token in the Authorization header; nothing when there are two headers."""
    headers = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(headers) != 1:
        return []
    scheme, _, value = headers[0].partition(b" ")
    if scheme.lower() == b"bearer":
        return [value.strip()]
    if scheme.lower() != b"basic":
        return []
    try:
        user, _, password = base64.b64decode(value.strip(), validate=True).partition(b":")
    except binascii.Error:
        return []
    return [password, user]  # http://:TOKEN@host and http://TOKEN@host
