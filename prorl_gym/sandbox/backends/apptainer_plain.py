"""The ``apptainer-plain`` backend: Apptainer or SingularityCE alone, for sites that allow nothing else.

For kernels without unprivileged user namespaces, for setuid installations, and for kernels whose overlay lacks
``userxattr``. The runtime makes everything: namespaces, mounts, the writable layer. The guest runs inside, started by
the image's python3. A SIF file is used unconverted. ``docs/sandboxes.md`` lists what this backend cannot promise.
"""

import os
import pwd
import shutil

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.backends.userns import BASE_ENVIRONMENT, HOST_ENVIRONMENT
from prorl_gym.sandbox.spawner.host_root import fill_around_usr
from prorl_gym.sandbox.spawner.mounts import BindMount, check_mount_sources
from prorl_gym.sandbox.spawner.runtime_supervisor import RuntimeCommand
from prorl_gym.sandbox.spawner.spawner_protocol import LaunchRequest

_FLAGS = (
    *("-q", "exec", "--containall", "--no-home", "--cleanenv", "--net", "--network=none"),
    *("--no-init", "--no-mount=bind-paths,sys,hostfs,cwd", "--hostname=sandbox", "--pwd=/"),
)
_LIMITATIONS = (
    "files written to disk and /dev/shm have no common bound, the payload is an ordinary user inside"
    ", may make user namespaces where the site lets it, and has no System V IPC"
)


def build_command(launch: LaunchRequest, base: str) -> RuntimeCommand:
    """Return the command of a sandbox.

    Raises:
        SandboxError: the image or a mount cannot be used by this backend.
    """
    check_mount_sources(launch.spec.mounts)
    _check_account()
    home = {"HOME": os.path.join("/", launch.spec.workdir), "USER": "sandbox", "LOGNAME": "sandbox"}
    root = _image_root(launch, base) if launch.lower_dirs else _host_root(launch, base)
    binds = [_bind(mount.source, os.path.join("/", mount.target), read_only=True) for mount in launch.spec.mounts]
    argv = [launch.runtime_path, *_FLAGS, *binds, *root]
    environment = BASE_ENVIRONMENT if launch.lower_dirs else HOST_ENVIRONMENT
    return RuntimeCommand(argv, {**environment, **home}, _LIMITATIONS)


def _check_account() -> None:
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            f"uid {os.geteuid()} has no account here, and Apptainer by itself runs for accounts only.",
            f"Set sandbox.uid to an account's, or run: useradd --no-create-home --uid {os.geteuid()} prorl-sandbox",
        ) from None


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
    """A directory of our own with the host's /usr bound read-only onto it."""
    directories = [*fill_around_usr(base), BindMount("/usr", "/usr", read_only=True)]
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
