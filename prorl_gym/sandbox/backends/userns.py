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
from prorl_gym.sandbox.spawner import host_root, kernel_files
from prorl_gym.sandbox.spawner.mounts import DetachedMount, attach_mounts, clone_mounts, mount_binds
from prorl_gym.sandbox.spawner.rootfs import build_root
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
    "EMAIL": host_root.DEFAULT_EMAIL,  # with it git commits where no identity is configured, and one that is goes first
}
"""What every payload finds in its environment; nothing comes from the host's. The spec's variables win."""
HOST_ENVIRONMENT = {**BASE_ENVIRONMENT, "PATH": f"{BASE_ENVIRONMENT['PATH']}:{host_root.EXTRA_PROGRAMS}"}
"""The same without an image."""
_DIRECTORIES = (("/tmp", 0o1777), ("/var/tmp", 0o1777), ("/run", 0o755), ("/root", 0o700))


def run_init(launch: LaunchRequest, base: str, control: socket.socket, on_note: Callable[[str], None]) -> int:
    """Build and serve a ``userns`` sandbox; return 0.

    Args:
        launch: what to build.
        base: empty directory of this sandbox, used as mount point.
        control: the guest's end of the channel.
        on_note: called once with what is weaker than usual, or "".

    Raises:
        SandboxError: the image or a mount cannot be used.
        OSError: the kernel refused a step.
    """
    isolate_process()
    devices = kernel_files.clone_devices()
    mounts = clone_mounts(launch.spec.mounts)
    root = build_root(launch, base)
    on_note(root.limitations)
    mount_binds(root.path, root.bind_mounts)
    host = change_root(root.path)
    with map_image_errors(launch.spec):
        kernel_files.mount_proc()
        # Before any other path of the image is used: by a link to /proc/self/fd/N it leads to whatever is open here.
        detach_host_root(host)
        system_v = finish_root(launch, devices, mounts)
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    serve(control, guest_options(launch.spec, proc, is_init=True, allow_system_v=system_v, storage_fd=root.storage_fd))
    return 0


def finish_root(launch: LaunchRequest, devices: dict[str, int], mounts: list[DetachedMount]) -> bool:
    """Complete a root that has been entered and has its ``/proc``; return whether System V IPC is bounded."""
    kernel_files.mount_dev(devices)
    kernel_files.mount_shm(launch.spec.limits.shm_size)
    kernel_files.hide_sys()
    kernel_files.forbid_user_namespaces()
    system_v = kernel_files.limit_kernel_memory(launch.spec.limits.shm_size)
    kernel_files.mask_proc()
    _make_root_files(launch.spec.workdir, keep_etc=not launch.lower_dirs)
    attach_mounts(mounts)
    return system_v


def _make_root_files(workdir: str, *, keep_etc: bool) -> None:
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
        for name in ("resolv.conf", "hosts"):
            _replace_file(f"/etc/{name}", host_root.SYNTHETIC_FILES[name])


def _replace_file(path: str, text: str) -> None:
    """Write a file anew; an image may have a symbolic link there."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.lexists(path):
        os.unlink(path)
    with open(path, "x", encoding="ascii") as file:
        file.write(text)


def isolate_process() -> None:
    """Cut pid 1 off from the host before it touches anything."""
    kernel_files.raise_oom_score()
    # From here on neither a payload nor another process of this uid can trace it or read its memory and descriptors.
    syscalls.set_dumpable(False)
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    syscalls.bring_up_loopback()


def change_root(path: str) -> int:
    """Make ``path`` the root and return a descriptor of the host's, which stays mounted out of reach of any path."""
    host = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    os.chdir(path)
    syscalls.pivot_root(".", ".")
    os.chdir("/")
    return host


def detach_host_root(host: int) -> None:
    """Detach the host's root for good."""
    os.fchdir(host)
    syscalls.unmount(".")
    os.close(host)
    os.chdir("/")


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
