"""Pid 1 of an ``apptainer`` sandbox: builds the root, has Apptainer enter it, serves from beside the container.

    init (pid 1 of our namespaces: reaps, and takes everything down with it)
     |- apptainer exec ... leader    the container; the leader is pid 1 of its inner pid namespace and does nothing
     '- guest                        in the container's namespaces, except that its own pid is in ours

The guest's children are born inside the container; the guest itself is outside its pid namespace, so the payload can
neither see nor kill it. Nothing of the image runs before it is confined: the leader is ours, and the scripts that an
image has for Apptainer to run at its start are removed from the sandbox. Apptainer's own writable modes are not used:
they mount the overlay without ``userxattr`` and leave ``/tmp`` and ``/dev/shm`` without a size.
"""

import os
import platform
import re
import shutil
import signal
import socket
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.backends import userns
from prorl_gym.sandbox.guest.namespace_entry import enter_namespaces, open_namespaces
from prorl_gym.sandbox.guest.pid1 import serve
from prorl_gym.sandbox.spawner import kernel_files
from prorl_gym.sandbox.spawner.mounts import clone_mounts
from prorl_gym.sandbox.spawner.namespaces import report_setup_error
from prorl_gym.sandbox.spawner.rootfs import SandboxRoot, build_root
from prorl_gym.sandbox.spawner.runtime_supervisor import read_error, shell_exit_code
from prorl_gym.sandbox.spawner.spawner_protocol import LaunchRequest

_SHELL_LEADER = "echo ready; while read -r _; do :; done"
"""What the image's shell does on machines for which there is no leader of ours."""
_SCRIPTS_DIRECTORY = ".singularity.d"
"""Where an image has scripts (environment, actions) that Apptainer runs, as its first act, unconfined."""
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C"}
"""Apptainer's own; built from nothing, since APPTAINERENV_* variables pass through --cleanenv."""
_MOUNT_POINTS = ("proc", "dev", "sys", "etc", "tmp", "root")


@dataclass(frozen=True, slots=True)
class _Container:
    """A running container."""

    runtime_pid: int
    """Pid of Apptainer, which ends with the container."""
    leader_pid: int
    """Pid, in this pid namespace, of the process in the container's namespaces."""
    stdin: socket.socket
    """Its standard input: the container ends with it."""


def run_init(launch: LaunchRequest, base: str, control: socket.socket, on_note: Callable[[str], None]) -> int:
    """Build and serve an ``apptainer`` sandbox; return how it ended. See ``userns.run_init``.

    Raises:
        SandboxError: the image cannot be used, or Apptainer refuses it.
        OSError: the kernel refused a step.
    """
    userns.isolate_process()
    kernel_files.mount_proc()  # Apptainer reads its own entry in /proc by the pid it has here
    devices = kernel_files.clone_devices()
    mounts = clone_mounts(launch.spec.mounts)
    root = build_root(launch, base)
    on_note(root.limitations)
    _prepare_root(root.path)
    command = _install_leader(root.path) if HAS_LEADER else _shell_leader_command(launch, root)
    container = _start_container(launch, root, command)
    parked = _stash_descriptor(os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))

    def guest() -> None:
        surplus = _extra_mounts(container.leader_pid, root)
        enter_namespaces(open_namespaces(str(container.leader_pid)))
        container.stdin.close()
        if HAS_LEADER:
            os.unlink(command[0])
        for point in reversed(surplus):
            syscalls.unmount(point)
        with userns.map_image_errors(launch.spec):
            system_v = userns.finish_root(launch, devices, mounts)
        storage = root.storage_fd
        proc = _unstash_descriptor(parked)
        options = userns.guest_options(
            launch.spec,
            proc,
            is_init=False,
            allow_system_v=system_v,
            storage_fd=storage,
            orphan_parent=container.leader_pid,
        )
        serve(control, options)

    pid = _fork_guest(guest, control)
    control.close()  # the guest then holds the only copy, so the service notices its end
    return _reap_until({pid, container.runtime_pid})


