"""Drops a payload process's privileges and sets its limits, between fork and exec."""

import resource
import signal
from collections.abc import Callable
from functools import cache

from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.guest import seccomp
from prorl_gym.sandbox.protocol import SandboxLimits

# Docker's default set without MKNOD, NET_RAW, SETPCAP, AUDIT_WRITE and SETFCAP. They hold in the sandbox's own user
# namespace only: enough for chown, package installers and servers on low ports; nothing that mounts or traces.
_PAYLOAD_CAPABILITIES = {
    **{"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5},
    **{"SETGID": 6, "SETUID": 7, "NET_BIND_SERVICE": 10, "SYS_CHROOT": 18},
}
"""Capabilities of payload processes, by name, with the kernel's numbers."""
_CORE_LIMIT = 1
"""Not 0, which does not keep a crash from a core_pattern that is a pipe; see ``seccomp``."""

# Counted per uid of the host, so that all sandboxes share them: one must not use up what the others need.
_MAX_PENDING_SIGNALS = 4096
_MAX_QUEUE_BYTES = 256 << 10
_RESERVED_DESCRIPTORS = 1024
"""A payload may keep as many descriptors in flight, in unread messages, as it may have open files. A process with a
higher limit, such as the guests and the spawner, can still send descriptors."""


def confine(limits: SandboxLimits, on_listener: Callable[[int], None], *, allow_system_v: bool) -> None:
    """Drop everything a payload must not have. Runs in the child, after fork and before exec.

    Until exec, the process's memory is a copy of the init's, so it stays undumpable: another payload must not be able
    to trace it. The limits become both the soft and the hard one (one second apart for CPU time).

    ``on_listener`` takes the listener of the filter of calls, if it has one. Before the limits, since a process with a
    low one may not send any descriptor while others of its uid have many in unread messages. ``allow_system_v``: System
    V IPC is bounded, and so may be used.

    Raises ``OSError`` when the kernel refused one of the steps; the child must not exec then.
    """
    syscalls.set_no_new_privileges()
    syscalls.keep_capabilities(_PAYLOAD_CAPABILITIES.values())
    for number in changed_signals():  # ignored signals would survive exec (a deaf SIGPIPE)
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    set_limit(resource.RLIMIT_CORE, _CORE_LIMIT)
    set_limit(resource.RLIMIT_CPU, limits.cpu_seconds)  # later it would be announced, and this process's init waits
    if (listener := seccomp.install_filter(allow_system_v=allow_system_v)) is not None:
        on_listener(listener)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for kind, wanted in (
        (resource.RLIMIT_NPROC, limits.processes),
        (resource.RLIMIT_NOFILE, min(limits.open_files, max(files - _RESERVED_DESCRIPTORS, files // 2))),
        (resource.RLIMIT_FSIZE, limits.file_size),
        (resource.RLIMIT_SIGPENDING, _MAX_PENDING_SIGNALS),
        (resource.RLIMIT_MSGQUEUE, _MAX_QUEUE_BYTES),
    ):
        set_limit(kind, wanted)


def prepare_confinement() -> None:
    """Do what ``confine`` would do in each child in this process, whose forks then find it done.

    The process must not execute a program itself, since it would not get its rights again.
    """
    changed_signals()
    syscalls.limit_bounding_set(_PAYLOAD_CAPABILITIES.values())


def set_limit(kind: int, wanted: int) -> None:
    """Set the soft and the hard limit of a resource (RLIMIT_*), as far as the present hard limit lets."""
    hard = resource.getrlimit(kind)[1]
    # Raising a hard limit needs a capability of the host, which nothing here has.
    value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    # SIGXCPU comes at the soft limit and names the cause; at the hard limit there is only SIGKILL.
    reserve = int(kind == resource.RLIMIT_CPU and (hard == resource.RLIM_INFINITY or value < hard))
    resource.setrlimit(kind, (value, value + reserve))


@cache
def changed_signals() -> tuple[int, ...]:
    """Return the signals that this process does not leave to the kernel; its forks remember them."""
    default = (signal.SIG_DFL, None)
    return tuple(int(number) for number in signal.valid_signals() if signal.getsignal(number) not in default)
