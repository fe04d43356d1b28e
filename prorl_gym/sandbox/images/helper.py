"""The process that touches what is inside images: gives up root first, does one thing, answers in one line of JSON.

``python -m prorl_gym.sandbox.images.helper REQUEST``, with the layer on standard input. It dies with the process that
started it, and holds the caller's lock (an inherited descriptor) until it does, so that what it leaves half done can
be told from what is being done.
"""

import codecs
import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from prorl_gym.errors import ProrlError
from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.images.squashfs import unpack_sif
from prorl_gym.sandbox.images.streams import decompressed
from prorl_gym.sandbox.images.untar import Bounds, Unpacked, unpack
from prorl_gym.sandbox.scratch import remove_directory

_MEMORY = 2 << 30  # an archive's headers can claim any length; Python reads them whole


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Do what is asked and return the answer.

    Raises:
        ProrlError: with what to tell the user.
        OSError: the disk is full, say.
    """
    _confine(request["uid"], request["parent"])
    match request["op"]:
        case "untar":
            return _untar(request)
        case "unsif":
            done = unpack_sif(request["source"], _begin(request), _bounds(request))
            return _finish(request, done, request["digest"])
        case "publish":
            _publish(request["source"], request["target"])
            return {}
        case "discard":
            os.rename(request["source"], request["target"])  # nobody finds it from here on
            _remove(request["target"])
            return {}
        case "remove":
            _remove(request["path"])
            return {}
        case other:
            raise ValueError(f"no operation {other!r}")


def _confine(uid: int, parent: int) -> None:
    for encoding in ("ascii", "utf-8", "latin-1"):
        codecs.lookup(encoding)  # modules too, and root's interpreter may be out of an ordinary user's reach
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    if 0 in os.getresuid():
        raise PermissionError("root could not be given up")
    # After the change of uid, which clears the signal.
    syscalls.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    syscalls.set_no_new_privileges()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(0o022)


def _bounds(request: dict[str, Any]) -> Bounds:
    return Bounds(request["size"], request["entries"])


def _begin(request: dict[str, Any]) -> str:
    """Make the directory of a layer, beside its final place."""
    os.mkdir(request["target"], 0o755)
    root = f"{request['target']}/root"
    os.mkdir(root, 0o755)
    return root


def _untar(request: dict[str, Any]) -> dict[str, Any]:
    bounds = _bounds(request)
    root = _begin(request)
    with decompressed(open(0, "rb", closefd=False), bounds.size, bounds.entries) as stream:
        done = unpack(stream, root, bounds)
        stream.drain()
        digest = stream.digest
    return _finish(request, done, digest)


def _finish(request: dict[str, Any], done: Unpacked, digest: str) -> dict[str, Any]:
    """Write the manifest, which is what makes a directory a layer, and make all of it durable."""
    facts = {
        "version": 1,
        "source": request["digest"],
        "content": digest,
        "bytes": done.size,
        "inodes": done.entries,
        "skipped": done.skipped,
    }
    with open(f"{request['target']}/manifest.json", "x", encoding="ascii") as file:
        json.dump(facts, file)
    if request["durable"]:
        _sync(request["target"])
    if request["final"]:
        _publish(request["target"], request["final"])
    return facts


def _sync(path: str) -> None:
    """Write everything of a file system to its disk: a rename must not survive a crash that its contents do not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            raise OSError(ctypes.get_errno(), "the disk refused what was written", path)
    finally:
        os.close(descriptor)


def _publish(source: str, target: str) -> None:
    """Give a finished layer its name. Somebody else's copy of the same contents will do as well."""
    try:
        os.rename(source, target)
    except OSError:
        if not os.path.isdir(target):
            raise
        _remove(source)


def _remove(path: str) -> None:
    """Remove a directory, also one whose permissions an image (or a torn unpacking) has taken away."""
    remove_directory(Path(path))


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"done": main(request)}
    except ProrlError as error:
        kind = getattr(error, "kind", None)
        return {"error": {"kind": kind and kind.value, "what": error.what, "fix": error.fix}}
    except OSError as error:
        return {"error": {"kind": None, "errno": error.errno, "what": str(error), "fix": ""}}


if __name__ == "__main__":
    print(json.dumps(_answer(json.loads(sys.argv[1]))))
