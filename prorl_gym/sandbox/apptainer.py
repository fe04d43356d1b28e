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
import re
import secrets
import shutil
import signal
import socket
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox import apptainer_leader, init, kernel_files, setup_error, syscalls
from prorl_gym.sandbox.furnishing import prepare_files
from prorl_gym.sandbox.guest.server import serve
from prorl_gym.sandbox.launch import Launch
from prorl_gym.sandbox.mounts import attach_mounts, take_mounts
from prorl_gym.sandbox.processes import shell_code
from prorl_gym.sandbox.protocol import Mount
from prorl_gym.sandbox.rootfs import Root, build_root

_SHELL_LEADER = "echo ready; while read -r _; do :; done"
"""What the image's shell does on machines for which there is no leader of ours."""

_SCRIPTS = ".singularity.d"
"""Where an image has scripts (environment, actions) that Apptainer runs, as its first act, unconfined."""

_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C"}
"""Apptainer's own; built from nothing, since APPTAINERENV_* variables pass through --cleanenv."""


_MOUNT_POINTS = ("proc", "dev", "sys", "etc", "tmp", "root")


@dataclass(frozen=True, slots=True)
class _Container:
    """A running container."""

    process: int
    """Pid of Apptainer, which ends with the container."""
    leader: int
    """Pid, as this pid namespace sees it, of the process in the container's namespaces."""
    line: socket.socket
    """Its standard input: the container ends with it."""


def run(launch: Launch, base: str, control: socket.socket, note: Callable[[str], None]) -> int:
    """Build and serve an ``apptainer`` sandbox; return how it ended. See ``init.run``.

    Raises:
        SandboxError: the image cannot be used, or Apptainer refuses it.
        OSError: the kernel refused a step.
    """
    init.isolate_process()
    kernel_files.mount_proc()  # Apptainer reads its own entry in /proc by the pid it has here
    devices = kernel_files.take_devices()
    mounts = take_mounts(launch.spec.mounts)
    root = build_root(launch, base)
    note(root.detail)
    _prepare_root(root.path)
    command = _make_leader(root.path) if apptainer_leader.SUPPORTED else _shell_leader(launch, root)
    container = _start_container(launch, root, command)
    parked = _park(os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))

    def guest() -> None:
        surplus = _surplus_mounts(container.leader, root)
        _enter(container.leader)
        container.line.close()
        if apptainer_leader.SUPPORTED:
            os.unlink(command[0])
        system_v = _finish_root(launch, surplus, devices, mounts)
        storage = root.storage
        proc = _unpark(parked)
        options = init.guest_options(
            launch.spec, proc, is_init=False, system_v=system_v, storage=storage, adopter=container.leader
        )
        serve(control, options)

    pid = _fork(guest, control)
    control.close()  # the guest's copy is the only one: when it ends, the service sees it
    return _reap_until({pid, container.process})


def _prepare_root(root: str) -> None:
    """Make what Apptainer mounts onto and an image may lack, and remove what it would run.

    One level, never through the image's links.
    """
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in _MOUNT_POINTS:
        with suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=top)
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(_SCRIPTS, dir_fd=top, follow_symlinks=False).st_mode):
            shutil.rmtree(_SCRIPTS, dir_fd=top)
        else:
            os.unlink(_SCRIPTS, dir_fd=top)
    os.close(top)


def _make_leader(root: str) -> list[str]:
    """Put the leader into the root, under a name that the image cannot have; return its command, as seen inside."""
    name = f"/.leader-{secrets.token_hex(8)}"
    file = os.open(root + name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o700)
    os.write(file, apptainer_leader.executable())
    os.close(file)  # at once: a file that is open for writing cannot be executed
    return [name]


def _shell_leader(launch: Launch, root: Root) -> list[str]:
    has_bash = not launch.lower or os.path.lexists(f"{root.path}/bin/bash")
    return ["/bin/bash" if has_bash else "/bin/sh", "-c", _SHELL_LEADER]


def _park(descriptor: int) -> socket.socket:
    """Keep a descriptor where no path leads: open, an image's link to /proc/self/fd/N would lead through it.

    It is in a message that nobody has received yet.
    """
    near, far = socket.socketpair()
    socket.send_fds(near, [b"x"], [descriptor])
    os.close(descriptor)
    near.close()
    return far


def _unpark(parked: socket.socket) -> int:
    _, descriptors, _, _ = socket.recv_fds(parked, 1, 1, socket.MSG_CMSG_CLOEXEC)
    parked.close()
    return descriptors[0]


def _fork(body: Callable[[], None], control: socket.socket) -> int:
    """Run ``body`` in a child, which ends with it; its errors are reported to the service."""
    pid = os.fork()
    if pid != 0:
        return pid
    status = 1
    try:
        body()
        status = 0
    except BaseException as error:
        setup_error.report(control, error)
    finally:
        os._exit(status)


