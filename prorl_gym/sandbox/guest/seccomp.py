"""The system calls that a payload must not have because no namespace contains what they reach.

Sockets to the hypervisor (``AF_VSOCK`` belongs to no network namespace), kernel keys (their quota is the host uid's,
one for all sandboxes), and large interfaces whose defects have often been ways out: ``io_uring``, ``bpf``, ``perf``,
``userfaultfd``, rare socket families. And the host's kernel log, which a site may leave open to everybody. They
answer as a kernel that was built without them, and programs fall back.

So do leases: the holder of one on a program keeps others from executing it, up to 45 s long, the guest's children too.
And System V IPC, where it cannot be bounded: what is made of it has no process, and stays until the namespace ends.

And calls that change another process and need no more than its uid, which the guest and its children between fork
and exec share with payloads: limits of another process, scheduling of the guest or of a whole user. A payload could
end what serves its sandbox by them. Tracing, memory, descriptors and signals to pid 1 are guarded by the kernel.

And the ways out of the tree of processes that a timeout kills: a sibling in place of a child (``CLONE_PARENT``), and an
end of adopting orphans. ``clone3`` has its flags in memory, out of a filter's reach; libraries fall back to ``clone``.

And calls that put memory where nothing can count it: ``memfd_secret``; ``vmsplice``, by which a pipe holds whole huge
pages; locks of open file descriptions, which live on in a message that is not received.

The guest is notified of SIGKILL (``payload_kill_monitor``), and of memory files and shared anonymous mappings
(``shared_memory``), before these calls go on. Where it cannot be notified, payloads have no memory files.

``RLIMIT_CORE`` cannot be changed, though changing it seems to work: with a limit of 0 the host's core handler would be
run for every crash inside, with the payload's memory as its input; a limit of 1 keeps it away (core(5)).
"""

import errno
import platform
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from socket import AF_INET, AF_INET6, AF_NETLINK, AF_UNIX
from typing import Literal

from prorl_gym.sandbox import syscalls

_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_USER_NOTIFICATION = 0x7FC00000
_SIGKILL = 9
_RLIMIT_CORE = 4
_SETLEASE, _SETDELEG = 1024, 1040
_OFD_SETLK, _OFD_SETLKW = 37, 38
_IO_URING = (425, 426, 427)
_MEMFD_SECRET = 447
_MAP_SHARED, _MAP_SHARED_VALIDATE, _MAP_TYPE, _MAP_ANONYMOUS = 1, 3, 0xF, 0x20
_CLONE3 = 435
_PRIO_USER, _IOPRIO_WHO_USER = 2, 3
_CLONE_PARENT = 0x8000
_SET_CHILD_SUBREAPER = 36
_GUEST_PID = 1
"""The guest's pid where payloads can see it: it is pid 1 there."""
_X32 = 0x40000000
"""Bit of the calls of x86's third, unused interface."""

# Offsets in struct seccomp_data, the filter's input; low halves first: all machines here are little-endian.
_NUMBER, _MACHINE = 0, 4

_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
_HAS_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K

_Program = list[tuple[int, int, int, int]]


@dataclass(frozen=True, slots=True)
class _CallNumbers:
    """The numbers of one machine's calls."""

    machine: int
    """AUDIT_ARCH_*."""
    refused: tuple[int, ...]
    """add_key, request_key, keyctl, perf_event_open, bpf, userfaultfd, syslog, vmsplice, and what else is refused."""
    socket: tuple[int, ...]
    """socket, socketpair."""
    setrlimit: int
    prlimit: int
    fcntl: tuple[int, ...]
    system_v: tuple[int, ...]
    """shmget, semget, msgget: without them there is nothing that the other calls could be used on."""
    schedule: tuple[int, ...]
    """sched_setparam, sched_setscheduler, sched_setaffinity, sched_setattr."""
    setpriority: int
    ioprio_set: int
    prctl: int
    clone: int
    kill: tuple[int, int, int, int, int]
    """kill, tkill, rt_sigqueueinfo; tgkill, rt_tgsigqueueinfo."""
    mmap: int
    memfd_create: int


