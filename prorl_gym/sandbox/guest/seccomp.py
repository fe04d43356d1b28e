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

The guest is notified of SIGKILL and SIGTERM and of what else looks like one from outside (its exit code, a limit of CPU
time that a program sets itself, a death that it asked to share, the signal of a timer or of a tracer's end), of memory
files and of shared anonymous mappings before these calls go on (``seccomp_notifications``). Where it cannot be
notified, payloads have no memory files. Other ways to be sent such a signal are refused: in place of SIGIO, or at the
end of a child.

``RLIMIT_CORE`` cannot be changed, though changing it seems to work: with a limit of 0 the host's core handler would be
run for every crash inside, with the payload's memory as its input; a limit of 1 keeps it away (core(5)).
"""

import errno
import platform
import re
import struct
from collections.abc import Sequence
from socket import AF_INET, AF_INET6, AF_NETLINK, AF_UNIX
from typing import Literal

from prorl_gym.sandbox import syscalls

_RLIMIT_CPU, _RLIMIT_CORE = 0, 4
_SETLEASE, _SETDELEG = 1024, 1040
_OFD_SETLK, _OFD_SETLKW = 37, 38
_SETSIG = 10
"""Of ``fcntl``: any signal in place of SIGIO, SIGKILL among them."""
_PTRACE_KILL, _PTRACE_SETOPTIONS, _PTRACE_SEIZE = 8, 0x4200, 0x4206
"""By the options a tracer's end kills what it traced."""
_MAP_SHARED, _MAP_SHARED_VALIDATE, _MAP_TYPE, _MAP_ANONYMOUS = 1, 3, 0xF, 0x20
_PRIO_USER, _IOPRIO_WHO_USER = 2, 3
_CLONE_PARENT = 0x8000
_SIGKILL, _SIGTERM = 9, 15
_SET_PDEATHSIG, _SET_SECCOMP, _SET_CHILD_SUBREAPER = 1, 22, 36
_STRICT_FILTER, _STRICT = 1, 0
"""Of ``prctl`` and of ``seccomp``: from then on the kernel answers nearly every call with SIGKILL."""
_GUEST_PID = 1
"""The guest's pid where payloads can see it: it is pid 1 there."""
_X32 = 0x40000000
"""Bit of the calls of x86's third, unused interface."""

_ARCHITECTURES = {
    "x86_64": 0xC000003E,
    "i386": 0x40000003,
    "aarch64": 0xC00000B7,
    "arm": 0x40000028,
    "riscv64": 0xC00000F3,
}
"""AUDIT_ARCH_* of each interface to the kernel."""
_INTERFACES = {"x86_64": ("x86_64", "i386"), "aarch64": ("aarch64", "arm"), "riscv64": ("riscv64",)}
"""Interfaces that a kernel offers, by ``platform.machine()``."""
_MACHINE = platform.machine()
SUPPORTED = _MACHINE in _INTERFACES
"""Whether the numbers of this machine are known here. On others payloads keep every call."""

_CALL_TABLE = """
call                x86_64   i386  aarch64    arm
add_key                248    286      217    309
request_key            249    287      218    310
keyctl                 250    288      219    311
perf_event_open        298    336      241    364
bpf                    321    357      280    386
userfaultfd            323    374      282    388
syslog                 103    103      116    103
vmsplice               278    316       75    343
socketcall               -    102        -      -
old_mmap                 -     90        -      -
io_uring_setup         425    425      425    425
io_uring_enter         426    426      426    426
io_uring_register      427    427      427    427
memfd_secret           447    447      447    447
clone3                 435    435      435    435
shmget                  29    395      194    307
semget                  64    393      190    299
msgget                  68    399      186    303
ipc                      -    117        -      -
socket                  41    359      198    281
socketpair              53    360      199    288
setrlimit              160     75      164     75
prlimit64              302    340      261    369
fcntl                   72     55       25     55
fcntl64                  -    221        -    221
sched_setparam         142    154      118    154
sched_setscheduler     144    156      119    156
sched_setaffinity      203    241      122    241
sched_setattr          314    351      274    380
setpriority            141     97      140     97
ioprio_set             251    289       30    314
prctl                  157    172      167    172
seccomp                317    354      277    383
exit                    60      1       93      1
exit_group             231    252       94    248
clone                   56    120      220    120
memfd_create           319    356      279    385
timer_create           222    259      107    257
mq_notify              244    281      184    278
ptrace                 101     26      117     26
mmap                     9    192      222    192
kill                    62     37      129     37
tkill                  200    238      130    238
rt_sigqueueinfo        129    178      138    178
pidfd_send_signal      424    424      424    424
tgkill                 234    270      131    268
rt_tgsigqueueinfo      297    335      240    363
"""
"""Numbers of the calls. ``mmap`` of the 32-bit interfaces is ``mmap2``."""


def _parse_call_table() -> dict[str, dict[str, int]]:
    (_, *interfaces), *rows = [line.split() for line in _CALL_TABLE.strip().splitlines()]
    columns = {
        interface: {name: int(numbers[index]) for name, *numbers in rows if numbers[index] != "-"}
        for index, interface in enumerate(interfaces)
    }
    return {**columns, "riscv64": columns["aarch64"]}


_CALLS = _parse_call_table()

_REFUSED = (
    *("add_key", "request_key", "keyctl", "perf_event_open", "bpf", "userfaultfd", "syslog", "vmsplice"),
    *("socketcall", "old_mmap"),  # their arguments are in memory, where no filter can read them
    *("io_uring_setup", "io_uring_enter", "io_uring_register", "memfd_secret", "clone3"),
)
_SYSTEM_V = ("shmget", "semget", "msgget", "ipc")
"""Without these there is nothing that the other calls of System V IPC could be used on."""
_SCHEDULING = ("sched_setparam", "sched_setscheduler", "sched_setaffinity", "sched_setattr")
_SIGNAL_SECOND = ("kill", "tkill", "rt_sigqueueinfo", "pidfd_send_signal")
_SIGNAL_THIRD = ("tgkill", "rt_tgsigqueueinfo")
"""Calls that send the signal in their second or third argument."""
_TIMERS = ("timer_create", "mq_notify")
SignalTarget = Literal["process", "thread", "descriptor"]
"""Meaning of the first argument of a call that sends a signal."""

_Instruction = tuple[int, int, int, int]
"""Classic BPF: operation, how many to skip if true and if false, operand."""
_Program = list[_Instruction]

_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
_HAS_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K

# Offsets in struct seccomp_data, the filter's input; low halves first: all machines here are little-endian.
_LOAD_CALL = (_LOAD, 0, 0, 0)
_LOAD_ARCHITECTURE = (_LOAD, 0, 0, 4)


def _load_argument(index: int, *, high: bool = False) -> _Instruction:
    return (_LOAD, 0, 0, 16 + 8 * index + 4 * high)


def _fail(code: int) -> _Instruction:
    return (_RETURN, 0, 0, 0x00050000 | code)


_ALLOW = (_RETURN, 0, 0, 0x7FFF0000)
_NOTIFY = (_RETURN, 0, 0, 0x7FC00000)
_PRETEND_SUCCESS = _fail(0)

_FAMILY_RULE: _Program = [
    _load_argument(0),
    (_EQUAL, 4, 0, AF_UNIX),
    (_EQUAL, 3, 0, AF_INET),
    (_EQUAL, 2, 0, AF_INET6),
    (_EQUAL, 1, 0, AF_NETLINK),
    _fail(errno.EAFNOSUPPORT),
    _ALLOW,
]
_FCNTL_RULE: _Program = [
    _load_argument(1),
    (_EQUAL, 4, 0, _SETLEASE),
    (_EQUAL, 3, 0, _SETDELEG),
    (_EQUAL, 2, 0, _SETSIG),
    (_EQUAL, 1, 0, _OFD_SETLK),
    (_EQUAL, 0, 1, _OFD_SETLKW),
    _fail(errno.EINVAL),
    _ALLOW,
]
_SCHEDULE_RULE: _Program = [_load_argument(0), (_EQUAL, 0, 1, _GUEST_PID), _fail(errno.EPERM), _ALLOW]
_SECCOMP_RULE: _Program = [_load_argument(0), (_EQUAL, 0, 1, _STRICT), _fail(errno.EINVAL), _ALLOW]
_EXIT_RULE: _Program = [
    _load_argument(0),
    (_AND, 0, 0, 0xFF),
    (_EQUAL, 1, 0, 128 + _SIGKILL),
    (_EQUAL, 0, 1, 128 + _SIGTERM),
    _NOTIFY,
    _ALLOW,
]
_CLONE_RULE: _Program = [  # the low byte is the signal that the child's end sends
    _load_argument(0),
    (_HAS_BIT, 3, 0, _CLONE_PARENT),
    (_AND, 0, 0, 0xFF),
    (_EQUAL, 1, 0, _SIGKILL),
    (_EQUAL, 0, 1, _SIGTERM),
    _fail(errno.EINVAL),
    _ALLOW,
]
_TIMER_RULE: _Program = [  # a signal of its own choice, which is in memory
    _load_argument(1),
    (_EQUAL, 0, 2, 0),
    _load_argument(1, high=True),
    (_EQUAL, 1, 0, 0),
    _NOTIFY,
    _ALLOW,
]
_TRACE_RULE: _Program = [
    _load_argument(0),
    (_EQUAL, 2, 0, _PTRACE_KILL),
    (_EQUAL, 1, 0, _PTRACE_SETOPTIONS),
    (_EQUAL, 0, 1, _PTRACE_SEIZE),
    _NOTIFY,
    _ALLOW,
]
_MAPPING_RULE: _Program = [
    _load_argument(3),
    (_AND, 0, 0, _MAP_TYPE | _MAP_ANONYMOUS),
    (_EQUAL, 1, 0, _MAP_SHARED | _MAP_ANONYMOUS),
    (_EQUAL, 0, 1, _MAP_SHARED_VALIDATE | _MAP_ANONYMOUS),
    _NOTIFY,
    _ALLOW,
]


def _kill_rule(signal_at: int) -> _Program:
    """Notify the guest of SIGKILL and SIGTERM; ``signal_at``: which argument names the signal."""
    return [_load_argument(signal_at), (_EQUAL, 1, 0, _SIGKILL), (_EQUAL, 0, 1, _SIGTERM), _NOTIFY, _ALLOW]


def _limit_rule(resource_at: int, action: _Instruction) -> _Program:
    """Leave RLIMIT_CORE as it is, and notify the guest of RLIMIT_CPU."""
    load = _load_argument(resource_at)
    return [load, (_EQUAL, 0, 1, _RLIMIT_CORE), _PRETEND_SUCCESS, (_EQUAL, 0, 1, _RLIMIT_CPU), action, _ALLOW]


def _prlimit_rule(action: _Instruction) -> _Program:
    own = _limit_rule(1, action)
    return [
        _load_argument(2),
        (_EQUAL, 0, 3, 0),
        _load_argument(2, high=True),
        (_EQUAL, 0, 1, 0),
        _ALLOW,  # only reads them
        _load_argument(0),
        (_EQUAL, 1, 0, 0),
        _fail(errno.EPERM),  # of another process
        *own,
    ]


def _prctl_rule(action: _Instruction) -> _Program:
    """Refuse an end of adopting orphans and the strict filter; notify the guest of signals at a parent's death."""
    return [
        _load_argument(0),
        (_EQUAL, 0, 5, _SET_CHILD_SUBREAPER),
        _load_argument(1),
        (_EQUAL, 0, 2, 0),
        _load_argument(1, high=True),
        (_EQUAL, 7, 6, 0),
        _ALLOW,
        (_EQUAL, 0, 3, _SET_SECCOMP),
        _load_argument(1),
        (_EQUAL, 3, 0, _STRICT_FILTER),
        _ALLOW,
        (_EQUAL, 2, 0, _SET_PDEATHSIG),
        _ALLOW,
        _fail(errno.EPERM),
        _load_argument(1),
        (_EQUAL, 1, 0, _SIGKILL),
        (_EQUAL, 0, 1, _SIGTERM),
        action,
        _ALLOW,
    ]


def _priority_rule(of_user: int) -> _Program:
    """Refuse priorities of all processes of a user, and of the guest; ``of_user``: the word for the former."""
    return [
        _load_argument(0),
        (_EQUAL, 2, 0, of_user),
        _load_argument(1),
        (_EQUAL, 0, 1, _GUEST_PID),
        _fail(errno.EPERM),
        _ALLOW,
    ]


def _rules(interface: str, *, allow_system_v: bool, may_notify: bool) -> _Program:
    program: _Program = [_LOAD_CALL]
    action = _NOTIFY if may_notify else _ALLOW
    if interface == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32), _fail(errno.ENOSYS)]
    rules: list[tuple[tuple[str, ...], _Program]] = [
        (_REFUSED if allow_system_v else (*_REFUSED, *_SYSTEM_V), [_fail(errno.ENOSYS)]),
        (("socket", "socketpair"), _FAMILY_RULE),
        (("setrlimit",), _limit_rule(0, action)),
        (("prlimit64",), _prlimit_rule(action)),
        (("fcntl", "fcntl64"), _FCNTL_RULE),
        (_SCHEDULING, _SCHEDULE_RULE),
        (("setpriority",), _priority_rule(_PRIO_USER)),
        (("ioprio_set",), _priority_rule(_IOPRIO_WHO_USER)),
        (("prctl",), _prctl_rule(action)),
        (("seccomp",), _SECCOMP_RULE),
        (("clone",), _CLONE_RULE),
        (("memfd_create",), [_NOTIFY if may_notify else _fail(errno.ENOSYS)]),
    ]
    if may_notify:
        rules += [(("mmap",), _MAPPING_RULE), (_SIGNAL_SECOND, _kill_rule(1)), (_SIGNAL_THIRD, _kill_rule(2))]
        rules += [(("exit", "exit_group"), _EXIT_RULE), (_TIMERS, _TIMER_RULE), (("ptrace",), _TRACE_RULE)]
    for names, rule in rules:
        numbers = [_CALLS[interface][name] for name in names if name in _CALLS[interface]]
        last = len(numbers) - 1
        program += [
            (_EQUAL, last - index, len(rule) if index == last else 0, number) for index, number in enumerate(numbers)
        ]
        program += rule
    return [*program, _ALLOW]


