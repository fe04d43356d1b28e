"""Reducing an agent's patch to the repair that is graded.

Left out, and counted: edits to tests and to the configuration of their runner, modules that would be imported instead
of the runner's or the standard library's (``_ShadowedModules``), edits to files that the image itself changed or added
(they belong to its build), binary files, symbolic links, submodules, single files too large for a repair. A patch that
is not well-formed, or still huge, is refused as a whole. These rules go by names, so a file that the gold patch changes
counts in any case, unless it is a hidden test.
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from prorl_gym.environments.swe.git_patch import FileEdit, MalformedPatchError, read_patch, write_patch
from prorl_gym.environments.swe.swe_row import HIDDEN_FROM_AGENT, SweTask, TestPlan

MAX_RAW = 4 << 20
"""Bytes of a patch as taken from the sandbox."""
MAX_FILE = 512 << 10
"""Bytes of one file's lines in it."""
MAX_PATCH = 1 << 20
"""Bytes of the reduced patch."""
MAX_FILES = 200
_MAX_RAW_FILES = 10_000

_PLAIN = (b"", b"100644", b"100755")
_SYMLINK, _SUBMODULE = b"120000", b"160000"

_TEST_DIRECTORIES = frozenset({"tests", "__tests__"})
_TEST_ROOTS = frozenset({"test", "testing", "spec"})
_TEST_FILES = re.compile(
    r"(test_.*|.*_test|tests|conftest)\.py|.*_test\.go|.*\.(test|spec)\.[cm]?[jt]sx?|.*Tests?\.(java|kt|scala|cs)"
)
_TEST_FOLDER = re.compile("(.*[-_])?tests?([-_].*)?|testing|testsuite|specs?|__tests__", re.IGNORECASE)
_RUNNER_FILES = re.compile(
    r"tox\.ini|\.?pytest\.(ini|toml)|(site|user)customize\.py|.*\.pth|\.coveragerc|noxfile\.py|"
    r"(jest|vite|vitest)\.config\..*|\.mocharc(\..*)?"
)
_METADATA = re.compile(r".*\.(egg-info|dist-info|egg)", re.IGNORECASE)
"""Metadata of installed packages: it names plug-ins, and Python finds it in the working directory."""

_CHANGED = re.compile(r"^(?:---|\+\+\+) (?:\"?[ab]/)([^\t\n\"]+)", re.MULTILINE)


_ROOTS = ("", "src", "lib", "python")
"""Directories that commonly are on the path; an installation in place adds one of them."""

_ANYWHERE = re.compile(r"(?:sitecustomize|usercustomize|prorl_(?!gym\b).*)(?:\..*)?")
"""Modules that Python imports by itself, and our plug-in."""

# Still in interpreters older than ours.
_REMOVED_STDLIB = frozenset({
    "_bootlocale", "_dummy_thread",
    "aifc", "asynchat", "asyncore", "audioop", "binhex", "cgi", "cgitb", "chunk", "crypt",
    "distutils", "dummy_threading", "formatter", "imghdr", "imp", "lib2to3", "macpath", "mailcap", "msilib", "nis",
    "nntplib", "ossaudiodev", "parser", "pipes", "smtpd", "sndhdr", "spwd", "sunau", "symbol", "telnetlib",
    "uu", "xdrlib",
})  # fmt: skip
_STDLIB = (sys.stdlib_module_names | _REMOVED_STDLIB) - {"test"}  # a common name of scripts, not used for running tests
_RUNNER = re.compile(
    r"_?pytest(?:_.*)?|_hypothesis.*|_distutils_hack|_virtualenv|_sysconfigdata.*|unittest|doctest|"
    r"pluggy|iniconfig|packaging|pygments|exceptiongroup|tomli|toml|colorama|attrs?|py|six|typing_extensions|"
    r"importlib_metadata|zipp|more_itertools|atomicwrites|wcwidth|pathlib2|argcomplete|pkg_resources|setuptools|"
    r"coverage|xdist|execnet|hypothesis|anyio|nose"
)
_IMPORTED = re.compile(r"[^.]+(?:\..*)?\.(?:py|pyc|so)")

