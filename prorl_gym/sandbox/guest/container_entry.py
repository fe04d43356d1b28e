"""Entries of the guest: in a container that a runtime made, and on the host itself (``local``).

In a container (``apptainer-plain``), as part of the bundle:
``python3 BUNDLE CONTROL STARTED OPTIONS``: three inherited descriptors. OPTIONS is a file with JSON: limits, workdir,
env. The guest writes one byte to STARTED when it serves CONTROL, or has reported there why it cannot. Stays within
Python 3.11 and its standard library.

On the host: ``python -m prorl_gym.sandbox.guest.container_entry CONTROL OPTIONS``; OPTIONS is JSON: limits, workdir,
env.
"""

import json
import os
import resource
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.guest.confine import confine, set_limit
from prorl_gym.sandbox.guest.fork_exec import close_all_except
from prorl_gym.sandbox.guest.pid1 import GuestOptions, serve
from prorl_gym.sandbox.guest.process_table import ProcessTable
from prorl_gym.sandbox.protocol import SandboxLimits

_STARTED = b"+"
_ALL_UIDS = 2**32 - 1


def main(arguments: list[str]) -> None:
    """Serve until the service is gone, then take everything inside along."""
    control_fd, started, options_fd = map(int, arguments)
    syscalls.set_dumpable(False)  # no payload may trace this process or read its memory and descriptors
    control = socket.socket(fileno=control_fd)
    close_all_except(0, 1, 2, control_fd, started, options_fd)  # the bundle among the rest: it is loaded
    for descriptor in (control_fd, started, options_fd):
        os.set_inheritable(descriptor, False)
    try:
        with open(options_fd, encoding="utf-8") as file:
            given = json.load(file)
        os.umask(0o022)
        if os.access("/etc/resolv.conf", os.W_OK):  # the runtime's copy of the host's, which names the host's network
            os.truncate("/etc/resolv.conf", 0)
        os.makedirs(given["workdir"], exist_ok=True)
        os.chdir("/")
        proc_fd = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with open("/proc/self/uid_map", encoding="ascii") as file:
            has_own_uids = file.read().split() != ["0", "0", str(_ALL_UIDS)]
    except OSError as error:
        what = " ".join(f"the sandbox could not be furnished: {error}".split())[:600]
        fix = "The image must hold an ordinary Linux root."
        message = {"type": "failed", "kind": "sandbox_unavailable", "what": what, "fix": fix}
        control.send(json.dumps(message).encode("ascii"), socket.MSG_NOSIGNAL)
        os.write(started, _STARTED)
        return
    os.write(started, _STARTED)
    os.close(started)
    is_init = os.getpid() == 1
    confined = _confine if has_own_uids else _confine_without_nproc
    limits = SandboxLimits(**given["limits"])
    try:
        serve(control, GuestOptions(limits, given["workdir"], given["env"], proc_fd, is_init, confined))
    finally:
        if not is_init:  # pid 1 takes its namespace along by ending
            ProcessTable(proc_fd).kill_descendants(os.getpid())


_confine = partial(confine, allow_system_v=False)
"""Forbids System V IPC too: no uid in such a container is root's, so nothing may set its bounds."""


def _confine_without_nproc(limits: SandboxLimits, on_listener: Callable[[int], None]) -> None:
    """Leave the number of processes alone: outside of a user namespace it would count all of this user's."""
    _confine(replace(limits, processes=resource.getrlimit(resource.RLIMIT_NPROC)[1]), on_listener)


def serve_local(descriptor: str, options: str) -> None:
    """Serve as a plain process with resource limits and nothing more; at the end, kill everything that was started."""
    control = socket.socket(fileno=int(descriptor))
    os.set_inheritable(control.fileno(), False)
    given = json.loads(options)
    limits = replace(SandboxLimits(), **given["limits"])
    os.setsid()
    os.chdir(given["workdir"])
    proc_fd = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        env, workdir = given["env"], given["workdir"]
        serve(control, GuestOptions(limits, workdir, env, proc_fd, False, _limit_resources, is_isolated=False))
    finally:
        ProcessTable(proc_fd).kill_descendants(os.getpid())


def _limit_resources(limits: SandboxLimits, on_listener: Callable[[int], None]) -> None:
    """Apply what works without a namespace. RLIMIT_NPROC would count every process of this user, so it is left out.

    There is no filter of calls, and so no listener to hand over.
    """
    set_limit(resource.RLIMIT_NOFILE, limits.open_files)
    set_limit(resource.RLIMIT_FSIZE, limits.file_size)
    set_limit(resource.RLIMIT_CPU, limits.cpu_seconds)
    set_limit(resource.RLIMIT_CORE, 0)


if __name__ == "__main__":
    serve_local(sys.argv[1], sys.argv[2])
