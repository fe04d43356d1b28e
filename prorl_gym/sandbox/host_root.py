"""The host-``/usr`` root: the host's programs and libraries, and nothing else of the host.

``/etc`` is a short list of files that hold no secrets, plus synthetic ones. The host's own passwd, group, hosts,
resolv.conf, gitconfig, pip.conf and profile never get in: they carry names, addresses and sometimes tokens.
"""

import os
import shutil
from functools import cache
from pathlib import Path

from prorl_gym.sandbox.mounts import OVERLAY_REFUSED, Graft, mount_overlay

PROGRAMS = "/opt/bin"
"""Last in the PATH: what a host may lack and agents expect."""
EMAIL = "root@localhost"

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
    # What git otherwise asks for, refuses (directories of another uid) or advises about. A user's own goes before it.
    "gitconfig": f"[user]\nname = root\nemail = {EMAIL}\n[safe]\ndirectory = *\n[init]\ndefaultBranch = master\n",
}

# The host's directories belong to the host's root, which is nobody inside. Where the overlay's upper layer brings the
# directory too, it belongs to the sandbox's root: new files can then be made there, and old ones removed.
_OWNED_BELOW_USR = ("bin", "sbin", "lib", "include", "share", "libexec", "share/doc", "share/man")
_OWNED_LOCAL_DEPTH = 4
_OWNED_LOCAL_COUNT = 128


def furnish(base: str, *, volatile: bool = False) -> tuple[list[Graft], str]:
    """Fill ``base/root`` with everything but the host's directories, which are returned as grafts.

    Args:
        base: the storage; its subdirectory ``root`` is empty.
        volatile: see ``mount_overlay``.

    Returns:
        What is still to be mounted, and what is weaker than usual ("" when nothing is).
    """
    grafts = furnish_around_usr(f"{base}/root")
    usr, detail = _writable_usr(base, volatile=volatile)
    return [*grafts, usr], detail


def furnish_around_usr(root: str) -> list[Graft]:
    """Fill an empty directory with all but ``/usr``, which is left empty; return what is still to be mounted."""
    for name, mode in _EMPTY_DIRECTORIES.items():
        os.mkdir(f"{root}/{name}")
        os.chmod(f"{root}/{name}", mode)
    grafts = _fill_etc(root)
    if python := _python_without_version():
        os.symlink(python, f"{root}{PROGRAMS}/python")
    for name in _PROGRAM_DIRECTORIES:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
        elif os.path.isdir(f"/{name}"):  # a distribution that has not merged /usr
            os.mkdir(f"{root}/{name}")
            grafts.append(Graft(f"/{name}", f"/{name}", read_only=True))
    os.mkdir(f"{root}/usr")
    return grafts


def _fill_etc(root: str) -> list[Graft]:
    for name, text in SYNTHETIC_FILES.items():
        Path(root, "etc", name).write_text(text, encoding="ascii")
    for name in COPIED_FILES:
        if os.path.isfile(f"/etc/{name}") and os.access(f"/etc/{name}", os.R_OK):
            Path(root, "etc", name).write_bytes(Path("/etc", name).read_bytes())
    os.symlink("/proc/self/mounts", f"{root}/etc/mtab")
    os.symlink("../usr/lib/os-release", f"{root}/etc/os-release")
    bound = [f"/etc/{name}" for name in BOUND_DIRECTORIES if os.path.isdir(f"/etc/{name}")]
    for name in bound:
        os.makedirs(f"{root}{name}")
    return [Graft(name, name, read_only=True) for name in bound]


def _writable_usr(base: str, *, volatile: bool) -> tuple[Graft, str]:
    upper = f"{base}/usr/upper"
    os.makedirs(upper)
    for name in owned_directories():
        os.mkdir(f"{upper}/{name}")
    try:
        return Graft(mount_overlay(base, "usr", ("/usr",), volatile=volatile), "/usr", read_only=False), ""
    except OSError as error:
        if error.errno not in OVERLAY_REFUSED:
            raise
        detail = f"/usr is read-only: the kernel refuses a userxattr overlay over it ({error.strerror})"
        return Graft("/usr", "/usr", read_only=True), detail


@cache
def _python_without_version() -> str | None:
    """Return the program that ``python`` shall be; ``None``: the host has a ``python``, or no ``python3``."""
    path = ":".join(f"{place}/bin" for place in ("/usr/local", "/usr", ""))
    return None if shutil.which("python", path=path) else shutil.which("python3", path=path)


@cache
def owned_directories() -> tuple[str, ...]:
    """Return the directories below ``/usr`` that the sandbox's root shall own, parents first.

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
