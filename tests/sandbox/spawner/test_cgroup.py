"""Dividing up a delegated cgroup: decisions and writes over an invented tree, births in a real one where there is one.

No machine of these tests had the memory and pids controllers in the v2 tree: what the kernel makes of the limits is not
tested here.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl_gym.errors import SandboxError
from prorl_gym.sandbox.protocol import SandboxLimits
from prorl_gym.sandbox.spawner.cgroup import (
    Cgroups,
    CgroupsUnavailable,
    check_delegated,
    find_delegated,
    open_cgroups,
    own_cgroup,
)

CONTROLS = ("memory.max", "memory.swap.max", "pids.max", "cgroup.procs", "cgroup.subtree_control")


def make_node(path: Path, controllers: str = "cpu memory pids", processes: str = "") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name in CONTROLS:
        (path / name).write_text("")
    (path / "cgroup.controllers").write_text(controllers)
    (path / "cgroup.procs").write_text(processes)
    return path


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that is made has control files."""
    real = os.mkdir

    def mkdir(path: str | Path, mode: int = 0o777) -> None:
        real(path, mode)
        for name in CONTROLS:
            (Path(path) / name).write_text("")

    monkeypatch.setattr(os, "mkdir", mkdir)


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cgroup ``unit`` is marked as delegated."""
    monkeypatch.setattr(os, "getxattr", lambda place, name: b"1" if place.name == "unit" else b"")  # pyright: ignore


def test_own_cgroup_is_found_in_the_mount_table(tmp_path: Path) -> None:
    proc = tmp_path / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text("4:memory:/elsewhere\n0::/user.slice/run.scope\n")
    (proc / "mountinfo").write_text("1 2 0:3 / / rw - ext4 x rw\n")
    assert own_cgroup(tmp_path) is None
    (proc / "mountinfo").write_text("30 25 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n")
    assert own_cgroup(tmp_path) == tmp_path / "sys/fs/cgroup/user.slice/run.scope"


@pytest.mark.usefixtures("marked")
def test_the_unit_above_the_services_own_is_taken(tmp_path: Path) -> None:
    unit = make_node(tmp_path / "unit")
    assert find_delegated(make_node(unit / "service", processes="7\n")) == unit


@pytest.mark.parametrize(
    ("controllers", "processes", "cause"),
    [
        ("cpu pids", "", "has no memory controller"),
        ("cpu", "", "no memory and no pids"),
        ("memory pids", "7\n", "holds"),
    ],
)
def test_what_cannot_be_divided_is_named(tmp_path: Path, controllers: str, processes: str, cause: str) -> None:
    found = check_delegated(make_node(tmp_path / "unit", controllers, processes))
    assert found is not None and cause in found.cause and str(tmp_path) in found.cause and found.fix


def test_no_tree_and_not_wanted() -> None:
    assert isinstance(find_delegated(None), CgroupsUnavailable)
    assert open_cgroups("off", 1, 1) == CgroupsUnavailable("sandbox.cgroup is off")


def test_the_directory_that_was_asked_for_must_do(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"sandbox\.cgroup: .*unit has no memory controller"):
        open_cgroups(str(make_node(tmp_path / "unit", "pids")), os.getuid(), os.getgid())


@pytest.mark.usefixtures("kernel")
def test_limits_are_written(tmp_path: Path) -> None:
    unit = make_node(tmp_path / "unit")
    cgroups = Cgroups.create_subtree(unit, os.getuid(), os.getgid())
    (place,) = [entry for entry in unit.iterdir() if entry.is_dir()]
    assert (unit / "cgroup.subtree_control").read_text() == (place / "cgroup.subtree_control").read_text()
    assert (place / "cgroup.subtree_control").read_text() == "+memory +pids"
    assert (place / "spawner/cgroup.procs").read_text() == str(os.getpid())
    for root_on, memory in (("memory", 111), ("disk", 101)):
        limits = SandboxLimits(total_memory=100, root_size=10, shm_size=1, processes=20, root_on=root_on)  # type: ignore[arg-type]
        os.close(cgroups.make_cgroup(root_on, limits))
        assert (place / root_on / "memory.max").read_text() == str(memory)
        assert (place / root_on / "pids.max").read_text() == "84"
        assert (place / root_on / "memory.swap.max").read_text() == "0"


@pytest.fixture
def real_tree() -> Iterator[Path]:
    with open("/proc/self/mountinfo", encoding="utf-8") as table:
        places = [line.split(" ")[4] for line in table if " - cgroup2 " in line]
    if not places or not os.access(places[0], os.W_OK):
        pytest.skip("no cgroup v2 tree that this user may write")
    path = Path(places[0]) / f"prorl-test-{os.getpid()}"
    try:
        path.mkdir()
    except OSError:
        pytest.skip("no cgroup can be made here")
    yield path
    path.rmdir()


BORN = """
import os, sys
from prorl_gym.sandbox import syscalls
pid = syscalls.fork_into(cgroup=os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY))
if pid == 0:
    with open("/proc/self/cgroup") as file:
        inside = f"0::/{os.path.basename(sys.argv[1])}\\n" in file.read()
    grandchild = os.fork()
    if grandchild == 0:
        os._exit(0 if inside else 1)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
"""In a process of its own: who forks into a cgroup must have one thread, and this one may have several."""


def test_a_child_is_born_in_its_cgroup(real_tree: Path) -> None:
    done = subprocess.run([sys.executable, "-c", BORN, str(real_tree)], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
