"""The steps below the backends, one by one."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prorl_gym.errors import SandboxError
from prorl_gym.sandbox.guest.fork_exec import close_all_except
from prorl_gym.sandbox.protocol import Mount, SandboxLimits, SandboxSpec
from prorl_gym.sandbox.spawner import host_root
from prorl_gym.sandbox.spawner.namespaces import describe_setup_error, map_ids
from prorl_gym.sandbox.spawner.spawner_protocol import LaunchRequest


def test_host_root_is_never_mapped() -> None:
    with pytest.raises(SandboxError, match=r"refusing to map the host.s root"):
        map_ids(0, 0)


def test_no_module_of_the_spawner_works_at_each_fork() -> None:
    code = "import sys, prorl_gym.sandbox.backends.spawner_main; print('random' in sys.modules)"  # it seeds itself anew
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_launch_survives_the_way() -> None:
    spec = SandboxSpec("/image", "/w", {"A": "ü"}, (Mount("/a:b", "/c"),), SandboxLimits(memory=1))
    launch = LaunchRequest("id", "apptainer", spec, "/usr/bin/apptainer", ("/top", "/base"))
    assert LaunchRequest.from_json(launch.to_json()) == launch


def test_only_kept_descriptors_stay_open() -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            kept, dropped = os.open("/dev/null", os.O_RDONLY), os.open("/dev/null", os.O_RDONLY)
            close_all_except(0, kept)
            os.fstat(kept)
            try:
                os.fstat(dropped)
            except OSError as error:
                status = 0 if error.errno == errno.EBADF else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_refused_overlay_leaves_usr_read_only_and_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, volatile: bool) -> str:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(host_root, "mount_overlay", refuse)
    (tmp_path / "root").mkdir()
    binds, detail = host_root.fill_host_root(str(tmp_path))
    usr = next(bind for bind in binds if bind.target == "/usr")
    assert (usr.source, usr.read_only) == ("/usr", True)
    assert detail.startswith("/usr is read-only: the kernel refuses")


def test_etc_has_nothing_but_the_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_root, "mount_overlay", lambda *_, volatile: "/usr")
    (tmp_path / "root").mkdir()
    host_root.fill_host_root(str(tmp_path))
    etc = tmp_path / "root/etc"
    allowed = {*host_root.COPIED_FILES, *host_root.BOUND_DIRECTORIES, *host_root.SYNTHETIC_FILES, "mtab", "os-release"}
    found = {str(path.relative_to(etc)) for path in etc.rglob("*") if not path.is_dir() or not any(path.iterdir())}
    assert found <= {*allowed, "ssl"}
    assert not {name for name in found if "shadow" in name or "profile" in name}
    assert (etc / "gitconfig").read_text("ascii") == host_root.SYNTHETIC_FILES["gitconfig"]


def test_os_error_is_described_with_its_file() -> None:
    error = describe_setup_error(FileNotFoundError(errno.ENOENT, "No such file or directory", "/x"))
    assert error["kind"] == "sandbox_unavailable" and "No such file or directory (/x)" in error["what"]