def _start_container(launch: Launch, root: Root, command: list[str]) -> _Container:
    """Run Apptainer over a finished root and wait until its leader says that it is inside."""
    ours, theirs = socket.socketpair()
    # The kernel adds the sender's pid to what the leader writes, translated into our pid namespace.
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    complaints = os.memfd_create("apptainer")
    arguments = [
        launch.program,
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
        *(f"--bind={graft.source}:{graft.target}{':ro' if graft.read_only else ''}" for graft in root.grafts),
        "--writable",
        root.path,
        *command,
    ]
    process = os.fork()
    if process == 0:
        _exec_apptainer(arguments, theirs, complaints)
    theirs.close()
    data, ancillary, _, _ = ours.recvmsg(64, socket.CMSG_SPACE(struct.calcsize("3i")))
    if data != apptainer_leader.READY or not ancillary:
        raise _refusal(launch, os.pread(complaints, 4000, 0).decode(errors="replace"))
    os.close(complaints)
    leader: int = struct.unpack("3i", ancillary[0][2])[0]
    return _Container(process, leader, ours)


def _exec_apptainer(arguments: list[str], line: socket.socket, complaints: int) -> None:
    """In the child: become Apptainer. Never returns."""
    try:
        os.dup2(line.fileno(), 0)
        os.dup2(line.fileno(), 1)
        os.dup2(complaints, 2)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execve(arguments[0], arguments, _ENVIRONMENT)
    except OSError as error:
        os.write(2, f"FATAL: {arguments[0]}: {error.strerror}".encode())
    finally:
        os._exit(127)


def _refusal(launch: Launch, complaint: str) -> SandboxError:
    lines = [line.partition("FATAL:")[2].strip() or line.strip() for line in complaint.splitlines() if line.strip()]
    reason = lines[-1] if lines else "it ended without a word"
    return SandboxError(
        FailureKind.SANDBOX_UNAVAILABLE,
        f"apptainer cannot run {launch.spec.image}: {reason[:300]}",
        "Run `prorl-gym doctor`, or choose the backend 'userns', which needs no Apptainer.",
    )


def _enter(leader: int) -> None:
    """Enter the container's namespaces; only children will be in its pid namespace."""
    own, theirs = "/proc/self/ns", f"/proc/{leader}/ns"
    root = os.open(f"/proc/{leader}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    wanted: list[tuple[int, int]] = []
    for name, flag in (
        ("user", syscalls.CLONE_NEWUSER),
        ("ipc", syscalls.CLONE_NEWIPC),
        ("uts", syscalls.CLONE_NEWUTS),
        ("net", syscalls.CLONE_NEWNET),
        ("pid", syscalls.CLONE_NEWPID),
        ("mnt", syscalls.CLONE_NEWNS),
    ):
        if os.stat(f"{own}/{name}").st_ino != os.stat(f"{theirs}/{name}").st_ino:
            wanted.append((os.open(f"{theirs}/{name}", os.O_RDONLY | os.O_CLOEXEC), flag))
    for descriptor, flag in wanted:
        syscalls.setns(descriptor, flag)
        os.close(descriptor)
    os.fchdir(root)
    os.chroot(".")
    os.chdir("/")
    os.close(root)


def _surplus_mounts(leader: int, root: Root) -> list[str]:
    """Return the mount points that the container has beyond the root, ``/proc`` and our grafts, in mount order.

    Among them are tmpfs without a size (``/dev``, ``/etc/resolv.conf``) that would let a payload fill the memory.
    """
    wanted = {"/", "/proc", *(graft.target for graft in root.grafts)}
    with open(f"/proc/{leader}/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [_unescape(line.split(" ")[4]) for line in file]
    return [point for point in points if point not in wanted]


def _unescape(field: str) -> str:
    """Undo the kernel's octal escapes of blanks, tabs, newlines and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _finish_root(
    launch: Launch, surplus: list[str], devices: dict[str, int], mounts: list[tuple[int, Mount, bool]]
) -> bool:
    """Bring what Apptainer mounted to the state of a ``userns`` sandbox; return whether System V IPC is bounded."""
    for point in reversed(surplus):
        syscalls.unmount(point)
    spec = launch.spec
    with init.blaming_image(spec):
        kernel_files.mount_dev(devices)
        kernel_files.mount_shm(spec.limits.shm_size)
        kernel_files.hide_sys()
        kernel_files.forbid_user_namespaces()
        system_v = kernel_files.bound_kernel_memory(spec.limits.shm_size)
        kernel_files.mask_proc()
        prepare_files(spec.workdir, keep_etc=not launch.lower)
        attach_mounts(mounts)
    return system_v


def _reap_until(processes: set[int]) -> int:
    """Reap everything; return the exit code of the first of ``processes`` to end: the sandbox ends with it."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid in processes:
            return shell_code(status)
