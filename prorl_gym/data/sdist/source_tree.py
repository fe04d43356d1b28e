"""A source distribution: fetched from a package index, read, and searched for its package and tests.

None of its code runs on this host. ``pip download`` would build the project to learn its metadata; so the file is found
with ``unearth``, on the index that pip is configured for, and only read. Wheels run nothing when pip installs them.
Files are held in memory and never written to this host's file system.
"""

import ast
import gzip
import hashlib
import io
import os
import re
import ssl
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.parser import BytesHeaderParser
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from prorl_gym.errors import ConfigError

MAX_BYTES = 64 << 20
"""Bytes of all files, unpacked."""
MAX_FILES = 10_000
_EXCLUDED_DIRECTORIES = frozenset({"__pycache__", ".git", ".hg", ".tox", ".nox", ".pytest_cache", "build", "dist"})
_EXCLUDED_SUFFIXES = (".pyc", ".pyo", ".so", ".pyd", ".dylib")
_SOURCE_ROOTS = ("src", "lib")
_TEST_DIRECTORIES = frozenset({"tests", "test", "testing"})
_NON_PACKAGES = _TEST_DIRECTORIES | {"docs", "doc", "examples", "benchmarks", "benchmark", "scripts", "tools", "tasks"}
TEST_MODULE = re.compile(r"test_.*\.py|.*_test\.py")
"""Name of a file with tests."""
_CONFIGURATIONS = ("pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
_ASYNC = re.compile(rb"^\s*asyncio_mode\s*=\s*[\"']?auto\b", re.MULTILINE)
_NON_MODULES = frozenset({"setup.py", "conftest.py", "noxfile.py", "tasks.py", "fabfile.py", "runtests.py", "dodo.py"})
_PYPI = "https://pypi.org/simple/"
_MAX_DOWNLOAD = 32 << 20
_COMPILED = (".so", ".pyd", ".dylib")
_PIP_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class SourceFile:
    data: bytes
    executable: bool = False


SourceTree = Mapping[str, SourceFile]
"""Files by their path below the root of the tree, with forward slashes."""


def read_sdist(path: Path) -> SourceTree:
    """Read a ``.tar.gz`` as in PEP 625, without its top directory.

    Links, devices, byte code, build output and repositories are left out. Raises ``ConfigError`` if it is no such
    archive, is too large, or has a path that leaves it.
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
                parts = PurePosixPath(member.name).parts
                if member.name.startswith("/") or ".." in parts or "\0" in member.name:
                    what = f"{path.name}: the path {member.name[:80]!r} leaves the archive."
                    raise ConfigError(what, "Do not use this file.")
                name = "/".join(parts[1:])
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


def _is_excluded(name: str) -> bool:
    *folders, last = name.split("/")
    return last.endswith(_EXCLUDED_SUFFIXES) or any(
        folder in _EXCLUDED_DIRECTORIES or folder.endswith(".egg-info") for folder in folders
    )


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
    """Find the package and its tests. Raises ``ConfigError`` if there is no metadata, no Python package or no test."""
    if "PKG-INFO" not in tree:
        raise ConfigError("The source distribution has no PKG-INFO.", "Take another release.")
    metadata = tree["PKG-INFO"].data
    headers = BytesHeaderParser().parsebytes(metadata)
    name, version = str(headers["Name"] or ""), str(headers["Version"] or "")
    tests = _find_tests(tree)
    test_files = tuple(path for path in tree if path.endswith(".py") and _is_test_file(path, tests))
    roots = (root for root in _SOURCE_ROOTS if f"{root}/__init__.py" not in tree and any(_package_files(tree, root)))
    root = next(roots, "")
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


def _package_files(tree: SourceTree, root: str) -> Iterator[str]:
    """Yield modules and packages directly below a source root, and what is in the packages."""
    prefix = f"{root}/" if root else ""
    for path in tree:
        if not path.startswith(prefix) or not path.endswith(".py"):
            continue
        first, *rest = path.removeprefix(prefix).split("/")
        if rest and first not in _NON_PACKAGES and f"{prefix}{first}/__init__.py" in tree:
            yield path
        elif not rest and first not in _NON_MODULES and not TEST_MODULE.fullmatch(first):
            yield path


def _find_tests(tree: SourceTree) -> tuple[str, ...]:
    """Return the topmost test directories with test modules; without any, test modules at the root or in ``src``."""
    modules = [path for path in tree if TEST_MODULE.fullmatch(PurePosixPath(path).name)]
    directories: set[str] = set()
    for path in modules:
        folders = path.split("/")[:-1]
        depth = next((depth for depth, folder in enumerate(folders, 1) if folder in _TEST_DIRECTORIES), 0)
        directories |= {"/".join(folders[:depth])} if depth else set()
    topmost = (one for one in directories if not any(one.startswith(f"{higher}/") for higher in directories))
    return tuple(sorted(topmost)) or tuple(sorted(path for path in modules if path.count("/") <= 1))


def _is_test_file(path: str, tests: tuple[str, ...]) -> bool:
    if any(path == test or path.startswith(f"{test}/") for test in tests):
        return True
    folder = path.rpartition("/")[0]
    above = any(not folder or test == folder or test.startswith(f"{folder}/") for test in tests)
    return path.rpartition("/")[2] == "conftest.py" and above


# --- package indexes ---------------------------------------------------------------------------------------------


def fetch_sdist(requirement: str, cache: Path, index: str = "") -> Path:
    """Return the path of the source distribution of ``NAME==VERSION`` in ``cache``, downloaded once.

    ``index`` is the URL of a simple index, by default pip's. Blocks; run it in a thread. Raises ``ConfigError`` if the
    version is not exact, ``unearth`` is missing, or there is no such file.
    """
    name, equals, version = (part.strip() for part in requirement.partition("=="))
    if not (name and equals and version) or "*" in version:
        raise ConfigError(f"'{requirement[:80]}' is no exact version.", "Spell it NAME==VERSION.")
    safe_name, safe_version = (re.sub(r"[^\w.+]|_", "_", part) for part in (name, version))
    kept = cache / f"{safe_name}-{safe_version}.tar.gz"
    if kept.is_file():
        return kept
    data = _download(f"{name}=={version}", index)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=cache, delete=False) as fresh:
        fresh.write(data)
    os.replace(fresh.name, kept)
    return kept


def applicable_requirements(requirements: Sequence[str], python: str) -> list[str]:
    """Return those requirements whose markers hold in a sandbox with this Python, without their markers.

    Raises ``ConfigError`` if one is malformed, or names an address instead of an index: pip would build what is there.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    found: list[str] = []
    for line in requirements:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            raise ConfigError(f"'{line[:80]}' is no requirement.", "Take another release.") from None
        if requirement.url is not None:
            raise ConfigError(f"'{line[:80]}' is at an address of its own.", "Only what an index has can be used.")
        versions = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
        if requirement.marker is None or requirement.marker.evaluate(versions):
            requirement.marker = None
            found.append(str(requirement))
    return found


def fetch_wheels(
    requirements: Sequence[str], python: str, index: str = "", provided: Sequence[str] = ()
) -> dict[str, SourceFile]:
    """Return the unpacked pure-Python wheels of some requirements and of what these need, for Python ``3.11``, say.

    ``provided`` (``NAME==VERSION``) is in the sandbox: chosen in this version, and left out. Blocks; run it in a
    thread. Raises ``ConfigError`` if something has no pure-Python wheel for this Python, or pip failed.
    """
    wanted: list[str] = []
    missing = list(requirements)
    found: dict[str, SourceFile] = {}
    while missing:
        wanted += missing
        found = _install(wanted, python, index, provided)
        missing = [line for line in _missing_requirements(found, python) if line not in wanted]
    gone: set[str] = set()
    for name in provided:
        project, _, version = name.partition("==")
        record = found.get(f"{project.replace('-', '_').lower()}-{version}.dist-info/RECORD")
        if record is not None:
            gone.update(line.split(",")[0] for line in record.data.decode().splitlines())
    return {path: file for path, file in found.items() if path not in gone}


def _install(requirements: Sequence[str], python: str, index: str, provided: Sequence[str]) -> dict[str, SourceFile]:
    with tempfile.TemporaryDirectory(prefix="prorl-gym-wheels-") as folder:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-input"]
        command += ["--target", folder, "--only-binary", ":all:", "--platform", "any", "--abi", "none"]
        command += ["--implementation", "py", "--python-version", python, "--disable-pip-version-check"]
        command += ["--index-url", index] if index else []
        constraints = Path(folder, "constraints.txt")
        constraints.write_text("".join(f"{line}\n" for line in provided))
        command += ["--constraint", str(constraints)]
        # After `--`: a requirement from untrusted metadata must not become an option of pip.
        if why := _run_pip([*command, "--", *requirements]):
            raise ConfigError(
                f"The requirements {', '.join(requirements)[:200]} are not to be had as pure wheels: {why[:200]}",
                "Only projects whose requirements are pure Python can be used.",
            )
        constraints.unlink()
        found: dict[str, SourceFile] = {}
        for path in sorted(Path(folder).rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.suffix in _COMPILED:
                raise ConfigError(f"The wheel with {name} is compiled.", "Only pure-Python requirements can be used.")
            if path.is_file() and not path.is_symlink() and not name.startswith("bin/") and path.suffix != ".pyc":
                found[name] = SourceFile(path.read_bytes())
        return found


def _missing_requirements(packages: Mapping[str, SourceFile], python: str) -> list[str]:
    """Return what installed packages need in a sandbox and lack: pip reads markers as if for this host's Python."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    needed: list[str] = []
    there: set[str] = set()
    for path, file in packages.items():
        if re.fullmatch(r"[^/]+\.dist-info/METADATA", path):
            headers = BytesHeaderParser().parsebytes(file.data)
            there.add(canonicalize_name(str(headers["Name"])))
            needed += applicable_requirements([str(line) for line in headers.get_all("Requires-Dist", [])], python)
    return [line for line in dict.fromkeys(needed) if canonicalize_name(Requirement(line).name) not in there]


def _run_pip(command: Sequence[str]) -> str:
    """Return what went wrong, or an empty text."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"pip took more than {_PIP_SECONDS:g} s"
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    # pip warns about conflicts with the packages installed here, which this installation elsewhere cannot affect.
    return (errors or [done.stderr[-200:]])[-1] if done.returncode else ""


def _download(requirement: str, index: str) -> bytes:
    try:
        unearth: Any = import_module("unearth")
        fetchers: Any = import_module("unearth.fetchers")
    except ImportError:
        raise ConfigError(
            "Fetching source distributions needs unearth.", "Install it: pip install 'prorl-gym[data]'."
        ) from None
    configured = _pip_configuration()
    indexes = [index] if index else [configured.get("index-url", _PYPI), *configured.get("extra-index-url", "").split()]
    with fetchers.PyPIClient(verify=ssl.create_default_context(cafile=configured.get("cert"))) as session:
        finder = unearth.PackageFinder(
            session=session, index_urls=indexes, no_binary=[":all:"], ignore_compatibility=True
        )
        try:
            best = finder.find_best_match(requirement, allow_yanked=True).best
            if best is None or not best.link.filename.endswith(".tar.gz"):
                raise ConfigError(f"{requirement} has no .tar.gz on the index.", "Check name and version.")
            data = bytearray()
            with session.get_stream(best.link.url_without_fragment) as response:
                response.raise_for_status()
                for part in response.iter_bytes(1 << 16):
                    data += part
                    if len(data) > _MAX_DOWNLOAD:
                        what = f"{best.link.filename} is larger than {_MAX_DOWNLOAD >> 20} MiB."
                        raise ConfigError(what, "Take a smaller project.")
            hashes: Mapping[str, Sequence[str]] = best.link.hash_option or {}
            for name, stated in hashes.items():
                if hashlib.new(name, data).hexdigest() not in stated:
                    what = f"{requirement}: the file is not what the index states."
                    raise ConfigError(what, "Try again, or another index.")
            return bytes(data)
        except ConfigError:
            raise
        except Exception as error:  # a foreign library's own, and its HTTP client's
            raise ConfigError(
                f"{requirement} cannot be fetched: {type(error).__name__}: {str(error)[:200]}",
                "Check name, version, and the index that pip is configured for (or --index).",
            ) from None


def _pip_configuration() -> dict[str, str]:
    """Return pip's configuration from its files and the environment, which wins; empty without pip."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.splitlines()
    found: dict[str, str] = {}
    for prefix in ("global.", "install.", ":env:."):
        for line in lines:
            key, _, value = line.partition("=")
            if key.startswith(prefix) and value[:1] in "'\"":
                found[key.removeprefix(prefix)] = str(ast.literal_eval(value))
    return found
