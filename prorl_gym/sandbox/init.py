"""Pid 1 of a ``userns`` sandbox: builds the root, enters it, serves until the service is gone."""

import os
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox import kernel_files, syscalls
from prorl_gym.sandbox.confine import confine
from prorl_gym.sandbox.furnishing import prepare_files
from prorl_gym.sandbox.guest.server import GuestOptions, serve
from prorl_gym.sandbox.launch import Launch
from prorl_gym.sandbox.mounts import attach_mounts, mount_grafts, take_mounts
from prorl_gym.sandbox.processes import be_first_victim
from prorl_gym.sandbox.protocol import HOST_USR, SandboxSpec
from prorl_gym.sandbox.rootfs import build_root

BASE_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "TAR_OPTIONS": "--no-same-owner",  # there is one uid: tar as root would fail at the first file of another's
}
"""What every payload finds in its environment; nothing comes from the host's. The spec's variables win."""


def run(launch: Launch, base: str, control: socket.socket, note: Callable[[str], None]) -> int:
    """Build and serve a ``userns`` sandbox; return 0.

    Args:
        launch: what to build.
        base: empty directory of this sandbox, used as mount point.
        control: the guest's end of the channel.
        note: called once with what is weaker than usual, or "".

    Raises:
        SandboxError: the image or a mount cannot be used.
        OSError: the kernel refused a step.
    """
    isolate_process()
    devices = kernel_files.take_devices()
    mounts = take_mounts(launch.spec.mounts)
    root = build_root(launch, base)
    note(root.detail)
    mount_grafts(root.path, root.grafts)
    host = change_root(root.path)
    with blaming_image(launch.spec):
        kernel_files.mount_proc()
        # Before any other path of the image is used: by a link to /proc/self/fd/N it leads to whatever is open here.
        leave_host(host)
        kernel_files.mount_dev(devices)
        kernel_files.mount_shm(launch.spec.limits.shm_size)
        kernel_files.hide_sys()
        kernel_files.forbid_user_namespaces()
        system_v = kernel_files.bound_kernel_memory(launch.spec.limits.shm_size)
        kernel_files.mask_proc()
        prepare_files(launch.spec.workdir, keep_etc=not launch.lower)
        attach_mounts(mounts)
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    serve(control, guest_options(launch.spec, proc, is_init=True, system_v=system_v, storage=root.storage))
    return 0


def isolate_process() -> None:
    """Cut pid 1 off from the host before it touches anything."""
    be_first_victim()
    # From here on neither a payload nor another process of this uid can trace it or read its memory and descriptors.
    syscalls.set_dumpable(False)
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    syscalls.raise_loopback()


def change_root(path: str) -> int:
    """Make ``path`` the root and return a descriptor of the host's, which stays mounted out of reach of any path."""
    host = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    os.chdir(path)
    syscalls.pivot_root(".", ".")
    os.chdir("/")
    return host


def leave_host(host: int) -> None:
    """Detach the host's root for good."""
    os.fchdir(host)
    syscalls.unmount(".")
    os.close(host)
    os.chdir("/")


@contextmanager
def blaming_image(spec: SandboxSpec) -> Generator[None, None, None]:
    """Turn an image's impossible paths (a file where a directory must be, a link in a circle) into ``IMAGE_BROKEN``."""
    try:
        yield
    except (FileExistsError, FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        if spec.image == HOST_USR:
            raise
        raise SandboxError(
            FailureKind.IMAGE_BROKEN,
            f"image {spec.image}: {error.filename}: {error.strerror}.",
            "It must hold an ordinary Linux root: directories /etc, /tmp, /proc, /dev as such.",
        ) from None


def guest_options(
    spec: SandboxSpec, proc_fd: int, *, is_init: bool, system_v: bool, storage: int | None, adopter: int | None = None
) -> GuestOptions:
    """Return the guest's options for a spec; ``system_v``: see ``confine``, ``storage``: see ``mount_storage``."""
    return GuestOptions(
        limits=spec.limits,
        workdir=os.path.join("/", spec.workdir),
        env={**BASE_ENVIRONMENT, **spec.env},
        proc_fd=proc_fd,
        is_init=is_init,
        confine=partial(confine, system_v=system_v),
        adopter=adopter,
        storage=storage,
    )
