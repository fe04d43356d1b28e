"""``scripts/release.py``: what it writes, what it refuses, and that a refusal leaves the tree as it was."""

import runpy
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "scripts/release.py"
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- Something.\n\n## [0.1.0] - 2026-01-02\n\n- All.\n"
INIT = '"""A package."""\n\n__version__ = "0.1.0"\n'


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_the_version_stands_in_one_place(script: dict[str, Any]) -> None:
    text = (REPOSITORY / script["VERSION_FILE"]).read_text("utf-8")
    current = script["version_of"](text)
    assert script["version_of"](script["with_version"](text, "7.8.9")) == "7.8.9"
    assert f'version = "{current}"' not in (REPOSITORY / "pyproject.toml").read_text("utf-8")


@pytest.mark.parametrize("text", ["", INIT + INIT], ids=["none", "two"])
def test_a_version_that_is_not_there_once_is_refused(script: dict[str, Any], text: str) -> None:
    with pytest.raises(script["ReleaseError"], match="Keep exactly one"):
        script["with_version"](text, "0.2.0")


def test_the_changelog_gets_a_dated_section(script: dict[str, Any]) -> None:
    assert script["with_release"](CHANGELOG, "0.2.0", "2026-03-04") == (
        "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-03-04\n\n### Added\n\n- Something.\n\n"
        "## [0.1.0] - 2026-01-02\n\n- All.\n"
    )


def test_the_changelog_of_this_project_can_be_released(script: dict[str, Any]) -> None:
    text = (REPOSITORY / script["CHANGELOG"]).read_text("utf-8")
    assert script["UNRELEASED"] in text


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("# Changelog\n", "Put it above"),
        ("## [Unreleased]\n\n## [0.1.0] - 2026-01-02\n\n- All.\n", "Write it below"),
    ],
    ids=["no section", "nothing new"],
)
def test_a_changelog_without_news_is_refused(script: dict[str, Any], text: str, fix: str) -> None:
    with pytest.raises(script["ReleaseError"], match=fix):
        script["with_release"](text, "0.2.0", "2026-03-04")


@pytest.mark.parametrize("version", ["0.1.0", "0.0.9", "1.2", "v1.2.3", "1.2.3rc1", "01.2.3", "1.2.3\n"])
def test_a_version_that_is_not_new_is_refused(script: dict[str, Any], version: str) -> None:
    with pytest.raises(script["ReleaseError"]):
        script["check_new"](version, "0.1.0", CHANGELOG)


FIRST = "## [Unreleased]\n\n- Something.\n"


@pytest.mark.parametrize(
    ("version", "changelog"), [("0.1.1", CHANGELOG), ("0.10.0", CHANGELOG), ("1.0.0", CHANGELOG), ("0.1.0", FIRST)]
)
def test_a_newer_version_is_taken_and_the_first_release_keeps_its_own(
    script: dict[str, Any], version: str, changelog: str
) -> None:
    script["check_new"](version, "0.1.0", changelog)


def test_wheels_that_differ_are_distinguished(script: dict[str, Any], tmp_path: Path) -> None:
    def wheel(name: str, **files: str) -> Path:
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for path, text in files.items():
                archive.writestr(zipfile.ZipInfo(path), text)
        return tmp_path / name

    one, same = wheel("one", a="1", b="2"), wheel("same", b="2", a="1")
    assert script["differences"](one, same) == []
    assert script["differences"](one, wheel("changed", a="1", b="3")) == ["b"]
    assert script["differences"](one, wheel("more", a="1", b="2", c="3")) == ["c"]


@pytest.fixture
def project(script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A committed tree; what would build it writes down the version that it was given."""
    for key in ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"):
        monkeypatch.setenv(key, "A. Tester")
    for key in ("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(key, "tester@example.invalid")
    root = tmp_path / "project"
    (root / "prorl_gym").mkdir(parents=True)
    (root / script["VERSION_FILE"]).write_text(INIT)
    (root / script["CHANGELOG"]).write_text(CHANGELOG)
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "First"]):
        subprocess.run(["git", *command], cwd=root, check=True, timeout=20)

    def build(tree: Path, out: Path) -> list[Path]:
        return [Path(f"made-{script['version_of']((tree / script['VERSION_FILE']).read_text())}")]

    names = script["release"].__globals__
    names.update(ROOT=root, build=build)
    return root


def git(root: Path, *command: str) -> str:
    return subprocess.run(
        ["git", *command], cwd=root, check=True, timeout=20, capture_output=True, text=True
    ).stdout.strip()


def test_a_release_is_one_commit_and_a_tag(
    script: dict[str, Any], project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script["release"]("0.2.0", dry_run=False)
    assert "built and checked made-0.2.0" in capsys.readouterr().out
    assert git(project, "log", "-1", "--format=%s") == "Release 0.2.0"
    assert git(project, "rev-parse", "v0.2.0^{commit}") == git(project, "rev-parse", "HEAD")
    assert git(project, "show", "--format=", "--name-only") == "CHANGELOG.md\nprorl_gym/__init__.py"
    assert git(project, "status", "--porcelain") == ""
    assert '__version__ = "0.2.0"' in (project / script["VERSION_FILE"]).read_text()


def test_a_dry_run_builds_and_changes_nothing(
    script: dict[str, Any], project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = git(project, "rev-parse", "HEAD")
    script["release"]("0.2.0", dry_run=True)
    assert "built and checked made-0.2.0" in capsys.readouterr().out
    assert (git(project, "rev-parse", "HEAD"), git(project, "status", "--porcelain"), git(project, "tag")) == (
        before,
        "",
        "",
    )


def test_a_changed_tree_is_refused(script: dict[str, Any], project: Path) -> None:
    (project / "new").write_text("x")
    with pytest.raises(script["ReleaseError"], match=r"\?\? new"):
        script["release"]("0.2.0", dry_run=False)


def test_a_tag_that_is_there_is_refused(script: dict[str, Any], project: Path) -> None:
    git(project, "tag", "v0.2.0")
    with pytest.raises(script["ReleaseError"], match=r"tag v0\.2\.0"):
        script["release"]("0.2.0", dry_run=False)


def test_a_build_that_fails_leaves_the_tree_as_it_was(script: dict[str, Any], project: Path) -> None:
    def fail(tree: Path, out: Path) -> list[Path]:
        raise script["ReleaseError"]("no")

    script["release"].__globals__["build"] = fail
    with pytest.raises(script["ReleaseError"], match="no"):
        script["release"]("0.2.0", dry_run=False)
    assert git(project, "status", "--porcelain") == "" and git(project, "tag") == ""
