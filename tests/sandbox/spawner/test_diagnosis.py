"""A "no" of the kernel, in words that end with what to do."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sandbox_support import kernel_has_user_namespaces

from prorl_gym.sandbox.spawner import namespaces
from prorl_gym.sandbox.spawner.namespaces import explain_user_namespaces

# A kernel that refuses: a user namespace in which none may be made, with the service as an ordinary uid in it.
REFUSING = """
import asyncio, os, sys
from pathlib import Path
from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.spawner import kernel_files
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.backend_selection import open_backend
from prorl_gym.sandbox.config import SandboxConfig
uid, gid = os.geteuid(), os.getegid()
syscalls.unshare(syscalls.CLONE_NEWUSER)
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"1000 {uid} 1")
Path("/proc/self/gid_map").write_text(f"1000 {gid} 1")
kernel_files.forbid_user_namespaces()
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
def test_each_cause_has_its_fix(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], number: int, what: str, fix: str
) -> None:
    monkeypatch.setattr(namespaces, "read_sysctl", settings.get)
    found = explain_user_namespaces(number)
    assert what in found.what and fix in found.fix


def test_sysctl_of_another_kernel_is_absent() -> None:
    assert namespaces.read_sysctl("kernel.no_such_setting") is None
    assert namespaces.read_sysctl("kernel.ostype") == "Linux"
