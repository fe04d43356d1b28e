"""The writable root of a sandbox: storage, and on it a kernel overlay over an image directory or the host's /usr.

All this runs in pid 1, before its root is changed. An image is hostile: nothing is created or written through its paths
until the root has been changed to it, so that its symbolic links can only point into itself.

Changes are kept in a sized tmpfs, or on the disk below the scratch directory. One directory of a disk has no size
(project quotas take the host's root), so the guest counts what is written there (``disk_watch``). The directory is a
mount all the same: without setuid and devices, and with a detached copy for the guest that leads nowhere else.

A root without an image has the host's programs and libraries, and nothing else of the host. ``/etc`` is a short list of
files that hold no secrets, plus synthetic ones. The host's own passwd, group, hosts, resolv.conf, gitconfig, pip.conf
and profile never get in: they carry names, addresses and sometimes tokens.
"""

import errno
import os
import shutil
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.protocol import SandboxLimits
from prorl_gym.sandbox.spawner.mounts import OVERLAY_REFUSED_ERRNOS, BindMount, mount_overlay
from prorl_gym.sandbox.spawner.spawner_protocol import LaunchRequest

_PROBE_XATTR = "user.overlay.probe"
_LOCAL_DISK_FIX = "Set sandbox.scratch to a directory on a local disk (ext4, xfs, btrfs), or limits.root_on: memory."
_UNSUPPORTED_UPPER = {  # names of the kernel, and common ones
    **{"nfs": "NFS", "nfs4": "NFS", "lustre": "Lustre", "overlay": "another overlay", "gpfs": "GPFS"},
    **{"beegfs": "BeeGFS", "ceph": "CephFS", "cifs": "SMB", "smb3": "SMB", "9p": "9p", "panfs": "PanFS"},
    **{"vboxsf": "a shared folder", "squashfs": "squashfs"},
}

EXTRA_PROGRAMS = "/opt/bin"
"""Last in the PATH: has a ``python`` where the host has only a ``python3``."""
DEFAULT_EMAIL = "root@localhost"

_PROGRAM_DIRECTORIES = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")

_DIRECTORIES = {
    **dict.fromkeys(("home", "run", "var", "var/lib", "var/cache", "var/log", "opt", "opt/bin", "srv", "mnt"), 0o755),
    **dict.fromkeys(("etc", "etc/ssl", "dev"), 0o755),
    **{"root": 0o700, "tmp": 0o1777, "var/tmp": 0o1777, "proc": 0o555, "sys": 0o555},
}

# Copied, not bound, so that programs inside may replace them; each is small.
COPIED_FILES = (
    *("ld.so.cache", "ld.so.conf", "ssl/openssl.cnf", "mime.types", "services", "protocols"),
    *("debian_version", "inputrc", "magic", "localtime", "timezone", "login.defs"),
)
BOUND_DIRECTORIES = (
    *("alternatives", "ld.so.conf.d", "ssl/certs", "ca-certificates", "pki/tls/certs", "terminfo", "perl"),
)
SYNTHETIC_FILES = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost\n",
    "hostname": "sandbox\n",
    "resolv.conf": "",
    "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\nservices: files\nprotocols: files\n",
    "host.conf": "multi on\n",
    "shells": "/bin/sh\n/bin/bash\n",
    # Without it git demands an identity, refuses directories of another uid and advises about branch names. A user's
    # own file takes precedence.
    "gitconfig": (
        f"[user]\nname = root\nemail = {DEFAULT_EMAIL}\n[safe]\ndirectory = *\n[init]\ndefaultBranch = master\n"
    ),
}

# The host's directories belong to the host's root, uid nobody inside. Directories that the overlay's upper layer also
# has belong to the sandbox's root, so that files can be created and removed in them.
_OWNED_BELOW_USR = ("bin", "sbin", "lib", "include", "share", "libexec", "share/doc", "share/man")
_OWNED_LOCAL_DEPTH = 4
_OWNED_LOCAL_COUNT = 128


