"""Directories whose files decide what the service believes: no other user may put files into them."""

import logging
import os
import stat
from pathlib import Path

from prorl_gym.errors import ConfigError

_LOG = logging.getLogger(__name__)


def make_private(directory: Path, key: str) -> None:
    """Make a directory for this user alone, or check that others cannot put files into the one that is there.

    Args:
        directory: of a token or a ledger.
        key: of the configuration, for messages.

    Raises:
        ConfigError: it cannot be made, or every user may write to it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise ConfigError(
            f"{key}: {directory} cannot be made ({error.strerror}).", f"Set '{key}' to a writable directory."
        ) from None
    if found.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"{key}: every user may write to {directory}.",
            f"chmod go-w {directory}, or set '{key}' to a directory of this user's.",
        )
    # A group may consist of this user alone, and the root of a container owns none of its volumes.
    if found.st_mode & stat.S_IWGRP:
        _LOG.warning("%s: the group of %s may write to it: chmod g-w, unless you trust its members", key, directory)
    if found.st_uid not in (os.geteuid(), 0):
        _LOG.warning("%s: %s belongs to another user (%d), who can replace its files", key, directory, found.st_uid)
