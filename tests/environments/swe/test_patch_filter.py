"""What of a patch is graded: it is read strictly, what does not count is left out and counted, the rest applies."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from prorl_gym.environments.swe import patch_filter
from prorl_gym.environments.swe.patch_filter import (
    MalformedPatchError,
    filter_patch,
    is_test_path,
    paths_in_diff,
    read_patch,
    write_patch,
)
from prorl_gym.environments.swe.swe_row import SweTask, git_diff
from tests.environments.swe.mini import archived

TASK = archived()
LINE = st.text(st.characters(codec="utf-8", exclude_characters="\n\0"), max_size=6)
TEXT = st.builds(lambda lines, end: "\n".join(lines) + end, st.lists(LINE, max_size=12), st.sampled_from(["", "\n"]))
PATH = st.lists(
    st.sampled_from(["src", "a b", "tests", "ü", "x.py", "conftest.py", "it's", "-r"]), min_size=1, max_size=3
)


def written_by_git(changes: dict[str, tuple[str, str]]) -> str:
    """Return what `git diff` writes of files that change; an empty text is no file."""
    with TemporaryDirectory() as folder:
        git(Path(folder), "init", "-q")
        for number in (0, 1):
            for path, texts in changes.items():
                Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
                Path(folder, path).unlink(missing_ok=True)
                if texts[number]:
                    Path(folder, path).write_bytes(texts[number].encode())
            git(Path(folder), "add", "--ignore-removal", *["-N"] * number, ".")
        return git(Path(folder), "diff", "--no-renames", "--full-index").decode()


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(PATH.map("/".join), st.tuples(TEXT, TEXT).filter(lambda pair: pair[0] != pair[1]), max_size=4),
    st.booleans(),
)
def test_what_is_kept_still_applies_and_what_is_left_out_is_counted(changes: dict[str, tuple[str, str]], by_git: bool):
    if by_git:
        assume(not any(f"{path}/".startswith(f"{other}/") for path in changes for other in changes if path != other))
        raw = written_by_git(changes).encode()
    else:
        raw = "".join(git_diff(path, old, new) for path, (old, new) in changes.items()).encode()
    cleaned = filter_patch(raw, TASK)
    assert cleaned.refused == ""
    tests = {path for path in changes if is_test_path(path)}
    assert set(cleaned.files) == set(changes) - tests
    assert cleaned.dropped == ({"test": len(tests)} if tests else {})
    kept = {path: pair for path, pair in changes.items() if path not in tests}
    assume(not any(f"{path}/".startswith(f"{other}/") for path in kept for other in kept if path != other))
    with TemporaryDirectory() as folder:
        for path, (old, _) in kept.items():
            Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
            if old:
                Path(folder, path).write_bytes(old.encode())
        if cleaned.patch:
            git(Path(folder), "apply", "--whitespace=nowarn", stdin=cleaned.patch)
        left = {str(file.relative_to(folder)): file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}
    assert left == {path: new.encode() for path, (_, new) in kept.items() if new}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with edits of every kind in its working tree."""
    where = tmp_path_factory.mktemp("repository")
    git(where, "init", "-q")
    for number in range(12):
        (where / f"f{number}.py").write_text("".join(f"line {n}\n" for n in range(60)))
    (where / "gone.py").write_text("x\n")
    (where / "empty_gone.py").write_text("")
    (where / "no_end.py").write_text("a\nb")
    (where / 'tab\tand "quote" ü.py').write_text("a\n")
    (where / "a b a b.py").write_text("a\n")
    (where / "link").symlink_to("f1.py")
    (where / "binary").write_bytes(b"\0\1")
    (where / "becomes_link").write_text("text\n")
    (where / "crlf.py").write_bytes(b"a\r\nb\r\n")
    (where / "data.sql").write_text("-- a/f0.py\n-- b/no.py\n1\n\n")
    git(where, "add", "-A")
    for number in range(12):
        text = (where / f"f{number}.py").read_text()
        (where / f"f{number}.py").write_text(
            text.replace(f"line {number}\n", "\n").replace(f"line {59 - number}\n", "x\ny\n")
        )
    for name in ("gone.py", "empty_gone.py", "link", "becomes_link"):
        (where / name).unlink()
    (where / "link").symlink_to("f2.py")
    (where / "becomes_link").symlink_to("/etc/passwd")
    (where / "no_end.py").write_text("a\nc")
    (where / 'tab\tand "quote" ü.py').write_text("b\n")
    (where / "a b a b.py").write_text("b\n")
    (where / "crlf.py").write_bytes(b"a\r\nc\r\n")
    (where / "data.sql").write_text("-- b/no.py\n1\n\n++ b/other.py\n")
    (where / "binary").write_bytes(b"\0\2")
    (where / "f3.py").chmod(0o755)
    (where / "new.py").write_text("new")
    (where / "empty_new.py").write_text("")
    git(where, "add", "-N", "new.py", "empty_new.py")
    return where


