"""The files of a source distribution, and where it keeps its package and tests.

Files are held in memory and never written to this host's file system.
"""

import gzip
import io
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.parser import BytesHeaderParser
from pathlib import Path, PurePosixPath

from prorl_gym.errors import ConfigError

MAX_BYTES = 64 << 20
"""Of all files together, unpacked."""
MAX_FILES = 10_000


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file."""

    data: bytes
    executable: bool = False


SourceTree = Mapping[str, SourceFile]
"""Files by their path below the root of the tree, with forward slashes."""


def read_sdist(path: Path) -> SourceTree:
    """Read a ``.tar.gz`` as in PEP 625, without its top directory.

    Links, devices, byte code, build output and repositories are left out.

    Raises:
        ConfigError: it is no such archive, is too large, or has a path that leaves it.
    """
    files: dict[str, SourceFile] = {}
    size = 0
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                if not member.isfile():
                    continue
                size += member.size
                if size > MAX_BYTES or len(files) >= MAX_FILES:
                    raise ConfigError(
                        f"{path.name}: more than {MAX_BYTES >> 20} MiB or {MAX_FILES} files.", "Take a smaller project."
                    )
                name = _below_top(member.name, path)
                stream = archive.extractfile(member)
                if name and stream is not None and not _is_excluded(name):
                    files[name] = SourceFile(stream.read(), bool(member.mode & 0o100))
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise ConfigError(f"{path.name}: cannot be read ({error}).", "Give a source distribution (.tar.gz).") from None
    return dict(sorted(files.items()))


def pack_tree(tree: SourceTree) -> bytes:
    """Return the tree as a reproducible tar.gz: the same bytes for the same files."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, file in sorted(tree.items()):
            member = tarfile.TarInfo(name)
            member.size = len(file.data)
            member.mode = 0o755 if file.executable else 0o644
            archive.addfile(member, io.BytesIO(file.data))
    return gzip.compress(plain.getvalue(), 9, mtime=0)


def _below_top(name: str, path: Path) -> str:
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise ConfigError(f"{path.name}: the path {name[:80]!r} leaves the archive.", "Do not use this file.")
    return "/".join(parts[1:])


def _is_excluded(name: str) -> bool:
    path = PurePosixPath(name)
    parents = path.parts[:-1]
    return path.suffix in _EXCLUDED_SUFFIXES or any(
        part in _EXCLUDED_DIRECTORIES or part.endswith(".egg-info") for part in parents
    )


_EXCLUDED_DIRECTORIES = frozenset({"__pycache__", ".git", ".hg", ".tox", ".nox", ".pytest_cache", "build", "dist"})
_EXCLUDED_SUFFIXES = (".pyc", ".pyo", ".so", ".pyd", ".dylib")


_SOURCE_ROOTS = ("src", "lib", "")
_TEST_DIRECTORIES = frozenset({"tests", "test", "testing"})
_NON_PACKAGES = _TEST_DIRECTORIES | {"docs", "doc", "examples", "benchmarks", "benchmark", "scripts", "tools", "tasks"}
_CONFIGURATIONS = ("pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
_ASYNC = re.compile(rb"^\s*asyncio_mode\s*=\s*[\"']?auto\b", re.MULTILINE)
_NON_MODULES = frozenset({"setup.py", "conftest.py", "noxfile.py", "tasks.py", "fabfile.py", "runtests.py", "dodo.py"})


@dataclass(frozen=True, slots=True)
class ProjectLayout:
    """Metadata of a project, and its files by kind."""

    name: str
    version: str
    metadata: bytes
    """``PKG-INFO`` as it is."""
    requires: tuple[str, ...]
    """Requirements of the package itself, verbatim, without those of extras."""
    source_root: str
    """Directory that goes on the module search path, ``""`` for the root of the tree."""
    sources: tuple[str, ...]
    """Python files of the package."""
    tests: tuple[str, ...]
    """Directories and files to give to the test runner."""
    test_files: tuple[str, ...]
    """All Python files below them, ``conftest.py`` above them included."""
    marks_async: bool = False
    """Whether its configuration lets pytest-asyncio run unmarked coroutines."""


def find_layout(tree: SourceTree) -> ProjectLayout:
    """Find the package and its tests.

    Raises:
        ConfigError: there is no metadata, no Python package or no test.
    """
    if "PKG-INFO" not in tree:
        raise ConfigError("The source distribution has no PKG-INFO.", "Take another release.")
    metadata = tree["PKG-INFO"].data
    headers = BytesHeaderParser().parsebytes(metadata)
    name, version = str(headers["Name"] or ""), str(headers["Version"] or "")
    tests = _tests(tree)
    test_files = tuple(path for path in tree if path.endswith(".py") and _is_test_file(path, tests))
    root = _source_root(tree)
    sources = tuple(path for path in _package_files(tree, root) if path not in test_files)
    if not sources:
        raise ConfigError(f"{name} {version}: no Python package was found.", "Only Python packages can be used.")
    if not tests:
        raise ConfigError(
            f"{name} {version}: its source distribution holds no tests.", "Take a project that ships them."
        )
    requires = tuple(str(line) for line in headers.get_all("Requires-Dist", []) if not re.search(r"\bextra\s*==", line))
    marks_async = any(_ASYNC.search(tree[name].data) for name in _CONFIGURATIONS if name in tree)
    return ProjectLayout(name, version, metadata, requires, root, sources, tests, test_files, marks_async)


def _source_root(tree: SourceTree) -> str:
    for root in _SOURCE_ROOTS[:-1]:
        if any(path.startswith(f"{root}/") and path.endswith(".py") for path in tree):
            packages = [path for path in _package_files(tree, root)]
            if packages and not any(path == f"{root}/__init__.py" for path in tree):
                return root
    return ""


def _package_files(tree: SourceTree, root: str) -> Iterator[str]:
    """Yield modules and packages directly below a source root, and what is in the packages."""
    prefix = f"{root}/" if root else ""
    for path in tree:
        if not path.startswith(prefix) or not path.endswith(".py"):
            continue
        first, *rest = path.removeprefix(prefix).split("/")
        if rest and first not in _NON_PACKAGES and f"{prefix}{first}/__init__.py" in tree:
            yield path
        elif not rest and first not in _NON_MODULES and not _is_test_module(first):
            yield path


def _tests(tree: SourceTree) -> tuple[str, ...]:
    """Return the topmost test directories with test modules; without any, test modules at the root or in ``src``."""
    modules = [path for path in tree if _is_test_module(PurePosixPath(path).name)]
    directories = {directory for path in modules if (directory := _test_directory(path)) is not None}
    if directories:
        return tuple(sorted(_topmost(directories)))
    return tuple(sorted(path for path in modules if path.count("/") <= 1))


def _test_directory(path: str) -> str | None:
    parts = path.split("/")[:-1]
    for depth, part in enumerate(parts):
        if part in _TEST_DIRECTORIES:
            return "/".join(parts[: depth + 1])
    return None


def _topmost(directories: Iterable[str]) -> list[str]:
    found: list[str] = []
    for directory in sorted(directories):
        if not any(directory.startswith(f"{higher}/") for higher in found):
            found.append(directory)
    return found


def _is_test_module(name: str) -> bool:
    return bool(re.fullmatch(r"test_.*\.py|.*_test\.py", name))


def _is_test_file(path: str, tests: tuple[str, ...]) -> bool:
    if any(path == test or path.startswith(f"{test}/") for test in tests):
        return True
    folder = path.rpartition("/")[0]
    above = any(not folder or test == folder or test.startswith(f"{folder}/") for test in tests)
    return path.rpartition("/")[2] == "conftest.py" and above