def _prepare_root(root: str) -> None:
    """Make what Apptainer mounts onto and an image may lack, and remove what it would run.

    One level, never through the image's links.
    """
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in _MOUNT_POINTS:
        with suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=top)
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(_SCRIPTS_DIRECTORY, dir_fd=top, follow_symlinks=False).st_mode):
            shutil.rmtree(_SCRIPTS_DIRECTORY, dir_fd=top)
        else:
            os.unlink(_SCRIPTS_DIRECTORY, dir_fd=top)
    os.close(top)


def _install_leader(root: str) -> list[str]:
    """Put the leader into the root, under a name that the image cannot have; return its command, as seen inside."""
    name = f"/.leader-{os.urandom(8).hex()}"
    file = os.open(root + name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o700)
    os.write(file, build_leader())
    os.close(file)  # at once: a file that is open for writing cannot be executed
    return [name]


def _shell_leader_command(launch: LaunchRequest, root: SandboxRoot) -> list[str]:
    has_bash = not launch.lower_dirs or os.path.lexists(f"{root.path}/bin/bash")
    return ["/bin/bash" if has_bash else "/bin/sh", "-c", _SHELL_LEADER]


def _stash_descriptor(descriptor: int) -> socket.socket:
    """Keep a descriptor where no path leads: open, an image's link to /proc/self/fd/N would lead through it.

    It is in a message that is not received yet.
    """
    near, far = socket.socketpair()
    socket.send_fds(near, [b"x"], [descriptor])
    os.close(descriptor)
    near.close()
    return far


def _unstash_descriptor(parked: socket.socket) -> int:
    _, descriptors, _, _ = socket.recv_fds(parked, 1, 1, socket.MSG_CMSG_CLOEXEC)
    parked.close()
    return descriptors[0]


def _fork_guest(body: Callable[[], None], control: socket.socket) -> int:
    """Run ``body`` in a child, which ends with it; its errors are reported to the service."""
    pid = os.fork()
    if pid != 0:
        return pid
    status = 1
    try:
        body()
        status = 0
    except BaseException as error:
        report_setup_error(control, error)
    finally:
        os._exit(status)


def _start_container(launch: LaunchRequest, root: SandboxRoot, command: list[str]) -> _Container:
    """Run Apptainer over a finished root and wait until its leader reports from inside."""
    ours, theirs = socket.socketpair()
    # The kernel adds the sender's pid to what the leader writes, translated into our pid namespace.
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    stderr = os.memfd_create("stderr")
    arguments = [
        launch.runtime_path,
        "-q",
        "exec",
        "--userns",
        "--containall",
        "--no-home",
        "--cleanenv",
        "--net",
        "--network=none",
        "--no-init",
        "--no-mount=bind-paths,sys,tmp,hostfs,cwd",
        "--pwd=/",
        *(f"--bind={bind.source}:{bind.target}{':ro' if bind.read_only else ''}" for bind in root.bind_mounts),
        "--writable",
        root.path,
        *command,
    ]
    process = os.fork()
    if process == 0:
        _exec_apptainer(arguments, theirs, stderr)
    theirs.close()
    data, ancillary, _, _ = ours.recvmsg(64, socket.CMSG_SPACE(struct.calcsize("3i")))
    if data != LEADER_READY or not ancillary:
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            f"apptainer cannot run {launch.spec.image}: {read_error(stderr)}",
            "Run `prorl-gym doctor`, or choose the backend 'userns', which needs no Apptainer.",
        )
    os.close(stderr)
    leader: int = struct.unpack("3i", ancillary[0][2])[0]
    return _Container(process, leader, ours)


def _exec_apptainer(arguments: list[str], line: socket.socket, stderr: int) -> None:
    """In the child: become Apptainer. Never returns."""
    try:
        os.dup2(line.fileno(), 0)
        os.dup2(line.fileno(), 1)
        os.dup2(stderr, 2)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execve(arguments[0], arguments, _ENVIRONMENT)
    except OSError as error:
        os.write(2, f"FATAL: {arguments[0]}: {error.strerror}".encode())
    finally:
        os._exit(127)


