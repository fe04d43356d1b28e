"""An agent's patch: read strictly, reduced to the repair that is graded, and written again for ``git apply``.

It is taken from a sandbox in which the agent owns every program. ``git apply`` and ``patch`` read more than ``git
diff`` writes (headers of other tools, renames, text between files), so it is never passed on unchanged: it is read into
records, and the applied patch is written from them. Both therefore agree on what it changes.

Left out, and counted: edits to tests and to the configuration of their runner, modules that would be imported instead
of the runner's or the standard library's (``_is_shadowing``), edits to files that the image itself changed or added
(they belong to its build), binary files, symbolic links, submodules, single files too large for a repair, new
directories that hold too many. A patch that is not well-formed, or still huge, is refused as a whole. These rules go by
names, so a file that the gold patch changes counts in any case, unless it is a hidden test.
"""

import os
import posixpath
import re
import shlex
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import PurePosixPath
from typing import Literal

from prorl_gym.environments.swe.swe_row import HIDDEN_FROM_AGENT, SweTask

MAX_RAW = 4 << 20
"""Bytes of a patch as taken from the sandbox."""
MAX_FILE = 512 << 10
"""Bytes of one file's lines in it."""
MAX_PATCH = 1 << 20
"""Bytes of the reduced patch."""
MAX_FILES = 200
_MAX_RAW_FILES = 10_000

_PLAIN = (b"", b"100644", b"100755")
_SYMLINK, _SUBMODULE, _TREE = b"120000", b"160000", b"040000"

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
_MAX_VALUE = 4096
"""Characters of a shell variable that are resolved."""
_MAX_DIRECTORIES = 100
_IMPORTED = re.compile(r"[^.]+(?:\..*)?\.(?:py|pyc|so)")

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?([-+=])([^{}$]*))?\})")

Kind = Literal["edit", "create", "delete"]