# i386: 102 is socketcall, 117 is ipc, 90 the old mmap: their arguments are in memory, where no filter can read them.
_I386 = _CallNumbers(
    0x40000003,
    (286, 287, 288, 336, 357, 374, 103, 316, 102, 90),
    (359, 360),
    75,
    340,
    (55, 221),
    (395, 393, 399, 117),
    (154, 156, 241, 351),
    setpriority=97,
    ioprio_set=289,
    prctl=172,
    clone=120,
    kill=(37, 238, 178, 270, 335),
    mmap=192,
    memfd_create=356,
)
_ARM = _CallNumbers(
    0x40000028,
    (309, 310, 311, 364, 386, 388, 103, 343),
    (281, 288),
    75,
    369,
    (55, 221),
    (307, 299, 303),
    (154, 156, 241, 380),
    setpriority=97,
    ioprio_set=314,
    prctl=172,
    clone=120,
    kill=(37, 238, 178, 268, 363),
    mmap=192,
    memfd_create=385,
)
_X86_64 = _CallNumbers(
    0xC000003E,
    (248, 249, 250, 298, 321, 323, 103, 278),
    (41, 53),
    160,
    302,
    (72,),
    (29, 64, 68),
    (142, 144, 203, 314),
    setpriority=141,
    ioprio_set=251,
    prctl=157,
    clone=56,
    kill=(62, 200, 129, 234, 297),
    mmap=9,
    memfd_create=319,
)
_AARCH64 = _CallNumbers(
    0xC00000B7,
    (217, 218, 219, 241, 280, 282, 116, 75),
    (198, 199),
    164,
    261,
    (25,),
    (194, 190, 186),
    (118, 119, 122, 274),
    setpriority=140,
    ioprio_set=30,
    prctl=167,
    clone=220,
    kill=(129, 130, 138, 131, 240),
    mmap=222,
    memfd_create=279,
)
_RISCV64 = replace(_AARCH64, machine=0xC00000F3)
_PIDFD_SEND_SIGNAL = 424
SignalTarget = Literal["process", "thread", "descriptor"]
"""What the first argument of a call that sends a signal names."""
_MACHINE_CALLS = {"x86_64": (_X86_64, _I386), "aarch64": (_AARCH64, _ARM), "riscv64": (_RISCV64,)}
SUPPORTED = platform.machine() in _MACHINE_CALLS
"""Whether the numbers of this machine are known here. On others payloads keep every call."""


def _argument(index: int, *, high: bool = False) -> int:
    return 16 + 8 * index + 4 * high


def _fail(code: int) -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, _ERRNO | code)


_ALLOWED = (_RETURN, 0, 0, _ALLOW)
_PRETEND_SUCCESS = _fail(0)

_FAMILY_RULE: _Program = [
    (_LOAD, 0, 0, _argument(0)),
    (_EQUAL, 4, 0, AF_UNIX),
    (_EQUAL, 3, 0, AF_INET),
    (_EQUAL, 2, 0, AF_INET6),
    (_EQUAL, 1, 0, AF_NETLINK),
    _fail(errno.EAFNOSUPPORT),
    _ALLOWED,
]
_SETRLIMIT_RULE: _Program = [(_LOAD, 0, 0, _argument(0)), (_EQUAL, 0, 1, _RLIMIT_CORE), _PRETEND_SUCCESS, _ALLOWED]
_PRLIMIT_RULE: _Program = [
    (_LOAD, 0, 0, _argument(2)),
    (_EQUAL, 0, 2, 0),
    (_LOAD, 0, 0, _argument(2, high=True)),
    (_EQUAL, 6, 0, 0),  # only reads them
    (_LOAD, 0, 0, _argument(0)),
    (_EQUAL, 1, 0, 0),
    _fail(errno.EPERM),  # of another process
    (_LOAD, 0, 0, _argument(1)),
    (_EQUAL, 0, 1, _RLIMIT_CORE),
    _PRETEND_SUCCESS,
    _ALLOWED,
]
_SCHEDULE_RULE: _Program = [(_LOAD, 0, 0, _argument(0)), (_EQUAL, 0, 1, _GUEST_PID), _fail(errno.EPERM), _ALLOWED]
_SUBREAPER_RULE: _Program = [
    (_LOAD, 0, 0, _argument(0)),
    (_EQUAL, 0, 5, _SET_CHILD_SUBREAPER),
    (_LOAD, 0, 0, _argument(1)),
    (_EQUAL, 0, 3, 0),
    (_LOAD, 0, 0, _argument(1, high=True)),
    (_EQUAL, 0, 1, 0),
    _fail(errno.EPERM),
    _ALLOWED,
]
_NOTIFY = (_RETURN, 0, 0, _USER_NOTIFICATION)


def _kill_rule(signal_at: int) -> _Program:
    """Notify the guest of SIGKILL; ``signal_at``: which argument names the signal."""
    return [(_LOAD, 0, 0, _argument(signal_at)), (_EQUAL, 0, 1, _SIGKILL), _NOTIFY, _ALLOWED]


_MAPPING_RULE: _Program = [
    (_LOAD, 0, 0, _argument(3)),
    (_AND, 0, 0, _MAP_TYPE | _MAP_ANONYMOUS),
    (_EQUAL, 1, 0, _MAP_SHARED | _MAP_ANONYMOUS),
    (_EQUAL, 0, 1, _MAP_SHARED_VALIDATE | _MAP_ANONYMOUS),
    _NOTIFY,
    _ALLOWED,
]
_CLONE_RULE: _Program = [(_LOAD, 0, 0, _argument(0)), (_HAS_BIT, 0, 1, _CLONE_PARENT), _fail(errno.EINVAL), _ALLOWED]


