"""The token on the published routes, in every place where an unchanged trainer can be made to send it.

Trainers written for the published server send none. Whoever can give them a base URL can give it there:
``http://:TOKEN@host:8006`` (HTTP clients turn that into Basic authentication) or ``http://host:8006/t/TOKEN``.
"""

import base64
import binascii
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from prorl_gym.api.answers import error_answer

_PREFIX = "/t/"


def has_compat_token(scope: Scope, token: bytes) -> bool:
    """Return whether a request carries the token, in one place or another."""
    given = _in_path(scope)[0] if scope["path"].startswith(_PREFIX) else _in_header(scope)
    return any([hmac.compare_digest(one, token) for one in given])  # a list: all are compared


class CompatAuth:
    """ASGI middleware that refuses requests without the token, and hides a token in the path from what comes after.

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
            answer = error_answer(
                401,
                "The token is missing or wrong.",
                "Give the content of the service's token file in the base URL, as its password or as the path "
                "/t/TOKEN; or in the Authorization header, after 'Bearer'.",
                headers={"WWW-Authenticate": 'Bearer, Basic realm="prorl-gym"'},
            )
            await answer(scope, receive, send)
            return
        if scope["path"].startswith(_PREFIX):
            scope = _in_path(scope)[1]
        await self._app(scope, receive, send)


def _in_path(scope: Scope) -> tuple[list[bytes], Scope]:
    """Return the token in the path, and the request without it: errors and logs name paths."""
    given, _, rest = scope["path"].removeprefix(_PREFIX).partition("/")
    path = "/" + rest
    return [given.encode(errors="replace")], {**scope, "path": path, "raw_path": path.encode(errors="replace")}


def _in_header(scope: Scope) -> list[bytes]:
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