_PYTHONPATH = re.compile(r"PYTHONPATH=([^\s;&|]+)")
_DIRECTORY = re.compile(r"(?:^|[\s;&|(])cd\s+([^\s;&|]+)")


@dataclass(frozen=True, slots=True)
class FilteredPatch:
    """What is left of an agent's patch."""

    patch: bytes
    files: tuple[str, ...]
    """Paths that it touches, in its order."""
    dropped: Mapping[str, int]
    """How many paths were left out, by the reason."""
    refused: str = ""
    """Why nothing is left of it, when it was refused as a whole."""

    @property
    def empty_reason(self) -> str:
        """Why the patch is empty."""
        if self.refused:
            return self.refused
        reasons = ", ".join(sorted(self.dropped))
        return f"empty patch: it only touches what is not graded ({reasons})" if reasons else "empty patch"


def filter_patch(raw: bytes, task: SweTask, dirty: Collection[str] = ()) -> FilteredPatch:
    """Return the part of a patch that counts.

    Args:
        raw: as taken from the agent's sandbox.
        task: knows its tests, and by its gold patch which files with a test-like name are none.
        dirty: see ``BaseState.dirty``.
    """
    if len(raw) > MAX_RAW:
        return _refused_patch(f"patch larger than {MAX_RAW >> 20} MiB")
    if raw.count(b"\ndiff --git ") > _MAX_RAW_FILES:  # other lines begin with a mark
        return _refused_patch(f"patch of more than {_MAX_RAW_FILES} files")
    try:
        edits = read_patch(raw)
    except MalformedPatchError as complaint:
        return _refused_patch(f"malformed patch: {complaint}")
    reasons = _ExclusionRules(task, dirty)
    bad: dict[bytes, str] = {}
    for edit in edits:
        if (reason := reasons.reason_for(edit)) is not None:
            bad[edit.path] = reason  # of a file that became a link, both halves
    kept = [edit for edit in edits if edit.path not in bad and edit.has_changes]
    if len({edit.path for edit in kept}) != len(kept):
        return _refused_patch("malformed patch: a file is changed twice")
    dropped = dict(Counter(bad.values()))
    patch = write_patch(kept)
    if len(patch) > MAX_PATCH:
        return _refused_patch(f"patch larger than {MAX_PATCH >> 20} MiB", dropped)
    if len(kept) > MAX_FILES:
        return _refused_patch(f"patch of more than {MAX_FILES} files", dropped)
    return FilteredPatch(patch, tuple(os.fsdecode(edit.path) for edit in kept), dropped)


def is_test_path(path: str) -> bool:
    """Whether a path is a test, or configures the runner, by its name alone."""
    *directories, name = PurePosixPath(path).parts
    if _TEST_FILES.fullmatch(name) or _RUNNER_FILES.fullmatch(name):
        return True
    if any(_METADATA.fullmatch(part) for part in (*directories, name)):
        return True
    # `test` below a package may be its own code (django/test); at the root it is not.
    return not (_TEST_DIRECTORIES.isdisjoint(directories) and _TEST_ROOTS.isdisjoint(directories[:1]))


def changed_paths(patch: str) -> frozenset[str]:
    """Return the paths that a trusted patch names."""
    return frozenset(path for path in _CHANGED.findall(patch))


class _ExclusionRules:
    """Why a file is left out."""

    def __init__(self, task: SweTask, dirty: Collection[str]) -> None:
        tests = task.tests
        self._tests = frozenset(tests.files) | changed_paths(tests.patch)
        self._removed = tuple(tests.removed)
        self._test_folders = {folder for path in self._tests if (folder := _test_folder(path))}
        self._repaired = changed_paths(task.gold_patch)
        self._shadows = _ShadowedModules(tests, task.workdir, self._repaired)
        self._dirty = tuple(dirty)
        self._hidden = HIDDEN_FROM_AGENT.get(task.source, ())

    def reason_for(self, edit: FileEdit) -> str | None:
        path = os.fsdecode(edit.path)
        if _unsafe(path):
            return "unsafe path"
        modes = (edit.old_mode, edit.new_mode)
        if _SUBMODULE in modes:
            return "submodule"
        if _SYMLINK in modes or any(mode not in _PLAIN for mode in modes):
            return "symbolic link"
        if edit.binary:
            return "binary"
        if _within(path, self._hidden) or (path not in self._repaired and _within(path, self._dirty)):
            return "changed by the image"
        if self._is_test(path, edit):
            return "test"
        if edit.size > MAX_FILE:
            return "large"
        return "binary" if any(b"\0" in line for hunk in edit.hunks for line in hunk.lines) else None

    def _is_test(self, path: str, edit: FileEdit) -> bool:
        if path in self._tests or _within(path, self._removed):
            return True
        if path in self._repaired:
            return False
        if _within(path, self._test_folders):  # data that the hidden tests read, for example
            return True
        shadows = self._shadows.is_shadowing_anywhere(path) or (
            edit.kind == "create" and self._shadows.is_shadowing_if_new(path)
        )
        return shadows or is_test_path(path)


