"""The steps below the backends, one by one; what is refused by the kernel, in words that end with what to do."""

import errno
import os
import subprocess
import sys
from dataclasses import replace
from errno import ENOTSUP
from pathlib import Path

import pytest
from sandbox_support import kernel_has_user_namespaces

from prorl_gym.errors import SandboxError
from prorl_gym.sandbox.guest.fork_exec import close_all_except
from prorl_gym.sandbox.protocol import Mount, SandboxLimits, SandboxSpec
from prorl_gym.sandbox.spawner import rootfs
from prorl_gym.sandbox.spawner.namespaces import describe_setup_error, explain_user_namespaces, map_ids, read_sysctl
from prorl_gym.sandbox.spawner.rootfs import (
    check_storage,
    describe_limitations,
    file_system_of,
    has_user_xattrs,
    unsupported_upper,
)
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

    monkeypatch.setattr(rootfs, "mount_overlay", refuse)
    (tmp_path / "root").mkdir()
    binds, detail = rootfs.fill_host_root(str(tmp_path))
    usr = next(bind for bind in binds if bind.target == "/usr")
    assert (usr.source, usr.read_only) == ("/usr", True)
    assert detail.startswith("/usr is read-only: the kernel refuses")


def test_etc_has_nothing_but_the_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rootfs, "mount_overlay", lambda *_, volatile: "/usr")
    (tmp_path / "root").mkdir()
    rootfs.fill_host_root(str(tmp_path))
    etc = tmp_path / "root/etc"
    allowed = {*rootfs.COPIED_FILES, *rootfs.BOUND_DIRECTORIES, *rootfs.SYNTHETIC_FILES, "mtab", "os-release"}
    found = {str(path.relative_to(etc)) for path in etc.rglob("*") if not path.is_dir() or not any(path.iterdir())}
    assert found <= {*allowed, "ssl"}
    assert not {name for name in found if "shadow" in name or "profile" in name}
    assert (etc / "gitconfig").read_text("ascii") == rootfs.SYNTHETIC_FILES["gitconfig"]


def test_os_error_is_described_with_its_file() -> None:
    error = describe_setup_error(FileNotFoundError(errno.ENOENT, "No such file or directory", "/x"))
    assert error["kind"] == "sandbox_unavailable" and "No such file or directory (/x)" in error["what"]


ON_DISK = LaunchRequest("id", "userns", SandboxSpec(image="host", limits=SandboxLimits(root_on="disk")))
BASE = "/scratch/id/root"


@pytest.mark.parametrize(
    ("kind", "name"),
    [("nfs4", "NFS"), ("lustre", "Lustre"), ("fuse.sshfs", "FUSE"), ("overlay", "another overlay"), ("gpfs", "GPFS")],
)
def test_shared_disk_is_refused(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def claim(_: str) -> str:
        return kind

    monkeypatch.setattr(rootfs, "file_system_of", claim)
    with pytest.raises(SandboxError) as caught:
        check_storage(ON_DISK, BASE)
    assert caught.value.what == (
        f"limits.root_on: disk: /scratch is on {name}, which cannot take the changes of an overlay."
    )
    assert "sandbox.scratch" in caught.value.fix


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "unknown"])
def test_local_disk_may_serve(kind: str) -> None:
    assert unsupported_upper(kind) is None


def test_root_in_memory_asks_nothing_of_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> str:
        pytest.fail("was asked")

    monkeypatch.setattr(rootfs, "file_system_of", fail)
    check_storage(replace(ON_DISK, spec=SandboxSpec()), BASE)


def test_file_system_without_attributes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(ENOTSUP, os.strerror(ENOTSUP))

    assert has_user_xattrs(str(tmp_path)) and describe_limitations(str(tmp_path)) == "" and os.listxattr(tmp_path) == []
    monkeypatch.setattr(os, "setxattr", refuse)
    assert not has_user_xattrs(str(tmp_path))
    assert "limits.root_on: disk" in describe_limitations(str(tmp_path))


def test_file_system_is_the_mount_tables() -> None:
    assert (file_system_of("/proc"), file_system_of("/dev/shm")) == ("proc", "tmpfs")


# A kernel that refuses: a user namespace in which none may be made, with the service as an ordinary uid in it.
REFUSING = """
import asyncio, os, sys
from pathlib import Path
from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.backend_selection import open_backend
from prorl_gym.sandbox.config import SandboxConfig
uid, gid = os.geteuid(), os.getegid()
syscalls.unshare(syscalls.CLONE_NEWUSER)
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"1000 {uid} 1")
Path("/proc/self/gid_map").write_text(f"1000 {gid} 1")
Path("/proc/sys/user/max_user_namespaces").write_text("0")
asyncio.run(open_backend(SandboxConfig(scratch=Path(sys.argv[1]))))
"""


@pytest.mark.skipif(not kernel_has_user_namespaces(), reason="needs user namespaces to take them away")
@pytest.mark.slow
def test_kernel_without_user_namespaces_is_one_clear_message(ground: Path) -> None:
    command = [sys.executable, "-c", REFUSING, str(ground / f"refusing-{os.getpid()}")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode != 0
    assert result.stderr.splitlines()[-2:] == [
        "prorl_gym.errors.SandboxError: no sandbox backend works here: "
        "this kernel refuses user namespaces: user.max_user_namespaces is 0.",
        "As root: sysctl -w user.max_user_namespaces=65536 (and put it into /etc/sysctl.d to keep it).",
    ]


@pytest.mark.parametrize(
    ("settings", "number", "what", "fix"),
    [
        (
            {"kernel.apparmor_restrict_unprivileged_userns": "1", "user.max_user_namespaces": "100"},
            errno.EACCES,
            "kernel.apparmor_restrict_unprivileged_userns is 1",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        (
            {"kernel.unprivileged_userns_clone": "0"},
            errno.EPERM,
            "kernel.unprivileged_userns_clone is 0",
            "sysctl -w kernel.unprivileged_userns_clone=1",
        ),
        ({"user.max_user_namespaces": "7"}, errno.ENOSPC, "user.max_user_namespaces is 7", "=65536"),
        ({"user.max_user_namespaces": "7"}, errno.EPERM, "refused here (EPERM)", "seccomp=unconfined"),
        ({}, errno.EINVAL, "(EINVAL)", "CONFIG_USER_NS"),
    ],
)
def test_each_cause_has_its_fix(settings: dict[str, str], number: int, what: str, fix: str) -> None:
    found = explain_user_namespaces(number, settings.get)
    assert what in found.what and fix in found.fix


def test_sysctl_of_another_kernel_is_absent() -> None:
    assert read_sysctl("kernel.no_such_setting") is None
    assert read_sysctl("kernel.ostype") == "Linux"
