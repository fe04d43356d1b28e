"""What the service answers when something is wrong: ``{"error": {"what", "fix"}}`` and a status, never a traceback."""

import logging
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from prorl_gym.errors import (
    ConfigError,
    ConflictError,
    GoneError,
    NotFoundError,
    ProrlError,
    RolloutError,
    ShuttingDownError,
)
from prorl_gym.inference.lifecycle import LifecycleError
from prorl_gym.logs import redact
from prorl_gym.rollout.ledger_file import DiskFullError, LedgerError, LedgerFullError

_LOG = logging.getLogger(__name__)

_STATUS: tuple[tuple[type[ProrlError], int], ...] = (
    (GoneError, 410),
    (NotFoundError, 404),
    (ConflictError, 409),
    (LifecycleError, 409),
    (ShuttingDownError, 503),
    (DiskFullError, 503),
    (LedgerFullError, 429),
    (LedgerError, 503),
    (ConfigError, 400),
    (RolloutError, 422),
)


FULL_RETRY_AFTER = 30
"""Seconds after which a full ledger may have room again: somebody has to acknowledge records first."""


DISK_RETRY_AFTER = 5
"""Seconds after which a disk that failed may work again."""


class Refusal(ProrlError):
    """The request itself is at fault, or comes too early.

    Args:
        status: HTTP status.
        what: see ``ProrlError``.
        fix: see ``ProrlError``.
        retry_after: seconds after which it may be sent again.
    """

    def __init__(self, status: int, what: str, fix: str = "", retry_after: int | None = None) -> None:
        super().__init__(what, fix)
        self.status = status
        self.retry_after = retry_after


def error_answer(status: int, what: str, fix: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return the one form that errors have."""
    return JSONResponse({"error": {"what": redact(what), "fix": redact(fix)}}, status, dict(headers or {}))


def install(app: FastAPI) -> None:
    """Answer every exception in that form."""
    app.add_exception_handler(ProrlError, _ours)
    app.add_exception_handler(RequestValidationError, _bad_parameter)
    app.add_exception_handler(HTTPException, _of_the_framework)
    app.add_exception_handler(Exception, _defect)


async def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProrlError)
    if isinstance(error, Refusal):
        headers = None if error.retry_after is None else {"Retry-After": str(error.retry_after)}
        return error_answer(error.status, error.what, error.fix, headers)
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    if status >= 500:
        _LOG.error("%s: %s", request.url.path, error)
    after = FULL_RETRY_AFTER if status == 429 else DISK_RETRY_AFTER if isinstance(error, LedgerError) else None
    headers = None if after is None else {"Retry-After": str(after)}
    return error_answer(status, error.what, error.fix, headers)


async def _of_the_framework(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    fix = "See /docs for the routes." if error.status_code in (404, 405) else ""
    what = f"{request.method[:20]} {request.url.path[:200]}: {error.detail}."
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(_allowed(request))
    return error_answer(error.status_code, what, fix, headers)


def _allowed(request: Request) -> list[str]:
    """Return all methods of this path: the framework names those of its first route only."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in routes for method in getattr(route, "methods", None) or ()})


async def _bad_parameter(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"][1:])
    return error_answer(422, f"The parameter '{name[:80]}' is wrong: {first['msg'][:300]}.", "See /docs for its form.")


async def _defect(request: Request, error: Exception) -> Response:
    _LOG.error("%s %s broke", request.method, request.url.path, exc_info=error)
    return error_answer(500, "The service is at fault.", "Its log has the traceback; please report it.")
