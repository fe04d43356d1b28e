"""The bearer token: made once, readable by its owner only, asked for by every route that tells or changes anything.

Loopback is no protection on a cluster node, where every user reaches 127.0.0.1.
"""

import hmac
import os
import secrets
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from prorl_gym.api.answers import error_answer
from prorl_gym.api.private import make_private
from prorl_gym.client import read_token
from prorl_gym.errors import ConfigError

OPEN_PATHS = frozenset({"/livez", "/readyz", "/", "/docs", "/docs/ui.js", "/docs/ui.css", "/openapi.json"})
"""Hold no data: health says yes or no, and pages are the same for everybody (a browser sends no token for them)."""


def load_or_make_token(path: Path) -> str:
    """Return the token in this file; make both at the first start.

    Raises:
        ConfigError: the file cannot be made, or is not this user's alone; see ``make_private``.
    """
    make_private(path.parent, "state")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: the token file cannot be made ({error.strerror}).", "Set 'state' to a writable directory."
        ) from None
    token = secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")
    return token


def has_bearer(scope: Scope, token: bytes) -> bool:
    """Return whether a request carries the token."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    scheme, _, value = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
    return scheme.lower() == b"bearer" and hmac.compare_digest(value.strip(), token)


class BearerAuth:
    """ASGI middleware that refuses requests without the token.

    Args:
        app: what is protected.
        token: the secret.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "lifespan" and scope["path"] not in OPEN_PATHS and not has_bearer(scope, self._token):
            answer = error_answer(
                401,
                "The bearer token is missing or wrong.",
                "Send the content of the service's token file in the Authorization header, after 'Bearer'.",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)