@dataclass(frozen=True, slots=True)
class SandboxRoot:
    """A root that is built but not entered."""

    path: str
    bind_mounts: tuple[BindMount, ...]
    """Mounts that are still to be made on it."""
    limitations: str
    """Weaknesses, as text for the operator; "" when there are none."""
    storage_fd: int | None
    """See ``_mount_storage``."""


def build_root(launch: LaunchRequest, base: str) -> SandboxRoot:
    """Build the root of a sandbox over ``base``, an empty directory.

    Raises ``SandboxError`` when the kernel is too old or the disk cannot keep a root, ``OSError`` when a mount was
    refused.
    """
    storage = _mount_storage(launch.spec.limits, base)
    limitations = describe_limitations(base)
    volatile = storage is not None
    if not launch.lower_dirs:
        os.mkdir(f"{base}/root", 0o755)
        syscalls.mount(f"{base}/root", f"{base}/root", None, syscalls.MS_BIND)  # a root must be a mount
        binds, limitation_of_usr = fill_host_root(base, volatile=volatile)
        limitations = "; ".join(filter(None, (limitation_of_usr, limitations)))
        return SandboxRoot(f"{base}/root", tuple(binds), limitations, storage)
    try:
        return SandboxRoot(mount_overlay(base, "image", launch.lower_dirs, volatile=volatile), (), limitations, storage)
    except OSError as error:
        if error.errno not in OVERLAY_REFUSED_ERRNOS:
            raise
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            f"the kernel refuses an overlay over {launch.spec.image} ({error.strerror}).",
            "It needs Linux 5.11 or newer, and an image directory on a local disk with nothing mounted below it.",
        ) from None


def check_image(launch: LaunchRequest, host_ids: tuple[int, int]) -> None:
    """Refuse an image that cannot work. Raises ``SandboxError`` (IMAGE_MISSING or IMAGE_BROKEN).

    ``host_ids``: the sandboxes' uid and gid outside of their user namespace, in which every foreign uid reads alike.
    """
    image = launch.spec.image
    if launch.backend == "apptainer-plain" and os.path.isfile(launch.lower_dirs[0] if launch.lower_dirs else ""):
        return  # a SIF, which the runtime checks by itself
    for directory in launch.lower_dirs:
        _check_directory(directory, "image" if directory == image else f"image {image}:", launch.backend, host_ids)
    shells = ("bin/bash", "usr/bin/bash", "bin/sh", "usr/bin/sh")
    if launch.lower_dirs and not any(
        os.path.lexists(f"{path}/{shell}") for path in launch.lower_dirs for shell in shells
    ):
        raise SandboxError(
            FailureKind.IMAGE_BROKEN,
            f"image {image} has no bin/bash and no bin/sh.",
            "It is not the root of a Linux system, or it was not unpacked to the end.",
        )


def _check_directory(path: str, what: str, backend: str, host_ids: tuple[int, int]) -> None:
    uid, gid = host_ids
    try:
        found = os.stat(path)
    except OSError as error:
        raise SandboxError(
            FailureKind.IMAGE_MISSING,
            f"{what} {path}: {error.strerror}.",
            f"Give the absolute path of an unpacked image that uid {uid} may read, or 'host'.",
        ) from None
    if not stat.S_ISDIR(found.st_mode):
        raise SandboxError(
            FailureKind.IMAGE_BROKEN,
            f"{what} {path} is a file, and without an image store only unpacked directories can be used.",
            f"Set sandbox.images, which unpacks SIF files, or run: apptainer build --sandbox {path}.d {path}",
        )
    if found.st_uid != os.geteuid() and backend != "apptainer-plain":  # which maps no uid
        raise SandboxError(
            FailureKind.IMAGE_BROKEN,
            f"{what} {path} is not owned by uid {uid}, as which sandboxes run.",
            f"Run: chown -hR {uid}:{gid} {path}  (or copy it: prorl-gym images import {path} --name NAME).",
        )


