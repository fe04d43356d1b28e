"""Sandboxes that Apptainer makes a part of (``apptainer``), or makes alone (``apptainer-plain``).

Pid 1 of an ``apptainer`` sandbox builds the root, has Apptainer enter it, and serves from outside the container:

    init (pid 1 of our namespaces: reaps, and takes everything down with it)
     |- apptainer exec ... leader    the container; the leader is pid 1 of its inner pid namespace and does nothing
     '- guest                        in the container's namespaces, except that its own pid is in ours

The guest's children are born inside the container; the guest itself is outside its pid namespace, so the payload can
neither see nor kill it. Nothing of the image runs before it is confined: the leader is ours, and the scripts that an
image has for Apptainer to run at its start are removed from the sandbox. Apptainer's own writable modes are not used:
they mount the overlay without ``userxattr`` and leave ``/tmp`` and ``/dev/shm`` without a size.

``apptainer-plain`` is Apptainer or SingularityCE alone, for sites that allow nothing else: for kernels without
unprivileged user namespaces, for setuid installations, and for kernels whose overlay lacks ``userxattr``. The runtime
makes everything: namespaces, mounts, the writable layer. The guest runs inside, started by the image's python3. A SIF
file is used unconverted. ``docs/sandboxes.md`` lists what that backend cannot promise.
"""

import os
import platform
import pwd
import re
import shutil
import socket
import stat
import struct
from collections.abc import Callable
from contextlib import suppress

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.backends import userns
from prorl_gym.sandbox.guest.fork_exec import enter_namespaces, open_namespaces
from prorl_gym.sandbox.guest.guest_messages import receive_descriptors
from prorl_gym.sandbox.guest.pid1 import serve
from prorl_gym.sandbox.spawner import mounts
from prorl_gym.sandbox.spawner.namespaces import report_setup_error
from prorl_gym.sandbox.spawner.rootfs import SandboxRoot, build_root, fill_around_usr
from prorl_gym.sandbox.spawner.runtime_supervisor import RuntimeCommand, exec_runtime, read_error, shell_exit_code
from prorl_gym.sandbox.spawner.spawner_protocol import LaunchRequest

_SHELL_LEADER = "echo ready; while read -r _; do :; done"
"""Script for the image's shell on machines for which there is no leader of ours."""
_SCRIPTS_DIRECTORY = ".singularity.d"
"""Where an image has scripts (environment, actions) that Apptainer runs, as its first act, unconfined."""
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C"}
"""Apptainer's own; built from nothing, since APPTAINERENV_* variables pass through --cleanenv."""
_MOUNT_POINTS = ("proc", "dev", "sys", "etc", "tmp", "root")


def run_init(launch: LaunchRequest, base: str, control: socket.socket, on_note: Callable[[str], None]) -> int:
    """Build and serve an ``apptainer`` sandbox; return how it ended. See ``userns.run_init``."""
    userns.isolate_process()
    mounts.mount_proc()  # Apptainer reads its own entry in /proc by the pid it has here
    devices = mounts.clone_devices()
    detached = mounts.clone_mounts(launch.spec.mounts)
    root = build_root(launch, base)
    on_note(root.limitations)
    _prepare_root(root.path)
    if HAS_LEADER:
        command = [f"/.leader-{os.urandom(8).hex()}"]  # a name that the image cannot have
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(root.path + command[0], flags, 0o700), "wb") as file:
            file.write(build_leader())  # and closed at once: a file that is open for writing cannot be executed
    else:
        has_bash = not launch.lower_dirs or os.path.lexists(f"{root.path}/bin/bash")
        command = ["/bin/bash" if has_bash else "/bin/sh", "-c", _SHELL_LEADER]
    runtime, leader, stdin = _start_container(launch, root, command)
    # A descriptor in a message that is not received yet is where no path leads: if it were open, an image's link to
    # /proc/self/fd/N would lead through it.
    near, far = socket.socketpair()
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    socket.send_fds(near, [b"x"], [proc])
    os.close(proc)
    near.close()

    def guest() -> None:
        surplus = _extra_mounts(leader, root)
        enter_namespaces(open_namespaces(str(leader)))
        stdin.close()
        if HAS_LEADER:
            os.unlink(command[0])
        for point in reversed(surplus):
            syscalls.detach_mount(point)
        with userns.map_image_errors(launch.spec):
            system_v = userns.finish_root(launch, devices, detached)
        _, (inner_proc,), _ = receive_descriptors(far)
        far.close()
        options = userns.guest_options(
            launch.spec,
            inner_proc,
            is_init=False,
            allow_system_v=system_v,
            storage_fd=root.storage_fd,
            orphan_parent=leader,
        )
        serve(control, options)

    pid = _fork_guest(guest, control)
    control.close()  # the guest then holds the only copy, so the service notices its end
    while True:  # reap everything, until one of these ends: the sandbox ends with it
        ended, status = os.waitpid(-1, 0)
        if ended in (pid, runtime):
            return shell_exit_code(status)


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


