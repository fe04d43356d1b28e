"""ASGI middleware around every route: the token, what pages of other sites send, and the size of bodies."""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prorl_gym.api.http.error_responses import ApiError, error_response

PUBLIC_PATHS = frozenset({"/livez", "/readyz", "/", "/docs", "/docs/ui.js", "/docs/ui.css", "/openapi.json"})
"""They hold no data: health is yes or no, and a browser sends no token when it loads the pages."""

HTML_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
        "connect-src 'self'; frame-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Headers of pages with their scripts and styles inside: they may load nothing, whatever a model wrote into them."""

DOCS_HEADERS = {
    **HTML_HEADERS,
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
"""Headers of the page that describes the routes, whose scripts are files of this service."""


class BearerAuth:
    """Refuses requests without the token: on a cluster node, every user reaches 127.0.0.1."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and scope["path"] not in PUBLIC_PATHS and not self._has_token(scope):
            answer = error_response(
                401,
                "The bearer token is missing or wrong.",
                "Send the content of the service's token file in the Authorization header, after 'Bearer'.",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _has_token(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, value = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        return scheme.lower() == b"bearer" and hmac.compare_digest(value.strip(), self._token)


class CrossSiteGuard:
    """Refuses what a page of another site sends.

    The token travels in a header that only the service's own page sets (no cookie). So another site cannot use it, nor
    can a name that was pointed at this host (DNS rebinding): such a page is of another origin and does not have it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _is_cross_site(scope):
            answer = error_response(403, "Another site's page sent this request.", "Open the service's own page.")
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_cross_site(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    if origin is not None:
        return origin.partition("://")[2].lower() != headers.get("host", "").lower()
    site = headers.get("sec-fetch-site", "none")
    if site in ("same-origin", "none"):
        return False
    return headers.get("sec-fetch-mode") != "navigate" or scope["method"] not in ("GET", "HEAD")  # a link may lead here


class BodyLimit:
    """Refuses a body above a size with 413 when a route reads it, before more than that is in memory."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT"):
            await self._app(scope, receive, send)
            return
        content_length = Headers(scope=scope).get("content-length", "")
        received = 0

        async def receive_bounded() -> Message:
            nonlocal received
            if content_length.isdigit() and (len(content_length) > 18 or int(content_length) > self._max_bytes):
                raise self._too_large()
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, receive_bounded, send)

    def _too_large(self) -> ApiError:
        fix = "Send fewer rollouts at once, or raise http.max_body_bytes."
        return ApiError(413, f"The body is larger than {self._max_bytes} bytes.", fix)
