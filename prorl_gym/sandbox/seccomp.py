"""The system calls that a payload must not have because no namespace contains what they reach.

Sockets to the hypervisor (``AF_VSOCK`` belongs to no network namespace), kernel keys (their quota is the host uid's,
one for all sandboxes), and large interfaces whose defects have often been ways out: ``io_uring``, ``bpf``, ``perf``,
``userfaultfd``, rare socket families. And the host's kernel log, which a site may leave open to everybody. They
answer as a kernel that was built without them, and programs fall back.

So do leases: who holds one on a program keeps others from executing it, up to 45 s long, the guest's children included.
And System V IPC, where it cannot be bounded: what is made of it has no process, and stays until the namespace ends.
And calls that put memory where nothing can count it: ``memfd_secret``; ``vmsplice``, by which a pipe holds whole huge
pages; locks of open file descriptions, which live on in a message that nobody has received.

``notify_program`` is the filter of the guest itself and of all that it starts: it asks the guest about the calls that
make shared memory (``guest/shared_memory.py``).

``RLIMIT_CORE`` cannot be changed, though changing it seems to work: with a limit of 0 the host's core handler would be
run for every crash inside, with the payload's memory as its input; a limit of 1 keeps it away (core(5)).
"""

import errno
import platform
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from socket import AF_INET, AF_INET6, AF_NETLINK, AF_UNIX

from prorl_gym.sandbox import syscalls

_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_RLIMIT_CORE = 4
_NOTIFY = 0x7FC00000
_SETLEASE, _SETDELEG = 1024, 1040
_OFD_SETLK, _OFD_SETLKW = 37, 38
_IO_URING = (425, 426, 427)
_MEMFD_SECRET = 447
_MAP_SHARED, _MAP_SHARED_VALIDATE, _MAP_TYPE, _MAP_ANONYMOUS = 1, 3, 0xF, 0x20
_X32 = 0x40000000
"""Bit of the calls of x86's third, unused interface."""

# Offsets in struct seccomp_data, of which the filter sees one; low halves first: all machines here are little-endian.
_NUMBER, _MACHINE = 0, 4

_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K

_Program = list[tuple[int, int, int, int]]


@dataclass(frozen=True, slots=True)
class _Calls:
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
    mmap: int
    memfd_create: int


# i386: 102 is socketcall, 117 is ipc, 90 the old mmap: their arguments are in memory, where no filter can read them.
_I386 = _Calls(
    0x40000003,
    (286, 287, 288, 336, 357, 374, 103, 316, 102, 90),
    (359, 360),
    75,
    340,
    (55, 221),
    (395, 393, 399, 117),
    192,
    356,
)
_ARM = _Calls(
    0x40000028, (309, 310, 311, 364, 386, 388, 103, 343), (281, 288), 75, 369, (55, 221), (307, 299, 303), 192, 385
)
_X86_64 = _Calls(0xC000003E, (248, 249, 250, 298, 321, 323, 103, 278), (41, 53), 160, 302, (72,), (29, 64, 68), 9, 319)
_GENERIC = ((217, 218, 219, 241, 280, 282, 116, 75), (198, 199), 164, 261, (25,), (194, 190, 186), 222, 279)
_AARCH64 = _Calls(0xC00000B7, *_GENERIC)
_RISCV64 = _Calls(0xC00000F3, *_GENERIC)

_FILTERED = {"x86_64": (_X86_64, _I386), "aarch64": (_AARCH64, _ARM), "riscv64": (_RISCV64,)}

SUPPORTED = platform.machine() in _FILTERED
"""Whether the numbers of this machine are known here. On others payloads keep every call."""


def _argument(index: int, *, high: bool = False) -> int:
    return 16 + 8 * index + 4 * high


def _fail(code: int) -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, _ERRNO | code)


_ALLOWED = (_RETURN, 0, 0, _ALLOW)
_PRETEND = _fail(0)

