"""The address of the service, and its bearer token."""

import os
import stat
from pathlib import Path
from urllib.parse import urlsplit

from prorl_gym.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8770"
"""Where ``prorl-gym serve`` listens by default."""

_MAX_TOKEN_BYTES = 4096


def service_url(url: str | None) -> str:
    """Return the address of the service: this one, ``$PRORL_GYM_URL``, or the default. Raises ``ConfigError``."""
    found = (url or os.environ.get("PRORL_GYM_URL") or DEFAULT_URL).rstrip("/")
    try:
        parts = urlsplit(found)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        is_address = False
    if not is_address or "?" in found or "#" in found:
        raise ConfigError(
            f"'{found[:200]}' is no address of a service.", "Give http://HOST:PORT (--url, PRORL_GYM_URL)."
        )
    return found


def default_state_dir() -> Path:
    """Return the directory where a service keeps its token and its ledger by default."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "prorl-gym"


def read_token(path: Path | None = None) -> str:
    """Return the service's bearer token: ``$PRORL_GYM_TOKEN``, or that in ``path`` or the default token file.

    Raises ``ConfigError``: there is no such file, or it is not this user's alone.
    """
    if path is None and os.environ.get("PRORL_GYM_TOKEN"):
        return os.environ["PRORL_GYM_TOKEN"]
    path = path or _token_file()
    try:  # without O_NONBLOCK, opening a pipe would block
        with open(path, encoding="ascii", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())  # of the opened file: the path may lead elsewhere by now
            token = file.read(_MAX_TOKEN_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"{path}: the service's token cannot be read ({why}).",
            "Start the service once as this user, or set PRORL_GYM_TOKEN or PRORL_GYM_TOKEN_FILE.",
        ) from None
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"{path}: the token file belongs to another user ({found.st_uid}).",
            "Remove it and start the service again; to call another user's service, set PRORL_GYM_TOKEN.",
        )
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{path}: other users may read the token.", f"chmod 600 {path}, and make a new token.")
    if not token:
        raise ConfigError(f"{path}: the token is empty.", "Remove the file and start the service again.")
    return token


def token_source() -> str:
    """Return what ``read_token`` reads, for messages."""
    return "PRORL_GYM_TOKEN" if os.environ.get("PRORL_GYM_TOKEN") else str(_token_file())


def _token_file() -> Path:
    return Path(os.environ.get("PRORL_GYM_TOKEN_FILE") or default_state_dir() / "token")
