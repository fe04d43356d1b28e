"""The ``editor`` tool: view and change files by exact text, with the usual interface of SWE agents."""

import posixpath
from collections.abc import Iterable, Mapping
from errno import EFBIG, EINVAL, EISDIR
from itertools import islice
from typing import Any, cast

from prorl_gym.agents.protocol import Observation, ToolSpec, arguments_schema
from prorl_gym.agents.tools.agent_sandbox import SandboxSource, agent_action
from prorl_gym.sandbox.protocol import FileEntry, Sandbox

CONTEXT_LINES = 4
"""Lines shown before and after an edit."""
_MAX_LISTED = 10
"""Line numbers in one complaint."""
MAX_FILE_BYTES = 4 << 20
"""Bytes of a file that can be viewed or changed."""
MAX_HISTORY_BYTES = 32 << 20
"""Bytes of earlier versions that are kept for undo_edit."""
_MAX_ENTRIES = 200
_MAX_CHARACTERS = 16 << 10
"""Characters of one observation."""
_MAX_LINES = _MAX_CHARACTERS // len("     1\t\n") + 1
"""So many empty ones are longer than an observation: no more than that are numbered."""

_SPEC = ToolSpec(
    name="editor",
    description=(
        "View, create and change text files. view shows a file with line numbers (view_range picks some of them) or "
        "lists a directory. create writes a new file. str_replace replaces the text old_str, which must stand in the "
        "file exactly once, with new_str. insert puts new_str after line insert_line (0: at the start). undo_edit "
        "takes back the last change of a file that was made with this tool."
    ),
    parameters=arguments_schema(
        {
            "command": {
                "type": "string",
                "enum": ["view", "create", "str_replace", "insert", "undo_edit"],
                "description": "What to do.",
            },
            "path": {"type": "string", "description": "File or directory, absolute or below the working directory."},
            "file_text": {"type": "string", "description": "For create: the content."},
            "old_str": {"type": "string", "description": "For str_replace: the text to replace, blanks included."},
            "new_str": {"type": "string", "description": "For str_replace and insert: the new text."},
            "insert_line": {"type": "integer", "description": "For insert: the line after which it goes."},
            "view_range": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "For view: first and last line, from 1; -1 is the end.",
            },
        },
        "command",
        "path",
    ),
)

_EXISTS_ERRNOS = (EFBIG, EISDIR, EINVAL)
"""Errors of reading zero bytes of a path that exists: a file with content, a directory, a device."""
_REQUIRED_ARGUMENTS = {"create": ("file_text",), "str_replace": ("old_str",), "insert": ("insert_line", "new_str")}


