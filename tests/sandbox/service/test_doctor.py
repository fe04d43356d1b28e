"""Every cause that `prorl-gym doctor` knows, simulated as facts; the facts of this machine; the command."""

import errno
import json
import os
import stat
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from sandbox_support import kernel_has_user_namespaces, sandbox_uid
from typer.testing import CliRunner

from prorl_gym.cli import doctor_report
from prorl_gym.cli.main import app
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import ProbeResult
from prorl_gym.sandbox.service.doctor_checks import Finding, run_checks
from prorl_gym.sandbox.service.host_facts import (
    ApptainerFacts,
    DirectoryFacts,
    HostFacts,
    collect_host_facts,
    describe_directory,
)
from prorl_gym.sandbox.spawner.cgroup import CgroupsUnavailable

DISK = DirectoryFacts("/var/tmp/s", True, "ext4", 1 << 40, 10_000_000)
GOOD = HostFacts(
    kernel=(6, 1),
    release="6.1.0",
    uid=1000,
    sysctls={"user.max_user_namespaces": "65536"},
    user_namespace_errno=0,
    fuse=True,
    scratch=DISK,
    store=replace(DISK, path="/var/cache/images"),
    open_files=1 << 20,
    processes=-1,
    free_memory=64 << 30,
    socket_directory="/var/tmp/s",
    cgroups="/sys/fs/cgroup/unit",
    apptainer=ApptainerFacts("/usr/bin/apptainer", "apptainer version 1.4.5"),
    limits={"open_files": 4096, "root_size": 2 << 30},
)


def complaints(facts: HostFacts) -> list[Finding]:
    return [finding for finding in run_checks(facts) if finding.verdict in ("no", "weak")]


def test_a_good_machine_has_nothing_to_complain_of() -> None:
    assert complaints(GOOD) == []
    assert {finding.name for finding in run_checks(GOOD)} > {"kernel", "user namespaces", "scratch", "image store"}