def git(where: Path, *arguments: str, stdin: bytes = b"") -> bytes:
    nowhere = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "PATH": os.environ["PATH"]}
    return subprocess.run(
        ["git", *arguments], cwd=where, input=stdin, env=nowhere, check=True, capture_output=True
    ).stdout


@pytest.mark.parametrize("quoted", ["true", "false"])
def test_all_that_git_writes_is_read_and_git_applies_what_is_written(repository: Path, quoted: str, tmp_path: Path):
    raw = git(repository, "-c", f"core.quotePath={quoted}", "diff", "--full-index", "--no-renames", "--", ".")
    cleaned = filter_patch(raw, TASK)
    assert cleaned.refused == ""
    assert cleaned.dropped == {"symbolic link": 2, "binary": 1}
    changed = os.fsdecode(git(repository, "diff", "--no-renames", "--name-only", "-z")).split("\0")[:-1]
    assert sorted(paths_in_diff(os.fsdecode(raw))) == sorted(changed)
    git(repository, "checkout-index", "-a", f"--prefix={tmp_path}/")
    for name in ("new.py", "empty_new.py"):
        (tmp_path / name).unlink(missing_ok=True)
    git(tmp_path, "apply", "--whitespace=nowarn", stdin=cleaned.patch)
    for name in cleaned.files:
        there, here = repository / name, tmp_path / name
        assert here.exists() == there.exists(), name
        if there.exists():
            assert here.read_bytes() == there.read_bytes(), name
            assert here.stat().st_mode & 0o100 == there.stat().st_mode & 0o100, name
    assert len(cleaned.files) == 12 + 9
    assert write_patch(read_patch(cleaned.patch)) == cleaned.patch


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(st.data())
def test_corrupt_patch_is_refused_or_touches_what_is_said(repository: Path, data: Any):
    """Whatever a patch holds, git sees the files in it that we see: nothing passes by the filter."""
    lines = git(repository, "diff", "--no-renames", "--", "gone.py", "new.py", "f1.py", "no_end.py").split(b"\n")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        extra = data.draw(
            st.sampled_from(
                [
                    b"",
                    b"diff --git a/x b/tests/y",
                    b"--- a/x",
                    b"+++ b/tests/y",
                    b"rename to tests/y",
                    b"@@ -0,0 +1 @@",
                    b"+++ /tests/y",
                    b"new file mode 100644",
                    b"Index: tests/y",
                    b" ",
                    b"GIT binary patch",
                    b"\\ No newline",
                ]
            )
        )
        lines[at : at + data.draw(st.integers(0, 1))] = [extra]
    cleaned = filter_patch(b"\n".join(lines), TASK)
    if not cleaned.patch:
        return
    named = subprocess.run(["git", "apply", "--numstat", "-z"], input=cleaned.patch, capture_output=True, check=False)
    seen = [entry.split("\t")[2] for entry in os.fsdecode(named.stdout).split("\0") if entry]
    assert named.returncode != 0 or set(seen) == set(cleaned.files)
    assert not any(is_test_path(path) for path in cleaned.files)


