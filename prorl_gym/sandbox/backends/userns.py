"""Pid 1 of a ``userns`` sandbox: builds the root, enters it, serves until the service is gone."""

import os
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.guest.confine import confine, prepare_confinement
from prorl_gym.sandbox.guest.pid1 import GuestOptions, serve
from prorl_gym.sandbox.protocol import HOST_IMAGE, SandboxSpec
from prorl_gym.sandbox.spawner import mounts, rootfs
from prorl_gym.sandbox.spawner.namespaces import become_expendable
from prorl_gym.sandbox.spawner.spawner_protocol import LaunchRequest

BASE_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "TAR_OPTIONS": "--no-same-owner",  # there is one uid: tar as root would fail at the first file of another's
    "EMAIL": rootfs.DEFAULT_EMAIL,  # with it git commits where no identity is configured, and one that is goes first
}
"""Environment of every payload; nothing comes from the host's. The spec's variables win."""
HOST_ENVIRONMENT = {**BASE_ENVIRONMENT, "PATH": f"{BASE_ENVIRONMENT['PATH']}:{rootfs.EXTRA_PROGRAMS}"}
"""Environment without an image."""
_DIRECTORIES = (("/tmp", 0o1777), ("/var/tmp", 0o1777), ("/run", 0o755), ("/root", 0o700))


def run_init(launch: LaunchRequest, base: str, control: socket.socket, on_note: Callable[[str], None]) -> int:
    """Build and serve a ``userns`` sandbox; return 0.

    ``base`` is an empty directory of this sandbox, used as mount point; ``control`` is the guest's end of the channel;
    ``on_note`` is called once with what is weaker than usual, or "". Raises ``SandboxError`` when the image or a mount
    cannot be used.
    """
    isolate_process()
    devices = mounts.clone_devices()
    detached = mounts.clone_mounts(launch.spec.mounts)
    root = rootfs.build_root(launch, base)
    on_note(root.limitations)
    mounts.mount_binds(root.path, root.bind_mounts)
    host = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # it stays mounted, out of reach of any path
    os.chdir(root.path)
    syscalls.pivot_root(".", ".")
    os.chdir("/")
    with map_image_errors(launch.spec):
        mounts.mount_proc()
        # Before any other path of the image is used: by a link to /proc/self/fd/N it leads to whatever is open here.
        os.fchdir(host)
        syscalls.detach_mount(".")
        os.close(host)
        os.chdir("/")
        system_v = finish_root(launch, devices, detached)
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    serve(control, guest_options(launch.spec, proc, is_init=True, allow_system_v=system_v, storage_fd=root.storage_fd))
    return 0


def finish_root(launch: LaunchRequest, devices: dict[str, int], detached: list[mounts.DetachedMount]) -> bool:
    """Complete a root that has been entered and has its ``/proc``; return whether System V IPC is bounded."""
    spec, has_image = launch.spec, bool(launch.lower_dirs)
    mounts.mount_dev(devices)
    mounts.mount_shm(spec.limits.shm_size)
    # In a new user namespace the payload would gain capabilities.
    syscalls.write_setting("/proc/sys/user/max_user_namespaces", "0")
    system_v = mounts.limit_kernel_memory(spec.limits.shm_size)
    mounts.mask_kernel_files()
    for name, mode in _DIRECTORIES:
        if not os.path.isdir(name):
            os.makedirs(name)
            os.chmod(name, mode)
    os.makedirs(os.path.join("/", spec.workdir), exist_ok=True)
    for name in ("resolv.conf", "hosts") if has_image else ():  # of a machine without a network
        path = f"/etc/{name}"
        os.makedirs("/etc", exist_ok=True)
        if os.path.lexists(path):  # an image may have a symbolic link there
            os.unlink(path)
        with open(path, "x", encoding="ascii") as file:
            file.write(rootfs.SYNTHETIC_FILES[name])
    mounts.attach_mounts(detached)
    return system_v


def isolate_process() -> None:
    become_expendable()
    # From here on neither a payload nor another process of this uid can trace it or read its memory and descriptors.
    syscalls.set_dumpable(False)
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    syscalls.bring_up_loopback()


@contextmanager
def map_image_errors(spec: SandboxSpec) -> Generator[None, None, None]:
    """Turn an image's impossible paths (a file where a directory must be, a link in a circle) into ``IMAGE_BROKEN``."""
    try:
        yield
    except (FileExistsError, FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        if spec.image == HOST_IMAGE:
            raise
        raise SandboxError(
            FailureKind.IMAGE_BROKEN,
            f"image {spec.image}: {error.filename}: {error.strerror}.",
            "It must hold an ordinary Linux root: directories /etc, /tmp, /proc, /dev as such.",
        ) from None


def guest_options(
    spec: SandboxSpec,
    proc_fd: int,
    *,
    is_init: bool,
    allow_system_v: bool,
    storage_fd: int | None,
    orphan_parent: int | None = None,
) -> GuestOptions:
    """Return the guest's options. ``allow_system_v``: see ``confine``; ``storage_fd``: see ``SandboxRoot``."""
    return GuestOptions(
        limits=spec.limits,
        workdir=os.path.join("/", spec.workdir),
        env={**(HOST_ENVIRONMENT if spec.image == HOST_IMAGE else BASE_ENVIRONMENT), **spec.env},
        proc_fd=proc_fd,
        is_init=is_init,
        confine=partial(confine, allow_system_v=allow_system_v),
        prepare_confinement=prepare_confinement,
        allow_system_v=allow_system_v,
        orphan_parent=orphan_parent,
        storage_fd=storage_fd,
    )