def _start_container(launch: LaunchRequest, root: SandboxRoot, command: list[str]) -> tuple[int, int, socket.socket]:
    """Run Apptainer over a finished root and wait until its leader reports from inside.

    Returns the pids here of Apptainer, which ends with the container, and of the leader, and the leader's standard
    input, with which the container ends.
    """
    ours, theirs = socket.socketpair()
    # The kernel adds the sender's pid to what the leader writes, translated into our pid namespace.
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    stderr = os.memfd_create("stderr")
    arguments = [
        *(launch.runtime_path, "-q", "exec", "--userns", "--containall", "--no-home", "--cleanenv"),
        *("--net", "--network=none", "--no-init", "--no-mount=bind-paths,sys,tmp,hostfs,cwd", "--pwd=/"),
        *(f"--bind={bind.source}:{bind.target}{':ro' if bind.read_only else ''}" for bind in root.bind_mounts),
        *("--writable", root.path, *command),
    ]
    process = os.fork()
    if process == 0:
        line = theirs.fileno()
        exec_runtime(arguments, _ENVIRONMENT, {0: line, 1: line, 2: stderr}, prepare=lambda: None)
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
    return process, leader, ours


def _extra_mounts(leader: int, root: SandboxRoot) -> list[str]:
    """Return the mount points that the container has beyond the root, ``/proc`` and our bind mounts, in mount order.

    Among them are tmpfs without a size (``/dev``, ``/etc/resolv.conf``) that would let a payload fill the memory.
    """
    wanted = {"/", "/proc", *(bind.target for bind in root.bind_mounts)}
    with open(f"/proc/{leader}/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        fields = [line.split(" ")[4] for line in file]  # with octal escapes of blanks, tabs, newlines and backslashes
    points = [re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field) for field in fields]
    return [point for point in points if point not in wanted]


LEADER_READY = b"ready\n"
_BASE = 0x400000
_HEADERS = 64 + 56
"""Bytes of the ELF header and one program header; the code follows, then ``LEADER_READY``, then ``_IGNORE``."""
_IGNORE = struct.pack("<QQQQ", 1, 0, 0, 0)
"""The kernel's sigaction: handler SIG_IGN, flags, restorer, mask."""


# Of each machine, EM_* of the ELF header and the code.
_LEADERS = {
    "x86_64": (
        62,
        bytes.fromhex(
            "b80d000000 bf11000000 488d3546000000 31d2 41ba08000000 0f05"  # sigaction
            "b801000000 bf01000000 488d3525000000 ba06000000 0f05"  # write(1, LEADER_READY, 6)
            "31c0 31ff 488d7424c0 ba40000000 0f05"  # again: read(0, stack, 64)
            "4885c0 7feb"  # more than nothing: again
            "b83c000000 31ff 0f05"  # exit(0)
        ),
    ),
    "aarch64": (
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
    ),
}
HAS_LEADER = platform.machine() in _LEADERS
"""Whether there is a leader for this machine. On others the image's own shell has to do."""


def build_leader(machine: str | None = None) -> bytes:
    r"""Return the executable that keeps a container open, for this machine unless another is named.

    What Apptainer starts has every capability in the container's user namespace, no system call filter and no limits.
    A shell of the image in that place could mount, make namespaces, and outlive the sandbox. This is a static
    executable of a few instructions, so nothing of the image is loaded into it either. As pid 1 it inherits orphans,
    which count as processes until they are reaped: the kernel reaps them for a parent that ignores SIGCHLD::

        sigaction(SIGCHLD, SIG_IGN); write(1, "ready\n", 6); while (read(0, stack, 64) > 0); exit(0)
    """
    kind, code = _LEADERS[machine or platform.machine()]
    size = _HEADERS + len(code) + len(LEADER_READY) + len(_IGNORE)
    ident = b"\x7fELF" + bytes((2, 1, 1)) + bytes(9)
    header = struct.pack("<16sHHIQQQIHHHHHH", ident, 2, kind, 1, _BASE + _HEADERS, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x10000)
    return header + load + code + LEADER_READY + _IGNORE


