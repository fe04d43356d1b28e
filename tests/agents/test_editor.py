"""The editor tool: what it changes, what it tells, and that nothing a model writes can make it fail."""

import errno
from collections.abc import Sequence
from typing import Any, SupportsIndex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_gym.agents.tool_arguments import BadArguments, parse_arguments
from prorl_gym.agents.tools import EditorTool, ThinkTool
from prorl_gym.agents.tools import editor as editor_module
from prorl_gym.agents.tools.editor import EditRefused, insert_after, number_lines, replace_once, split_lines
from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.protocol import ExecResult, SandboxSpec
from prorl_gym.testing.sandbox.fake_sandbox import FakeSandbox, SandboxScript


class FileSandbox(FakeSandbox):
    """Raises the exceptions among its files."""

    def __init__(self, files: dict[str, Any]) -> None:
        super().__init__(SandboxSpec(workdir="/testbed"), SandboxScript(on_exec=self._remove))
        self.files = files

    def _remove(self, argv: Sequence[str], stdin: bytes) -> ExecResult:
        assert argv[:3] == ["rm", "-f", "--"]
        del self.files[argv[3]]
        return ExecResult(0, b"", b"")

    async def read_file(self, path: str, *, limit: int = 16 << 20) -> bytes:
        if isinstance(found := self.files.get(path), Exception):
            raise found
        return await super().read_file(path, limit=limit)

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        assert mode is None, "it keeps what there is"
        await super().write_file(path, data)


def opened(**files: Any) -> tuple[Any, FileSandbox]:
    sandbox = FileSandbox({f"/testbed/{name.replace('__', '/')}": content for name, content in files.items()})

    async def lease() -> FileSandbox:
        return sandbox

    tool = EditorTool(lease)

    async def call(command: str, path: str, **more: Any) -> str:
        observation = await tool({"command": command, "path": path, **more})
        assert observation.answer is None
        return observation.text

    return call, sandbox


async def test_view_numbers_lines_and_takes_a_range():
    call, _ = opened(a=b"one\ntwo\nthree\n")
    assert await call("view", "a") == "     1\tone\n     2\ttwo\n     3\tthree"
    assert await call("view", "/testbed/a", view_range=[2, -1]) == "     2\ttwo\n     3\tthree"
    assert await call("view", "./b/../a", view_range=[2, 2]) == "     2\ttwo"
    assert await call("view", "a", view_range=[3, 99]) == "     3\tthree"


@pytest.mark.parametrize("wanted", [[0, 2], [4, 5], [3, 2], [1], [1, 2, 3], ["1", 2], [True, 2], []])
async def test_range_that_does_not_fit_is_said(wanted: list[Any]):
    call, _ = opened(a=b"one\ntwo\nthree\n")
    assert (await call("view", "a", view_range=wanted)).startswith("view_range ")


async def test_view_lists_two_levels_and_counts_hidden_ones():
    call, sandbox = opened(a=b"", src__x=b"", src__deep__y=b"")
    assert await call("view", ".") == "/testbed:\n  a\n  src/\n  src/deep/\n  src/x"
    sandbox.files["/testbed/.git/HEAD"] = sandbox.files["/testbed/src/.env"] = b""
    assert await call("view", ".") == (
        "/testbed:\n  a\n  src/\n  src/deep/\n  src/x\n"
        "[Hidden entries that are not shown: 2. Use bash (ls -A) to see them.]"
    )
    del sandbox.files["/testbed/.git/HEAD"], sandbox.files["/testbed/src/.env"]
    assert "is for files" in await call("view", ".", view_range=[1, 2])
    assert await call("view", "") == "path is empty or holds a NUL character."
    sandbox.files |= {f"/testbed/b{number:03}": b"" for number in range(300)}
    lines = (await call("view", "/testbed")).splitlines()
    assert lines[-2:] == ["  b198", "[There are more. View a directory below, or use bash.]"]


