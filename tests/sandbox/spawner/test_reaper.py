"""Cleaning up: only what is provably dead, never what is alive or not ours; trees that were made to resist."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prorl_gym.errors import SandboxError
from prorl_gym.process_identity import ProcessIdentity, boot_id, read_start_ticks
from prorl_gym.sandbox.spawner.scratch import (
    Reaped,
    SandboxState,
    make_sandbox_directory,
    make_scratch,
    read_state,
    reap_sandboxes,
)
from prorl_gym.sandbox.tree_removal import remove_tree


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.fixture
def dead() -> ProcessIdentity:
    with subprocess.Popen(["true"]) as process:
        identity = ProcessIdentity(process.pid, 1)
        process.wait()
    return identity


def own() -> ProcessIdentity:
    return ProcessIdentity.of(os.getpid())


def earlier(process: ProcessIdentity) -> ProcessIdentity:
    """Another process, which had the same pid before."""
    return ProcessIdentity(process.pid, process.start_ticks - 1)


@pytest.mark.parametrize(
    ("is_this_boot", "owner", "init", "reaped", "kills"),
    [
        pytest.param(True, own, lambda init: init, Reaped(alive=1), False, id="owner lives"),
        pytest.param(True, None, lambda init: init, Reaped(removed=1, killed=1), True, id="owner is dead"),
        pytest.param(True, None, earlier, Reaped(removed=1), False, id="pid of init is reused"),
        pytest.param(True, lambda: earlier(own()), earlier, Reaped(removed=1), False, id="pid of the owner is reused"),
        pytest.param(False, own, lambda init: init, Reaped(removed=1), False, id="another boot"),
    ],
)
def test_what_is_reaped(
    tmp_path: Path,
    dead: ProcessIdentity,
    sleeper: "subprocess.Popen[bytes]",
    is_this_boot: bool,
    owner: Callable[[], ProcessIdentity] | None,
    init: Callable[[ProcessIdentity], ProcessIdentity],
    reaped: Reaped,
    kills: bool,
) -> None:
    boot = boot_id() if is_this_boot else "another boot"
    state = SandboxState(boot, owner() if owner else dead, init(ProcessIdentity.of(sleeper.pid)))
    make_sandbox_directory(tmp_path, "a", state)
    assert reap_sandboxes(tmp_path) == reaped
    assert len(list(tmp_path.iterdir())) == reaped.alive
    assert sleeper.wait(5) == -9 if kills else sleeper.poll() is None


def test_unfinished_directory_is_judged_by_its_name(tmp_path: Path, dead: ProcessIdentity) -> None:
    for owner in (dead, own()):
        (tmp_path / f".new-{owner.pid}-{owner.start_ticks}-x").mkdir()
    assert reap_sandboxes(tmp_path) == Reaped(removed=1, alive=1)
    assert [entry.name for entry in tmp_path.iterdir()] == [f".new-{os.getpid()}-{own().start_ticks}-x"]


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/state.json").write_text('{"version": 1}')
    (tmp_path / ".new-letters").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("precious")
    assert reap_sandboxes(tmp_path) == Reaped()
    assert len(list(tmp_path.iterdir())) == 4


def test_closed_directories_inside_are_removed(tmp_path: Path, dead: ProcessIdentity) -> None:
    directory = make_sandbox_directory(tmp_path, "a", SandboxState(boot_id(), dead, None))
    (directory / "root/work/work").mkdir(parents=True)
    (directory / "root/work").chmod(0)
    assert reap_sandboxes(tmp_path) == Reaped(removed=1)
    assert not directory.exists()


@pytest.mark.parametrize("init", [None, ProcessIdentity(7, 8)])
def test_state_is_read_as_written(tmp_path: Path, init: ProcessIdentity | None) -> None:
    state = SandboxState(boot_id(), own(), init)
    directory = make_sandbox_directory(tmp_path, "a", state)
    assert read_state(directory, "") == state
    assert sorted(entry.name for entry in directory.iterdir()) == ["root", "state.json"]


@pytest.mark.parametrize("make", ["link", "file", "open"])
def test_scratch_that_was_prepared_beforehand_is_refused(tmp_path: Path, make: str) -> None:
    path = tmp_path / "scratch"
    if make == "link":
        path.symlink_to(tmp_path)
    elif make == "file":
        path.touch()
    else:
        path.mkdir()
        path.chmod(0o755)
    with pytest.raises(SandboxError) as caught:
        make_scratch(path, os.geteuid(), os.getegid())
    assert str(path) in caught.value.what and caught.value.fix


@pytest.mark.root
def test_scratch_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "scratch"
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)
    with pytest.raises(SandboxError, match="belongs to uid 12345, not to the sandboxes' uid 61099"):
        make_scratch(path, 61099, 61099)


def test_start_time_survives_a_hostile_process_name(tmp_path: Path) -> None:
    program = tmp_path / ") R 1 2 ("
    shutil.copy("/usr/bin/sleep", program)
    before = read_start_ticks(os.getpid())
    assert before is not None
    with subprocess.Popen([program, "60"]) as process:
        after = read_start_ticks(process.pid)
        process.kill()
    assert after is not None and after > before
    assert read_start_ticks(process.pid) is None


LEVELS = 3000


def test_a_tree_deeper_than_any_path(tmp_path: Path) -> None:
    top = tmp_path / "deep"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(LEVELS):
        os.mkdir("d" * 100, dir_fd=here)
        below = os.open("d" * 100, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    remove_tree(top)
    assert os.listdir(tmp_path) == []


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    kept.chmod(0o500)
    doomed = tmp_path / "doomed"
    (doomed / "below").mkdir(parents=True)
    (doomed / "below/link").symlink_to(kept)
    (doomed / "link").symlink_to(kept)
    remove_tree(doomed)
    assert os.listdir(tmp_path) == ["kept"]
    assert (kept / "file").read_text() == "x" and kept.stat().st_mode & 0o777 == 0o500


def test_closed_directories_and_special_files(tmp_path: Path) -> None:
    doomed = tmp_path / "doomed"
    (doomed / "a/b/c").mkdir(parents=True)
    os.mkfifo(doomed / "a/b/c/fifo")
    (doomed / "a/b/ .-0").write_text("")
    for path in ("a/b/c", "a/b", "a"):
        (doomed / path).chmod(0)
    remove_tree(doomed)
    assert os.listdir(tmp_path) == []


def test_gone_already_is_fine(tmp_path: Path) -> None:
    remove_tree(tmp_path / "never")
    assert os.listdir(tmp_path) == []


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(OSError):
        remove_tree(tmp_path / "link")
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]