_PLAIN_FLAGS = (
    *("-q", "exec", "--containall", "--no-home", "--cleanenv", "--net", "--network=none"),
    *("--no-init", "--no-mount=bind-paths,sys,hostfs,cwd", "--hostname=sandbox", "--pwd=/"),
)
_PLAIN_LIMITATIONS = (
    "files written to disk and /dev/shm have no common bound, the payload is an ordinary user inside"
    ", may make user namespaces where the site lets it, and has no System V IPC"
)


def build_plain_command(launch: LaunchRequest, base: str) -> RuntimeCommand:
    """Return the command of an ``apptainer-plain`` sandbox.

    Raises ``SandboxError`` when this backend cannot use the image or a mount.
    """
    mounts.check_mount_sources(launch.spec.mounts)
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            f"uid {os.geteuid()} has no account here, and Apptainer by itself runs for accounts only.",
            f"Set sandbox.uid to an account's, or run: useradd --no-create-home --uid {os.geteuid()} prorl-sandbox",
        ) from None
    home = {"HOME": os.path.join("/", launch.spec.workdir), "USER": "sandbox", "LOGNAME": "sandbox"}
    root = _image_root(launch, base) if launch.lower_dirs else _host_root(launch, base)
    binds = [_bind(mount.source, os.path.join("/", mount.target), read_only=True) for mount in launch.spec.mounts]
    argv = [launch.runtime_path, *_PLAIN_FLAGS, *binds, *root]
    environment = userns.BASE_ENVIRONMENT if launch.lower_dirs else userns.HOST_ENVIRONMENT
    return RuntimeCommand(argv, {**environment, **home}, _PLAIN_LIMITATIONS)


def _bind(source: str, target: str, *, read_only: bool) -> str:
    for path in (source, target):
        if set(path) & {":", ",", "\\"}:
            raise SandboxError(
                FailureKind.SANDBOX_UNAVAILABLE,
                f"mount {path}: Apptainer reads colons, commas and backslashes in a path as syntax.",
                "Rename it, or use the backend 'userns' or 'apptainer'.",
            )
    return f"--bind={source}:{target}{':ro' if read_only else ''}"


def _host_root(launch: LaunchRequest, base: str) -> list[str]:
    directories = [*fill_around_usr(base), mounts.BindMount("/usr", "/usr", read_only=True)]
    os.chmod(base, 0o755)
    for target in [launch.spec.workdir, *(mount.target for mount in launch.spec.mounts)]:
        os.makedirs(f"{base}/{target.strip('/')}", exist_ok=True)
    binds = [_bind(bind.source, bind.target, read_only=True) for bind in directories]
    return [*binds, "--no-mount=tmp", "--writable", base]


def _image_root(launch: LaunchRequest, base: str) -> list[str]:
    """An image under the runtime's own writable layer.

    That layer cannot remove directories of the image where it was mounted without root (EIO), so the working
    directory, where agents do such things, is a copy on disk.
    """
    image, *below = launch.lower_dirs
    if below:
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            f"image {launch.spec.image} has {len(launch.lower_dirs)} layers; 'apptainer-plain' can show only one.",
            "Use 'userns' or 'apptainer', or give the image as a SIF file or one directory.",
        )
    os.mkdir(f"{base}/session")
    arguments = [f"--workdir={base}/session", "--writable-tmpfs"]
    workdir = launch.spec.workdir.strip("/")
    if os.path.isdir(image) and workdir:
        os.mkdir(f"{base}/work")
        inside = os.path.join(os.path.realpath(image), workdir)
        if os.path.isdir(inside) and os.path.realpath(inside) == inside:  # an image's links lead anywhere
            shutil.copytree(inside, f"{base}/work", symlinks=True, dirs_exist_ok=True)
        arguments.append(_bind(f"{base}/work", f"/{workdir}", read_only=False))
    return [*arguments, image]
