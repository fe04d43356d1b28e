"""What of an agent's patch is graded: the repair alone.

Left out, and counted: edits to tests and to what steers their runner, modules that would be imported instead of the
runner's or the standard library's (``shadows``), edits to files that the image changed or added itself
(they belong to its build), binary files, symbolic links, submodules, single files of a size that no repair has. A
patch that is not well-formed, or still huge, is refused as a whole. Names only tell so much: a file that the gold
patch changes counts, unless it is a hidden test.
"""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from prorl_gym.environments.swe.diffs import FileEdit, MalformedPatch, read_patch, write_patch
from prorl_gym.environments.swe.public_rows import HIDDEN
from prorl_gym.environments.swe.shadows import Shadows
from prorl_gym.environments.swe.task import SweTask

MAX_RAW = 4 << 20
"""Bytes of a patch as it comes out of the sandbox."""
MAX_FILE = 512 << 10
"""Bytes of the lines of one file in it."""
MAX_PATCH = 1 << 20
"""Bytes of what is graded."""
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
"""Of installed packages: it names plug-ins, and is found in the working directory."""

_CHANGED = re.compile(r"^(?:---|\+\+\+) (?:\"?[ab]/)([^\t\n\"]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CleanPatch:
    """What is left of an agent's patch."""

    patch: bytes
    files: tuple[str, ...]
    """Paths that it touches, in its order."""
    dropped: Mapping[str, int]
    """How many paths were left out, by the reason."""
    refused: str = ""
    """Why nothing is left of it, when it was refused as a whole."""

    @property
    def why_empty(self) -> str:
        """What to tell about a patch that is empty."""
        if self.refused:
            return self.refused
        reasons = ", ".join(sorted(self.dropped))
        return f"empty patch: it only touches what is not graded ({reasons})" if reasons else "empty patch"


def clean_patch(raw: bytes, task: SweTask, dirty: Collection[str] = ()) -> CleanPatch:
    """Return the part of a patch that counts.

    Args:
        raw: as it came out of the agent's sandbox.
        task: knows its tests, and by its gold patch which files with a test-like name are none.
        dirty: see ``Base.dirty``.
    """
    if len(raw) > MAX_RAW:
        return _refused(f"patch larger than {MAX_RAW >> 20} MiB")
    if raw.count(b"\ndiff --git ") > _MAX_RAW_FILES:  # other lines begin with a mark
        return _refused(f"patch of more than {_MAX_RAW_FILES} files")
    try:
        edits = read_patch(raw)
    except MalformedPatch as complaint:
        return _refused(f"malformed patch: {complaint}")
    reasons = _Reasons(task, dirty)
    bad: dict[bytes, str] = {}
    for edit in edits:
        if (reason := reasons.find(edit)) is not None:
            bad[edit.path] = reason  # of a file that became a link, both halves
    kept = [edit for edit in edits if edit.path not in bad and edit.changes]
    if len({edit.path for edit in kept}) != len(kept):
        return _refused("malformed patch: a file is changed twice")
    dropped = dict(Counter(bad.values()))
    patch = write_patch(kept)
    if len(patch) > MAX_PATCH:
        return _refused(f"patch larger than {MAX_PATCH >> 20} MiB", dropped)
    if len(kept) > MAX_FILES:
        return _refused(f"patch of more than {MAX_FILES} files", dropped)
    return CleanPatch(patch, tuple(os.fsdecode(edit.path) for edit in kept), dropped)


def is_test_path(path: str) -> bool:
    """Whether a path is a test, or steers the runner, by its name alone."""
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


class _Reasons:
    """Why a file is left out."""

    def __init__(self, task: SweTask, dirty: Collection[str]) -> None:
        tests = task.tests
        self._tests = frozenset(tests.files) | changed_paths(tests.patch)
        self._removed = tuple(tests.removed)
        self._beside = {folder for path in self._tests if (folder := _test_folder(path))}
        self._repaired = changed_paths(task.gold_patch)
        self._shadows = Shadows(tests, task.workdir, self._repaired)
        self._dirty = tuple(dirty)
        self._hidden = HIDDEN.get(task.source, ())

    def find(self, edit: FileEdit) -> str | None:
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
        if _within(path, self._beside):  # data that the hidden tests read, for example
            return True
        shadows = self._shadows.anywhere(path) or (edit.kind == "create" and self._shadows.created(path))
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


def _refused(why: str, dropped: Mapping[str, int] | None = None) -> CleanPatch:
    return CleanPatch(b"", (), dropped or {}, why)