class EditorTool:
    """Views and edits files."""

    spec = _SPEC

    def __init__(self, source: SandboxSource) -> None:
        self._source = source
        self._history: list[tuple[str, bytes | None]] = []

    async def __call__(self, arguments: Mapping[str, Any]) -> Observation:
        command: str = arguments["command"]
        missing = [name for name in _REQUIRED_ARGUMENTS.get(command, ()) if name not in arguments]
        if missing:
            return Observation(f"{command} needs {' and '.join(missing)}.")
        if "\0" in arguments["path"] or not arguments["path"]:
            return Observation("path is empty or holds a NUL character.")
        async with agent_action(self._source) as sandbox:
            path = posixpath.normpath(posixpath.join(sandbox.spec.workdir, arguments["path"]))
            try:
                return Observation(await self._run(sandbox, command, path, arguments))
            except EditRefused as refusal:
                return Observation(f"Nothing was changed in {path}: {refusal}" if command != "view" else str(refusal))
            except UnicodeDecodeError:
                return Observation(f"{path} is no UTF-8 text. Use bash to look at it or to change it.")
            except OSError as error:
                return Observation(f"{path}: {error.strerror or 'the operation failed'}.")

    async def _run(self, sandbox: Sandbox, command: str, path: str, arguments: Mapping[str, Any]) -> str:
        match command:
            case "view":
                return await _view(sandbox, path, arguments.get("view_range"))
            case "create":
                return await self._create(sandbox, path, arguments["file_text"])
            case "str_replace":
                new = arguments.get("new_str", "")
                text = await _read(sandbox, path)
                changed, line = replace_once(text, arguments["old_str"], new)
                return await self._change(sandbox, path, text, changed, line, new)
            case "insert":
                line, new = arguments["insert_line"], arguments["new_str"]
                text = await _read(sandbox, path)
                return await self._change(sandbox, path, text, insert_after(text, line, new), line + 1, new)
            case _:
                return await self._undo(sandbox, path)

    async def _create(self, sandbox: Sandbox, path: str, text: str) -> str:
        try:
            await sandbox.read_file(path, limit=0)
        except FileNotFoundError:
            await sandbox.write_file(path, text.encode())
            self._push_history(path, None)
            return f"Created {path}."
        except OSError as error:
            if error.errno not in _EXISTS_ERRNOS:
                raise
        raise EditRefused("it exists already. Change it with str_replace or insert, or remove it with bash first.")

    async def _change(self, sandbox: Sandbox, path: str, old: str, text: str, line: int, new: str) -> str:
        await sandbox.write_file(path, text.encode())
        self._push_history(path, old.encode())
        return _truncate(f"Changed {path}. It now reads there:\n{edit_excerpt(text, line, len(split_lines(new)))}", "")

    async def _undo(self, sandbox: Sandbox, path: str) -> str:
        at = next((n for n in reversed(range(len(self._history))) if self._history[n][0] == path), None)
        if at is None:
            raise EditRefused("there is no change of it that could be taken back.")
        before = self._history[at][1]
        if before is not None:
            await sandbox.write_file(path, before)
        elif (await sandbox.exec(["rm", "-f", "--", path], timeout=60)).exit_code != 0:
            raise EditRefused("the file cannot be removed.")
        del self._history[at]
        return f"Took back the last change of {path}" + ("." if before is not None else ", which had created it.")

    def _push_history(self, path: str, before: bytes | None) -> None:
        self._history.append((path, before))
        while sum(len(content or b"") for _, content in self._history) > MAX_HISTORY_BYTES:
            del self._history[0]


async def _read(sandbox: Sandbox, path: str) -> str:
    return (await sandbox.read_file(path, limit=MAX_FILE_BYTES)).decode()


async def _view(sandbox: Sandbox, path: str, wanted: object) -> str:
    try:
        text = await _read(sandbox, path)
    except IsADirectoryError:
        if wanted is not None:
            raise EditRefused(f"{path} is a directory: view_range is for files.") from None
        return await _list(sandbox, path)
    lines = split_lines(text)
    first, last = _line_range(wanted, len(lines))
    if not lines:
        return f"{path} is empty."
    hint = f"[{path} has {len(lines)} lines. Use view_range to see others.]"
    return _truncate(number_lines(lines[first - 1 : min(last, first - 1 + _MAX_LINES)], first), hint)


def _line_range(wanted: object, total: int) -> tuple[int, int]:
    if wanted is None:
        return 1, total
    ends = cast(list[object], wanted) if isinstance(wanted, list) else []
    if len(ends) != 2 or not all(isinstance(end, int) and not isinstance(end, bool) for end in ends):
        raise EditRefused("view_range must be two integers: the first and the last line.")
    first, last = cast(list[int], ends)
    last = total if last == -1 else min(last, total)
    if not 1 <= first <= max(last, 1):
        raise EditRefused(f"view_range does not fit: the file has {total} lines.")
    return first, last


async def _list(sandbox: Sandbox, path: str) -> str:
    """Return two levels of a directory; of hidden entries only the number."""
    found: list[str] = []
    hidden = 0
    for entry in await sandbox.list_dir(path):
        if entry.name.startswith("."):
            hidden += 1
            continue
        found.append(_entry_line(entry, ""))
        if entry.kind != "directory" or len(found) > _MAX_ENTRIES:
            continue
        try:
            inner = await sandbox.list_dir(posixpath.join(path, entry.name))
        except OSError:
            continue
        visible = [one for one in inner if not one.name.startswith(".")]
        hidden += len(inner) - len(visible)
        found += [_entry_line(one, f"{entry.name}/") for one in visible]
    shown = found[:_MAX_ENTRIES]
    if len(found) > len(shown):
        shown.append("[There are more. View a directory below, or use bash.]")
    if hidden:
        shown.append(f"[Hidden entries that are not shown: {hidden}. Use bash (ls -A) to see them.]")
    return "\n".join([f"{path}:", *shown])


def _entry_line(entry: FileEntry, above: str) -> str:
    name = entry.name.encode(errors="replace").decode()
    return f"  {above}{name}{'/' if entry.kind == 'directory' else ''}"


