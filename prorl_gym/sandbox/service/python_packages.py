"""IPython (and pytest) for images that lack it: directories of pure-Python packages, mounted read-only into sandboxes.

The python tool's worker uses IPython when the sandbox's python is new enough (see ``REQUIRES`` in the directory), and
its own console of the standard library otherwise. A directory brings the bytecode of this host's interpreters: no
process inside can write there, and compiling at every start would take half a second.
"""

import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from prorl_gym.errors import ConfigError
from prorl_gym.sandbox.protocol import Mount

log = logging.getLogger(__name__)
IPYTHON_TARGET = "/.prorl/python"
"""Where the worker looks for it, inside; below the root, where every backend can make a directory."""
IPYTHON = "ipython"
_NAME = re.compile(r"^[A-Za-z0-9._-]+")
_COMPILED = (".so", ".pyd", ".dylib")
_NOT_NEEDED = frozenset({"jedi", "parso"})
"""IPython completes with them what is typed; no cell needs that, and jedi alone has 5,600 files."""
_BUILDING = ".building-"
_UNUSED_SECONDS = 30 * 86400
"""How long a copy is kept after the start of the last service that used it."""
_SERIES = ("python3", *(f"python3.{minor}" for minor in range(10, 16)))
_PATH = "/usr/local/bin:/usr/bin:/bin"
_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class PackageSet:
    """A package with everything that it needs, as installed here."""

    name: str
    """Normalised."""
    distributions: tuple[Distribution, ...]
    version: str
    """Version of the package itself."""
    requires_python: str
    """The oldest Python that it runs on, as in ``3.11``."""

    @classmethod
    def find_installed(cls, name: str = IPYTHON) -> "PackageSet":
        """Look a package up. Raises ``ConfigError`` when it is not installed here."""
        packages = sorted(_dependency_closure(name), key=lambda package: _normalize_name(package.name))
        itself = next(package for package in packages if _normalize_name(package.name) == name)
        stated = itself.metadata["Requires-Python"] if "Requires-Python" in itself.metadata else ""
        required = re.search(r">=\s*(\d+\.\d+)", stated)
        return cls(name, tuple(packages), itself.version, required.group(1) if required else "3.11")

    def content_key(self) -> str:
        """Return a name of the contents: versions, and the interpreters that compiled them."""
        lines = [f"{package.name}=={package.version}" for package in self.distributions]
        text = "\n".join([*lines, *host_pythons()])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def packages_mount(cache: Path, uid: int, package: str = IPYTHON, target: str = IPYTHON_TARGET) -> Mount:
    """Return a mount of a pure-Python package with what it needs, copied and compiled once from here into ``cache``.

    ``package`` is its normalised name. Blocks for seconds the first time: run it in a thread. Raises ``ConfigError``
    when it is not installed here, or the cache cannot be used, for example since ``uid``, the sandboxes', cannot reach
    it.
    """
    packages = PackageSet.find_installed(package)
    place = cache.absolute() / f"{package}-{packages.content_key()}"
    try:
        if not place.is_dir():
            _ensure_copy(packages, place)
        with suppress(PermissionError):  # another user's, shared with us
            os.utime(place)
    except OSError as error:
        raise _cache_error(package, cache, f"{error.filename or place}: {error.strerror}") from None
    if closed := find_inaccessible(place, uid):
        raise _cache_error(package, cache, f"{closed} is closed to the sandboxes' uid {uid}")
    return Mount(str(place), target)