def _priority_rule(of_user: int) -> _Program:
    """Refuse priorities of all processes of a user, and of the guest; ``of_user``: the word for the former."""
    return [
        (_LOAD, 0, 0, _argument(0)),
        (_EQUAL, 2, 0, of_user),
        (_LOAD, 0, 0, _argument(1)),
        (_EQUAL, 0, 1, _GUEST_PID),
        _fail(errno.EPERM),
        _ALLOWED,
    ]


_FCNTL_RULE: _Program = [
    (_LOAD, 0, 0, _argument(1)),
    (_EQUAL, 3, 0, _SETLEASE),
    (_EQUAL, 2, 0, _SETDELEG),
    (_EQUAL, 1, 0, _OFD_SETLK),
    (_EQUAL, 0, 1, _OFD_SETLKW),
    _fail(errno.EINVAL),
    _ALLOWED,
]


def _rules(calls: _CallNumbers, *, allow_system_v: bool, may_notify: bool) -> _Program:
    program: _Program = [(_LOAD, 0, 0, _NUMBER)]
    if calls is _X86_64:
        program += [(_AT_LEAST, 0, 1, _X32), _fail(errno.ENOSYS)]
    refused = (*calls.refused, *_IO_URING, _MEMFD_SECRET, _CLONE3, *(() if allow_system_v else calls.system_v))
    rules: list[tuple[Sequence[int], _Program]] = [
        (refused, [_fail(errno.ENOSYS)]),
        (calls.socket, _FAMILY_RULE),
        ([calls.setrlimit], _SETRLIMIT_RULE),
        ([calls.prlimit], _PRLIMIT_RULE),
        (calls.fcntl, _FCNTL_RULE),
        (calls.schedule, _SCHEDULE_RULE),
        ([calls.setpriority], _priority_rule(_PRIO_USER)),
        ([calls.ioprio_set], _priority_rule(_IOPRIO_WHO_USER)),
        ([calls.prctl], _SUBREAPER_RULE),
        ([calls.clone], _CLONE_RULE),
    ]
    rules.append(([calls.memfd_create], [_NOTIFY if may_notify else _fail(errno.ENOSYS)]))
    if may_notify:
        rules.append(([calls.mmap], _MAPPING_RULE))
        rules += [([*calls.kill[:3], _PIDFD_SEND_SIGNAL], _kill_rule(1)), (calls.kill[3:], _kill_rule(2))]
    for numbers, rule in rules:
        last = len(numbers) - 1
        program += [
            (_EQUAL, last - index, len(rule) if index == last else 0, number) for index, number in enumerate(numbers)
        ]
        program += rule
    return [*program, _ALLOWED]


def assemble(machine: str, *, allow_system_v: bool, may_notify: bool) -> bytes:
    """Return the filter as the kernel takes it: the calls of this machine's interfaces, none of any other's."""
    program: _Program = [(_LOAD, 0, 0, _MACHINE)]
    for calls in _MACHINE_CALLS[machine]:
        rules = _rules(calls, allow_system_v=allow_system_v, may_notify=may_notify)
        program += [(_EQUAL, 0, len(rules), calls.machine), *rules]
    program.append(_fail(errno.ENOSYS))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


_MACHINE_NAME = platform.machine()
_FILTERS = {
    (system_v, asks): assemble(_MACHINE_NAME, allow_system_v=system_v, may_notify=asks) if SUPPORTED else b""
    for system_v in (False, True)
    for asks in (False, True)
}
_MAY_NOTIFY = SUPPORTED and tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (5, 9)
"""Earlier kernels cannot continue a call after a notification (5.5), or do not report that no process is left."""


def signal_target(machine: int, call: int) -> SignalTarget | None:
    """Return what the first argument of a call names that was notified; ``None``: no call that sends a signal."""
    if call == _PIDFD_SEND_SIGNAL:
        return "descriptor"
    for calls in _MACHINE_CALLS.get(_MACHINE_NAME, ()):
        if calls.machine == machine and call in calls.kill:
            return "thread" if call == calls.kill[1] else "process"
    return None


def is_mmap(machine: int, call: int) -> bool:
    """Whether this is the ``mmap`` of one of this machine's interfaces."""
    return any(calls.machine == machine and calls.mmap == call for calls in _MACHINE_CALLS.get(_MACHINE_NAME, ()))


def install_filter(*, allow_system_v: bool) -> int | None:
    """Install the filter, for this process and everything below it, for ever. Needs ``no_new_privs``.

    Args:
        allow_system_v: leave System V IPC, since something else bounds it.

    Returns:
        A descriptor that is notified of every SIGKILL before it is sent, and has to continue it, or ``None``.

    Raises:
        OSError: the kernel refused it.
    """
    if not SUPPORTED:
        return None
    if _MAY_NOTIFY and (listener := syscalls.install_seccomp_listener(_FILTERS[allow_system_v, True])) is not None:
        return listener
    syscalls.install_seccomp_filter(_FILTERS[allow_system_v, False])
    return None
