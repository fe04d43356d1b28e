"""Helpers of the sandbox tests: images, host processes, and what this kernel allows."""

import os
import select
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

SANDBOX_UID = 61099
SECRET = "k3y-of-the-service"
"""In the environment of the service under test; must be seen by no payload."""

_TINY_PROGRAMS = ("bash", "ls", "rm", "mkdir", "mv", "touch", "cat", "true", "sleep", "id", "stat", "head", "ln")


def sandbox_uid() -> int:
    """The uid that sandboxes have in this test run."""
    return os.geteuid() or SANDBOX_UID


@cache
def kernel_has_user_namespaces() -> bool:
    """Whether an unprivileged process may make a user namespace: asked without any code of the sandbox room."""
    code = (
        "import ctypes,os,sys; os.geteuid() or os.setuid(61099); sys.exit(ctypes.CDLL(None).unshare(0x10020000) != 0)"
    )
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def make_tiny_image(path: Path) -> Path:
    """Make an image directory of bash, a few programs and their libraries, owned by the sandboxes' uid."""
    for name in ("usr/bin", "etc", "data/kept", "data/doomed/deep"):
        (path / name).mkdir(parents=True)
    (path / "bin").symlink_to("usr/bin")
    (path / "data/doomed/deep/file").write_text("old")
    (path / "data/kept/file").write_text("kept")
    (path / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    programs = [found for name in _TINY_PROGRAMS if (found := shutil.which(name, path="/usr/bin:/bin"))]
    listing = subprocess.run(["ldd", *programs], check=True, capture_output=True, text=True).stdout
    libraries = {word for line in listing.splitlines() for word in line.split() if word.startswith("/")}
    for library in {name for name in libraries if not name.endswith(":")}:
        target = path / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
    for program in programs:
        shutil.copy(program, path / "usr/bin" / Path(program).name)
    give_to_sandboxes(path)
    return path


def give_to_sandboxes(path: Path) -> None:
    """Make everything below a path belong to the sandboxes' uid, and reachable."""
    if os.geteuid() == 0:
        for parent, _, files in os.walk(path):
            for name in (parent, *(f"{parent}/{file}" for file in files)):
                os.lchown(name, SANDBOX_UID, SANDBOX_UID)
    path.chmod(0o755)


def children_of(pid: int) -> list[int]:
    """Return every descendant of a process, as the host sees them, itself first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, level = [pid], [pid]
    while level:
        level = [child for parent in level for child in parents.get(parent, [])]
        found += level
    return found


def wait_until_dead(handles: list[int], seconds: float) -> int:
    """Wait for the processes behind pidfds to end; return how many have not."""
    poll = select.poll()
    waiting = set(handles)
    for handle in handles:
        poll.register(handle, select.POLLIN)
    deadline = time.monotonic() + seconds
    while waiting and (left := deadline - time.monotonic()) > 0:
        for handle, _ in poll.poll(left * 1000):
            poll.unregister(handle)
            waiting.discard(handle)
    return len(waiting)
