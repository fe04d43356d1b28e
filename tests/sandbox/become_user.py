"""Run a command as an ordinary user although interpreter and checkout lie where only root may go.

``python become_user.py DIRECTORY UID COMMAND...`` as root: in a mount namespace of its own, opens the way to the
interpreter and to the checkout, gives the user an account with a home in DIRECTORY, gives up root, and runs the
command.
"""

import os
import pwd
import stat
import sys
from pathlib import Path

from prorl_gym.sandbox import syscalls

CHECKOUT = Path(__file__).resolve().parents[2]


def main(directory: str, uid: int, command: list[str]) -> None:
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    open_ways([Path(sys.base_prefix), Path(sys.prefix), CHECKOUT])
    give_account(directory, uid)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.chdir(CHECKOUT)
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": f"{directory}/home",
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(CHECKOUT),
        "PYTHONDONTWRITEBYTECODE": "1",
        **{name: os.environ[name] for name in ("PRORL_GYM_REQUIRE", "PRORL_GYM_CACHE") if name in os.environ},
    }
    os.execve(sys.executable, [sys.executable, *command], environment)


def open_ways(places: list[Path]) -> None:
    """Hide what lies above these places, and others may not enter, behind a directory that leads to them alone."""
    held = [(place, os.open(place, os.O_PATH)) for place in places]
    for place, descriptor in held:
        closed = [parent for parent in place.parents if parent.exists() and not parent.stat().st_mode & stat.S_IXOTH]
        if closed:
            syscalls.mount("none", str(closed[-1]), "tmpfs", 0, "mode=755")
        if not place.exists():
            place.mkdir(parents=True)
            syscalls.mount(f"/proc/self/fd/{descriptor}", str(place), None, syscalls.MS_BIND | syscalls.MS_REC)


def give_account(directory: str, uid: int) -> None:
    """Apptainer by itself runs for accounts only."""
    if all(account.pw_uid != uid for account in pwd.getpwall()):
        accounts = Path(directory, "passwd")
        accounts.write_text(f"{Path('/etc/passwd').read_text()}prorl-test:x:{uid}:{uid}::{directory}/home:/bin/sh\n")
        accounts.chmod(0o644)
        syscalls.mount(str(accounts), "/etc/passwd", None, syscalls.MS_BIND)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