def _truncate(text: str, hint: str) -> str:
    if len(text) <= _MAX_CHARACTERS:
        return text
    cut = text[:_MAX_CHARACTERS]
    whole = cut[: cut.rfind("\n")] if "\n" in cut else cut
    return "\n".join(filter(None, [whole, "[The rest is not shown.]", hint]))


# --- edits of a text: they run on the service's event loop, in time proportional to the text whatever repeats in it ---
# Lines end with a line feed only, as for compilers and git; numbers count from 1.


class EditRefused(Exception):
    """The edit was not made. The text is worded for the model."""


def split_lines(text: str) -> list[str]:
    """Return the lines without their ends; a last line feed opens no further line."""
    lines = text.split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def replace_once(text: str, old: str, new: str) -> tuple[str, int]:
    """Replace the only occurrence of ``old``; return the text and the number of the first line that changed.

    In a file whose lines all end in CRLF, ``old`` and ``new`` are read as if theirs did. Raises ``EditRefused`` if it
    does not occur, occurs more than once, or nothing would change.
    """
    if not old:
        raise EditRefused("old_str is empty. Give the text to replace, or use insert.")
    if old not in text and "\n" in old and text.count("\n") == text.count("\r\n") > 0:
        old, new = (part.replace("\r\n", "\n").replace("\n", "\r\n") for part in (old, new))
    if old == new:
        raise EditRefused("old_str and new_str are the same: nothing would change.")
    at = text.find(old)
    if at < 0:
        raise EditRefused(f"old_str was not found. {_similar_line_hint(text, old)}")
    places = _line_numbers(text, old)
    if len(places) > 1:
        count = str(len(places)) if len(places) <= _MAX_LISTED else f"more than {_MAX_LISTED}"
        raise EditRefused(
            f"old_str stands in {count} places, which begin on lines {_format_numbers(places)}. Give more of the lines "
            "around the one that is meant."
        )
    return text[:at] + new + text[at + len(old) :], places[0]


def insert_after(text: str, line: int, new: str) -> str:
    """Insert lines after line number ``line``; 0 puts them first. Raises ``EditRefused`` if there is no such line."""
    lines = split_lines(text)
    if not 0 <= line <= len(lines):
        raise EditRefused(f"insert_line is {line}, but the file has {len(lines)} lines: give 0 to {len(lines)}.")
    end = "\r\n" if text.count("\n") == text.count("\r\n") > 0 else "\n"
    position = sum(len(one) + 1 for one in lines[:line])
    new = new.replace("\r\n", "\n").removesuffix("\n").replace("\n", end) + end
    if position > len(text):  # after a last line that has no end
        return text + end + new.removesuffix(end)
    return text[:position] + new + text[position:]


def number_lines(lines: Iterable[str], first: int) -> str:
    return "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines, first))


def edit_excerpt(text: str, first: int, count: int) -> str:
    """Return the numbered lines of an edit and some around it."""
    lines = split_lines(text)
    start, end = max(1, first - CONTEXT_LINES), min(len(lines), first + max(count, 1) - 1 + CONTEXT_LINES)
    return number_lines(lines[start - 1 : end], start)


def _line_numbers(text: str, part: str) -> list[int]:
    """Return the lines at which a text begins, overlapping ones too; one more than are listed at most."""
    numbers: list[int] = []
    line, seen, at = 1, 0, text.find(part)
    while at >= 0 and len(numbers) <= _MAX_LISTED:
        line += text.count("\n", seen, at)
        numbers.append(line)
        seen, at = at, text.find(part, at + 1)
    return numbers


def _similar_line_hint(text: str, old: str) -> str:
    """Return a hint where the first line of ``old`` occurs with other blanks: mostly the indentation differs."""
    wanted = next((line.strip() for line in old.split("\n") if line.strip()), "")
    lines = enumerate(split_lines(text) if wanted and wanted in text else [], 1)
    places = list(islice((number for number, line in lines if line.strip() == wanted), _MAX_LISTED + 1))
    if not places:
        return "View the file and copy the text as it stands there, blanks included."
    return f"Its first line stands on line {_format_numbers(places)}: compare blanks, and the lines after it."


def _format_numbers(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MAX_LISTED]))
    return f"{shown}, ..." if len(numbers) > _MAX_LISTED else shown
