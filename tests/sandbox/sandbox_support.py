"""Helpers of the sandbox tests: programs in sandboxes, images, host processes, and what this kernel allows."""

import os
import platform
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest
from closing import closing as closing

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.images.store import ImageResolver
from prorl_gym.sandbox.protocol import CellResult, ExecResult, Sandbox, SandboxBackend
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox
from prorl_gym.sandbox.spawner.scratch import read_state
from prorl_gym.testing.sandbox.conformance import CHECK_SPEC, Check

SANDBOX_UID = 61099
NOBODY = 65534
"""An uid with an account on every machine: Apptainer by itself runs for accounts only."""
SECRET = "k3y-of-the-service"
"""In the environment of the service under test; must be seen by no payload."""

CACHE = Path(
    os.environ.get("PRORL_GYM_CACHE")
    or ("/var/cache/prorl-gym" if os.geteuid() == 0 else os.path.expanduser("~/.cache/prorl-gym"))
)
DEBIAN_IMAGE = CACHE / "images" / f"bookworm-{os.geteuid() or SANDBOX_UID}"
"""Made by ``.ci/base-image``."""

LINUX = tuple(int(part) for part in platform.release().split(".")[:2])
on_x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers and code of x86")
needs_python = pytest.mark.skipif(not os.path.exists("/usr/bin/python3"), reason="the host has no /usr/bin/python3")

PRELUDE = """
import array, ctypes, errno, os, resource, shutil, signal, socket, sys, time
c = ctypes.CDLL(None, use_errno=True)
error = ctypes.get_errno
"""
"""What most programs that tests run in a sandbox begin with."""

_TINY_PROGRAMS = ("bash", "ls", "rm", "mkdir", "mv", "touch", "cat", "true", "sleep", "id", "stat", "head", "ln")


def sandbox_uid() -> int:
    """The uid that sandboxes have in this test run."""
    return os.geteuid() or SANDBOX_UID


@cache
def kernel_has_user_namespaces() -> bool:
    """Whether an unprivileged process may make a user namespace: asked without any code of ``prorl_gym.sandbox``."""
    code = (
        "import ctypes,os,sys; os.geteuid() or os.setuid(61099); sys.exit(ctypes.CDLL(None).unshare(0x10020000) != 0)"
    )
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def skip_unless_required(reason: str) -> NoReturn:
    """Skip the test for want of a part of this machine; fail it where ``PRORL_GYM_REQUIRE`` says that all is there."""
    if os.environ.get("PRORL_GYM_REQUIRE"):
        pytest.fail(f"{reason}, but PRORL_GYM_REQUIRE is set", pytrace=False)
    pytest.skip(reason)


def downloaded_once(name: str, download: Callable[[Path], None]) -> Path:
    """Return a directory of the cache for the Debian image, filled from a package index the first time.

    Where there is no image, or no index can be reached, the test is skipped; see ``skip_unless_required``.
    """
    if not DEBIAN_IMAGE.is_dir():
        skip_unless_required(f"no {DEBIAN_IMAGE}; run .ci/base-image")
    kept = CACHE / name
    if not kept.is_dir():
        fresh = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=CACHE))
        try:
            download(fresh)
        except subprocess.CalledProcessError as error:
            shutil.rmtree(fresh)
            skip_unless_required(f"the package index is out of reach: {error}")
        give_to_sandboxes(fresh)
        try:
            fresh.rename(kept)
        except OSError:
            if not kept.is_dir():
                raise
            shutil.rmtree(fresh)  # another worker was faster
    return kept


@contextmanager
def fails_as(kind: FailureKind, match: str | None = None) -> Generator[pytest.ExceptionInfo[SandboxError]]:
    """Expect a ``SandboxError`` of a kind."""
    with pytest.raises(SandboxError, match=match) as caught:
        yield caught
    assert caught.value.kind is kind, caught.value


def source_of(box: Sandbox) -> Callable[[], Awaitable[Sandbox]]:
    """Return what tools get the agent's sandbox from."""

    async def source() -> Sandbox:
        return box

    return source


async def bash(box: RunningSandbox, script: str) -> ExecResult:
    return await box.exec(["/bin/bash", "-c", script], timeout=30)


async def bash_output(box: RunningSandbox, script: str) -> str:
    """Return the output of a script, each command of which must succeed, without a word to stderr."""
    result = await box.exec(["/bin/bash", "-ec", script], timeout=30)
    assert (result.exit_code, result.stderr) == (0, b""), result
    return result.stdout.decode()


async def python(box: RunningSandbox, script: str) -> ExecResult:
    return await box.exec(["/usr/bin/python3", "-c", script], timeout=30)


async def python_output(box: RunningSandbox, script: str) -> str:
    """Return the output of a program below ``PRELUDE``, which must succeed."""
    result = await python(box, PRELUDE + script)
    assert result.exit_code == 0 and not result.timed_out, result
    return result.stdout.decode().strip()


async def run_cell(box: RunningSandbox, code: str, seconds: float = 60) -> CellResult:
    return await (await box.python()).run_cell(code, timeout=seconds)


async def cell_output(box: RunningSandbox, code: str) -> str:
    """Return what a cell prints, which must succeed."""
    result = await run_cell(box, code)
    assert result.ok, result
    return result.output


def pids_of(backend: NamespaceBackend, box: RunningSandbox) -> list[int]:
    """Return the processes that hold a sandbox or are in it, as the host sees them, the outermost first."""
    state = read_state(backend.scratch / box.id, "")
    assert state is not None and state.init is not None
    return children_of(state.init.pid)


async def run_check(check: Check, backend: SandboxBackend) -> None:
    """Run one check of the conformance kit in a sandbox of its own."""
    async with closing(await backend.start_sandbox(CHECK_SPEC)) as sandbox:
        await check(sandbox)


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


def scratch_of_nobody(ground: Path) -> Path:
    """Make a scratch directory of ``NOBODY``."""
    path = Path(tempfile.mkdtemp(dir=ground))
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    return path


def plain_backend(scratch: Path, images: ImageResolver | None = None) -> NamespaceBackend:
    """Return the ``apptainer-plain`` backend on a scratch directory of ``NOBODY``."""
    return NamespaceBackend("apptainer-plain", SandboxConfig(scratch=scratch, uid=NOBODY), images)


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


def status_of(pid: int) -> dict[str, str]:
    """Return ``/proc/PID/status`` of a process; nothing when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


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