async def test_long_file_is_cut_at_a_line_and_marked_as_cut():
    call, _ = opened(a=b"0123456789\n" * 5000, b=b"x" * 50_000)
    said = await call("view", "a")
    assert len(said) < 17_000
    assert said.endswith(
        "\t0123456789\n[The rest is not shown.]\n[/testbed/a has 5000 lines. Use view_range to see others.]"
    )
    assert len(await call("view", "b")) < 17_000


async def test_only_lines_that_can_be_shown_are_numbered(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []

    def counted(lines: list[str], first: int) -> str:
        asked.append(len(lines))
        return number_lines(lines, first)

    monkeypatch.setattr(editor_module, "number_lines", counted)
    call, _ = opened(a=b"\n" * (1 << 20))
    for range_ in (None, [5, -1], [1 << 20, -1]):
        said = await call("view", "a", view_range=range_)
        assert len(said) < 17_000
        assert ("[The rest is not shown.]" in said) is (range_ != [1 << 20, -1])
    assert max(asked) < 2100


class CountedText(str):
    """Counts searches in it."""

    searches = 0

    def find(self, sub: str, start: SupportsIndex | None = None, end: SupportsIndex | None = None, /) -> int:
        self.searches += 1
        return super().find(sub, start, end)


@pytest.mark.parametrize("old", ["a", "a" * 300, "a\n"])
def test_places_beyond_those_that_are_named_are_not_searched(old: str):
    text = CountedText(("a" * 400 + "\n") * 100)
    with pytest.raises(EditRefused, match=r"in more than 10 places, which begin on lines 1, .*, \.\.\.\. Give more"):
        replace_once(text, old, "b")
    assert text.searches < 20


async def test_create_edit_insert_and_undo():
    call, sandbox = opened()
    assert await call("create", "new/f.py", file_text="a = 1\nb = 2\n") == "Created /testbed/new/f.py."
    said = await call("str_replace", "new/f.py", old_str="a = 1", new_str="a = 3\nc = 4")
    assert said == "Changed /testbed/new/f.py. It now reads there:\n     1\ta = 3\n     2\tc = 4\n     3\tb = 2"
    await call("insert", "new/f.py", insert_line=0, new_str="# first")
    await call("insert", "new/f.py", insert_line=4, new_str="# last\n")
    assert sandbox.files["/testbed/new/f.py"] == b"# first\na = 3\nc = 4\nb = 2\n# last\n"
    for text in (b"# first\na = 3\nc = 4\nb = 2\n", b"a = 3\nc = 4\nb = 2\n", b"a = 1\nb = 2\n"):
        assert (await call("undo_edit", "new/f.py")).startswith("Took back")
        assert sandbox.files["/testbed/new/f.py"] == text
    assert (await call("undo_edit", "new/f.py")).endswith("which had created it.")
    assert sandbox.files == {}
    assert "no change of it" in await call("undo_edit", "new/f.py")


async def test_replacement_must_be_unique_and_complaints_name_lines():
    call, sandbox = opened(a=b"x = 1\n    y = 2\nx = 1\n")
    before = dict(sandbox.files)
    assert "stands in 2 places, which begin on lines 1, 3." in await call(
        "str_replace", "a", old_str="x = 1", new_str=""
    )
    said = await call("str_replace", "a", old_str="y = 2\nz", new_str="")
    assert said.startswith("Nothing was changed in /testbed/a: old_str was not found. Its first line stands on line 2:")
    assert "View the file" in await call("str_replace", "a", old_str="nowhere", new_str="")
    assert "old_str is empty" in await call("str_replace", "a", old_str="", new_str="x")
    assert "nothing would change" in await call("str_replace", "a", old_str="y = 2", new_str="y = 2")
    assert "give 0 to 3" in await call("insert", "a", insert_line=4, new_str="x")
    assert "needs insert_line and new_str" in await call("insert", "a")
    assert "exists already" in await call("create", "a", file_text="x")
    assert sandbox.files == before
    await call("str_replace", "a", old_str="    y = 2\n")
    assert sandbox.files["/testbed/a"] == b"x = 1\nx = 1\n"


async def test_crlf_stays():
    call, sandbox = opened(a=b"one\r\ntwo\r\nthree\r\n")
    await call("str_replace", "a", old_str="one\ntwo", new_str="1\n2")
    await call("insert", "a", insert_line=1, new_str="x\ny")
    assert sandbox.files["/testbed/a"] == b"1\r\nx\r\ny\r\n2\r\nthree\r\n"


async def test_what_cannot_be_read_or_written_is_an_observation():
    call, _ = opened(
        bad=b"\xff",
        full=OSError(errno.ENOSPC, "No space left on device"),
        big=b"x" * ((4 << 20) + 1),
        d__x=b"",
        below=NotADirectoryError(errno.ENOTDIR, "Not a directory"),
    )
    assert "no UTF-8 text" in await call("str_replace", "bad", old_str="a", new_str="b")
    assert await call("view", "full") == "/testbed/full: No space left on device."
    assert "larger than" in await call("view", "big")
    assert await call("view", "none") == "/testbed/none: No such file or directory."
    assert "exists already" in await call("create", "d", file_text="x")
    assert "exists already" in await call("create", "big", file_text="x")
    assert await call("create", "below", file_text="x") == "/testbed/below: Not a directory."
    assert await call("insert", "d", insert_line=0, new_str="x") == "/testbed/d: Is a directory."
    assert "NUL" in await call("view", "a\0b")


async def test_undo_forgets_the_oldest_beyond_its_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(editor_module, "MAX_HISTORY_BYTES", 10)
    call, sandbox = opened(a=b"12345678")
    await call("str_replace", "a", old_str="1", new_str="x")
    await call("str_replace", "a", old_str="2", new_str="y")
    await call("undo_edit", "a")
    assert sandbox.files["/testbed/a"] == b"x2345678"
    assert "no change of it" in await call("undo_edit", "a")


async def test_lost_sandbox_is_no_observation():
    call, sandbox = opened()
    sandbox.mark_lost()
    with pytest.raises(SandboxError) as caught:
        await call("view", "a")
    assert caught.value.kind is FailureKind.SANDBOX_LOST


def test_unknown_command_is_refused_by_the_schema():
    spec = EditorTool(None).spec  # type: ignore[arg-type]
    with pytest.raises(BadArguments, match="must be one of 'view', 'create'"):
        parse_arguments(spec, '{"command": "delete", "path": "a"}')
    assert parse_arguments(spec, '{"command": "view", "path": "a", "view_range": [1, 2]}')


async def test_think_changes_nothing():
    tool = ThinkTool()
    assert (tool.spec.name, (await tool({"thought": "hm"})).text) == ("think", "Noted.")


TEXT = st.text("ab\n\r é", max_size=12)


@settings(max_examples=50, deadline=None)
@given(TEXT, TEXT, TEXT)
def test_replacement_is_exact_or_refused(text: str, old: str, new: str):
    starts = [at for at in range(len(text)) if old and text.startswith(old, at)]
    try:
        changed, line = replace_once(text, old, new)
    except EditRefused:
        assert len(starts) != 1 or old == new
        return
    if starts:  # otherwise the CRLF reading
        assert changed == text[: starts[0]] + new + text[starts[0] + len(old) :]
        assert line == text.count("\n", 0, starts[0]) + 1
        assert len(starts) == 1


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.text("ab é", max_size=3), max_size=5),
    st.booleans(),
    st.integers(-1, 6),
    st.lists(st.text("xy", min_size=1), min_size=1, max_size=3),
)
def test_insertion_keeps_all_other_lines(lines: list[str], ended: bool, at: int, new: list[str]):
    text = "\n".join(lines) + ("\n" if ended and lines else "")
    before = split_lines(text)
    try:
        after = insert_after(text, at, "\n".join(new))
    except EditRefused:
        assert not 0 <= at <= len(before)
        return
    assert split_lines(after) == before[:at] + new + before[at:]
    assert after.endswith("\n") == (text.endswith("\n") or not text)
