"""Peers that are Apptainer or use it. This file runs as an ordinary user, also where root runs the bench.

NeMo Gym's Apptainer provider does not start where this is root without every capability, and Apptainer as root is not
what a site runs. The process gets a pid namespace, too: containers that Apptainer leaves behind end with it.
``python _apptainer.py gym SIF PREPARE COMMANDS``, ``exec IMAGE COUNT``, ``instances SIF COUNT``.
"""

import asyncio
import json
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from _processes import all_processes, pss

from prorl_gym.sandbox import syscalls

ISOLATION = ("--userns", "--containall", "--no-home", "--cleanenv", "--net", "--network", "none")
"""The flags that our backend gives Apptainer."""
PARALLEL = 4
GYM_DIRECTORY = "/bench"
"""A writable directory of the sandbox's own: /tmp is the host's in NeMo Gym's provider."""
UID = 61098
"""When the bench is root's: not the sandboxes' own, so that no peer's processes are taken for a sandbox's."""
SECONDS = 240.0
_ISOLATED = ("--user", "--map-current-user", "--pid", "--fork", "--mount-proc", "--kill-child")
_RESULT = "RESULT "


@dataclass(frozen=True, slots=True)
class Gym:
    """NeMo Gym's provider: ms until its first command was answered, and of every later one."""

    start: float
    times: list[float]


@dataclass(frozen=True, slots=True)
class Instances:
    """Plain ``apptainer instance``s: how many came up, in how many seconds, and MB (PSS) of each."""

    up: int
    seconds: float
    each: float


def gym(sif: str, prepare: str, commands: Sequence[str]) -> Gym | None:
    """Measure NeMo Gym's provider on a SIF; ``None`` where it cannot be."""
    found = _measure("gym", sif, prepare, json.dumps(list(commands)))
    return Gym(**found) if found else None


def executions(image: str, count: int) -> list[float] | None:
    """Return ms of ``apptainer exec`` of ``true``, from start to end, isolated as our backend isolates."""
    return _measure("exec", image, str(count))


def instances(sif: str, count: int) -> Instances | None:
    """Start plain instances of a SIF; ``None`` where that is not possible."""
    found = _measure("instances", sif, str(count))
    return Instances(**found) if found else None


def _measure(*arguments: str) -> Any:
    """Run this file as an ordinary user; return its report, or ``None`` after a word on stderr why."""
    if shutil.which("apptainer") is None or shutil.which("unshare") is None:
        return None
    with TemporaryDirectory(dir="/var/tmp", prefix="prorl-bench-") as directory:
        if os.geteuid() == 0:
            os.chown(directory, UID, UID)
        command = [sys.executable, __file__, "enter", directory, *arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=SECONDS, env=environment
            )
        except subprocess.TimeoutExpired:
            print(f"left out: _apptainer.py {arguments[0]} took more than {SECONDS:g} s", file=sys.stderr)
            return None
    results = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if done.returncode != 0 or len(results) != 1:
        why = (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:300]
        print(f"left out: _apptainer.py {arguments[0]}: {why}", file=sys.stderr)
        return None
    return json.loads(results[0].removeprefix(_RESULT))


def _enter(directory: str, arguments: Sequence[str]) -> None:
    """Become the process that runs the script. Root's interpreter may lie where only root may go: bind it elsewhere."""
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": f"{directory}/home",
        "TMPDIR": f"{directory}/tmp",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        **{name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
    }
    python, script_path, packages = sys.executable, __file__, os.environ["PYTHONPATH"]
    if os.geteuid() == 0:
        python, script_path, packages = _bind(directory)
        environment["LD_LIBRARY_PATH"] = f"{directory}/py/lib"
        os.setgroups([])
        os.setresgid(UID, UID, UID)
        os.setresuid(UID, UID, UID)
    for name in ("home", "tmp"):
        os.makedirs(f"{directory}/{name}", exist_ok=True)
    os.chdir(directory)
    environment["PYTHONPATH"] = packages
    os.execvpe("unshare", ["unshare", *_ISOLATED, python, script_path, *arguments], environment)