_FAMILY_RULE: _Program = [
    (_LOAD, 0, 0, _argument(0)),
    (_EQUAL, 4, 0, AF_UNIX),
    (_EQUAL, 3, 0, AF_INET),
    (_EQUAL, 2, 0, AF_INET6),
    (_EQUAL, 1, 0, AF_NETLINK),
    _fail(errno.EAFNOSUPPORT),
    _ALLOWED,
]
_SETRLIMIT_RULE: _Program = [(_LOAD, 0, 0, _argument(0)), (_EQUAL, 0, 1, _RLIMIT_CORE), _PRETEND, _ALLOWED]
_PRLIMIT_RULE: _Program = [
    (_LOAD, 0, 0, _argument(1)),
    (_EQUAL, 0, 5, _RLIMIT_CORE),
    (_LOAD, 0, 0, _argument(2)),
    (_EQUAL, 0, 2, 0),
    (_LOAD, 0, 0, _argument(2, high=True)),
    (_EQUAL, 1, 0, 0),
    _PRETEND,
    _ALLOWED,  # another limit, or only asked for
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


def _rules(calls: _Calls, *, system_v: bool) -> _Program:
    program: _Program = [(_LOAD, 0, 0, _NUMBER)]
    if calls is _X86_64:
        program += [(_AT_LEAST, 0, 1, _X32), _fail(errno.ENOSYS)]
    refused = (*calls.refused, *_IO_URING, _MEMFD_SECRET, *(() if system_v else calls.system_v))
    rules: list[tuple[int, _Program]] = [
        *((number, [_fail(errno.ENOSYS)]) for number in refused),
        *((number, _FAMILY_RULE) for number in calls.socket),
        (calls.setrlimit, _SETRLIMIT_RULE),
        (calls.prlimit, _PRLIMIT_RULE),
        *((number, _FCNTL_RULE) for number in calls.fcntl),
    ]
    for number, rule in rules:
        program += [(_EQUAL, 0, len(rule), number), *rule]
    return [*program, _ALLOWED]


def _assemble(machine: str, rules_of: Callable[[_Calls], _Program]) -> bytes:
    """Return a filter as the kernel takes it: the calls of this machine's interfaces, none of any other's."""
    program: _Program = [(_LOAD, 0, 0, _MACHINE)]
    for calls in _FILTERED[machine]:
        rules = rules_of(calls)
        program += [(_EQUAL, 0, len(rules), calls.machine), *rules]
    program.append(_fail(errno.ENOSYS))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


_FILTERS = [
    _assemble(platform.machine(), partial(_rules, system_v=allowed)) if SUPPORTED else b"" for allowed in (False, True)
]

MEMFD_CREATE = _FILTERED[platform.machine()][0].memfd_create if SUPPORTED else -1
"""Number of this machine's own ``memfd_create``."""
MAPPING_CALLS = frozenset((calls.machine, calls.mmap) for calls in _FILTERED.get(platform.machine(), ()))
"""Architecture and number of each interface's ``mmap``."""


def notify_program(secret: int, *, ask: bool) -> bytes:
    """Return the filter that asks its listener about ``memfd_create`` and shared anonymous mappings.

    Args:
        secret: 64 bits; ``memfd_create`` with these as a sixth argument, which the kernel ignores, is not asked about.
        ask: there is a listener. Else no payload has ``memfd_create``, and shared mappings are not asked about.
    """

    def rules(calls: _Calls) -> _Program:
        notify = (_RETURN, 0, 0, _NOTIFY)
        create: _Program = [
            (_LOAD, 0, 0, _argument(5)),
            (_EQUAL, 0, 3, secret & 0xFFFFFFFF),
            (_LOAD, 0, 0, _argument(5, high=True)),
            (_EQUAL, 0, 1, secret >> 32),
            _ALLOWED,
            notify if ask else _fail(errno.ENOSYS),
        ]
        share: _Program = [
            (_LOAD, 0, 0, _argument(3)),
            (_AND, 0, 0, _MAP_TYPE | _MAP_ANONYMOUS),
            (_EQUAL, 1, 0, _MAP_SHARED | _MAP_ANONYMOUS),
            (_EQUAL, 0, 1, _MAP_SHARED_VALIDATE | _MAP_ANONYMOUS),
            notify if ask else _ALLOWED,
            _ALLOWED,
        ]
        program: _Program = [(_LOAD, 0, 0, _NUMBER)]
        for number, rule in ((calls.memfd_create, create), (calls.mmap, share)):
            program += [(_EQUAL, 0, len(rule), number), *rule]
        return [*program, _ALLOWED]

    return _assemble(platform.machine(), rules)


def refuse_calls(*, system_v: bool) -> None:
    """Install the filter, for this process and everything below it, for ever. Needs ``no_new_privs``.

    Args:
        system_v: leave System V IPC, since something else bounds it.

    Raises:
        OSError: the kernel refused it.
    """
    if SUPPORTED:
        syscalls.filter_calls(_FILTERS[system_v])