HEAD = "diff --git a/src/a.py b/src/a.py\n--- a/src/a.py\n+++ b/src/a.py\n"


@pytest.mark.parametrize(
    "raw",
    [
        "garbage\n",
        "--- a/src/a.py\n+++ b/src/a.py\n@@ -1 +1 @@\n-a\n+b\n",
        HEAD + "@@ -1,2 +1 @@\n-a\n+b\n",
        HEAD + "@@ -1 +1 @@\n-a\n+b\n+c\n",
        HEAD + "@@ -1 +1 @@\n-a\n+b",
        HEAD,
        HEAD + "@@ -1 +1 @@\n-a\n+b\n\\ No newline at end of file\n\\ No newline at end of file\n",
        "diff --git a/src/a.py b/src/b.py\n--- a/src/a.py\n+++ b/src/b.py\n@@ -1 +1 @@\n-a\n+b\n",
        "diff --git a/src/a.py b/src/a.py\nsimilarity index 90%\nrename from src/a.py\nrename to tests/a.py\n",
        "diff --git a/src/a.py b/src/a.py\n--- a/src/a.py\n+++ b/tests/a.py\n@@ -1 +1 @@\n-a\n+b\n",
        "diff --git a/src/a.py b/src/a.py\nnew file mode 100644\ndeleted file mode 100644\n",
        "diff --git a/src/a.py b/src/a.py\nnew file mode 100644\nnew file mode 120000\n",
        'diff --git "a/src\\x" "b/src\\x"\n',
        "\n",
    ],
)
def test_what_git_does_not_write_is_refused(raw: str):
    with pytest.raises(MalformedPatchError, match=r"line \d+: "):
        read_patch(raw.encode())
    cleaned = filter_patch(raw.encode(), TASK)
    assert (cleaned.patch, cleaned.empty_reason[:16]) == (b"", "malformed patch:")


def test_file_that_does_not_change_is_no_part_of_a_patch():
    assert filter_patch(b"diff --git a/src/a.py b/src/a.py\n", TASK).empty_reason == "empty patch"


def edit(path: str) -> str:
    return git_diff(path, "a\n", "b\n")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("src/a.py", None),
        ("django/test/client.py", None),
        ("numpy/testing/utils.py", None),
        ("src/contest.py", None),
        ("setup.cfg", None),
        ("src/latest.py", None),
        ("tests/a.py", "test"),
        ("src/pkg/tests/data/x.txt", "test"),
        ("test/a.py", "test"),
        ("src/test_a.py", "test"),
        ("a_test.go", "test"),
        ("web/a.test.tsx", "test"),
        ("web/__tests__/a.js", "test"),
        ("conftest.py", "test"),
        ("src/pkg/conftest.py", "test"),
        ("tox.ini", "test"),
        (".pytest.ini", "test"),
        ("web/pytest.toml", "test"),
        ("cheat.egg-info/entry_points.txt", "test"),
        ("src/cheat.dist-info/METADATA", "test"),
        ("x.egg/EGG-INFO/entry_points.txt", "test"),
        ("jest.config.ts", "test"),
        ("web/vitest.config.mjs", "test"),
        (".mocharc.json", "test"),
        ("src/jest_config.py", None),
        ("sitecustomize.py", "test"),
        ("lib/evil.pth", "test"),
        ("hidden/case.py", "test"),
        ("patched/case.py", "test"),
        ("old_cases/one.py", "test"),
        (".git/hooks/pre-commit", "unsafe path"),
        ("src/.GIT/config", "unsafe path"),
        ("src/../../etc/passwd", "unsafe path"),
        ("built.py", "changed by the image"),
        ("artefacts/x.py", "changed by the image"),
        ("artefacts.py", None),
    ],
)
def test_which_paths_count(path: str, reason: str | None):
    plan = replace(TASK.tests, files={"hidden/case.py": ""}, patch=edit("patched/case.py"), removed=("old_cases",))
    task = replace(TASK, tests=plan)
    cleaned = filter_patch(edit(path).encode(), task, {"built.py", "artefacts/"})
    assert (cleaned.files, cleaned.dropped) == (((path,), {}) if reason is None else ((), {reason: 1}))