_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@(?: .*)?\n")
_HUNK_HEAD = re.compile(r"@@ -\d{1,9}(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
_NAMING = re.compile(r"diff --git |--- |\+\+\+ |rename from |rename to |copy to ")
_MODE_LINE = re.compile(rb"(old mode|new mode|new file mode|deleted file mode) ([0-7]{6})\n")
_INDEX_LINE = re.compile(rb"index [0-9a-f]{4,64}\.\.[0-9a-f]{4,64}(?: ([0-7]{6}))?\n")
_ESCAPES = {
    b"a": b"\a", b"b": b"\b", b"t": b"\t", b"n": b"\n", b"v": b"\v", b"f": b"\f", b"r": b"\r", b'"': b'"', b"\\": b"\\",
}  # fmt: skip
_QUOTED = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(rb'\\([abtnvfr"\\]|[0-3][0-7]{2})')
_NO_NEWLINE = b"\\ No newline at end of file"


class MalformedPatchError(Exception):
    """Not a patch as ``git diff`` writes it; the message names the line."""


@dataclass(frozen=True, slots=True)
class Hunk:
    """One hunk: line number and count of the old and the new side, and its lines without their ends."""

    old: tuple[int, int]
    new: tuple[int, int]
    lines: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class FileEdit:
    """The change of one path by a patch."""

    path: bytes
    kind: Kind
    old_mode: bytes
    """Six octal digits; empty when the file is new or the patch has no mode."""
    new_mode: bytes
    hunks: tuple[Hunk, ...]
    binary: bool = False

    @property
    def size(self) -> int:
        return sum(len(line) + 1 for hunk in self.hunks for line in hunk.lines)

    @property
    def has_changes(self) -> bool:
        return bool(self.hunks) or self.kind != "edit" or self.old_mode != self.new_mode


@dataclass(frozen=True, slots=True)
class FilteredPatch:
    """The part of an agent's patch that is graded."""

    patch: bytes = b""
    files: tuple[str, ...] = ()
    """Paths that it touches, in its order."""
    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many paths were left out, by the reason."""
    refused: str = ""
    """Why nothing is left of it, when it was refused as a whole."""

    @property
    def empty_reason(self) -> str:
        if self.refused:
            return self.refused
        reasons = ", ".join(sorted(self.dropped))
        return f"empty patch: it only touches what is not graded ({reasons})" if reasons else "empty patch"


def filter_patch(raw: bytes, task: SweTask, dirty: Collection[str] = ()) -> FilteredPatch:
    """Return the part of an agent's patch that counts. ``dirty``: see ``BaseState``."""
    if len(raw) > MAX_RAW:
        return FilteredPatch(refused=f"patch larger than {MAX_RAW >> 20} MiB")
    if raw.count(b"\ndiff --git ") > _MAX_RAW_FILES:  # other lines begin with a mark
        return FilteredPatch(refused=f"patch of more than {_MAX_RAW_FILES} files")
    try:
        edits = read_patch(raw)
    except MalformedPatchError as problem:
        return FilteredPatch(refused=f"malformed patch: {problem}")
    reasons = _ExclusionRules(task, dirty)
    bad: dict[bytes, str] = {}
    for edit in edits:
        if (reason := reasons.reason_for(edit)) is not None:
            bad[edit.path] = reason  # of a file that became a link, both halves
    kept = [edit for edit in edits if edit.path not in bad and edit.has_changes]
    if len({edit.path for edit in kept}) != len(kept):
        return FilteredPatch(refused="malformed patch: a file is changed twice")
    dropped = dict(Counter(bad.values()))
    patch = write_patch(kept)
    if len(patch) > MAX_PATCH:
        return FilteredPatch(dropped=dropped, refused=f"patch larger than {MAX_PATCH >> 20} MiB")
    if len(kept) > MAX_FILES:
        return FilteredPatch(dropped=dropped, refused=f"patch of more than {MAX_FILES} files")
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


def diff_lines(patch: str) -> Iterator[tuple[str, int | None]]:
    """Yield each line of a diff; one of a hunk with its line number in the new file.

    As in git's ``apply.c``, the counts in its head say where a hunk ends: the removed line ``-- a/x`` names no file.
    """
    old = new = number = 0
    for line in patch.split("\n"):
        mark = line[:1] or " "  # of an empty context line the blank may be lost
        if (old > 0 or new > 0) and mark in " +-\\":
            yield line, number
            old -= mark in " -"
            new -= mark in " +"
            number += mark in " +"
        else:
            yield line, None
            head = _HUNK_HEAD.match(line)
            old, number, new = (int(head[1] or 1), int(head[2]), int(head[3] or 1)) if head else (0, 0, 0)


def paths_in_diff(patch: str) -> tuple[str, ...]:
    """Return the paths below the repository that a diff names, old and new ones, in order."""
    found: dict[str, None] = {}
    for line, number in diff_lines(patch):
        if number is not None or (head := _NAMING.match(line)) is None:
            continue
        names = [line[head.end() :].split("\t")[0].removesuffix("\r")]
        if head[0] == "diff --git ":  # the only line that names an empty or a binary file
            middle = len(names[0]) // 2
            names = [names[0][:middle], names[0][middle + 1 :]]
        names = [
            os.fsdecode(_unescape(quoted[1])) if (quoted := _QUOTED.fullmatch(os.fsencode(name))) else name
            for name in names
        ]
        if head[0] in ("diff --git ", "--- ", "+++ "):
            names = [name.partition("/")[2] for name in names if name != "/dev/null"]
        if len(set(names)) == 1:  # those of a renamed file follow, each on a line of its own
            found[names[0]] = None
    return tuple(path for path in found if path and ".." not in path.split("/") and not path.startswith("/"))


class _ExclusionRules:
    def __init__(self, task: SweTask, dirty: Collection[str]) -> None:
        tests = task.tests
        self._tests = frozenset([*tests.files, *paths_in_diff(tests.patch)])
        self._removed = tuple(tests.removed)
        self._test_folders = {folder for path in self._tests if (folder := _test_folder(path))}
        self._repaired = paths_in_diff(task.gold_patch)
        named = _path_directories(f"{tests.build}\n{tests.command}", task.workdir)
        self._roots = {*_ROOTS, *(path for path in named if path != ".")}
        self._dirty = tuple(dirty)
        self._hidden = HIDDEN_FROM_AGENT.get(task.source, ())

    def reason_for(self, edit: FileEdit) -> str | None:
        path = os.fsdecode(edit.path)
        if "\0" in path or any(part in ("", ".", "..") or part.casefold() == ".git" for part in path.split("/")):
            return "unsafe path"
        modes = (edit.old_mode, edit.new_mode)
        if _SUBMODULE in modes:
            return "submodule"
        if edit.new_mode == _TREE:  # which only extract.sh writes
            return "new directory of too many files"
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
        if any(_ANYWHERE.fullmatch(part) for part in path.split("/")):
            return True
        is_new = edit.kind == "create"
        return is_test_path(path) or (is_new and any(_is_shadowing(path, root, self._repaired) for root in self._roots))


def _test_folder(path: str) -> str:
    """Return the innermost directory above a hidden test that is named after tests, or an empty text."""
    folders = path.split("/")[:-1]
    while folders and not _TEST_FOLDER.fullmatch(folders[-1]):
        folders.pop()
    return "/".join(folders)


def _within(path: str, places: Iterable[str]) -> bool:
    return any(path == place or path.startswith(f"{place.rstrip('/')}/") for place in places)


def _is_shadowing(path: str, root: str, repaired: Collection[str]) -> bool:
    """Whether a new file is a module that would be imported instead of the interpreter's own or the test runner's.

    ``python -m pytest`` looks into the working directory first, and directories named in ``PYTHONPATH`` also come
    before the standard library: everything that runs a test would import a new ``json.py`` there instead of the real
    one. Only its name and place below such a ``root`` identify the file. Files of the base tree do not count.
    ``repaired`` are the paths that the gold patch changes: further modules of their packages are part of a repair.
    """
    prefix = f"{root}/" if root else ""
    if not path.startswith(prefix):
        return False
    first, *rest = path.removeprefix(prefix).split("/")
    if rest and any(other.startswith(f"{prefix}{first}/") for other in repaired):
        return False
    name = PurePosixPath(first).stem if rest else first.split(".")[0]
    if _RUNNER.fullmatch(name):
        return True
    # Without __init__ a directory loses against a module later on the path.
    module = rest[0] if len(rest) == 1 and rest[0].split(".")[0] == "__init__" else "" if rest else first
    return name in _STDLIB and _IMPORTED.fullmatch(module) is not None


def _path_directories(commands: str, workdir: str) -> set[str]:
    """Return the directories that commands put on Python's path or go to in a repository, resolved as a shell does."""
    lexer = shlex.shlex(re.sub(r"\$\(pwd\)|`pwd`", "$PWD", commands), posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    with suppress(ValueError):  # a quotation mark without its other: of a here-document, for example
        words.extend(lexer)
    values = {"PWD": workdir}

    def expand(text: str) -> str:
        for _ in range(4):  # the innermost of nested ones first
            text = _VARIABLE.sub(replace, text[:_MAX_VALUE])
        return text[:_MAX_VALUE]

    def replace(found: re.Match[str]) -> str:
        value, sign, word = values.get(found[1] or found[2], ""), found[3], found[4] or ""
        return (word if value else "") if sign == "+" else value or word

    directories, places = [workdir], ["."]
    for before, word in zip(["", *words], words, strict=False):
        if before in ("cd", "pushd"):
            values["PWD"] = posixpath.join(values["PWD"], expand(word))
            directories.append(values["PWD"])
        elif assigned := _ASSIGNMENT.fullmatch(word):
            values[assigned[1]] = expand(assigned[2])
            if assigned[1] == "PYTHONPATH":
                places += values["PYTHONPATH"].split(":")
    pairs = product(directories[:_MAX_DIRECTORIES], places[:_MAX_DIRECTORIES])
    found = {posixpath.normpath(posixpath.join(*pair)) for pair in pairs}
    return {posixpath.relpath(path, workdir) for path in found if _within(path, [workdir])}


# Reading and writing the format of ``git diff``


def read_patch(patch: bytes) -> list[FileEdit]:
    """Read a patch. Raises ``MalformedPatchError``: it is not what ``git diff`` without renames writes."""
    lines = _LineReader(patch)
    edits: list[FileEdit] = []
    while lines.has_next:
        edits.append(_read_file(lines))
    return edits


def write_patch(edits: list[FileEdit]) -> bytes:
    """Write records as a patch that ``git apply`` takes. Binary ones cannot be written."""
    return b"".join(map(_write_file, edits))


class _LineReader:
    def __init__(self, patch: bytes) -> None:
        self._lines = patch.split(b"\n")
        self._at = 0
        if self._lines.pop():
            self._at = len(self._lines)
            raise self.error("the last line has no end")

    @property
    def has_next(self) -> bool:
        return self._at < len(self._lines)

    @property
    def peek_line(self) -> bytes:
        """The next line with its line feed; empty at the end."""
        return self._lines[self._at] + b"\n" if self.has_next else b""

    def read_line(self) -> bytes:
        line = self.peek_line
        self._at += 1
        return line

    def read_hunk_lines(self, old: int, new: int) -> tuple[bytes, ...]:
        """Return the lines of a hunk with these counts. One loop: there may be millions of lines."""
        lines, start, at = self._lines, self._at, self._at
        while old > 0 or new > 0:
            mark = lines[at][:1] if at < len(lines) else b""
            if mark == b" ":
                old -= 1
                new -= 1
            elif mark == b"-":
                old -= 1
            elif mark == b"+":
                new -= 1
            elif mark != b"\\" or lines[at] != _NO_NEWLINE or at == start or lines[at - 1] == _NO_NEWLINE:
                self._at = at
                raise self.error("a hunk ends too early")
            at += 1
        if at < len(lines) and lines[at] == _NO_NEWLINE and at > start and lines[at - 1] != _NO_NEWLINE:
            at += 1
        self._at = at
        if old < 0 or new < 0:
            raise self.error("a hunk is longer than its head states")
        return tuple(lines[start:at])

    def error(self, why: str) -> MalformedPatchError:
        return MalformedPatchError(f"line {self._at + 1}: {why}")


def _read_file(lines: _LineReader) -> FileEdit:
    path = _read_path(lines)
    modes: dict[bytes, bytes] = {}
    while (found := _MODE_LINE.fullmatch(lines.peek_line)) is not None:
        if found[1] in modes:
            raise lines.error("a mode is given twice")
        modes[found[1]] = found[2]
        lines.read_line()
    if (index := _INDEX_LINE.fullmatch(lines.peek_line)) is not None:
        lines.read_line()
    same = (index[1] or b"") if index else b""
    kind: Kind = "edit"
    match sorted(modes):
        case []:
            old_mode = new_mode = same
        case [b"new mode", b"old mode"]:
            old_mode, new_mode = modes[b"old mode"], modes[b"new mode"]
        case [b"new file mode"]:
            kind, old_mode, new_mode = "create", b"", modes[b"new file mode"]
        case [b"deleted file mode"]:
            kind, old_mode, new_mode = "delete", modes[b"deleted file mode"], b""
        case _:
            raise lines.error("its modes contradict each other")
    if _is_binary(lines):
        return FileEdit(path, kind, old_mode, new_mode, (), binary=True)
    hunks = _read_hunks(path, kind, lines) if lines.peek_line.startswith(b"--- ") else ()
    return FileEdit(path, kind, old_mode, new_mode, hunks)


def _read_path(lines: _LineReader) -> bytes:
    head = lines.peek_line
    if not head.startswith(b"diff --git "):
        raise lines.error("a file's head was expected")
    names = head[len(b"diff --git ") : -1]
    if names.startswith(b'"'):
        quoted = re.fullmatch(_QUOTED.pattern + b" " + _QUOTED.pattern, names)
        if quoted is None:
            raise lines.error("its names cannot be separated")
        first, second = _unquote(quoted[1], lines), _unquote(quoted[2], lines)
    else:  # both names are equal, so they split in the middle, whatever blanks they hold
        middle = len(names) // 2
        first, second = names[:middle], names[middle + 1 :]
        if names[middle : middle + 1] != b" ":
            raise lines.error("its two names differ")
    if first[:2] != b"a/" or second[:2] != b"b/" or first[2:] != second[2:] or not first[2:]:
        raise lines.error("its two names differ")
    lines.read_line()
    return first[2:]


def _unquote(text: bytes, lines: _LineReader) -> bytes:
    if b"\\" in _ESCAPE.sub(b"", text):
        raise lines.error("a name is quoted wrongly")
    return _unescape(text)


def _unescape(text: bytes) -> bytes:
    return _ESCAPE.sub(lambda found: _ESCAPES.get(found[1]) or bytes([int(found[1], 8)]), text)


def _is_binary(lines: _LineReader) -> bool:
    if lines.peek_line.startswith(b"Binary files ") and lines.peek_line.endswith(b" differ\n"):
        lines.read_line()
        return True
    if lines.peek_line != b"GIT binary patch\n":
        return False
    while lines.has_next and not lines.peek_line.startswith(b"diff --git "):
        lines.read_line()
    return True


def _read_hunks(path: bytes, kind: Kind, lines: _LineReader) -> tuple[Hunk, ...]:
    for sign, prefix, absent in ((b"--- ", b"a/", kind == "create"), (b"+++ ", b"b/", kind == "delete")):
        line = lines.peek_line
        name = line.removeprefix(sign).removesuffix(b"\n").removesuffix(b"\t")  # git adds a tab after blanks
        if (quoted := _QUOTED.fullmatch(name)) is not None:
            name = _unquote(quoted[1], lines)
        if not line.startswith(sign) or name != (b"/dev/null" if absent else prefix + path):
            raise lines.error("the name is not that of the file's head")
        lines.read_line()
    hunks: list[Hunk] = []
    while (head := _HUNK.fullmatch(lines.peek_line)) is not None:
        lines.read_line()
        old, new = (int(head[1]), int(head[2] or 1)), (int(head[3]), int(head[4] or 1))
        hunks.append(Hunk(old, new, lines.read_hunk_lines(old[1], new[1])))
    if not hunks:
        raise lines.error("a hunk was expected")
    return tuple(hunks)


def _write_file(edit: FileEdit) -> bytes:
    first, second = _quote(b"a/" + edit.path), _quote(b"b/" + edit.path)
    head = b"diff --git " + first + b" " + second + b"\n"
    if edit.kind == "create":
        head += b"new file mode " + edit.new_mode + b"\n"
        first = b"/dev/null"
    elif edit.kind == "delete":
        head += b"deleted file mode " + edit.old_mode + b"\n"
        second = b"/dev/null"
    elif edit.old_mode != edit.new_mode:
        head += b"old mode " + edit.old_mode + b"\nnew mode " + edit.new_mode + b"\n"
    if not edit.hunks:
        # Without it, git takes a new or deleted empty file for a head without a body.
        return head + b"index %s\n" % (b"0" * 40 + b".." + b"0" * 40) if edit.kind != "edit" else head
    parts = [head, b"--- " + first + b"\n+++ " + second + b"\n"]
    for hunk in edit.hunks:
        parts += [b"@@ -%d,%d +%d,%d @@\n" % (*hunk.old, *hunk.new), *(line + b"\n" for line in hunk.lines)]
    return b"".join(parts)


def _quote(name: bytes) -> bytes:
    if not re.search(rb'[\x00-\x1f"\\\x7f]', name):
        return name
    return b'"' + re.sub(rb'[\x00-\x1f"\\\x7f]', lambda found: b"\\%03o" % found[0][0], name) + b'"'
