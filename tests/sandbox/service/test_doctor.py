"""Every cause that `prorl-gym doctor` knows, simulated as facts; the facts of this machine; the command."""

import errno
import json
import os
import stat
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from sandbox_support import kernel_has_user_namespaces, sandbox_uid
from typer.testing import CliRunner

from prorl_gym.cli import doctor_report
from prorl_gym.cli.main import app
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import ProbeResult
from prorl_gym.sandbox.service.host_facts import (
    ApptainerFacts,
    DirectoryFacts,
    Finding,
    HostFacts,
    collect_host_facts,
    run_checks,
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
    cgroups="/sys/fs/cgroup/unit",
    apptainer=ApptainerFacts("/usr/bin/apptainer", "apptainer version 1.4.5"),
    limits={"open_files": 4096, "root_size": 2 << 30},
)


def complaints(facts: HostFacts) -> list[Finding]:
    return [finding for finding in run_checks(facts) if finding.verdict in ("no", "weak")]


def test_a_good_machine_has_nothing_to_complain_of() -> None:
    assert complaints(GOOD) == []
    assert {finding.name for finding in run_checks(GOOD)} > {"kernel", "user namespaces", "scratch", "image store"}


def changed(name: str, verdict: str, detail: str, fix: str, **facts: Any) -> tuple[HostFacts, str, str, str, str]:
    """Return the good machine with some facts changed, and what is to be found: name, verdict, parts of the text."""
    return replace(GOOD, **facts), name, verdict, detail, fix


