"""Reading and writing ``git diff``'s format, strictly.

A patch is taken from a sandbox in which the agent owns every program. ``git apply`` and ``patch`` read more than git
writes (headers of other tools, renames, text between files), so a patch is never passed on unchanged: it is read into
records, and the applied patch is written from them. Both therefore agree on what it changes.
"""

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["edit", "create", "delete"]

_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@(?: .*)?\n")
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
    """What a patch does to one path."""

    path: bytes
    kind: Kind
    old_mode: bytes
    """Six octal digits; empty when the file is new or the patch has no mode."""
    new_mode: bytes
    hunks: tuple[Hunk, ...]
    binary: bool = False

    @property
    def size(self) -> int:
        """Bytes of its lines."""
        return sum(len(line) + 1 for hunk in self.hunks for line in hunk.lines)

    @property
    def has_changes(self) -> bool:
        """Whether anything is different afterwards."""
        return bool(self.hunks) or self.kind != "edit" or self.old_mode != self.new_mode


def read_patch(patch: bytes) -> list[FileEdit]:
    """Read a patch.

    Raises:
        MalformedPatchError: it is not what ``git diff`` without renames writes.
    """
    lines = _LineReader(patch)
    edits: list[FileEdit] = []
    while lines.has_next:
        edits.append(_read_file(lines))
    return edits


def write_patch(edits: list[FileEdit]) -> bytes:
    """Write records as a patch that ``git apply`` takes. Binary ones cannot be written."""
    return b"".join(_write_file(edit) for edit in edits)


class _LineReader:
    """Lines of a patch, one by one."""

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
    kind, old_mode, new_mode = _read_modes(modes, same, lines)
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
    return _ESCAPE.sub(lambda found: _ESCAPES.get(found[1]) or bytes([int(found[1], 8)]), text)


def _read_modes(modes: dict[bytes, bytes], same: bytes, lines: _LineReader) -> tuple[Kind, bytes, bytes]:
    match sorted(modes):
        case []:
            return "edit", same, same
        case [b"new mode", b"old mode"]:
            return "edit", modes[b"old mode"], modes[b"new mode"]
        case [b"new file mode"]:
            return "create", b"", modes[b"new file mode"]
        case [b"deleted file mode"]:
            return "delete", modes[b"deleted file mode"], b""
        case _:
            raise lines.error("its modes contradict each other")


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
    names = b"--- " + first + b"\n+++ " + second + b"\n"
    return head + names + b"".join(_write_hunk(hunk) for hunk in edit.hunks)


def _write_hunk(hunk: Hunk) -> bytes:
    return b"@@ -%d,%d +%d,%d @@\n" % (*hunk.old, *hunk.new) + b"".join(line + b"\n" for line in hunk.lines)


def _quote(name: bytes) -> bytes:
    if not re.search(rb'[\x00-\x1f"\\\x7f]', name):
        return name
    return b'"' + re.sub(rb'[\x00-\x1f"\\\x7f]', lambda found: b"\\%03o" % found[0][0], name) + b'"'