def check_storage(launch: LaunchRequest, base: str) -> None:
    """Refuse a disk that cannot keep a root. Call before anything is mounted: until then the table has the host's."""
    if launch.spec.limits.root_on == "memory" or launch.backend == "apptainer-plain":  # which has it there anyway
        return
    unfit = unsupported_upper(file_system_of(base))
    if unfit is not None:
        raise _upper_error(base, f"on {unfit}, which cannot take the changes of an overlay")


def _mount_storage(limits: SandboxLimits, base: str) -> int | None:
    """Mount the storage of a root over an empty directory.

    Returns a descriptor of the storage that works from any root, when it is to be counted; ``None`` when it has a size.
    Raises ``SandboxError`` when the disk cannot keep an overlay's marks.
    """
    if limits.root_on == "memory":
        options = f"mode=0755,size={limits.root_size},nr_inodes={limits.root_inodes}"
        syscalls.mount("sandbox", base, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, options)
        return None
    syscalls.mount(base, base, None, syscalls.MS_BIND)
    syscalls.restrict_mount(base, syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV)
    if not has_user_xattrs(base):
        raise _upper_error(base, "on a file system without user extended attributes, which an overlay needs")
    detached = syscalls.clone_mount(base)
    try:
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=detached)
    finally:
        os.close(detached)


def describe_limitations(base: str) -> str:
    """Return what a root on this storage lacks, as text for the operator; "" when it lacks nothing."""
    if not has_user_xattrs(base):
        return (
            "directories of the image cannot be removed and remade (tmpfs keeps no user attributes before Linux"
            " 6.6); limits.root_on: disk has them"
        )
    if os.statvfs(base).f_flag & os.ST_NOEXEC:
        return "programs written outside of /usr cannot be run: the scratch directory's disk is mounted noexec"
    return ""


def has_user_xattrs(directory: str) -> bool:
    """Whether an overlay with ``userxattr`` can mark directories here: ``rm -rf`` of an image's directory needs it."""
    try:
        os.setxattr(directory, _PROBE_XATTR, b"y")
        os.removexattr(directory, _PROBE_XATTR)
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.EPERM):
            return False
        raise
    return True


def file_system_of(path: Path | str) -> str:
    """Return the name of the file system that holds a path, as the mount table has it.

    Not by ``statfs``' magic number: ext2 to ext4 share one, and so do all FUSE file systems (``fuse.sshfs``).
    """
    device = os.stat(path).st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            fields, _, rest = line.partition(" - ")
            if fields.split(" ")[2] == numbers:
                return rest.split(" ")[0]
    return "unknown"  # a btrfs subvolume has a device number of its own


def unsupported_upper(file_system: str) -> str | None:
    """Return the common name of a file system that cannot be the upper layer of an overlay; ``None``: it may be."""
    return _UNSUPPORTED_UPPER.get(file_system) or ("FUSE" if file_system.startswith("fuse") else None)


def _upper_error(base: str, why: str) -> SandboxError:
    scratch = os.path.dirname(os.path.dirname(base))
    return SandboxError(FailureKind.SANDBOX_UNAVAILABLE, f"limits.root_on: disk: {scratch} is {why}.", _LOCAL_DISK_FIX)


def fill_host_root(base: str, *, volatile: bool = False) -> tuple[list[BindMount], str]:
    """Fill the empty ``base/root`` with everything but the host's directories, which the caller mounts onto it.

    Returns what is still to be mounted, and what is weaker than usual ("" when nothing is).
    """
    binds = fill_around_usr(f"{base}/root")
    upper = f"{base}/usr/upper"
    os.makedirs(upper)
    for name in owned_directories():
        os.mkdir(f"{upper}/{name}")
    try:
        usr = mount_overlay(base, "usr", ("/usr",), volatile=volatile)
    except OSError as error:
        if error.errno not in OVERLAY_REFUSED_ERRNOS:
            raise
        reason = f"/usr is read-only: the kernel refuses a userxattr overlay over it ({error.strerror})"
        return [*binds, BindMount("/usr", "/usr", read_only=True)], reason
    return [*binds, BindMount(usr, "/usr", read_only=False)], ""


