"""Entries of the guest: in a container that a runtime made, and on the host itself (``local``).

In a container (``bwrap``, ``apptainer-plain``), as part of the bundle:
``python3 BUNDLE CONTROL STARTED OPTIONS``: three inherited descriptors. OPTIONS is a file with JSON: limits, workdir,
env, copies (pairs of directories that are copied into the writable root before anything else), fill_root (see
``RuntimeCommand``) and keep_etc. The guest writes ``READY`` or ``FAILED`` to STARTED, and its supervisor answers
``READY`` by ``SYSTEM_V_LIMITED`` or ``SYSTEM_V_UNLIMITED``. Stays within Python 3.11 and its standard library.

On the host: ``python -m prorl_gym.sandbox.guest.container_entry CONTROL OPTIONS``; OPTIONS is JSON: limits, workdir,
env.
"""

import json
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.guest.confine import confine
from prorl_gym.sandbox.guest.pid1 import GuestOptions, serve
from prorl_gym.sandbox.guest.process_table import ProcessTable
from prorl_gym.sandbox.protocol import SandboxLimits

READY, FAILED = b"+", b"!"

SYSTEM_V_LIMITED, SYSTEM_V_UNLIMITED = b"b", b"u"
"""Whether the supervisor, which is outside, could bound System V IPC."""
_ALL_UIDS = 2**32 - 1
_DIRECTORIES = (("/tmp", 0o1777), ("/var/tmp", 0o1777), ("/run", 0o755), ("/root", 0o700))
_HOSTS = "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost\n"


def main(arguments: list[str]) -> None:
    """Serve until the service is gone, then take everything inside along."""
    control_fd, started, options_fd = map(int, arguments)
    syscalls.set_dumpable(False)  # no payload may trace this process or read its memory and descriptors
    control = socket.socket(fileno=control_fd)
    _close_inherited({control_fd, started, options_fd})
    try:
        with open(options_fd, encoding="utf-8") as file:
            given = json.load(file)
        proc_fd = _prepare(given)
    except OSError as error:
        _report_failure(control, error)
        os.write(started, FAILED)
        return
    os.write(started, READY)
    options = _options(given, proc_fd, allow_system_v=os.read(started, 1) == SYSTEM_V_LIMITED)
    os.close(started)
    try:
        serve(control, options)
    finally:
        if not options.is_init:  # pid 1 takes its namespace along by ending
            ProcessTable(options.proc_fd).kill_descendants(os.getpid())


def _prepare(given: dict[str, Any]) -> int:
    """Complete the root; return a descriptor of its ``/proc``."""
    os.umask(0o022)
    _copy_directories(given["copies"])
    if given["fill_root"]:
        make_root_files(given["workdir"], keep_etc=given["keep_etc"])
    else:
        _clear_resolv_conf()
    os.makedirs(given["workdir"], exist_ok=True)
    os.chdir("/")
    return os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _options(given: dict[str, Any], proc_fd: int, *, allow_system_v: bool) -> GuestOptions:
    return GuestOptions(
        limits=SandboxLimits(**given["limits"]),
        workdir=given["workdir"],
        env=given["env"],
        proc_fd=proc_fd,
        is_init=os.getpid() == 1,
        allow_system_v=allow_system_v,
        confine=partial(confine if _in_own_user_namespace() else _confine_without_nproc, allow_system_v=allow_system_v),
    )


def _close_inherited(kept: set[int]) -> None:
    """Close what the runtime left open, the bundle among it: it is loaded."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                continue  # the listing's own
    for descriptor in kept:
        os.set_inheritable(descriptor, False)


def _copy_directories(pairs: Sequence[Sequence[str]]) -> None:
    for source, target in pairs:
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)


def make_root_files(workdir: str, *, keep_etc: bool) -> None:
    """Make the usual directories, the working directory and, unless kept, the files of a machine without a network.

    Args:
        workdir: of the sandbox.
        keep_etc: ``/etc`` is of our own making already.
    """
    for name, mode in _DIRECTORIES:
        if not os.path.isdir(name):
            os.makedirs(name)
            os.chmod(name, mode)
    os.makedirs(os.path.join("/", workdir), exist_ok=True)
    if not keep_etc:
        _replace_file("/etc/resolv.conf", "")
        _replace_file("/etc/hosts", _HOSTS)


def _replace_file(path: str, text: str) -> None:
    """Write a file anew; an image may have a symbolic link there."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.lexists(path):
        os.unlink(path)
    with open(path, "x", encoding="ascii") as file:
        file.write(text)


def _clear_resolv_conf() -> None:
    """Empty the host's resolv.conf where the runtime brought a copy that is ours: it names the host's network."""
    if os.access("/etc/resolv.conf", os.W_OK):
        with open("/etc/resolv.conf", "wb"):
            pass


def _in_own_user_namespace() -> bool:
    with open("/proc/self/uid_map", encoding="ascii") as file:
        return file.read().split() != ["0", "0", str(_ALL_UIDS)]


def _confine_without_nproc(limits: SandboxLimits, on_listener: Callable[[int], None], *, allow_system_v: bool) -> None:
    """Leave the number of processes alone: outside of a user namespace it would count all of this user's."""
    confine(
        replace(limits, processes=resource.getrlimit(resource.RLIMIT_NPROC)[1]),
        on_listener,
        allow_system_v=allow_system_v,
    )


def _report_failure(control: socket.socket, error: OSError) -> None:
    what = " ".join(f"the sandbox could not be furnished: {error}".split())[:600]
    fix = "The image must hold an ordinary Linux root, and limits.root_size must have room for what is copied."
    message = {"type": "failed", "kind": "sandbox_unavailable", "what": what, "fix": fix}
    control.send(json.dumps(message).encode("ascii"), socket.MSG_NOSIGNAL)


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
    for kind, wanted in (
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_FSIZE, limits.file_size),
        (resource.RLIMIT_CPU, limits.cpu_seconds),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (value, value))


if __name__ == "__main__":
    serve_local(sys.argv[1], sys.argv[2])
