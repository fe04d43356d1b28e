"""Where a source distribution keeps its package and its tests, and what it says about itself."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email.parser import BytesHeaderParser
from pathlib import PurePosixPath

from prorl_gym.environments.swe.sdist.tree import Tree
from prorl_gym.errors import ConfigError

_SOURCE_ROOTS = ("src", "lib", "")
_TEST_DIRECTORIES = frozenset({"tests", "test", "testing"})
_NO_PACKAGES = _TEST_DIRECTORIES | {"docs", "doc", "examples", "benchmarks", "benchmark", "scripts", "tools", "tasks"}
_CONFIGURATIONS = ("pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
_ASYNC = re.compile(rb"^\s*asyncio_mode\s*=\s*[\"']?auto\b", re.MULTILINE)
_NO_MODULES = frozenset({"setup.py", "conftest.py", "noxfile.py", "tasks.py", "fabfile.py", "runtests.py", "dodo.py"})


@dataclass(frozen=True, slots=True)
class Layout:
    """What was found."""

    name: str
    version: str
    metadata: bytes
    """``PKG-INFO`` as it is."""
    requires: tuple[str, ...]
    """Requirements of the package itself, as it spells them; those of extras are not among them."""
    source_root: str
    """Directory that goes on the module search path, ``""`` for the root of the tree."""
    sources: tuple[str, ...]
    """Python files of the package."""
    tests: tuple[str, ...]
    """Directories and files to give to the test runner."""
    test_files: tuple[str, ...]
    """All Python files below them, ``conftest.py`` above them included."""
    marks_async: bool = False
    """Whether its configuration lets pytest-asyncio run coroutines that bear no mark."""


def find_layout(tree: Tree) -> Layout:
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
    return Layout(name, version, metadata, requires, root, sources, tests, test_files, marks_async)


def _source_root(tree: Tree) -> str:
    for root in _SOURCE_ROOTS[:-1]:
        if any(path.startswith(f"{root}/") and path.endswith(".py") for path in tree):
            packages = [path for path in _package_files(tree, root)]
            if packages and not any(path == f"{root}/__init__.py" for path in tree):
                return root
    return ""


def _package_files(tree: Tree, root: str) -> Iterator[str]:
    """Yield modules and packages directly below a source root, and what is in the packages."""
    prefix = f"{root}/" if root else ""
    for path in tree:
        if not path.startswith(prefix) or not path.endswith(".py"):
            continue
        first, *rest = path.removeprefix(prefix).split("/")
        if rest and first not in _NO_PACKAGES and f"{prefix}{first}/__init__.py" in tree:
            yield path
        elif not rest and first not in _NO_MODULES and not _is_test_module(first):
            yield path


def _tests(tree: Tree) -> tuple[str, ...]:
    """The highest directories of tests that hold test modules; without any, test modules at the root or in ``src``."""
    modules = [path for path in tree if _is_test_module(PurePosixPath(path).name)]
    directories = {directory for path in modules if (directory := _test_directory(path)) is not None}
    if directories:
        return tuple(sorted(_highest(directories)))
    return tuple(sorted(path for path in modules if path.count("/") <= 1))


def _test_directory(path: str) -> str | None:
    parts = path.split("/")[:-1]
    for depth, part in enumerate(parts):
        if part in _TEST_DIRECTORIES:
            return "/".join(parts[: depth + 1])
    return None


def _highest(directories: Iterable[str]) -> list[str]:
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
