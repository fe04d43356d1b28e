"""Entry of the guest in a container that somebody else made (``bwrap``, ``apptainer-plain``). Part of the bundle.

``python3 BUNDLE CONTROL STARTED OPTIONS``: three inherited descriptors. OPTIONS is a file with JSON: limits, workdir,
env, copies (pairs of directories that are copied into the writable root before anything else), furnish (whether the
root is ours to complete) and keep_etc. On STARTED the keeper is told ``UP`` or ``FAILED``, and answers the former by
``BOUNDED`` or ``UNBOUNDED``. Stays within Python 3.11 and its standard library.
"""

import json
import os
import resource
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.confine import confine
from prorl_gym.sandbox.furnishing import prepare_files
from prorl_gym.sandbox.guest.server import GuestOptions, serve
from prorl_gym.sandbox.guest.tree import ProcessTable
from prorl_gym.sandbox.protocol import SandboxLimits

UP, FAILED = b"+", b"!"
BOUNDED, UNBOUNDED = b"b", b"u"
"""What the keeper, who is outside, could do about System V IPC."""

_EVERY_UID = 2**32 - 1


def main(arguments: list[str]) -> None:
    """Serve until the service is gone, then take everything inside along."""
    control_fd, started, options_fd = map(int, arguments)
    syscalls.set_dumpable(False)  # no payload may trace this process or read its memory and descriptors
    control = socket.socket(fileno=control_fd)
    _shed_inheritance({control_fd, started, options_fd})
    try:
        with open(options_fd, encoding="utf-8") as file:
            given = json.load(file)
        proc_fd = _prepare(given)
    except OSError as error:
        _report(control, error)
        os.write(started, FAILED)
        return
    os.write(started, UP)
    options = _options(given, proc_fd, system_v=os.read(started, 1) == BOUNDED)
    os.close(started)
    try:
        serve(control, options)
    finally:
        if not options.is_init:  # pid 1 takes its namespace along by ending
            ProcessTable(options.proc_fd).kill_descendants(os.getpid())


def _prepare(given: dict[str, Any]) -> int:
    """Complete the root; return a descriptor of its ``/proc``."""
    os.umask(0o022)
    _copy(given["copies"])
    if given["furnish"]:
        prepare_files(given["workdir"], keep_etc=given["keep_etc"])
    else:
        _forget_name_servers()
    os.makedirs(given["workdir"], exist_ok=True)
    os.chdir("/")
    return os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _options(given: dict[str, Any], proc_fd: int, *, system_v: bool) -> GuestOptions:
    return GuestOptions(
        limits=SandboxLimits(**given["limits"]),
        workdir=given["workdir"],
        env=given["env"],
        proc_fd=proc_fd,
        is_init=os.getpid() == 1,
        confine=partial(confine if _in_own_user_namespace() else _confine_without_count, system_v=system_v),
    )


def _shed_inheritance(kept: set[int]) -> None:
    """Close what the runtime left open, the bundle among it: it is loaded."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                continue  # the listing's own
    for descriptor in kept:
        os.set_inheritable(descriptor, False)


def _copy(pairs: Sequence[Sequence[str]]) -> None:
    for source, target in pairs:
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)


def _forget_name_servers() -> None:
    """Empty the host's resolv.conf where the runtime brought a copy that is ours: it names the host's network."""
    if os.access("/etc/resolv.conf", os.W_OK):
        with open("/etc/resolv.conf", "wb"):
            pass


def _in_own_user_namespace() -> bool:
    with open("/proc/self/uid_map", encoding="ascii") as file:
        return file.read().split() != ["0", "0", str(_EVERY_UID)]


def _confine_without_count(limits: SandboxLimits, hand_over: Callable[[int], None], *, system_v: bool) -> None:
    """Leave the number of processes alone: outside of a user namespace it would count all of this user's."""
    confine(replace(limits, processes=resource.getrlimit(resource.RLIMIT_NPROC)[1]), hand_over, system_v=system_v)


def _report(control: socket.socket, error: OSError) -> None:
    what = " ".join(f"the sandbox could not be furnished: {error}".split())[:600]
    fix = "The image must hold an ordinary Linux root, and limits.root_size must have room for what is copied."
    message = {"type": "failed", "kind": "sandbox_unavailable", "what": what, "fix": fix}
    control.send(json.dumps(message).encode("ascii"), socket.MSG_NOSIGNAL)