APPARMOR, NETWORKS = "kernel.apparmor_restrict_unprivileged_userns", "user.max_net_namespaces"
NFS, LUSTRE = replace(DISK, file_system="nfs4"), replace(DISK, file_system="lustre")
DEEP = replace(DISK, path="/" + "d" * 90)
CAUSES = {
    "old kernel": changed("kernel", "no", "5.10.0-el8", "apptainer-plain", kernel=(5, 10), release="5.10.0-el8"),
    "AppArmor": changed(
        *("user namespaces", "no", "apparmor_restrict", f"{APPARMOR}=0"),
        user_namespace_errno=errno.EACCES,
        sysctls={APPARMOR: "1"},
    ),
    "kernel built without": changed(
        *("user namespaces", "no", "EINVAL", "CONFIG_USER_NS"), user_namespace_errno=errno.EINVAL
    ),
    "few namespaces": changed(
        *("namespaces", "weak", f"{NETWORKS} is 64", f"sysctl -w {NETWORKS}=65536"), sysctls={NETWORKS: "64"}
    ),
    "no fuse": changed("/dev/fuse", "weak", "missing or closed", "modprobe fuse", fuse=False),
    "scratch on NFS": changed(
        *("scratch", "weak", "is on NFS", "Set sandbox.scratch to a directory on a local disk"), scratch=NFS
    ),
    "store on Lustre": changed("image store", "no", "is on Lustre", "Set sandbox.images.directory", store=LUSTRE),
    "read-only scratch": changed(
        *("scratch", "no", "read-only file system", "Set sandbox.scratch"), scratch=replace(DISK, read_only=True)
    ),
    "no bytes left": changed(
        *("scratch", "weak", "5 MiB left (disk or quota)", "1 GiB is little"), scratch=replace(DISK, free_bytes=5 << 20)
    ),
    "no inodes left": changed(
        *("image store", "weak", "7 inodes left", "inode quota"), store=replace(DISK, free_inodes=7)
    ),
    "noexec scratch": changed(
        *("scratch", "weak", "mounted noexec", "without noexec"), scratch=replace(DISK, noexec=True)
    ),
    "little memory": changed("memory", "weak", "1 GiB of memory are free", "root_size", free_memory=1 << 30),
    "few open files": changed("open files", "weak", "is 1024", "ulimit -Hn", open_files=1024),
    "few processes": changed("processes", "weak", "100 processes", "ulimit -Hu", processes=100),
    "long socket path": changed("socket path", "no", "the kernel takes 107", "at most 61 bytes", scratch=DEEP),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_is_named_with_its_fix(cause: str) -> None:
    facts, name, verdict, detail, fix = CAUSES[cause]
    found = complaints(facts)
    assert [(finding.name, finding.verdict) for finding in found] == [(name, verdict)]
    assert detail in found[0].detail and fix in found[0].fix
    assert "\n" not in found[0].detail + found[0].fix


def finding(name: str, **facts: Any) -> Finding:
    """Return what is found under a name on a good machine with some facts changed."""
    (found,) = [one for one in run_checks(replace(GOOD, **facts)) if one.name == name]
    return found


def test_apptainer_is_shown_with_version_and_setuid_mode() -> None:
    starter = "/usr/libexec/apptainer/bin/starter-suid"
    setuid = finding("Apptainer", apptainer=ApptainerFacts("/usr/bin/apptainer", "apptainer version 1.4.5", starter))
    assert setuid.detail == f"apptainer version 1.4.5 at /usr/bin/apptainer, setuid ({starter})"
    assert finding("Apptainer").detail == "apptainer version 1.4.5 at /usr/bin/apptainer, not setuid"
    assert finding("Apptainer", apptainer=None).detail == "is not installed; 'userns' needs none."


def test_cgroups_are_said_and_why_there_are_none() -> None:
    given = finding("cgroups", cgroups="/sys/fs/cgroup/unit")
    bounded = "the kernel bounds memory: one for each sandbox, below /sys/fs/cgroup/unit"
    assert (given.verdict, given.detail) == ("yes", bounded)
    refused = finding("cgroups", cgroups=CgroupsUnavailable("/sys/fs/cgroup has no memory controller", "Delegate one."))
    assert refused.verdict == "info"
    assert refused.detail.endswith("can read: /sys/fs/cgroup has no memory controller. Delegate one.")


def test_a_kernel_that_does_not_ask_about_shared_memory_is_weak_without_cgroups() -> None:
    old = replace(GOOD, kernel=(5, 4), release="5.4.0")
    assert not [found for found in run_checks(old) if found.name == "shared memory"]
    found = finding("shared memory", kernel=(5, 4), release="5.4.0", cgroups=CgroupsUnavailable("none"))
    assert (found.verdict, "5.4.0" in found.detail) == ("weak", True)


def test_this_machine(tmp_path: Path) -> None:
    facts = collect_host_facts(SandboxConfig(scratch=tmp_path / "not" / "there"), tmp_path)
    assert facts.uid == sandbox_uid()
    assert facts.kernel >= (3, 10) and facts.release.startswith(f"{facts.kernel[0]}.")
    assert (facts.user_namespace_errno == 0) == kernel_has_user_namespaces()
    assert not facts.scratch.exists and facts.store is not None and facts.store.exists
    assert facts.scratch.file_system == facts.store.file_system != ""
    assert facts.store.free_bytes > 0 and facts.free_memory > 0
    assert facts.scratch.path == str(tmp_path / "not" / "there")


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


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[ProbeResult]:
    """Results that the doctor's probes of backends have, on a good machine."""
    results: list[ProbeResult] = []

    async def probe_all(config: SandboxConfig) -> list[ProbeResult]:
        return results

    monkeypatch.setattr(doctor_report, "probe_backends", probe_all)
    monkeypatch.setattr(doctor_report, "collect_host_facts", lambda *_: GOOD)
    return results


@pytest.mark.parametrize(("works", "code"), [(True, 0), (False, 1)])
def test_command_prints_json_and_fails_when_nothing_works(probes: list[ProbeResult], works: bool, code: int) -> None:
    probes += [ProbeResult("userns", works, "Linux" if works else "refused.", "" if works else "Do this.")]
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == code
    report = json.loads(result.stdout)
    assert report["facts"]["scratch"]["file_system"] == "ext4"
    assert report["findings"][-1]["name"] == "sandbox: userns"
    assert report["findings"][-1]["verdict"] == ("yes" if works else "no")


def test_table_has_a_fix_below_each_complaint(probes: list[ProbeResult]) -> None:
    probes += [ProbeResult("userns", True, "Linux 6.1")]
    probes += [ProbeResult("apptainer", False, "Apptainer is not installed.", "Install it.")]
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert "sandbox: userns yes Linux 6.1" in lines
    assert lines[-2:] == ["sandbox: apptainer no Apptainer is not installed.", "Install it."]


@pytest.mark.parametrize("given", [None, "/a/store"])
def test_the_store_that_images_go_to_is_looked_at(
    probes: list[ProbeResult], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | None
) -> None:
    seen: list[Path | None] = []

    def gather(_: SandboxConfig, store: Path | None) -> HostFacts:
        seen.append(store)
        return GOOD

    monkeypatch.setattr(doctor_report, "collect_host_facts", gather)
    monkeypatch.setattr("prorl_gym.sandbox.service.python_packages.host_pythons", tuple[str, ...])
    monkeypatch.setenv("PRORL_GYM_CACHE", str(tmp_path))
    CliRunner().invoke(app, ["doctor", *(["--store", given] if given else [])])
    assert seen == [Path(given) if given else tmp_path / "store"]


def not_installed(name: str) -> None:
    raise PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("name", "value", "verdict", "detail", "fix"),
    [
        ("find_inaccessible", lambda *_: None, "yes", f"{version('ipython')} for sandboxes with Python 3.", ""),
        (
            *("distribution", not_installed, "weak"),
            *("the python tool is the standard library's console", "Run `pip install ipython`."),
        ),
        (
            *("find_inaccessible", lambda *_: Path("/closed"), "weak"),
            *("/closed is closed to the sandboxes' uid", "Set sandbox.cache"),
        ),
    ],
    ids=["found", "missing", "closed cache"],
)
def test_ipython_is_said_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object, verdict: str, detail: str, fix: str
) -> None:
    monkeypatch.setattr("prorl_gym.sandbox.service.python_packages.host_pythons", tuple[str, ...])
    monkeypatch.setattr(f"prorl_gym.sandbox.service.python_packages.{name}", value)
    found = doctor_report.ipython_finding(SandboxConfig(cache=tmp_path))
    assert found.verdict == verdict and detail in found.detail and fix in found.fix