def test_file_that_the_gold_patch_changes_counts_whatever_its_name():
    task = replace(TASK, gold_patch=edit("src/testing/test_tools.py"))
    assert filter_patch(edit("src/testing/test_tools.py").encode(), task).dropped == {}
    assert filter_patch(edit("src/testing/test_tools.py").encode(), task, {"src/"}).dropped == {}
    hidden = replace(task, tests=replace(task.tests, files={"src/testing/test_tools.py": ""}))
    assert filter_patch(edit("src/testing/test_tools.py").encode(), hidden).dropped == {"test": 1}


@pytest.mark.parametrize(
    "hidden, path, counts",
    [
        ("p/test/test_a.py", "p/test/cases.json", False),
        ("p/test/deep/test_a.py", "p/test/data/cases.txt", False),
        ("p/unit_tests/test_a.py", "p/unit_tests/helper.py", False),
        ("numpy/testing/tests/test_a.py", "numpy/testing/utils.py", True),
        ("p/tests/test_a.py", "p/test/code.py", True),
        ("p/latest/a.py", "p/latest/b.py", True),
        ("p/test_a.py", "p/cases.json", True),
    ],
)
def test_what_lies_beside_hidden_tests_does_not_count(hidden: str, path: str, counts: bool):
    task = replace(TASK, tests=replace(TASK.tests, files={hidden: "x = 1\n"}), gold_patch=edit("src/a.py"))
    assert (filter_patch(edit(path).encode(), task).files == (path,)) is counts
    task = replace(task, gold_patch=edit(path))
    assert filter_patch(edit(path).encode(), task).files == (path,)


def test_submodules_links_and_binaries_do_not_count():
    one = "diff --git a/m b/m\nnew file mode {}\nindex 0000000..1111111\n--- /dev/null\n+++ b/m\n@@ -0,0 +1 @@\n+x\n"
    for mode, reason in (
        ("160000", "submodule"),
        ("120000", "symbolic link"),
        ("040000", "new directory of too many files"),
    ):
        assert filter_patch(one.format(mode).encode(), TASK).dropped == {reason: 1}
    assert filter_patch(one.format("100644").replace("+x", "+\0").encode(), TASK).dropped == {"binary": 1}
    head = "diff --git a/m b/m\nindex 0000000..1111111 100644\n"
    for body in ("Binary files a/m and b/m differ\n", "GIT binary patch\nliteral 3\nabc\n\n"):
        cleaned = filter_patch((head + body + edit("src/a.py")).encode(), TASK)
        assert (cleaned.dropped, cleaned.files) == ({"binary": 1}, ("src/a.py",))


def test_huge_patches_are_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(patch_filter, "MAX_FILE", 1000)
    monkeypatch.setattr(patch_filter, "MAX_PATCH", 2000)
    monkeypatch.setattr(patch_filter, "MAX_FILES", 5)
    monkeypatch.setattr(patch_filter, "MAX_RAW", 10_000)
    large = git_diff("large.txt", "", "x\n" * 500)
    assert filter_patch((large + edit("src/a.py")).encode(), TASK).dropped == {"large": 1}
    many = "".join(git_diff(f"f{n}.py", "", "x\n" * 200) for n in range(5))
    assert filter_patch(many.encode(), TASK).empty_reason == "patch larger than 0 MiB"
    files = "".join(edit(f"f{n}") for n in range(6))
    assert filter_patch(files.encode(), TASK).empty_reason == "patch of more than 5 files"
    assert filter_patch(b"x" * 10_001, TASK).empty_reason == "patch larger than 0 MiB"


