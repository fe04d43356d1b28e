"""The ``bwrap`` backend: bubblewrap makes namespaces and mounts where the kernel refuses them to us but not to it.

Such are a setuid bwrap, and one that an AppArmor profile allows what others may not. The guest is pid 1 inside. The
root is a sized tmpfs: ``/etc``, ``/root``, ``/home`` and the working directory of an image are copied into it, its
other directories are read-only, for bwrap before 0.11 (and any setuid one) has no writable overlay.
"""

import os
import stat

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.backends.userns import BASE_ENVIRONMENT, HOST_ENVIRONMENT
from prorl_gym.sandbox.guest.confine import PAYLOAD_CAPABILITIES
from prorl_gym.sandbox.spawner.host_root import fill_around_usr
from prorl_gym.sandbox.spawner.kernel_files import HIDDEN_DIRECTORIES, HIDDEN_FILES
from prorl_gym.sandbox.spawner.mounts import check_mount_sources
from prorl_gym.sandbox.spawner.namespaces import HOSTNAME
from prorl_gym.sandbox.spawner.runtime_supervisor import RuntimeCommand
from prorl_gym.sandbox.spawner.spawner_protocol import LaunchRequest

_ISOLATION = (
    *("--unshare-user", "--uid", "0", "--gid", "0"),
    *("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net", "--unshare-cgroup-try"),
    *("--hostname", HOSTNAME, "--die-with-parent", "--as-pid-1", "--new-session"),
    *("--clearenv", "--setenv", "PATH", BASE_ENVIRONMENT["PATH"], "--chdir", "/"),
)
_COPY_SOURCES = "/.prorl"
_COPIED = frozenset({"etc", "root", "home"})
_RECREATED = frozenset({"proc", "dev", "sys", "tmp", "run", _COPY_SOURCES[1:]})


def build_command(launch: LaunchRequest, base: str) -> RuntimeCommand:
    """Return the command of a sandbox.

    Raises:
        SandboxError: the image or a mount cannot be used by this backend.
    """
    setuid = bool(os.stat(launch.runtime_path).st_mode & stat.S_ISUID)
    seeds: list[tuple[str, str]] = []
    root = _image_root(launch, seeds) if launch.lower_dirs else _host_root(base, seeds)
    places: list[str] = []
    for number, (source, _) in enumerate(seeds):
        places += ["--ro-bind", source, f"{_COPY_SOURCES}/{number}"]
    argv = [launch.runtime_path, *_ISOLATION, *_capabilities(setuid=setuid), *_tmpfs("/", launch.spec.limits.root_size)]
    argv += [*root, *places, *_kernel_files(launch.spec.limits.shm_size), *_mounts(launch)]
    weaker = "the image's directories are read-only, except /etc, /root, /home and the working directory"
    environment = BASE_ENVIRONMENT
    if not launch.lower_dirs:
        weaker, environment = "/usr is read-only", HOST_ENVIRONMENT
    if setuid:
        argv = _without_sizes(argv)
        weaker += (
            "; there is no common bound on written files, no process inside has a capability, and nested user"
            " namespaces are not forbidden (bwrap is setuid)"
        )
    copies = [(f"{_COPY_SOURCES}/{number}", target) for number, (_, target) in enumerate(seeds)]
    return RuntimeCommand([*argv, "--"], environment, copies, limitations=weaker)


def _without_sizes(argv: list[str]) -> list[str]:
    """Leave out what a setuid bwrap refuses to ordinary users."""
    sizes = {number for number, word in enumerate(argv) if word == "--size"}
    return [word for number, word in enumerate(argv) if number not in sizes and number - 1 not in sizes]


def _capabilities(*, setuid: bool) -> list[str]:
    if setuid:  # it refuses both to ordinary users
        return []
    kept = [argument for name in PAYLOAD_CAPABILITIES for argument in ("--cap-add", f"CAP_{name}")]
    return ["--disable-userns", "--cap-drop", "ALL", *kept]


def _tmpfs(path: str, size: int, mode: int = 0o755) -> list[str]:
    return ["--size", str(size), "--perms", f"{mode:04o}", "--tmpfs", path]


def _host_root(base: str, seeds: list[tuple[str, str]]) -> list[str]:
    """The host's /usr, and around it what the other backends show of the host."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for bind in fill_around_usr(base):
        arguments += ["--ro-bind", bind.source, bind.target]
        os.rmdir(base + bind.target)
    for entry in list(os.scandir(base)):
        if entry.is_symlink():  # /bin, /lib64: the interpreter starts only where they are, so they cannot be copied
            arguments += ["--symlink", os.readlink(entry.path), f"/{entry.name}"]
            os.unlink(entry.path)
        elif entry.name in ("usr", "proc", "dev", "sys"):
            os.rmdir(entry.path)
    os.chmod(base, 0o755)
    seeds.append((base, "/"))
    return arguments


def _image_root(launch: LaunchRequest, seeds: list[tuple[str, str]]) -> list[str]:
    """An image directory. Only its own top level is looked at, and never through its symbolic links."""
    image, *below = launch.lower_dirs
    if below:
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            f"image {launch.spec.image} has {len(launch.lower_dirs)} layers, and the 'bwrap' backend can show only "
            f"one.",
            "Use 'userns' or 'apptainer', or flatten the image into one directory.",
        )
    copied = _COPIED | {launch.spec.workdir.strip("/").partition("/")[0]} - {"usr"}
    arguments: list[str] = []
    for name in sorted(set(os.listdir(image)) - _RECREATED):
        path = f"{image}/{name}"
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), f"/{name}"]
        elif name in copied and os.path.isdir(path):
            seeds.append((path, f"/{name}"))
        else:
            arguments += ["--ro-bind", path, f"/{name}"]
    if os.path.isdir(f"{image}/var/tmp") and not os.path.islink(f"{image}/var"):
        arguments += _tmpfs("/var/tmp", launch.spec.limits.root_size, 0o1777)
    return [*arguments, "--perms", "1777", "--dir", "/tmp"]


def _kernel_files(shm_size: int) -> list[str]:
    arguments = ["--proc", "/proc", "--dev", "/dev", "--dev-bind", "/dev/full", "/dev/zero"]
    arguments += [*_tmpfs("/dev/shm", shm_size, 0o1777), "--remount-ro", "/dev"]
    for path in (*HIDDEN_FILES, *HIDDEN_DIRECTORIES):
        if not os.path.exists(path) or path.startswith("/proc/1/"):
            continue
        if os.path.isdir(path):
            arguments += [*_tmpfs(path, 4096), "--remount-ro", path]
        else:
            arguments += ["--ro-bind", "/dev/null", path]
    return [*arguments, "--remount-ro", "/proc", *_tmpfs("/sys", 4096), "--remount-ro", "/sys", "--dir", "/run"]


def _mounts(launch: LaunchRequest) -> list[str]:
    check_mount_sources(launch.spec.mounts)
    arguments: list[str] = []
    for mount in launch.spec.mounts:
        arguments += ["--ro-bind", mount.source, os.path.join("/", mount.target)]
    return arguments