def _test_folder(path: str) -> str:
    """Return the innermost directory above a hidden test that is named after tests, or an empty text."""
    folders = path.split("/")[:-1]
    while folders and not _TEST_FOLDER.fullmatch(folders[-1]):
        folders.pop()
    return "/".join(folders)


def _unsafe(path: str) -> bool:
    parts = path.split("/")
    return "\0" in path or any(part in ("", ".", "..") or part.casefold() == ".git" for part in parts)


def _within(path: str, places: Iterable[str]) -> bool:
    return any(path == place or path.startswith(f"{place.rstrip('/')}/") for place in places)


def _refused_patch(why: str, dropped: Mapping[str, int] | None = None) -> FilteredPatch:
    return FilteredPatch(b"", (), dropped or {}, why)


class _ShadowedModules:
    """Finds modules that a patch would put before the interpreter's own and the test runner's.

    ``python -m pytest`` looks into the working directory first, and directories named in ``PYTHONPATH`` also come
    before the standard library: everything that runs a test would import a new ``json.py`` there instead of the real
    one. Only its name and place identify such a file. Files of the base tree do not count.

    Args:
        plan: its commands put directories on Python's path.
        workdir: the repository.
        repaired: paths that the gold patch changes; further modules of a package among them are part of a repair.
    """

    def __init__(self, plan: TestPlan, workdir: str, repaired: Collection[str]) -> None:
        named = _path_directories(f"{plan.build}\n{plan.command}", workdir)
        self._roots = tuple(dict.fromkeys([*_ROOTS, *named]))
        self._repaired = tuple(repaired)

    def is_shadowing_anywhere(self, path: str) -> bool:
        """Whether a path is such a module wherever it is, be it new or not."""
        return any(_ANYWHERE.fullmatch(part) for part in path.split("/"))

    def is_shadowing_if_new(self, path: str) -> bool:
        """Whether a new file is such a module."""
        return any(self._is_shadowing_below(root, path) for root in self._roots)

    def _is_shadowing_below(self, root: str, path: str) -> bool:
        prefix = f"{root}/" if root else ""
        if not path.startswith(prefix):
            return False
        first, *rest = path.removeprefix(prefix).split("/")
        if rest and any(repaired.startswith(f"{prefix}{first}/") for repaired in self._repaired):
            return False
        name = PurePosixPath(first).stem if rest else first.split(".")[0]
        if _RUNNER.fullmatch(name):
            return True
        # Without __init__ a directory loses against a module later on the path.
        module = rest[0] if len(rest) == 1 and rest[0].split(".")[0] == "__init__" else "" if rest else first
        return name in _STDLIB and _IMPORTED.fullmatch(module) is not None


def _path_directories(commands: str, workdir: str) -> Iterator[str]:
    """Yield directories of the repository that commands put on Python's path or go to."""
    for value in _PYTHONPATH.findall(commands):
        yield from _inside(value.split(":"), workdir)
    yield from _inside(_DIRECTORY.findall(commands), workdir)


def _inside(places: Iterable[str], workdir: str) -> Iterator[str]:
    for place in places:
        path = re.sub("[\"']", "", place)
        for start in ("$PWD", "${PWD}", "$(pwd)", workdir):
            if path == start or path.startswith(f"{start}/"):
                path = path.removeprefix(start).removeprefix("/")
                break
        path = str(PurePosixPath(path))
        if not path.startswith(("/", "..", "$")):
            yield "" if path == "." else path
