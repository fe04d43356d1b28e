"""Run a command as an ordinary user although interpreter and checkout lie where only root may go.

``python become_user.py DIRECTORY UID COMMAND...`` as root: in a mount namespace of its own, binds the interpreter's
prefix, its packages and the checkout below DIRECTORY (``py``, ``site``, ``src``), gives up root, and runs the command.
"""

import os
import sys
import sysconfig
from pathlib import Path

from prorl_gym.sandbox import syscalls

CHECKOUT = Path(__file__).resolve().parents[2]


def main(directory: str, uid: int, command: list[str]) -> None:
    sources = {"py": sys.base_prefix, "site": sysconfig.get_path("purelib"), "src": str(CHECKOUT)}
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    for name, source in sources.items():
        os.makedirs(f"{directory}/{name}", exist_ok=True)
        syscalls.mount(source, f"{directory}/{name}", None, syscalls.MS_BIND | syscalls.MS_REC)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.chdir(f"{directory}/src")
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": f"{directory}/home",
        "LANG": "C.UTF-8",
        "LD_LIBRARY_PATH": f"{directory}/py/lib",
        "PYTHONPATH": f"{directory}/src:{directory}/site",
        "PYTHONDONTWRITEBYTECODE": "1",
        **{name: os.environ[name] for name in ("PRORL_GYM_REQUIRE", "PRORL_GYM_CACHE") if name in os.environ},
    }
    python = f"{directory}/py/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    os.execve(python, [python, *command], environment)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