CAUSES: dict[str, tuple[HostFacts, str, str, str, str]] = {
    "old kernel": (
        replace(GOOD, kernel=(5, 10), release="5.10.0-el8"),
        "kernel",
        "no",
        "5.10.0-el8",
        "apptainer-plain",
    ),
    "namespaces off by sysctl": (
        replace(GOOD, user_namespace_errno=errno.EPERM, sysctls={"kernel.unprivileged_userns_clone": "0"}),
        *("user namespaces", "no", "kernel.unprivileged_userns_clone is 0", "unprivileged_userns_clone=1"),
    ),
    "no namespaces at all": (
        replace(GOOD, user_namespace_errno=errno.ENOSPC, sysctls={"user.max_user_namespaces": "0"}),
        *("user namespaces", "no", "user.max_user_namespaces is 0", "max_user_namespaces=65536"),
    ),
    "AppArmor": (
        replace(GOOD, user_namespace_errno=errno.EACCES, sysctls={"kernel.apparmor_restrict_unprivileged_userns": "1"}),
        *("user namespaces", "no", "apparmor_restrict", "apparmor_restrict_unprivileged_userns=0"),
    ),
    "seccomp of a container": (
        replace(GOOD, user_namespace_errno=errno.EPERM),
        *("user namespaces", "no", "refused here (EPERM)", "seccomp=unconfined"),
    ),
    "kernel built without": (
        replace(GOOD, user_namespace_errno=errno.EINVAL),
        *("user namespaces", "no", "EINVAL", "CONFIG_USER_NS"),
    ),
    "few namespaces": (
        replace(GOOD, sysctls={"user.max_net_namespaces": "64"}),
        *("namespaces", "weak", "user.max_net_namespaces is 64", "sysctl -w user.max_net_namespaces=65536"),
    ),
    "no fuse": (replace(GOOD, fuse=False), "/dev/fuse", "weak", "missing or closed", "modprobe fuse"),
    "scratch on NFS": (
        replace(GOOD, scratch=replace(DISK, file_system="nfs4")),
        *("scratch", "weak", "is on NFS", "Set sandbox.scratch to a directory on a local disk"),
    ),
    "scratch on an overlay": (
        replace(GOOD, scratch=replace(DISK, file_system="overlay")),
        *("scratch", "weak", "is on another overlay", "local disk"),
    ),
    "store on Lustre": (
        replace(GOOD, store=replace(DISK, file_system="lustre")),
        *("image store", "no", "is on Lustre", "Set sandbox.images.directory"),
    ),
    "store on FUSE": (
        replace(GOOD, store=replace(DISK, file_system="fuse.sshfs")),
        *("image store", "no", "is on FUSE", "Set sandbox.images.directory"),
    ),
    "read-only scratch": (
        replace(GOOD, scratch=replace(DISK, read_only=True)),
        *("scratch", "no", "read-only file system", "Set sandbox.scratch"),
    ),
    "no bytes left": (
        replace(GOOD, scratch=replace(DISK, free_bytes=5 << 20)),
        *("scratch", "weak", "5 MiB left (disk or quota)", "1 GiB is little"),
    ),
    "no inodes left": (
        replace(GOOD, store=replace(DISK, free_inodes=7)),
        *("image store", "weak", "7 inodes left", "inode quota"),
    ),
    "noexec scratch": (
        replace(GOOD, scratch=replace(DISK, noexec=True)),
        *("scratch", "weak", "mounted noexec", "without noexec"),
    ),
    "little memory": (replace(GOOD, free_memory=1 << 30), "memory", "weak", "1 GiB of memory are free", "root_size"),
    "few open files": (replace(GOOD, open_files=1024), "open files", "weak", "is 1024", "ulimit -Hn"),
    "few processes": (replace(GOOD, processes=100), "processes", "weak", "100 processes", "ulimit -Hu"),
    "long socket path": (
        replace(GOOD, socket_directory="/" + "d" * 90),
        *("socket path", "no", "the kernel takes 107", "at most 61 bytes"),
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_is_named_with_its_fix(cause: str) -> None:
    facts, name, verdict, detail, fix = CAUSES[cause]
    found = complaints(facts)
    assert [(finding.name, finding.verdict) for finding in found] == [(name, verdict)]
    assert detail in found[0].detail and fix in found[0].fix
    assert "\n" not in found[0].detail + found[0].fix


def test_apptainer_is_shown_with_version_and_setuid_mode() -> None:
    def line(found: ApptainerFacts | None) -> str:
        return next(
            finding.detail for finding in run_checks(replace(GOOD, apptainer=found)) if finding.name == "Apptainer"
        )

    starter = "/usr/libexec/apptainer/bin/starter-suid"
    setuid = ApptainerFacts("/usr/bin/apptainer", "apptainer version 1.4.5", starter)
    assert line(setuid) == f"apptainer version 1.4.5 at /usr/bin/apptainer, setuid ({starter})"
    assert line(GOOD.apptainer) == "apptainer version 1.4.5 at /usr/bin/apptainer, not setuid"
    assert line(None) == "is not installed; 'userns' needs none."


def test_cgroups_are_said_and_why_there_are_none() -> None:
    def line(facts: HostFacts) -> Finding:
        return next(finding for finding in run_checks(facts) if finding.name == "cgroups")

    given = line(replace(GOOD, cgroups="/sys/fs/cgroup/unit"))
    bounded = "the kernel bounds memory: one for each sandbox, below /sys/fs/cgroup/unit"
    assert (given.verdict, given.detail) == ("yes", bounded)
    refused = line(
        replace(GOOD, cgroups=CgroupsUnavailable("/sys/fs/cgroup has no memory controller", "Delegate one."))
    )
    assert refused.verdict == "info"
    assert refused.detail.endswith("can read: /sys/fs/cgroup has no memory controller. Delegate one.")


def test_a_kernel_that_does_not_ask_about_shared_memory_is_weak_without_cgroups() -> None:
    old = replace(GOOD, kernel=(5, 4), release="5.4.0")
    assert not [finding for finding in run_checks(old) if finding.name == "shared memory"]
    (found,) = [
        finding
        for finding in run_checks(replace(old, cgroups=CgroupsUnavailable("none")))
        if finding.name == "shared memory"
    ]
    assert (found.verdict, "5.4.0" in found.detail) == ("weak", True)


def test_this_machine(tmp_path: Path) -> None:
    facts = collect_host_facts(SandboxConfig(scratch=tmp_path / "not" / "there"), tmp_path)
    assert facts.uid == sandbox_uid()
    assert facts.kernel >= (3, 10) and facts.release.startswith(f"{facts.kernel[0]}.")
    assert (facts.user_namespace_errno == 0) == kernel_has_user_namespaces()
    assert not facts.scratch.exists and facts.store is not None and facts.store.exists
    assert facts.scratch.file_system == facts.store.file_system != ""
    assert facts.store.free_bytes > 0 and facts.free_memory > 0
    assert facts.socket_directory == str(tmp_path / "not" / "there")


def test_file_system_is_the_mount_tables() -> None:
    assert describe_directory(Path("/proc")).file_system == "proc"
    assert describe_directory(Path("/dev/shm")).file_system == "tmpfs"


def test_setuid_starter_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starter = tmp_path / "libexec/apptainer/bin/starter-suid"
    starter.parent.mkdir(parents=True)
    starter.write_text("")
    program = tmp_path / "apptainer"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = buildcfg ] && echo {tmp_path}/libexec || echo singularity-ce version 4.1\n'
    )
    program.chmod(0o755)
    real = os.stat

    def as_root_made_it(path: str, **options: bool) -> os.stat_result:
        found = real(path, **options)
        if path != str(starter):
            return found
        return os.stat_result((found.st_mode | stat.S_ISUID, *found[1:4], 0, *found[5:]))

    monkeypatch.setattr(os, "stat", as_root_made_it)
    found = collect_host_facts(SandboxConfig(scratch=tmp_path, apptainer=program)).apptainer
    assert found == ApptainerFacts(str(program), "singularity-ce version 4.1", str(starter))


