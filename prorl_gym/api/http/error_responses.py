"""Error answers: ``{"error": {"what", "fix"}}`` and a status, never a traceback."""

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
    FailureKind,
    GoneError,
    NotFoundError,
    ProrlError,
    RolloutError,
    ShuttingDownError,
)
from prorl_gym.inference.weights.weight_updater import WeightUpdateError
from prorl_gym.logs import redact
from prorl_gym.rollout.ledger.ledger_config import DamagedLedgerError, DiskFullError, LedgerError, LedgerFullError

_LOG = logging.getLogger(__name__)

_STATUS_BY_ERROR: tuple[tuple[type[ProrlError], int], ...] = (
    (GoneError, 410),
    (NotFoundError, 404),
    (ConflictError, 409),
    (WeightUpdateError, 409),
    (ShuttingDownError, 503),
    (DiskFullError, 503),
    (LedgerFullError, 429),
    (DamagedLedgerError, 500),
    (LedgerError, 503),
    (ConfigError, 400),
    (RolloutError, 422),
)


LEDGER_FULL_RETRY_SECONDS = 30
"""Seconds after which a full ledger may have room again: records have to be acknowledged first."""


DISK_RETRY_SECONDS = 5
"""Seconds after which a disk that failed may work again."""


class ApiError(ProrlError):
    """The request is wrong, or comes too early.

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


def error_response(
    status: int, what: str, fix: str, headers: Mapping[str, str] | None = None, kind: FailureKind | None = None
) -> JSONResponse:
    """Return the one form that errors have."""
    text: dict[str, str] = {"what": redact(what), "fix": redact(fix)}
    if kind is not None:
        text["kind"] = kind
    return JSONResponse({"error": text}, status, dict(headers or {}))


def install_error_handlers(app: FastAPI) -> None:
    """Answer every exception in this form."""
    app.add_exception_handler(ProrlError, _handle_prorl_error)
    app.add_exception_handler(RequestValidationError, _handle_bad_parameter)
    app.add_exception_handler(HTTPException, _handle_http_exception)
    app.add_exception_handler(Exception, _handle_unexpected)


async def _handle_prorl_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProrlError)
    if isinstance(error, ApiError):
        headers = None if error.retry_after is None else {"Retry-After": str(error.retry_after)}
        return error_response(error.status, error.what, error.fix, headers)
    status = next((status for kind, status in _STATUS_BY_ERROR if isinstance(error, kind)), 500)
    if status >= 500:
        _LOG.error("%s: %s", request.url.path, error)
    after = None
    if isinstance(error, LedgerError) and status != 500:
        after = LEDGER_FULL_RETRY_SECONDS if status == 429 else DISK_RETRY_SECONDS
    headers = None if after is None else {"Retry-After": str(after)}
    kind = error.kind if isinstance(error, RolloutError) else None
    return error_response(status, error.what, error.fix, headers, kind)


async def _handle_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    fix = "See /docs for the routes." if error.status_code in (404, 405) else ""
    what = f"{request.method[:20]} {request.url.path[:200]}: {error.detail}."
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(_allowed_methods(request))
    return error_response(error.status_code, what, fix, headers)


def _allowed_methods(request: Request) -> list[str]:
    """Return all methods of this path: the framework names those of its first route only."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in routes for method in getattr(route, "methods", None) or ()})


async def _handle_bad_parameter(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"][1:])
    return error_response(
        422, f"The parameter '{name[:80]}' is wrong: {first['msg'][:300]}.", "See /docs for its form."
    )


async def _handle_unexpected(request: Request, error: Exception) -> Response:
    _LOG.error("%s %s broke", request.method, request.url.path, exc_info=error)
    return error_response(500, "The service is at fault.", "Its log has the traceback; please report it.")