def assemble(machine: str, *, allow_system_v: bool, may_notify: bool) -> bytes:
    """Return the filter as the kernel takes it: the calls of this machine's interfaces, none of any other's."""
    program: _Program = [_LOAD_ARCHITECTURE]
    for interface in _INTERFACES[machine]:
        rules = _rules(interface, allow_system_v=allow_system_v, may_notify=may_notify)
        program += [(_EQUAL, 0, len(rules), _ARCHITECTURES[interface]), *rules]
    program.append(_fail(errno.ENOSYS))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


_FILTERS = {
    (system_v, notify): assemble(_MACHINE, allow_system_v=system_v, may_notify=notify) if SUPPORTED else b""
    for system_v in (False, True)
    for notify in (False, True)
}
_MAY_NOTIFY = SUPPORTED and tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (5, 9)
"""Earlier kernels cannot continue a call after a notification (5.5), or do not report that no process is left."""
_CALL_NAMES = {
    (_ARCHITECTURES[interface], number): name
    for interface in _INTERFACES.get(_MACHINE, ())
    for name, number in _CALLS[interface].items()
}


def signal_target(name: str) -> SignalTarget | None:
    """Return what the first argument of a call names; ``None``: no call that sends a signal."""
    if name not in (*_SIGNAL_SECOND, *_SIGNAL_THIRD):
        return None
    return "descriptor" if name == "pidfd_send_signal" else "thread" if name == "tkill" else "process"


def sent_signals(name: str, arguments: Sequence[int]) -> tuple[int, ...]:
    """Return the signals that a notified call sends, or may have the kernel send."""
    if name in (*_SIGNAL_SECOND, *_SIGNAL_THIRD):
        return (arguments[2 if name in _SIGNAL_THIRD else 1] & 0xFFFFFFFF,)
    if name in ("exit", "exit_group"):
        return ((arguments[0] & 0xFF) - 128,)
    return (_SIGKILL, _SIGTERM)


def call_name(architecture: int, call: int) -> str:
    """Return the name of a call that was notified."""
    return _CALL_NAMES[architecture, call]


def install_filter(*, allow_system_v: bool) -> int | None:
    """Install the filter, for this process and everything below it, for ever. Needs ``no_new_privs``.

    ``allow_system_v``: leave System V IPC, since something else bounds it. Returns a descriptor that is notified of
    each call that the module names before it is made, and has to continue it, or ``None``.
    """
    if not SUPPORTED:
        return None
    if _MAY_NOTIFY and (listener := syscalls.install_seccomp_listener(_FILTERS[allow_system_v, True])) is not None:
        return listener
    syscalls.install_seccomp_filter(_FILTERS[allow_system_v, False])
    return None
