"""Error answers: ``{"error": {"what", "fix"}}`` and a status, never a traceback."""

import logging
import time
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
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

_LOG_SECONDS = 60.0
"""An error that each request meets is logged once in so many."""


class ApiError(ProrlError):
    """The request is wrong, or may be sent again after ``retry_after`` seconds."""

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
    for kind in (ProrlError, RequestValidationError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _handle_error)


def _is_logged(app: FastAPI, text: str) -> bool:
    """Whether this error is in the log since a minute: a disk that fails is met by each request."""
    before, at = getattr(app.state, "logged_error", ("", 0.0))
    is_known = before == text and time.monotonic() < at + _LOG_SECONDS
    if not is_known:
        app.state.logged_error = text, time.monotonic()
    return is_known


async def _handle_error(request: Request, error: Exception) -> Response:
    match error:
        case ApiError():
            headers = None if error.retry_after is None else {"Retry-After": str(error.retry_after)}
            return error_response(error.status, error.what, error.fix, headers)
        case ProrlError():
            status = next((status for kind, status in _STATUS_BY_ERROR if isinstance(error, kind)), 500)
            if status >= 500 and not _is_logged(request.app, str(error)):
                _LOG.error("%s: %s", request.url.path, error)
            headers = None
            if isinstance(error, LedgerError) and status != 500:
                headers = {"Retry-After": str(LEDGER_FULL_RETRY_SECONDS if status == 429 else DISK_RETRY_SECONDS)}
            kind = error.kind if isinstance(error, RolloutError) else None
            return error_response(status, error.what, error.fix, headers, kind)
        case RequestValidationError():
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"][1:9])[:200]
            if first["loc"][0] == "body":
                where = f"The field '{place}' of the body" if place else "The body"
            else:
                where = f"The parameter '{place[:80]}'"
            message = first["msg"].removeprefix("Value error, ")[:300]
            return error_response(422, f"{where} is wrong: {message}.", "See /docs for the form.")
        case HTTPException():
            what = f"{request.method[:20]} {request.url.path[:200]}: {error.detail}."
            fix = "See /docs for the routes." if error.status_code in (404, 405) else ""
            headers = dict(error.headers or {})
            if error.status_code == 405:  # the framework names the methods of the path's first route only
                routes = [one for one in request.app.routes if one.matches(request.scope)[0] is not Match.NONE]
                methods = {method for route in routes for method in getattr(route, "methods", None) or ()}
                headers["Allow"] = ", ".join(sorted(methods))
            return error_response(error.status_code, what, fix, headers)
        case ClientDisconnect():
            _LOG.debug("%s %s: the client left before the end of its body", request.method, request.url.path)
            return Response()  # nobody reads it
        case _:
            _LOG.error("%s %s broke", request.method, request.url.path, exc_info=error)
            return error_response(500, "The service is at fault.", "Its log has the traceback; please report it.")
