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
from prorl_gym.sandbox.images.unpack import LayerLimits, open_decompressed, unpack_sif, unpack_tar
from prorl_gym.sandbox.tree_removal import remove_tree

_MEMORY = 2 << 30  # headers of an archive can claim any length, and Python reads them whole


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Serve a request and return the answer. Raises ``ProrlError`` with cause and fix, or ``OSError`` (a full disk)."""
    _drop_privileges(request["uid"], request["parent"])
    match request["op"]:
        case "untar" | "unsif":
            return _unpack(request)
        case "publish":
            _publish(request["source"], request["target"])
        case "discard":
            os.rename(request["source"], request["target"])  # no longer found in the store
            remove_tree(request["target"])
        case "remove":
            remove_tree(request["path"])
        case other:
            raise ValueError(f"no operation {other!r}")
    return {}


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


def _unpack(request: dict[str, Any]) -> dict[str, Any]:
    """Fill the directory of a layer, then write its manifest, which is what makes a directory a layer."""
    target, root = request["target"], f"{request['target']}/root"
    os.mkdir(target, 0o755)
    os.mkdir(root, 0o755)
    bounds = LayerLimits(request["size"], request["entries"])
    if request["op"] == "unsif":
        done, digest = unpack_sif(request["source"], root, bounds), request["digest"]
    else:
        with open_decompressed(open(0, "rb", closefd=False), bounds.size, bounds.entries) as stream:
            done = unpack_tar(stream, root, bounds)
            stream.drain()
            digest = stream.digest
    facts = {
        "version": 1,
        "source": request["digest"],
        "content": digest,
        "bytes": done.size,
        "inodes": done.entries,
        "skipped": done.skipped,
    }
    with open(f"{target}/manifest.json", "x", encoding="ascii") as file:
        json.dump(facts, file)
    if request["durable"]:  # the rename must not survive a crash that the contents do not
        descriptor = os.open(target, os.O_RDONLY)
        try:
            syscalls.sync_file_system(descriptor)
        finally:
            os.close(descriptor)
    if request["final"]:
        _publish(target, request["final"])
    return facts


def _publish(source: str, target: str) -> None:
    """Give a finished layer its name, unless another process has made the same layer."""
    try:
        os.rename(source, target)
    except OSError:
        if not os.path.isdir(target):
            raise
        remove_tree(source)


if __name__ == "__main__":
    try:
        answer = {"done": main(json.loads(sys.argv[1]))}
    except ProrlError as error:
        kind = getattr(error, "kind", None)
        answer = {"error": {"kind": kind and kind.value, "what": error.what, "fix": error.fix}}
    except OSError as error:
        answer = {"error": {"kind": None, "errno": error.errno, "what": str(error), "fix": ""}}
    print(json.dumps(answer))
