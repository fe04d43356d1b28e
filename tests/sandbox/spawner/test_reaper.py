"""Cleaning up: only what is provably dead, never what is alive or not ours."""

import os
import shutil
import subprocess
from collections.abc import Iterator
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


def test_living_owner_is_left_alone(tmp_path: Path, sleeper: "subprocess.Popen[bytes]") -> None:
    make_sandbox_directory(tmp_path, "a", SandboxState(boot_id(), own(), ProcessIdentity.of(sleeper.pid)))
    assert reap_sandboxes(tmp_path) == Reaped(alive=1)
    assert (tmp_path / "a/state.json").exists() and sleeper.poll() is None


def test_dead_owner_loses_init_and_directory(
    tmp_path: Path, dead: ProcessIdentity, sleeper: "subprocess.Popen[bytes]"
) -> None:
    make_sandbox_directory(tmp_path, "a", SandboxState(boot_id(), dead, ProcessIdentity.of(sleeper.pid)))
    assert reap_sandboxes(tmp_path) == Reaped(removed=1, killed=1)
    assert sleeper.wait(5) == -9
    assert list(tmp_path.iterdir()) == []


def test_reused_pid_is_not_killed(tmp_path: Path, dead: ProcessIdentity, sleeper: "subprocess.Popen[bytes]") -> None:
    another = ProcessIdentity(sleeper.pid, ProcessIdentity.of(sleeper.pid).start_ticks - 1)
    make_sandbox_directory(tmp_path, "a", SandboxState(boot_id(), dead, another))
    assert reap_sandboxes(tmp_path) == Reaped(removed=1)
    assert sleeper.poll() is None


def test_reused_pid_of_the_owner_does_not_protect(tmp_path: Path) -> None:
    make_sandbox_directory(
        tmp_path, "a", SandboxState(boot_id(), ProcessIdentity(os.getpid(), own().start_ticks - 1), None)
    )
    assert reap_sandboxes(tmp_path) == Reaped(removed=1)


def test_another_boot_is_over(tmp_path: Path, sleeper: "subprocess.Popen[bytes]") -> None:
    make_sandbox_directory(tmp_path, "a", SandboxState("another boot", own(), ProcessIdentity.of(sleeper.pid)))
    assert reap_sandboxes(tmp_path) == Reaped(removed=1)
    assert sleeper.poll() is None


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
