"""Which disks are refused as storage of a root, and why."""

import os
from dataclasses import replace
from errno import ENOTSUP
from pathlib import Path

import pytest

from prorl_gym.errors import SandboxError
from prorl_gym.sandbox.protocol import SandboxLimits, SandboxSpec
from prorl_gym.sandbox.spawner import rootfs
from prorl_gym.sandbox.spawner.rootfs import (
    check_storage,
    describe_limitations,
    file_system_of,
    has_user_xattrs,
    unsupported_upper,
)
from prorl_gym.sandbox.spawner.spawner_protocol import LaunchRequest

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
