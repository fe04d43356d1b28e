"""Make a release: ``python scripts/release.py X.Y.Z [--dry-run]``; ``make dist`` gives no version and only builds.

In this order: check that the tree is clean and the version new; in a copy of the committed files set the version, date
the changelog's section, build sdist and wheel and check both; make the same two changes in the tree, commit and tag. A
check that fails leaves the tree as it was. Nothing is pushed or published. Needs the dependency group ``release``.
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parent.parent
VERSION_FILE, CHANGELOG = "prorl_gym/__init__.py", "CHANGELOG.md"
VERSION_LINE = re.compile(r'^__version__ = "([^"]*)"$', re.MULTILINE)
UNRELEASED = "## [Unreleased]\n"


class ReleaseError(Exception):
    """What keeps this from being a release; the message has the problem and the fix."""


def version_of(text: str) -> str:
    """Return the version that ``prorl_gym/__init__.py`` sets."""
    found = VERSION_LINE.findall(text)
    if len(found) != 1:
        raise ReleaseError(f'{VERSION_FILE} has {len(found)} lines `__version__ = "..."`.\nKeep exactly one.')
    return found[0]


def with_version(text: str, version: str) -> str:
    """Return ``prorl_gym/__init__.py`` with another version."""
    version_of(text)
    return VERSION_LINE.sub(f'__version__ = "{version}"', text)


def number(version: str) -> tuple[int, ...]:
    """Return ``X.Y.Z`` as three integers."""
    if not re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", version):
        raise ReleaseError(f"{version!r} is not of the form X.Y.Z.\nGive three numbers, for example 0.2.0.")
    return tuple(map(int, version.split(".")))


def check_new(version: str, current: str, changelog: str) -> None:
    """Refuse a version that is older than the current one, or released already."""
    if number(version) < number(current):
        raise ReleaseError(f"{version} is older than {current}, which {VERSION_FILE} has.\nGive a newer one.")
    if f"## [{version}]" in changelog:
        raise ReleaseError(f"{CHANGELOG} has a section for {version} already.\nGive a newer version.")


def with_release(changelog: str, version: str, date: str) -> str:
    """Return the changelog with what is unreleased under a heading of its own, below an empty section."""
    before, found, after = changelog.partition(UNRELEASED)
    if not found:
        raise ReleaseError(f"{CHANGELOG} has no line {UNRELEASED.strip()!r}.\nPut it above what is new.")
    if not re.split(r"^## ", after, maxsplit=1, flags=re.MULTILINE)[0].strip():
        raise ReleaseError(f"{CHANGELOG} says nothing of what is new.\nWrite it below {UNRELEASED.strip()!r}.")
    return f"{before}{UNRELEASED}\n## [{version}] - {date}\n{after}"


def differences(one: Path, other: Path) -> list[str]:
    """Return the names of files that two wheels do not have alike: missing in one, or of other contents or mode."""

    def contents(wheel: Path) -> dict[str, tuple[int, str]]:
        with zipfile.ZipFile(wheel) as archive:
            return {
                info.filename: (info.external_attr >> 16, hashlib.sha256(archive.read(info)).hexdigest())
                for info in archive.infolist()
            }

    left, right = contents(one), contents(other)
    return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))


def run(*command: str) -> bytes:
    """Run a program in the repository and return what it prints; its errors go to ours."""
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    if ran.returncode:
        raise ReleaseError(f"`{' '.join(command)}` failed (exit {ran.returncode}).\n{ran.stdout.decode()[-2000:]}")
    return ran.stdout


def build(tree: Path, out: Path) -> list[Path]:
    """Build sdist and, from it, the wheel; compare that with a wheel of the tree; check what an index would show.

    The client's wheel (``client_package``) is built of the tree.
    """
    python = [sys.executable, "-m"]
    with tempfile.TemporaryDirectory() as folder:
        through, direct = Path(folder, "through"), Path(folder, "direct")
        run(*python, "build", "--no-isolation", "--outdir", str(through), str(tree))
        run(*python, "build", "--no-isolation", "--wheel", "--outdir", str(direct), str(tree))
        (wheel,), (other,) = through.glob("*.whl"), direct.glob("*.whl")
        if different := differences(wheel, other):
            raise ReleaseError(
                f"The wheel of the sdist and that of the tree differ: {', '.join(different[:10])}.\n"
                "See [tool.hatch.build.targets] in pyproject.toml."
            )
        run(*python, "build", "--no-isolation", "--wheel", "--outdir", str(through), str(tree / "client_package"))
        made = sorted(through.iterdir())
        run(*python, "twine", "check", "--strict", *map(str, made))
        out.mkdir(exist_ok=True)
        return [Path(shutil.copy(path, out / path.name)) for path in made]


def release(version: str, *, dry_run: bool) -> None:
    """Release the committed tree under a version."""
    if changed := run("git", "status", "--porcelain").decode():
        raise ReleaseError(f"The tree is not clean:\n{changed.rstrip()}\nCommit or remove these.")
    tag = f"v{version}"
    if run("git", "tag", "--list", tag):
        raise ReleaseError(f"There is a tag {tag} already.\nGive a newer version.")
    text, changelog = (ROOT / VERSION_FILE).read_text("utf-8"), (ROOT / CHANGELOG).read_text("utf-8")
    check_new(version, version_of(text), changelog)
    today = datetime.now(UTC).date().isoformat()
    changes = {VERSION_FILE: with_version(text, version), CHANGELOG: with_release(changelog, version, today)}
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(run("git", "archive", "HEAD"))) as committed:
            committed.extractall(folder, filter="tar")
        for name, changed in changes.items():
            Path(folder, name).write_text(changed, "utf-8")
        made = build(Path(folder), Path(folder, "made") if dry_run else ROOT / "dist")
        print(*(f"built and checked {path.name}" for path in made), sep="\n")
    if dry_run:
        print(f"dry run: {', '.join(changes)} would be changed and committed, and the commit tagged {tag}.")
        return
    for name, changed in changes.items():
        (ROOT / name).write_text(changed, "utf-8")
    run("git", "commit", "--quiet", "--message", f"Release {version}", "--", *changes)
    run("git", "tag", "--annotate", tag, "--message", f"prorl-gym {version}")
    print(f"committed and tagged {tag}. Publish it with: git push origin HEAD {tag}")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("version", nargs="?", help="X.Y.Z; without it, only build the tree as it is, into dist/")
    parser.add_argument("--dry-run", action="store_true", help="build and check, but change nothing")
    given = parser.parse_args()
    try:
        if given.version:
            release(given.version, dry_run=given.dry_run)
        else:
            print(*(f"built and checked dist/{path.name}" for path in build(ROOT, ROOT / "dist")), sep="\n")
    except ReleaseError as error:
        sys.exit(f"release: {error}")


if __name__ == "__main__":
    main()
