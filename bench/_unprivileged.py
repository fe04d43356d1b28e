"""Peers that run as an ordinary user in a process of their own, whoever runs the bench.

NeMo Gym's Apptainer provider does not start where this is root without every capability, and Apptainer as root is not
what a site runs. The process gets a pid namespace, too: containers that Apptainer leaves behind end with it.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prorl_gym.sandbox import syscalls

UID = 61098
"""When the bench is root's: not the sandboxes' own, so that no peer's processes are taken for a sandbox's."""
SECONDS = 240.0
_BENCH = Path(__file__).resolve().parent
_ISOLATED = ("--user", "--map-current-user", "--pid", "--fork", "--mount-proc", "--kill-child")
_RESULT = "RESULT "


def measure(script: str, *arguments: str) -> Any:
    """Run ``<bench>/<script>`` as an ordinary user; return its report, or ``None`` after a word on stderr why."""
    if shutil.which("apptainer") is None or shutil.which("unshare") is None:
        return None
    with TemporaryDirectory(dir="/var/tmp", prefix="prorl-bench-") as directory:
        if os.geteuid() == 0:
            os.chown(directory, UID, UID)
        command = [sys.executable, __file__, directory, script, *arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=SECONDS, env=environment
            )
        except subprocess.TimeoutExpired:
            print(f"left out: {script} {arguments[0]} took more than {SECONDS:g} s", file=sys.stderr)
            return None
    results = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if done.returncode != 0 or len(results) != 1:
        why = (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:300]
        print(f"left out: {script} {arguments[0]}: {why}", file=sys.stderr)
        return None
    return json.loads(results[0].removeprefix(_RESULT))


def emit_result(result: object) -> None:
    """Hand a result to ``measure``; called by the script, once."""
    print(_RESULT + json.dumps(result))


def _enter(directory: str, script: str, arguments: Sequence[str]) -> None:
    """Become the process that runs the script. Root's interpreter may lie where only root may go: bind it elsewhere."""
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": f"{directory}/home",
        "TMPDIR": f"{directory}/tmp",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        **{name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
    }
    python, script_path, packages = sys.executable, str(_BENCH / script), os.environ["PYTHONPATH"]
    if os.geteuid() == 0:
        python, script_path, packages = _bind(directory, script)
        environment["LD_LIBRARY_PATH"] = f"{directory}/py/lib"
        os.setgroups([])
        os.setresgid(UID, UID, UID)
        os.setresuid(UID, UID, UID)
    for name in ("home", "tmp"):
        os.makedirs(f"{directory}/{name}", exist_ok=True)
    os.chdir(directory)
    environment["PYTHONPATH"] = packages
    os.execvpe("unshare", ["unshare", *_ISOLATED, python, script_path, *arguments], environment)


def _bind(directory: str, script: str) -> tuple[str, str, str]:
    """Bind interpreter, packages, checkout below a directory of this process's own mount namespace."""
    sources = {"py": sys.base_prefix, "site": sysconfig.get_path("purelib"), "src": str(_BENCH.parent)}
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    for name, source in sources.items():
        os.makedirs(f"{directory}/{name}")
        syscalls.mount(source, f"{directory}/{name}", None, syscalls.MS_BIND | syscalls.MS_REC)
    if os.path.exists(
        "/dev/fuse"
    ):  # root may have kept it to itself; without it, Apptainer unpacks a SIF at each start
        os.mknod(f"{directory}/fuse", stat.S_IFCHR | 0o600, os.stat("/dev/fuse").st_rdev)
        os.chmod(f"{directory}/fuse", 0o666)
        syscalls.mount(f"{directory}/fuse", "/dev/fuse", None, syscalls.MS_BIND)
    accounts = Path(directory, "passwd")  # Apptainer refuses a user who has no account
    accounts.write_text(f"{Path('/etc/passwd').read_text()}bench:x:{UID}:{UID}::{directory}/home:/bin/sh\n")
    accounts.chmod(0o644)
    syscalls.mount(str(accounts), "/etc/passwd", None, syscalls.MS_BIND)
    python = f"{directory}/py/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    return python, f"{directory}/src/bench/{script}", f"{directory}/src:{directory}/site"


if __name__ == "__main__":
    _enter(sys.argv[1], sys.argv[2], sys.argv[3:])
