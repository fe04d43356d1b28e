"""The process that handles the content of images: drops root, serves one request, answers in one line of JSON.

``python -m prorl_gym.sandbox.images.unpack_helper REQUEST``, with the layer on standard input. It dies with the process
that started it, and holds the caller's lock (an inherited descriptor) until then: an unfinished layer whose lock is
free is garbage.
"""

import codecs
import json
import os
import resource
import signal
import sys
from typing import Any

from prorl_gym.errors import ProrlError
from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.images.sif import unpack_sif
from prorl_gym.sandbox.images.untar import LayerLimits, UnpackStats, open_decompressed, unpack_tar
from prorl_gym.sandbox.tree_removal import remove_tree

_MEMORY = 2 << 30  # headers of an archive can claim any length, and Python reads them whole


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Serve a request and return the answer.

    Raises:
        ProrlError: with cause and fix for the user.
        OSError: the disk is full, for example.
    """
    _drop_privileges(request["uid"], request["parent"])
    match request["op"]:
        case "untar":
            return _untar(request)
        case "unsif":
            done = unpack_sif(request["source"], _make_layer_directory(request), _limits(request))
            return _finish_layer(request, done, request["digest"])
        case "publish":
            _publish(request["source"], request["target"])
            return {}
        case "discard":
            os.rename(request["source"], request["target"])  # no longer found in the store
            remove_tree(request["target"])
            return {}
        case "remove":
            remove_tree(request["path"])
            return {}
        case other:
            raise ValueError(f"no operation {other!r}")


def _drop_privileges(uid: int, parent: int) -> None:
    for encoding in ("ascii", "utf-8", "latin-1"):
        codecs.lookup(encoding)  # import these modules now: an ordinary user may not be able to read root's interpreter
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


def _limits(request: dict[str, Any]) -> LayerLimits:
    return LayerLimits(request["size"], request["entries"])


def _make_layer_directory(request: dict[str, Any]) -> str:
    """Make the directory of a layer and its ``root``; return the latter."""
    os.mkdir(request["target"], 0o755)
    root = f"{request['target']}/root"
    os.mkdir(root, 0o755)
    return root


def _untar(request: dict[str, Any]) -> dict[str, Any]:
    bounds = _limits(request)
    root = _make_layer_directory(request)
    with open_decompressed(open(0, "rb", closefd=False), bounds.size, bounds.entries) as stream:
        done = unpack_tar(stream, root, bounds)
        stream.drain()
        digest = stream.digest
    return _finish_layer(request, done, digest)


def _finish_layer(request: dict[str, Any], done: UnpackStats, digest: str) -> dict[str, Any]:
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
    """Write the file system to its disk: a rename must not survive a crash that the contents do not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        syscalls.sync_file_system(descriptor)
    finally:
        os.close(descriptor)


def _publish(source: str, target: str) -> None:
    """Give a finished layer its name, unless another process has made the same layer."""
    try:
        os.rename(source, target)
    except OSError:
        if not os.path.isdir(target):
            raise
        remove_tree(source)


def _run_request(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"done": main(request)}
    except ProrlError as error:
        kind = getattr(error, "kind", None)
        return {"error": {"kind": kind and kind.value, "what": error.what, "fix": error.fix}}
    except OSError as error:
        return {"error": {"kind": None, "errno": error.errno, "what": str(error), "fix": ""}}


if __name__ == "__main__":
    print(json.dumps(_run_request(json.loads(sys.argv[1]))))