def _ensure_copy(packages: PackageSet, place: Path) -> None:
    """Make the copy. Of concurrent callers, in any number of processes, one makes it and the others wait."""
    missing = [path for path in (place.parent, *place.parent.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        path.chmod(0o755)  # whatever the umask: another uid has to pass
    with open(place.parent / f".{place.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            _build_copy(packages, place)


def _build_copy(packages: PackageSet, place: Path) -> None:
    """Build under another name, then rename: a torn copy is never used. Remove copies that were not used in long."""
    for torn in place.parent.glob(f"{_BUILDING}{place.name}-*"):  # left by a killed process, since we hold the lock
        shutil.rmtree(torn, ignore_errors=True)
    building = Path(tempfile.mkdtemp(dir=place.parent, prefix=f"{_BUILDING}{place.name}-"))
    try:
        for file in (file for package in packages.distributions for file in package.files or ()):
            if ".." in file.parts or file.suffix == ".pyc" or file.parts[0].endswith(".data"):
                continue  # scripts and man pages lie outside of site-packages
            source = Path(os.fspath(file.locate()))
            destination = building.joinpath(*file.parts)
            if source.is_file():
                destination.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, destination)
        (building / "REQUIRES").write_text(packages.requires_python)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
            list(workers.map(partial(_compile_tree, building), host_pythons()))  # its errors are raised here
        for path in (building, *building.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        os.sync()  # or a crash of the machine could leave the name with empty files below it
        building.rename(place)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    for copy in place.parent.glob(f"{packages.name}-*"):  # those of other installations
        with suppress(OSError):  # another service is removing it
            if time.time() - copy.stat().st_mtime > _UNUSED_SECONDS:
                copy.rename(aside := place.parent / f"{_BUILDING}{copy.name}-old")  # gone at once for other services
                shutil.rmtree(aside, ignore_errors=True)


def find_inaccessible(place: Path, uid: int) -> Path | None:
    """Return the topmost directory on the way that a uid may not enter."""
    for path in reversed((place, *place.parents)):
        found = path.stat()
        if not found.st_mode & (0o100 if found.st_uid == uid else 0o001):
            return path
    return None


def _cache_error(root: str, cache: Path, what: str) -> ConfigError:
    return ConfigError(
        f"the sandboxes' {_display_name(root)} cannot be kept in {cache}: {what}.",
        "Set sandbox.cache (or PRORL_GYM_CACHE) to a directory on a local disk that this uid may enter.",
    )


def _dependency_closure(root: str) -> Iterator[Distribution]:
    """Yield a distribution and what it needs, compiled packages left out: IPython and pytest do without them."""
    waiting, seen = [root], set(_NOT_NEEDED)
    while waiting:
        name = waiting.pop()
        if _normalize_name(name) in seen:
            continue
        seen.add(_normalize_name(name))
        try:
            package = distribution(name)
        except PackageNotFoundError:
            if name == root:
                spelling = _display_name(root)
                fix = f"Run `pip install {spelling.lower()}`."
                raise ConfigError(f"{spelling} is not installed next to prorl-gym.", fix) from None
            continue  # needed elsewhere only (another platform, another Python)
        if any(file.suffix in _COMPILED for file in package.files or ()):
            continue
        yield package
        needed = (line for line in package.requires or () if "extra ==" not in line)
        waiting += [found.group() for line in needed if (found := _NAME.match(line))]


def _display_name(root: str) -> str:
    return "IPython" if root == IPYTHON else root


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def host_pythons() -> tuple[str, ...]:
    """Return the paths of this interpreter and of the system's, each once."""
    found = filter(None, (shutil.which(name, path=_PATH) for name in _SERIES))
    return tuple(dict.fromkeys(map(os.path.realpath, (sys.executable, *found))))


def _compile_tree(tree: Path, python: str) -> bool:
    """Compile every module of a tree, which is never changed (so ``unchecked-hash``); whether that interpreter runs."""
    compiled = ("-m", "compileall", "-q", "-f", "--invalidation-mode", "unchecked-hash", str(tree))
    try:
        done = subprocess.run(
            [python, "-I", *compiled], stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.info("no bytecode from %s for the sandboxes' IPython: %s", python, error)
        return False
    return done.returncode in (0, 1)  # 1: a module that is for newer interpreters only