@pytest.mark.parametrize(("works", "code"), [(True, 0), (False, 1)])
def test_command_prints_json_and_fails_when_nothing_works(
    monkeypatch: pytest.MonkeyPatch, works: bool, code: int
) -> None:
    async def probe_all(config: SandboxConfig) -> list[ProbeResult]:
        return [ProbeResult("userns", works, "Linux" if works else "refused.", "" if works else "Do this.")]

    monkeypatch.setattr(doctor_report, "probe_backends", probe_all)
    monkeypatch.setattr(doctor_report, "collect_host_facts", lambda *_: GOOD)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == code
    report = json.loads(result.stdout)
    assert report["facts"]["scratch"]["file_system"] == "ext4"
    assert report["findings"][-1]["name"] == "sandbox: userns"
    assert report["findings"][-1]["verdict"] == ("yes" if works else "no")


def test_table_has_a_fix_below_each_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    async def probe_all(config: SandboxConfig) -> list[ProbeResult]:
        return [
            ProbeResult("userns", True, "Linux 6.1"),
            ProbeResult("apptainer", False, "Apptainer is not installed.", "Install it."),
        ]

    monkeypatch.setattr(doctor_report, "probe_backends", probe_all)
    monkeypatch.setattr(doctor_report, "collect_host_facts", lambda *_: GOOD)
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert "sandbox: userns yes Linux 6.1" in lines
    assert lines[-2:] == ["sandbox: apptainer no Apptainer is not installed.", "Install it."]


@pytest.mark.parametrize("given", [None, "/a/store"])
def test_the_store_that_images_go_to_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | None
) -> None:
    seen: list[Path | None] = []

    def gather(_: SandboxConfig, store: Path | None) -> HostFacts:
        seen.append(store)
        return GOOD

    async def probe_all(config: SandboxConfig) -> list[ProbeResult]:
        return [ProbeResult("userns", True, "Linux 6.1")]

    monkeypatch.setattr(doctor_report, "collect_host_facts", gather)
    monkeypatch.setattr(doctor_report, "probe_backends", probe_all)
    monkeypatch.setattr("prorl_gym.sandbox.service.python_packages.host_pythons", tuple[str, ...])
    monkeypatch.setenv("PRORL_GYM_CACHE", str(tmp_path))
    CliRunner().invoke(app, ["doctor", *(["--store", given] if given else [])])
    assert seen == [Path(given) if given else tmp_path / "store"]


def test_ipython_is_found_with_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_gym.sandbox.service.python_packages.host_pythons", tuple[str, ...])
    monkeypatch.setattr("prorl_gym.sandbox.service.python_packages.find_inaccessible", lambda *_: None)
    found = doctor_report.ipython_finding(SandboxConfig(cache=tmp_path))
    assert found.verdict == "yes" and found.detail.startswith(f"{version('ipython')} for sandboxes with Python 3.")


def test_missing_ipython_is_said_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_gym.sandbox.service.python_packages.IPYTHON", "prorl-no-such-package")
    found = doctor_report.ipython_finding(SandboxConfig(cache=tmp_path))
    assert found.verdict == "weak" and "the python tool is the standard library's console" in found.detail
    assert found.fix == "Run `pip install ipython`."


def test_closed_cache_is_said_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_gym.sandbox.service.python_packages.host_pythons", tuple[str, ...])
    monkeypatch.setattr("prorl_gym.sandbox.service.python_packages.find_inaccessible", lambda *_: Path("/closed"))
    found = doctor_report.ipython_finding(SandboxConfig(cache=tmp_path))
    assert found.verdict == "weak" and "/closed is closed to the sandboxes' uid" in found.detail
    assert "Set sandbox.cache" in found.fix
