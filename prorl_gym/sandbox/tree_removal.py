"""Removes a directory tree that a payload made: of any depth and width, with any permissions.

``shutil.rmtree`` recurses and holds a descriptor per level, so a tree of some thousand levels ends the process that
removes it. Here every directory that is not empty is first moved to the top: two descriptors, no recursion, no long
paths.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path


def remove_tree(path: Path | str) -> None:
    """Remove a directory and everything below it. Not an error if it is gone, or removed concurrently.

    Raises ``OSError`` when a part of it could not be removed.
    """
    try:
        top = _open_directory(os.fspath(path))
    except FileNotFoundError:
        return
    try:
        mark = os.urandom(8).hex()
        fresh = (f".{mark}-{number}" for number in count())
        while names := os.listdir(top):
            for name in names:
                _remove_entry(top, name, fresh)
    finally:
        os.close(top)
    with suppress(FileNotFoundError):
        os.rmdir(path)


def _open_directory(name: str, parent: int | None = None) -> int:
    """Open a directory, restoring the permissions of its owner. Never through a link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        with suppress(PermissionError):  # another user's, perhaps readable all the same
            os.chmod(name, 0o700, dir_fd=parent)
    return os.open(name, flags, dir_fd=parent)


def _remove_entry(top: int, name: str, fresh: Iterator[str]) -> None:
    """Remove an entry of ``top``; directories in it that are not empty move to ``top``."""
    try:
        if _try_remove(top, name):
            return
        directory = _open_directory(name, top)
    except FileNotFoundError:
        return
    try:
        for below in os.listdir(directory):
            with suppress(FileNotFoundError):
                if not _try_remove(directory, below):
                    os.chmod(below, 0o700, dir_fd=directory)  # a directory that moves has its ".." written
                    os.rename(below, next(fresh), src_dir_fd=directory, dst_dir_fd=top)
    finally:
        os.close(directory)
    with suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=top)


def _try_remove(parent: int, name: str) -> bool:
    """Remove an entry that is no directory, or an empty one; ``False`` when it is a directory with contents."""
    try:
        os.unlink(name, dir_fd=parent)
    except IsADirectoryError:
        try:
            os.rmdir(name, dir_fd=parent)
        except OSError:  # not empty
            return False
    return True