def fill_around_usr(root: str) -> list[BindMount]:
    """Fill an empty directory with all but ``/usr``, which is left empty; return what is still to be mounted."""
    layout = host_layout()
    umask = os.umask(0)
    try:
        for name, mode in layout.directories:
            os.mkdir(f"{root}/{name}", mode)
        for name, content in layout.files:
            descriptor = os.open(f"{root}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                while content:
                    content = content[os.write(descriptor, content) :]
            finally:
                os.close(descriptor)
        for name, target in layout.links:
            os.symlink(target, f"{root}/{name}")
    finally:
        os.umask(umask)
    return list(layout.binds)


@dataclass(frozen=True, slots=True)
class HostLayout:
    """Contents of a root around ``/usr``. Names are relative to it, parents first."""

    directories: tuple[tuple[str, int], ...]
    """With their modes."""
    files: tuple[tuple[str, bytes], ...]
    links: tuple[tuple[str, str], ...]
    binds: tuple[BindMount, ...]


def host_layout() -> HostLayout:
    """Return the layout, as the host has been within the last second.

    The spawner calls this before it forks a sandbox, which then has it.
    """
    return _survey_host(int(time.monotonic()))


@lru_cache(maxsize=1)
def _survey_host(second: int) -> HostLayout:
    directories = dict(_DIRECTORIES)
    files = {f"etc/{name}": text.encode("ascii") for name, text in SYNTHETIC_FILES.items()}
    for name in COPIED_FILES:
        with suppress(OSError):  # this host has none
            files[f"etc/{name}"] = Path("/etc", name).read_bytes()
    links = {"etc/mtab": "/proc/self/mounts", "etc/os-release": "../usr/lib/os-release"}
    bound = [f"etc/{name}" for name in BOUND_DIRECTORIES if os.path.isdir(f"/etc/{name}")]
    path = ":".join(f"{place}/bin" for place in ("/usr/local", "/usr", ""))
    if not shutil.which("python", path=path) and (python := shutil.which("python3", path=path)):
        links[f"{EXTRA_PROGRAMS[1:]}/python"] = python
    for name in _PROGRAM_DIRECTORIES:
        if os.path.islink(f"/{name}"):
            links[name] = os.readlink(f"/{name}")
        elif os.path.isdir(f"/{name}"):  # a distribution that has not merged /usr
            bound.append(name)
    for name in (*bound, "usr"):
        for parent in (*reversed(Path(name).parents[:-1]), name):
            directories.setdefault(str(parent), 0o755)
    binds = tuple(BindMount(f"/{name}", f"/{name}", read_only=True) for name in bound)
    return HostLayout(tuple(directories.items()), tuple(files.items()), tuple(links.items()), binds)


@cache
def owned_directories() -> tuple[str, ...]:
    """Return the directories below ``/usr`` that the sandbox's root has to own, parents first.

    Looked up once: the spawner calls this before it forks the first sandbox.
    """
    usr = Path("/usr")
    found = [usr / name for name in (*_OWNED_BELOW_USR, "local") if _is_plain_directory(usr / name)]
    level = [path for path in found if path.name == "local"]
    for _ in range(_OWNED_LOCAL_DEPTH - 1):
        level = [path for parent in level for path in sorted(parent.glob("*")) if _is_plain_directory(path)]
        found += level
    return tuple(str(path.relative_to(usr)) for path in found[:_OWNED_LOCAL_COUNT])


def _is_plain_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