@pytest.mark.timeout(10)
def test_cost_is_linear():
    raw = (HEAD + "@@ -1,0 +1,100000 @@\n" + "+\n" * 100_000).encode() + b"diff --git " + b"a " * 200_000 + b"\n"
    assert filter_patch(raw, TASK).refused.startswith("malformed")
    head = "diff --git a/{0} b/{0}\nnew file mode 100644\n"
    files = "".join(head.format(number) for number in range(20_000))
    assert filter_patch(files.encode(), TASK).refused == "patch of more than 10000 files"


# New modules that would be imported instead of the standard library's or the runner's are no part of a repair


def counts(path: str, task: SweTask = TASK, old: str = "") -> bool:
    return path in filter_patch((edit("src/answer.py") + git_diff(path, old, "x\n")).encode(), task).files


@pytest.mark.parametrize(
    "path",
    [
        "json.py",
        "src/json.py",
        "pytest.py",
        "unittest/__init__.py",
        "lib/encodings/__init__.py",
        "python/abc.cpython-311-x86_64-linux-gnu.so",
        "argparse.py",
        "imp.py",
        "pluggy/__init__.py",
        "src/pytest_cov/plugin.py",
        "pygments/formatters/terminal.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "sitecustomize.py",
        "src/sitecustomize/__init__.py",
        "a/b/usercustomize/x.py",
        "prorl_report.py",
        "src/prorl_1/__init__.py",
        "a/b/prorl_x.py",
        "a/prorl_x/b.py",
    ],
)
def test_shadows_do_not_count(path: str):
    assert not counts(path)


@pytest.mark.parametrize(
    "path",
    [
        "pkg/json.py",
        "pkg/types/__init__.py",
        "src/pkg/logging.py",
        "types/index.d.ts",
        "lib/http.js",
        "queue/worker.py",
        "json/schema.json",
        "src/json_tools.py",
        "python.py",
        "lib/pkg/pytest_helper.py",
    ],
)
def test_modules_of_such_names_elsewhere_count(path: str):
    assert counts(path)


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("PYTHONPATH=code/py:$PYTHONPATH python3 -m pytest", "code/py/json.py"),
        ('PYTHONPATH="$PWD/code:$PWD/.vendor${PYTHONPATH:+:$PYTHONPATH}" python3 -m pytest', "code/json.py"),
        ("export PYTHONPATH=/testbed/code; python3 -m pytest", "code/json.py"),
        ("true && cd './code' && python3 -m pytest", "code/json.py"),
        ('PYTHONPATH="$PWD":"$PWD/.vendor"${PYTHONPATH:+:$PYTHONPATH} python3 -m pytest', ".vendor/pytest.py"),
        ("V='.ven dor'; export PYTHONPATH=$(pwd)/${D:-${V}}:${PYTHONPATH:+:${PYTHONPATH}}; pytest", ".ven dor/json.py"),
        ("(cd code;PYTHONPATH=../more/:lib pytest); true", "code/lib/json.py"),
        ("PYTHONPATH=../testbed/more/: pytest; echo it's done", "more/json.py"),
    ],
)
def test_the_row_lists_what_is_on_the_path(command: str, path: str):
    assert counts(path)
    assert not counts(path, replace(TASK, tests=replace(TASK.tests, command=command)))
    assert not counts(path, replace(TASK, tests=replace(TASK.tests, build=command)))


def test_what_the_repository_has_counts():
    assert counts("json.py", old="there before\n")
    assert counts("_pytest/main.py", old="there before\n"), "pytest's own repository"
    assert not counts("sitecustomize/__init__.py", old="there before\n")
    of_attrs = replace(TASK, gold_patch=git_diff("src/attr/_make.py", "a\n", "b\n"))
    assert counts("src/attr/_new.py", of_attrs)
    assert not counts("src/attr/_new.py")
    assert counts("json.py", replace(TASK, gold_patch=git_diff("json.py", "", "b\n")))