def _bind(directory: str) -> tuple[str, str, str]:
    sources = {
        "py": sys.base_prefix,
        "site": sysconfig.get_path("purelib"),
        "src": str(Path(__file__).resolve().parents[1]),
    }
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    for name, source in sources.items():
        os.makedirs(f"{directory}/{name}")
        syscalls.mount(source, f"{directory}/{name}", None, syscalls.MS_BIND | syscalls.MS_REC)
    if os.path.exists("/dev/fuse"):  # root's own, perhaps; without it, Apptainer unpacks a SIF at each start
        os.mknod(f"{directory}/fuse", stat.S_IFCHR | 0o600, os.stat("/dev/fuse").st_rdev)
        os.chmod(f"{directory}/fuse", 0o666)
        syscalls.mount(f"{directory}/fuse", "/dev/fuse", None, syscalls.MS_BIND)
    accounts = Path(directory, "passwd")  # Apptainer refuses a user who has no account
    accounts.write_text(f"{Path('/etc/passwd').read_text()}bench:x:{UID}:{UID}::{directory}/home:/bin/sh\n")
    accounts.chmod(0o644)
    syscalls.mount(str(accounts), "/etc/passwd", None, syscalls.MS_BIND)
    python = f"{directory}/py/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    return python, f"{directory}/src/bench/_apptainer.py", f"{directory}/src:{directory}/site"


async def _gym(sif: str, prepare: str, commands: Sequence[str]) -> Gym:
    from nemo_gym.sandbox import AsyncSandbox, SandboxSpec  # pyright: ignore

    async def run(command: str) -> float:
        began = time.perf_counter()
        result = await sandbox.exec(command)  # pyright: ignore
        if result.return_code != 0:  # pyright: ignore
            raise RuntimeError(f"{command[:60]!r} in NeMo Gym's provider: {result}")
        return (time.perf_counter() - began) * 1000

    # Without --userns it asks for a setuid installation's privileges.
    flags = ["--userns"]
    create = {"mount_point": GYM_DIRECTORY, "extra_start_args": flags}
    provider = {"apptainer": {"create": create, "exec": {"extra_exec_args": flags}}}
    began = time.perf_counter()
    sandbox = AsyncSandbox(provider, SandboxSpec(image=sif))  # pyright: ignore
    try:
        await sandbox.start()  # pyright: ignore
        await run("echo hi")
        start = (time.perf_counter() - began) * 1000
        await run(prepare)
        return Gym(start, [await run(command) for command in commands])
    finally:
        await sandbox.stop()  # pyright: ignore


def _executions(image: str, count: int) -> list[float]:
    times: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        done = subprocess.run(["apptainer", "-q", "exec", *ISOLATION, image, "true"], capture_output=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"apptainer exec: {done.stderr.decode(errors='replace').strip()[-300:]}")
        times.append((time.perf_counter() - began) * 1000)
    return times


def _instances(sif: str, count: int) -> Instances:
    def start(number: int) -> bool:
        command = ["apptainer", "-q", "instance", "start", *ISOLATION, sif, f"bench{number}"]
        # Files, not pipes: the instance keeps them open, and a pipe would not end.
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        return done.returncode == 0

    began = time.perf_counter()
    with ThreadPoolExecutor(PARALLEL) as threads:
        up = sum(threads.map(start, range(count)))
    seconds = time.perf_counter() - began
    if not up:
        raise RuntimeError("no instance started")
    others = set(all_processes()) - {os.getpid()}  # of this pid namespace: all belong to the instances
    return Instances(up, seconds, pss(others) / up)


def _result(arguments: Sequence[str]) -> object:
    match arguments:
        case ["gym", sif, prepare, commands]:
            return asdict(asyncio.run(_gym(sif, prepare, json.loads(commands))))
        case ["exec", image, count]:
            return _executions(image, int(count))
        case ["instances", sif, count]:
            return asdict(_instances(sif, int(count)))
        case other:
            sys.exit(f"_apptainer.py: unknown request {other}")


if __name__ == "__main__":
    if sys.argv[1] == "enter":
        _enter(sys.argv[2], sys.argv[3:])
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):  # of this interpreter: NeMo Gym's provider hands them to containers
        os.environ.pop(name, None)
    print(_RESULT + json.dumps(_result(sys.argv[1:])))