def _extra_mounts(leader: int, root: SandboxRoot) -> list[str]:
    """Return the mount points that the container has beyond the root, ``/proc`` and our bind mounts, in mount order.

    Among them are tmpfs without a size (``/dev``, ``/etc/resolv.conf``) that would let a payload fill the memory.
    """
    wanted = {"/", "/proc", *(bind.target for bind in root.bind_mounts)}
    with open(f"/proc/{leader}/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [_unescape(line.split(" ")[4]) for line in file]
    return [point for point in points if point not in wanted]


def _unescape(field: str) -> str:
    """Undo the kernel's octal escapes of blanks, tabs, newlines and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _reap_until(processes: set[int]) -> int:
    """Reap everything; return the exit code of the first of ``processes`` to end: the sandbox ends with it."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid in processes:
            return shell_exit_code(status)


LEADER_READY = b"ready\n"
_BASE = 0x400000
_HEADERS = 64 + 56
"""Bytes of the ELF header and one program header; the code follows, then ``LEADER_READY``, then ``_IGNORE``."""
_IGNORE = struct.pack("<QQQQ", 1, 0, 0, 0)
"""The kernel's sigaction: handler SIG_IGN, flags, restorer, mask."""


@dataclass(frozen=True, slots=True)
class _MachineCode:
    """One machine's code."""

    machine: int
    """EM_* of the ELF header."""
    text: bytes


_X86_64 = _MachineCode(
    62,
    bytes.fromhex(
        "b80d000000 bf11000000 488d3546000000 31d2 41ba08000000 0f05"  # sigaction
        "b801000000 bf01000000 488d3525000000 ba06000000 0f05"  # write(1, LEADER_READY, 6)
        "31c0 31ff 488d7424c0 ba40000000 0f05"  # again: read(0, stack, 64)
        "4885c0 7feb"  # more than nothing: again
        "b83c000000 31ff 0f05"  # exit(0)
    ),
)
_AARCH64 = _MachineCode(
    183,
    struct.pack(
        "<22I",
        *(0xD2800220, 0x500002C1, 0xD2800002, 0xD2800103, 0xD28010C8, 0xD4000001),  # sigaction
        *(0xD2800020, 0x100001E1, 0xD28000C2, 0xD2800808, 0xD4000001),  # write(1, LEADER_READY, 6)
        *(0xD2800000, 0xD10103E1, 0xD2800802, 0xD28007E8, 0xD4000001),  # again: read(0, stack, 64)
        *(0xF100001F, 0x54FFFF4C),  # more than nothing: again
        *(0xD2800000, 0xD2800BA8, 0xD4000001),  # exit(0)
        0xD503201F,  # nothing
    ),
)
_MACHINES = {"x86_64": _X86_64, "aarch64": _AARCH64}
HAS_LEADER = platform.machine() in _MACHINES
"""Whether there is a leader for this machine. On others the image's own shell has to do."""


def build_leader(machine: str | None = None) -> bytes:
    r"""Return the executable that keeps a container open, for this machine unless another is named.

    What Apptainer starts has every capability in the container's user namespace, no system call filter and no limits.
    A shell of the image in that place could mount, make namespaces, and go on beside the sandbox. This is a static
    executable of a few instructions, so nothing of the image is loaded into it either. As pid 1 it inherits orphans,
    which count as processes until they are reaped: the kernel reaps them for a parent that ignores SIGCHLD::

        sigaction(SIGCHLD, SIG_IGN); write(1, "ready\n", 6); while (read(0, stack, 64) > 0); exit(0)
    """
    code = _MACHINES[machine or platform.machine()]
    size = _HEADERS + len(code.text) + len(LEADER_READY) + len(_IGNORE)
    ident = b"\x7fELF" + bytes((2, 1, 1)) + bytes(9)
    header = struct.pack("<16sHHIQQQIHHHHHH", ident, 2, code.machine, 1, _BASE + _HEADERS, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x10000)
    return header + load + code.text + LEADER_READY + _IGNORE
