"""The host-``/usr`` root: the host's programs and libraries, and nothing else of the host.

``/etc`` is a short list of files that hold no secrets, plus synthetic ones. The host's own passwd, group, hosts,
resolv.conf, gitconfig, pip.conf and profile never get in: they carry names, addresses and sometimes tokens.
"""

import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from prorl_gym.sandbox.spawner.mounts import OVERLAY_REFUSED_ERRNOS, BindMount, mount_overlay

EXTRA_PROGRAMS = "/opt/bin"
"""Last in the PATH: has a ``python`` where the host has only a ``python3``."""
DEFAULT_EMAIL = "root@localhost"

_PROGRAM_DIRECTORIES = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")

_EMPTY_DIRECTORIES = {
    "home": 0o755,
    "root": 0o700,
    "run": 0o755,
    "tmp": 0o1777,
    "var": 0o755,
    "var/tmp": 0o1777,
    "var/lib": 0o755,
    "var/cache": 0o755,
    "var/log": 0o755,
    "opt": 0o755,
    "opt/bin": 0o755,
    "srv": 0o755,
    "mnt": 0o755,
    "etc": 0o755,
    "etc/ssl": 0o755,
    "dev": 0o755,
    "proc": 0o555,
    "sys": 0o555,
}

# Copied, not bound, so that programs inside may replace them; each is small.
COPIED_FILES = (
    "ld.so.cache",
    "ld.so.conf",
    "ssl/openssl.cnf",
    "mime.types",
    "services",
    "protocols",
    "debian_version",
    "inputrc",
    "magic",
    "localtime",
    "timezone",
    "login.defs",
)

BOUND_DIRECTORIES = (
    "alternatives",
    "ld.so.conf.d",
    "ssl/certs",
    "ca-certificates",
    "pki/tls/certs",
    "terminfo",
    "perl",
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


def fill_host_root(base: str, *, volatile: bool = False) -> tuple[list[BindMount], str]:
    """Fill ``base/root`` with everything but the host's directories, which the caller mounts onto it.

    Args:
        base: the storage; its subdirectory ``root`` is empty.
        volatile: see ``mount_overlay``.

    Returns:
        What is still to be mounted, and what is weaker than usual ("" when nothing is).
    """
    binds = fill_around_usr(f"{base}/root")
    usr, limitation = _mount_usr(base, volatile=volatile)
    return [*binds, usr], limitation


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
    """What a root has around ``/usr``. Names are relative to it, parents first."""

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
    directories = dict(_EMPTY_DIRECTORIES)
    files = {f"etc/{name}": text.encode("ascii") for name, text in SYNTHETIC_FILES.items()}
    for name in COPIED_FILES:
        with suppress(OSError):  # this host has none
            files[f"etc/{name}"] = Path("/etc", name).read_bytes()
    links = {"etc/mtab": "/proc/self/mounts", "etc/os-release": "../usr/lib/os-release"}
    bound = [f"etc/{name}" for name in BOUND_DIRECTORIES if os.path.isdir(f"/etc/{name}")]
    if python := _unversioned_python():
        links[f"{EXTRA_PROGRAMS[1:]}/python"] = python
    for name in _PROGRAM_DIRECTORIES:
        if os.path.islink(f"/{name}"):
            links[name] = os.readlink(f"/{name}")
        elif os.path.isdir(f"/{name}"):  # a distribution that has not merged /usr
            bound.append(name)
    for name in (*(parent for place in bound for parent in _parents(place)), *bound, "usr"):
        directories.setdefault(name, 0o755)
    binds = tuple(BindMount(f"/{name}", f"/{name}", read_only=True) for name in bound)
    return HostLayout(tuple(directories.items()), tuple(files.items()), tuple(links.items()), binds)


def _parents(name: str) -> list[str]:
    """Return the directories above a relative path, from the top."""
    return [str(parent) for parent in reversed(Path(name).parents[:-1])]


def _mount_usr(base: str, *, volatile: bool) -> tuple[BindMount, str]:
    """Return how ``/usr`` is to be mounted: as a writable overlay, or read-only with the reason."""
    upper = f"{base}/usr/upper"
    os.makedirs(upper)
    for name in owned_directories():
        os.mkdir(f"{upper}/{name}")
    try:
        return BindMount(mount_overlay(base, "usr", ("/usr",), volatile=volatile), "/usr", read_only=False), ""
    except OSError as error:
        if error.errno not in OVERLAY_REFUSED_ERRNOS:
            raise
        reason = f"/usr is read-only: the kernel refuses a userxattr overlay over it ({error.strerror})"
        return BindMount("/usr", "/usr", read_only=True), reason


def _unversioned_python() -> str | None:
    """Return the program that ``python`` links to; ``None``: the host has a ``python``, or no ``python3``."""
    path = ":".join(f"{place}/bin" for place in ("/usr/local", "/usr", ""))
    return None if shutil.which("python", path=path) else shutil.which("python3", path=path)


@cache
def owned_directories() -> tuple[str, ...]:
    """Return the directories below ``/usr`` that the sandbox's root has to own, parents first.

    Looked up once: the spawner calls this before it forks the first sandbox.
    """
    found = [name for name in _OWNED_BELOW_USR if _is_plain_directory(f"/usr/{name}")]
    level = ["local"] if _is_plain_directory("/usr/local") else []
    for _ in range(_OWNED_LOCAL_DEPTH):
        found += level
        level = [
            f"{parent}/{entry.name}"
            for parent in level
            for entry in _entries(f"/usr/{parent}")
            if entry.is_dir(follow_symlinks=False)
        ]
    return tuple(found[:_OWNED_LOCAL_COUNT])


def _is_plain_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _entries(path: str) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(path) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []
