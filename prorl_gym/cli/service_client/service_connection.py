"""Shared by the commands that talk to a running service: options, the connection, text of records."""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prorl_gym.client import DEFAULT_URL
from prorl_gym.errors import ConfigError

if TYPE_CHECKING:
    from prorl_gym.client import SyncClient
    from prorl_gym.records import Rollout

_URL_HELP = (
    "Address of the service. Its token is read from PRORL_GYM_TOKEN, from the file that PRORL_GYM_TOKEN_FILE names, or "
    "from where a service of this user puts it."
)
UrlOption = Annotated[str, typer.Option(envvar="PRORL_GYM_URL", help=_URL_HELP)]
RunOption = Annotated[str, typer.Option("--run", help="Run of the rollouts, by which to watch and cancel them.")]
LOCAL_URL = DEFAULT_URL

CONNECT_SECONDS = 6.0
"""Seconds for which a command retries to reach a service: the user waits for the answer."""

OUTAGE_SECONDS = 600.0
"""Seconds of outage that a waiting command survives once it has reached the service: a restart drains first."""


@contextmanager
def connect(url: str, *, survive_restarts: bool = False) -> Generator["SyncClient", None, None]:
    """Connect to the service. A command that may wait for long survives a restart of the service."""
    from prorl_gym.client import SyncClient

    if survive_restarts:
        with SyncClient(url, retry_seconds=CONNECT_SECONDS) as client:
            client.status()
    with SyncClient(url, retry_seconds=OUTAGE_SECONDS if survive_restarts else CONNECT_SECONDS) as client:
        try:
            yield client
        except KeyboardInterrupt:
            sys.exit(130)


def find_rollout(client: "SyncClient", rollout_id: str) -> str:
    """Return the id of the only finished rollout with this prefix; a complete or unknown id is returned unchanged.

    Raises ``ConfigError``: several finished rollouts have this prefix.
    """
    found = [one.rollout_id for one in client.rollouts(prefix=rollout_id, limit=6).rollouts]
    if len(found) < 2 or rollout_id in found:
        return found[0] if len(found) == 1 else rollout_id
    ids = f"{', '.join(found[:5])}{', ...' if len(found) > 5 else ''}"
    raise ConfigError(f"{rollout_id}: is a prefix of several rollouts: {ids}.", "Give a longer prefix.")


def printable(text: str) -> str:
    """Return text without control characters: records quote models and programs."""
    return "".join(character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text)


def rollout_summary(rollout: "Rollout") -> str:
    """Return a rollout in one line, followed by its message."""
    reward = "-" if rollout.reward is None else f"{rollout.reward:g}"
    seconds = sum(stage.seconds for stage in rollout.stages.values())
    line = (
        f"{rollout.rollout_id} {printable(rollout.environment)[:80]} {outcome_label(rollout)} reward={reward} "
        f"turns={rollout.turns} tokens={rollout.sampled_tokens} attempt={rollout.attempt} seconds={seconds:.2f}"
    )
    return "\n    ".join([line, *printable(rollout.outcome.message).splitlines()])


def outcome_label(rollout: "Rollout") -> str:
    """Return its outcome in one word."""
    detail = rollout.outcome.kind or rollout.outcome.limit or rollout.outcome.reason
    return rollout.outcome.status if detail is None else f"{rollout.outcome.status}({detail.value})"


@contextmanager
def atomic_file(path: Path) -> Generator[Path, None, None]:
    """Provide a draft to write, which replaces ``path`` at the end, unless it was removed.

    Raises ``ConfigError`` if the file cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield draft
        if draft.exists():
            os.replace(draft, path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}).", "Check the path and the disk.") from None
    finally:
        draft.unlink(missing_ok=True)
